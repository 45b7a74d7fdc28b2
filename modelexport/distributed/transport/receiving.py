"""The first rank's end of a gather over shared memory; the messages are described in ``link``."""

from __future__ import annotations

import select
import socket
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from modelexport.distributed.transport import payload as _payload
from modelexport.distributed.transport.link import PLACE, Link, LostPeerError
from modelexport.distributed.transport.segments import Mapping
from modelexport.errors import GatherError

__all__ = ["Delivery", "ReceivingLink", "receive_from_all"]

_RELEASES_PER_MESSAGE = 2000
_TO_FIRST = ("payload", "nothing", "failed")


class Delivery:
    """A payload as the first rank holds it: who sent it, what is still referred to."""

    def __init__(self, seq: int, nothing: bool) -> None:
        self.seq, self.nothing = seq, nothing
        self.guards: dict[int, weakref.ref[memoryview]] = {}  # entry -> its view, while anyone has it
        self.read: dict[int, int] = {}  # segment -> end of what was read of it
        self.acknowledged = False


class ReceivingLink(Link):
    """The first rank's end of the connection to one sender."""

    def __init__(self, sock: socket.socket, rank: int) -> None:
        super().__init__(sock, rank)
        self.inbox: dict[int, dict[str, Any]] = {}
        self.last_seq, self.last_time = -1, time.monotonic()
        self._mappings: dict[int, Mapping] = {}
        self._deliveries: dict[int, Delivery] = {}
        self._let_go: deque[tuple[int, int]] = deque()  # (seq, entry); finalizers append here

    def pump(self) -> None:
        """Processes the messages that have arrived."""
        while not self.closed and (received := self.read()) is not None:
            message, fd = received
            if fd is not None:
                self._mappings[message["number"]] = Mapping(fd, message["size"], message["sealed"])
            elif message["kind"] not in _TO_FIRST:
                raise LostPeerError(f"{self} sent '{message['kind']}', which the first rank sends", [self.rank])
            else:
                self.inbox[message["seq"]] = message
                self.last_seq, self.last_time = message["seq"], time.monotonic()

    def ask_for(self, seq: int) -> None:
        """Before waiting for ``seq``: let the sender pass its limit if earlier payloads are still open here."""
        self.release_dropped()
        if any(not delivery.acknowledged for delivery in self._deliveries.values()):
            self.post({"kind": "want", "seq": seq})

    def open(self, seq: int) -> tuple[Delivery, Any]:
        """The config of payload ``seq``, which has arrived, its tensors views of the sender's memory."""
        message = self.inbox.pop(seq)
        if message["kind"] == "failed":
            text = f"rank {self.rank} could not hand over its payload {seq}: {message['error']}"
            raise LostPeerError(text, [self.rank])
        delivery = self._deliveries[seq] = Delivery(seq, message["kind"] == "nothing")
        if delivery.nothing:
            return delivery, None
        table_bytes = message["entries"] * PLACE.size
        description = self._view(message["segment"], message["offset"], table_bytes + message["header"])
        text, entries = _payload.parse_header(description[table_bytes:])
        places = list(PLACE.iter_unpack(description[:table_bytes]))
        if [entry.nbytes for entry in entries] != [place[2] for place in places]:
            text = f"payload {seq} of rank {self.rank} is damaged: its header and its places disagree"
            raise LostPeerError(text, [self.rank])
        views: list[memoryview | None] = []
        for index, (number, offset, nbytes) in enumerate(places):
            view = self._view(number, offset, nbytes) if nbytes else None
            if view is not None:
                delivery.guards[index] = weakref.ref(view, self._when_let_go(seq, index))
                delivery.read[number] = max(delivery.read.get(number, 0), offset + nbytes)
            views.append(view)
        return delivery, _payload.unpack(text, entries, views)

    def _when_let_go(self, seq: int, entry: int) -> Callable[[object], None]:
        let_go = self._let_go  # not self: a view that is kept must not keep the connection
        return lambda _: let_go.append((seq, entry))

    def _view(self, number: int, offset: int, nbytes: int) -> memoryview:
        if number not in self._mappings:
            raise GatherError(f"{self} points into shared memory {number}, which it has not announced")
        return self._mappings[number].view(offset, nbytes)

    def finish(self, delivery: Delivery) -> None:
        """Acknowledge a payload; whatever of it is still referred to stays reserved at the sender."""
        self._collect()
        let_go = len(delivery.guards) == 0
        delivery.acknowledged = True
        for number, end in delivery.read.items():
            self._mappings[number].consumed(end)
        self.post({"kind": "ack", "seq": delivery.seq, "kept": not let_go})
        if let_go:
            self._deliveries.pop(delivery.seq, None)
        else:
            self._release(delivery.seq, [i for i in range(max(delivery.guards) + 1) if i not in delivery.guards])

    def release_dropped(self) -> None:
        """Acknowledges to the sender the views that were kept past their gather and dropped since."""
        for seq, entries in self._collect().items():
            self._release(seq, entries)

    def _collect(self) -> dict[int, list[int]]:
        """Notes which views have gone; those of acknowledged payloads are returned by payload."""
        late: dict[int, list[int]] = {}
        while self._let_go:
            seq, entry = self._let_go.popleft()
            delivery = self._deliveries.get(seq)
            if delivery is None:
                continue
            delivery.guards.pop(entry, None)
            if delivery.acknowledged:
                late.setdefault(seq, []).append(entry)
                if not delivery.guards:
                    del self._deliveries[seq]
        return late

    def _release(self, seq: int, entries: list[int]) -> None:
        for start in range(0, len(entries), _RELEASES_PER_MESSAGE):
            self.post({"kind": "release", "seq": seq, "entries": entries[start : start + _RELEASES_PER_MESSAGE]})


def receive_from_all(links: Sequence[ReceivingLink], seq: int, seconds: float) -> None:
    """Waits until payload ``seq`` of every link has arrived.

    Raises:
        GatherError: a sender ended, or failed, before it sent it, or ``seconds`` passed; names the ranks.
    """
    deadline = time.monotonic() + seconds
    poller = select.poll()
    by_fd = {link.sock.fileno(): link for link in links if not link.closed}
    for link in by_fd.values():
        link.ask_for(seq)
        poller.register(link.sock, select.POLLIN)
    ready = list(by_fd.values())
    while True:
        for link in ready:
            link.pump()
            link.flush()
            if link.closed:
                poller.unregister(link.sock)
        missing = [link for link in links if seq not in link.inbox]
        for link in links:
            if link.inbox.get(seq, {}).get("kind") == "failed":
                link.open(seq)  # raises
        for link in missing:
            if link.closed:
                raise LostPeerError(
                    f"{link} closed its connection before it sent payload {seq} (it had sent {link.last_seq + 1}): "
                    "its process ended or failed; its own error says why",
                    [link.rank],
                )
        if not missing:
            return
        left = deadline - time.monotonic()
        if left <= 0:
            raise LostPeerError(_overdue(links, missing, seq, seconds), [link.rank for link in missing])
        ready = [by_fd[fd] for fd, _ in poller.poll(left * 1000)]


def _overdue(links: Sequence[ReceivingLink], missing: Sequence[ReceivingLink], seq: int, seconds: float) -> str:
    arrived = [link.rank for link in links if link not in missing]
    states = "; ".join(
        f"{link} is missing: connected, last heard of {time.monotonic() - link.last_time:.1f} s ago "
        + (f"with payload {link.last_seq}" if link.last_seq >= 0 else "when it connected")
        for link in missing
    )
    ranks = [link.rank for link in links]
    return f"waited {seconds:g} s for payload {seq} of ranks {ranks}; arrived: {arrived}; {states}"
