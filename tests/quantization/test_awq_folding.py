"""awq: the candidates it takes are those with the least error, and ranks agree on them to the bit."""

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

AWQ = get("awq")
FEATURES = 256
ROWS = 200


def awq(ranks: RankGroup | None = None, grid: int = 8) -> Folding:
    found = AWQ(AWQ.Settings(grid=grid), ranks)
    assert isinstance(found, Folding)
    return found


def inputs_of(x: Tensor, tokens: int | None = None) -> InputStatistics:
    return InputStatistics(x.shape[1], tokens or len(x), x.abs().amax(0), x.abs().mean(0), x)


def salient(tokens: int = 128) -> Tensor:
    """Inputs a few features of which are much larger than the others."""
    x = torch.randn(tokens, FEATURES)
    x[:, ::50] *= 30
    return x


def linear(
    weight: Tensor, inputs: InputStatistics | None, quant: str, group_size: int | None = None
) -> CalibratedLinear:
    number_format = formats.get(quant, group_size=group_size)
    return CalibratedLinear(
        "down", "mlp.down", number_format, weight, (0, len(weight)), (len(weight), weight.shape[1]), inputs
    )


def fold(*linears: CalibratedLinear, exact: bool = False) -> Fold:
    return Fold("norm", None, list(linears), None, exact, FEATURES)


def output_error(linear: CalibratedLinear, scale: Tensor) -> float:
    """By its definition, without tiles: of the outputs, activations rounded where the format does that."""
    assert linear.number_format is not None
    assert linear.inputs is not None
    assert linear.inputs.sample is not None
    weight, x = linear.weight * scale, linear.inputs.sample / scale
    stored = linear.number_format.quantise(weight, inputs=float(x.abs().max()))
    out = linear.number_format.fake_quantise_activations(x, stored) @ linear.number_format.dequantise(stored).t()
    return float((out - linear.inputs.sample @ linear.weight.t()).double().square().sum())


@pytest.mark.parametrize("quant", ["int4", "int4-asym", "int8-static", "nvfp4", "fp8-static", "w4a8", "fp8-block"])
def test_the_outputs_error_falls(quant: str) -> None:
    torch.manual_seed(0)
    read = linear(torch.randn(ROWS, FEATURES), inputs_of(salient()), quant)
    found = awq().scales(fold(read))
    before = output_error(read, torch.ones(FEATURES))
    if found is None:
        assert quant.startswith("fp8"), "floats keep their precision whatever their scale"
        return
    assert output_error(read, found) < {"int4": 0.6, "int8-static": 0.2}.get(quant, 1.0) * before


def test_nothing_is_scaled_where_nothing_is_better() -> None:
    """Weights that are numbers of their format: whatever else a few large features would ask for."""
    torch.manual_seed(1)
    numbers = torch.tensor([0.5, 1, 1.5, 2, 3, 4, 6])
    weight = numbers[torch.randint(7, (ROWS, FEATURES))] * torch.randn(ROWS, FEATURES).sign()
    weight[:, ::32] = 6
    read = linear(weight, inputs_of(salient()), "mxfp4-wo")
    assert output_error(read, torch.ones(FEATURES)) == 0
    assert awq().scales(fold(read)) is None
    assert awq().scales(fold(replace(read, inputs=None))) is None
    assert awq().scales(fold(replace(read, number_format=None))) is None


def test_a_reader_weighs_as_many_tokens_as_came_to_it() -> None:
    """Two experts that want different scales: the one with nearly all tokens gets its way."""
    torch.manual_seed(2)
    one, two = salient(), salient().roll(25, dims=1)
    weights = torch.randn(2, ROWS, FEATURES)
    few, many = (linear(weights[0], inputs_of(one, n), "int4") for n in (128, 100_000))
    other_few, other_many = (linear(weights[1], inputs_of(two, n), "int4") for n in (128, 100_000))
    first, second = awq().scales(fold(many, other_few)), awq().scales(fold(few, other_many))
    assert first is not None
    assert second is not None
    assert output_error(many, first) < output_error(many, second)
    assert output_error(other_few, second) < output_error(other_few, first)


def test_powers_of_two_where_a_router_reads() -> None:
    torch.manual_seed(3)
    read = linear(torch.randn(ROWS, FEATURES), inputs_of(salient()), "int4")
    found = awq().scales(fold(read, replace(read, number_format=None), exact=True))
    assert found is not None
    assert torch.equal(found.log2(), found.log2().round())


@pytest.mark.parametrize("quant", ["int4", "nvfp4", "int8-static"])
def test_ranks_agree_to_the_bit(quant: str) -> None:
    """However the rows are cut, also within a tile, and where a rank has none."""
    torch.manual_seed(4)
    whole = linear(torch.randn(ROWS, FEATURES), inputs_of(salient()), quant)
    alone = awq(grid=4)
    wanted = alone.scales(fold(whole))
    assert wanted is not None
    cuts = [(0, 70), (70, 70), (70, 130), (130, ROWS)]

    def work(ranks: RankGroup, rows: tuple[int, int]) -> Tensor | None:
        own = replace(whole, weight=whole.weight[rows[0] : rows[1]].clone(), rows=rows)
        return awq(ranks, grid=4).scales(fold(own))

    for scale in run_ranks(cuts, work):
        assert scale is not None
        assert torch.equal(scale, wanted)
