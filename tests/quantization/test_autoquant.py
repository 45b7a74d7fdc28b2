"""autoquant: the choice of formats against trying all, and the --quant that it becomes."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from modelexport.errors import PlanError
from modelexport.quantization.algorithms import autoquant
from modelexport.quantization.algorithms.autoquant import FRONT_POINTS, choose, front, patterns
from modelexport.quantization.assignment import Assignment

BITS = {"int4": 4.125, "int4:32": 4.5, "fp8": 8.0625, "none": 16.0}


def totals(
    picked: dict[str, str], errors: dict[str, dict[str, float]], weights: dict[str, int], bits: dict[str, dict]
) -> tuple[float, float]:
    """Bits per weight, and error."""
    size = sum(weights[group] * bits[group][name] for group, name in picked.items())
    return size / sum(weights.values()), math.fsum(errors[group][name] for group, name in picked.items())


@st.composite
def problems(draw: st.DrawFn) -> tuple[dict, dict, dict, float]:
    groups = [f"g{number}" for number in range(draw(st.integers(1, 5)))]
    weights = {group: 256 * draw(st.integers(1, 12)) for group in groups}
    names = {group: draw(st.lists(st.sampled_from(list(BITS)), min_size=1, unique=True)) for group in groups}
    levels = st.one_of(st.floats(0, 10), st.sampled_from([0.0, 1.0, 1e-9]))
    errors = {group: {name: draw(levels) for name in names[group]} for group in groups}
    bits = {group: {name: BITS[name] for name in names[group]} for group in groups}
    return errors, weights, bits, draw(st.floats(4.0, 16.5))


@given(problems())
def test_against_trying_all(problem: tuple[dict, dict, dict, float]) -> None:
    errors, weights, bits, budget = problem
    every = [dict(zip(errors, names, strict=True)) for names in itertools.product(*(errors[group] for group in errors))]
    found = [totals(picked, errors, weights, bits) for picked in every]
    within = [error for size, error in found if size <= budget]
    if not within:
        with pytest.raises(PlanError, match=r"--autoquant-bits .* the smallest of the candidates take"):
            choose(errors, weights, bits, budget)
        return
    picked = choose(errors, weights, bits, budget)
    size, error = totals(picked, errors, weights, bits)
    # A budget is believed to half a bit of the whole.
    assert size * sum(weights.values()) <= budget * sum(weights.values()) + 0.5
    assert list(picked) == list(errors)
    assert error <= min(within) * (1 + 1e-12)
    assert picked == choose(errors, weights, bits, budget)


@given(problems())
def test_the_front_has_the_best_of_every_size(problem: tuple[dict, dict, dict, float]) -> None:
    errors, weights, bits, _ = problem
    every = [dict(zip(errors, names, strict=True)) for names in itertools.product(*(errors[group] for group in errors))]
    found = {(round(size, 9), error) for size, error in (totals(picked, errors, weights, bits) for picked in every)}
    points = front(errors, weights, bits)
    assert points == sorted(points)
    assert len(points) <= FRONT_POINTS
    assert points[0][0] == pytest.approx(min(size for size, _ in found))
    for size, error in points:
        assert error == pytest.approx(min(other for at, other in found if at <= size + 1e-9))


def large(groups: int, seed: int = 0) -> tuple[dict, dict, dict]:
    """A model of as many groups of all sizes; errors fall with the bits, more or less."""
    generator = torch.Generator().manual_seed(seed)
    weights, errors = {}, {}
    for number in range(groups):
        group = f"g{number}"
        weights[group] = int(torch.randint(1 << 12, 1 << 20, (1,), generator=generator))
        scale = float(torch.randn(1, generator=generator).mul(2).exp()) * weights[group]
        errors[group] = {
            name: 0.0 if name == "none" else scale * 4.0**-bits * float(torch.rand(1, generator=generator) + 0.5)
            for name, bits in BITS.items()
        }
    return errors, weights, dict.fromkeys(errors, BITS)


def relaxed(errors: dict, weights: dict, bits: dict, budget: float) -> float:
    """What no choice can be better than: the Lagrangian bound, for a price of a bit that is searched for."""
    room = budget * sum(weights.values())
    best, low, high = -math.inf, 0.0, 1.0
    for _ in range(200):
        price = (low + high) / 2
        rows = [
            min(
                (errors[g][name] + price * bits[g][name] * weights[g], bits[g][name] * weights[g]) for name in errors[g]
            )
            for g in errors
        ]
        best = max(best, math.fsum(value for value, _ in rows) - price * room)
        low, high = (price, high) if sum(size for _, size in rows) > room else (low, price)
    return best


@pytest.mark.parametrize("budget", [4.3, 5.0, 7.0])
def test_of_many_groups_it_is_next_to_the_bound(budget: float) -> None:
    """Where totals are thinned out: 200 groups, no two of which are of one size."""
    errors, weights, bits = large(200)
    size, error = totals(choose(errors, weights, bits, budget), errors, weights, bits)
    assert size <= budget
    assert error <= relaxed(errors, weights, bits, budget) * 1.002


def test_budget_to_the_last_bit() -> None:
    errors, weights, bits = large(20)
    for names in (("int4",), ("fp8",), ("int4", "fp8")):
        picked = {group: names[number % len(names)] for number, group in enumerate(errors)}
        size, error = totals(picked, errors, weights, bits)
        assert totals(choose(errors, weights, bits, size), errors, weights, bits)[1] <= error


def test_what_is_not_finite_is_not_chosen() -> None:
    errors = {"a": {"int4": math.nan, "fp8": 1.0}, "b": {"int4": 3.0, "fp8": math.inf}}
    weights, bits = {"a": 10, "b": 10}, {"a": {"int4": 4, "fp8": 8}, "b": {"int4": 4, "fp8": 8}}
    assert choose(errors, weights, bits, 9.0) == {"a": "fp8", "b": "int4"}
    with pytest.raises(
        PlanError, match=r"-bits 5: the smallest .* 6\.000 bits per weight: give --autoquant-bits 6 or more"
    ):
        choose(errors, weights, bits, 5.0)
    errors["b"] = {"int4": math.inf}
    with pytest.raises(PlanError, match="none of the candidates int4 is of use to b"):
        choose(errors, weights, bits, 9.0)


def test_it_is_an_algorithm() -> None:
    algorithm = autoquant.ALGORITHM()
    assert (algorithm.name, algorithm.kind) == ("autoquant", "assign")


@given(st.data())
def test_patterns_mean_what_was_chosen(data: st.DataObject) -> None:
    paths = ["self_attn.q_proj", "mlp.gate_proj", "mlp.shared_experts.gate_proj", "block_sparse_moe.experts.{}.w1"]
    names = [
        f"model.layers.{layer}.{path.format(expert)}"
        for layer in range(12)
        for path in paths
        for expert in range(3 if "{}" in path else 1)
        if layer % 4 or path != "mlp.gate_proj"
    ]
    alike = data.draw(st.booleans())
    one_each = {path: data.draw(st.sampled_from(sorted(BITS))) for path in paths}
    choice = {
        name: one_each[paths[number % 4]] if alike else data.draw(st.sampled_from(sorted(BITS)))
        for number, name in enumerate(names)
    }
    parsed = Assignment.parse(patterns(choice, "model.layers"))
    parsed.check_used(names)
    for name, chosen in choice.items():
        got = parsed.of(name)
        assert got is not None
        wanted, _, size = chosen.partition(":")
        assert got.name == wanted
        assert not size or got.group_size == int(size)
    assert parsed.of("lm_head") is None


def test_patterns_are_short() -> None:
    choice = {f"model.layers.{layer}.mlp.down_proj": "fp8" if layer == 3 else "int4" for layer in range(80)}
    choice |= {f"model.layers.{layer}.mlp.experts.{expert}.w1": "fp8" for layer in range(80) for expert in range(8)}
    assert patterns(choice, "model.layers") == (
        "model.layers.3.mlp.down_proj=fp8,model.layers.*.mlp.down_proj=int4,model.layers.*.mlp.experts.*.w1=fp8"
    )
