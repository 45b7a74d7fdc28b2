"""gptq against its textbook form in float64; its kernel bit for bit; neither ranks nor threads leave a trace."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from _gptq_targets import dealt, inputs, linears, quantise, statistics, values, weights
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from modelexport.distributed.launch import MultiprocessConfig, launch_subprocesses
from modelexport.errors import CheckpointError
from modelexport.quantization import formats, kernels
from modelexport.quantization.algorithms import _factor
from modelexport.quantization.algorithms._gptq_rounding import made_up, round_rows
from modelexport.quantization.algorithms.base import CalibratedLinear
from modelexport.quantization.algorithms.gptq import Gptq
from modelexport.quantization.calibration.cut import ROWS
from modelexport.quantization.calibration.statistics import Collector, InputStatistics
from modelexport.quantization.formats.base import NumberFormat
from modelexport.quantization.kernels import feedback_fused, feedback_reference
from tests.quantization._weights import raw, same_bytes

CHOICES = (
    ("int4", 128),
    ("int4", -1),
    ("int4-asym", 32),
    ("int8", None),
    ("fp8", None),
    ("fp8-static", None),
    ("fp8-block", None),
    ("nvfp4-wo", None),
    ("mxfp4-wo", None),
    ("mxfp8", None),
)


def _format(name: str, group: int | None = None) -> NumberFormat:
    return formats.get(name, group_size=group, observer="mse", scale_dtype=torch.bfloat16)


def _linear(
    weight: Tensor, given: InputStatistics | None, number_format: NumberFormat, start: int = 0
) -> CalibratedLinear:
    rows = (start, start + len(weight))
    reach = 3.0 if number_format.has_static_inputs else None
    amax = number_format.amax(weight) if number_format.scale_granularity == "tensor" else None
    return CalibratedLinear(
        "model.l", "attention.q", number_format, weight, rows, (512, weight.shape[1]), given, amax, reach
    )


def _stored(linear: CalibratedLinear, **settings: object) -> dict[str, Tensor]:
    return Gptq(Gptq.Settings(**settings)).quantise([linear])["model.l"]


def _loss(weight: Tensor, values: Tensor, x: Tensor) -> float:
    error = (weight - values).double() @ x.double().T
    return float(error.square().sum())


def _textbook(linear: CalibratedLinear, x: Tensor, damping: float, act_order: bool) -> Tensor:
    """Optimal brain quantisation in float64, by the inverse, which shrinks by a column at each step."""
    hessian = x.double().T @ x.double()
    diagonal = hessian.diagonal().clone()
    added = damping * diagonal.log().mean().exp() * torch.eye(len(diagonal), dtype=torch.float64)
    inverse = torch.linalg.inv(hessian + added)
    grid = linear.number_format.grid(linear.rounded())
    weight, out = linear.weight.double(), torch.empty_like(linear.weight)
    for column in diagonal.argsort(descending=True, stable=True) if act_order else range(len(diagonal)):
        block = int(column) // grid.columns
        one = dataclasses.replace(
            grid, step=grid.step[:, [block]], zero=None if grid.zero is None else grid.zero[:, [block]]
        )
        out[:, column] = one.nearest(weight[:, [column]].float())[:, 0]
        error = (weight[:, column] - out[:, column]) / inverse[column, column]
        weight = weight - error.unsqueeze(1) * inverse[column]
        inverse = inverse - torch.outer(inverse[:, column], inverse[column]) / inverse[column, column]
    return out


@pytest.mark.parametrize(
    ("name", "group", "act_order"), [*((*choice, True) for choice in CHOICES), ("int4", 64, False)]
)
def test_it_is_the_textbook_algorithm(name, group, act_order):
    x, weight = inputs(128, 300), weights()[0][:136, :128].contiguous()
    linear = _linear(weight, statistics(x), _format(name, group))
    stored = _stored(linear, act_order=act_order, block_size=96, damping=0.05)
    ours = linear.number_format.dequantise(stored)
    expected = _textbook(linear, x, 0.05, act_order)
    # Where a target lies between two numbers, float32 may choose the other; what follows in the row then differs.
    same = (ours == expected).all(dim=1)
    assert same.sum() > 100, f"{int(same.sum())} of 136 rows"
    nearest = linear.number_format.dequantise(linear.rounded())
    loss, textbook, rtn = (_loss(weight, v, x) for v in (ours, expected, nearest))
    assert loss == pytest.approx(textbook, rel=0.01)
    assert loss < 0.8 * rtn
    scales = [key for key in stored if key not in ("weight", "weight_packed")]
    assert all(torch.equal(stored[key], linear.rounded()[key]) for key in scales)


def test_blocks_with_a_minimum_get_a_level_where_large_inputs_need_one():
    """Small weights of large inputs, as models with outliers have them: scales that look at weights alone leave them
    between two levels, which no rounding makes up for."""
    x, weight = inputs(256, 600), weights()[0][:136, :256].contiguous()
    large = torch.ones(256)
    large[::16] = 30.0
    linear = _linear(weight / large, statistics(x * large), _format("q4-k"))
    blind = linear.rounded()
    plan = Gptq()._plan(linear.inputs, [linear])
    round_rows(linear, plan, blind)
    loss, without = (
        _loss(linear.weight, linear.number_format.dequantise(each), x * large) for each in (_stored(linear), blind)
    )
    assert loss < 0.2 * without


@given(st.data())
def test_the_kernel_gives_the_same_bits(data):
    storage = data.draw(st.sampled_from([torch.int8, torch.float8_e4m3fn, torch.uint8]))
    columns, rows, scales = (data.draw(st.integers(1, most)) for most in (20, 19, 4))
    half = 2.0 ** data.draw(st.sampled_from([2, 3, 7]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    exponents = torch.randint(-140, 20, (scales, rows), generator=generator)
    step = (torch.rand(scales, rows, generator=generator) + 1) * torch.exp2(exponents.float())
    zero = torch.randint(int(-half), int(half), (scales, rows), generator=generator).float()
    zero = zero if storage == torch.int8 and data.draw(st.booleans()) else None
    block_of = torch.randint(0, scales, (columns,), generator=generator)
    spread = 2.0 ** data.draw(st.integers(-3, 10))
    weight = torch.randn(columns, rows, generator=generator) * step[block_of] * spread
    carried = torch.randn(columns, rows, generator=generator) * step[block_of]
    factor = torch.randn(columns, columns, generator=generator)
    factor = factor.T if data.draw(st.booleans()) else factor
    found = []
    for module in (feedback_fused, feedback_reference):
        rounded, given_carried = torch.full_like(weight, math.nan), carried.clone()
        how = (block_of, step, zero, storage, -half, half - 1)
        module.round_back(weight, given_carried, factor, *how, rounded)
        found.append(rounded)
    assert torch.equal(raw(found[0] + 0.0), raw(found[1] + 0.0))


@pytest.mark.parametrize("size", [5, 256, 300, 1400])
def test_the_factor(size):
    x = inputs(size, 2 * size)
    hessian = x.T @ x
    order = _factor.ascending(hessian.diagonal())
    assert bool((hessian.diagonal()[order].diff() >= 0).all())
    permuted = hessian.clone()
    _factor.permute(permuted, order)
    assert torch.equal(permuted, hessian[order][:, order])
    kept = permuted.clone()
    assert _factor.factorise(permuted, 0.01) == 0.01
    assert torch.equal(permuted.triu(1), kept.triu(1))
    lower = permuted.tril().double()
    damped = kept.double() + 0.01 * kept.double().diagonal().log().mean().exp() * torch.eye(size)
    assert float((lower @ lower.T - damped).abs().max()) < 1e-5 * float(damped.diagonal().max())


def test_fewer_tokens_are_damped_more() -> None:
    """Without a damping that is asked for: twice the features over the tokens."""
    for tokens in (64, 640):
        x = inputs(32, tokens)
        hessian = x.double().T @ x.double()
        given = statistics(x)
        factor = Gptq()._plan(given, [_linear(torch.randn(8, 32), given, _format("int8"))]).factor.tril().double()
        added = torch.diagonal(factor @ factor.T).sum() - hessian.diagonal().sum()
        assert float(added) == pytest.approx(64 * 32 / tokens * float(hessian.diagonal().log().mean().exp()), rel=1e-3)


def test_inputs_of_large_columns_do_not_drown_the_others() -> None:
    """The factor of inputs whose columns are scaled is nearly the scaled factor."""
    x, scale = inputs(96, 300), torch.ones(96)
    scale[:2] = 64.0
    factors = []
    for each in (x, x * scale):
        matrix = each.T @ each
        assert _factor.factorise(matrix, 0.01) == 0.01
        factors.append(matrix.tril())
    assert torch.allclose(factors[1] / scale[:, None], factors[0], rtol=0.02, atol=0.02 * float(factors[0].abs().max()))


def test_more_damping_where_it_is_needed():
    broken = torch.eye(600)
    broken[550, 20] = broken[20, 550] = 1.5
    matrix = broken.clone()
    assert _factor.factorise(matrix, 0.01) == pytest.approx(1.0)  # 0.01 and 0.1 leave it indefinite
    lower = matrix.tril()
    assert torch.allclose(lower @ lower.T, broken + torch.eye(600), atol=1e-5)
    assert _factor.factorise(broken * torch.tensor(math.nan), 0.01) == -1.0
    given = dataclasses.replace(statistics(torch.eye(600)), hessian=_Given(broken))
    gptq = Gptq(Gptq.Settings(damping=0.01))
    weight = torch.randn(8, 600, generator=torch.Generator().manual_seed(0))
    gptq.quantise([_linear(weight, given, _format("int8"))])
    assert gptq.notes == {"model.l": "damping 1: the Hessian has no factor with 0.01"}


class _Given:
    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix

    def whole(self, rank: int, device: torch.device) -> Tensor:
        return self.matrix.clone()


def test_inputs_that_say_nothing():
    number_format = _format("int4", 32)
    weight = weights()[1][:, :64].contiguous()
    gptq = Gptq()
    alone = _linear(weight, None, number_format)
    assert same_bytes(gptq.quantise([alone])["model.l"], alone.rounded())
    assert gptq.notes == {"model.l": "no input came to it: rounded to nearest"}
    silent = _linear(weight, statistics(torch.zeros(5, 64)), number_format)
    assert same_bytes(gptq.quantise([silent])["model.l"], silent.rounded())
    assert gptq.notes == {"model.l": "its inputs are all zero: rounded to nearest"}
    # Columns without inputs, among others; and fewer tokens than columns.
    x = inputs(64, 40)
    x[:, 10:20] = 0.0
    linear = _linear(weight, statistics(x), number_format)
    found = number_format.dequantise(_stored(linear))
    nearest = number_format.dequantise(linear.rounded())
    assert torch.equal(found[:, 10:20], nearest[:, 10:20])
    assert not torch.equal(found, nearest)
    assert _loss(weight, found, x) < 0.5 * _loss(weight, nearest, x)


def test_what_is_not_finite_is_refused():
    x, weight = inputs(64, 100), weights()[1][:, :64].clone()
    x[7, 3] = math.inf
    with pytest.raises(CheckpointError, match=r"model\.l: the Hessian of the inputs .* not finite"):
        _stored(_linear(weight, statistics(x), _format("int8")))
    weight[5, 6] = math.nan
    with pytest.raises(CheckpointError, match="1 NaN and 0 Inf"):
        _stored(_linear(weight, statistics(inputs(64, 100)), _format("int8")))


def test_neither_threads_nor_kernels_nor_cuts_leave_a_trace(monkeypatch):
    weight, given = weights()[0], statistics(inputs())
    number_format = _format("int4-asym", 64)
    linear = _linear(weight, given, number_format)
    expected, threads = _stored(linear), torch.get_num_threads()
    monkeypatch.setattr(kernels, "_MIN_BYTES_PER_THREAD", 1)
    kernels.set_threads(3)
    try:
        assert same_bytes(_stored(linear), expected)
    finally:
        kernels.set_threads(1)
    monkeypatch.setenv("MODELEXPORT_KERNELS", "reference")
    assert same_bytes(_stored(linear), expected)
    monkeypatch.undo()
    whole = number_format.dequantise(expected)
    for world in (2, 3, 4):
        parts = [dealt(len(weight), rank, world) for rank in range(world)]
        cut = [_linear(weight[start:stop], given, number_format, start) for start, stop in parts]
        found = [number_format.dequantise(_stored(part)) for part in cut]
        assert torch.equal(torch.cat(found), whole)
    assert torch.get_num_threads() == threads


def test_rank_processes():
    """Three ranks, of which some have no rows of the second weight; each factor is made by one of them."""
    chosen = ("int4", "nvfp4-wo")
    events: dict[int, dict] = {}
    cfg = MultiprocessConfig(world_size=3, on_event=events.__setitem__, timeout=120)
    launch_subprocesses(quantise, cfg, None, 0, *chosen)
    expected: dict[int, list[str]] = {rank: [] for rank in range(3)}
    gptq = Gptq()
    for seed, number_format in enumerate(chosen):
        whole = linears(number_format, seed)
        stored = gptq.quantise(whole)
        for rank, one in itertools.product(range(3), whole):
            start, stop = dealt(one.shape[0], rank, 3)
            expected[rank].append(values(one, stored[one.name], start, stop) if stop > start else "")
    assert {rank: event["found"] for rank, event in events.items()} == expected
    assert sum(found == "" for found in expected[1]) + sum(found == "" for found in expected[0]) > 0


def test_what_earlier_layers_have_left_is_made_up_for() -> None:
    """The weight that is rounded is the one whose outputs are nearest to the unrounded model's, in float64."""
    generator = torch.Generator().manual_seed(3)
    reference = torch.randn(600, 96, generator=generator) * torch.linspace(0.2, 2, 96)
    x = reference + 0.3 * torch.randn(600, 96, generator=generator) @ torch.randn(96, 96, generator=generator) / 10
    weight = torch.randn(ROWS + 40, 96, generator=generator)
    collector = Collector(96, {"hessian", "cross"})
    collector.add(x, reference)
    given = collector.finish()
    gptq = Gptq(Gptq.Settings(asymmetry=0.5, damping=0.01))
    plan = gptq._plan(given, [_linear(weight, given, _format("int8"))])
    changed = made_up(weight, 0, plan, gptq._cross(given, weight.device), 0.5)
    h = x.double().T @ x.double()
    damped = h + 0.01 * h.diagonal().log().mean().exp() * torch.eye(96, dtype=torch.float64)
    more = weight.double() @ (reference - x).double().T @ x.double() @ torch.linalg.inv(damped)
    assert torch.allclose(changed.double(), weight.double() + 0.5 * more, atol=1e-5)
    plain, better = (_stored(_linear(weight, given, _format("int8")), asymmetry=share) for share in (0.0, 1.0))
    wanted = reference @ weight.T
    errors = [float((x @ _format("int8").dequantise(each).T - wanted).square().sum()) for each in (plain, better)]
    assert errors[1] < 0.9 * errors[0]
