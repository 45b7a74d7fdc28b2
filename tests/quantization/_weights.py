"""Weights for the tests here: every kind of row that has broken somebody's quantiser."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FORMATS = (("none", None), ("int8", None), ("fp8", None), ("int4", 32), ("int4", 64), ("int4", 128))


def random_weight(rows: int, cols: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Rows of very different sizes: zeros, single values, denormals, the largest finite, outliers, plain."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, cols, generator=generator)
    info = torch.finfo(dtype)
    kinds = [1.0, 0.02, 1e-3, info.tiny, info.tiny / 8, info.max / 16, 0.0, 37.0]
    weight *= torch.tensor([kinds[row % len(kinds)] for row in range(rows)]).unsqueeze(1)
    weight = weight.clamp(info.min, info.max).to(dtype)
    if rows > 2 and cols > 2:
        weight[1, cols // 2] = 8.0
        weight[2, 0] = -0.0
    return weight


def as_view(weight: Tensor) -> Tensor:
    """The same values as a column slice of something wider (rows further apart than they are long)."""
    rows, cols = weight.shape
    wide = torch.full((rows, cols + 13), float("nan")).to(weight.dtype)
    wide[:, 5 : 5 + cols] = weight
    return wide[:, 5 : 5 + cols]


def raw(tensor: Tensor) -> Tensor:
    """A tensor's bytes, for comparing also NaN payloads and the sign of zero."""
    return tensor.contiguous().view(torch.uint8)


def same_bytes(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """Whether two sets of stored tensors are equal to the byte."""
    return list(left) == list(right) and all(
        left[key].dtype == right[key].dtype
        and left[key].shape == right[key].shape
        and torch.equal(raw(left[key]), raw(right[key]))
        for key in left
    )
