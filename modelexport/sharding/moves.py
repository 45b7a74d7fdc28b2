"""Moves between ranks after which each has the shards it wants: a pure function of what each holds and wants.

Every rank works it out by itself from the same descriptions, so that all come to the same moves, or the same error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from modelexport.errors import UsageError
from modelexport.sharding.boxes import Box, subtract, uncovered, volume
from modelexport.sharding.boxes import tile as cut_up
from modelexport.sharding.distribution import distribute_shards_to_ranks

__all__ = ["Holding", "Move", "plan_moves", "shown"]


@dataclass(frozen=True)
class Holding:
    """A shard that a rank holds, or wants: its ranges of the tensor ``key``.

    ``whole`` is None where the rank does not know the tensor's shape.
    """

    key: str
    box: Box
    dtype: torch.dtype
    whole: tuple[int, ...] | None


@dataclass(frozen=True)
class Move:
    """A rectangle of the tensor ``key`` that goes from ``source``, out of its shard ``held``, to ``targets``."""

    key: str
    box: Box
    held: Box
    source: int
    targets: tuple[int, ...]
    nbytes: int


def plan_moves(
    held: Sequence[Sequence[Holding]], wanted: Sequence[Sequence[Holding]], ranks: Sequence[int]
) -> list[Move]:
    """The moves after which each rank has what it wants, in an order that all ranks share.

    A rank keeps what it holds already, and gets each other element once, however many of its wanted shards contain
    it. Where several ranks hold a rectangle, the one with least to send sends it.

    Args:
        held, wanted: by the rank's place in the group.
        ranks: their names, for messages.

    Raises:
        UsageError: ranks disagree about a tensor's dtype or shape, or nobody holds a part that is wanted.
    """
    dtypes = _agreed(held, wanted, ranks)
    holders = _by_key(held)
    needs: dict[str, dict[int, list[Box]]] = {}
    for place, shards in enumerate(wanted):
        for shard in shards:
            needs.setdefault(shard.key, {}).setdefault(place, []).append(shard.box)
    pieces: dict[tuple[str, Box, Box], list[int]] = {}  # (key, rectangle, the shard that has it) -> who gets it
    for key in sorted(needs):
        boxes = holders.get(key, {})
        for place, wishes in sorted(needs[key].items()):
            for box, source in _wishes(key, wishes, boxes, place, ranks):
                pieces.setdefault((key, box, source), []).append(place)
    sizes = {piece: volume(piece[1]) * dtypes[piece[0]].itemsize for piece in pieces}
    givers = {piece: holders[piece[0]][piece[2]] for piece in pieces}
    weights = {piece: sizes[piece] * len(targets) for piece, targets in pieces.items()}
    sources = distribute_shards_to_ranks(givers, weights, len(held), set())
    return [
        Move(key, box, shard, sources[key, box, shard], tuple(pieces[key, box, shard]), sizes[key, box, shard])
        for key, box, shard in sorted(pieces)
    ]


def _agreed(
    held: Sequence[Sequence[Holding]], wanted: Sequence[Sequence[Holding]], ranks: Sequence[int]
) -> dict[str, torch.dtype]:
    """The dtype of each tensor, on which all agree."""
    first: dict[str, tuple[int, Holding]] = {}
    shaped: dict[str, tuple[int, tuple[int, ...]]] = {}
    for place in range(len(ranks)):
        for shard in (*held[place], *wanted[place]):
            other, one = first.setdefault(shard.key, (place, shard))
            if shard.dtype != one.dtype:
                raise UsageError(
                    f"reshard: tensor {shard.key!r} is {one.dtype} on rank {ranks[other]} and {shard.dtype} on rank "
                    f"{ranks[place]}; convert it before it is resharded"
                )
            if shard.whole is not None:
                other, shape = shaped.setdefault(shard.key, (place, shard.whole))
                if shape != shard.whole:
                    raise UsageError(
                        f"reshard: tensor {shard.key!r} has the global shape {list(shape)} on rank {ranks[other]} and "
                        f"{list(shard.whole)} on rank {ranks[place]}"
                    )
    for place, shards in enumerate(held):
        for shard in shards:
            if shard.key in shaped:
                _check_inside(shard, shaped[shard.key][1], ranks[place])
    return {key: shard.dtype for key, (_, shard) in first.items()}


def _check_inside(shard: Holding, whole: tuple[int, ...], rank: int) -> None:
    ends = [stop for _, stop in shard.box]
    if len(ends) != len(whole) or any(end > limit for end, limit in zip(ends, whole, strict=True)):
        raise UsageError(
            f"reshard: rank {rank} holds {shown(shard.box)} of tensor {shard.key!r}, whose global shape is "
            f"{list(whole)}"
        )


def _by_key(held: Sequence[Sequence[Holding]]) -> dict[str, dict[Box, list[int]]]:
    """For each tensor the shards that there are, in order, and who holds each."""
    found: dict[str, dict[Box, list[int]]] = {}
    for place, shards in enumerate(held):
        for shard in shards:
            if volume(shard.box):
                found.setdefault(shard.key, {}).setdefault(shard.box, []).append(place)
    return {key: dict(sorted(boxes.items())) for key, boxes in found.items()}


def _wishes(
    key: str, wishes: Iterable[Box], boxes: Mapping[Box, Sequence[int]], place: int, ranks: Sequence[int]
) -> list[tuple[Box, Box]]:
    """(rectangle, the shard to take it from) for all that a rank wants of a tensor and does not have."""
    have = [box for box, places in boxes.items() if place in places]
    others = [box for box, places in boxes.items() if place not in places]
    found: list[tuple[Box, Box]] = []
    for wish in wishes:
        if not volume(wish):
            continue
        for missing in uncovered(wish, have):
            left = [missing]
            for number, part in cut_up(missing, others):
                found.append((part, others[number]))
                left = [rest for piece in left for rest in subtract(piece, part)]
            if left:
                raise UsageError(
                    f"reshard: rank {ranks[place]} wants {shown(wish)} of tensor {key!r}, but no rank holds "
                    f"{shown(left[0])} of it"
                )
            have.append(missing)  # for the rank's next wish it has that too
    return found


def shown(box: Box) -> str:
    """A box as one would index a tensor: ``[0:2, 3:4]``."""
    ranges = ", ".join(f"{start}:{stop}" for start, stop in box)
    return f"[{ranges}]"
