"""The part of each weight that a rank multiplies by while samples run through a layer, and its tiles.

A sum of floating-point numbers depends on its order, and a matrix product may depend on its shape. So that hidden
states are the same to the bit on any number of ranks, every weight that is cut is multiplied in *tiles* that are the
same for all numbers of ranks: a rank holds some of them, next to each other. Where the output features are cut, each
tile gives some of them; where the input features are, the tiles' products are added up as a binary tree over the tiles'
numbers has it, whoever computed them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeVar

T = TypeVar("T")
Range = tuple[int, int]

ROWS = 128
"""Rows of a weight that are rounded together, counted from its first: ranks' rows begin on a multiple of it, so that
matrix products have the same shape on any number of ranks."""

_EXPERT = re.compile(r"(\bexperts\.(?:mlp\.)?)\d+(?=\.)")


@dataclass(frozen=True)
class ForwardShard:
    """The shard of a linear's weight, ``[out_features, in_features]``, that one rank's forward pass holds.

    Attributes:
        dim: 0 where output features are cut (column-parallel), 1 where input features are (row-parallel), None where
            every rank holds all of it.
        spans: ranges of the whole weight along ``dim``, in the order in which they lie in this rank's.
        tiles: ranges along ``dim`` of this rank's weight, each of which is multiplied by itself; they cover it. Empty
            where ``dim`` is None, and where the rank has no part in the linear (it then holds some of it all the same,
            since modules of no width cannot be built, and its product counts for nothing).
        numbers: dim 1: each tile's number among all of them.
        count: dim 1: how many tiles there are in all.
    """

    dim: int | None = None
    spans: tuple[Range, ...] = ()
    tiles: tuple[Range, ...] = ()
    numbers: tuple[int, ...] = ()
    count: int = 0


WHOLE = ForwardShard()


@dataclass(frozen=True)
class ForwardCut:
    """One rank's part of every layer's forward pass.

    Attributes:
        config: keys of config.json that differ for the modules that a rank builds (``num_attention_heads``, ...).
        shares: linear, by its path within a layer with ``*`` for an expert's number
            (``self_attn.q_proj``, ``mlp.experts.*.up_proj``) -> what the rank holds of it; others are whole.
        kv_heads: which of the model's key/value heads the rank computes; None for all, or where they are no heads of
            their own (latent attention). An empty range where the rank has no part in the attention.
    """

    config: Mapping[str, int] = field(default_factory=dict)
    shares: Mapping[str, ForwardShard] = field(default_factory=dict)
    kv_heads: Range | None = None

    def share(self, path: str) -> ForwardShard:
        """Returns the rank's shard of a linear, by its path within a layer (with an expert's number, or ``*``)."""
        return self.shares.get(general(path), WHOLE)


def general(path: str) -> str:
    """A path within a layer, or a name, with ``*`` for an expert's number."""
    return _EXPERT.sub(r"\1*", path)


def even_ranges(size: int, parts: int) -> list[Range]:
    """0 .. ``size`` as ``parts`` ranges that differ by one at most; some are empty where there are too many parts."""
    edges = [size * number // parts for number in range(parts + 1)]
    return list(pairwise(edges))


def nodes(first: int, stop: int, count: int) -> list[Range]:
    """The largest nodes of the binary tree over ``count`` tiles that together are the tiles ``first`` .. ``stop``."""

    def below(low: int, high: int) -> list[Range]:
        if stop <= low or high <= first:
            return []
        if first <= low and high <= stop:
            return [(low, high)]
        middle = (low + high) // 2
        return below(low, middle) + below(middle, high)

    return below(0, count)


def over_tree(node: Range, known: Callable[[Range], T | None], add: Callable[[T, T], T]) -> T:
    """The value of a node: what is known of it, or else the sum of those of its two halves."""
    value = known(node)
    if value is not None:
        return value
    low, high = node
    assert high - low > 1, f"nobody has tile {low}"
    middle = (low + high) // 2
    return add(over_tree((low, middle), known, add), over_tree((middle, high), known, add))
