"""Who handles which shard: the rule's cases, and what holds for any shards."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from modelexport.errors import UsageError
from modelexport.sharding.balance import lower_bound
from modelexport.sharding.exchange import _shard_size, distribute_shards_to_ranks
from modelexport.sharding.tensor import ShardedTensor, ShardId

BOTH = pytest.mark.parametrize("algorithm", ["greedy", "balanced"])


def shown(sizes: dict[str, int], holders: Any, world: int, cross: str = "", **how: Any) -> str:
    ranks = holders if isinstance(holders, dict) else dict.fromkeys(sizes, holders)
    found = distribute_shards_to_ranks(ranks, sizes, world, set(cross), **how)
    return " ".join(f"{shard}{rank}" for shard, rank in found.items())


@pytest.mark.parametrize(
    ("sizes", "holders", "world", "cross", "expected"),
    [
        ({}, [], 2, "", ""),
        ({"a": 3, "b": 5}, [0], 1, "", "b0 a0"),
        (dict.fromkeys("abcde", 4), [0, 1, 2, 3], 4, "", "a0 b1 c2 d3 e0"),
        ({"a": 1, "b": 5, "c": 3}, [0, 1], 2, "", "b0 c1 a1"),
        ({"big": 100, "small": 1}, {"big": [0, 1], "small": [0]}, 2, "", "small0 big1"),
        ({"a": 1, "b": 100}, [0, 1], 2, "b", "a0 b1"),
        ({"a": 1, "b": 1}, {"a": [0], "b": [0, 1]}, 2, "a", "b0 a0"),
        (dict.fromkeys("abc", 0), [0, 1, 2], 3, "", "a0 b0 c0"),
        (dict(zip("abcdefg", [7, 7, 6, 6, 5, 4, 4], strict=True)), [0, 1, 2], 3, "", "a0 b1 c2 d2 e0 f1 g1"),
        (dict(zip("abcde", [3, 3, 2, 2, 2], strict=True)), [0, 1], 2, "", "a0 b1 c0 d1 e0"),
    ],
)
def test_the_rule(sizes: dict[str, int], holders: Any, world: int, cross: str, expected: str) -> None:
    assert shown(sizes, holders, world, cross) == expected


@BOTH
@pytest.mark.parametrize(
    ("ranks", "sizes", "message"),
    [
        ({"w": []}, {"w": 1}, "shard w is on no rank"),
        ({"w": [0, 2]}, {"w": 1}, "shard w is on rank 2, but there are 2 ranks"),
        ({"w": [-1]}, {"w": 1}, "on rank -1"),
        ({ShardId("w", (0,), (1,)): [0]}, {}, r"shard 'w' at \[0\] of shape \[1\] has no size"),
        ({"w": [0]}, {"w": -1}, "-1 bytes"),
    ],
)
def test_what_cannot_be_distributed_is_named(ranks: Any, sizes: Any, message: str, algorithm: str) -> None:
    with pytest.raises(UsageError, match=message):
        distribute_shards_to_ranks(ranks, sizes, 2, set(), algorithm=algorithm)


def test_an_unknown_algorithm() -> None:
    with pytest.raises(UsageError, match="did you mean 'balanced'"):
        distribute_shards_to_ranks({}, {}, 2, set(), algorithm="balance")


@st.composite
def problems(draw: st.DrawFn) -> tuple[dict[Any, list[int]], dict[Any, int], int, set[Any]]:
    world = draw(st.integers(1, 6))
    names = st.sampled_from("abcdefgh") | st.tuples(st.sampled_from("ab"), st.none() | st.integers(0, 3))
    shards = draw(st.lists(names, unique=True, max_size=12))
    holders = st.lists(st.integers(0, world - 1), min_size=1, max_size=world)
    ranks = {shard: draw(holders) for shard in shards}
    sizes = {shard: draw(st.integers(0, 20)) for shard in shards}
    return ranks, sizes, world, {shard for shard in shards if draw(st.booleans())}


def loads(found: dict[Any, int], sizes: dict[Any, int], world: int) -> list[int]:
    return [sum(sizes[shard] for shard, rank in found.items() if rank == place) for place in range(world)]


@BOTH
@given(problem=problems(), chance=st.randoms(use_true_random=False))
def test_any_shards(problem: Any, chance: random.Random, algorithm: str) -> None:
    ranks, sizes, world, cross = problem
    found = distribute_shards_to_ranks(ranks, sizes, world, cross, algorithm=algorithm)
    assert found.keys() == ranks.keys()
    assert all(rank in ranks[shard] for shard, rank in found.items())
    late = [shard in cross for shard in found]
    assert late == sorted(late), "the cross set comes last"
    order = list(ranks)
    chance.shuffle(order)
    again = distribute_shards_to_ranks(
        {shard: ranks[shard][::-1] for shard in order}, sizes, world, list(cross), algorithm=algorithm
    )
    assert list(again.items()) == list(found.items()), "whatever the order of the dicts and lists"
    early = {shard: ranks[shard] for shard in ranks if shard not in cross}
    alone = distribute_shards_to_ranks(early, sizes, world, set(), algorithm=algorithm)
    assert alone == {shard: found[shard] for shard in early}, "the cross set displaces nothing"


@given(problem=problems())
def test_greedy_gives_each_to_the_emptiest_of_its_holders(problem: Any) -> None:
    ranks, sizes, world, cross = problem
    reached = [0] * world
    for shard, rank in distribute_shards_to_ranks(ranks, sizes, world, cross).items():
        assert rank == min(ranks[shard], key=lambda place: (reached[place], place))
        reached[rank] += sizes[shard]


@given(problem=problems())
def test_balanced_is_no_worse(problem: Any) -> None:
    ranks, sizes, world, _ = problem
    fullest = [
        max(loads(distribute_shards_to_ranks(ranks, sizes, world, set(), algorithm=algorithm), sizes, world))
        for algorithm in ("greedy", "balanced")
    ]
    assert lower_bound(list(sizes.values()), world) <= fullest[1] <= fullest[0]


@pytest.mark.parametrize(("count", "world"), [(24, 4), (60, 8), (200, 4), (200, 8), (2000, 64)])
def test_balanced_comes_within_a_hundredth_of_the_bound(count: int, world: int) -> None:
    for seed in range(5):
        chance = random.Random(seed)
        sizes = {number: chance.randint(1 << 20, 1 << 24) for number in range(count)}
        ranks = {number: chance.sample(range(world), chance.randint(max(2, world // 4), world)) for number in sizes}
        found = distribute_shards_to_ranks(ranks, sizes, world, set(), algorithm="balanced")
        assert max(loads(found, sizes, world)) <= 1.01 * lower_bound(list(sizes.values()), world)


def test_balanced_finds_what_greedy_misses() -> None:
    for values, world in (([7, 7, 6, 6, 5, 4, 4], 3), ([3, 3, 2, 2, 2], 2)):
        sizes = dict(enumerate(values))
        ranks = {shard: list(range(world)) for shard in sizes}
        found = distribute_shards_to_ranks(ranks, sizes, world, set(), algorithm="balanced")
        assert set(loads(found, sizes, world)) == {sum(values) // world}


def test_room_is_made_next_to_a_full_rank() -> None:
    """All of rank 0's may only go to rank 1, which is as full, and may pass its own on to rank 2."""
    sizes = {f"left{n}": 5 for n in range(4)} | {f"right{n}": 5 for n in range(4)}
    ranks = {shard: [0, 1] if shard.startswith("left") else [1, 2] for shard in sizes}
    sizes["fixed"], ranks["fixed"] = 10, [0]
    found = distribute_shards_to_ranks(ranks, sizes, 3, set(), algorithm="balanced")
    assert max(loads(found, sizes, 3)) <= 20


def test_the_size_of_a_shard() -> None:
    assert _shard_size(ShardedTensor("w", torch.bfloat16, (3, 5), (9, 5), (0, 0))) == 30
    assert _shard_size(ShardedTensor("s", torch.float64, (), (), ())) == 8
