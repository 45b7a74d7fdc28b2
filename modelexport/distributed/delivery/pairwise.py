"""Pairwise delivery of pieces of data, from the rank that has each to the ranks that want it and to no other.

All ranks know the list of pieces, so messages need no header, and the bytes on the wire are those of the pieces.
The ranks go through ``W - 1`` steps: in step ``k`` each sends to the rank ``k`` after it and receives from the one
``k`` before. Small pieces share messages; a large one goes from and to where it lies. What is under
way at a time is bounded, so that copies for messages take little memory.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from modelexport.distributed.collectives.groups import Members

__all__ = ["Piece", "PieceBuffers", "Traffic", "as_flat_bytes", "deliver", "host_identity"]

PACKED_BYTES = 1 << 20  # a message of several pieces has at most so many bytes
ALONE_BYTES = 128 << 10  # larger pieces are worth a message of their own, which saves two copies
IN_FLIGHT_BYTES = 64 << 20  # sent and received, as long as more than one message is under way


@dataclass(frozen=True)
class Piece:
    """``nbytes`` > 0 that ``source`` has and ``targets`` want; ranks are places in the group. ``number`` names it."""

    number: int
    nbytes: int
    source: int
    targets: tuple[int, ...]


class PieceBuffers(Protocol):
    """The memory of pieces on this rank: sent from, received into."""

    def outgoing(self, number: int) -> torch.Tensor:
        """A piece that this rank sends: any strides, a dtype that torch can copy. Called when its turn comes."""

    def incoming(self, number: int) -> torch.Tensor:
        """The memory to receive a piece in: contiguous ``uint8 [nbytes]`` on the device of the exchange."""

    def arrived(self, number: int, data: torch.Tensor) -> None:
        """The piece is in ``data``, which ``incoming`` gave."""


@dataclass
class Traffic:
    """Bytes that this rank has sent and received, and the number of messages sent."""

    sent: int = 0
    received: int = 0
    messages: int = 0


@dataclass
class _Round:
    """The messages under way, at most one in each direction."""

    works: list[Any]
    nbytes: int
    parcels: list[torch.Tensor]  # kept alive until they are sent
    landed: list[tuple[Sequence[Piece], torch.Tensor]]


def host_identity() -> str:
    """An id that is equal for ranks that can share memory: machine, network namespace (abstract sockets), user."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{socket.gethostname()}/{boot}/{os.stat('/proc/self/ns/net').st_ino}/{os.geteuid()}"


def deliver(pieces: Sequence[Piece], buffers: PieceBuffers, team: Members, device: torch.device) -> Traffic:
    """Brings every piece to its targets. Called by every rank of the group with the same ``pieces``.

    Args:
        pieces: in an order that all ranks share.
        buffers: this rank's.
        team: the group.
        device: that the group's back end takes tensors from, the same kind on every rank.

    Raises:
        RuntimeError: a peer is gone, or the group's time-out has passed.
    """
    me, traffic = team.position, Traffic()
    to: dict[int, list[Piece]] = {}
    origin: dict[int, list[Piece]] = {}
    for piece in pieces:
        if piece.source == me:
            for target in piece.targets:
                to.setdefault(target, []).append(piece)
        elif me in piece.targets:
            origin.setdefault(piece.source, []).append(piece)
    under_way: deque[_Round] = deque()
    for step in range(1, team.size):
        after, before = (me + step) % team.size, (me - step) % team.size
        sends, receives = list(_messages(to.get(after, ()))), list(_messages(origin.get(before, ())))
        for number in range(max(len(sends), len(receives))):
            given, taken = sends[number : number + 1], receives[number : number + 1]
            nbytes = sum(piece.nbytes for message in given + taken for piece in message)
            while under_way and sum(each.nbytes for each in under_way) + nbytes > IN_FLIGHT_BYTES:
                _finish(under_way.popleft(), buffers)
            under_way.append(_start(given, taken, nbytes, buffers, team, (after, before), device))
            traffic.messages += len(given)
            traffic.sent += sum(piece.nbytes for message in given for piece in message)
            traffic.received += sum(piece.nbytes for message in taken for piece in message)
    while under_way:
        _finish(under_way.popleft(), buffers)
    return traffic


def _messages(pieces: Sequence[Piece]) -> Iterator[Sequence[Piece]]:
    """``pieces`` as messages; both ends cut the same way."""
    small: list[Piece] = []
    total = 0
    for piece in pieces:
        if piece.nbytes > ALONE_BYTES:
            yield [piece]
            continue
        if total + piece.nbytes > PACKED_BYTES:
            yield small
            small, total = [], 0
        small.append(piece)
        total += piece.nbytes
    if small:
        yield small


def _start(
    given: Sequence[Sequence[Piece]],
    taken: Sequence[Sequence[Piece]],
    nbytes: int,
    buffers: PieceBuffers,
    team: Members,
    peers: tuple[int, int],
    device: torch.device,
) -> _Round:
    # One batch each way: NCCL needs sends and receives that wait for each other to be started together.
    operations, parcels, landed = [], [], []
    for message in given:
        data = [as_flat_bytes(buffers.outgoing(piece.number), device) for piece in message]
        parcels.append(data[0] if len(data) == 1 else torch.cat(data))
        operations.append(dist.P2POp(dist.isend, parcels[-1], team.ranks[peers[0]], team.process_group))
    for message in taken:
        total = sum(piece.nbytes for piece in message)
        alone = len(message) == 1
        data_in = buffers.incoming(message[0].number) if alone else torch.empty(total, dtype=torch.uint8, device=device)
        landed.append((message, data_in))
        operations.append(dist.P2POp(dist.irecv, data_in, team.ranks[peers[1]], team.process_group))
    return _Round(dist.batch_isend_irecv(operations), nbytes, parcels, landed)


def _finish(ended: _Round, buffers: PieceBuffers) -> None:
    for work in ended.works:
        work.wait()
    for message, data in ended.landed:
        if len(message) == 1:
            buffers.arrived(message[0].number, data)
            continue
        for piece, part in zip(message, data.split([piece.nbytes for piece in message]), strict=True):
            place = buffers.incoming(piece.number)
            place.copy_(part)
            buffers.arrived(piece.number, place)


def as_flat_bytes(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The bytes of a tensor whose dtype torch can copy, ``uint8 [nbytes]`` on ``device``; a view where that will do."""
    dense = tensor.to(device).contiguous()
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
