"""Shards: what they say of themselves, and the ids under which ranks know them."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from modelexport.errors import UsageError
from modelexport.sharding.tensor import ShardedTensor, ShardId, is_main_replica, order_key

numbers = st.tuples() | st.lists(st.integers(0, 9), max_size=3).map(tuple)
ids = st.builds(ShardId, st.sampled_from(["", "a", "b"]), st.none() | numbers, numbers)
anything = ids | ids.map(tuple) | st.sampled_from(["a", b"a", 3, (), None, ("a", None), ("a", (1,), "b"), True])


@given(st.lists(anything, max_size=8), st.randoms(use_true_random=False))
def test_all_ids_have_one_order(found: list[object], chance: random.Random) -> None:
    ordered = sorted(found, key=order_key)
    shuffled = list(found)
    chance.shuffle(shuffled)
    assert [order_key(one) for one in sorted(shuffled, key=order_key)] == [order_key(one) for one in ordered]
    for one, other in itertools.combinations(ordered, 2):
        assert order_key(one) <= order_key(other)
        assert (order_key(one) == order_key(other)) == (one == other)


@given(ids, ids | ids.map(tuple))
def test_ids_compare_whatever_they_hold(one: ShardId, other: tuple) -> None:
    assert (one < other) + (one == other) + (one > other) == 1
    assert (one <= other) == (not one > other)
    assert (one >= other) == (not one < other)
    assert one != other or hash(one) == hash(other)


def test_two_shards_of_different_size_at_one_offset_have_different_ids() -> None:
    one = ShardedTensor("w", torch.int8, (2, 4), (8, 4), (0, 0))
    other = ShardedTensor("w", torch.int8, (3, 4), (8, 4), (0, 0))
    assert one.id == ("w", (0, 0), (2, 4))
    assert one.id != other.id
    assert one.id == ShardedTensor("w", torch.int8, [2, 4], torch.Size([8, 4]), [0, 0], 3).id
    assert str(one.id) == "'w' at [0, 0] of shape [2, 4]"


def test_what_cannot_be_ordered_is_no_id() -> None:
    with pytest.raises(UsageError, match="set"):
        order_key(("a", {1}))


@pytest.mark.parametrize(("replica", "main"), [(0, True), (1, False), ((0, 0, 0), True), ((0, 1), False), ((), True)])
def test_the_main_replica(replica: int | tuple[int, ...], main: bool) -> None:
    shard = ShardedTensor("w", torch.int8, (1,), (1,), (0,), replica)
    assert is_main_replica(replica) == shard.is_main_replica == main


def test_sizes_boxes_and_data() -> None:
    data = torch.zeros(2, 3, dtype=torch.bfloat16)
    shard = ShardedTensor.part("w", data, (4, 6), (2, 3))
    assert (shard.nbytes, shard.box) == (12, ((2, 4), (3, 6)))
    assert "bfloat16, of [4, 6], replica 0, data on cpu" in repr(shard)
    assert shard.without_data().data is None
    assert shard.data is data
    scalar = ShardedTensor.whole("s", torch.tensor(1.0))
    assert (scalar.nbytes, scalar.box, scalar.id) == (4, (), ("s", (), ()))
    assert ShardedTensor("e", torch.int64, (0, 5), (3, 5), (3, 0)).nbytes == 0
    with pytest.raises(UsageError, match="no global_offset"):
        _ = ShardedTensor("o", torch.int8, (3,), (7,), None).box


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((7, torch.int8, (1,), (1,), (0,)), "key is 7"),
        (("w", "int8", (1,), (1,), (0,)), "dtype is 'int8'"),
        (("w", torch.int8, 3, (1,), (0,)), "local_shape is 3"),
        (("w", torch.int8, (-1,), (1,), (0,)), "negative"),
        (("w", torch.int8, (1,), (1, 2), (0,)), "one number for each dimension"),
        (("w", torch.int8, (2, 3), (4, 5), (0, 3)), "from 3 to 6 in dim 1, where the whole tensor ends at 5"),
        (("w", torch.int8, (1,), (1,), (0,), "main"), "replica_id is 'main'"),
        (("w", torch.int8, (2,), (2,), (0,), 0, torch.zeros(3).char()), r"shape \[2\], but .* of shape \[3\]"),
        (("w", torch.int8, (2,), (2,), (0,), 0, torch.zeros(2)), "described as torch.int8"),
        (("w", torch.int8, (2,), (2,), (0,), 0, [1, 2]), "data is list"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ShardedTensor(*arguments)
