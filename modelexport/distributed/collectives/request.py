"""Requests that asynchronous collectives return, to wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from modelexport.distributed.collectives import streams


class Arrival(Protocol):
    """Something that is put into its place when the transfer is over."""

    def unpack(self) -> None: ...


class Sent:
    """Keeps what is being sent alive until the transfer is over, and leaves the sender's tensor as it is."""

    def __init__(self, sent: Arrival) -> None:
        self._sent = sent

    def unpack(self) -> None:
        pass


class _DistributedRequest:
    """A transfer under way.

    Received data are in their tensors once ``wait`` has returned or ``is_completed`` has been True; until then neither
    received nor sent tensors may be touched.

    Attributes:
        request: torch's work object; None where there was nothing to do.
    """

    def __init__(
        self, request: Any, arrivals: Sequence[Arrival] = (), source: Callable[[Any], int] | None = None
    ) -> None:
        self.request = request
        self._arrivals = arrivals
        self._source = source
        self._waiter: _Waiter | None = None
        self._done = request is None

    def is_completed(self) -> bool:
        """Returns whether the transfer is over. Raises the exception that made it fail."""
        if self._done:
            return True
        if self.request.is_completed():
            self.wait()
            return True
        # gloo's sends and receives only become complete inside wait(), so somebody has to call it.
        if self._waiter is None:
            self._waiter = _Waiter(self.request)
        if self._waiter.finished():
            self.wait()
        return self._done

    def wait(self) -> None:
        """Blocks until the transfer is over.

        Raises:
            RuntimeError: a peer is gone, or the group's time-out has passed.
        """
        if self._done:
            return
        if self._waiter is not None:
            self._waiter.join()
        else:
            self.request.wait()
        self._done = True
        for arrival in self._arrivals:
            arrival.unpack()
        self._arrivals = ()
        streams.release()

    def source_rank(self) -> int:
        """After a receive: the sender's rank in the whole job."""
        return self._source(self.request) if self._source is not None else self.request._source_rank()

    _source_rank = source_rank  # torch's name for it


class _Waiter:
    """Waits for a work object in a thread."""

    def __init__(self, work: Any) -> None:
        self._work = work
        self._error: BaseException | None = None
        # A bare lock, not an Event: the launcher's watcher takes a main thread whose innermost frame is in this
        # package for one that waits for its peers.
        self._running = threading.Lock()
        self._running.acquire()
        threading.Thread(target=self._run, name="modelexport-request", daemon=True).start()

    def _run(self) -> None:
        try:
            self._work.wait()
        except BaseException as error:
            self._error = error
        finally:
            self._running.release()

    def finished(self) -> bool:
        return not self._running.locked()

    def join(self) -> None:
        with self._running:
            pass
        if self._error is not None:
            raise self._error


def settle(work: Any, arrivals: Sequence[Arrival], async_op: bool) -> _DistributedRequest | None:
    """The end of a collective: a request where ``async_op`` is set, or else the data in their places."""
    if async_op:
        return _DistributedRequest(work, arrivals)
    for arrival in arrivals:
        arrival.unpack()
    return None
