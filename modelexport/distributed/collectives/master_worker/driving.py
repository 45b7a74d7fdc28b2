"""The master's side of master-worker mode: sends commands to every rank and judges their answers.

Each rank's commands are carried out in the order in which they were sent: the workers' by their main threads, the
master's own by a thread of its own, so that the caller only waits, can be interrupted, and hears of a failed rank
while its own is still inside the collective.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import rpc
from torch.futures import Future

from modelexport.distributed.collectives.master_worker.remote_calls import Member
from modelexport.distributed.collectives.master_worker.rpc_session import member_name
from modelexport.distributed.collectives.master_worker.serving import connection_error, receive
from modelexport.distributed.supervision.failures import LEVEL, OWN, Failure
from modelexport.distributed.transport.messages import FLAG, OBJECT, TEXT, LostPeerError, check_fields, read_message

GRACE = 5.0  # seconds in which, after one rank's error in a collective, the others may come to the same error
HANG_UP = 10.0  # seconds in which ranks whose peers have hung up must have noticed

_ERROR = {"summary": TEXT, "rank_traceback": TEXT, "user_error": FLAG, "level": LEVEL}
_BLAME = {"died": 0, "own": 1, "silent": 2, "echo": 3}  # a lower one is the cause of a higher one


@dataclass
class Outcome:
    """The outcome of one rank's command."""

    rank: int
    reply: dict[str, Any] = field(default_factory=dict)
    tensors: list[Tensor] = field(default_factory=list)
    failure: Failure | None = None
    error: Exception | None = None  # the failure's exception, where it was raised in this process
    kind: str = ""  # of the failure, see _BLAME


class Work:
    """One command under way on some ranks. ``name``: what it is about, in the words of errors."""

    def __init__(self, name: str, ranks: Iterable[int]) -> None:
        self.name = name
        self.missing = set(ranks)
        self.outcomes: dict[int, Outcome] = {}
        self._arrived: queue.SimpleQueue[Outcome] = queue.SimpleQueue()

    def take(self, seconds: float) -> bool:
        """Waits for the next outcome; False where none came in time."""
        try:
            outcome = self._arrived.get(timeout=max(0.0, seconds))
        except queue.Empty:
            return False
        self.missing.discard(outcome.rank)
        self.outcomes[outcome.rank] = outcome
        return True

    def failures(self) -> list[Outcome]:
        """Those that have arrived."""
        return [outcome for outcome in self.outcomes.values() if outcome.failure is not None]

    def answered(self, rank: int, text: str, tensors: list[Tensor], error: Exception | None = None) -> None:
        """A rank has carried its command out, or tells of an error; from any thread."""
        sender = f"an answer of rank {rank}"
        try:
            reply = read_message(text, sender, {}, {"error": OBJECT}, blamed=[rank])
            if "error" in reply:
                check_fields(reply["error"], sender, _ERROR, blamed=[rank])
        except LostPeerError as damage:
            self._arrived.put(Outcome(rank, failure=self._failure(rank, str(damage)), error=error, kind="own"))
            return
        raised = reply.pop("error", None)
        outcome = Outcome(rank, reply, tensors)
        if raised is not None:
            outcome.failure = self._failure(rank, raised["summary"], raised["rank_traceback"], raised["user_error"])
            outcome.error = error
            outcome.kind = "own" if raised["level"] == OWN else "echo"
        self._arrived.put(outcome)

    def returned(self, rank: int, answer: Future[tuple[str, list[Tensor]]]) -> None:
        """A worker's answer is there, or will never be; from one of rpc's threads."""
        try:
            text, tensors = answer.value()
        except Exception as error:
            self.died(rank, error)
        else:
            self.answered(rank, text, tensors)

    def died(self, rank: int, error: Exception) -> None:
        """A worker cannot be reached."""
        reason = connection_error(error)
        summary = f"{member_name(rank)} is gone: its process has ended or cannot be reached ({reason})"
        self._arrived.put(Outcome(rank, failure=self._failure(rank, summary), kind="died"))

    def silence(self, seconds: float) -> list[Outcome]:
        """The ranks that have not answered, as failures."""
        text = f"no answer for {seconds:.0f} s"
        return [Outcome(rank, failure=self._failure(rank, text), kind="silent") for rank in sorted(self.missing)]

    def _failure(self, rank: int, summary: str, rank_traceback: str = "", user_error: bool = False) -> Failure:
        return Failure(rank, time.monotonic(), OWN, self.name, summary, rank_traceback, user_error)


class _OwnRank(threading.Thread):
    """Carries out the commands to the master's own rank."""

    def __init__(self) -> None:
        super().__init__(name="modelexport-master", daemon=True)
        self.commands: queue.SimpleQueue[tuple[str, list[Tensor], Callable[..., None]] | None] = queue.SimpleQueue()
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run(self) -> None:
        if self._device is not None:
            torch.cuda.set_device(self._device)
        member = Member()
        while (item := self.commands.get()) is not None:
            text, tensors, answered = item
            answered(*member.answer(text, tensors))
            del item, tensors, answered


class RankPool:
    """All ranks, as the master sees them.

    Attributes:
        broken: why the ranks cannot be used any more, or None.
    """

    def __init__(self, world_size: int, seconds: float) -> None:
        self.world_size = world_size
        self.broken: str | None = None
        self._seconds = seconds
        self._sent = [0] * world_size
        self._freed: list[list[int]] = [[] for _ in range(world_size)]
        self._gone: set[int] = set()
        self._hung_up = False
        self._own = _OwnRank()
        self._own.start()

    def is_own_thread(self) -> bool:
        """Returns whether the caller is the thread that carries out the master's own rank's commands."""
        return threading.current_thread() is self._own

    def forget(self, number: int) -> None:
        """Lets each rank free that tensor with its next command. May be called in the middle of anything."""
        for freed in self._freed:
            freed.append(number)

    def living(self) -> list[int]:
        """The ranks that are not known to be gone or stuck."""
        return [rank for rank in range(self.world_size) if rank not in self._gone]

    def send(self, name: str, commands: dict[int, tuple[dict[str, Any], list[Tensor]]]) -> Work:
        """Sends each of some ranks a command and tensors, without waiting."""
        work = Work(name, commands)
        for rank, (command, tensors) in commands.items():
            freed = [self._freed[rank].pop() for _ in range(len(self._freed[rank]))]
            text = json.dumps({**command, "free": freed})
            if rank == 0:
                self._own.commands.put((text, tensors, partial(work.answered, 0)))
                continue
            try:
                answer = rpc.rpc_async(member_name(rank), receive, args=(self._sent[rank], text, tensors), timeout=0)
            except Exception as error:
                work.died(rank, error)
            else:
                self._sent[rank] += 1
                answer.add_done_callback(partial(work.returned, rank))
        return work

    def settle(self, work: Work, *, together: bool = False) -> dict[int, Outcome]:
        """Waits for the outcomes on all ranks.

        Args:
            together: the ranks wait for each other, so that one's failure may keep the others from ending.

        Raises:
            RankFailedError: a worker failed or is gone. An error of rank 0 is raised as it is.
        """
        started = time.monotonic()
        # Together the ranks run into their group's time-out first, and say so.
        limit = started + self._seconds + (GRACE if together else 0.0)
        try:
            while work.missing and work.take(limit - time.monotonic()):
                kinds = {outcome.kind for outcome in work.failures()} if together else set()
                if kinds & {"died", "echo"}:
                    limit = 0.0  # what still runs cannot end well
                elif kinds:
                    limit = min(limit, time.monotonic() + GRACE)
            if work.missing and together:
                self._hang_up(work)
                limit = time.monotonic() + HANG_UP
                while work.missing and work.take(limit - time.monotonic()):
                    pass
        except BaseException:
            self.give_up(f"{work.name} was interrupted")
            raise
        self._judge(work, together, time.monotonic() - started)
        return work.outcomes

    def _judge(self, work: Work, together: bool, seconds: float) -> None:
        failures = work.failures() + work.silence(seconds)
        if not failures:
            return
        # Of several errors alike rank 0's is told: the one that the caller would see in process-group mode.
        cause = min(failures, key=lambda outcome: (_BLAME[outcome.kind], outcome.rank))
        assert cause.failure is not None
        self._gone |= {outcome.rank for outcome in failures if outcome.kind == "silent"}
        if any(outcome.kind != "own" for outcome in failures) or (together and len(failures) < len(work.outcomes)):
            self.give_up(f"rank {cause.rank} failed while {cause.failure.phase}: {cause.failure.summary}", work)
        raise cause.error if cause.error is not None else cause.failure.error()

    def give_up(self, reason: str, work: Work | None = None) -> None:
        """From now on the ranks can only be sent home."""
        self._hang_up(work)
        if self.broken is None:
            self.broken = reason

    def _hang_up(self, work: Work | None) -> None:
        """Makes every rank that has an error, or nothing to do, close its connections.

        A rank that waits for one of these in a collective gets an error by that, and then hangs up itself.
        """
        if work is not None:
            self._gone |= {outcome.rank for outcome in work.failures() if outcome.kind == "died"}
        if not self._hung_up:
            self._hung_up = True
            self.send("hanging up", {rank: ({"do": "drop"}, []) for rank in self.living()})

    def stop(self) -> None:
        """Ends the thread of the own rank."""
        self._own.commands.put(None)
        self._own.join(HANG_UP)
