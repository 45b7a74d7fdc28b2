"""The log of a long run: JSON lines that its processes append to one file, of what each does and how much it has moved.

One line is one object: ``seconds`` since the run began, ``rank`` (None: the process that started the ranks), ``phase``,
``layer``, ``waiting``, and the bytes of weights ``read`` and ``written`` so far by that process. Lines are short enough
for the kernel to append each whole (``O_APPEND``), so that neither processes beside each other nor a killed one leave
half a line; a disk that fills may cut the last of a process. :mod:`modelexport.inspection.report.timeline` reads them,
and passes over such a line.
"""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from modelexport.errors import UsageError
from modelexport.system.small_files import check_place
from modelexport.system.terminal import note

__all__ = ["READ", "WRITTEN", "ByteCount", "LogFile", "RunLog", "check_log", "in_layer"]

BEAT_SECONDS = 10.0
_LONGEST_LINE = 4096  # PIPE_BUF: what is written to a pipe at once arrives whole, too
_LONGEST_PHASE = 984
_SHORT_PHASE = 200

P = ParamSpec("P")
T = TypeVar("T")


class ByteCount:
    """A number of bytes that the threads of a process add to."""

    def __init__(self) -> None:
        self.value = 0
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        """Adds to the number."""
        with self._lock:
            self.value += nbytes


READ, WRITTEN = ByteCount(), ByteCount()
"""Bytes of weight files that this process has read and written, in all its runs."""

_of_thread = threading.local()


def in_layer(layer: str, func: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Calls a function; the lines that its thread logs meanwhile have this layer."""
    former = getattr(_of_thread, "layer", None)
    _of_thread.layer = layer
    try:
        return func(*args, **kwargs)
    finally:
        _of_thread.layer = former


@dataclass(frozen=True)
class LogFile:
    """The file of a run's log.

    Attributes:
        path: absolute, so that processes with other working directories mean the same.
        began: when the run did, in seconds since the epoch.
    """

    path: str
    began: float

    @classmethod
    def begin(cls, path: str, began: float | None = None) -> LogFile:
        """The log of a run; it begins now, where ``began`` is None."""
        return cls(os.path.abspath(path), time.time() if began is None else began)


def check_log(path: str, out: str | None) -> None:
    """Refuses a log that cannot be written, before the run begins.

    Args:
        out: the target directory.

    Raises:
        UsageError: it is a directory or takes no bytes, its directory is not there, or it lies in the target.
    """
    label = f"--log {path}"
    real = os.path.realpath(path)
    if out is not None and os.path.commonpath([real, os.path.realpath(out)]) == os.path.realpath(out):
        raise UsageError(f"{label}: lies in --out {out}, which is to hold the checkpoint alone: name a file beside it")
    check_place(path, label=label)
    try:
        os.close(_open(path))
    except OSError as error:
        raise UsageError(f"{label}: cannot be written: {error.strerror or error}") from error


class RunLog:
    """One process's pen: appends its lines to the file. Thread-safe.

    A log that cannot be written any more (a full disk) ends with a note on stderr; the run goes on.

    Args:
        rank: of this process; None: it started the ranks.
        beats: whether the last line is repeated, with the bytes moved since, every ten seconds.

    Raises:
        UsageError: the file cannot be opened.
    """

    def __init__(self, file: LogFile, rank: int | None, *, beats: bool = True) -> None:
        self._path, self._rank = file.path, rank
        # From here on by a clock that nobody sets; several processes begin at the same zero.
        self._zero = time.monotonic() - (time.time() - file.began)
        self._read, self._written = READ.value, WRITTEN.value
        self._last: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        try:
            self._fd: int | None = _open(file.path)
        except OSError as error:
            raise UsageError(f"--log {file.path}: cannot be written: {error.strerror or error}") from error
        if beats:
            threading.Thread(target=self._beat, name="modelexport-log", daemon=True).start()

    def write(self, phase: str, *, waiting: bool = False, layer: str | None = None, **more: Any) -> None:
        """Appends a line.

        Args:
            layer: the layer, or another part of the model; None: the one that the thread is in, see :func:`in_layer`.
            more: further fields.
        """
        layer = getattr(_of_thread, "layer", None) if layer is None else layer
        self._append({"phase": phase[:_LONGEST_PHASE], "layer": layer, "waiting": waiting, **more})

    def close(self) -> None:
        """Ends the log of this process."""
        self._closed.set()
        with self._lock:
            fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def _append(self, fields: dict[str, Any], **beat: Any) -> None:
        with self._lock:
            if self._fd is None:
                return
            self._last = fields
            about = {
                "seconds": round(time.monotonic() - self._zero, 3),
                "rank": self._rank,
                "read": READ.value - self._read,
                "written": WRITTEN.value - self._written,
                **fields,
                **beat,
            }
            line = json.dumps(about).encode() + b"\n"
            if len(line) > _LONGEST_LINE:  # characters that JSON escapes
                line = json.dumps({**about, "phase": about["phase"][:_SHORT_PHASE], "layer": None}).encode() + b"\n"
            try:
                if os.write(self._fd, line) < len(line):  # what others append may stand behind it already
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError as error:
                os.close(self._fd)
                self._fd = None
                note(f"modelexport: --log {self._path}: {error.strerror or error}: the log ends here, the run goes on")

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_SECONDS):
            if self._last:
                self._append(self._last, beat=True)


def _open(path: str) -> int:
    # O_NONBLOCK: opening a named pipe without a reader would wait for one.
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
    fd = os.open(path, flags, 0o666)
    os.set_blocking(fd, True)
    return fd
