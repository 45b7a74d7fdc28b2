"""From one spelling of a quantised linear to another, or to the weight that it stands for."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from modelexport.quantization.formats.base import NumberFormat
from modelexport.quantization.methods import Method, Part, of_method, promised


def dequantise(
    method: str,
    number_format: NumberFormat,
    tensors: Mapping[str, Tensor],
    shape: tuple[int, int],
    *,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The weight, ``[out, in]``, that a linear's tensors stand for: computed in float32, then rounded.

    Where a method divides the inputs by numbers that it keeps beside the weight (modelopt's ``pre_quant_scale``), the
    weight's columns are multiplied by them.

    Args:
        method: ``quant_method`` of the checkpoint that the tensors (suffix -> tensor, of the whole weight) are from.

    Raises:
        CheckpointError: the tensors hold what the number format cannot say.
    """
    spelling = of_method(method)
    own, multiplier = getattr(spelling, "dequantise", None), getattr(spelling, "weight_multiplier", None)
    if own is not None:
        weight: Tensor = own(number_format, tensors, Part.whole(shape))
        return weight.to(dtype)
    columns = None if multiplier is None else multiplier(tensors)
    promises = promised(number_format.scheme(method), shape)
    needed = {suffix: tensor for suffix, tensor in tensors.items() if suffix in promises}
    weight = number_format.dequantise(spelling.decode(number_format, needed, Part.whole(shape)))
    return (weight if columns is None else weight * columns.float()).to(dtype)


def recode(
    method: str, target: Method, number_format: NumberFormat, tensors: Mapping[str, Tensor], shape: tuple[int, int]
) -> dict[str, Tensor]:
    """A linear's tensors as another method spells them: the same numbers.

    Raises:
        CheckpointError: the other method cannot say them exactly.
    """
    part = Part.whole(shape)
    if method == target.METHOD:
        return dict(tensors)
    return target.encode(number_format, of_method(method).decode(number_format, tensors, part), part)
