"""The launcher's side of a running group: receives every rank's reports, finds the first failure, ends the others."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from modelexport.distributed.config import MultiprocessConfig
from modelexport.distributed.launch.rank_main import KILL_AFTER
from modelexport.distributed.supervision.failures import (
    ECHO,
    OWN,
    Failure,
    describe_exit,
    passed_on,
    root_cause,
    settling_seconds,
)
from modelexport.distributed.supervision.heartbeat import remove_rank
from modelexport.distributed.supervision.phase_board import BoardState, PhaseBoard
from modelexport.distributed.supervision.status import BEAT_SECONDS
from modelexport.distributed.transport.messages import (
    NUMBER,
    OBJECT,
    PATH,
    TEXT,
    Kind,
    LostPeerError,
    check_fields,
    read_message,
)
from modelexport.errors import quoted

STOPPED_AFTER = 30.0  # seconds without a heartbeat after which a stopped process counts as failed
_SIGTERM_WAIT = 0.3  # seconds the caller waits for ranks to obey SIGTERM; then a thread sees to it


# multiprocessing looks after every child, also those of other threads' launches, whenever it starts one; two threads
# that look after the same child take its exit status from each other.
CHILDREN = threading.RLock()


_MESSAGES: Mapping[str, Mapping[str, Kind]] = {
    "up": {},
    "finished": {},
    "done": {},
    "event": {"event": OBJECT},
    "leaves": {"directory": PATH},
    "failed": {"time": NUMBER},
}
"""The kinds of messages of a rank, and their fields."""


def _checked(line: bytes, rank: int) -> dict[str, Any]:
    """A rank's message.

    Raises:
        LostPeerError: it is none of those that ranks send.
    """
    sender = f"a message of rank {rank}"
    message = read_message(line, sender, {"type": TEXT}, blamed=[rank])
    if message["type"] not in _MESSAGES:
        raise LostPeerError(f"{sender} is of the unknown type {quoted(message['type'])}", [rank])
    check_fields(message, sender, _MESSAGES[message["type"]], blamed=[rank])
    if message["type"] == "failed":
        Failure.received(message, sender, rank=rank)
    return message


class RankHandle:
    """A rank process as the launcher sees it."""

    def __init__(self, rank: int, process: BaseProcess, channel: socket.socket, board: PhaseBoard) -> None:
        self.rank = rank
        self.process = process
        self.channel = channel
        self.board = board
        self.up = self.finished = self.done = self.exited = False
        self.hung_up = False  # its end of the channel is closed
        self.more = True  # it may have sent more than was read
        self.failure: Failure | None = None
        self.ended_well = False
        self.directories: set[Path] = set()  # in which it may have left files
        self.state: BoardState = board.read()
        self.progress_at = self.beat_at = 0.0  # on the supervisor's clock
        self._buffer = b""

    def messages(self) -> list[dict[str, Any]]:
        """Complete messages that have arrived, some if there are many; never blocks. Sets ``more``, ``hung_up``."""
        self.more = True
        for _ in range(16):
            try:
                data = self.channel.recv(1 << 16)
            except BlockingIOError:
                self.more = False
                break
            except OSError as error:
                data = b""
                if not isinstance(error, ConnectionError):
                    self._fail(f"its launcher cannot hear it: {error.strerror or error}")
            if not data:
                self.hung_up, self.more = True, False
                break
            self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        messages = []
        for line in lines:
            try:
                messages.append(_checked(line, self.rank))
            except LostPeerError as error:
                self._fail(str(error))
        self.directories.update(Path(m["directory"]) for m in messages if m["type"] == "leaves")
        return messages

    def _fail(self, reason: str) -> None:
        if self.failure is None:
            self.failure = Failure(self.rank, time.monotonic(), OWN, self.state.text or "starting", reason)

    @property
    def exitcode(self) -> int | None:
        """The exit code of the process, as multiprocessing's; None while it runs."""
        with CHILDREN:
            return self.process.exitcode

    def release(self) -> None:
        """Lets a finished rank leave."""
        try:
            self.channel.send(b"release\n")
        except ConnectionError:  # it has ended, and its exit status says how
            return
        except OSError as error:  # it would wait for ever
            self._fail(f"its launcher cannot let it leave: {error.strerror or error}")

    def signal(self, number: int) -> None:
        """Sends a signal, if the process still exists."""
        pid = self.process.pid
        if pid is not None and self.exitcode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def close(self) -> None:
        """Frees what belongs to a process that has ended."""
        self.more = True
        while self.more and not self.hung_up:
            self.messages()  # for the directories: nobody cares for the rest any more
        self.ended_well = self.done and self.exitcode == 0
        self.channel.close()
        self.board.close()
        with CHILDREN:
            self.process.join()
            self.process.close()


class Supervisor:
    """Watches ranks until all are done or one has failed."""

    def __init__(self, ranks: Sequence[RankHandle], config: MultiprocessConfig) -> None:
        self._ranks = ranks
        self._timeout = timeout = config.timeout
        self._on_event = config.on_event
        self._has_strangers = config.local_world_size < config.world_size
        self._tick = min(0.25, timeout / 8)
        self._released = False
        self._selector = selectors.DefaultSelector()
        # A clock that stands still while this process is suspended (Ctrl-Z, a laptop's lid): the ranks were too.
        self._clock = 0.0
        self._seen = time.monotonic()

    def run(self) -> Failure | None:
        """Returns None when every rank is done and gone, else the root cause of the failure."""
        with self._selector:
            for rank in self._ranks:
                self._selector.register(rank.channel, selectors.EVENT_READ, (self._receive, rank))
                self._selector.register(rank.process.sentinel, selectors.EVENT_READ, (self._exited, rank))
            while not all(rank.exited for rank in self._ranks):
                for key, _ in self._selector.select(0.02 if self._failures() else self._tick):
                    handle, rank = key.data
                    handle(rank)
                self._advance_clock()
                self._release()
                if self._settled():
                    break
                self._find_hung()
        failures = self._failures()
        return self._blame(root_cause(failures)) if failures else None

    def _failures(self) -> list[Failure]:
        return [rank.failure for rank in self._ranks if rank.failure is not None]

    def _advance_clock(self) -> None:
        now = time.monotonic()
        self._clock += min(now - self._seen, 4 * self._tick)
        self._seen = now
        for rank in self._ranks:
            if rank.exited:
                continue
            state = rank.board.read()
            # A layer on a slow disk has one phase for a long time: bytes that move tell slowness from a hang.
            if state.count != rank.state.count or state.moved != rank.state.moved:
                rank.progress_at = self._clock
            if state.beat_ns != rank.state.beat_ns:
                rank.beat_at = self._clock
            rank.state = state

    def _receive(self, rank: RankHandle) -> None:
        if rank.hung_up:
            return
        messages = rank.messages()
        if rank.hung_up:
            # The process is ending, and its sentinel says how.
            self._selector.unregister(rank.channel)
        for message in messages:
            kind = message["type"]
            if kind == "event":
                if self._on_event is not None:
                    self._on_event(rank.rank, message["event"])
            elif kind == "failed":
                rank.failure = Failure.received(message, f"a message of rank {rank.rank}", rank=rank.rank)
            elif kind != "leaves":
                setattr(rank, kind, True)

    def _exited(self, rank: RankHandle) -> None:
        rank.more = True
        while rank.more and not rank.hung_up:
            self._receive(rank)
        exitcode = rank.exitcode
        if exitcode is None:
            return
        rank.exited = True
        self._selector.unregister(rank.process.sentinel)
        if rank.failure is not None or (rank.done and exitcode == 0):
            return
        state = rank.board.read()
        rank.failure = Failure(
            rank=rank.rank,
            # Noticed later than it happened, and never the consequence of a peer's end.
            time=time.monotonic() - 0.05,
            level=OWN,
            phase=state.text or "starting",
            summary=describe_exit(exitcode, state.resident_bytes, was_up=rank.up, was_done=rank.done),
            rank_traceback=rank.board.stacks(),
        )

    def _release(self) -> None:
        if not self._released and all(rank.finished for rank in self._ranks):
            self._released = True
            for rank in self._ranks:
                rank.release()

    def _settled(self) -> bool:
        """Returns whether to stop listening: the root cause is known, or no better one is to be expected."""
        failures = self._failures()
        if not failures:
            return False
        if all(rank.exited or rank.failure for rank in self._ranks):
            return True
        return time.monotonic() - min(failure.time for failure in failures) > settling_seconds(failures)

    def _find_hung(self) -> None:
        """Turns a stopped or hung rank into a failure; asks it for its stacks."""
        if self._failures():
            return
        running = [rank for rank in self._ranks if not rank.exited]
        stopped = [rank for rank in running if self._is_stopped(rank, min(self._timeout, STOPPED_AFTER))]
        idle = [rank for rank in running if self._clock - rank.progress_at >= self._timeout]
        working = [rank for rank in idle if not rank.state.waiting]
        # Ranks that wait have time-outs of their own, and know for whom they wait: theirs come first.
        grace = min(2.0, self._timeout / 4)
        if stopped:
            rank = stopped[0]
            missed = self._clock - rank.beat_at
            text = f"its process is stopped (SIGSTOP or a debugger): no sign of life for {missed:.3g} s"
        elif working:
            rank = min(working, key=lambda rank: rank.state.progress_ns)
            text = self._no_progress(rank)
        elif running and all(self._clock - rank.progress_at >= self._timeout + grace for rank in running):
            unfinished = [rank for rank in idle if not rank.finished] or idle
            rank = min(unfinished, key=lambda rank: rank.state.progress_ns)
            text = f"every rank waits for others, this one the longest: {self._no_progress(rank)}"
        else:
            return
        self._accuse(rank, text)

    def _is_stopped(self, rank: RankHandle, silence: float) -> bool:
        """Returns whether the process is stopped and has given no sign of life for ``silence`` seconds."""
        if not rank.up or self._clock - rank.beat_at < silence:
            return False
        try:
            with open(f"/proc/{rank.process.pid}/stat", "rb") as file:
                return file.read().rpartition(b") ")[2][:1] in (b"T", b"t")
        except OSError:
            return False

    def _no_progress(self, rank: RankHandle) -> str:
        text = f"no progress for {self._clock - rank.progress_at:.3g} s (time-out {self._timeout:g} s)"
        waiting = [r for r in self._ranks if r is not rank and not (r.exited or r.failure) and r.state.waiting]
        if waiting:
            text += "; waiting meanwhile: " + ", ".join(f"rank {r.rank} ({r.state.text})" for r in waiting[:8])
        return text

    def _accuse(self, rank: RankHandle, text: str) -> None:
        stacks = ""
        if rank.up and not self._is_stopped(rank, 0.0):
            rank.signal(signal.SIGUSR1)  # its faulthandler answers, even inside native code
            deadline = time.monotonic() + 0.2
            while not stacks and time.monotonic() < deadline:
                time.sleep(0.02)
                stacks = rank.board.stacks()
        phase = rank.state.text or "starting"
        rank.failure = Failure(rank.rank, time.monotonic(), OWN, phase, text, stacks)

    def _blame(self, cause: Failure) -> Failure:
        """For an echo: the rank that the others waited for, if it is one of ours."""
        if cause.level == OWN:
            return cause
        running = [rank for rank in self._ranks if not rank.exited and rank.failure is None]
        stopped = [rank for rank in running if self._is_stopped(rank, 2 * BEAT_SECONDS)]
        # Where all ranks are ours, the one that is not waiting itself is the one that was waited for, however
        # late it began; among strangers it has to look stuck too.
        quiet = self._timeout / 2 if self._has_strangers else 0.0
        idle = [
            rank
            for rank in running
            if not rank.state.waiting and not rank.finished and self._clock - rank.progress_at >= quiet
        ]
        if stopped or idle:
            rank = min(stopped or idle, key=lambda r: (r.rank not in cause.blamed, r.state.progress_ns))
            if stopped:
                what = "its process is stopped (SIGSTOP or a debugger)"
            elif self._clock - rank.progress_at < 1:
                what = "it is at work and did not come"
            else:
                what = self._no_progress(rank)
            self._accuse(rank, f"{what}; rank {cause.rank} gave up waiting: {cause.summary}")
            assert rank.failure is not None
            return rank.failure
        guilty = self._waited_for(cause)
        if guilty is not None:
            phase = guilty.failure.phase if guilty.failure else guilty.state.text
            return passed_on(cause, guilty.rank, phase, returned=guilty.finished)
        others = ", ".join(f"rank {rank.rank}: {rank.state.text}" for rank in running[:8])
        note = f" (meanwhile {others})" if others else ""
        if self._has_strangers and cause.level == ECHO:
            note += "; no rank that was started here failed before, so another launcher's output has the cause"
        return replace(cause, summary=cause.summary + note)

    def _waited_for(self, echo: Failure) -> RankHandle | None:
        """The rank that left the others waiting though it neither works nor is stuck."""
        for rank in self._ranks:
            if rank.rank in echo.blamed:
                return rank
        finished = [rank for rank in self._ranks if rank.finished and rank.failure is None]
        # Where most have finished it is rather the others that do more than they should.
        if finished and 2 * len(finished) <= len(self._ranks) and not self._has_strangers:
            return min(finished, key=lambda rank: rank.state.progress_ns)
        return None


def end_ranks(ranks: Sequence[RankHandle]) -> None:
    """Ends what still runs: SIGTERM now, SIGKILL after five seconds. Returns soon; always reaps.

    Ranks obey SIGTERM at once unless the caller's function handles it. Those that do not are left to a thread
    that the interpreter waits for when it exits.
    """
    for rank in ranks:
        rank.signal(signal.SIGTERM)
        rank.signal(signal.SIGCONT)  # a stopped process takes SIGTERM only once it continues
    now = time.monotonic()
    left = list(ranks)
    try:
        _close_ended(left, now + _SIGTERM_WAIT)
    finally:
        if left:
            args = (ranks, left, now + KILL_AFTER)
            threading.Thread(target=_kill_later, args=args, name="modelexport-reaper").start()
        else:
            _clear_up(ranks)


def _close_ended(left: list[RankHandle], deadline: float) -> None:
    """Closes those that end before the deadline and takes them out of ``left``."""
    while left:
        for rank in [rank for rank in left if rank.exitcode is not None]:
            rank.close()
            left.remove(rank)
        remaining = deadline - time.monotonic()
        if not left or remaining <= 0:
            break
        wait([rank.process.sentinel for rank in left], remaining)


def _kill_later(ranks: Sequence[RankHandle], left: list[RankHandle], kill_at: float) -> None:
    _close_ended(left, kill_at)
    for rank in left:
        rank.signal(signal.SIGKILL)
    for rank in left:
        rank.close()
    _clear_up(ranks)


def _clear_up(ranks: Sequence[RankHandle]) -> None:
    """Removes the files of a failed run's ranks, all of them ended, from workspaces."""
    if all(rank.ended_well for rank in ranks):
        return  # each has cleared up by itself; what it left somebody may still be going to read
    for rank in ranks:
        for directory in rank.directories:
            remove_rank(directory, rank.rank)
