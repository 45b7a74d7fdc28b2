"""gpt-oss' experts: one linear of them, and what config.json says."""

from __future__ import annotations

import pytest
import torch

from modelexport.errors import CheckpointError
from modelexport.quantization import formats
from modelexport.quantization.methods import mxfp4
from modelexport.quantization.methods.base import ModelQuantization, WeightSlice
from tests.quantization.methods._native import ALL

GPT_OSS = {
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
    "quant_method": "mxfp4",
}


def test_the_configuration_is_read() -> None:
    read = mxfp4.read(GPT_OSS)
    for kept in ("lm_head", "model.layers.0.self_attn.q_proj", "model.layers.11.mlp.router", "model.embed_tokens"):
        assert read.scheme_of(kept) is None
    scheme = read.scheme_of("model.layers.0.mlp.experts")
    assert scheme is not None
    assert scheme.describe() == "fp4 weights per group of 32"
    if "mxfp4-wo" in formats.names():
        assert formats.of_scheme(scheme).name == "mxfp4-wo"
    with pytest.raises(CheckpointError, match="must be a list"):
        mxfp4.read({"modules_to_not_convert": "lm_head"})


def test_one_linear_is_what_compressed_tensors_has_in_blocks() -> None:
    number_format, part = ALL["mxfp4-wo"], WeightSlice.whole((4, 64))
    generator = torch.Generator().manual_seed(0)
    sizes = {"weight_packed": (4, 32), "weight_scale": (4, 2)}
    native = {name: torch.randint(0, 256, size, dtype=torch.uint8, generator=generator) for name, size in sizes.items()}
    stored = mxfp4.encode(number_format, native, part)
    assert {name: tuple(tensor.shape) for name, tensor in stored.items()} == {"blocks": (4, 2, 16), "scales": (4, 2)}
    back = mxfp4.decode(number_format, stored, part)
    assert back.keys() == native.keys()
    assert all(torch.equal(back[name], native[name]) for name in native)


def test_other_numbers_are_refused() -> None:
    assert mxfp4.refusal(ALL["mxfp4-wo"], (2, 32)) is None
    assert "mxfp4-wo" in str(mxfp4.refusal(ALL["int8"], (2, 32)))


def test_what_is_kept_is_announced_with_stars_for_numbers() -> None:
    kept = ["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj", "lm_head"]
    files = mxfp4.quantization_files(ModelQuantization({"a": ALL["mxfp4-wo"]}, kept))
    assert files.config["modules_to_not_convert"] == ["model.layers.*.self_attn.q_proj", "lm_head"]
    assert mxfp4.read(files.config).scheme_of("model.layers.7.self_attn.q_proj") is None
