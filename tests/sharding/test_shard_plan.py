"""What every rank of a parallelism holds: it covers each tensor, main replicas tile it, nothing whole is broken."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelexport.errors import PlanError
from modelexport.sharding.boxes import slices, volume, whole
from modelexport.sharding.plan import Parallelism
from modelexport.sharding.rules import CutRange, Spread, TensorRule
from modelexport.sharding.shard_plan import ShardPlan, build_shard_plan, cut_part, part_problem


def rule(name: str, shape: tuple[int, ...], dim: int | None = None, *parts: CutRange, **more: object) -> TensorRule:
    module, parameter = name.rsplit(".", 1)
    place: dict[str, object] = {"path": module, "role": module, "stages": ("first",), **more}
    return TensorRule(
        name=name, dtype="BF16", shape=shape, module=module, parameter=parameter, dim=dim, parts=parts, **place
    )


def part(
    size: int, unit: int = 1, spread: Spread = "even", heads: int = 0, start: int = 0, role: str = "x"
) -> CutRange:
    return CutRange(role=role, start=start, stop=start + size, unit=unit, spread=spread, heads=heads)


def model(
    *,
    heads: int = 8,
    kv: int = 2,
    head_dim: int = 4,
    width: int = 24,
    vocab: int = 29,
    layers: int = 3,
    experts: int = 0,
) -> list[TensorRule]:
    """A small decoder by hand: fused qkv, gate and up, a row-parallel linear, norms, experts, tied embeddings."""
    queries, keys, hidden = heads * head_dim, kv * head_dim, 6
    vocabulary = part(vocab, spread="padded")
    rules = [rule("embed.weight", (vocab, hidden), 0, vocabulary, stages=("first", "last"))]
    for i in range(layers):
        at = {"layer": i, "stages": ()}
        qkv = (
            part(queries, head_dim, "heads", heads, role="q"),
            part(keys, head_dim, "kv_heads", kv, queries, "k"),
            part(keys, head_dim, "kv_heads", kv, queries + keys, "v"),
        )
        gate_up = (part(width, role="gate"), part(width, start=width, role="up"))
        rules += [
            rule(f"layers.{i}.norm.weight", (hidden,), path="norm", **at),
            rule(f"layers.{i}.qkv.weight", (queries + 2 * keys, hidden), 0, *qkv, path="qkv", **at),
            rule(f"layers.{i}.qkv.bias", (queries + 2 * keys,), 0, *qkv, path="qkv", **at),
            rule(f"layers.{i}.o.weight", (hidden, queries), 1, part(queries, head_dim, "heads", heads), path="o", **at),
        ]
        for e in range(experts):
            inside = {"path": "experts.{e}.gate_up", "expert": e, **at}
            rules.append(rule(f"layers.{i}.experts.{e}.gate_up.weight", (2 * width, hidden), 0, *gate_up, **inside))
    return [*rules, rule("norm.weight", (hidden,), stages=("last",))]


@st.composite
def cases(draw: st.DrawFn) -> tuple[dict[str, int], Parallelism]:
    """A model and any parallelism that suits it."""
    tp, ep = draw(st.sampled_from([1, 2, 3, 4, 6])), draw(st.integers(1, 3))
    kv = draw(st.sampled_from([n for n in range(1, 13) if n % tp == 0 or tp % n == 0]))
    shape = {
        "kv": kv,
        "heads": math.lcm(kv, tp) * draw(st.integers(1, 2)),
        "head_dim": draw(st.integers(1, 5)),
        "width": tp * draw(st.integers(1, 4)),
        "vocab": draw(st.integers(1, 40)),
        "layers": draw(st.integers(1, 7)),
        "experts": ep * draw(st.integers(1, 2)) if ep > 1 else draw(st.integers(0, 2)),
    }
    return shape, Parallelism(tp, draw(st.integers(1, shape["layers"])), ep)


def everything_held(plan: ShardPlan, name: str) -> Iterator[tuple[int, int]]:
    """(rank, number of the rectangle) of all that is held of a tensor."""
    for rank in range(plan.parallelism.size):
        yield from ((rank, number) for number in range(len(plan.held(name, rank))))


@given(cases())
@settings(max_examples=60)
def test_main_replicas_tile_each_tensor_and_owners_hold_the_same(case: tuple[dict[str, int], Parallelism]) -> None:
    shape, grid = case
    plan = build_shard_plan(model(**shape), grid, layers=shape["layers"])
    for name, its_rule in plan.rules.items():
        counts = np.zeros(its_rule.shape, np.int16)
        for rank in range(grid.size):
            for _, box in plan.owned(name, rank):
                counts[slices(box)] += 1
        assert (counts == 1).all(), f"{name}: main replicas do not tile it"
        for rank, number in everything_held(plan, name):
            held = plan.held(name, rank)[number]
            assert volume(held[1]) > 0
            same = tuple(r for r in range(grid.size) if held in plan.held(name, r))
            assert plan.owners(name, rank, number) == same
            assert plan.is_first(name, rank, number) == (rank == same[0])


@given(cases())
@settings(max_examples=60)
def test_one_replica_of_the_model_is_whole(case: tuple[dict[str, int], Parallelism]) -> None:
    """The tp ranks of each stage hold together all of its tensors; equal shares, but for a padded vocabulary."""
    shape, grid = case
    plan = build_shard_plan(model(**shape), grid, layers=shape["layers"])
    for name, its_rule in plan.rules.items():
        for pp in range(grid.pp):
            for ep in range(grid.ep):
                ranks = [grid.rank_of(tp, pp, ep) for tp in range(grid.tp)]
                held = [plan.held(name, rank) for rank in ranks]
                expected = pp in plan.stages(name)
                if its_rule.expert is not None:
                    expected = expected and its_rule.expert // (plan.experts // grid.ep) == ep
                counts = np.zeros(its_rule.shape, np.int16)
                for _, box in (found for each in held for found in each):
                    counts[slices(box)] += 1
                assert (counts > 0).all() if expected else (counts == 0).all()
                if expected and its_rule.dim is None:
                    assert held == [((None, whole(its_rule.shape)),)] * grid.tp
                elif expected and name != "embed.weight":
                    assert len({tuple(volume(box) for _, box in each) for each in held}) == 1


@given(cases())
@settings(max_examples=60)
def test_a_rank_has_the_keys_of_its_queries(case: tuple[dict[str, int], Parallelism]) -> None:
    shape, grid = case
    plan = build_shard_plan(model(**shape), grid, layers=shape["layers"])
    size, per_group = shape["head_dim"], shape["heads"] // shape["kv"]
    for tp in range(grid.tp):
        found = {p.role: box[0] for p, box in plan.held("layers.0.qkv.weight", tp) if p is not None}
        queries = range(found["q"][0] // size, found["q"][1] // size)
        assert len(queries) == shape["heads"] // grid.tp
        base = shape["heads"] * size
        for role, start in (("k", base), ("v", base + shape["kv"] * size)):
            heads = range((found[role][0] - start) // size, (found[role][1] - start) // size)
            assert set(heads) == {query // per_group for query in queries}
        [(_, o_box)] = plan.held("layers.0.o.weight", tp)
        assert o_box[1] == found["q"], "o_proj takes what the rank's heads give"


# ------------------------------------------------------------------------ by hand


def test_ranks_and_coordinates() -> None:
    grid = Parallelism(tp=4, pp=2, ep=3)
    assert grid.size == 24
    assert [grid.rank_of(tp) for tp in range(4)] == [0, 1, 2, 3]
    assert grid.rank_of(ep=1) == 4
    assert grid.rank_of(pp=1) == 12
    assert [grid.rank_of(*grid.coordinates(rank)) for rank in range(24)] == list(range(24))
    assert grid.coordinates(23) == (3, 1, 2)
    for wrong in (lambda: grid.rank_of(4), lambda: grid.rank_of(0, 2), lambda: grid.coordinates(24)):
        with pytest.raises(IndexError):
            wrong()


def test_parts_by_hand() -> None:
    assert [cut_part(part(12, 2), 3, r) for r in range(3)] == [(0, 4), (4, 8), (8, 12)]
    assert [cut_part(part(8, 2, "heads", 4, start=10), 2, r) for r in range(2)] == [(10, 14), (14, 18)]
    shared = part(6, 3, "kv_heads", 2, start=1)
    assert [cut_part(shared, 4, r) for r in range(4)] == [(1, 4), (1, 4), (4, 7), (4, 7)]
    assert [cut_part(part(11, 1, "padded"), 4, r) for r in range(4)] == [(0, 3), (3, 6), (6, 9), (9, 11)]
    assert [cut_part(part(5, 1, "padded"), 4, r) for r in range(4)] == [(0, 2), (2, 4), (4, 5), (5, 5)]
    assert [cut_part(part(211, 128, "padded"), 3, r) for r in range(3)] == [(0, 128), (128, 211), (211, 211)]


@pytest.mark.parametrize(
    ("its_part", "works"),
    [
        (part(12), [1, 2, 3, 4, 6]),
        (part(12, 2), [1, 2, 3, 6]),
        (part(12, 5), [1]),
        (part(32, 4, "heads", 8), [1, 2, 4, 8]),
        (part(32, 8, "heads", 8), [1, 2, 4]),  # two heads stay together
        (part(8, 4, "kv_heads", 2), [1, 2, 4, 6, 8]),
        (part(16, 8, "kv_heads", 4), [1, 2]),  # blocks of two heads: engines cannot share them
        (part(8, 8, "kv_heads", 1), [1, 2, 3, 4, 5, 6, 7, 8]),
        (part(12, 12, "kv_heads", 3), [1]),
        (part(5, 1, "padded"), [1, 2, 3, 4, 5, 6, 7, 8]),
    ],
)
def test_sizes_that_work(its_part: CutRange, works: list[int]) -> None:
    assert [tp for tp in range(1, 9) if part_problem(its_part, tp) is None] == works


def test_stages() -> None:
    plan = build_shard_plan(model(layers=7), Parallelism(pp=3), layers=7)
    assert [plan.stage_of(i) for i in range(7)] == [0, 0, 0, 1, 1, 2, 2]
    assert [list(plan.layers_of(stage)) for stage in range(3)] == [[0, 1, 2], [3, 4], [5, 6]]
    assert plan.stages("embed.weight") == (0, 2), "tied: the last stage multiplies by it"
    assert plan.stages("norm.weight") == (2,)
    assert plan.owners("embed.weight", 2) == (0, 2)
    assert not plan.is_first("embed.weight", 2)
    assert build_shard_plan(model(), Parallelism(), layers=3).stages("embed.weight") == (0,)
    assert "norm.weight" not in set(plan.names(0))
    assert {name for rank in range(3) for name in plan.names(rank)} == set(plan.rules)


def test_experts() -> None:
    plan = build_shard_plan(model(experts=4), Parallelism(tp=2, ep=2), layers=3)
    assert [plan.expert_rank(e) for e in range(4)] == [0, 0, 1, 1]
    held = [[box for _, box in plan.held("layers.1.experts.2.gate_up.weight", rank)] for rank in range(4)]
    assert held == [
        [],
        [],
        [((0, 12), (0, 6)), ((24, 36), (0, 6))],
        [((12, 24), (0, 6)), ((36, 48), (0, 6))],
    ], "gate and up are cut by themselves, within the expert"
    assert plan.owners("layers.1.norm.weight", 3) == (0, 1, 2, 3)
    assert plan.owners("layers.1.experts.2.gate_up.weight", 3, 1) == (3,)


def refusal(grid: Parallelism, **shape: int) -> str:
    with pytest.raises(PlanError) as caught:
        build_shard_plan(model(**shape), grid, layers=shape.get("layers", 3))
    return str(caught.value)


def test_all_that_does_not_fit_is_said_at_once() -> None:
    text = refusal(Parallelism(tp=3, pp=4, ep=3), experts=4)
    assert text == (
        "tp 3, pp 4, ep 3 does not suit the model: 8 heads cannot be divided equally among 3 ranks (qkv, o); "
        "2 key/value heads can neither be divided equally among 3 ranks nor shared by equally many (qkv); "
        "pp is 4, but there are only 3 layers; 4 experts cannot be divided equally among ep 3 ranks. "
        "The largest that does: tp 2, pp 3, ep 2"
    )


def test_no_experts_no_expert_ranks() -> None:
    assert "ep is 2, but the model has no experts. The largest that does: tp 1, pp 1, ep 1" in refusal(
        Parallelism(ep=2)
    )


@given(cases(), st.integers(1, 9), st.integers(1, 9), st.integers(1, 9))
@settings(max_examples=60)
def test_the_largest_that_is_named_works_and_none_between(
    case: tuple[dict[str, int], Parallelism], tp: int, pp: int, ep: int
) -> None:
    shape, layers = case[0], case[0]["layers"]
    rules = model(**shape)
    try:
        build_shard_plan(rules, Parallelism(tp, pp, ep), layers=layers)
    except PlanError as error:
        sizes = [int(word.split()[1]) for word in str(error).rsplit(": ", 1)[1].split(", ")]
        named = Parallelism(*sizes)
        assert named != Parallelism(tp, pp, ep)
        build_shard_plan(rules, named, layers=layers)
        assert (named.tp <= tp, named.pp <= pp, named.ep <= ep) == (True, True, True)
        larger = [replace(named, tp=n) for n in range(named.tp + 1, tp + 1)]
        larger += [replace(named, pp=n) for n in range(named.pp + 1, pp + 1)]
        larger += [replace(named, ep=n) for n in range(named.ep + 1, ep + 1)]
        for each in larger:
            with pytest.raises(PlanError):
                build_shard_plan(rules, each, layers=layers)


def test_a_description_says_how_each_kind_is_cut() -> None:
    plan = build_shard_plan(model(experts=4), Parallelism(tp=4, pp=2, ep=2), layers=3)
    assert plan.describe() == [
        "16 ranks: tp 4, pp 2, ep 2",
        "layers of each pipeline stage: 0: 0-1, 1: 2",
        "experts of each expert-parallel rank: 0: 0-1, 1: 2-3",
        "embed.weight              BF16 [29, 6]: dim 0: 8 x 3, 5, stages 0 and 1",
        "norm.weight               BF16 [6]: whole",
        "qkv.weight                BF16 [48, 6]: dim 0: q 8 x 4; k 4 x 4, 2 ranks share each; "
        "v 4 x 4, 2 ranks share each",
        "qkv.bias                  BF16 [48]: dim 0: q 8 x 4; k 4 x 4, 2 ranks share each; v 4 x 4, 2 ranks share each",
        "o.weight                  BF16 [6, 32]: dim 1: 8 x 4",
        "experts.*.gate_up.weight  BF16 [48, 6]: dim 0: gate 6 x 4; up 6 x 4",
    ]
