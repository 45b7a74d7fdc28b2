"""Assignment of shards to ranks, so that all handle about as many bytes. Pure arithmetic, the same everywhere.

``greedy``: shards in the order (cross set last, held by fewest ranks first, largest first, id), each to the rank with
the fewest bytes that holds it, ties to the lowest rank. ``balanced``: the same, and then shards are moved, or
exchanged for smaller ones, away from the rank that has most, for as long as that helps; the cross set is placed, and
improved, only when all others have their places for good.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

from modelexport.errors import UsageError, nearest
from modelexport.sharding.tensor import order_key

__all__ = ["ALGORITHMS", "distribute", "lower_bound"]

T = TypeVar("T")
_Bundle = tuple[int, tuple[int, ...]]  # (bytes, shards)
ALGORITHMS = ("balanced", "greedy")

_FEW = 3  # times that a set of holders must occur for a heap of its own to be worth its making
_EFFORT = 10  # how often each shard is looked at on average, before it is good enough
_LEAST_EFFORT = 500_000
_SETS = 256  # different sets of holders for which it is worth to look at each pair
_BUNDLES = ((3, 16), (2, 64))  # (shards that move together at most, for a rank that has so many to move)
_PARTNERS = 8  # ranks that are considered for each improvement


def distribute(
    shard_to_ranks: Mapping[T, Sequence[int]],
    shard_to_size: Mapping[T, int],
    num_ranks: int,
    cross: Collection[T],
    algorithm: str,
) -> dict[T, int]:
    """See :func:`modelexport.sharding.exchange.distribute_shards_to_ranks`."""
    if algorithm not in ALGORITHMS:
        raise UsageError(f"there is no way to distribute shards called {algorithm!r}{nearest(algorithm, ALGORITHMS)}")
    holders = _holders(shard_to_ranks, num_ranks)
    sizes = {shard: _size(shard, shard_to_size) for shard in shard_to_ranks}
    late = cross if isinstance(cross, (set, frozenset, dict)) else set(cross)
    order = _order({shard: (shard in late, len(holders[shard]), -size) for shard, size in sizes.items()})
    early = sum(shard not in late for shard in order)
    loads = [0] * num_ranks
    result: dict[T, int] = {}
    for phase in (order[:early], order[early:]):
        where, weights = [holders[shard] for shard in phase], [sizes[shard] for shard in phase]
        ranks = _greedy(where, weights, loads)
        if algorithm == "balanced" and phase:
            bound = lower_bound([*(sizes[shard] for shard in result), *weights], num_ranks)
            _Improvement(ranks, where, weights, loads).run(max(bound, _crowding(where, weights)))
        result.update(zip(phase, ranks, strict=True))
    return result


def lower_bound(sizes: Collection[int], num_ranks: int) -> int:
    """Bytes that the fullest rank has at least, for any holders: the mean, or the largest shard."""
    return max(-(-sum(sizes) // num_ranks), max(sizes, default=0))


def _order(keys: Mapping[T, tuple[bool, int, int]]) -> list[T]:
    """The shards by their keys, and by id where these are equal (ids take long to compare)."""
    order: list[T] = []
    for _, equals in itertools.groupby(sorted(keys, key=keys.__getitem__), keys.__getitem__):
        shards = list(equals)
        order += shards if len(shards) == 1 else sorted(shards, key=order_key)
    return order


def _crowding(holders: Sequence[tuple[int, ...]], sizes: Sequence[int]) -> int:
    """A bound that regards the holders: shards that only some ranks hold fill these by the mean at least."""
    totals: Counter[tuple[int, ...]] = Counter()
    for able, size in zip(holders, sizes, strict=True):
        totals[able] += size
    if len(totals) > _SETS:
        return 0
    inside = {able: frozenset(able) for able in totals}
    return max(-(-sum(totals[part] for part in totals if inside[part] <= inside[able]) // len(able)) for able in totals)


def _holders(shard_to_ranks: Mapping[T, Sequence[int]], num_ranks: int) -> dict[T, tuple[int, ...]]:
    """The different holders of each shard, ascending."""
    known: dict[tuple[int, ...], tuple[int, ...]] = {}
    found: dict[T, tuple[int, ...]] = {}
    for shard, ranks in shard_to_ranks.items():
        given = tuple(ranks)
        if given not in known:
            if not given:
                raise UsageError(f"shard {shard!s} is on no rank, so that none can handle it")
            wrong = [rank for rank in given if not 0 <= rank < num_ranks]
            if wrong:
                raise UsageError(f"shard {shard!s} is on rank {wrong[0]}, but there are {num_ranks} ranks (from 0)")
            known[given] = tuple(sorted(set(given)))
        found[shard] = known[given]
    return found


def _size(shard: T, shard_to_size: Mapping[T, int]) -> int:
    if shard not in shard_to_size:
        raise UsageError(f"shard {shard!s} has no size; shard_to_size must have one for each of shard_to_ranks")
    size = shard_to_size[shard]
    if size < 0:
        raise UsageError(f"shard {shard!s} has a size of {size} bytes")
    return size


def _greedy(holders: Sequence[tuple[int, ...]], sizes: Sequence[int], loads: list[int]) -> list[int]:
    """The rank of each shard; ``loads`` grows by their sizes."""
    uses = Counter(holders)
    heaps: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    ranks = []
    for able, size in zip(holders, sizes, strict=True):
        if len(able) == 1:
            rank = able[0]
        elif uses[able] < _FEW:
            rank = min(able, key=loads.__getitem__)  # the first, and so lowest, of equals
        else:
            if able not in heaps:
                heaps[able] = [(loads[rank], rank) for rank in able]
                heapq.heapify(heaps[able])
            rank = _least(heaps[able], loads)
        loads[rank] += size
        ranks.append(rank)
    return ranks


def _least(heap: list[tuple[int, int]], loads: Sequence[int]) -> int:
    """The rank with the least load. Loads only grow, so what a heap says of a rank is never too much."""
    while True:
        load, rank = heap[0]
        if load == loads[rank]:
            return rank
        heapq.heapreplace(heap, (loads[rank], rank))


class _Improvement:
    """Local search over the places of some shards: each step lowers the larger load of the two ranks it touches."""

    def __init__(
        self, places: list[int], holders: Sequence[tuple[int, ...]], sizes: Sequence[int], loads: list[int]
    ) -> None:
        self._places, self._sizes, self._loads = places, sizes, loads
        sets = {able: frozenset(able) for able in set(holders)}
        self._able = [sets[able] for able in holders]
        self._effort = _EFFORT * len(sizes) + _LEAST_EFFORT  # counted, not timed: every rank must stop at the same step
        self._on: list[list[tuple[int, int]]] = [[] for _ in loads]  # (size, shard), ascending
        for shard, (rank, size) in enumerate(zip(places, sizes, strict=True)):
            self._on[rank].append((size, shard))
        for shards in self._on:
            shards.sort()

    def run(self, bound: int) -> None:
        """Runs until no rank has more than about ``bound``, no step helps, or the effort is spent."""
        goal = bound + bound // 5000
        while self._effort > 0:
            # Where the fullest is stuck, a rank next to it may give something away, which makes room for it.
            full = sorted((rank for rank, load in enumerate(self._loads) if load > goal), key=self._emptiness)
            if not any(self._relieve(rank) for rank in full):
                return

    def _emptiness(self, rank: int) -> tuple[int, int]:
        return -self._loads[rank], rank

    def _relieve(self, rank: int) -> bool:
        """Takes the best step that gives some of the rank's load to another; returns whether there was one."""
        reachable = frozenset().union(*(self._able[shard] for _, shard in self._on[rank]))
        partners = sorted(reachable - {rank}, key=lambda other: (self._loads[other], other))[:_PARTNERS]
        best: tuple[int, int, _Bundle, _Bundle] | None = None
        for other in partners:
            gap = self._loads[rank] - self._loads[other]
            found = self._best_swap(rank, other, gap) if gap > 1 else None
            if found is not None and (best is None or found[0] > best[0]):
                best = (found[0], other, found[1], found[2])
            if best is not None and 20 * best[0] >= 9 * gap:
                break
        if best is None:
            return False
        self._move(best[2], rank, best[1])
        self._move(best[3], best[1], rank)
        return True

    def _best_swap(self, rank: int, other: int, gap: int) -> tuple[int, _Bundle, _Bundle] | None:
        """(gain, what to give, what to take for it): what lowers the larger of two loads, ``gap`` apart, most.

        A step that shifts ``d`` bytes lowers it by ``min(d, gap - d)``.
        """
        best: tuple[int, _Bundle, _Bundle] | None = None
        takes = self._bundles(other, rank)
        for given in reversed(self._bundles(rank, other)):
            index = bisect.bisect_left(takes, (given[0] - gap // 2, ()))
            for taken in takes[max(0, index - 1) : index + 1]:
                shift = given[0] - taken[0]
                gain = min(shift, gap - shift)
                if gain > 0 and (best is None or gain > best[0]):
                    best = (gain, given, taken)
            if best is not None and 20 * best[0] >= 9 * gap:
                break
        return best

    def _bundles(self, rank: int, other: int) -> list[_Bundle]:
        """Sets of shards that ``rank`` may give to ``other`` at once, by size: none, one, and of few shards several."""
        self._effort -= len(self._on[rank])
        movable = [item for item in self._on[rank] if other in self._able[item[1]]]
        most = next((count for count, limit in _BUNDLES if len(movable) <= limit), 1)
        found: list[_Bundle] = [(0, ())]
        for count in range(1, most + 1):
            found += [
                (sum(size for size, _ in items), tuple(shard for _, shard in items))
                for items in itertools.combinations(movable, count)
            ]
        self._effort -= len(found)
        found.sort()
        return found

    def _move(self, bundle: _Bundle, start: int, end: int) -> None:
        for shard in bundle[1]:
            item = (self._sizes[shard], shard)
            shards = self._on[start]
            shards.pop(bisect.bisect_left(shards, item))
            bisect.insort(self._on[end], item)
            self._places[shard] = end
        self._loads[start] -= bundle[0]
        self._loads[end] += bundle[0]
