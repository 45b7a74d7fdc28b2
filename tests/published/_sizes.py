"""Sizes of the tiny layouts that know what they stand for, so that the same layout can be told at its real size."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any


class Size(int):
    """A size of a tiny layout: an int, whose products, sums, differences and quotients are such sizes too.

    Attributes:
        at: real sizes by name -> what it is at these.
    """

    at: Callable[[Mapping[str, int]], int]

    def __new__(cls, value: int, at: Callable[[Mapping[str, int]], int]) -> Size:
        """Returns ``value``, which is ``at(sizes)`` in the real model."""
        made = super().__new__(cls, value)
        made.at = at
        return made


def size(name: str, value: int) -> Size:
    """A size with a name: ``value`` in the tiny layout, and in the real one what stands under its name."""
    return Size(value, operator.itemgetter(name))


def _derived(compute: Callable[[int, int], int], *, swapped: bool = False) -> Callable[[int, int], Size]:
    def method(self: int, other: int) -> Size:
        first, second = (other, self) if swapped else (self, other)
        return Size(
            compute(int(first), int(second)), lambda sizes: compute(at_sizes(first, sizes), at_sizes(second, sizes))
        )

    return method


for _name in ("add", "sub", "mul", "floordiv"):
    setattr(Size, f"__{_name}__", _derived(getattr(operator, _name)))
    setattr(Size, f"__r{_name}__", _derived(getattr(operator, _name), swapped=True))
setattr(Size, "__neg__", lambda self: 0 - self)  # noqa: B010, as those above


def at_sizes(value: Any, sizes: Mapping[str, int]) -> Any:
    """``value`` with every :class:`Size` in it, at any depth, replaced by the int that it is at ``sizes``.

    Raises:
        KeyError: a size has no entry in ``sizes``.
    """
    if isinstance(value, Size):
        return value.at(sizes)
    if isinstance(value, Mapping):
        return {key: at_sizes(part, sizes) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(at_sizes(part, sizes) for part in value)
    return value
