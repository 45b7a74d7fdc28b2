"""bitsandbytes: what beside the numbers contradicts them is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from modelexport.errors import CheckpointError
from modelexport.quantization.methods import ReadOnlyNumbers, WeightSlice, bitsandbytes, read_quantization_config

NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
SHAPE = (4, 64)


def decode(**said: Any) -> torch.Tensor:
    """A weight of zeros whose JSON is changed; None takes a key away."""
    state = {"quant_type": "nf4", "blocksize": 64, "shape": list(SHAPE), "dtype": "bfloat16", **said}
    text = json.dumps({key: value for key, value in state.items() if value is not None}).encode()
    tensors = {
        "weight": torch.zeros(4, 32, dtype=torch.uint8),
        "weight.absmax": torch.ones(4, 1),
        "weight.quant_map": torch.arange(16.0),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(text), dtype=torch.uint8),
    }
    config = read_quantization_config({"quantization_config": NF4})
    assert config is not None
    return bitsandbytes.dequantise(ReadOnlyNumbers("nf4", config.schemes[0]), tensors, WeightSlice.whole(SHAPE))


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"shape": [64, 4]}, r"says shape \[64, 4\], but config.json makes it \[4, 64\]"),
        ({"quant_type": "fp4"}, "says quant_type fp4, but config.json makes it nf4"),
        ({"blocksize": 32}, "says blocksize 32, but weight.absmax has a number for each 64"),
        ({"blocksize": None}, "says blocksize None; a number of elements is needed"),
    ],
)
def test_json_that_contradicts_the_tensors(said: dict[str, Any], message: str) -> None:
    assert decode().shape == SHAPE
    with pytest.raises(CheckpointError, match=message):
        decode(**said)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"load_in_4bit": False}, "neither load_in_4bit nor load_in_8bit is true"),
        ({"load_in_8bit": True}, "both load_in_4bit and load_in_8bit are true"),
        ({"bnb_4bit_quant_type": "af4"}, "bnb_4bit_quant_type is af4; nf4 and fp4 are known"),
        ({"llm_int8_skip_modules": "lm_head"}, "llm_int8_skip_modules must be a list of names"),
    ],
)
def test_config_that_is_not_known(said: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_quantization_config({"quantization_config": NF4 | said})


def test_int8_in_the_order_of_tiles() -> None:
    config = read_quantization_config({"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}})
    assert config is not None
    tensors = {"weight": torch.zeros(2, 4, dtype=torch.int8), "SCB": torch.ones(2), "weight_format": torch.tensor(2)}
    with pytest.raises(CheckpointError, match="weight_format is 2, the order of a GPU's tiles; 0, rows, is needed"):
        bitsandbytes.dequantise(ReadOnlyNumbers("int8-bnb", config.schemes[0]), tensors, WeightSlice.whole((2, 4)))


@pytest.mark.parametrize(("listed", "kept"), [(None, True), ([], False), (["model.layers.0.mlp"], False)])
def test_heads_are_kept_unless_a_list_says_otherwise(listed: list[str] | None, kept: bool) -> None:
    config = read_quantization_config({"quantization_config": NF4 | {"llm_int8_skip_modules": listed}})
    assert config is not None
    assert config.ignores("lm_head") == kept
