"""Rounding with feedback in plain torch: any device, no compiler; what the fused kernel must match to the bit."""

from __future__ import annotations

import torch
from torch import Tensor

from modelexport.quantization.kernels import microscaling_reference, reference

__all__ = ["descend", "nearest_moved", "numbers", "round_back", "spacing"]


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


def spacing(values: Tensor, step: Tensor, storage: torch.dtype, high: float) -> Tensor:
    """The distances between the numbers on both sides of ``values / step``, times ``step``; for the rest see
    :func:`numbers`. float32 ``[rows, cols]``, or what can be broadcast to that."""
    if storage == torch.int8:
        return step
    # Of a float 2^e * 1.m, the distance is 2^(e - bits of m); below the normal numbers, that of the least of them.
    bits, least = (1, 2.0**0) if storage == torch.uint8 else (3, 2.0**-6)
    sizes = (values / step).abs().clamp(min=least, max=high)
    power = sizes / torch.frexp(sizes).mantissa  # 2^(e + 1), exactly: no function is asked for it
    return step * (power * 0.5 ** (bits + 1))


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


def nearest_moved(
    weight: Tensor,
    offset: Tensor,
    step: Tensor,
    zero: Tensor | None,
    columns: int,
    storage: torch.dtype,
    low: float,
    high: float,
    out: Tensor,
) -> None:
    """Fills ``out`` with the values that can be stored which are nearest to ``weight + offset * spacing``.

    Args:
        weight, offset, out: float32 ``[rows, cols]``, contiguous; offsets are in the distances of :func:`spacing`.
        step, zero: float32 ``[rows, blocks]``: what a number is multiplied by when ``zero``, if any, has been taken
            off; for each ``columns`` columns, the last of which may be fewer.
        storage, low, high: see :func:`numbers`.
    """
    for block in reference._row_blocks(*weight.shape):
        wide, shift = _for_columns(step[block], zero, block, columns, weight.shape[1])
        moved = weight[block] + offset[block] * spacing(weight[block], wide, storage, high)
        number = numbers(moved, wide, shift, storage, low, high)
        out[block] = (number if shift is None else number - shift) * wide


def descend(
    weight: Tensor,
    offset: Tensor,
    gradient: Tensor,
    step: Tensor,
    zero: Tensor | None,
    columns: int,
    storage: torch.dtype,
    low: float,
    high: float,
    rate: float,
) -> None:
    """Moves offsets by ``rate`` against the signs of a gradient, as far as -0.5 and 0.5, where
    ``weight + offset * spacing`` is not beyond the numbers ``low .. high``. For the arguments see
    :func:`nearest_moved`.
    """
    for block in reference._row_blocks(*weight.shape):
        wide, shift = _for_columns(step[block], zero, block, columns, weight.shape[1])
        number = (weight[block] + offset[block] * spacing(weight[block], wide, storage, high)) / wide
        number = number if shift is None else number + shift
        within = (number >= low) & (number <= high)
        offset[block] = offset[block].sub(gradient[block].sign() * within, alpha=rate).clamp(-0.5, 0.5)


def _for_columns(
    step: Tensor, zero: Tensor | None, block: slice, columns: int, cols: int
) -> tuple[Tensor, Tensor | None]:
    """A block of rows' steps and zero points, one for each column."""
    wide = step.repeat_interleave(columns, dim=1)[:, :cols]
    return wide, None if zero is None else zero[block].repeat_interleave(columns, dim=1)[:, :cols]
