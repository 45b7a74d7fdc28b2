"""Payloads between two ranks of one host: descriptors and short messages over a Unix socket, bytes in shared memory.

Each sending rank has one SOCK_SEQPACKET connection to the first rank. Messages are small JSON objects:

=========  ========================================  ===========================================================
direction  message                                   meaning
=========  ========================================  ===========================================================
to first   ``segment`` number, size, sealed (+ fd)   a segment of the sender's arena, sent once, before it is used
to first   ``payload`` seq, segment, offset,         where payload ``seq`` is described: ``entries`` times three
           entries, header                           uint64 (segment number, offset, bytes), one for each tensor,
                                                     then ``header`` bytes, the payload's safetensors header
to first   ``hello`` token, rank                    who connects; answered by ``welcome``
to first   ``nothing`` seq                           this rank passes None
to first   ``failed`` seq, error                     this rank could not make its payload
to sender  ``ack`` seq, kept                         payload ``seq`` is consumed; unless ``kept`` its memory is free
to sender  ``release`` seq, entries                  of a kept payload, the tensors that were let go since
to sender  ``want`` seq                              the first rank waits for ``seq`` with earlier payloads open
=========  ========================================  ===========================================================

The sender goes on at once. It waits only when more than ``limit`` of its payloads are not acknowledged. The end of
a process closes its socket: what it had sent can still be received, and whoever waits for more is told at once.
"""

from __future__ import annotations

import array
import errno
import json
import os
import select
import socket
import struct
from collections import deque
from collections.abc import Mapping
from typing import Any

from modelexport.distributed.transport.messages import (
    FLAG,
    TEXT,
    WHOLE,
    WHOLES,
    Kind,
    LostPeerError,
    check_fields,
    read_message,
)
from modelexport.errors import GatherError, quoted
from modelexport.system.limits import advice

__all__ = ["PLACE", "Link", "LostPeerError", "peer_pid"]

PLACE = struct.Struct("<QQQ")  # segment number, offset, bytes: where one tensor of a payload lies
_MAX_MESSAGE = 128 << 10
_FIELDS: Mapping[str, Mapping[str, Kind]] = {
    "segment": {"number": WHOLE, "size": WHOLE, "sealed": FLAG},
    "payload": {"seq": WHOLE, "segment": WHOLE, "offset": WHOLE, "entries": WHOLE, "header": WHOLE},
    "hello": {"token": TEXT, "rank": WHOLE},
    "welcome": {},
    "nothing": {"seq": WHOLE},
    "failed": {"seq": WHOLE, "error": TEXT},
    "ack": {"seq": WHOLE, "kept": FLAG},
    "release": {"seq": WHOLE, "entries": WHOLES},
    "want": {"seq": WHOLE},
}
"""The kinds of messages, and their fields."""


def peer_pid(sock: socket.socket) -> tuple[int, int]:
    """(process id, user id) of the process that connected, or listens, at the other end of a Unix socket."""
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


class Link:
    """A non-blocking message connection."""

    def __init__(self, sock: socket.socket, rank: int) -> None:
        sock.setblocking(False)
        self.sock, self.rank = sock, rank
        self.pid = peer_pid(sock)[0]
        self.closed = False  # nothing more will come
        self.deaf = False  # the other end reads no more; what it sent before may still lie here
        self._outbox: deque[tuple[bytes, int | None]] = deque()

    def post(self, message: dict[str, Any], fd: int | None = None) -> None:
        """Queues a message and sends what the socket takes now; does nothing if the other end is gone."""
        self._outbox.append((json.dumps(message).encode("ascii"), fd))
        self.flush()

    def flush(self) -> bool:
        """Sends what the socket takes; returns True if nothing is left to send."""
        while self._outbox and not self.deaf:
            body, fd = self._outbox[0]
            rights = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
            try:
                self.sock.sendmsg([body], rights)
            except BlockingIOError:
                return False
            except OSError as error:
                if error.errno not in (errno.EPIPE, errno.ECONNRESET):
                    raise GatherError(f"cannot send to rank {self.rank}: {error}") from error
                self.deaf = True
                break
            self._outbox.popleft()
        if self.deaf:
            self._outbox.clear()
        return not self._outbox

    def read(self) -> tuple[dict[str, Any], int | None] | None:
        """The next message and its descriptor; None if there is none now or ever (then ``closed`` is set).

        Raises:
            LostPeerError: it is none of those that the module lists.
        """
        resets = 0
        while True:
            try:
                body, ancillary, flags, _ = self.sock.recvmsg(
                    _MAX_MESSAGE, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return None
            except ConnectionResetError:
                # The other end left without reading our last words; what it sent before still lies here.
                resets += 1
                if resets < 3:
                    continue
                body, ancillary, flags = b"", [], 0
            fds = array.array("i")
            for _, _, data in ancillary:
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
            if flags & socket.MSG_CTRUNC:
                hint = advice(OSError(errno.EMFILE, ""))
                raise GatherError(f"rank {self.rank}'s shared memory cannot be opened: too many open files{hint}")
            if not body:
                self.closed = True
                return None
            fd = fds[0] if fds else None
            try:
                return self._checked(body, fd), fd
            except LostPeerError:
                if fd is not None:
                    os.close(fd)
                raise

    def _checked(self, body: bytes, fd: int | None) -> dict[str, Any]:
        sender = f"a message of rank {self.rank}"
        message = read_message(body, sender, {"kind": TEXT}, blamed=[self.rank])
        if message["kind"] not in _FIELDS:
            raise LostPeerError(f"{sender} is of the unknown kind {quoted(message['kind'])}", [self.rank])
        if (fd is not None) != (message["kind"] == "segment"):
            what = "without its descriptor" if fd is None else "with a descriptor, which it should not have"
            raise LostPeerError(f"{sender} is a {message['kind']} {what}", [self.rank])
        return check_fields(message, sender, _FIELDS[message["kind"]], blamed=[self.rank])

    def wait(self, seconds: float) -> None:
        """Waits until a message may be there, the socket takes queued ones, the other end is gone, or ``seconds``."""
        poller = select.poll()
        poller.register(self.sock, select.POLLIN | (select.POLLOUT if self._outbox else 0))
        poller.poll(max(0.0, seconds) * 1000)

    def close(self) -> None:
        self.closed = self.deaf = True
        self.sock.close()

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid})"
