"""gpt-oss's experts, by hand and against transformers' own reading of them."""

from __future__ import annotations

import pytest
import torch

from modelexport.errors import CheckpointError, PlanError
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
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def experts(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (3, 6, 2, 16), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(100, 150, (3, 6, 2), generator=generator, dtype=torch.uint8)


def by_hand(packed: torch.Tensor, scale: torch.Tensor) -> list[list[float]]:
    """One number at a time, in Python's."""
    rows = []
    for row, exponents in zip(packed.tolist(), scale.tolist(), strict=True):
        codes = [code for byte in row for code in (byte & 15, byte >> 4)]
        signed = [VALUES[code & 7] * (-1 if code & 8 else 1) for code in codes]
        rows.append([value * 2.0 ** (exponents[n // 32] - 127) for n, value in enumerate(signed)])
    return rows


def test_experts_by_hand() -> None:
    """0x21 is 0.5 and 1; an exponent of 128 doubles."""
    blocks = torch.zeros(1, 1, 1, 16, dtype=torch.uint8)
    blocks[0, 0, 0, 0] = 0x21
    blocks[0, 0, 0, 15] = 0xF0
    (native,) = mxfp4.decode_blocks(blocks, torch.full((1, 1, 1), 128, dtype=torch.uint8))
    assert by_hand(native["weight_packed"], native["weight_scale"]) == [[1.0, 2.0, *[0.0] * 29, -12.0]]
    if "mxfp4-wo" in formats.names():
        dequantised = formats.get("mxfp4-wo").dequantise(native)
        assert dequantised.tolist() == [[1.0, 2.0, *[0.0] * 29, -12.0]]


@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_experts_are_those_of_transformers() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks, scales = experts()
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)  # [experts, in, rows]
    natives = mxfp4.decode_blocks(blocks, scales)
    assert len(natives) == 3
    for expert, native in enumerate(natives):
        assert native["weight_packed"].shape == (6, 32)
        assert native["weight_scale"].shape == (6, 2)
        own = torch.tensor(by_hand(native["weight_packed"], native["weight_scale"]))
        assert torch.equal(own, theirs[expert].T)
        if "mxfp4-wo" in formats.names():
            assert torch.equal(formats.get("mxfp4-wo").dequantise(native), theirs[expert].T)


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


@pytest.mark.parametrize(
    ("blocks", "scales"),
    [((3, 6, 2, 8), (3, 6, 2)), ((3, 6, 2, 16), (3, 6, 1)), ((6, 2, 16), (6, 2))],
)
def test_tensors_that_do_not_go_together_are_refused(blocks: tuple[int, ...], scales: tuple[int, ...]) -> None:
    with pytest.raises(CheckpointError, match="MXFP4 experts are blocks"):
        mxfp4.decode_blocks(torch.zeros(blocks, dtype=torch.uint8), torch.zeros(scales, dtype=torch.uint8))
    with pytest.raises(CheckpointError, match=r"must be torch\.uint8"):
        mxfp4.decode_blocks(torch.zeros(blocks), torch.zeros(scales, dtype=torch.uint8))


def test_it_is_only_read() -> None:
    number_format, part = ALL["mxfp4-wo"], WeightSlice.whole((2, 32))
    assert mxfp4.FORMAT is None
    assert "only read" in str(mxfp4.refusal(number_format, (2, 32)))
    with pytest.raises(PlanError, match="--format hf"):
        mxfp4.quantization_files(ModelQuantization({"a": number_format}, ()))
    with pytest.raises(PlanError, match="--format hf"):
        mxfp4.encode(number_format, {}, part)
    with pytest.raises(CheckpointError, match="gate_up_proj_blocks"):
        mxfp4.decode(number_format, {}, part)
    (scheme,) = mxfp4.read(GPT_OSS).schemes
    with pytest.raises(CheckpointError, match="all experts of a layer in one tensor"):
        mxfp4.tensor_specs(scheme, (2, 32))
