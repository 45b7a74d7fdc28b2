"""Pieces of memory that the ranks of one host map from each other instead of copying them.

The links are those of a gather (see ``link``), one for each ordered pair of ranks. A piece that lies in the giver's
arena is given as it is; another is copied into the arena, once, whoever wants it.

Lifetime: memory that was given is used for nothing else until every receiver has let go of its view, or has said that
it is done with it. Receivers tell the giver at their next exchange (or at once, with ``consume``). What a receiver
still has when the process group ends is out of use for as long as the giving process lives.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from modelexport.distributed.collectives.groups import Members
from modelexport.distributed.delivery.pairwise import Piece, PieceBuffers
from modelexport.distributed.rendezvous import links as rendezvous
from modelexport.distributed.transport import memory
from modelexport.distributed.transport.payload import pack
from modelexport.distributed.transport.receiving import Delivery, ReceivingLink, receive_from_all
from modelexport.distributed.transport.sending import SendingLink

__all__ = ["SharedMesh", "forget", "mesh_of", "mesh_record"]

_UNACKNOWLEDGED = 2  # payloads that a receiver may be behind with

_Name = tuple[str, tuple[int, ...]]


class SharedMesh:
    """The links of this rank with all others of a group; made by all of them together.

    Raises:
        GatherError: a rank did not come in time, or cannot be reached.
    """

    def __init__(self, team: Members, key: str, seconds: float) -> None:
        self._me, self._seconds, self._number = team.position, seconds, 0
        self._to: dict[int, SendingLink] = {}
        self._from: dict[int, ReceivingLink] = {}
        try:
            for place in range(team.size):
                self._connect(place, team, f"{key}/{place}", seconds)
        except BaseException:
            self.close()
            raise

    def _connect(self, place: int, team: Members, key: str, seconds: float) -> None:
        others = [other for other in range(team.size) if other != place]
        ranks = [team.ranks[place], *(team.ranks[other] for other in others)]
        if place == self._me:
            links = rendezvous.collect_links(key, ranks, seconds)
            self._from = dict(zip(others, links, strict=True))
        else:
            self._to[place] = rendezvous.connect_to_first(key, ranks, team.rank, _UNACKNOWLEDGED, seconds)

    def release_dropped(self) -> None:
        """Acknowledges to the senders the views that were dropped; before an exchange, and before a new rendezvous."""
        for link in self._from.values():
            link.release_dropped()

    def deliver(self, pieces: Sequence[Piece], buffers: PieceBuffers, *, keep: bool) -> int:
        """Brings every piece to its targets. Called by every rank of the group with the same ``pieces``.

        Args:
            pieces: in an order that all ranks share.
            buffers: ``arrived`` gets a view of the giver's memory; ``incoming`` is not called.
            keep: the views may be kept. False: ``arrived`` takes what it wants of them, and the memory is the
                giver's again.

        Returns:
            The bytes that this rank had to copy into its arena.

        Raises:
            GatherError: a rank has ended, failed or not come in time (it says which), or memory does not suffice.
        """
        number, self._number = self._number, self._number + 1
        mine = [piece for piece in pieces if piece.source == self._me]
        targets = sorted({target for piece in mine for target in piece.targets})
        try:
            copied, given = self._place(mine, buffers)
            for target in targets:
                wanted = {str(piece.number): given[piece.number] for piece in mine if target in piece.targets}
                self._to[target].send(number, pack(wanted), self._seconds)
        except BaseException as error:
            for target in targets:  # who else would wait until the time-out
                self._to[target].send_failure(number, f"{type(error).__name__}: {error}")
            raise
        del given
        sources = sorted({piece.source for piece in pieces if self._me in piece.targets})
        self._receive(number, [self._from[source] for source in sources], buffers, keep)
        return copied

    def _place(self, mine: Sequence[Piece], buffers: PieceBuffers) -> tuple[int, dict[int, torch.Tensor]]:
        given, copied = {}, 0
        for piece in mine:
            data = buffers.outgoing(piece.number)
            found = _in_arena(data, piece.nbytes)
            if found is None:
                found = memory.shared_empty(piece.nbytes, torch.uint8)
                # Through the dtype and shape of the piece, so that strided ones are copied only once.
                found.view(data.dtype).view(data.shape).copy_(data)
                copied += piece.nbytes
            given[piece.number] = found
        return copied, given

    def _receive(self, number: int, links: Sequence[ReceivingLink], buffers: PieceBuffers, keep: bool) -> None:
        receive_from_all(links, number, self._seconds)
        for link in links:
            delivery, views = link.open(number)
            if keep:
                self._hand_out(views, buffers)
                link.finish(delivery)
            else:
                self._consume(link, delivery, views, buffers)

    def _consume(
        self, link: ReceivingLink, delivery: Delivery, views: dict[str, torch.Tensor], buffers: PieceBuffers
    ) -> None:
        try:
            self._hand_out(views, buffers)
        finally:
            link.finish(delivery)

    @staticmethod
    def _hand_out(views: dict[str, torch.Tensor], buffers: PieceBuffers) -> None:
        for name in list(views):
            buffers.arrived(int(name), views.pop(name))

    def close(self) -> None:
        """Closes the links. Memory that other ranks may still be reading is not used again."""
        for receiving in self._from.values():
            receiving.release_dropped()
            receiving.close()
        for sending in self._to.values():
            sending.abandon()
        self._to.clear()
        self._from.clear()


def _in_arena(data: torch.Tensor, nbytes: int) -> torch.Tensor | None:
    """The bytes of a tensor that lies in this process's arena in one piece, as they are."""
    if data.device.type != "cpu" or not data.is_contiguous():
        return None
    found = memory.arena().find(data.data_ptr(), nbytes)
    if found is None:
        return None
    memory.arena().release(found[0])  # the link takes hold of it again; until then the tensor keeps it
    return data.as_strided((data.numel(),), (1,)).view(torch.uint8)


class _Meshes:
    """The meshes over one process group's store: by group, and how many a group has had."""

    def __init__(self) -> None:
        self.alive: dict[_Name, tuple[int, SharedMesh]] = {}
        self.made: dict[_Name, int] = {}

    def close(self) -> None:
        while self.alive:
            self.alive.popitem()[1][1].close()


_known: weakref.WeakKeyDictionary[Any, _Meshes] = weakref.WeakKeyDictionary()


def mesh_record(team: Members) -> list[int]:
    """This rank's record for :func:`mesh_of`: the number of its mesh (-1: none), and how many meshes it has had."""
    meshes, name = _here(), _name(team)
    alive = meshes.alive.get(name)
    if alive is not None:
        alive[1].release_dropped()
    return [alive[0] if alive is not None else -1, meshes.made.get(name, 0)]


def mesh_of(team: Members, records: Sequence[Sequence[int]]) -> SharedMesh:
    """The mesh of a group, which lasts as long as its process group. Called by all ranks together.

    Args:
        team: the group.
        records: every rank's :func:`mesh_record`. Where a rank has none, or another one, all make a new one.

    Raises:
        GatherError: as :class:`SharedMesh`.
    """
    meshes, name = _here(), _name(team)
    numbers = {alive for alive, _ in records}
    if numbers == {-1} or len(numbers) > 1:
        forget(team)
        number = max(made for _, made in records)
        meshes.made[name] = number + 1
        key = f"modelexport/mesh/{name[0]}/{'-'.join(map(str, team.ranks))}/{number}"
        seconds = float(rendezvous.default_store().timeout.total_seconds())
        meshes.alive[name] = number, SharedMesh(team, key, seconds)
    return meshes.alive[name][1]


def forget(team: Members) -> None:
    """Closes a group's mesh after a failed exchange, so that ranks that wait for this one fail too."""
    alive = _here().alive.pop(_name(team), None)
    if alive is not None:
        alive[1].close()


def _here() -> _Meshes:
    store = rendezvous.default_store()
    if store not in _known:
        meshes = _known[store] = _Meshes()
        weakref.finalize(store, meshes.close)
    return _known[store]


def _name(team: Members) -> _Name:
    assert team.process_group is not None
    return team.process_group.group_name, team.ranks


def _forget_after_fork() -> None:
    # A child that held our sockets open would hide our end from the other ranks.
    for meshes in _known.values():
        meshes.close()


os.register_at_fork(after_in_child=_forget_after_fork)
