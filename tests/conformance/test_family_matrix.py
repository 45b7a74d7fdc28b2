"""Every causal language model that transformers knows, exported and loaded again; the results are docs/families.md.

    python -m pytest -m slow tests/conformance/test_family_matrix.py
    MODELEXPORT_WRITE_DOCS=1 python -m pytest -m slow tests/conformance/test_family_matrix.py

The second one writes the page; otherwise each type must be found as its line there says.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from modelexport.models import derived
from modelexport.models.architecture import known_model_types
from tests.conformance._family_matrix import (
    QUANTS,
    SIZES,
    Mismatch,
    compare,
    decode,
    examine,
    exported,
    load,
    logits,
)
from tests.conformance._family_table import (
    DECLARED,
    DOCUMENT,
    PLANNED,
    WHOLE,
    cells_of,
    committed_rows,
    document,
    loads,
    row_of,
    shortened,
    stays,
)
from tests.helpers.marks import few
from tests.helpers.tiny_models import NOT_MADE, causal_types, tiny_checkpoint

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]  # transformers warns of many things

WRITE = os.environ.get("MODELEXPORT_WRITE_DOCS") == "1"
SOME = (
    *("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gemma2", "gemma3_text", "phi3", "glm4", "granite", "olmo2"),
    *("cohere2", "deepseek_v3", "gpt_oss", "gpt_neox", "starcoder2", "gpt2"),  # all of these are declared
    *("apertus", "glm4_moe", "qwen3_5", "falcon_h1", "bert", "musicgen", "zamba2", "minicpm3"),  # these derived
)
TYPES = [kind for kind in causal_types() if kind not in NOT_MADE]
rows: dict[str, str] = {}


def how(kind: str) -> str:
    """Where its family comes from."""
    from transformers import CONFIG_MAPPING

    if CONFIG_MAPPING[kind].model_type in known_model_types():  # gpt-sw3 is saved as gpt2
        return DECLARED
    return PLANNED if derived.model_types()[kind] == derived.PLANNED else WHOLE


def versions() -> str:
    """What the results depend on beside our own code."""
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("transformers", "compressed-tensors"))


def same_versions() -> None:
    """Skip where others are installed than the page was made with: they know other models, and load other things."""
    if DOCUMENT.is_file() and versions() not in DOCUMENT.read_text(encoding="utf-8"):
        pytest.skip(f"docs/families.md is not about {versions()}")


@pytest.mark.parametrize("kind", few(SOME, "gpt_oss", "apertus", "bert"))
def test_a_few_types(tmp_path: Path, kind: str) -> None:
    outcome = examine(kind, tmp_path, quants=("int4",), sizes=(1, 2), sharded=False)
    same_versions()
    cells = cells_of(committed_rows()[kind])
    assert cells["family"] == how(kind)
    assert cells["quantised"] == (shortened(outcome.quantised) or "nothing")
    assert cells["stays, and why"] == stays(outcome.kept)
    assert cells["int4"] == loads("int4", outcome.loads["int4"])


def spoil(directory: Path, tensor: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change one tensor of a checkpoint of one file."""
    tensors = load_file(directory / "model.safetensors")
    tensors[tensor] = change(tensors[tensor]).contiguous()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("tensor", "change", "said"),
    [
        ("model.layers.1.self_attn.q_proj.weight", lambda weight: weight.flip(0), "q_proj.weight has -"),
        ("model.layers.0.input_layernorm.weight", lambda weight: weight + 0.5, "not quantised and yet not the source"),
    ],
    ids=["rows in another order", "another norm"],
)
def test_a_difference_is_found(
    tmp_path: Path, tensor: str, change: Callable[[torch.Tensor], torch.Tensor], said: str
) -> None:
    source = tiny_checkpoint("llama")
    spoil(exported(source, tmp_path / "out", "int8"), tensor, change)
    with pytest.raises(Mismatch, match=said):
        decode(source, tmp_path / "out", tmp_path / "decoded", "int8")


def test_silence_is_found(tmp_path: Path) -> None:
    """A matrix that stays as it is, and that the record does not mention."""
    source = tiny_checkpoint("llama")
    record = exported(source, tmp_path / "out", "int8") / "modelexport.json"
    content = json.loads(record.read_text())
    del content["unquantised"]["lm_head"]
    record.write_text(json.dumps(content))
    with pytest.raises(Mismatch, match=r"lm_head\.weight \[250, 128\] is not quantised, and nothing says why"):
        decode(source, tmp_path / "out", tmp_path / "decoded", "int8")


def test_other_weights_in_transformers_are_found(tmp_path: Path) -> None:
    """Scales that are exchanged leave a checkpoint that loads: its weights are not what was decoded."""
    source = tiny_checkpoint("llama")
    out = exported(source, tmp_path / "out", "int8")
    reference = decode(source, out, tmp_path / "decoded", "int8")
    spoil(out, "model.layers.0.mlp.up_proj.weight_scale", lambda scale: scale.flip(0))
    with torch.no_grad():
        wanted, found = load("llama", reference), load("llama", out)
        expected, got = logits(wanted), logits(found)
    assert compare(wanted, found, expected, got, "int8") == "model.layers.0.mlp.up_proj.weight is not what we decode"
    assert compare(wanted, wanted, expected, expected, "none") == ""
    assert compare(wanted, wanted, expected, expected + 1e-3, "none").startswith("logits differ")


@pytest.mark.slow
@pytest.mark.parametrize("kind", TYPES)
def test_every_type(tmp_path: Path, kind: str) -> None:
    rows[kind] = row_of(examine(kind, tmp_path, QUANTS, SIZES), how(kind))
    if not WRITE:
        same_versions()
        assert rows[kind] == committed_rows().get(kind)


@pytest.mark.slow
def test_write_the_page() -> None:
    """After all others, where asked to: lines of types that were not run stay as they are."""
    if not WRITE:
        pytest.skip("writes docs/families.md with MODELEXPORT_WRITE_DOCS=1")
    assert rows, "no type was examined in this run"
    DOCUMENT.parent.mkdir(exist_ok=True)
    DOCUMENT.write_text(document({**committed_rows(), **rows}, versions()), encoding="utf-8")


def test_the_page_is_whole() -> None:
    """Its totals are what its lines add up to; each type is there, or is said not to be, and why."""
    same_versions()
    found = committed_rows()
    assert DOCUMENT.read_text(encoding="utf-8") == document(found, versions())
    assert sorted([*found, *NOT_MADE]) == sorted(causal_types())
    for kind, row in found.items():
        assert cells_of(row)["family"] == how(kind)
    assert len(found) >= 150
    planned = [kind for kind, plan in derived.model_types().items() if plan == derived.PLANNED]
    assert [kind for kind in planned if kind not in found and kind not in NOT_MADE] == []
