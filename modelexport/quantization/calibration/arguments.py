"""The arguments of decoder layers beside their hidden states: what is the same for all batches, and what is not.

Positions and masks depend on a batch's shape alone, and are kept once. A tensor that depends on its tokens (the inputs
that each layer of Gemma 3n and Gemma 4 looks up for itself, the embeddings that all of Zamba's are given) is kept for
each batch. And layers may write into a mapping what later ones read: keys and values that several share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Given", "HandedOver", "LayerCalls", "marked", "replaced", "values"]

LayerCalls = dict[int, tuple[tuple[Any, ...], dict[str, Any]]]
"""Layer -> its arguments; layers that text does not pass through (they attend to images) are missing."""


@dataclass(frozen=True)
class Given:
    """The place of a tensor that each batch has its own of.

    Attributes:
        number: of the tensor, among the different ones that a batch's layers are given.
    """

    number: int


@dataclass(frozen=True)
class HandedOver:
    """The place of a mapping in which layers hand something to later ones.

    Attributes:
        number: among a model's mappings.
        kind: its class.
    """

    number: int
    kind: type


def marked(calls: Any, other: Any) -> tuple[Any, int]:
    """Arguments with a :class:`Given` in the place of each tensor that is different in others, or that these have not,
    and a :class:`HandedOver` in that of each empty mapping that several layers are given; and the number of different
    tensors that were replaced.

    Args:
        calls, other: of the same layers, for batches of the same shape; None in the place of ``other``: every tensor is
            replaced.
    """
    numbers: dict[tuple[Any, ...], int] = {}
    mappings: dict[int, int] = {}
    empty = Counter(_empty_mappings(calls))

    def place(one: Any, two: Any) -> Any:
        if isinstance(one, Tensor):
            if isinstance(two, Tensor) and one.shape == two.shape and torch.equal(one, two):
                return one
            return Given(numbers.setdefault(_address(one), len(numbers)))
        if empty[id(one)] > 1:
            return HandedOver(mappings.setdefault(id(one), len(mappings)), type(one))
        if isinstance(one, dict):
            known = two if isinstance(two, Mapping) else {}
            return _same_or(one, {key: place(value, known.get(key)) for key, value in one.items()})
        if isinstance(one, (tuple, list)):
            others = two if isinstance(two, (tuple, list)) and len(two) == len(one) else (None,) * len(one)
            parts = [place(value, each) for value, each in zip(one, others, strict=True)]
            return one if all(map(_is, parts, one)) else _sequence(one, parts)
        return one

    return place(calls, other), len(numbers)


def _empty_mappings(calls: Any) -> Iterator[int]:
    """Yields the identity of each, as often as it is among arguments."""
    if isinstance(calls, MutableMapping) and not calls:
        yield id(calls)
    elif isinstance(calls, (dict, tuple, list)):
        for each in calls.values() if isinstance(calls, dict) else calls:
            yield from _empty_mappings(each)


def values(template: Any, calls: Any) -> Iterator[tuple[int, Tensor]]:
    """Yields what stands in the places of a template's :class:`Given`, with their numbers; some of them repeatedly."""
    if isinstance(template, Given):
        yield template.number, calls
    elif isinstance(template, dict):
        for key, value in template.items():
            yield from values(value, calls[key])
    elif isinstance(template, (tuple, list)):
        for value, each in zip(template, calls, strict=True):
            yield from values(value, each)


def replaced(value: Any, kinds: tuple[type, ...], by: Callable[[Any], Any]) -> Any:
    """A structure of dicts, tuples and lists with something else in the place of each value of some classes."""
    if isinstance(value, kinds):
        return by(value)
    if isinstance(value, dict):
        return _same_or(value, {key: replaced(each, kinds, by) for key, each in value.items()})
    if isinstance(value, (tuple, list)):
        parts = [replaced(each, kinds, by) for each in value]
        return value if all(map(_is, parts, value)) else _sequence(value, parts)
    return value


def _same_or(before: dict[Any, Any], after: dict[Any, Any]) -> dict[Any, Any]:
    """The former, which may be of a class of its own, where nothing in it was replaced."""
    return before if all(after[key] is value for key, value in before.items()) else after


def _sequence(like: Any, parts: list[Any]) -> Any:
    return type(like)(*parts) if hasattr(like, "_fields") else type(like)(parts)


def _is(one: Any, other: Any) -> bool:
    return one is other


def _address(x: Tensor) -> tuple[Any, ...]:
    return x.data_ptr(), tuple(x.shape), x.stride(), x.dtype
