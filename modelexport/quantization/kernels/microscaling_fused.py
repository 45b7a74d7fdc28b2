"""The fused kernels of NVFP4, MXFP4 and MXFP8 for CPU tensors: tensors in, :mod:`.microscaling_compiled` loops.

Importing this module compiles every loop, see there; it starts no thread and runs no torch operation.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from modelexport.quantization.kernels import fused
from modelexport.quantization.kernels import microscaling_compiled as compiled
from modelexport.system.tensor_memory import tensor_bytes


def _how(q: Tensor, factor: Tensor | None) -> tuple[int, float]:
    """The kind of stored numbers, and what their scales are divided by."""
    if q.dtype != torch.uint8:
        return compiled.MXFP8, 0.0
    return (compiled.MXFP4, 0.0) if factor is None else (compiled.NVFP4, float(factor))


def _weight(weight: Tensor) -> tuple[Any, ...]:
    return (*fused._span(fused._dense_rows(weight)), fused._KIND[weight.dtype], *weight.shape)


def _stored(q: Tensor, scale: Tensor) -> tuple[Any, ...]:
    """Two tensors of one byte an element, as their bytes and the distances of their rows."""
    return (*fused._span(fused._dense_rows(q)), *fused._span(fused._dense_rows(scale)))


def quantise(weight: Tensor, q: Tensor, scale: Tensor, factor: Tensor | None, most: int, search: bool) -> int:
    """See :func:`.microscaling_reference.quantise`."""
    dense_q, dense_scale = fused._dense_rows(q), fused._dense_rows(scale)
    bad = compiled.quantise(*_weight(weight), *_how(q, factor), most, int(search), *_stored(dense_q, dense_scale))
    fused._copy_back((dense_q, q), (dense_scale, scale))
    return int(bad)


def dequantise(q: Tensor, scale: Tensor, factor: Tensor | None, out: Tensor) -> None:
    """See :func:`.microscaling_reference.dequantise`."""
    dense = fused._dense_rows(out)
    values, stride, *scales = _stored(q, scale)
    target = (*fused._span(dense), fused._KIND[out.dtype])
    compiled.dequantise(values, stride, *out.shape, *_how(q, factor), *scales, *target)
    fused._copy_back((dense, out))


def squared_error(weight: Tensor, q: Tensor, scale: Tensor, factor: Tensor | None, out: Tensor) -> None:
    """See :func:`.microscaling_reference.squared_error`."""
    dense = out.contiguous()
    compiled.squared_error(*_weight(weight), *_how(q, factor), *_stored(q, scale), tensor_bytes(dense).view(np.float64))
    fused._copy_back((dense, out))
