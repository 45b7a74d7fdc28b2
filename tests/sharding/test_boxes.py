"""Rectangles against sets of elements."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from modelexport.sharding import boxes


@st.composite
def box(draw: st.DrawFn, dims: int) -> boxes.Box:
    ranges = [sorted(draw(st.tuples(st.integers(0, 5), st.integers(0, 5)))) for _ in range(dims)]
    return tuple((low, high) for low, high in ranges)


def elements(of: boxes.Box) -> set[tuple[int, ...]]:
    return set(product(*(range(start, stop) for start, stop in of)))


@given(st.data(), st.integers(0, 3))
def test_intersection_and_difference(data: st.DataObject, dims: int) -> None:
    a, b = data.draw(box(dims)), data.draw(box(dims))
    shared = boxes.intersect(a, b)
    assert (elements(shared) if shared is not None else set()) == elements(a) & elements(b)
    rest = list(boxes.subtract(a, b))
    assert sum(boxes.volume(part) for part in rest) == len(elements(a) - elements(b))
    assert set().union(*map(elements, rest)) == elements(a) - elements(b)


@given(st.data(), st.integers(1, 3))
def test_tiling_takes_each_element_once_and_from_the_first_that_has_it(data: st.DataObject, dims: int) -> None:
    wanted = data.draw(box(dims))
    covers = data.draw(st.lists(box(dims), max_size=4))
    taken: dict[tuple[int, ...], int] = {}
    for number, part in boxes.tile(wanted, covers):
        for element in elements(part):
            assert element not in taken
            taken[element] = number
    for element in elements(wanted):
        first = next((n for n, cover in enumerate(covers) if element in elements(cover)), None)
        assert taken.get(element) == first
    assert sum(map(boxes.volume, boxes.uncovered(wanted, covers))) == len(elements(wanted)) - len(taken)


def test_the_small_words() -> None:
    assert boxes.whole((2, 3)) == boxes.placed((0, 0), (2, 3)) == ((0, 2), (0, 3))
    assert boxes.extent(((1, 4), (2, 2))) == (3, 0)
    assert boxes.offset(((1, 4), (2, 2))) == (1, 2)
    assert boxes.relative(((2, 3), (5, 7)), ((1, 4), (5, 9))) == ((1, 2), (0, 2))
    assert boxes.slices(((2, 3),)) == (slice(2, 3),)
    assert boxes.intersect((), ()) == ()
    assert boxes.volume(()) == 1
