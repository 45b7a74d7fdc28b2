"""Ranges of static scales: against the formats' own rounding of the numbers that were counted."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from modelexport.quantization import formats
from modelexport.quantization.calibration.static_ranges import METHODS, _levels, choose, squared_error, together, wants
from modelexport.quantization.calibration.statistics import BINS, Collector, InputStatistics
from modelexport.quantization.formats.base import NumberFormat

INT8, FP8, NVFP4 = (formats.get(name) for name in ("int8-static", "fp8-static", "nvfp4"))
KINDS = {"int8-static": "int", "fp8-static": "float"}


def counted(x: Tensor) -> InputStatistics:
    collector = Collector(x.shape[1], ["amax", "histogram"])
    collector.add(x)
    return collector.finish()


def gaussian(outliers: int = 0, seed: int = 0) -> Tensor:
    x = torch.randn(1000, 64, generator=torch.Generator().manual_seed(seed))
    x.view(-1)[: 997 * outliers : 997] *= 30
    return x


def true_error(number_format: NumberFormat, x: Tensor, reach: float) -> float:
    scale = torch.tensor([number_format.input_scale(reach)])
    rounded = number_format.fake_quantise_activations(x, {"input_scale": scale})
    return float((rounded.double() - x.double()).square().sum())


@pytest.mark.parametrize("number_format", [INT8, FP8], ids=lambda found: found.name)
@pytest.mark.parametrize("outliers", [0, 3, 50])
def test_the_error_is_that_of_the_formats_rounding(number_format: NumberFormat, outliers: int) -> None:
    x = gaussian(outliers)
    statistics = counted(x)
    levels = _levels(KINDS[number_format.name])
    amax = float(x.abs().max())
    for part in (1.0, 0.7, 0.31, 0.1):
        expected = squared_error(statistics.histogram, amax * part, levels)
        # Bins are about a step wide, so what lies beyond the reach, or on a step, is known to a few percent.
        assert expected == pytest.approx(true_error(number_format, x, amax * part), rel=0.05)


def test_integral_of_one_bin() -> None:
    """Of magnitudes between 1 and 1 + 2^-7, by many points."""
    counts = torch.zeros(BINS, dtype=torch.int64)
    counts[0x3F80] = 1000
    points = 1 + (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000 / 128
    for kind in ("int", "float"):
        levels = _levels(kind)
        for reach in (0.5, 1.001, 1.0037, 1.5, 77.0, 1000.0):
            distances = (points.unsqueeze(1) - levels * (reach / levels[-1])).abs()
            wanted = 1000 * float(distances.amin(dim=1).square().mean())
            assert squared_error(counts, reach, levels) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("number_format", [INT8, FP8], ids=lambda found: found.name)
@pytest.mark.parametrize("outliers", [0, 3, 50])
def test_mse_is_about_the_best_there_is(number_format: NumberFormat, outliers: int) -> None:
    x = gaussian(outliers)
    amax = float(x.abs().max())
    reach = choose(counted(x), "mse", number_format)
    best = min(true_error(number_format, x, amax * 2.0 ** (-step / 8)) for step in range(50))
    assert reach <= amax
    assert true_error(number_format, x, reach) <= 1.03 * best


def test_mse_cuts_off_a_few_outliers_for_int8() -> None:
    x = gaussian(1)
    x[0, 0] = 40.0
    assert choose(counted(x), "max", INT8) == 40.0
    assert choose(counted(x), "mse", INT8) < 35.0
    assert choose(counted(gaussian(0)), "mse", INT8) > 0.7 * float(gaussian(0).abs().max())


def test_percentile_covers_that_part() -> None:
    x = gaussian(50)
    statistics = counted(x)
    magnitudes = x.abs().flatten().sort().values
    for fraction in (0.5, 0.9, 0.999, 0.9999, 1.0):
        reach = choose(statistics, "percentile", INT8, fraction=fraction)
        wanted = float(magnitudes[math.ceil(fraction * len(magnitudes)) - 1])
        assert wanted <= reach <= wanted * (1 + 2**-7)
    assert choose(statistics, "percentile", INT8, fraction=1.0) == float(magnitudes[-1])
    assert choose(statistics, "percentile") == choose(statistics, "percentile", FP8, fraction=0.9999)


def test_kv_cache_and_nvfp4() -> None:
    statistics = counted(gaussian(3))
    amax = float(statistics.amax.max())
    assert choose(statistics) == choose(statistics, "max", NVFP4) == choose(statistics, "mse", NVFP4) == amax
    assert choose(statistics, "mse") == choose(statistics, "mse", FP8)
    assert choose(statistics, "percentile", NVFP4) == choose(statistics, "percentile", INT8) < amax


@pytest.mark.parametrize("method", METHODS)
def test_zeros_and_extremes(method: str) -> None:
    assert choose(counted(torch.zeros(4, 8)), method, INT8) == 0.0
    for value in (1e-42, 3.0e38, torch.finfo(torch.float32).max):
        exact = float(torch.tensor(value))
        reach = choose(counted(torch.full((4, 8), value)), method, INT8)
        assert exact * 0.98 <= reach <= exact


def test_only_the_counts_matter() -> None:
    x = gaussian(7)
    again = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(1))]
    for method in METHODS:
        for number_format in (INT8, FP8, NVFP4, None):
            assert choose(counted(x), method, number_format) == choose(counted(again), method, number_format)


def test_together() -> None:
    parts = [gaussian(2, seed) for seed in range(3)]
    whole = counted(torch.cat(parts))
    found = together([counted(part) for part in parts])
    assert found.tokens == whole.tokens
    assert torch.equal(found.histogram, whole.histogram)
    for method in METHODS:
        assert choose(found, method, INT8) == choose(whole, method, INT8)
    assert together([counted(parts[0]), InputStatistics(64, amax=torch.ones(64))]).histogram is None


def test_refusals() -> None:
    statistics = counted(gaussian())
    with pytest.raises(ValueError, match=r"no method 'minmax' .* max, percentile, mse"):
        choose(statistics, "minmax")
    with pytest.raises(ValueError, match="number format fp8 stores no scale of inputs"):
        choose(statistics, "max", formats.get("fp8"))
    with pytest.raises(ValueError, match="need the statistic 'amax'"):
        choose(InputStatistics(64))
    with pytest.raises(ValueError, match="'mse' need the statistic 'histogram'"):
        choose(InputStatistics(64, amax=torch.ones(64)), "mse")
    with pytest.raises(ValueError, match="largest magnitude is inf"):
        choose(InputStatistics(64, amax=torch.full((64,), torch.inf)))
    with pytest.raises(ValueError, match=r"fraction of 1\.5"):
        choose(statistics, "percentile", fraction=1.5)
    assert wants("max") == {"amax"}
    assert wants("mse") == wants("percentile") == {"amax", "histogram"}
