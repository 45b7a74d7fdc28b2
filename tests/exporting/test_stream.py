"""quantise(): the tensors of the checkpoint that export() writes, without a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import modelexport
from modelexport.errors import UsageError
from tests.helpers.marks import few
from tests.helpers.models import make_llama
from tests.helpers.tiny_models import tiny_checkpoint

CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"quant": "fp8"}),
    ("llama", {"quant": "int4", "algorithm": "awq+gptq"}),
    ("llama", {"quant": "fp8-static", "kv_cache": "fp8"}),
    ("llama", {"quant": "int4-asym", "format": "awq"}),
    ("llama", {"quant": "nvfp4-wo", "format": "modelopt"}),
    ("qwen3_5_moe", {"quant": "int4", "group_size": 32}),
]


@pytest.mark.parametrize(("kind", "settings"), few(CASES, CASES[1], CASES[5]))
def test_the_tensors_are_those_of_an_export(kind: str, settings: dict[str, Any], tmp_path: Path) -> None:
    text = tmp_path / "samples.jsonl"
    lines = ({"input_ids": [(7 * i + j) % 199 + 3 for j in range(24)]} for i in range(2))
    text.write_text("".join(json.dumps(line) + "\n" for line in lines))
    model = str(make_llama() if kind == "llama" else tiny_checkpoint(kind))
    settings = {"model": model, "calib": str(text), "calib_samples": 2, "calib_length": 16, **settings}
    modelexport.export(out=str(tmp_path / "out"), quiet=True, **settings)
    found = modelexport.quantise(**settings)
    written, given = load_file(tmp_path / "out" / "model.safetensors"), list(found)
    tensors = dict(given)
    assert len(tensors) == len(given), "each once"
    assert tensors.keys() == written.keys()
    for name, tensor in tensors.items():
        assert (tensor.dtype, tensor.shape) == (written[name].dtype, written[name].shape)
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), written[name].reshape(-1).view(torch.uint8)), name
    assert found.config == json.loads((tmp_path / "out" / "config.json").read_text())


def test_a_model_is_quantised_as_it_is_when_asked() -> None:
    """After each step of training: the same object gives the model's weights of that time."""
    config = json.loads((make_llama() / "config.json").read_text())
    model = load_file(make_llama() / "model.safetensors")
    tensors = modelexport.quantise(model=model, config=config, quant="fp8")
    before = dict(tensors)
    name = "model.layers.0.mlp.down_proj"
    model[f"{name}.weight"] *= 2
    after = dict(tensors)
    assert torch.equal(after[f"{name}.weight_scale"], 2 * before[f"{name}.weight_scale"])
    unlike = {each for each in before if not torch.equal(before[each].float(), after[each].float())}
    assert unlike == {f"{name}.weight_scale"}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"out": "ckpt"}, "writes nothing: leave out out, or call modelexport.export"),
        ({"tp": 2}, "whole tensors, in one process: leave out tp"),
        ({"format": "gguf", "quant": "none"}, "--format gguf has others: call modelexport.export"),
        ({"qant": "fp8"}, "unknown key 'qant'"),
    ],
)
def test_what_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        modelexport.quantise(**settings)
