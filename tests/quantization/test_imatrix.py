"""imatrix: the scales it takes are those with which the outputs are nearest, whoever has the rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from modelexport.quantization import formats
from modelexport.quantization.algorithms import get
from modelexport.quantization.algorithms.base import CalibratedLinear, RankGroup, Rounding
from modelexport.quantization.calibration.statistics import InputStatistics
from modelexport.quantization.formats._packed import PackedFormat
from tests.quantization._thread_ranks import run_ranks

FEATURES = 256
ROWS = 200
BY_BLOCKS = [
    ("int4", 32),
    ("int4", 128),
    ("int4", -1),
    ("int4-asym", 64),
    ("int8-wo", 128),
    ("int8", None),
    ("fp8", None),
    ("nvfp4-wo", None),
    ("mxfp4-wo", None),
]


def linear(sample: Tensor | None, quant: str, group_size: int | None = None) -> CalibratedLinear:
    weight = torch.randn(ROWS, FEATURES) ** 3
    number_format = formats.get(quant, group_size=group_size, observer="mse")
    inputs = None if sample is None else InputStatistics(FEATURES, len(sample), sample=sample)
    amax = number_format.amax(weight) if number_format.scale_granularity != "block" else None
    return CalibratedLinear(
        "down", "mlp.down", number_format, weight, (0, ROWS), (ROWS, FEATURES), inputs, amax, input_amax=4.0
    )


def rounded(read: CalibratedLinear, ranks: RankGroup | None = None) -> dict[str, Tensor]:
    algorithm = get("imatrix")(ranks=ranks)
    assert isinstance(algorithm, Rounding)
    return dict(algorithm.quantise([read])[read.name])


def decoded(read: CalibratedLinear, native: dict[str, Tensor]) -> Tensor:
    assert read.number_format is not None
    return read.number_format.dequantise(native)


@pytest.mark.parametrize(("quant", "group_size"), BY_BLOCKS)
def test_inputs_of_one_feature_each_weigh_all_errors_alike(quant: str, group_size: int | None) -> None:
    """G is then the identity: the scales are those of observer "mse", found by the kernels."""
    torch.manual_seed(0)
    read = linear(torch.eye(FEATURES), quant, group_size)
    found, wanted = rounded(read), read.rounded()
    assert torch.equal(decoded(read, found), decoded(read, wanted))


@pytest.mark.parametrize(("quant", "group_size"), [*BY_BLOCKS, ("q2-k", None), ("q6-k", None), ("iq4-nl", None)])
def test_the_outputs_error_falls(quant: str, group_size: int | None) -> None:
    """Of inputs some features of which are large, and go together."""
    torch.manual_seed(1)
    sample = torch.randn(64, FEATURES)
    sample[:, ::5] = 20 * sample[:, :1]
    read = linear(sample, quant, group_size)

    def error(native: dict[str, Tensor]) -> float:
        return float((sample @ (decoded(read, native) - read.weight).t()).double().square().sum())

    assert error(rounded(read)) < error(read.rounded())


@pytest.mark.parametrize("quant", ["fp8-block", "fp8-static"])
def test_scales_of_more_than_a_row_are_searched_as_mse_does(quant: str) -> None:
    torch.manual_seed(2)
    read = linear(torch.randn(64, FEATURES), quant)
    assert torch.equal(decoded(read, rounded(read)), decoded(read, read.rounded()))


def test_a_linear_that_no_sample_came_to_is_searched_as_mse_does() -> None:
    torch.manual_seed(3)
    for sample in (None, torch.zeros(0, FEATURES)):
        for quant in ("int4", "q4-k"):
            read = linear(sample, quant)
            assert torch.equal(decoded(read, rounded(read)), decoded(read, read.rounded()))


def test_blocks_are_fitted_to_inputs_that_are_nearly_all_zero() -> None:
    """Products of which no Cholesky factor exists: a token, features that are never touched, and nothing at all."""
    for sample in (torch.ones(1, FEATURES), torch.eye(FEATURES)[:3], torch.zeros(4, FEATURES)):
        read = linear(sample, "q4-k")
        error = (decoded(read, rounded(read)) - read.weight).square().sum() / read.weight.square().sum()
        assert error < 0.04


@pytest.mark.parametrize("quant", ["int4", "nvfp4", "int8-static", "q4-k"])
def test_ranks_find_the_same_bits(quant: str) -> None:
    """However the rows are cut, also within a tile, and where a rank has none."""
    torch.manual_seed(4)
    whole = linear(torch.randn(64, FEATURES), quant)
    wanted = decoded(whole, rounded(whole))

    def work(ranks: RankGroup, rows: tuple[int, int]) -> Tensor:
        part = slice(*rows)
        amax = whole.amax if whole.amax is None or len(whole.amax) == 1 else whole.amax[part]
        own = replace(whole, weight=whole.weight[part].clone(), rows=rows, amax=amax)
        return decoded(own, rounded(own, ranks))

    found = run_ranks([(0, 70), (70, 70), (70, 130), (130, ROWS)], work)
    assert torch.equal(torch.cat(found), wanted)


@pytest.mark.parametrize(("quant", "group_size"), [("int4", 32), ("int4-asym", 64), ("int8-wo", 128)])
def test_what_changes_between_scales_is_enough_to_choose_by(
    quant: str, group_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU's way gives what a product for each scale does, which other devices take."""
    torch.manual_seed(5)
    read = linear(torch.randn(300, FEATURES), quant, group_size)
    quick = decoded(read, rounded(read))
    monkeypatch.setattr(PackedFormat, "choose", lambda *_: None)
    assert (quick == decoded(read, rounded(read))).float().mean() > 0.999  # but for scales that are as good
