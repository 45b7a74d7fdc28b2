"""A switch between TAP devices that delays frames, loses some, and can be cut in parts: a network, without ``netem``.

``python -m tests.helpers.switch NAME...`` makes the devices, says ``ready``, and forwards what comes from each to the
others; a line of JSON on its standard input changes how (:class:`Conditions`). With its end the devices are gone.
"""

from __future__ import annotations

import fcntl
import heapq
import json
import os
import select
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from random import Random

_TUNSETIFF, _TAP, _WITHOUT_HEADER = 0x400454CA, 0x0002, 0x1000
_LARGEST = 65_536
_BROADCAST = 1  # the lowest bit of an address: of a group, or of all


@dataclass(frozen=True)
class Conditions:
    """The state of the network.

    Attributes:
        delay: seconds that a frame is on its way.
        loss: the part of the frames that get lost.
        parts: ports between which no frame passes unless they are in the same part; none: all are in one.
    """

    delay: float = 0.0
    loss: float = 0.0
    parts: list[list[int]] = field(default_factory=list)

    def joined(self, first: int, second: int) -> bool:
        """Returns whether frames pass from one port to another."""
        return not self.parts or any(first in part and second in part for part in self.parts)

    def as_line(self) -> str:
        """A line for the switch's standard input."""
        return json.dumps(asdict(self)) + "\n"


def _tap(name: str) -> int:
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TAP | _WITHOUT_HEADER))
    return fd


def forward(names: Sequence[str]) -> None:
    """Forwards frames until the standard input ends."""
    ports = [_tap(name) for name in names]
    numbers = {fd: number for number, fd in enumerate(ports)}
    places: dict[bytes, int] = {}  # address -> port, as frames from there have told
    waiting: list[tuple[float, int, int, bytes]] = []  # due, order, port, frame
    order, rng, conditions = count(), Random(0), Conditions()
    poll = select.poll()
    for fd in (0, *ports):
        poll.register(fd, select.POLLIN)
    print("ready", flush=True)
    while True:
        timeout = max(0.0, waiting[0][0] - time.monotonic()) * 1000 if waiting else None
        for fd, _ in poll.poll(timeout):
            if fd == 0:
                line = sys.stdin.readline()
                if not line:
                    return
                conditions = Conditions(**json.loads(line))
                continue
            try:
                frame, source = os.read(fd, _LARGEST), numbers[fd]
            except OSError:  # its namespace is gone
                poll.unregister(fd)
                continue
            places[frame[6:12]] = source
            known = None if frame[0] & _BROADCAST else places.get(frame[:6])
            targets = [known] if known is not None else [port for port in range(len(ports)) if port != source]
            due = time.monotonic() + conditions.delay
            for port in targets:
                if conditions.joined(source, port) and rng.random() >= conditions.loss:
                    heapq.heappush(waiting, (due, next(order), port, frame))
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, _, port, frame = heapq.heappop(waiting)
            try:
                os.write(ports[port], frame)
            except OSError:  # the device is not up, or its queue is full: lost, as on any network
                continue


if __name__ == "__main__":
    forward(sys.argv[1:])
