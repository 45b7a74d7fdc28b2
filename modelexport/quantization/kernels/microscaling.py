"""NVFP4, MXFP4 and MXFP8: fused kernels for CPU tensors where numba imports, else plain torch; the same bits.

Groups run along a row. ``q`` is uint8 ``[rows, cols / 2]`` (two e2m1 a byte, the even column in the low half) or
float8_e4m3fn ``[rows, cols]``. ``scale`` is ``[rows, cols / group]``: float8_e4m3fn (NVFP4, group 16) where ``factor``
is given, the float32 ``[1]`` that scales are divided by; else uint8, E8M0 (MX, group 32).

``MODELEXPORT_KERNELS`` and the number of threads are the package's. Nothing is compiled until a kernel is first called;
a launcher that forks its ranks calls :func:`warm` beforehand, so that they inherit compiled kernels.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from modelexport.quantization import kernels
from modelexport.quantization.kernels import microscaling_reference as reference

__all__ = ["dequantise", "fake_quantise", "quantise", "squared_error", "warm"]

fake_quantise = reference.fake_quantise

_SCRATCH_ELEMENTS = 1 << 16


def warm() -> None:
    """Compiles the fused kernels, or loads them from numba's cache, if this process would use them.

    It starts no thread and runs no torch operation.
    """
    if kernels.backend().name == "fused":
        importlib.import_module(f"{__name__}_compiled")


def _fused(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.numel() > 0 and kernels.backend().name == "fused"


def quantise(weight: Tensor, q: Tensor, scale: Tensor, factor: Tensor | None = None, *, search: bool = False) -> int:
    """Fills ``q`` and ``scale``; the first row of ``weight`` that holds NaN or Inf, or -1.

    Args:
        weight: ``[rows, cols]`` bf16, fp16 or float32, any strides; cols a multiple of the group.
        search: take, of the scales near the one that a group's largest magnitude asks for, that with the smallest
            squared error; of equal ones the largest.
    """
    fused = _fused(weight)
    most = reference.LARGEST_LOCAL if factor is not None else reference.largest_exponent(q.dtype, weight.dtype)

    def work(part: slice) -> int:
        if not fused:
            return reference.quantise(weight[part], q[part], scale[part], factor, most, search)
        return _quantise(weight[part], q[part], scale[part], factor, most, search)

    return kernels.split_rows(weight, work)


def dequantise(q: Tensor, scale: Tensor, out: Tensor, factor: Tensor | None = None) -> None:
    """Fills ``out`` (``[rows, cols]``, bf16, fp16 or float32) with value * step computed in float32."""
    fused = _fused(out)

    def work(part: slice) -> None:
        function = _dequantise if fused else reference.dequantise
        function(q[part], scale[part], factor, out[part])

    kernels.split_rows(out, work)


def squared_error(weight: Tensor, q: Tensor, scale: Tensor, out: Tensor, factor: Tensor | None = None) -> None:
    """Fills ``out`` (float64 ``[rows, 2]``) with sum((w - dequantised)^2) and sum(w^2) of each row.

    The order of the sums is that of :func:`.reference.squared_error`.
    """
    fused = _fused(weight)

    def work(part: slice) -> None:
        function = _squared_error if fused else reference.squared_error
        function(weight[part], q[part], scale[part], factor, out[part])

    kernels.split_rows(weight, work)


def _kind(dtype: torch.dtype) -> int:
    from modelexport.quantization.kernels import microscaling_compiled as compiled

    return {torch.bfloat16: compiled.BF16, torch.float16: compiled.FP16, torch.float32: compiled.FP32}[dtype]


def _code(q: Tensor, factor: Tensor | None) -> int:
    from modelexport.quantization.kernels import microscaling_compiled as compiled

    if q.dtype != torch.uint8:
        return compiled.MXFP8
    return compiled.MXFP4 if factor is None else compiled.NVFP4


def _number(factor: Tensor | None) -> float:
    return 0.0 if factor is None else float(factor)


def _stored(q: Tensor, scale: Tensor) -> tuple[Any, ...]:
    """Two tensors of one byte an element, as their bytes and the distances of their rows."""
    from modelexport.quantization.kernels import fused

    return (*fused._span(fused._dense_rows(q), 1), *fused._span(fused._dense_rows(scale), 1))


def _quantise(weight: Tensor, q: Tensor, scale: Tensor, factor: Tensor | None, most: int, search: bool) -> int:
    from modelexport.quantization.kernels import fused
    from modelexport.quantization.kernels import microscaling_compiled as compiled

    dense_q, dense_scale = fused._dense_rows(q), fused._dense_rows(scale)
    source = (*fused._span(fused._dense_rows(weight)), _kind(weight.dtype), *weight.shape, _code(q, factor))
    bad = compiled.quantise(*source, _number(factor), most, int(search), *_stored(dense_q, dense_scale))
    if dense_q is not q:
        q.copy_(dense_q)
    if dense_scale is not scale:
        scale.copy_(dense_scale)
    return int(bad)


def _dequantise(q: Tensor, scale: Tensor, factor: Tensor | None, out: Tensor) -> None:
    from modelexport.quantization.kernels import fused
    from modelexport.quantization.kernels import microscaling_compiled as compiled

    rows, cols = out.shape
    code, number = _code(q, factor), _number(factor)
    direct = out.dtype != torch.float16 and fused._dense_rows(out) is out
    step = rows if direct else max(1, _SCRATCH_ELEMENTS // cols)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        target = out[part] if direct else torch.empty(out[part].shape, dtype=torch.float32)
        values, stride, *scales = _stored(q[part], scale[part])
        rest = (*scales, *fused._span(target), _kind(target.dtype))
        compiled.dequantise(values, stride, *target.shape, code, number, *rest)
        if not direct:
            out[part] = target


def _squared_error(weight: Tensor, q: Tensor, scale: Tensor, factor: Tensor | None, out: Tensor) -> None:
    from modelexport.quantization.kernels import fused
    from modelexport.quantization.kernels import microscaling_compiled as compiled

    dense = out.contiguous()
    source = (*fused._span(fused._dense_rows(weight)), _kind(weight.dtype), *weight.shape, _code(q, factor))
    compiled.squared_error(*source, _number(factor), *_stored(q, scale), dense.view(-1).numpy())
    if dense is not out:
        out.copy_(dense)
