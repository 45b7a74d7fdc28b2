"""The fused kernels for CPU tensors: tensors in, :mod:`.compiled` loops over their bytes.

Importing this module compiles every loop (a few seconds, once), or loads it from numba's cache: beside the
package, else in the user's cache directory, else nowhere. It starts no thread and runs no torch operation, so
a process that will fork may import it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from modelexport.quantization.kernels import compiled, reference

assert compiled.LANES == reference.LANES

_KIND = {torch.bfloat16: compiled.BF16, torch.float16: compiled.FP16, torch.float32: compiled.FP32}
_CODE = {torch.int8: compiled.INT8, torch.float8_e4m3fn: compiled.FP8, torch.int32: compiled.INT4}
_NO_AMAX = np.empty(0, np.float32)
_SCRATCH_ELEMENTS = 1 << 16


def _span(tensor: Tensor, size: int | None = None) -> tuple[np.ndarray[Any, Any], int]:
    """The bytes from a 2-D tensor's first to its last element, and the distance of its rows.

    That distance is in elements, or in units of ``size`` bytes.
    """
    rows, cols = tensor.shape
    stride = tensor.stride(0) if rows > 1 else cols
    flat = tensor.detach().as_strided(((rows - 1) * stride + cols,), (1,))
    width = tensor.element_size()
    return flat.view(torch.uint8).numpy(), stride * width // (size or width)


def _dense_rows(tensor: Tensor) -> Tensor:
    """The tensor itself where its rows are dense, else a copy of which they are."""
    return tensor if tensor.shape[1] == 1 or tensor.stride(1) == 1 else tensor.contiguous()


def row_amax(weight: Tensor) -> Tensor:
    """See :func:`.reference.row_amax`."""
    out = torch.empty(weight.shape[0], dtype=torch.float32)
    src, stride = _span(_dense_rows(weight))
    compiled.row_amax(src, stride, _KIND[weight.dtype], *weight.shape, out.numpy())
    return out


def _quantise(weight: Tensor, amax: Tensor | None, group: int, q: Tensor, scale: Tensor, limit: float) -> int:
    dense_q, dense_scale = _dense_rows(q), _dense_rows(scale)
    limits = _NO_AMAX if amax is None else amax.detach().contiguous().numpy()
    source, output = _span(_dense_rows(weight)), (*_span(dense_q, 1), *_span(dense_scale))
    kind, code = _KIND[weight.dtype], _CODE[q.dtype]
    cap = reference.largest_scale(q.dtype, weight.dtype)
    bad = compiled.quantise(*source, kind, *weight.shape, group, code, limit, cap, limits, *output)
    if dense_q is not q:
        q.copy_(dense_q)
    if dense_scale is not scale:
        scale.copy_(dense_scale)
    return int(bad)


def quantise_rows(weight: Tensor, amax: Tensor | None, q: Tensor, scale: Tensor, limit: float) -> int:
    """See :func:`.reference.quantise_rows`."""
    return _quantise(weight, amax, weight.shape[1], q, scale, limit)


def quantise_groups(weight: Tensor, group: int, q: Tensor, scale: Tensor, limit: float) -> int:
    """See :func:`.reference.quantise_groups`."""
    return _quantise(weight, None, group, q, scale, limit)


def copy_finite(weight: Tensor, out: Tensor) -> int:
    """See :func:`.reference.copy_finite`."""
    dense = _dense_rows(out)
    src, stride = _span(_dense_rows(weight))
    bad = compiled.copy_finite(src, stride, _KIND[weight.dtype], *weight.shape, *_span(dense))
    if dense is not out:
        out.copy_(dense)
    return int(bad)


def _group(cols: int, scale: Tensor) -> int:
    """Columns that share a scale."""
    return max(1, cols // max(1, scale.shape[1]))


def dequantise(q: Tensor, scale: Tensor, out: Tensor) -> None:
    """See :func:`.reference.dequantise`."""
    rows, cols = out.shape
    dense_q, dense_scale = _dense_rows(q), _dense_rows(scale)
    dims = (cols, _group(cols, scale), _CODE[q.dtype])
    step = rows if out.dtype == torch.float32 else max(1, _SCRATCH_ELEMENTS // cols)
    for start in range(0, rows, step):
        part = slice(start, min(rows, start + step))
        target = out[part]
        direct = out.dtype == torch.float32 and _dense_rows(target) is target
        wide = target if direct else torch.empty(target.shape, dtype=torch.float32)
        source, scales = _span(dense_q[part], 1), _span(dense_scale[part])
        compiled.dequantise(*source, len(target), *dims, *scales, _KIND[scale.dtype], *_span(wide))
        if not direct:
            target.copy_(wide)


def squared_error(weight: Tensor, q: Tensor, scale: Tensor | None, out: Tensor) -> None:
    """See :func:`.reference.squared_error`."""
    rows, cols = weight.shape
    source = (*_span(_dense_rows(weight)), _KIND[weight.dtype], rows, cols)
    if scale is None:
        stored = (*_span(_dense_rows(q.to(weight.dtype))), source[0][:0], 0, _KIND[weight.dtype])
        group, code = 1, compiled.PLAIN
    else:
        stored = (*_span(_dense_rows(q), 1), *_span(_dense_rows(scale)), _KIND[scale.dtype])
        group, code = _group(cols, scale), _CODE[q.dtype]
    dense = out.contiguous()
    compiled.squared_error(*source, group, code, *stored, dense.view(-1).numpy())
    if dense is not out:
        out.copy_(dense)
