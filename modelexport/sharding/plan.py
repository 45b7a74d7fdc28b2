"""Cuts of a dimension over tensor-parallel ranks: pure arithmetic on sizes, no tensors and no models.

A rank *holds* what its part of the model computes with, and *owns* what it hands over. The two differ where
ranks hold the same elements (key/value heads when there are fewer of them than ranks): each element is owned
by the first rank that holds it, so that the owned ranges tile the dimension and nothing is emitted twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from modelexport.errors import PlanError

Range = tuple[int, int]


@dataclass(frozen=True)
class Parallelism:
    """Ranks along each axis of parallelism: tensor, pipeline, expert.

    Ranks are numbered with the tensor axis running fastest, then the expert axis, then the pipeline's.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for axis, size in (("tp", self.tp), ("pp", self.pp), ("ep", self.ep)):
            if size < 1:
                raise PlanError(f"{axis} is {size}; at least 1 rank is needed")

    def __str__(self) -> str:
        return f"tp {self.tp}, pp {self.pp}, ep {self.ep}"

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.tp * self.pp * self.ep

    def rank_of(self, tp: int = 0, pp: int = 0, ep: int = 0) -> int:
        """The rank at these coordinates."""
        for axis, at, size in (("tp", tp, self.tp), ("pp", pp, self.pp), ("ep", ep, self.ep)):
            if not 0 <= at < size:
                raise IndexError(f"{axis} coordinate {at} of {size}")
        return (pp * self.ep + ep) * self.tp + tp

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """(tp, pp, ep) of a rank: the inverse of :meth:`rank_of`."""
        if not 0 <= rank < self.size:
            raise IndexError(f"rank {rank} of {self.size}")
        outer, tp = divmod(rank, self.tp)
        pp, ep = divmod(outer, self.ep)
        return tp, pp, ep


@dataclass(frozen=True)
class Cut:
    """The ranges of a tensor that each rank holds and owns.

    Attributes:
        dim: the dimension that is cut, or None where every rank holds the whole tensor.
        held: per rank, the half-open range along ``dim`` it holds (``(0, size)`` for all where ``dim`` is None).
        owned: per rank, the range it emits; disjoint, in rank order, together the whole dimension.
    """

    dim: int | None
    held: tuple[Range, ...]
    owned: tuple[Range, ...]

    def owns(self, rank: int) -> bool:
        """Returns whether ``rank`` emits any part of the tensor."""
        start, stop = self.owned[rank]
        return stop > start


def even_cut(size: int, unit: int, parts: int) -> tuple[Range, ...]:
    """Cuts ``size`` into ``parts`` ranges on multiples of ``unit``, the first ones larger by one unit.

    Ranges may be empty where there are fewer units than parts.

    Raises:
        PlanError: ``unit`` does not divide ``size``.
    """
    if size % unit:
        raise PlanError(f"size {size} is not divisible by {unit}, the unit that a cut must keep whole")
    base, extra = divmod(size // unit, parts)
    ranges = []
    start = 0
    for part in range(parts):
        stop = start + unit * (base + (part < extra))
        ranges.append((start, stop))
        start = stop
    return tuple(ranges)


def block_cut(size: int, block: int, parts: int) -> tuple[Range, ...]:
    """Cuts ``size`` into ranges that begin on multiples of ``block``; the last block may be short."""
    whole = even_cut(-(-size // block) * block, block, parts)
    return tuple((min(start, size), min(stop, size)) for start, stop in whole)


def group_query_cut(heads: int, kv_heads: int, head_dim: int, parts: int, *, unit: int = 1) -> tuple[Range, ...]:
    """The key/value features that each rank's query heads attend to, with queries cut evenly in ``unit`` heads.

    With fewer key/value heads than ranks, ranks hold the same head; where query heads do not divide evenly,
    neighbours may share one.
    """
    per_group = heads // kv_heads
    ranges = []
    for start, stop in even_cut(heads, unit, parts):
        first, last = start // per_group, -(-stop // per_group)
        ranges.append((first * head_dim, max(first, last) * head_dim) if stop > start else (0, 0))
    return tuple(ranges)


def owned_ranges(held: Sequence[Range]) -> tuple[Range, ...]:
    """Gives each element to the first rank that holds it; ``held`` is in rank order with rising ends."""
    owned = []
    reached = 0
    for start, stop in held:
        begin = max(start, reached)
        owned.append((begin, stop) if stop > begin else (reached, reached))
        reached = max(reached, stop)
    return tuple(owned)


def replicated(size: int, parts: int) -> Cut:
    """Every rank holds everything; the first owns it."""
    return Cut(None, ((0, size),) * parts, ((0, size), *((size, size),) * (parts - 1)))


def cut_along(dim: int, held: tuple[Range, ...]) -> Cut:
    """A cut along ``dim`` into the ranges ``held``."""
    return Cut(dim, held, owned_ranges(held))


def scale_range(span: Range, unit: int | None, size: int) -> Range:
    """The elements of a tensor that belong to weight elements ``span``, one per ``unit`` of them.

    ``unit`` None: the tensor does not vary along this dimension, all ``size`` elements belong to any span.
    """
    if unit is None:
        return (0, size)
    start, stop = span
    assert start % unit == 0, f"range {span} cuts through a unit of {unit}"
    return start // unit, -(-stop // unit)


def admissible_tp(limits: Sequence[tuple[int, int]], kv_heads: int, *, largest: int = 64) -> list[int]:
    """Tensor-parallel sizes at which every rank of an engine gets equal, whole parts.

    Args:
        limits: for each dimension that an engine cuts, its size and the unit that must stay whole.
        kv_heads: heads that an engine replicates where there are more ranks than heads.
        largest: the largest size to try.
    """
    sizes = []
    for tp in range(1, largest + 1):
        whole = all(size % (tp * unit) == 0 for size, unit in limits)
        if whole and (kv_heads % tp == 0 or tp % kv_heads == 0):
            sizes.append(tp)
    return sizes
