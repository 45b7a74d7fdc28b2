"""Conversion of a quantised linear from one encoding to another, or to the weight that it stands for."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from modelexport.errors import ValuesError
from modelexport.quantization.formats.base import NumberFormat
from modelexport.quantization.methods import Method, ReadOnlyNumbers, WeightSlice, of_method, tensor_specs

_NAN = {torch.float8_e4m3fn: 0x7F, torch.uint8: 0xFF}
"""One-byte numbers -> the bits that are all set in NaN; bytes are exponents (E8M0) where they are scales."""
if hasattr(torch, "float8_e8m0fnu"):
    _NAN[torch.float8_e8m0fnu] = 0xFF


def dequantise(
    method: str,
    number_format: NumberFormat | ReadOnlyNumbers,
    tensors: Mapping[str, Tensor],
    part: WeightSlice,
    out: Tensor | None = None,
) -> Tensor:
    """The rectangle of a weight that a linear's tensors stand for, ``[rows, cols]``: in float32, then rounded.

    Where a method divides the inputs by numbers that it keeps beside the weight (modelopt's ``pre_quant_scale``), the
    weight's columns are multiplied by them.

    Args:
        method: ``quant_method`` of the checkpoint that the tensors (suffix -> tensor, of the part) are from.
            Where the method has :func:`~modelexport.quantization.methods.views`, as these have them.
        part: begins and ends where the axes of the tensors' specs allow a cut.
        out: filled and returned; bf16, fp16 or float32. Without it, a float32 tensor is made.

    Raises:
        CheckpointError: the tensors hold what the number format cannot say.
    """
    encoder = of_method(method)
    own, multiplier = getattr(encoder, "dequantise", None), getattr(encoder, "weight_multiplier", None)
    if own is not None:
        weight: Tensor = own(number_format, tensors, part)
        return weight if out is None else out.copy_(weight)
    assert isinstance(number_format, NumberFormat), "methods with numbers of their own decode them"
    columns = None if multiplier is None else multiplier(tensors)
    specs = tensor_specs(number_format.scheme(method), part.shape)
    needed = {suffix: tensor for suffix, tensor in tensors.items() if suffix in specs}
    native = encoder.decode(number_format, needed, part)
    if columns is None:
        return number_format.dequantise(native, out=out)
    weight = number_format.dequantise(native) * columns.float()
    return weight if out is None else out.copy_(weight)


def recode(
    method: str, target: Method, number_format: NumberFormat, tensors: Mapping[str, Tensor], shape: tuple[int, int]
) -> dict[str, Tensor]:
    """A linear's tensors as another method encodes them: the same numbers.

    Raises:
        CheckpointError: the other method cannot say them exactly; or it is the same method, but what it would say of
            the number format is not what is there (a ``pre_quant_scale``), and cannot be made of it.
    """
    part = WeightSlice.whole(shape)
    native = of_method(method).decode(number_format, tensors, part)  # also refuses what the number format cannot hold
    if method == target.METHOD and set(tensors) == set(tensor_specs(number_format.scheme(method), shape)):
        return dict(tensors)
    return target.encode(number_format, native, part)


def check_stored(tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> None:
    """Refuse numbers of a quantised linear that mean nothing, whatever the method.

    Raises:
        CheckpointError: ``weight_shape`` is not the weight's; or NaN or Inf among floating-point numbers.
    """
    said = tensors.get("weight_shape")
    if said is not None and said.tolist() != list(shape):
        raise ValuesError(f"weight_shape says {said.tolist()}, but config.json makes it {list(shape)}")
    for suffix, tensor in tensors.items():
        nan = _NAN.get(tensor.dtype) if tensor.dtype != torch.uint8 or "scale" in suffix else None
        if nan is not None:
            bad = bool(((tensor.view(torch.uint8) & nan) == nan).any())
        else:
            bad = tensor.dtype.is_floating_point and not bool(torch.isfinite(tensor).all())
        if bad:
            raise ValuesError(f"{suffix} holds NaN or Inf")
        if suffix.endswith("global_scale") and not bool((tensor > 0).all()):
            raise ValuesError(f"{suffix} is {float(tensor.flatten()[0]):g}: numbers are divided by it")


def as_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The same numbers in another dtype; exponents (E8M0) and bytes are the same bits.

    Raises:
        CheckpointError: it does not hold them.
    """
    if tensor.dtype == dtype:
        return tensor
    if tensor.dtype.itemsize == dtype.itemsize == 1:
        return tensor.view(dtype)
    converted = tensor.to(dtype)
    if not torch.equal(converted.to(tensor.dtype), tensor):
        raise ValuesError(f"numbers of {str(tensor.dtype)[6:]} are none of {str(dtype)[6:]}")
    return converted
