"""The tensors of one linear, or of a part of one, between compressed-tensors' form and modelopt's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from modelexport.errors import CheckpointError
from modelexport.quantization.methods._nibbles import (
    int8_to_words,
    row_pairs_to_words,
    words_to_int8,
    words_to_row_pairs,
)
from modelexport.quantization.methods._reciprocal import divisor_of, inverted_scale, multiplier_of
from modelexport.quantization.methods.base import WeightSlice
from modelexport.system.dtypes import FLOATS, dtype_name

if TYPE_CHECKING:
    from modelexport.quantization.methods.base import NumberFormatProtocol

_INEXPRESSIBLE = {
    "pre_quant_scale": "its inputs are multiplied by a pre_quant_scale",
    "svdquant_lora_a": "a low-rank part is added to its product",
}


def encode(number_format: NumberFormatProtocol, native: Mapping[str, Tensor], part: WeightSlice) -> dict[str, Tensor]:
    """See :func:`modelexport.quantization.methods.modelopt.encode`."""
    weights = number_format.weight_arguments()
    if "weight" in native:
        weight = native["weight"]
    elif weights["type"] == "float":
        weight = native["weight_packed"]
    elif weights["num_bits"] == 4:
        weight = words_to_row_pairs(native["weight_packed"])
    else:
        weight = words_to_int8(native["weight_packed"], part.extent[1])
    scale = native["weight_scale"]
    if weights["strategy"] == "tensor":
        scale = scale.reshape(())
    elif weights["strategy"] == "channel":
        scale = scale.reshape(-1)
    elif weights["strategy"] == "block":
        scale = scale[:, None, :, None]
    if dtype_name(scale.dtype) in FLOATS:
        scale = scale.float()
    elif weights["strategy"] == "group":  # exponents: safetensors has two words for such bytes
        scale = scale.view(torch.uint8)
    tensors = {"weight": weight, "weight_scale": scale}
    if "weight_global_scale" in native:
        tensors["weight_scale_2"] = inverted_scale(native, "weight_global_scale", multiplier_of, ())
    if "input_global_scale" in native:
        tensors["input_scale"] = inverted_scale(native, "input_global_scale", multiplier_of, ())
    elif "input_scale" in native:
        tensors["input_scale"] = native["input_scale"].float().reshape(())
    return tensors


def decode(number_format: NumberFormatProtocol, stored: Mapping[str, Tensor], part: WeightSlice) -> dict[str, Tensor]:
    """See :func:`modelexport.quantization.methods.modelopt.decode`."""
    for suffix, why in _INEXPRESSIBLE.items():
        if suffix in stored:
            raise CheckpointError(
                f"{suffix}: of this linear, {why}, which no other format can say: "
                "export the checkpoint with --quant none, which dequantises it"
            )
    weights = number_format.weight_arguments()
    weight, scale, strategy = stored["weight"], stored["weight_scale"], weights["strategy"]
    packed = number_format.checkpoint_format == "pack-quantized"
    if weights["type"] == "float":
        tensors = {"weight_packed" if weights["num_bits"] == 4 else "weight": weight}
    elif weights["num_bits"] == 4:
        tensors = {"weight_packed": row_pairs_to_words(weight)}
    else:
        tensors = {"weight_packed": int8_to_words(weight)} if packed else {"weight": weight}
    if strategy == "tensor":
        scale = scale.reshape(1)
    elif strategy == "channel":
        scale = scale.reshape(-1, 1)
    elif strategy == "block":
        scale = scale[:, 0, :, 0]
    tensors["weight_scale"] = scale
    if packed:
        tensors["weight_shape"] = torch.tensor(part.shape, dtype=torch.int64, device=weight.device)
    if strategy == "tensor_group":
        tensors["weight_global_scale"] = inverted_scale(stored, "weight_scale_2", divisor_of, (1,))
    if number_format.has_static_inputs and strategy == "tensor_group":
        tensors["input_global_scale"] = inverted_scale(stored, "input_scale", divisor_of, (1,))
    elif number_format.has_static_inputs:
        tensors["input_scale"] = stored["input_scale"].reshape(1)
    return tensors
