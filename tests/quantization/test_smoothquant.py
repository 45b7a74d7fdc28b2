"""smoothquant, against the paper's formula and what it is for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from modelexport.quantization import formats
from modelexport.quantization.algorithms import get
from modelexport.quantization.algorithms.base import CalibratedLinear, Fold, Folding, RankGroup
from modelexport.quantization.calibration.statistics import InputStatistics
from tests.quantization._thread_ranks import run_ranks

SMOOTHQUANT = get("smoothquant")


def smoothquant(alpha: float = 0.5, ranks: RankGroup | None = None) -> Folding:
    found = SMOOTHQUANT(SMOOTHQUANT.Settings(alpha=alpha), ranks)
    assert isinstance(found, Folding)
    return found


def linear(
    weight: Tensor, inputs: InputStatistics | None, quant: str | None = "int8", name: str = "q"
) -> CalibratedLinear:
    number_format = None if quant is None else formats.get(quant)
    return CalibratedLinear(
        name, f"attention.{name}", number_format, weight, (0, len(weight)), (len(weight), weight.shape[1]), inputs
    )


def outliers(tokens: int = 256, features: int = 64) -> InputStatistics:
    x = torch.randn(tokens, features)
    x[:, 7] *= 100
    return InputStatistics(features, tokens, x.abs().amax(0), x.abs().mean(0), x)


def fold(
    *linears: CalibratedLinear, exact: bool = False, columns: Tensor | None = None, features: int | None = None
) -> Fold:
    return Fold("norm", None, list(linears), columns, exact, features or linears[0].shape[1])


@pytest.mark.parametrize("alpha", [0.3, 0.5, 0.85])
def test_the_formula(alpha: float) -> None:
    """Of both readers' weights; up to one power of two, by which all features are scaled alike."""
    torch.manual_seed(0)
    inputs, q, k = outliers(), torch.randn(32, 64), 3 * torch.randn(16, 64)
    found = smoothquant(alpha).scales(fold(linear(q, inputs), linear(k, inputs, name="k")))
    assert found is not None
    weights = torch.cat([q, k]).abs().amax(0)
    assert inputs.amax is not None
    ratio = found.double() / (inputs.amax.double() ** alpha / weights.double() ** (1 - alpha))
    assert float((ratio / ratio[0] - 1).abs().max()) < 1e-6
    assert float(ratio[0].log2()) == pytest.approx(round(float(ratio[0].log2())), abs=1e-6)
    assert abs(float(found.log2().mean())) <= 0.5 + 1e-6


def test_what_it_is_for() -> None:
    """Int8 with one scale for all inputs: the error of the outputs falls to a small part."""
    torch.manual_seed(1)
    inputs, weight = outliers(), torch.randn(48, 64)
    assert inputs.sample is not None
    found = smoothquant().scales(fold(linear(weight, inputs, "int8-static")))
    assert found is not None

    def error(scale: Tensor) -> float:
        assert inputs.sample is not None
        x, number_format = inputs.sample / scale, formats.get("int8-static")
        stored = number_format.quantise(weight * scale, inputs=float(x.abs().max()))
        out = number_format.fake_quantise_activations(x, stored) @ number_format.dequantise(stored).t()
        return float((out - inputs.sample @ weight.t()).square().sum())

    assert error(found) < 0.1 * error(torch.ones(64))


def test_powers_of_two_where_a_reader_stays_in_the_models_dtype() -> None:
    torch.manual_seed(2)
    inputs, weight, router = outliers(), torch.randn(32, 64), 1e6 * torch.randn(4, 64)
    readers = (linear(weight, inputs), linear(router, inputs, None))
    found, free = smoothquant().scales(fold(*readers, exact=True)), smoothquant().scales(fold(*readers))
    assert found is not None
    assert free is not None
    assert torch.equal(found.log2(), found.log2().round())
    assert float((found.log2() - free.log2()).abs().max()) <= 0.5 + 1e-6
    alone = smoothquant().scales(fold(readers[0]))
    assert alone is not None
    assert torch.equal(free, alone), "what is not rounded does not count"


def test_what_is_all_zeros_is_left() -> None:
    torch.manual_seed(3)
    inputs, weight = outliers(), torch.randn(32, 64)
    assert inputs.amax is not None
    inputs.amax[3], weight[:, 5] = 0.0, 0.0
    found = smoothquant().scales(fold(linear(weight, inputs)))
    assert found is not None
    assert found[3] == found[5] == 1
    assert bool(torch.isfinite(found).all())
    unseen = linear(weight, None)
    assert smoothquant().scales(fold(unseen)) is None
    assert smoothquant().scales(fold(linear(weight, inputs, None))) is None
    both = smoothquant().scales(fold(linear(weight, inputs), unseen))
    assert both is not None
    assert torch.equal(both, found), "an expert without tokens is one that reads, all the same"


def test_heads_that_share_keys_and_values() -> None:
    """Features 0 and 1, each read by two inputs: the largest of either counts."""
    inputs = InputStatistics(4, 1, torch.tensor([1.0, 2.0, 16.0, 8.0]))
    weight = torch.tensor([[1.0, 1.0, 1.0, 1.0], [1.0, 4.0, 1.0, 1.0]])
    columns = torch.tensor([0, 1, 0, 1])
    found = smoothquant().scales(fold(linear(weight, inputs), columns=columns, features=2))
    assert found is not None
    assert float(found[0] / found[1]) == pytest.approx((16**0.5 / 1) / (8**0.5 / 4**0.5))


def test_ranks_agree_to_the_bit() -> None:
    torch.manual_seed(4)
    inputs, weight = outliers(), torch.randn(40, 64)
    whole = linear(weight, inputs)
    wanted = smoothquant().scales(fold(whole))
    cuts = [(0, 24), (24, 24), (24, 40)]
    found = run_ranks(
        cuts,
        lambda ranks, rows: smoothquant(ranks=ranks).scales(
            fold(replace(whole, weight=weight[rows[0] : rows[1]], rows=rows))
        ),
    )
    assert wanted is not None
    for each in found:
        assert each is not None
        assert torch.equal(each, wanted)
