"""The search for awq's scales; see :mod:`.awq`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from modelexport.quantization import kernels
from modelexport.quantization.algorithms import _scaling, _tiles
from modelexport.quantization.algorithms.base import CalibratedLinear, Fold, RankGroup
from modelexport.quantization.calibration.statistics import THINNED, InputStatistics, thinned
from modelexport.quantization.formats.base import NumberFormat

_WORTH = 0.9
"""Of the loss without scales, that is to be reached where inputs have a stored scale: small gains on the sample did not
carry over. fp8-static on the demo model: KL 0.0065 by rtn and 0.0087 where gains of 1 to 6 % were taken, nearly all
of it from up into down. (Why is not known; that other text reaches beyond a range that was made to fit is a guess.)"""


def best_scales(fold: Fold, ranks: RankGroup, grid: int) -> Tensor | None:
    """Returns the best of ``grid`` candidates, None where none is better than no scale; see :meth:`Folding.scales`."""
    readers = [
        linear
        for linear in _scaling.quantised(fold)
        if linear.inputs is not None and linear.inputs.sample is not None and len(linear.inputs.sample)
    ]
    if not readers:
        return None
    columns = _scaling.column_amax(readers, ranks)
    candidates = _candidates(fold, readers, columns, grid)
    losses = torch.zeros(len(candidates), dtype=torch.float64)
    for linear, largest in zip(readers, columns, strict=True):
        assert linear.inputs is not None
        assert linear.inputs.sample is not None
        errors = _errors(linear.computing(), linear.inputs, _scaling.per_input(candidates, fold), largest)
        total = ranks.total(errors, linear.rows, linear.shape[0])
        # An expert that few tokens came to counts for less than its sample alone would make it.
        losses += total * (linear.inputs.tokens / min(THINNED, len(linear.inputs.sample)))
    best = int(losses.argmin())
    static = any(linear.number_format is not None and linear.number_format.has_static_inputs for linear in readers)
    worth = _WORTH if static else 1.0
    return candidates[best] if losses[best] < worth * losses[0] else None


def _candidates(fold: Fold, readers: list[CalibratedLinear], columns: Tensor, grid: int) -> Tensor:
    """float32 ``[grid + 1, features]``, the first of them ones.

    Half of them are powers of the mean magnitude, as the paper has them. The others are powers of the largest
    magnitude over the weights' own (smoothquant's): where activations are rounded it is their extremes that hurt,
    and where a feature's weights are small beyond what its group's scale can hold, that shows in them only.
    """
    inputs = _scaling.given(readers)
    mean, largest = _mean(inputs, fold), _largest(inputs, fold)
    weights = _scaling.largest_per_feature(columns.amax(dim=0), fold).double().cpu()
    degenerate = (mean == 0) | (weights == 0)
    first = (grid + 1) // 2
    powers = [(step + 1) / first for step in range(first)]
    found = [mean**power for power in powers]
    found += [largest**power / weights ** (1 - power) for power in powers[: grid - first]]
    scales = [_scaling.settled(scale.masked_fill(degenerate, torch.nan), fold) for scale in found]
    return torch.stack([torch.ones(fold.features), *scales])


def _largest(inputs: Sequence[InputStatistics], fold: Fold) -> Tensor:
    """float64 ``[features]``."""
    seen = [each.amax for each in inputs if each.amax is not None]
    return _scaling.largest_per_feature(torch.stack(seen).amax(dim=0), fold).double().cpu()


def _mean(inputs: Sequence[InputStatistics], fold: Fold) -> Tensor:
    """float64 ``[features]``: of all tokens that came to any of the readers."""
    tokens = sum(each.tokens for each in inputs)
    parts = [each.mean.double().cpu() * (each.tokens / tokens) for each in inputs if each.mean is not None]
    return _scaling.mean_per_feature(torch.stack(parts).sum(dim=0), fold)


def _errors(linear: CalibratedLinear, inputs: InputStatistics, candidates: Tensor, largest: Tensor) -> Tensor:
    """The squared error of each row's output on the sample at each candidate: float64 ``[rows, candidates]``.

    Args:
        candidates: float32 ``[candidates, in_features]``.
        largest: float32 ``[in_features]``: of the whole weight's columns.
    """
    weight = linear.weight
    assert linear.number_format is not None
    assert inputs.sample is not None
    number_format = replace(linear.number_format, observer="amax")  # a search for each candidate would take too long
    sample = thinned(inputs.sample).to(weight.device)
    largest = largest.to(weight.device)
    errors = torch.empty(weight.shape[0], len(candidates), dtype=torch.float64)

    def work(part: slice) -> None:
        tiles = list(_tiles.tiles_of((linear.rows[0] + part.start, linear.rows[0] + part.stop)))
        wanted = [sample @ tile.filled(weight[part]).t() for tile in tiles]
        for number, candidate in enumerate(candidates.to(weight.device)):
            whole = number_format.scale_granularity == "tensor"
            amax = (largest * candidate).max().reshape(1) if whole else None
            scaled, reach = sample / candidate, _reach(number_format, inputs, candidate)
            rounded: Tensor | None = None
            for tile, expected in zip(tiles, wanted, strict=True):
                stored = number_format.quantise(
                    tile.filled(weight[part]).mul_(candidate), amax=amax, inputs=reach, name=linear.name
                )
                if rounded is None:
                    rounded = number_format.fake_quantise_activations(scaled, stored)
                difference = rounded @ number_format.dequantise(stored).t()
                errors[part][tile.rows, number] = _tiles.squares(difference.sub_(expected), tile).cpu()

    with _tiles.one_thread_an_operation():
        kernels.split_rows(weight, work, _tiles.TILE)
    return errors


def _reach(number_format: NumberFormat, inputs: InputStatistics, candidate: Tensor) -> float | None:
    if not number_format.has_static_inputs:
        return None
    assert inputs.amax is not None
    return float((inputs.amax.to(candidate.device) / candidate).max())
