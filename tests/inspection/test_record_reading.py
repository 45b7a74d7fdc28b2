"""A modelexport.json that is damaged, or a stranger's, is one sentence for every command that relies on it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from modelexport.cli import main
from modelexport.errors import CheckpointError
from modelexport.exporting import export
from modelexport.inspection.card import model_card
from modelexport.inspection.record.reading import ExportRecord, read_record
from tests.helpers.models import copy_checkpoint, make_llama

CALIB: dict[str, Any] = {"calib_samples": 4, "calib_length": 16, "evaluate": False, "quiet": True}


ATTENTION = ("layers", 1, "modules", "self_attn.q_proj")


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Calibrated: a record that has everything."""
    root = tmp_path_factory.mktemp("record")
    text = root / "text.jsonl"
    text.write_text("".join(json.dumps({"input_ids": list(range(i, i + 16))}) + "\n" for i in range(4)))
    export(model=str(make_llama()), out=str(root / "ckpt"), quant="int4:32", algorithm="gptq", calib=str(text), **CALIB)
    return root / "ckpt"


def damaged(exported: Path, directory: Path, where: tuple[Any, ...], value: Any) -> Path:
    copied = copy_checkpoint(exported, directory)
    record = copy.deepcopy(json.loads((exported / "modelexport.json").read_text()))
    inner = record
    for key in where[:-1]:
        inner = inner[key]
    inner[where[-1]] = value
    (copied / "modelexport.json").write_text(json.dumps(record))
    return copied


def test_what_an_export_writes_is_read(exported: Path) -> None:
    record = read_record(exported)
    assert record is not None
    assert record.calibration["samples"] == 4
    assert record.output_error_after
    assert {module.label for module in record.modules} == {None, "int4:32"}


@pytest.mark.parametrize(
    ("where", "value", "words"),
    [
        (("layers",), {"a": 1}, "has no 'layers'"),
        (("file_sha256",), 5, "'file_sha256' is a whole number, not an object"),
        (("model",), "llama", "'model' is a text, not an object"),
        (("left_out",), [1], "'left_out' is a list, not an object"),
        (("calibration",), [1], "'calibration' is a list, not an object"),
        (("calibration",), {"a": 1}, "'calibration.samples' is missing, not a whole number"),
        (("calibration", "unseen_experts"), [1], "'calibration.unseen_experts.0' is a whole number, not a text"),
        (("calibration", "notes"), {"x": {}}, "'calibration.notes.x' is an object, not a text"),
        (("calibration", "rare_experts"), [], "'calibration.rare_experts' is a list, not an object"),
        (("output_error", "after"), [1], "'output_error.after' is a list, not an object"),
        (("output_error", "before"), {"\x1b[31m": "x"}, r"'output_error.before.\x1b[31m' is a text, not a number"),
        (("sqnr_db",), {"x": "good"}, "sqnr_db of x is good, no number of decibels"),
        (("changed",), "everything", "'changed' is a text, not a list"),
        (("changed",), [3], "'changed.0' is a whole number, not a text"),
        (("unquantised",), [1], "'unquantised' is a list, not an object"),
        (("evaluation",), {"comparison": {"reference": []}}, "'evaluation.comparison.reference' is a list"),
        (("layers", 0), 3, "'layers.0' is a whole number, not an object"),
        (("layers", 1, "modules"), None, "'layers.1.modules' is missing, not an object"),
        ((*ATTENTION, "kind"), 3, "'layers.1.modules.self_attn.q_proj.kind' is a whole number, not a text"),
        ((*ATTENTION, "shape"), [-1, "x"], "q_proj.shape' is [-1, 'x'], not a list of sizes"),
        ((*ATTENTION, "tensors", "weight_packed", "dtype"), "X9", "weight_packed.dtype': "),
    ],
)
def test_what_is_of_another_kind_is_one_sentence(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], where: tuple[Any, ...], value: Any, words: str
) -> None:
    copied = damaged(exported, tmp_path / "copy", where, value)
    with pytest.raises(CheckpointError) as caught:
        read_record(copied)
    assert words in str(caught.value)
    for line in (["convert", str(copied), "--format", "gptq"], ["reshard", str(copied), "--tp", "2"]):
        assert main([*line, "--out", str(tmp_path / "out"), "--quiet"]) == 1
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert words in err
    assert main(["inspect", str(copied)]) == 0
    assert words in capsys.readouterr().out
    assert main(["verify", str(copied)]) == 1
    assert words in capsys.readouterr().out


def test_what_is_missing_without_harm_is_no_damage(exported: Path, tmp_path: Path) -> None:
    copied = damaged(exported, tmp_path / "copy", ("output_error",), None)
    record = read_record(copied)
    assert record is not None
    assert main(["convert", str(copied), "--format", "gptq", "--out", str(tmp_path / "out"), "--quiet"]) == 0
    copied = damaged(exported, tmp_path / "other", ("file_sha256",), None)
    assert main(["verify", str(copied)]) == 0


def test_the_card_says_no_more_than_is_known(exported: Path) -> None:
    record = json.loads((exported / "modelexport.json").read_text())
    assert "pipeline_tag: text-generation" in model_card(record)
    record["model"]["architecture"] = "Gemma3ForConditionalGeneration"
    assert "pipeline_tag" not in model_card(record), "it takes images, too"
    assert "tensor-parallel ranks" in model_card({**record, "tensor_parallel_sizes": [1, 2]})
    assert "tensor-parallel ranks" not in model_card({**record, "tensor_parallel_sizes": [1]}), "of no plan, or of one"


def test_figures_that_are_not_finite_are_left_out_and_named(exported: Path) -> None:
    record = json.loads((exported / "modelexport.json").read_text())
    found = ExportRecord.of({**record, "sqnr_db": {"x": float("inf"), "y": 3}})
    assert found.sqnr_db == {"y": 3.0}
    assert found.problems == ["1 of sqnr_db are no finite numbers"]
