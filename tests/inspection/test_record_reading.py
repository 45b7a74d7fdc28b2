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


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Calibrated: a record that has everything."""
    root = tmp_path_factory.mktemp("record")
    text = root / "text.jsonl"
    text.write_text("".join(json.dumps({"input_ids": list(range(i, i + 16))}) + "\n" for i in range(4)))
    export(model=str(make_llama()), out=str(root / "ckpt"), quant="int4:32", algorithm="gptq", calib=str(text), **CALIB)
    return root / "ckpt"


def damaged(exported: Path, directory: Path, where: tuple[str, ...], value: Any) -> Path:
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
    assert record["calibration"]["samples"] == 4
    assert record["output_error"]["after"]


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
    ],
)
def test_what_is_of_another_kind_is_one_sentence(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], where: tuple[str, ...], value: Any, words: str
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


def test_a_record_leaves_out_what_is_of_another_kind_and_says_so() -> None:
    tensors = {"weight": {"dtype": "BF16", "shape": [2, 3]}, "other": {"dtype": "X", "shape": [1]}, "none": 3}
    layer = {"name": "a.0", "index": 0, "modules": {"e.1.w": {"shape": "x", "tensors": tensors}, "b": 5}}
    found = ExportRecord.of(
        {"layers": [3, {"modules": 4}, layer], "sqnr_db": {"x": "good", "y": 3}, "recipe": 3, "changed": "all"}
    )
    assert found.sqnr_db == {"y": 3.0}
    assert [(m.name, m.path, m.label, m.shape) for m in found.modules] == [("a.0.e.1.w", "e.*.w", None, (0,))]
    assert found.modules[0].tensors == (("BF16", 12), ("X", 0))
    assert found.recipe == {}
    assert list(found.problems) == ["changed", "recipe", "sqnr_db"]
    assert ExportRecord.of({}) == ExportRecord()
