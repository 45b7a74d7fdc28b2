"""Buffers that a rank's steps take turns in, and what lies in them on its way from one stage to the next."""

from __future__ import annotations

from dataclasses import dataclass
from queue import Queue
from typing import Any

import torch
from torch import Tensor

from modelexport.layers import LayerConfig


class Slot:
    """One reusable buffer from which a step's tensors are carved."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def reserve(self, nbytes: int) -> None:
        """Begin a step that needs at most ``nbytes``."""
        if self._buffer.numel() < nbytes:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # let go of the old one first
            self._buffer = torch.empty(nbytes, dtype=torch.uint8)
        self._used = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The next tensor of the step, on a cache line of its own."""
        nbytes = dtype.itemsize
        for size in shape:
            nbytes *= size
        start, self._used = self._used, self._used + -(-nbytes // 64) * 64
        return self._buffer[start : start + nbytes].view(dtype).view(shape)


@dataclass
class Shards:
    """A step's source shards (task number -> tensor) and the slot they lie in.

    ``stored`` has what is quantised in the source: task number -> suffix -> tensor.
    """

    tensors: dict[int, Tensor]
    stored: dict[int, dict[str, Tensor]]
    slot: Slot


@dataclass
class Quantised:
    """A step's layer as this rank emits it, and the slots to give back when it has been written.

    ``note`` is what the journal keeps of it, on the first rank.
    """

    layer: LayerConfig
    slots: list[tuple[Queue[Slot], Slot]]
    note: dict[str, Any] | None = None


def slots(count: int) -> Queue[Slot]:
    """So many, in a queue to be taken from and given back to."""
    queue: Queue[Slot] = Queue()
    for _ in range(count):
        queue.put(Slot())
    return queue
