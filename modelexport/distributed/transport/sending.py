"""A sending rank's end of a gather over shared memory; the messages are described in ``link``."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from modelexport.distributed.transport import memory as _memory
from modelexport.distributed.transport import payload as _payload
from modelexport.distributed.transport.link import PLACE, Link, LostPeerError
from modelexport.distributed.transport.segments import Segment

__all__ = ["SendingLink"]

_TO_SENDER = ("ack", "release", "want")
_MAX_ERROR = 8000  # characters of this rank's error text
# Longest wait for a message in seconds: another thread that reclaims memory may read the very message that this one
# waits for, and then no other may come.
_GLANCE = 0.02


class SendingLink(Link):
    """A sending rank's end. ``limit``: payloads that may be unacknowledged when another is sent."""

    def __init__(self, sock: socket.socket, rank: int, limit: int) -> None:
        super().__init__(sock, rank)
        self._limit = limit
        self._arena = _memory.arena()
        self._announced: set[int] = set()
        self._held: dict[int, dict[int, _memory.Region]] = {}  # seq -> entry -> what the first rank may still read
        self._unacknowledged: dict[int, float] = {}  # seq -> when it was sent
        self._welcome = False
        self._wanted = -1
        self._lock = threading.Lock()
        self._arena.add_reclaimer(self._reclaim)

    def send(self, seq: int, payload: _payload.Payload | None, seconds: float) -> None:
        """Hands over payload ``seq``; None says that there is nothing. Waits only for room, at most ``seconds``."""
        self._wait_until(lambda: len(self._unacknowledged) < self._limit or self._wanted >= seq, seconds)
        if payload is None:
            message: dict[str, Any] = {"kind": "nothing", "seq": seq}
        else:
            message = self._describe(seq, payload)
        with self._lock:
            self._unacknowledged[seq] = time.monotonic()
            self.post(message)
        self._wait_until(self.flush, seconds)
        if self.deaf:
            raise self._lost()

    def greet(self, token: str, me: int, seconds: float) -> bool:
        """Introduces this rank; returns whether the first rank answered in time.

        The answer is read where every message is: another thread that looks for memory to reclaim may be the one
        that finds it.
        """
        with self._lock:
            self.post({"kind": "hello", "token": token, "rank": me})
        deadline = time.monotonic() + seconds
        while True:
            with self._lock:
                self._process()
                if self._welcome or self.closed:
                    return self._welcome
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self.wait(min(left, _GLANCE))

    def send_failure(self, seq: int, error: str) -> None:
        with self._lock:
            self.post({"kind": "failed", "seq": seq, "error": error[:_MAX_ERROR]})

    def drain(self, seconds: float) -> None:
        """Waits until the first rank has acknowledged everything."""
        self._wait_until(lambda: not self._unacknowledged, seconds)

    def close(self) -> None:
        self._arena.remove_reclaimer(self._reclaim)
        super().close()
        for regions in self._held.values():
            for region in regions.values():
                self._arena.release(region)
        self._held.clear()

    def abandon(self) -> None:
        """As :meth:`close`, but what the other end may still be reading stays out of use in this process."""
        self._reclaim()
        self._held.clear()
        self.close()

    def _describe(self, seq: int, payload: _payload.Payload) -> dict[str, Any]:
        """Places the payload in the arena and announces its segments; returns the message that describes it."""
        held: dict[int, _memory.Region] = {}
        try:
            places = [self._place(index, tensor, held) for index, tensor in enumerate(payload.tensors)]
            table = b"".join(PLACE.pack(*place) for place in places)
            description = self._arena.allocate(len(table) + len(payload.header))
            held[-1] = description
            description.view()[:] = table + payload.header
        except BaseException:
            for region in held.values():
                self._arena.release(region)
            raise
        with self._lock:
            for region in held.values():
                self._announce(region.segment)
            self._held[seq] = held
        return {
            "kind": "payload",
            "seq": seq,
            "segment": description.segment.number,
            "offset": description.offset,
            "entries": len(places),
            "header": len(payload.header),
        }

    def _place(self, index: int, tensor: torch.Tensor, held: dict[int, _memory.Region]) -> tuple[int, int, int]:
        """(segment, offset, bytes) of a tensor's bytes: where it lies, if in the arena, else of a copy."""
        nbytes = tensor.numel() * tensor.dtype.itemsize
        if nbytes == 0:
            return 0, 0, 0
        plain = tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
        if plain:
            found = self._arena.find(tensor.data_ptr(), nbytes)
            if found is not None:
                held[index] = found[0]
                return found[0].segment.number, found[1], nbytes
        region = held[index] = self._arena.allocate(nbytes)
        if plain:
            torch.frombuffer(region.view(), dtype=torch.uint8).copy_(_payload.as_bytes(tensor))
        else:
            torch.frombuffer(region.view(), dtype=tensor.dtype).view(tensor.shape).copy_(tensor)
        return region.segment.number, region.offset, nbytes

    def _announce(self, segment: Segment) -> None:
        if segment.number not in self._announced:
            self._announced.add(segment.number)
            message = {
                "kind": "segment",
                "number": segment.number,
                "size": segment.size,
                "sealed": segment.sealed,
            }
            self.post(message, segment.fd)

    def _wait_until(self, done: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while True:
            with self._lock:
                self._process()
                if done():
                    return
                if self.closed:
                    raise self._lost()
            left = deadline - time.monotonic()
            if left <= 0:
                oldest = min(self._unacknowledged.values(), default=time.monotonic())
                raise LostPeerError(
                    f"{self}, which collects, has not acknowledged the payloads {sorted(self._unacknowledged)}; "
                    f"waited {seconds:.3g} s, the oldest was sent {time.monotonic() - oldest:.1f} s ago",
                    [self.rank],
                    indirect=True,
                )
            self.wait(min(left, _GLANCE))

    def _lost(self) -> LostPeerError:
        text = f"{self}, which collects, has closed its connection: its process ended or failed"
        return LostPeerError(text, [self.rank], indirect=True)

    def _reclaim(self) -> None:
        if self._lock.acquire(blocking=False):
            try:
                self._process()
            finally:
                self._lock.release()

    def _process(self) -> None:
        while not self.closed and (received := self.read()) is not None:
            message = received[0]
            if message["kind"] == "welcome":
                self._welcome = True
                continue
            if message["kind"] not in _TO_SENDER:
                raise LostPeerError(f"{self} sent '{message['kind']}', which only senders do", [self.rank])
            seq = message["seq"]
            if message["kind"] == "ack":
                self._unacknowledged.pop(seq, None)
                entries = [-1] if message["kept"] else list(self._held.get(seq, ()))
            elif message["kind"] == "release":
                entries = message["entries"]
            else:
                self._wanted = max(self._wanted, seq)
                continue
            held = self._held.get(seq, {})
            for entry in entries:
                if entry in held:
                    self._arena.release(held.pop(entry))
            if not held:
                self._held.pop(seq, None)
