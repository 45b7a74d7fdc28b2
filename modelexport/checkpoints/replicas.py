"""Replicas in a sharded checkpoint: what lies in several ranks' files must be the same in all of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from modelexport.checkpoints import raw_io
from modelexport.checkpoints.safetensors.header import TensorInfo
from modelexport.checkpoints.safetensors.placement import itemsize
from modelexport.checkpoints.safetensors.reader import Checkpoint, Reader
from modelexport.sharding.boxes import Box, extent, intersect, relative, slices, whole

if TYPE_CHECKING:
    from modelexport.checkpoints.raw_io import Array

CHUNK_BYTES = 4 << 20


def replicated(checkpoint: Checkpoint, info: TensorInfo) -> bool:
    """Returns whether any element of a tensor lies in more than one place."""
    places = checkpoint.placements.get(info.name, ())
    return sum(math.prod(extent(place.box)) for place in places) > math.prod(info.shape)


def odd_replica(checkpoint: Checkpoint, reader: Reader, info: TensorInfo, box: Box, read: Array) -> str | None:
    """Describes the replicas of a rectangle that differ.

    Args:
        read: its elements, as ``reader`` gave them.

    Returns:
        A sentence about the first that differs; None where all are the same, or there is but one.

    Raises:
        CheckpointError: a file cannot be read or has become shorter.
    """
    if not replicated(checkpoint, info):
        return None
    for place in checkpoint.placements[info.name]:
        shared = intersect(box, place.box)
        if shared is None:
            continue
        again = raw_io.empty(extent(shared), itemsize(info))
        reader.read_place(info, place, shared, again)
        mine = read if shared == box else read[slices(relative(shared, box))]  # (indexing a number copies it)
        if not raw_io.same_bytes(again, mine):
            ranges = ", ".join(f"{start}:{stop}" for start, stop in shared)
            return (
                f"{checkpoint.directory}: {place.path.name} has other values for [{ranges}] than another of its files"
            )
    return None


def odd_replicas(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """(tensor, what is wrong) for each tensor with replicas that differ. Reads those that have replicas, no other.

    Raises:
        CheckpointError: a file cannot be read or has become shorter.
    """
    with Reader(checkpoint) as reader:
        for name, info in checkpoint.infos.items():
            if not replicated(checkpoint, info):
                continue
            for box in chunks(info):
                read = raw_io.empty(extent(box), itemsize(info))
                reader.read_box(info, box, read)
                text = odd_replica(checkpoint, reader, info, box, read)
                if text is not None:
                    yield name, text
                    break


def chunks(info: TensorInfo, nbytes: int = CHUNK_BYTES) -> Iterator[Box]:
    """A tensor in rectangles of whole rows, of at most ``nbytes`` where its rows are not longer than that."""
    if not info.shape:
        yield ()
        return
    row = max(1, info.nbytes // max(1, info.shape[0]))
    count = max(1, nbytes // row)
    for start in range(0, max(1, info.shape[0]), count):
        yield ((start, min(start + count, info.shape[0])), *whole(info.shape)[1:])
