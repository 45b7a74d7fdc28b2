"""The exchange of numbers between ranks in the midst of a layer: some megabytes, thousands of times.

Ranks on one host write into buffers that all of them have mapped, and meet before they read. (With 4 MB from each of
two ranks on two cores that takes 2 ms, gloo's ``all_gather`` 10 to 19; with 16 MB from each of four, 4 and 330.) Ranks
on several hosts, and those with tensors on a GPU, use ``all_gather``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from modelexport.distributed import collectives
from modelexport.distributed.collectives.groups import members
from modelexport.distributed.delivery import shared_mesh
from modelexport.distributed.delivery.pairwise import Piece, host_identity
from modelexport.distributed.transport import memory
from modelexport.distributed.transport.messages import read_value

__all__ = ["Exchange"]

_SMALLEST = 1 << 20


class Exchange:
    """Gathers over all ranks of the job, of which there are several; each calls the same in the same order."""

    def __init__(self) -> None:
        self.rank, self.world = collectives.get_rank(), collectives.get_world_size()
        self._one_host = len(set(self.objects(host_identity()))) == 1
        # A rank may write its next numbers while others still read its last, so each has two places. It is not a round
        # further on than any other: they meet in each.
        self._buffers: list[Tensor] = []  # uint8 [2, bytes] of each rank
        self._turn = 0

    def objects(self, value: Any) -> list[Any]:
        """Every rank's JSON-able value."""
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = [torch.empty(1, dtype=torch.int64) for _ in range(self.world)]
        collectives.all_gather(lengths, torch.tensor([data.numel()]))
        parts = self._by_collective([data], [int(length.item()) for length in lengths], data)
        return [read_value(bytes(part.tolist()), f"a value of rank {rank}", [rank]) for rank, part in enumerate(parts)]

    def gather(self, values: Sequence[Tensor], sizes: Sequence[int], like: Tensor) -> list[Tensor]:
        """Every rank's numbers, flat.

        Args:
            values: this rank's, one after the other; any strides.
            sizes: how many numbers each rank has.
            like: of the same dtype and device.

        Returns:
            For each rank ``[sizes[rank]]``; to be read only, and only until the next call.

        Raises:
            GatherError: memory that ranks can share does not suffice.
        """
        if self._one_host and like.device.type == "cpu":
            return self._by_shared_memory(values, sizes, like.dtype)
        return self._by_collective(values, sizes, like)

    def _by_shared_memory(self, values: Sequence[Tensor], sizes: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
        nbytes = max(sizes) * dtype.itemsize
        if not self._buffers or nbytes > self._buffers[0].shape[1]:
            self._meet(max(_SMALLEST, 1 << (nbytes - 1).bit_length()))
        self._turn = 1 - self._turn
        places = [
            buffer[self._turn, : size * dtype.itemsize].view(dtype)
            for buffer, size in zip(self._buffers, sizes, strict=True)
        ]
        _write(values, places[self.rank])
        collectives.barrier()
        return places

    def _meet(self, nbytes: int) -> None:
        """Gives every rank a buffer of all; the former ones stay until nobody reads them any more."""
        team = members(None)
        mesh = shared_mesh.mesh_of(team, self.objects(shared_mesh.mesh_record(team)))
        buffers = _ExchangedTensors(memory.shared_empty((2, nbytes), torch.uint8))
        others = {rank: tuple(other for other in range(self.world) if other != rank) for rank in range(self.world)}
        mesh.deliver([Piece(rank, 2 * nbytes, rank, others[rank]) for rank in others], buffers, keep=True)
        buffers.found[self.rank] = buffers.own
        self._buffers = [buffers.found[rank].view(2, nbytes) for rank in range(self.world)]

    def _by_collective(self, values: Sequence[Tensor], sizes: Sequence[int], like: Tensor) -> list[Tensor]:
        mine = like.new_zeros(max(sizes))
        _write(values, mine)
        parts = [torch.empty_like(mine) for _ in range(self.world)]
        collectives.all_gather(parts, mine)
        return [part[:size] for part, size in zip(parts, sizes, strict=True)]

    def close(self) -> None:
        """Lets go of the other ranks' memory."""
        self._buffers = []


class _ExchangedTensors:
    """The tensors that ranks exchange; see :class:`~modelexport.distributed.delivery.pairwise.PieceBuffers`."""

    def __init__(self, own: Tensor) -> None:
        self.own = own
        self.found: dict[int, Tensor] = {}

    def outgoing(self, number: int) -> Tensor:
        return self.own

    def incoming(self, number: int) -> Tensor:
        raise AssertionError("memory that is shared needs no other place")

    def arrived(self, number: int, data: Tensor) -> None:
        self.found[number] = data


def _write(values: Sequence[Tensor], into: Tensor) -> None:
    place = 0
    for value in values:
        into[place : place + value.numel()].view(value.shape).copy_(value)
        place += value.numel()
