"""Rank 0's hub of the ranks' watch (see watch): collects reports, finds the root cause, sends it to all ranks."""

from __future__ import annotations

import contextlib
import hmac
import json
import selectors
import socket
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from modelexport.distributed.config import MultiprocessConfig
from modelexport.distributed.supervision.failures import ECHO, OWN, Failure, passed_on, root_cause, settling_seconds
from modelexport.distributed.supervision.heartbeat import remove_rank
from modelexport.distributed.transport.messages import (
    FLAG,
    OBJECT,
    PATH,
    TEXT,
    LostPeerError,
    read_message,
    utf8,
)

_LONGEST_LINE = 1 << 20
_FIELDS = {"phase": TEXT, "waiting": FLAG, "leaves": PATH, "failed": OBJECT, "cause": OBJECT}
MOST_STRANGERS = 256
"""Connections that have not said yet which rank they are of; beyond, the oldest is closed: each takes a descriptor."""


class Lines:
    """JSON lines that arrive on a socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = b""

    def read(self) -> list[dict[str, Any]] | None:
        """The messages that have become complete; None at the end of the connection. Call when it is readable."""
        try:
            data = self._connection.recv(1 << 16)
        except OSError:
            return None
        if not data or len(self._buffer) > _LONGEST_LINE:
            return None
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        try:
            return [read_message(line, "a line of a rank", {}, _FIELDS) for line in lines]
        except LostPeerError:
            return None


def keep_alive(connection: socket.socket) -> None:
    """Lets the kernel find out within half a minute that the other machine is gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 30_000)):
        if hasattr(socket, name):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


@dataclass(eq=False)
class _WatchedRank:
    """A rank, as rank 0 sees it."""

    rank: int
    connection: socket.socket
    lines: Lines
    phase: str = "joining the process group"
    waiting: bool = False
    since: float = 0.0
    finished: bool = False
    directories: list[Path] = field(default_factory=list)
    failure: Failure | None = None

    def send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the end of a connection is noticed where it is read
            self.connection.sendall(json.dumps(message).encode() + b"\n")


class Hub:
    """The thread on rank 0 to which every rank is connected, rank 0 itself by ``own``."""

    def __init__(self, listener: socket.socket, own: socket.socket, token: str, config: MultiprocessConfig) -> None:
        self._listener, self._token, self._world = listener, token, config.world_size
        self._members = {0: _WatchedRank(0, own, Lines(own), since=time.monotonic())}
        self._verdict: dict[str, Any] | None = None
        self._thread = threading.Thread(target=self._run, name="modelexport-watch-hub", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self, seconds: float) -> None:
        """Waits until every rank has hung up."""
        self._thread.join(seconds)

    def _run(self) -> None:
        own = self._members[0]
        strangers: list[socket.socket] = []
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ, None)
            selector.register(own.connection, selectors.EVENT_READ, own)
            connected = 1
            while connected:
                patience = 0.02 if self._failures() and self._verdict is None else 0.5
                for key, _ in selector.select(patience):
                    connection: Any = key.fileobj
                    if key.data is None:
                        accepted, _ = self._listener.accept()
                        selector.register(accepted, selectors.EVENT_READ, Lines(accepted))
                        strangers.append(accepted)
                        if len(strangers) > MOST_STRANGERS:
                            selector.unregister(strangers[0])
                            strangers.pop(0).close()
                    elif isinstance(key.data, Lines):
                        if connection not in strangers:
                            continue  # closed in this round
                        messages = key.data.read()
                        if messages == []:
                            continue  # half a line
                        strangers.remove(connection)
                        selector.unregister(connection)
                        member = self._greet(connection, key.data, messages)
                        if member is not None:
                            selector.register(connection, selectors.EVENT_READ, member)
                            connected += 1
                    elif not self._receive(key.data):
                        selector.unregister(connection)
                        connection.close()
                        connected -= 1
                self._decide()
            for key in list(selector.get_map().values()):
                key.fileobj.close()  # type: ignore[union-attr]

    def _greet(
        self, accepted: socket.socket, lines: Lines, messages: list[dict[str, Any]] | None
    ) -> _WatchedRank | None:
        messages = messages or [{}]
        rank: Any = messages[0].get("rank")
        known = hmac.compare_digest(utf8(messages[0].get("token")), self._token.encode())
        if not known or type(rank) is not int or rank not in range(1, self._world) or rank in self._members:
            accepted.close()
            return None
        keep_alive(accepted)
        member = self._members[rank] = _WatchedRank(rank, accepted, lines, since=time.monotonic())
        for message in messages[1:]:
            self._note(member, message)
        if self._verdict is not None:
            member.send(self._verdict)
        return member

    def _receive(self, member: _WatchedRank) -> bool:
        """Receives messages of ``member``; False when it has hung up."""
        messages = member.lines.read()
        if messages is None:
            if self._verdict is None or "cause" in self._verdict:
                for directory in member.directories:
                    remove_rank(directory, member.rank)
            if not member.finished and member.failure is None:
                text = "its process ended without leaving an error (killed, or os._exit; or its machine is gone)"
                member.failure = Failure(member.rank, time.monotonic() - 0.05, OWN, member.phase, text)
            return False
        for message in messages:
            self._note(member, message)
        return True

    def _note(self, member: _WatchedRank, message: dict[str, Any]) -> None:
        if "phase" in message:
            member.phase, member.since = message["phase"], time.monotonic()
            member.waiting = message.get("waiting", False)
        elif "failed" in message and member.failure is None:
            sender, now = f"the failure of which rank {member.rank} tells", time.monotonic()
            try:
                member.failure = Failure.received(message["failed"], sender, time=now)
            except LostPeerError as error:
                member.failure = Failure(member.rank, now, OWN, member.phase, str(error))
        elif "leaves" in message:
            member.directories.append(Path(message["leaves"]))
        elif "finished" in message:
            member.finished = True

    def _failures(self) -> list[Failure]:
        return [member.failure for member in self._members.values() if member.failure is not None]

    def _decide(self) -> None:
        """Sends all ranks the verdict once it is clear: the root cause, or that all have finished."""
        if self._verdict is not None:
            return
        failures = self._failures()
        if failures:
            waited = time.monotonic() - min(failure.time for failure in failures)
            if len(failures) == self._world or waited > settling_seconds(failures):
                cause = asdict(self._blame(root_cause(failures)))
                del cause["time"]  # of this machine's clock
                self._send_all({"cause": cause})
        elif len(self._members) == self._world and all(member.finished for member in self._members.values()):
            self._send_all({"released": 1})

    def _blame(self, cause: Failure) -> Failure:
        """For an echo: the rank that the others waited for, or that left what they cannot use."""
        busy = [m for m in self._members.values() if m.failure is None and not m.waiting and not m.finished]
        if cause.level != ECHO or not busy:
            blamed = next((self._members[rank] for rank in cause.blamed if rank in self._members), None)
            if blamed is None:
                return cause
            phase = blamed.failure.phase if blamed.failure else blamed.phase
            return passed_on(cause, blamed.rank, phase, returned=blamed.finished)
        slowest = min(busy, key=lambda member: (member.rank not in cause.blamed, member.since))
        text = f"no news of it for {time.monotonic() - slowest.since:.3g} s; rank {cause.rank} gave up: {cause.summary}"
        return Failure(slowest.rank, cause.time, OWN, slowest.phase, text)

    def _send_all(self, message: dict[str, Any]) -> None:
        self._verdict = message
        for member in self._members.values():
            member.send(message)
