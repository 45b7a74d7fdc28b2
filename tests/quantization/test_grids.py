"""Grids: what a weight can be once its scales are fixed, and values of them that are stored."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from modelexport.quantization import formats, kernels
from tests.benchmarks._fake_formats import Int3Format
from tests.quantization._weights import DTYPES, FORMATS, MICROSCALING, quantise, random_weight, steps, zeros

QUANTISED = tuple((name, group) for name, group in FORMATS if name != "none")


def _weight(name: str, group: int | None, dtype: torch.dtype) -> Tensor:
    """As wide as the format allows, in uneven numbers where it does; more rows than one block of fp8-block."""
    plain = name not in MICROSCALING and group in (None, -1)
    return random_weight(136, 131 if plain else 384, dtype)


def _emptied(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """A copy without the values."""
    copy = {key: value.clone() for key, value in stored.items()}
    copy["weight_packed" if "weight_packed" in copy else "weight"].view(torch.uint8).fill_(1)
    return copy


@pytest.mark.parametrize("observer", ["amax", "mse"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "group"), QUANTISED)
def test_a_grid_has_what_the_format_rounds_to(name, group, dtype, observer):
    number_format = formats.get(name, group_size=group, observer=observer)
    weight = _weight(name, group, dtype)
    stored = quantise(number_format, weight)
    grid, values = number_format.grid(stored), number_format.dequantise(stored)
    assert torch.equal(grid.nearest(weight.float()), values)
    assert torch.equal(grid.nearest(values), values)
    spread = steps(number_format, stored)
    columns = torch.arange(weight.shape[1]) // grid.columns
    assert torch.equal(grid.step[:, columns], spread.float().expand(weight.shape))
    shift = zeros(number_format, stored).float().expand(weight.shape)
    assert torch.equal(shift if grid.zero is None else grid.zero[:, columns], shift)
    copy = _emptied(stored)
    number_format.store(values, copy)
    assert torch.equal(number_format.dequantise(copy), values)


@pytest.mark.parametrize(("name", "group"), QUANTISED)
def test_every_number_can_be_stored(name, group):
    """Numbers drawn at random, far from what rounding the weight to nearest gives."""
    number_format = formats.get(name, group_size=group)
    weight = random_weight(136, 384, torch.bfloat16)
    stored = quantise(number_format, weight)
    grid = number_format.grid(stored)
    drawn = torch.empty(weight.shape).uniform_(
        1.1 * grid.low, 1.1 * grid.high, generator=torch.Generator().manual_seed(1)
    )
    values = grid.values(grid.part(slice(None)).numbers(grid.values(drawn)))
    assert not torch.equal(values, number_format.dequantise(stored))
    assert values.unique().numel() > 8
    copy = _emptied(stored)
    before = kernels._threads
    try:
        kernels.set_threads(2)
        number_format.store(values, copy)
    finally:
        kernels.set_threads(before)
    assert torch.equal(number_format.dequantise(copy), values)
    rest = [key for key in stored if key not in ("weight", "weight_packed")]
    assert all(torch.equal(stored[key], copy[key]) for key in rest)


def test_what_does_not_fit_is_refused():
    number_format = formats.get("int8")
    stored = quantise(number_format, torch.ones(4, 8))
    with pytest.raises(ValueError, match=r"the values are \(4, 7\), but \(4, 8\) is stored"):
        number_format.store(torch.ones(4, 7), stored)
    none = formats.get("none")
    with pytest.raises(ValueError, match="none has no scales"):
        none.grid(none.quantise(torch.ones(4, 8)))


@pytest.mark.parametrize("group", [32, -1])
def test_the_format_that_is_for_comparison_only(group):
    weight = torch.randn(20, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    errors = []
    for observer in ("amax", "mse"):
        number_format = Int3Format.create(group, observer=observer)
        stored = number_format.quantise(weight)
        values, grid = number_format.dequantise(stored), number_format.grid(stored)
        assert stored["weight"].unique().tolist() == [-4, -3, -2, -1, 0, 1, 2, 3]
        assert torch.equal(grid.nearest(weight.float()), values)
        copy = _emptied(stored)
        number_format.store(values, copy)
        assert torch.equal(number_format.dequantise(copy), values)
        errors.append(float((values - weight.float()).square().sum()))
        assert float(number_format.squared_error(weight, stored)[:, 0].sum()) == pytest.approx(errors[-1])
        assert number_format.bits_per_weight((64, 128), torch.bfloat16) == 3 + 16 / (128 if group == -1 else group)
    assert errors[1] < errors[0]


@pytest.mark.parametrize(("name", "group"), QUANTISED)
def test_spacings_reach_from_a_number_to_the_next(name, group):
    number_format = formats.get(name, group_size=group)
    weight = random_weight(136, 384, torch.bfloat16)
    grid = number_format.grid(quantise(number_format, weight))
    values = grid.nearest(weight.float())
    smaller = grid.within(2 * values)  # what is next to the greatest number is on one side only
    away = torch.where(values < 0, -1.0, 1.0) * grid.spacing(values)
    assert torch.equal(grid.nearest(values + 0.49 * away), values)
    reached = grid.nearest(values + 0.51 * away)
    assert torch.equal((reached != values)[smaller], torch.ones_like(smaller)[smaller])
    assert torch.allclose(reached[smaller], (values + away)[smaller])


def test_what_is_beyond_the_grid():
    number_format = formats.get("int4", group_size=32)
    weight = random_weight(8, 32, torch.float32)
    grid = number_format.grid(quantise(number_format, weight))
    given = torch.tensor([[-8.1, -8.0, 0.0, 7.0, 7.1]]) * grid.step[:, :1]
    assert grid.within(given.repeat(1, 7)[:, :32])[:, :5].tolist() == [[False, True, True, True, False]] * 8
