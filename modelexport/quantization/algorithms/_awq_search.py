"""The search for awq's scales; see :mod:`.awq`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from modelexport.quantization import kernels
from modelexport.quantization.algorithms import _scaling, _tiles
from modelexport.quantization.algorithms.base import CalibratedLinear, Fold, RankGroup
from modelexport.quantization.calibration.products import product
from modelexport.quantization.calibration.statistics import THINNED, InputStatistics, thinned
from modelexport.quantization.formats.base import NumberFormat

_WORTH = 0.9
"""Of the loss without scales, that is to be reached where inputs have a stored scale: small gains on the sample did not
carry over. fp8-static on the demo model: KL 0.0065 by rtn and 0.0087 where gains of 1 to 6 % were taken, nearly all
of it from up into down. (Why is not known; that other text reaches beyond a range that was made to fit is a guess.)"""


_EVERY, _KEPT = 8, 5
"""All candidates are tried on every so many tiles of a weight's rows, and so many of them, the best, on the others."""


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
    search = _Search(readers, columns, _scaling.per_input(candidates, fold), ranks)
    losses = search.losses(range(len(candidates)), first=True)
    left = [0, *sorted(1 + number for number in losses[1:].argsort(stable=True)[:_KEPT].tolist())]
    losses = search.losses(left, first=False)[left]
    best = int(losses.argmin())
    static = any(linear.number_format is not None and linear.number_format.has_static_inputs for linear in readers)
    worth = _WORTH if static else 1.0
    return candidates[left[best]] if losses[best] < worth * losses[0] else None


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


class _Search:
    """The squared errors of the readers' outputs on the sample, of each row at each candidate.

    Args:
        columns: float32 ``[readers, in_features]``: the largest magnitudes in their columns, of the whole weights.
        candidates: float32 ``[candidates, in_features]``.

    Attributes:
        tables: float64 ``[rows, candidates]`` for each reader: 0 where nothing has been tried.
    """

    def __init__(
        self, readers: Sequence[CalibratedLinear], columns: Tensor, candidates: Tensor, ranks: RankGroup
    ) -> None:
        self.readers, self.columns, self.candidates, self.ranks = readers, columns, candidates, ranks
        shapes = [(len(linear.weight), len(candidates)) for linear in readers]
        self.tables = [torch.zeros(shape, dtype=torch.float64) for shape in shapes]

    def losses(self, numbers: Sequence[int], *, first: bool) -> Tensor:
        """Tries some of the candidates on a part of the tiles; returns the losses on all that they were tried on.

        Args:
            first: every :data:`_EVERY`-th tile; False: the others.

        Returns:
            float64 ``[candidates]``, the same on all ranks.
        """
        found = torch.zeros(len(self.candidates), dtype=torch.float64)
        for linear, largest, table in zip(self.readers, self.columns, self.tables, strict=True):
            assert linear.inputs is not None
            assert linear.inputs.sample is not None
            tiles = [tile for tile in _tiles.tiles_of(linear.rows) if (tile.number % _EVERY == 0) == first]
            if tiles:
                _try(linear.computing(), tiles, self.candidates[list(numbers)], numbers, largest, table)
            total = self.ranks.total(table, linear.rows, linear.shape[0])
            # An expert that few tokens came to counts for less than its sample alone would make it.
            found += total * (linear.inputs.tokens / min(THINNED, len(linear.inputs.sample)))
        return found


def _try(
    linear: CalibratedLinear,
    tiles: Sequence[_tiles.Tile],
    candidates: Tensor,
    numbers: Sequence[int],
    largest: Tensor,
    table: Tensor,
) -> None:
    """Fills the rows of some tiles, in the columns ``numbers`` of a table, with the errors at these candidates."""
    weight, inputs = linear.weight, linear.inputs
    assert linear.number_format is not None
    assert inputs is not None
    assert inputs.sample is not None
    number_format = replace(linear.number_format, observer="amax")  # a search for each candidate would take too long
    rounds_inputs = number_format.input_arguments() is not None
    sample = thinned(inputs.sample).to(weight.device)
    largest, candidates = largest.to(weight.device), candidates.to(weight.device)
    wanted = torch.empty(len(tiles), _tiles.TILE, len(sample), device=weight.device)

    def multiply(part: slice) -> None:
        torch.set_num_threads(1)  # of this thread, which may have computed with more before
        for number in range(part.start, part.stop):
            product(tiles[number].filled(weight), sample, out=wanted[number])

    def work(part: slice) -> None:
        torch.set_num_threads(1)
        for place in range(part.start, part.stop):
            candidate = candidates[place]
            whole = number_format.scale_granularity == "tensor"
            amax = (largest * candidate).max().reshape(1) if whole else None
            given, reach = sample / candidate, _reach(number_format, inputs, candidate)
            rounded = None if rounds_inputs else given
            for tile, expected in zip(tiles, wanted, strict=True):
                scaled = tile.filled(weight) * candidate
                if rounds_inputs:
                    stored = number_format.quantise(scaled, amax=amax, inputs=reach, name=linear.name)
                    decoded = number_format.dequantise(stored)
                    rounded = number_format.fake_quantise_activations(given, stored) if rounded is None else rounded
                else:
                    decoded = number_format.nearest(scaled, amax=amax, name=linear.name)
                assert rounded is not None
                difference = product(decoded, rounded).sub_(expected)
                table[tile.rows, numbers[place]] = _tiles.squares(difference, tile).cpu()

    with _tiles.one_thread_an_operation():
        kernels.split(len(tiles), multiply, weight)
        kernels.split(len(candidates), work, weight)


def _reach(number_format: NumberFormat, inputs: InputStatistics, candidate: Tensor) -> float | None:
    if not number_format.has_static_inputs:
        return None
    assert inputs.amax is not None
    return float((inputs.amax.to(candidate.device) / candidate).max())
