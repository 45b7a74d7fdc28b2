"""Rectangles of tensors: one half-open range for each dimension. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

Box = tuple[tuple[int, int], ...]
"""``((start, stop), ...)``, one range for each dimension; ``()`` is the box of a scalar."""


def whole(shape: Sequence[int]) -> Box:
    """The box of a whole tensor."""
    return tuple((0, size) for size in shape)


def placed(offset: Sequence[int], shape: Sequence[int]) -> Box:
    """The box of that shape that begins at ``offset``."""
    return tuple((start, start + size) for start, size in zip(offset, shape, strict=True))


def extent(box: Box) -> tuple[int, ...]:
    """The shape of a box."""
    return tuple(stop - start for start, stop in box)


def offset(box: Box) -> tuple[int, ...]:
    """The first index of a box along each dimension."""
    return tuple(start for start, _ in box)


def volume(box: Box) -> int:
    """Elements in a box; 1 for a scalar's."""
    return math.prod(stop - start for start, stop in box)


def intersect(a: Box, b: Box) -> Box | None:
    """The intersection of two boxes of one tensor; None where it is empty. (Two scalars' boxes share one element.)"""
    shared = tuple(
        (max(low, other_low), min(high, other_high)) for (low, high), (other_low, other_high) in zip(a, b, strict=True)
    )
    return None if any(start >= stop for start, stop in shared) else shared


def relative(box: Box, outer: Box) -> Box:
    """``box`` in the coordinates of ``outer``, in which it lies."""
    return tuple((start - base, stop - base) for (start, stop), (base, _) in zip(box, outer, strict=True))


def slices(box: Box) -> tuple[slice, ...]:
    """The index that selects a box of a tensor."""
    return tuple(slice(start, stop) for start, stop in box)


def subtract(box: Box, taken: Box) -> Iterator[Box]:
    """``box`` without ``taken``, as boxes that do not overlap, in the order of their elements."""
    shared = intersect(box, taken)
    if shared is None:
        yield box
        return
    for dim, ((start, stop), (low, high)) in enumerate(zip(box, shared, strict=True)):
        inner, outer = shared[:dim], box[dim + 1 :]
        if start < low:
            yield (*inner, (start, low), *outer)
        if high < stop:
            yield (*inner, (high, stop), *outer)


def uncovered(box: Box, covers: Iterable[Box]) -> list[Box]:
    """The parts of ``box`` that none of ``covers`` reaches."""
    left = [box]
    for cover in covers:
        left = [rest for part in left for rest in subtract(part, cover)]
        if not left:
            break
    return left


def tile(box: Box, covers: Iterable[Box]) -> Iterator[tuple[int, Box]]:
    """Cuts ``box`` up over ``covers``: (number of the cover, what is taken of it), no element twice.

    Where covers overlap (replicas) the first one counts. What no cover reaches is not yielded.
    """
    left = [box]
    for number, cover in enumerate(covers):
        for part in left:
            shared = intersect(part, cover)
            if shared is not None:
                yield number, shared
        left = [rest for part in left for rest in subtract(part, cover)]
        if not left:
            return
