"""Rounding with feedback in plain torch: any device, no compiler; what the fused kernel must match to the bit."""

from __future__ import annotations

import torch
from torch import Tensor

from modelexport.quantization.kernels import microscaling_reference, reference

__all__ = ["numbers", "round_back"]


def numbers(values: Tensor, step: Tensor, zero: Tensor | None, storage: torch.dtype, low: float, high: float) -> Tensor:
    """The numbers nearest to float32 ``values / step`` (plus ``zero``), ties to even, as float32.

    ``storage`` int8 means the integers ``low .. high``, float8_e4m3fn these, uint8 e2m1.
    """
    if storage == torch.uint8:
        return microscaling_reference.decode(microscaling_reference.encode(values, step, storage))
    ratio = values / step
    if storage == torch.float8_e4m3fn:
        return ratio.clamp(-reference.FP8_MAX, reference.FP8_MAX).to(storage).float()
    if zero is not None:
        ratio = ratio + zero
    return ratio.clamp(low, high).round()


def round_back(
    weight: Tensor,
    carried: Tensor,
    factor: Tensor,
    block_of: Tensor,
    step: Tensor,
    zero: Tensor | None,
    storage: torch.dtype,
    low: float,
    high: float,
    rounded: Tensor,
) -> None:
    """Rounds a block of columns, from the last to the first, to what a grid has.

    Column c is rounded to what is nearest to ``weight[c] + carried[c] + sum of factor[p, c] * error[p]``, p being the
    columns after c, from the last on downwards, and ``error`` the weight minus what it was rounded to. Products and
    sums are rounded one by one, in that order, in float32.

    Args:
        weight: float32 ``[columns, rows]``, contiguous: columns of a weight lie along a row here.
        carried: float32, likewise; what comes from blocks done before. It is written to.
        factor: float32 ``[columns, columns]``, any strides; only what is below the diagonal counts.
        block_of: int64 ``[columns]``: which scale each column has.
        step, zero: float32 ``[scales, rows]``, contiguous.
        storage, low, high: see :func:`numbers`.
        rounded: float32 ``[columns, rows]``, contiguous, filled with what the stored numbers stand for.
    """
    for column in range(weight.shape[0] - 1, -1, -1):
        block = int(block_of[column])
        shift = None if zero is None else zero[block]
        number = numbers(weight[column] + carried[column], step[block], shift, storage, low, high)
        rounded[column] = (number if shift is None else number - shift) * step[block]
        error = weight[column] - rounded[column]
        if column:
            carried[:column] += factor[column, :column].unsqueeze(1) * error
