"""The exchange of metadata before tensors travel: each rank's shards and needs, and errors in its arguments.

Where a rank's arguments are wrong, or ranks disagree, all of them raise the same error before anything is sent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch

from modelexport.distributed.collectives.argument_check import exchange_texts
from modelexport.distributed.collectives.groups import AnyGroup, Members, members
from modelexport.distributed.delivery import shared_mesh
from modelexport.distributed.delivery.pairwise import Piece, PieceBuffers, deliver, host_identity
from modelexport.distributed.transport.messages import FLAG, TEXT, Kind, check_fields, read_message
from modelexport.errors import UsageError, nearest

__all__ = ["ExchangeReport", "Route", "agree", "exchange_records", "is_float8tensor", "team_of"]


def _is_mesh(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(each) is int and each >= -1 for each in value)


_FIELDS = {"algorithm": TEXT, "cuda": FLAG, "able": FLAG}
_ON_HOST = {"host": TEXT, "mesh": Kind("the numbers of two meshes", _is_mesh)}


@dataclass
class ExchangeReport:
    """Counters of an exchange on this rank; filled in where one is passed. Exchanges add up.

    Attributes:
        algorithm: the one that ran last, ``auto`` resolved.
        needed: bytes of the shards that this rank needed from others.
        sent: bytes that this rank put on the wire, counted once for each rank that they went to.
        received: bytes that came in over the wire, needed or not.
        copied: bytes that this rank copied into shared memory, for others to map.
        mapped: bytes of other ranks' memory that this rank got views of.
        messages: that this rank sent, or collectives that it took part in.
    """

    algorithm: str = ""
    needed: int = 0
    sent: int = 0
    received: int = 0
    copied: int = 0
    mapped: int = 0
    messages: int = 0

    def add(self, **amounts: int) -> None:
        """Adds to the counters of these names."""
        known = {field.name for field in fields(self)} - {"algorithm"}
        assert amounts.keys() <= known, amounts
        for name, amount in amounts.items():
            setattr(self, name, getattr(self, name) + amount)


@dataclass(frozen=True)
class Route:
    """The group, the algorithm and the device by which the tensors of one exchange travel.

    Attributes:
        team: the group; ranks are places in it.
        algorithm: its name, ``auto`` resolved.
        device: from which the group's back end takes tensors, the same kind on every rank.
        records: what each rank said.
        report: this rank's counters.
    """

    team: Members
    algorithm: str
    device: torch.device
    records: Sequence[dict[str, Any]]
    report: ExchangeReport

    def carry(self, pieces: Sequence[Piece], buffers: PieceBuffers, *, keep: bool) -> None:
        """Brings the pieces to the ranks that want them, by ``p2p`` or ``shared_memory``; see these modules."""
        me = self.team.position
        wanted = sum(piece.nbytes for piece in pieces if me in piece.targets)
        if self.algorithm == "p2p":
            traffic = deliver(pieces, buffers, self.team, self.device)
            assert traffic.received == wanted
            self.report.add(sent=traffic.sent, received=traffic.received, messages=traffic.messages)
            return
        assert self.algorithm == "shared_memory"
        try:
            copied = self._mesh.deliver(pieces, buffers, keep=keep)
        except BaseException:
            shared_mesh.forget(self.team)
            raise
        self.report.add(copied=copied, mapped=wanted)

    @cached_property
    def _mesh(self) -> shared_mesh.SharedMesh:
        # One for all batches of the exchange: the records are as old as its beginning.
        return shared_mesh.mesh_of(self.team, [record["mesh"] for record in self.records])


def team_of(call: str, group: AnyGroup) -> Members:
    """The members of a group that this rank must belong to."""
    team = members(group)
    if not team.is_member:
        raise UsageError(f"{call}: rank {team.rank} does not belong to the group of ranks {list(team.ranks)}")
    return team


def agree(
    call: str,
    team: Members,
    algorithm: str,
    known: Sequence[str],
    describe: Callable[[], dict[str, Any]],
    tensors: Callable[[], Sequence[torch.Tensor]],
    report: ExchangeReport | None,
    fields: Mapping[str, Kind],
) -> Route:
    """Exchanges the ranks' records, checks that they agree, and chooses the algorithm and the device.

    Args:
        call: the public function, for messages.
        team: the group.
        algorithm: by name; ``auto``: shared memory where all ranks are on one host and their tensors in its memory,
            else point to point.
        known: the names that the call takes.
        describe: looks at this rank's arguments; JSON.
        tensors: what this rank has to give, once ``describe`` has found it good.
        report: the caller's.
        fields: the kinds of the fields that ``describe`` gives.

    Raises:
        UsageError: on every rank, if ``describe`` raised on any, or the algorithms differ, are unknown or impossible.
    """
    failure: Exception | None = None
    record: dict[str, Any] = {"algorithm": algorithm}
    try:
        if algorithm not in known:
            raise UsageError(f"there is no exchange algorithm {algorithm!r}{nearest(str(algorithm), known)}")
        record |= describe()
        cuda = any(tensor.is_cuda for tensor in tensors())
        # Looked up only where it decides: not every machine can say where it is.
        record |= {"cuda": cuda, "able": torch.cuda.is_available()}
        if team.size > 1 and algorithm in ("auto", "shared_memory"):
            record |= {"host": host_identity(), "mesh": shared_mesh.mesh_record(team)}
    except Exception as error:
        failure = error
    records = exchange_records(call, team, record, failure, {**_FIELDS, **fields})
    for rank, said in zip(team.ranks, records, strict=True):
        if said["algorithm"] != records[0]["algorithm"]:
            raise UsageError(
                f"{call}: rank {rank} asks for the algorithm {said['algorithm']!r} and rank {team.ranks[0]} for "
                f"{records[0]['algorithm']!r}; ask for the same on every rank"
            )
        if team.size > 1 and algorithm in ("auto", "shared_memory"):
            check_fields(said, _sender(rank), _ON_HOST, blamed=[rank])
    on_cuda = any(record["cuda"] for record in records) and all(record["able"] for record in records)
    here = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
    device = team.carrier(here)
    if algorithm == "auto":
        together = team.size > 1 and len({record["host"] for record in records}) == 1
        algorithm = "shared_memory" if together and device.type == "cpu" else "p2p"
    elif algorithm == "shared_memory" and not team.alone:
        _check_one_host(call, records, team)
    report = report if report is not None else ExchangeReport()
    report.algorithm = algorithm
    return Route(team, algorithm, device, records, report)


def exchange_records(
    call: str, team: Members, record: dict[str, Any], failure: Exception | None, fields: Mapping[str, Kind]
) -> list[dict[str, Any]]:
    """Every rank's record, in the group's order: one exchange of metadata.

    Args:
        call: the public function that this rank is in.
        team: the group.
        record: what this rank says; JSON.
        failure: instead, what is wrong with this rank's arguments.
        fields: the kinds of the records' fields.

    Raises:
        UsageError: on every rank, where one has a failure, or is in another function.
        LostPeerError: a rank's record is none.
    """
    if failure is not None:
        kind = "" if isinstance(failure, UsageError) else f"{type(failure).__name__}: "
        record = {"problem": f"{kind}{failure}"}
    text = json.dumps({"call": call, **record})
    texts = [text] if team.alone else exchange_texts(text, team)
    records = [_checked(found, rank) for rank, found in zip(team.ranks, texts, strict=True)]
    for rank, said in zip(team.ranks, records, strict=True):
        if said["call"] != records[0]["call"]:
            raise UsageError(
                f"rank {rank} calls {said['call']} where rank {team.ranks[0]} calls {records[0]['call']}; every rank "
                "of a group must make the same calls in the same order"
            )
    for rank, said in zip(team.ranks, records, strict=True):
        if "problem" in said:
            raise UsageError(f"{call}: rank {rank}: {said['problem']}") from failure
    for rank, said in zip(team.ranks, records, strict=True):
        check_fields(said, _sender(rank), fields, blamed=[rank])
    return records


def _checked(text: str, rank: int) -> dict[str, Any]:
    """A rank's record.

    Raises:
        LostPeerError: it is none.
    """
    return read_message(text, _sender(rank), {"call": TEXT}, {"problem": TEXT}, blamed=[rank])


def _sender(rank: int) -> str:
    return f"what rank {rank} says of its tensors"


def _check_one_host(call: str, records: Sequence[dict[str, Any]], team: Members) -> None:
    for rank, record in zip(team.ranks, records, strict=True):
        if record["host"] != records[0]["host"]:
            raise UsageError(
                f"{call}: shared_memory needs all ranks on one host and of one user, but rank {rank} is on "
                f"{record['host']} and rank {team.ranks[0]} on {records[0]['host']}; use 'p2p' or 'auto'"
            )


def is_float8tensor(tensor: torch.Tensor) -> bool:
    """Returns whether this is Transformer Engine's ``Float8Tensor`` (which need not be installed to ask)."""
    return any(
        kind.__name__ == "Float8Tensor" and kind.__module__.split(".")[0] == "transformer_engine"
        for kind in type(tensor).__mro__
    )
