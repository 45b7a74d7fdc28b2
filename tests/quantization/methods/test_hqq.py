"""HQQ: settings for each kind of linear, and settings that contradict config.json."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from modelexport.errors import CheckpointError
from modelexport.quantization.methods import QuantizationConfig, ReadOnlyNumbers, WeightSlice, hqq
from modelexport.quantization.methods import read_quantization_config as read


def settings(**own: Any) -> dict[str, Any]:
    """What HQQ says of linears."""
    return {"weight_quant_params": {"nbits": 4, "group_size": 64, "axis": 1, "channel_wise": True, **own}}


def config(said: dict[str, Any]) -> QuantizationConfig:
    """The quantisation of a model."""
    found = read({"quantization_config": {"quant_method": "hqq", "quant_config": said, "skip_modules": ["lm_head"]}})
    assert found is not None
    return found


def test_each_kind_of_linear_has_its_own_bits() -> None:
    found = config({"self_attn.q_proj": settings(nbits=8), "mlp.experts.up_proj": settings(nbits=2), "lm_head": None})
    names = ("model.layers.3.self_attn.q_proj", "model.layers.3.mlp.experts.11.up_proj", "model.layers.0.mlp.up_proj")
    schemes = [found.scheme_of(name) for name in names]
    assert [None if scheme is None else scheme.bits for scheme in schemes] == [8, 2, None]


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"nbits": 7}, "nbits is 7; 1, 2, 3, 4, 5, 6, 8 are known"),
        ({"group_size": 0}, "group_size is 0; a number is needed"),
        ({"axis": 2}, "axis 2 and channel_wise True; axis 0 or 1, channel_wise true, are known"),
    ],
)
def test_config_that_is_not_known(own: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        config(settings(**own))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("axis", torch.tensor(0), "axis is 0, but config.json makes it 1"),
        ("shape", torch.tensor([64, 4]), r"shape is \[64, 4\], but config.json makes it \[4, 64\]"),
        ("packing", torch.tensor(list(b"2bit_u8")), "packing is 2bit_u8, but config.json makes it 4bit_u8"),
    ],
)
def test_settings_that_contradict_config(name: str, value: torch.Tensor, message: str) -> None:
    numbers = ReadOnlyNumbers("int4-hqq", config(settings()).schemes[0])
    tensors = {"W_q": torch.zeros(2, 64, dtype=torch.uint8), "scale": torch.ones(4, 1), "zero": torch.ones(4, 1)}
    assert hqq.dequantise(numbers, tensors, WeightSlice.whole((4, 64))).shape == (4, 64)
    with pytest.raises(CheckpointError, match=message):
        hqq.dequantise(numbers, {**tensors, name: value}, WeightSlice.whole((4, 64)))
