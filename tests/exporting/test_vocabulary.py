"""The head and the embedding, quantised where --quant names them: never else, and by rules that engines read."""

from __future__ import annotations

import filecmp
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from modelexport.cli.summary import summary
from modelexport.errors import PlanError
from modelexport.exporting import export
from modelexport.exporting.result import ExportResult
from modelexport.inspection.diff import diff_checkpoints
from modelexport.inspection.verify import verify_checkpoint
from modelexport.quantization.assignment import Assignment
from modelexport.resharding import reshard
from tests.helpers.marks import few
from tests.helpers.models import make_llama

pytestmark = pytest.mark.timeout(120)

SHAPE: dict[str, Any] = {"hidden": 128, "intermediate": 256, "vocab": 211}
EMBEDDING = "model.embed_tokens"


def run(out: Path, quant: str, *, tied: bool = False, vocab: int = 211, **settings: Any) -> ExportResult:
    model = make_llama(**{**SHAPE, "vocab": vocab}, tied=tied)
    return export(model=str(model), out=str(out), quant=quant, evaluate=False, quiet=True, **settings)


def announced(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return found


def same(one: Path, other: Path) -> bool:
    names = [path.name for path in one.iterdir()]
    return filecmp.cmpfiles(one, other, names, shallow=False) == (names, [], [])


@pytest.mark.parametrize(
    ("pattern", "means"),
    [
        ("lm_head", True),
        ("*lm_head", True),
        ("re:.*lm_head$", True),
        ("*", False),
        ("*head", False),
        ("re:.*", False),
        ("*.lm_head", False),
    ],
)
def test_only_patterns_that_spell_its_name_mean_the_head(pattern: str, means: bool) -> None:
    assert (Assignment.parse(f"{pattern}=int8").of_vocabulary("lm_head") is not None) is means
    assert Assignment.parse("int8").of_vocabulary("lm_head") is None


HEADS = ["int8", "int8-wo", "int4:32", "int4-asym:32", "fp8", "nvfp4-wo", "mxfp4", "mxfp8"]


@pytest.mark.parametrize("number_format", few(HEADS, "int8", "int4:32"))
def test_a_head_is_cut_by_the_vocabulary_without_a_change(tmp_path: Path, number_format: str) -> None:
    """A vocabulary that no number of ranks divides; on one rank, on two, and resharded there and back."""
    quant = f"*=int4:32,lm_head={number_format}"
    run(tmp_path / "1", quant)
    run(tmp_path / "2", quant, tp=2)
    assert same(tmp_path / "1", tmp_path / "2")
    assert verify_checkpoint(tmp_path / "1").ok
    reshard(checkpoint=str(tmp_path / "1"), out=str(tmp_path / "cut"), tp=2, quiet=True)
    assert diff_checkpoints(tmp_path / "1", tmp_path / "cut").equal
    quantization = announced(tmp_path / "1")["quantization_config"]
    targets = [target for group in quantization["config_groups"].values() for target in group["targets"]]
    assert "lm_head" in targets
    assert "lm_head" not in quantization["ignore"]


def test_nothing_else_quantises_the_head(tmp_path: Path) -> None:
    run(tmp_path / "out", "*=int8")
    assert announced(tmp_path / "out")["quantization_config"]["ignore"] == ["lm_head"]
    assert load_file(tmp_path / "out" / "model.safetensors")["lm_head.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("number_format", few(["int4:32", "int8-wo"], "int4:32"))
def test_an_embedding_is_packed_and_decoded(tmp_path: Path, number_format: str) -> None:
    run(tmp_path / "1", f"*=int8,*embed_tokens={number_format}")
    run(tmp_path / "2", f"*=int8,*embed_tokens={number_format}", tp=2)
    assert same(tmp_path / "1", tmp_path / "2")
    assert verify_checkpoint(tmp_path / "1").ok
    groups = announced(tmp_path / "1")["quantization_config"]["config_groups"].values()
    assert [EMBEDDING, "Embedding"] in [group["targets"] for group in groups], "by name, and for who does not tell it"
    export(model=str(tmp_path / "1"), quant="none", out=str(tmp_path / "plain"), evaluate=False, quiet=True)
    found = load_file(tmp_path / "plain" / "model.safetensors")[f"{EMBEDDING}.weight"].float()
    before = load_file(make_llama(**SHAPE) / "model.safetensors")[f"{EMBEDDING}.weight"].float()
    assert 0 < float((found - before).norm() / before.norm()) < 0.15


def test_a_tied_head_becomes_a_tensor_of_its_own(tmp_path: Path) -> None:
    """Alone, or each in its own number format; and the summary says so."""
    result = run(tmp_path / "head", "*=int8,lm_head=int8", tied=True)
    assert announced(tmp_path / "head")["tie_word_embeddings"] is False
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    assert (tensors["lm_head.weight"].dtype, tensors[f"{EMBEDDING}.weight"].dtype) == (torch.int8, torch.bfloat16)
    assert "the head is no longer tied to the embedding" in summary(result)
    assert verify_checkpoint(tmp_path / "head", against=str(make_llama(**SHAPE, tied=True))).ok
    result = run(tmp_path / "embedding", "*=int8,*embed_tokens=int4:32", tied=True, tp=2)
    tensors = load_file(tmp_path / "embedding" / "model.safetensors")
    assert tensors["lm_head.weight"].dtype == torch.bfloat16
    assert "lm_head (head: no longer tied to the embedding" in summary(result)
    assert verify_checkpoint(tmp_path / "embedding", against=str(make_llama(**SHAPE, tied=True))).ok


@pytest.mark.parametrize(("format", "quant"), [("awq", "int4:32"), ("gptq", "int4:32"), ("modelopt", "nvfp4-wo")])
def test_methods_that_say_it(tmp_path: Path, format: str, quant: str) -> None:
    run(tmp_path / "out", f"*={quant},lm_head={quant}", format=format, vocab=208)
    assert verify_checkpoint(tmp_path / "out").ok
    assert "lm_head.weight_packed" not in load_file(tmp_path / "out" / "model.safetensors")


@pytest.mark.parametrize(
    ("quant", "settings", "says"),
    [
        ("*embed_tokens=int8", {}, "model.embed_tokens: engines look rows .* choose int4 or int8-wo"),
        ("*embed_tokens=int4-asym:32", {}, "without zero points"),
        ("*=int4:32,*embed_tokens=int4:32", {"format": "awq"}, "awq checkpoints have unquantised embeddings"),
        ("*=fp8-block,lm_head=fp8-block", {"format": "fp8-block"}, "fp8 checkpoints have unquantised heads"),
        ("lm_head=fp8-block", {}, "lm_head: engines cut a head between any two rows"),
        ("lm_heed=int8", {}, "did you mean"),
    ],
)
def test_what_no_engine_reads_is_refused(tmp_path: Path, quant: str, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        run(tmp_path / "out", quant, **settings)
    assert not (tmp_path / "out").exists()


def test_a_static_head_of_a_calibrated_export_is_refused(tmp_path: Path) -> None:
    """Its inputs are what the last layer gives, which nobody looks at there."""
    settings = {"model": None, "algorithm": "gptq", "calib_samples": 2, "calib_length": 16}
    with pytest.raises(PlanError, match="needs the range of the head's inputs"):
        export(quant="*=int4,lm_head=nvfp4", out=str(tmp_path / "out"), evaluate=False, quiet=True, **settings)
