"""The choice of scales by the products of a linear's inputs for CPU tensors: tensors in, :mod:`.products_compiled`
loops.

Importing this module compiles the loop, or loads it from numba's cache; no thread is started, no torch operation run.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from modelexport.quantization.kernels import compiled, scales
from modelexport.quantization.kernels import products_compiled as loops

_KIND = {torch.bfloat16: compiled.BF16, torch.float16: compiled.FP16, torch.float32: compiled.FP32}
_NONE = np.empty(0, np.float32)


def choose(
    values: Tensor,
    group: int,
    amax: Tensor,
    products: Tensor,
    moved: Tensor,
    aimed: Tensor,
    scale_dtype: torch.dtype,
    limit: float,
    bits: int,
) -> Tensor:
    """See :func:`.products_reference.choose`."""
    rows, blocks, affine = len(values), len(products), amax.dim() == 3
    out = torch.empty(rows, blocks, dtype=torch.uint8)
    storage, code = (torch.int32, compiled.INT4) if bits == 4 else (torch.int8, compiled.INT8)
    cap = scales.largest_scale(storage, scale_dtype, values.dtype)
    caps = scales.affine_caps(bits, scale_dtype, values.dtype).numpy() if affine else _NONE
    tried = (_flat(amax), 2 if affine else 1, scales.shrinks(bits).numpy(), _KIND[scale_dtype])
    given = (_flat(products), _flat(moved), _flat(aimed))
    loops.choose(_flat(values), *values.shape, group, code, limit, cap, caps, *tried, *given, out.view(-1).numpy())
    return out


def _flat(tensor: Tensor) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """float32 one after the other."""
    return tensor.contiguous().view(-1).numpy()
