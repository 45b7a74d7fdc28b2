"""The two ends of the calls between the master and its workers, and the loop in which a worker serves.

rpc's threads run calls in any order, and must not wait: what the master sends goes into an inbox, and the worker's
main thread takes it out in the order of sending.
"""

from __future__ import annotations

import threading

from torch import Tensor
from torch.distributed import rpc
from torch.distributed.rpc.functions import async_execution
from torch.futures import Future

from modelexport.distributed.collectives.master_worker.remote_calls import Member
from modelexport.distributed.collectives.master_worker.rpc_session import member_name
from modelexport.distributed.transport.messages import TEXT, read_message

Answer = Future[tuple[str, list[Tensor]]]


def connection_error(error: Exception) -> str:
    """rpc's words for a lost connection, without the place in its sources."""
    return str(error).split("\n")[0].partition(" (this error originated")[0]


class Inbox:
    """A worker's commands: put in under their numbers by rpc's threads, taken out in order by the main thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._items: dict[int, tuple[str, list[Tensor], Answer]] = {}
        self._next = 0
        self._lost: str | None = None

    def put(self, number: int, text: str, tensors: list[Tensor]) -> Answer:
        """Keeps a command; the answer is to be set when it has been carried out."""
        answer: Answer = Future()
        with self._changed:
            self._items[number] = text, tensors, answer
            self._changed.notify()
        return answer

    def lose(self, reason: str) -> None:
        """No more commands will come."""
        with self._changed:
            self._lost = reason
            self._changed.notify()

    def take(self) -> tuple[str, list[Tensor], Answer]:
        """Waits for the next command.

        Raises:
            ConnectionError: the master is gone.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._next in self._items or self._lost is not None)
            if self._next not in self._items:
                raise ConnectionError(self._lost)
            item = self._items.pop(self._next)
            self._next += 1
            return item


class Lifelines:
    """The master's ends of the workers' lifelines: one call from each, left unanswered for as long as it lives."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._held: list[Future[None]] = []

    def hold(self) -> Future[None]:
        """A further worker's."""
        line: Future[None] = Future()
        with self._changed:
            self._held.append(line)
            self._changed.notify()
        return line

    def wait_for(self, count: int, seconds: float) -> None:
        """Waits until ``count`` workers serve.

        Raises:
            RuntimeError: some did not come in time.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._held) == count, seconds):
                raise RuntimeError(f"only {len(self._held)} of {count} workers began to serve within {seconds:g} s")

    def release(self) -> None:
        """Answers them all."""
        with self._changed:
            held, self._held = self._held, []
        for line in held:
            line.set_result(None)


class _Ends:
    """This process's ends of the session under way: rpc's functions are found by name and find them here."""

    inbox = Inbox()
    lifelines = Lifelines()


def new_session() -> Lifelines:
    """To be called before rpc starts. Returns the master's lifelines."""
    _Ends.inbox, _Ends.lifelines = Inbox(), Lifelines()
    return _Ends.lifelines


@async_execution
def receive(number: int, text: str, tensors: list[Tensor]) -> Answer:
    """On a worker, called by the master: carry this command out, as the ``number``-th."""
    return _Ends.inbox.put(number, text, tensors)


@async_execution
def hold() -> Future[None]:
    """On the master, called by a worker: fails when the master's process ends."""
    return _Ends.lifelines.hold()


def serve() -> bool:
    """On a worker: carries out what the master sends, until it ends the session.

    Returns:
        Whether all ranks leave together (or because something has failed).

    Raises:
        ConnectionError: the master's process has ended first.
    """
    inbox, member = _Ends.inbox, Member()

    def ended(line: Future[None]) -> None:
        try:
            line.value()
        except Exception as error:
            inbox.lose(
                f"the master's process has ended without destroy_process_group(), or cannot be reached "
                f"({connection_error(error)})"
            )
        else:
            inbox.lose("it has given this rank up, which did not answer in time")

    rpc.rpc_async(member_name(0), hold, timeout=0).add_done_callback(ended)
    while True:
        text, tensors, answer = inbox.take()
        answer.set_result(member.answer(text, tensors)[:2])
        command = read_message(text, "a command of the master", {"do": TEXT}, blamed=[0])
        if command["do"] == "end":
            return bool(command["together"])
        del tensors, answer
