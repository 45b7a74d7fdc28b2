"""Models of makers' own types by their language models: each as that one alone, and what is beside it as it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from modelexport.errors import PlanError
from modelexport.exporting import export
from modelexport.models.aliases import LANGUAGE_TYPES, language_type, parts
from modelexport.models.architecture import family_of, has_part, known_model_types, language_config
from tests.helpers.models import copy_checkpoint, make_llama
from tests.helpers.tiny_models import tiny_checkpoint

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore")]  # transformers warns of many things

VERSIONS = [
    (kind, version, known)
    for kind, found in LANGUAGE_TYPES.items()
    for version, known in ([(None, found)] if isinstance(found, str) else found.items())
]


def described(kind: str, version: str | None) -> dict[str, Any]:
    return {"model_type": kind} | ({} if version is None else {"version": version})


@pytest.mark.parametrize(("kind", "version", "known"), VERSIONS)
def test_the_table_leads_to_types_that_are_known(kind: str, version: str | None, known: str) -> None:
    assert known in known_model_types()
    assert kind not in known_model_types()
    config = described(kind, version)
    assert language_type(config) == known
    assert has_part(config)
    assert parts(config) == [{**config, "model_type": known}]


def test_a_version_may_be_a_number_and_others_are_unknown() -> None:
    assert language_type({"model_type": "minicpmv", "version": 2.6}) == "qwen2"
    assert language_type({"model_type": "minicpmv", "version": "9"}) is None
    with pytest.raises(PlanError, match="unknown architecture 'minicpmv'"):
        family_of({"model_type": "minicpmv", "version": "9"})


def test_what_a_part_says_of_its_type_goes_first() -> None:
    own, silent = {"model_type": "qwen3"}, {"hidden_size": 64}
    assert parts({"model_type": "deepseek_vl_v2", "language_config": own}) == [own]
    found = parts({"model_type": "deepseek_vl_v2", "language_config": silent})
    assert found == [{**silent, "model_type": "deepseek_v2"}]


def beside(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors below a prefix, and a tower."""
    tower = {"vision_tower.blocks.0.attn.qkv.weight": torch.full((96, 64), 0.5)}
    return {**{f"{prefix}{name}": tensor for name, tensor in tensors.items()}, **tower}


@pytest.mark.parametrize(("changed", "prefix"), [({"model_type": "minicpmv", "version": 2.5}, "llm."), ({}, "")])
def test_keys_of_the_language_model_may_stand_beside_the_others(
    changed: dict[str, Any], prefix: str, tmp_path: Path
) -> None:
    """MiniCPM-V has its language model below ``llm``, dots.ocr where it would be alone."""
    source = make_llama(kv_heads=2) if changed else tiny_checkpoint("qwen2")
    changed = changed or {"model_type": "dots_ocr", "vision_config": {"hidden_size": 64}}
    whole = copy_checkpoint(
        source, tmp_path / "source", config=changed, tensors=lambda tensors: beside(tensors, prefix)
    )
    for name, model in (("alone", source), ("out", whole)):
        result = export(model=str(model), quant="int4:32", out=str(tmp_path / name), evaluate=False, quiet=True)
    alone, found = (load_file(tmp_path / name / "model.safetensors") for name in ("alone", "out"))
    assert found.keys() == {*(prefix + name for name in alone), "vision_tower.blocks.0.attn.qkv.weight"}
    assert all(torch.equal(found[prefix + name], tensor) for name, tensor in alone.items())
    assert any(kept.startswith("vision_tower.") for kept in result.unquantised)
    assert any(f"{changed['model_type']}: its language model is a" in note for note in result.notes)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {key: written[key] for key in changed} == changed
    assert language_config(written, found)["model_type"] in ("llama", "qwen2")
