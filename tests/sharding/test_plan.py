"""Cuts tile what they cut and never separate a unit."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from modelexport.errors import PlanError
from modelexport.sharding.plan import (
    Cut,
    Parallelism,
    admissible_tp,
    cut_along,
    even_cut,
    group_query_cut,
    owned_ranges,
    replicated,
    scale_range,
)

parts = st.integers(1, 9)
units = st.integers(1, 48)


def assert_tiles(ranges: tuple[tuple[int, int], ...], size: int) -> None:
    """Adjacent, in rank order, from 0 to ``size``."""
    assert ranges[0][0] == 0
    assert ranges[-1][1] == size
    assert all(start <= stop for start, stop in ranges)
    assert all(left[1] == right[0] for left, right in pairwise(ranges))


@given(count=st.integers(0, 300), unit=units, parts=parts)
def test_even_cut_tiles_on_units(count: int, unit: int, parts: int) -> None:
    ranges = even_cut(count * unit, unit, parts)
    assert len(ranges) == parts
    assert_tiles(ranges, count * unit)
    assert all(start % unit == 0 and stop % unit == 0 for start, stop in ranges)
    sizes = [(stop - start) // unit for start, stop in ranges]
    assert sizes == sorted(sizes, reverse=True), "the first ranks take the remainder"
    assert sizes[0] - sizes[-1] <= 1


def test_even_cut_by_hand() -> None:
    assert even_cut(10, 1, 4) == ((0, 3), (3, 6), (6, 8), (8, 10))
    assert even_cut(384, 128, 2) == ((0, 256), (256, 384))
    assert even_cut(256, 128, 4) == ((0, 128), (128, 256), (256, 256), (256, 256))


@given(size=st.integers(1, 1000), unit=st.integers(2, 64))
def test_even_cut_refuses_a_part_of_a_unit(size: int, unit: int) -> None:
    size += size % unit == 0  # unit >= 2, so this is no multiple
    with pytest.raises(PlanError, match=rf"{size} is not divisible by {unit}\b"):
        even_cut(size, unit, 2)


@given(kv_heads=st.integers(1, 16), per_group=st.integers(1, 8), head_dim=st.integers(1, 64), parts=parts)
@example(kv_heads=2, per_group=2, head_dim=16, parts=4)  # replicated: two ranks a head
@example(kv_heads=2, per_group=3, head_dim=16, parts=4)  # uneven: neighbours share a head
@example(kv_heads=3, per_group=1, head_dim=8, parts=8)  # ranks without a query head
def test_group_query_cut_covers_what_queries_attend_to(
    kv_heads: int, per_group: int, head_dim: int, parts: int
) -> None:
    heads = kv_heads * per_group
    held = group_query_cut(heads, kv_heads, head_dim, parts)
    for (first, last), (start, stop) in zip(even_cut(heads, 1, parts), held, strict=True):
        assert start % head_dim == 0
        assert stop % head_dim == 0
        attended = {query // per_group for query in range(first, last)}
        assert set(range(start // head_dim, stop // head_dim)) == attended, "all that is needed and no more"
    owned = owned_ranges(held)
    assert_tiles(owned, kv_heads * head_dim)
    assert all(start % head_dim == 0 and stop % head_dim == 0 for start, stop in owned)


@given(st.data())
def test_owned_ranges_tile_and_go_to_the_first_holder(data: st.DataObject) -> None:
    """For any overlapping ranges in rank order, ends rising, without a hole."""
    held: list[tuple[int, int]] = []
    start = reached = 0
    for _ in range(data.draw(parts)):
        start = data.draw(st.integers(start, reached))
        stop = data.draw(st.integers(max(start, reached), reached + 20))
        held.append((start, stop))
        reached = stop
    owned = owned_ranges(held)
    assert_tiles(owned, reached)
    for element in range(reached):
        holders = [rank for rank, (a, b) in enumerate(held) if a <= element < b]
        owners = [rank for rank, (a, b) in enumerate(owned) if a <= element < b]
        assert owners == holders[:1]


def test_owned_ranges_where_heads_are_replicated() -> None:
    held = group_query_cut(8, 2, 16, 4)
    assert held == ((0, 16), (0, 16), (16, 32), (16, 32))
    assert owned_ranges(held) == ((0, 16), (16, 16), (16, 32), (32, 32))


@given(size=st.integers(0, 100), parts=parts)
def test_replicated_is_emitted_once(size: int, parts: int) -> None:
    cut = replicated(size, parts)
    assert cut.dim is None
    assert cut.held == ((0, size),) * parts
    assert_tiles(cut.owned, size)
    assert [cut.owns(rank) for rank in range(parts)] == [size > 0] + [False] * (parts - 1)


@given(count=st.integers(0, 50), unit=units, parts=parts)
def test_cut_along_owns_what_it_holds_when_nothing_is_shared(count: int, unit: int, parts: int) -> None:
    held = even_cut(count * unit, unit, parts)
    cut = cut_along(1, held)
    assert isinstance(cut, Cut)
    assert cut.dim == 1
    assert cut.owned == held
    assert [cut.owns(rank) for rank in range(parts)] == [stop > start for start, stop in held]


@given(count=st.integers(1, 60), unit=units, parts=parts)
def test_scale_ranges_of_a_cut_tile_the_scales(count: int, unit: int, parts: int) -> None:
    """One element per unit of the weight (a group scale, a packed word): cuts of the weight cut it too."""
    cuts = even_cut(count * unit, unit, parts)
    assert_tiles(tuple(scale_range(span, unit, count) for span in cuts), count)


def test_scale_range_edges() -> None:
    assert scale_range((3, 7), 1, 10) == (3, 7)
    assert scale_range((3, 7), None, 2) == (0, 2)  # does not vary: all of it belongs to any span
    assert scale_range((128, 200), 128, 2) == (1, 2)  # the last, partial unit
    with pytest.raises(AssertionError, match="cuts through a unit of 8"):
        scale_range((4, 16), 8, 2)


def test_admissible_tp_by_hand() -> None:
    # Width 29568 = 231 * 128 of a 72B model (64 heads of 128, 8 kv heads): in groups of 128 only factors of 231
    # divide, and none of those but 1 suits the heads.
    heads = (64 * 128, 128)
    assert admissible_tp([heads, (29568, 1), (29568, 128)], 8) == [1]
    assert admissible_tp([(29568, 128)], 231, largest=32) == [1, 3, 7, 11, 21]
    assert admissible_tp([heads, (29568, 1)], 8) == [1, 2, 4, 8, 16, 32, 64]
    # More ranks than kv heads: whole multiples only.
    assert admissible_tp([(24, 1)], 2) == [1, 2, 4, 6, 8, 12, 24]
    assert admissible_tp([(24, 1)], 3) == [1, 3, 6, 12, 24]
    assert admissible_tp([], 1, largest=3) == [1, 2, 3]


@given(limits=st.lists(st.tuples(st.integers(1, 40), units), max_size=3), kv_heads=st.integers(1, 12))
def test_admissible_tp_means_equal_whole_parts(limits: list[tuple[int, int]], kv_heads: int) -> None:
    sizes = [(count * unit, unit) for count, unit in limits]
    found = admissible_tp(sizes, kv_heads, largest=20)
    assert found[0] == 1
    for tp in range(1, 21):
        equal = all(len({b - a for a, b in even_cut(size, unit, tp)}) == 1 for size, unit in sizes)
        whole_heads = kv_heads % tp == 0 or tp % kv_heads == 0
        assert (tp in found) == (equal and whole_heads)


@pytest.mark.parametrize("axis", ["tp", "pp", "ep"])
def test_parallelism_refuses_no_ranks(axis: str) -> None:
    with pytest.raises(PlanError, match=f"{axis} is 0; at least 1"):
        Parallelism(**{axis: 0})
