"""The errors of a large weight's outputs are told by some of its rows, the same ones on any number of ranks."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from modelexport.quantization import formats
from modelexport.quantization.algorithms.base import CalibratedLinear
from modelexport.quantization.calibration.cut import ROWS
from modelexport.quantization.calibration.statistics import InputStatistics
from modelexport.quantization.output_errors import OutputErrors, some_rows


def linear(rows: int, name: str = "int4", group: int | None = 32) -> CalibratedLinear:
    torch.manual_seed(0)
    weight, inputs = torch.randn(rows, 64), InputStatistics(64, sample=torch.randn(40, 64))
    return CalibratedLinear("l", "mlp.up", formats.get(name, group_size=group), weight, (0, rows), (rows, 64), inputs)


def errors(whole: CalibratedLinear, start: int, stop: int, *, parts: bool) -> torch.Tensor:
    own = replace(whole, weight=whole.weight[start:stop], rows=(start, stop))
    some = some_rows(own) if parts else None
    found = OutputErrors()
    told = own if some is None else replace(own, weight=own.weight[some])
    found.add(own, told.nearest(), some=some)
    return found.tables["l"][0]


def test_a_part_of_the_rows_tells_the_error_of_all_on_any_rank() -> None:
    whole = linear(19 * ROWS + 5)
    part, every = (errors(whole, 0, len(whole.weight), parts=parts) for parts in (True, False))
    looked_at = part[:, 1] > 0
    assert looked_at.sum() == 5 * ROWS
    assert torch.equal(part[looked_at], every[looked_at])
    ratios = [float(table[:, 0].sum() / table[:, 1].sum()) for table in (part, every)]
    assert ratios[0] == pytest.approx(ratios[1], rel=0.03)
    cuts = [0, 3 * ROWS, 3 * ROWS, 9 * ROWS, len(whole.weight)]
    shards = [errors(whole, *cut, parts=True) for cut in itertools.pairwise(cuts)]
    assert torch.equal(torch.cat(shards), part)


def test_of_few_rows_and_of_scales_beyond_a_chunk_all_are_looked_at() -> None:
    assert some_rows(linear(15 * ROWS)) is None
    assert some_rows(linear(20 * ROWS, "fp8-static", None)) is None
