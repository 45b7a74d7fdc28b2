"""Reports of this process's work to its launcher: ``phase``, ``phase_scope``, ``report``.

In a rank that the launcher started, phases go to a shared page (see phase_board) and events, the outcome and
failures go as JSON lines over a socket. In a process that runs by itself, or that another launcher (torchrun,
SLURM) started, events reach ``on_event`` directly.
"""

from __future__ import annotations

import faulthandler
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NoReturn

from modelexport.distributed.supervision.failures import exception_message
from modelexport.distributed.supervision.phase_board import PAGE, PhaseBoard
from modelexport.system.run_log import READ, WRITTEN, LogFile, RunLog

BEAT_SECONDS = 0.5
ORPHANED = 113  # exit status of a rank whose launcher vanished
Phase = tuple[str, bool]


class Status:
    """Keeps the phases of this process's threads; the base class keeps them for itself."""

    def __init__(self, on_event: Callable[[int, dict], None] | None = None, rank: int = 0) -> None:
        self._rank = rank
        self._lock = threading.Lock()
        self._phases: dict[int, Phase] = {}
        self.directories: set[str] = set()
        self.log: RunLog | None = None
        self._on_event = on_event

    def enter(self, phase: Phase | None) -> Phase | None:
        """Sets (None: forgets) what the calling thread does; returns what it did before."""
        ident = threading.get_ident()
        with self._lock:
            former = self._phases.get(ident)
            if phase is not None:
                self._phases[ident] = phase
            else:
                self._phases.pop(ident, None)
            self._publish(*self._summary())
        if self.log is not None and phase is not None:
            self.log.write(phase[0], waiting=phase[1])
        return former

    def current(self) -> Phase:
        """The phase that stands for the process."""
        with self._lock:
            return self._summary()

    def of_thread(self) -> Phase:
        """The phase of the calling thread, or else the process's."""
        with self._lock:
            return self._phases.get(threading.get_ident()) or self._summary()

    def report(self, event: dict) -> None:
        """Hands ``event`` to ``on_event``, as it would arrive from another process."""
        line = json.dumps(event)
        if self._on_event is not None:
            self._on_event(self._rank, json.loads(line))

    def leaves_behind(self, directory: str) -> None:
        """Has ``directory`` cleared of this rank's files, should the run fail: by the launcher, or by rank 0."""
        self.directories.add(directory)

    def _summary(self) -> Phase:
        """The main thread's phase; where that waits and another thread works, the other's: it is the one to blame."""
        if len(self._phases) > 1:
            alive = {thread.ident for thread in threading.enumerate()}
            for ident in [ident for ident in self._phases if ident not in alive]:
                del self._phases[ident]
        main = self._phases.get(threading.main_thread().ident or 0)
        if main is not None and not main[1]:
            return main
        working = [phase for phase in self._phases.values() if not phase[1]]
        if working:
            return working[-1]
        return main or next(iter(self._phases.values()), ("", False))

    def _publish(self, text: str, waiting: bool) -> None:
        pass


class RankStatus(Status):
    """The status of a rank process, connected to its launcher."""

    def __init__(self, channel: socket.socket, board_fd: int) -> None:
        super().__init__()
        self._channel = channel
        self._send_lock = threading.Lock()
        self._board = PhaseBoard(board_fd)
        self._released = threading.Event()
        self._libraries: tuple[str, ...] = (os.path.dirname(__file__) + os.sep,)

    @classmethod
    def opened(cls, channel: socket.socket, board_fd: int) -> RankStatus:
        """The status of this process, which ends where it cannot have one, once its launcher has been told."""
        try:
            return cls(channel, board_fd)
        except OSError as error:  # no memory for the board's page, in a process that nobody hears yet
            channel.sendall(_line(_failed(error, "starting")))
            os._exit(1)

    def start(self) -> None:
        """Starts the heartbeat and directs the stacks of crashes to the board's file."""
        os.lseek(self._board.fd, PAGE, os.SEEK_SET)
        faulthandler.enable(self._board.fd, all_threads=True)
        faulthandler.register(signal.SIGUSR1, self._board.fd, all_threads=True)
        self._board.beat(_resident_bytes(), False)
        threading.Thread(target=self._watch, name="modelexport-watcher", daemon=True).start()
        self.send({"type": "up"})

    def send(self, message: dict[str, Any]) -> None:
        """Sends one JSON line; blocks while the launcher is behind."""
        try:
            with self._send_lock:
                self._channel.sendall(_line(message))
        except OSError as error:
            self._cut_off(error)

    def _cut_off(self, error: OSError) -> NoReturn:
        """Ends this process, which has no launcher any more, or cannot tell it anything but by what it was doing."""
        if isinstance(error, ConnectionError):
            os._exit(ORPHANED)
        self._board.write(f"speaking with its launcher ({error.strerror or error})", False)
        os._exit(1)

    def report(self, event: dict) -> None:
        self.send({"type": "event", "event": event})
        with self._lock:
            self._publish(*self._summary())

    def leaves_behind(self, directory: str) -> None:
        super().leaves_behind(directory)
        self.send({"type": "leaves", "directory": directory})

    def finish(self) -> None:
        """Says that this rank's work is done and waits until every rank of this launcher has said so.

        No rank closes its connections before: to those still at work that would look like a failure.
        """
        self.enter(("waiting for the other ranks to finish", True))
        self.send({"type": "finished"})
        self._released.wait()
        self.enter(("leaving the process group", False))

    def fail(self, error: BaseException) -> None:
        """Sends the error with this thread's innermost phase."""
        text, _ = phase_of_error(error) or self.of_thread()
        self.send(_failed(error, text))

    def _publish(self, text: str, waiting: bool) -> None:
        self._board.write(text, waiting)

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        while True:
            self._board.beat(_resident_bytes(), self._in_collective(), READ.value + WRITTEN.value)
            if not poll.poll(BEAT_SECONDS * 1000):
                continue
            try:
                data = self._channel.recv(4096)
            except ConnectionError:  # it went without reading all that was sent to it
                data = b""
            except OSError as error:
                self._cut_off(error)
            if not data:
                # The launcher is gone, however it went. Nobody is left to report to or to clean up for.
                os._exit(ORPHANED)
            if b"release" in data:
                self._released.set()

    def _in_collective(self) -> bool:
        """Returns whether the main thread is inside torch.distributed: it waits for others without a waiting phase."""
        if len(self._libraries) == 1 and "torch.distributed" in sys.modules:
            torch_distributed = os.path.dirname(sys.modules["torch.distributed"].__file__ or "")
            self._libraries = (*self._libraries, torch_distributed + os.sep)
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        return frame is not None and frame.f_code.co_filename.startswith(self._libraries)


def _failed(error: BaseException, phase: str) -> dict[str, Any]:
    when = getattr(error, "raised_at", time.monotonic())
    return {"type": "failed", "time": when, "phase": phase, **exception_message(error)}


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


_status: Status = Status()


def use(status: Status) -> Status:
    """Makes ``status`` this process's; returns the former one."""
    global _status
    former, _status = _status, status
    return former


def current_status() -> Status:
    """This process's status, to be asked from another thread."""
    return _status


def in_rank() -> bool:
    """Returns whether this process is a rank that our launcher started."""
    return isinstance(_status, RankStatus)


def report(event: dict) -> None:
    """Sends an event (JSON-able) to the launcher's ``on_event``; counts as progress.

    With world size 1, and under another launcher, ``on_event`` is called right here.

    Raises:
        TypeError, ValueError: the event is not JSON.
    """
    _status.report(event)


def leaves_behind(directory: str | os.PathLike[str]) -> None:
    """Registers a run's directory in a workspace, in which this rank is going to have files.

    Should the run fail, the launcher (or rank 0, where ranks watch each other) removes them once this rank's process
    has ended, however it ended.
    """
    _status.leaves_behind(os.path.abspath(directory))


def phase(text: str, *, waiting: bool = False) -> None:
    """Sets the text of what this rank does now; counts as progress. Takes a few microseconds.

    Args:
        text: as it shall read after "rank 3 failed while", e.g. ``"quantising model.layers.3"``. Cut at 984 bytes.
        waiting: the rank is blocked until its peers come, so it is a victim if nothing moves any more.
    """
    _status.enter((text, waiting))


class phase_scope:
    """``with phase_scope("gathering layer 3", waiting=True):`` sets a phase and restores the former one after.

    An error that leaves the block keeps the phase in which it arose, for the launcher's report.
    """

    def __init__(self, text: str, *, waiting: bool = False) -> None:
        self._phase = (text, waiting)

    def __enter__(self) -> phase_scope:
        self._former = _status.enter(self._phase)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            _keep_phase(error)
        _status.enter(self._former)


def _keep_phase(error: BaseException) -> None:
    """Attaches to ``error`` the phase in which it arose."""
    # Not in a table: that would keep the error's frames and their tensors.
    if not hasattr(error, "_modelexport_phase"):
        error._modelexport_phase = _status.of_thread()  # type: ignore[attr-defined]


def phase_of_error(error: BaseException) -> Phase | None:
    """The phase in which ``error`` (or what it was raised from) left a :class:`phase_scope`, if it did."""
    seen: BaseException | None = error
    while seen is not None:
        phase = getattr(seen, "_modelexport_phase", None)
        if phase is not None:
            return phase
        seen = seen.__cause__ or seen.__context__
    return None


def current_phase() -> str:
    """The text of this process's last :func:`phase`."""
    return _status.current()[0]


@contextmanager
def local_status(
    on_event: Callable[[int, dict], None] | None, rank: int = 0, log: LogFile | None = None
) -> Iterator[Status]:
    """Passes events straight to ``on_event``, and phases to a log, in a rank that no launcher of ours started."""
    status = Status(on_event, rank)
    if log is not None:
        status.log = RunLog(log, rank)
    former = use(status)
    try:
        yield status
    except BaseException as error:
        _keep_phase(error)
        raise
    finally:
        use(former)
        if status.log is not None:
            status.log.close()


def _resident_bytes() -> int:
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
