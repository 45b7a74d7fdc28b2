"""The gathers of one set of ranks through a workspace: numbering, room, waiting, clearing up.

The first rank removes each payload as soon as it has read it; that is also how its sender learns that it was
consumed. So the directory never holds more than a few payloads of each rank.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from modelexport.distributed.rendezvous import links as _rendezvous
from modelexport.distributed.supervision.heartbeat import condition, remove_gone, sweep_dead_runs
from modelexport.distributed.transport.messages import TEXT, LostPeerError, check_fields
from modelexport.distributed.workspace import CORRUPT_READS, RUN, CorruptError, NFSWorkspace, NotYetError
from modelexport.errors import GatherError, UsageError

__all__ = ["WorkspaceChannel"]

_OPENED = {"run": RUN, "path": TEXT, "host": TEXT}
_SIGHT_SECONDS = 90.0  # an NFS client may go by what it knew of a directory for a minute


class WorkspaceChannel:
    """Sends to, or receives at, the first of ``ranks`` through ``path``; see ``gather``.

    Args:
        limit: payloads of this rank that may lie unconsumed when it writes another.
    """

    def __init__(
        self,
        path: str,
        ranks: Sequence[int],
        group: dist.ProcessGroup | None,
        me: int,
        limit: int,
        seconds: float,
    ) -> None:
        self._ranks, self._me, self._limit = tuple(ranks), me, limit
        self._next = 1
        self._outstanding: set[int] = set()
        self._met = {ranks[0]}  # opens before it tells the others where
        self._workspace: NFSWorkspace | None = None
        key = self._key = _rendezvous.group_key(ranks, group) + "/run"

        def open_first() -> dict[str, str]:
            # Before the others know the run's id, so that they find the first rank's heartbeat.
            run = secrets.token_hex(8)
            self._workspace = NFSWorkspace(path, run_id=run)
            return {"run": run, "path": path, "host": _rendezvous.host()}

        opened = _rendezvous.agree(key, ranks, me, open_first, seconds)
        check_fields(opened, f"the place of rank {ranks[0]}'s workspace", _OPENED, blamed=ranks[:1])
        if self._workspace is None:
            self._find_first(Path(path), opened, min(seconds / 2, _SIGHT_SECONDS))
            self._workspace = NFSWorkspace(path, run_id=opened["run"])
        else:
            sweep_dead_runs(Path(path), self._workspace.directory)

    def _find_first(self, path: Path, opened: dict[str, str], seconds: float) -> None:
        """Waits until what the first rank has put into the workspace is there for this rank too.

        Raises:
            LostPeerError: the first rank has left already.
            UsageError: it does not come: this rank sees another directory.
        """
        directory, first = path / f"run-{opened['run']}", self._ranks[0]
        deadline, pause = time.monotonic() + seconds, 0.001
        while condition(directory, first) == "absent":
            if _rendezvous.noted(f"{self._key}/left"):
                text = f"rank {first}, which collects, had closed {directory} before rank {self._me} came"
                raise LostPeerError(text, [first])
            if time.monotonic() > deadline:
                raise UsageError(
                    f"rank {self._me} on {_rendezvous.host()} sees another workspace than rank {first}: in {path} "
                    f"there is, after {seconds:.3g} s, no {directory.name}, which rank {first} on {opened['host']} "
                    f"made in {opened['path']}; all ranks must see one directory (on several machines: on NFS), "
                    "give its path by --workspace DIR"
                )
            with contextlib.suppress(OSError):
                os.listdir(path)  # makes an NFS client look again
            time.sleep(pause)
            pause = min(pause * 1.5, 0.1)

    def send(self, config: Any, seconds: float) -> None:
        workspace = self._open()
        sequence, self._next = self._next, self._next + 1
        try:
            self._wait_for_room(self._limit - 1, seconds)
            workspace.publish(sequence, config)
        except Exception as error:
            # So that the first rank fails now, with our reason. Where not even that can be written it sees us end.
            with contextlib.suppress(GatherError):
                workspace.publish_failure(sequence, f"{type(error).__name__}: {error}")
            raise
        self._outstanding.add(sequence)

    def receive(self, seconds: float) -> tuple[list[Any], None]:
        workspace = self._open()
        sequence, self._next = self._next, self._next + 1
        configs: dict[int, Any] = {}
        corrupt: dict[int, int] = {}
        started, pause = time.monotonic(), 0.001
        deadline = started + seconds
        while True:
            missing = [rank for rank in self._ranks[1:] if rank not in configs]
            if not missing:
                return [configs[rank] for rank in self._ranks[1:]], None
            for rank in missing:
                try:
                    configs[rank] = workspace.fetch(rank, sequence)[1]
                    workspace.remove(rank, sequence)
                    pause = 0.001
                except CorruptError as error:
                    corrupt[rank] = corrupt.get(rank, 0) + 1
                    if corrupt[rank] == CORRUPT_READS:
                        where = f"rank {rank}'s payload {sequence} in {workspace.directory}"
                        raise LostPeerError(f"{where} is corrupt: {error}", [rank]) from error
                except NotYetError:
                    pass
            overdue = time.monotonic() > deadline
            gone = [rank for rank in missing if rank not in configs and self._has_left(rank)]
            # Once more, for what it wrote just before it left.
            gone = [rank for rank in gone if (rank, sequence) not in workspace.published()]
            if overdue or gone:
                states = "; ".join(
                    workspace.describe_missing(rank, sequence) for rank in missing if rank not in configs
                )
                raise LostPeerError(
                    (f"ranks {gone} have ended or closed the workspace; " if gone else "")
                    + f"waited {time.monotonic() - started:.1f} s in {workspace.directory} for payload {sequence} of "
                    f"ranks {list(self._ranks[1:])}; arrived: {sorted(configs)}; {states}",
                    gone or [rank for rank in missing if rank not in configs],
                )
            time.sleep(pause)
            pause = min(pause * 1.5, 0.1)

    def finish(self, ticket: None) -> None:
        """Nothing: a payload is consumed as soon as it is read."""

    def drain(self, seconds: float) -> None:
        self._wait_for_room(0, seconds)

    def close(self) -> None:
        workspace = self._workspace
        if workspace is None:
            return
        first = self._ranks[0]
        if self._me == first:
            _rendezvous.leave_note(f"{self._key}/left")  # before its files go
        # Only the first rank reads here, what others wrote and when they were last alive.
        if self._me == first or self._has_left(first):
            for rank, sequence in workspace.published():
                if self._me in (first, rank):
                    workspace.remove(rank, sequence)
            remove_gone(workspace.directory)
        workspace.close()
        self._workspace = None

    def _open(self) -> NFSWorkspace:
        if self._workspace is None:
            raise GatherError("this gather's workspace is closed")
        return self._workspace

    def _has_left(self, rank: int) -> bool:
        """Returns whether ``rank`` is known to write and read no more; a slow rank has not left."""
        found = condition(self._open().directory, rank)
        if found == "living":
            self._met.add(rank)
        return found in ("closed", "dead") or (found == "absent" and rank in self._met)

    def _still_there(self) -> set[int]:
        if self._outstanding and self._workspace is not None:
            published = set(self._workspace.published())
            self._outstanding = {sequence for sequence in self._outstanding if (self._me, sequence) in published}
        return self._outstanding

    def _wait_for_room(self, allowed: int, seconds: float) -> None:
        deadline, pause = time.monotonic() + seconds, 0.001
        while len(self._still_there()) > allowed:
            workspace, first = self._open(), self._ranks[0]
            gone = self._has_left(first) and len(self._still_there()) > allowed
            if gone or time.monotonic() > deadline:
                waited = "it has ended or closed the workspace" if gone else f"waited {seconds:.3g} s"
                raise LostPeerError(
                    f"rank {first}, which collects, has not read the payloads {sorted(self._outstanding)} of rank "
                    f"{self._me} in {workspace.directory}: {waited}; {workspace.heartbeat_of(first)}",
                    [first],
                    indirect=True,
                )
            time.sleep(pause)
            pause = min(pause * 1.5, 0.1)
