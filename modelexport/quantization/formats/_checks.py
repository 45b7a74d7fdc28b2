"""What number formats say of a weight that they refuse."""

from __future__ import annotations

import torch
from torch import Tensor

_ROWS_AT_A_TIME = 256


def describe_non_finite(weight: Tensor, amax: Tensor | None, row: int, name: str) -> str:
    """Counts what is wrong with a weight of which ``row`` is the first bad one."""
    nans = infs = 0
    first: tuple[int, int] | None = None
    for start in range(row, weight.shape[0], _ROWS_AT_A_TIME):
        values = weight[start : start + _ROWS_AT_A_TIME]
        bad = (~torch.isfinite(values)).nonzero()
        if bad.numel():
            first = first or (start + int(bad[0, 0]), int(bad[0, 1]))
            nans += int(values.isnan().sum())
            infs += int(values.isinf().sum())
    if first is None:
        assert amax is not None
        largest = float(amax[row if amax.shape[0] > 1 else 0].max())
        return (
            f"{name}: the largest magnitude of row {row} is {largest}, though this shard's part of it is finite: "
            f"another shard holds NaN or Inf. Repair the source checkpoint"
        )
    return (
        f"{name}: {nans} NaN and {infs} Inf among {weight.numel()} values, the first at row {first[0]}, "
        f"column {first[1]}: such a model cannot be exported. Repair the source checkpoint"
    )
