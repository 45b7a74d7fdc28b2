"""The fused kernels for CPU tensors: tensors in, :mod:`.compiled` loops over their bytes.

Importing this module compiles what every format needs (a few seconds, once), or loads it from numba's cache: beside
the package, else in the user's cache directory, else in a temporary one that only the user can write to. What only some
formats need is compiled when it is first called. Importing starts no thread and runs no torch operation, so a process
that will fork may import it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from modelexport.quantization.kernels import compiled, compiled_reading, reference, scales
from modelexport.system.tensor_memory import tensor_bytes

assert compiled.LANES == reference.LANES

_KIND = {torch.bfloat16: compiled.BF16, torch.float16: compiled.FP16, torch.float32: compiled.FP32}
_CODE = {
    (torch.int8, 8): compiled.INT8,
    (torch.float8_e4m3fn, 8): compiled.FP8,
    (torch.int32, 4): compiled.INT4,
    (torch.int32, 8): compiled.BYTES,
}
_NONE = np.empty(0, np.float32)
_NO_ZEROS = (np.empty(0, np.uint8), 0)


def _code(q: Tensor, bits: int) -> int:
    return _CODE[q.dtype, bits if q.dtype == torch.int32 else 8]


def _span(tensor: Tensor, size: int | None = None) -> tuple[np.ndarray[Any, Any], int]:
    """The bytes from a 2-D tensor's first to its last element, and the distance of its rows.

    That distance is in elements, or in units of ``size`` bytes.
    """
    rows, cols = tensor.shape
    stride = tensor.stride(0) if rows > 1 else cols
    width = tensor.element_size()
    return tensor_bytes(tensor, ((rows - 1) * stride + cols) * width), stride * width // (size or width)


def _dense_rows(tensor: Tensor) -> Tensor:
    """The tensor itself where its rows are dense, else a copy of which they are."""
    return tensor if tensor.shape[1] == 1 or tensor.stride(1) == 1 else tensor.contiguous()


def _copy_back(*pairs: tuple[Tensor, Tensor]) -> None:
    """Of each tensor that was filled, copies what is not the output itself to the output."""
    for filled, out in pairs:
        if filled is not out:
            out.copy_(filled)


def _floats(tensor: Tensor | None) -> tuple[np.ndarray[Any, Any], int]:
    """float32 as numpy has it, rows one after the other, and how many there are in each row."""
    if tensor is None:
        return _NONE, 0
    rows = tensor.shape[0]
    return tensor_bytes(tensor.contiguous()).view(np.float32), tensor.numel() // rows if rows else 0


def row_amax(weight: Tensor) -> Tensor:
    """See :func:`.reference.row_amax`."""
    out = torch.empty(weight.shape[0], dtype=torch.float32)
    src, stride = _span(_dense_rows(weight))
    compiled.row_amax(src, stride, _KIND[weight.dtype], *weight.shape, out.numpy())
    return out


def row_extremes(weight: Tensor) -> Tensor:
    """See :func:`.reference.row_extremes`."""
    from modelexport.quantization.kernels import compiled_affine

    out = torch.empty(weight.shape[0], 2, dtype=torch.float32)
    src, stride = _span(_dense_rows(weight))
    compiled_affine.row_extremes(src, stride, _KIND[weight.dtype], *weight.shape, out.view(-1).numpy())
    return out


def quantise_rows(weight: Tensor, amax: Tensor | None, q: Tensor, scale: Tensor, limit: float) -> int:
    """See :func:`.reference.quantise_rows`."""
    given = None if amax is None else amax.unsqueeze(1)
    return quantise_groups(weight, weight.shape[1], q, scale, limit, bits=8, amax=given)


def quantise_groups(
    weight: Tensor,
    group: int,
    q: Tensor,
    scale: Tensor,
    limit: float,
    *,
    bits: int = 4,
    zero: Tensor | None = None,
    amax: Tensor | None = None,
) -> int:
    """See :func:`.reference.quantise_groups`."""
    dense_q, dense_scale = _dense_rows(q), _dense_rows(scale)
    source = (*_span(_dense_rows(weight)), _KIND[weight.dtype], *weight.shape, group, _code(q, bits))
    output = (*_span(dense_q, 1), *_span(dense_scale), _KIND[scale.dtype])
    if zero is None:
        cap = scales.largest_scale(scales.numbers(q.dtype, bits), scale.dtype, weight.dtype)
        bad = compiled.quantise(*source, limit, cap, *_floats(amax), *output)
    else:
        from modelexport.quantization.kernels import compiled_affine

        caps = scales.affine_caps(bits, scale.dtype, weight.dtype).numpy()
        dense_zero = _dense_rows(zero)
        bad = compiled_affine.quantise_affine(*source, caps, *_floats(amax), *output, *_span(dense_zero))
        _copy_back((dense_zero, zero))
    _copy_back((dense_q, q), (dense_scale, scale))
    return int(bad)


def nearest_groups(
    weight: Tensor, group: int, out: Tensor, scale_dtype: torch.dtype, limit: float, *, bits: int, affine: bool = False
) -> int:
    """See :func:`.reference.nearest_groups`."""
    from modelexport.quantization.kernels import compiled_nearest

    code, storage = (compiled.INT4, torch.int32) if bits == 4 else (compiled.INT8, torch.int8)
    cap = scales.largest_scale(storage, scale_dtype, weight.dtype)
    caps = scales.affine_caps(bits, scale_dtype, weight.dtype).numpy() if affine else _NONE
    dense = _dense_rows(out)
    source = (*_span(_dense_rows(weight)), _KIND[weight.dtype], *weight.shape, group, code)
    target, stride = _span(dense)
    tried = (limit, cap, caps, 2 if affine else 1, _KIND[scale_dtype])
    bad = compiled_nearest.nearest_groups(*source, *tried, target.view(np.float32), stride)
    _copy_back((dense, out))
    return int(bad)


def quantise_blocks(weight: Tensor, side: int, amax: Tensor | None, q: Tensor, scale: Tensor, limit: float) -> int:
    """See :func:`.reference.quantise_blocks`."""
    from modelexport.quantization.kernels import compiled_blocks

    dense_q, dense_scale = _dense_rows(q), _dense_rows(scale)
    assert q.dtype == torch.float8_e4m3fn
    source = (*_span(_dense_rows(weight)), _KIND[weight.dtype], *weight.shape, side)
    cap = scales.largest_scale(q.dtype, scale.dtype, weight.dtype)
    output = (*_span(dense_q, 1), *_span(dense_scale), _KIND[scale.dtype])
    bad = compiled_blocks.quantise_blocks(*source, limit, cap, _floats(amax)[0], *output)
    _copy_back((dense_q, q), (dense_scale, scale))
    return int(bad)


def copy_finite(weight: Tensor, out: Tensor) -> int:
    """See :func:`.reference.copy_finite`."""
    dense = _dense_rows(out)
    src, stride = _span(_dense_rows(weight))
    bad = compiled.copy_finite(src, stride, _KIND[weight.dtype], *weight.shape, *_span(dense))
    _copy_back((dense, out))
    return int(bad)


def dequantise(
    q: Tensor, scale: Tensor, out: Tensor, *, group: int | None = None, bits: int = 4, zero: Tensor | None = None
) -> None:
    """See :func:`.reference.dequantise`."""
    rows, cols = out.shape
    source, steps = _span(_dense_rows(q), 1), (*_span(_dense_rows(scale)), _KIND[scale.dtype])
    zeros = _NO_ZEROS if zero is None else _span(_dense_rows(zero))
    dims = (rows, cols, reference.columns_per_scale(cols, scale, group), _code(q, bits))
    dense = _dense_rows(out)
    compiled_reading.dequantise(*source, *dims, *steps, *zeros, *_span(dense), _KIND[out.dtype])
    _copy_back((dense, out))


def squared_error(
    weight: Tensor,
    q: Tensor,
    scale: Tensor | None,
    out: Tensor,
    *,
    group: int | None = None,
    bits: int = 4,
    zero: Tensor | None = None,
) -> None:
    """See :func:`.reference.squared_error`."""
    rows, cols = weight.shape
    source = (*_span(_dense_rows(weight)), _KIND[weight.dtype], rows, cols)
    stored: tuple[Any, ...]
    if scale is None:
        stored = (*_span(_dense_rows(q.to(weight.dtype))), source[0][:0], 0, _KIND[weight.dtype])
        code = compiled.PLAIN
    else:
        stored = (*_span(_dense_rows(q), 1), *_span(_dense_rows(scale)), _KIND[scale.dtype])
        code = _code(q, bits)
    zeros = _NO_ZEROS if zero is None else _span(_dense_rows(zero))
    dense = out.contiguous()
    columns = reference.columns_per_scale(cols, scale, group)
    compiled_reading.squared_error(*source, columns, code, *stored, *zeros, tensor_bytes(dense).view(np.float64))
    _copy_back((dense, out))


def search_errors(
    weight: Tensor,
    amax: Tensor,
    storage: torch.dtype,
    scale_dtype: torch.dtype,
    limit: float,
    shrinks: Tensor,
    out: Tensor,
    *,
    bits: int = 8,
) -> None:
    """See :func:`.reference.search_errors`."""
    from modelexport.quantization.kernels import compiled_search

    code = compiled.INT4 if bits == 4 else _CODE[storage, 8]
    cap = scales.largest_scale(torch.int32 if bits == 4 else storage, scale_dtype, weight.dtype)
    caps = scales.affine_caps(bits, scale_dtype, weight.dtype).numpy() if amax.dim() == 2 else _NONE
    rows = (*_span(_dense_rows(weight)), _KIND[weight.dtype], *weight.shape, code, limit, cap, caps)
    dense = out.contiguous()
    tried = (*_floats(amax), shrinks.numpy(), _KIND[scale_dtype])
    compiled_search.search_errors(*rows, *tried, tensor_bytes(dense).view(np.float64))
    _copy_back((dense, out))
