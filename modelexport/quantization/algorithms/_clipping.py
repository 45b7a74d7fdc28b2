"""The range of each block of a weight's row with which the block's part of the output is nearest to what it was.

The clip search of AWQ (Lin et al. 2023). The error is d^T G d, where d is what rounding did to the block and G the
products of its inputs, summed over the sample: for blocks narrower than the sample that is less work than the outputs.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from modelexport.quantization.algorithms import _tiles
from modelexport.quantization.algorithms.base import CalibratedLinear, RankGroup
from modelexport.quantization.formats.base import NumberFormat

STEPS = 20
LEAST = 0.5
"""Ranges tried: 1 and below, down to this part of the largest magnitude."""


def ranges(linear: CalibratedLinear, ranks: RankGroup) -> Tensor | None:
    """See :meth:`.base.Folding.clip`; None also for formats that gain nothing by it."""
    assert linear.number_format is not None
    number_format = replace(linear.number_format, observer="amax")
    weight, inputs = linear.weight, linear.inputs
    block = _block(number_format, linear.shape)
    if block is None or inputs is None or inputs.sample is None or not len(inputs.sample):
        return None
    amax = None
    if number_format.scale_granularity == "tensor":
        own = number_format.amax(weight) if weight.numel() else weight.new_zeros(1)
        amax = ranks.largest(own)
    blocks = weight.shape[1] // block
    metric = _metric(inputs.sample.to(weight.device), blocks)
    found = torch.empty(weight.shape[0], blocks, dtype=torch.float32, device=weight.device)
    for tile in _tiles.tiles_of(linear.rows):
        values = tile.filled(weight)
        found[tile.rows] = _best(values, number_format, metric, blocks, amax)[tile.within]
    return found


def _block(number_format: NumberFormat, shape: tuple[int, int]) -> int | None:
    """Columns of a row that share a scale; None where rows do, and for floats of 8 bits.

    Whatever the range, those are as fine next to a number of the same size: a narrower one gains nothing.
    """
    if number_format.weight_bits == 8 and number_format.weight_arguments()["type"] == "float":
        return None
    for spec in number_format.specs((128, shape[1]), torch.bfloat16):
        if spec.suffix == "weight_scale":
            rows, columns = (_unit(spec.axes, dim) for dim in (0, 1))
            return None if rows != 1 else columns or shape[1]
    return None


def _unit(axes: object, dim: int) -> int | None:
    """Of the weight's rows or columns, how many share an element of a tensor; None for all of them."""
    assert isinstance(axes, tuple)
    return next((axis[1] for axis in axes if axis is not None and axis[0] == dim), None)


def _metric(sample: Tensor, blocks: int) -> Tensor:
    """The inputs of each block, ``[blocks, tokens, width]``, or their products ``[blocks, width, width]``."""
    parts = sample.unflatten(1, (blocks, -1)).transpose(0, 1).contiguous()
    return parts if parts.shape[2] > parts.shape[1] else parts.transpose(1, 2) @ parts


def _best(values: Tensor, number_format: NumberFormat, metric: Tensor, blocks: int, amax: Tensor | None) -> Tensor:
    parts = values.unflatten(1, (blocks, -1))
    largest = parts.abs().amax(dim=2)
    best = largest.clone()
    least: Tensor | None = None
    for step in range(STEPS):
        limit = largest * (1 - step * (1 - LEAST) / STEPS)
        clamped = torch.maximum(torch.minimum(parts, limit.unsqueeze(2)), -limit.unsqueeze(2)).flatten(1)
        stored = number_format.quantise(clamped, amax=amax, inputs=1.0)
        error = _error(number_format.dequantise(stored).sub_(values).unflatten(1, (blocks, -1)), metric)
        if least is None:
            least = error
            continue
        better = error < least
        best, least = torch.where(better, limit, best), torch.where(better, error, least)
    return best


def _error(difference: Tensor, metric: Tensor) -> Tensor:
    """float32 ``[TILE, blocks]``."""
    by_block = difference.transpose(0, 1)
    product = by_block @ (metric if metric.shape[1] == metric.shape[2] else metric.transpose(1, 2))
    if metric.shape[1] == metric.shape[2]:
        return (product * by_block).sum(dim=2).t()
    return product.square().sum(dim=2).t()
