"""The connections of torch's store, which notice that the machine with rank 0 is gone.

A client of torch's TCP store waits for an answer without a time-out, and torch shows nobody its socket. From a machine
that loses power, or to which the network is cut, no answer comes and no end of the connection, so a rank that is just
joining would wait for ever. What torch has opened to the store's port is therefore looked up among this process's
descriptors, and told to end where nothing is acknowledged for half a minute.
"""

from __future__ import annotations

import os
import socket
import threading
from types import TracebackType

from modelexport.distributed.supervision.watch_hub import keep_alive

_DESCRIPTORS = "/proc/self/fd"
_SECONDS = 0.2  # between two looks, while a rank joins


class StoreConnections:
    """Inside the ``with``, and after it, this process's connections to a store end where its machine is gone.

    Does nothing where the system does not list a process's descriptors.

    Args:
        port: that the store listens on.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._known: set[str] = set()
        self._joined = threading.Event()
        self._thread = threading.Thread(target=self._run, name="modelexport-store", daemon=True)

    def __enter__(self) -> StoreConnections:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._joined.set()
        self._thread.join()
        self._look()

    def _run(self) -> None:
        while not self._joined.wait(_SECONDS):
            self._look()

    def _look(self) -> None:
        if not os.path.isdir(_DESCRIPTORS):
            return
        for name in os.listdir(_DESCRIPTORS):
            try:
                opened = os.readlink(f"{_DESCRIPTORS}/{name}")
                if opened.startswith("socket:") and opened not in self._known:
                    self._take(int(name))
                    self._known.add(opened)
            except OSError:  # closed meanwhile, or not connected yet
                continue

    def _take(self, fd: int) -> None:
        with socket.socket(fileno=os.dup(fd)) as connection:
            if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
                return
            if connection.getpeername()[1] == self._port:
                keep_alive(connection)
