"""NVFP4, MXFP4 and MXFP8: fused kernels for CPU tensors where numba imports, else plain torch; the same bits.

Groups run along a row. ``q`` is uint8 ``[rows, cols / 2]`` (two e2m1 a byte, the even column in the low half) or
float8_e4m3fn ``[rows, cols]``. ``scale`` is ``[rows, cols / group]``: float8_e4m3fn (NVFP4, group 16) where ``factor``
is given, the float32 ``[1]`` that scales are divided by; else uint8, E8M0 (MX, group 32).
"""

from __future__ import annotations

from torch import Tensor

from modelexport.quantization import kernels
from modelexport.quantization.kernels import microscaling_reference as reference

__all__ = ["dequantise", "exponents", "fake_quantise", "quantise", "squared_error"]

exponents, fake_quantise = reference.exponents, reference.fake_quantise

_FAMILY = "microscaling_"


def quantise(weight: Tensor, q: Tensor, scale: Tensor, factor: Tensor | None = None, *, search: bool = False) -> int:
    """Fills ``q`` and ``scale``; the first row of ``weight`` that holds NaN or Inf, or -1.

    Args:
        weight: ``[rows, cols]`` bf16, fp16 or float32, any strides; cols a multiple of the group.
        search: take, of the scales near the one that a group's largest magnitude asks for, that with the smallest
            squared error; of equal ones the largest.
    """
    most = reference.LARGEST_LOCAL if factor is not None else reference.largest_exponent(q.dtype, weight.dtype)
    return kernels.by_rows("quantise", weight, weight, q, scale, factor, most, search, family=_FAMILY)


def quantise_chosen(weight: Tensor, q: Tensor, scale: Tensor, factor: Tensor | None, choice: Tensor) -> int:
    """As :func:`quantise`, with the number of each group's scale, integers ``[rows, groups]``: of those that a
    search tries, 0 being the largest."""
    most = reference.LARGEST_LOCAL if factor is not None else reference.largest_exponent(q.dtype, weight.dtype)
    return reference.quantise(weight, q, scale, factor, most, choice)


def dequantise(q: Tensor, scale: Tensor, out: Tensor, factor: Tensor | None = None) -> None:
    """Fills ``out`` (``[rows, cols]``, bf16, fp16 or float32) with value * step computed in float32."""
    kernels.by_rows("dequantise", out, q, scale, factor, out, family=_FAMILY)


def squared_error(weight: Tensor, q: Tensor, scale: Tensor, out: Tensor, factor: Tensor | None = None) -> None:
    """Fills ``out`` (float64 ``[rows, 2]``) with sum((w - dequantised)^2) and sum(w^2) of each row.

    The order of the sums is that of :func:`.reference.squared_error`.
    """
    kernels.by_rows("squared_error", weight, weight, q, scale, factor, out, family=_FAMILY)
