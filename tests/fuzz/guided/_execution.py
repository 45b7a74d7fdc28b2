"""One execution of a reader: it returns, or raises an error of ours, and does nothing else.

An execution that takes long or much memory, raises anything else, opens a file outside its directory, starts a process,
connects, unpickles or runs code that it has made is a fault. One that does not end is broken off by whoever calls: the
fuzzer, pytest.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import modelexport
from modelexport.errors import ModelExportError

SLOW = 2.0
"""Seconds of a processor that an execution may take."""
LARGE = 64 << 20
"""Bytes of memory that an execution may take, beside 64 for each byte of its input."""
LONG = 1600
"""Characters of a message."""
_PACKAGE = os.path.dirname(modelexport.__file__) + os.sep
_LIBRARIES = tuple({os.path.realpath(each) + os.sep for each in (sys.prefix, sys.base_prefix, *sys.path) if each})
_SYSTEM = ("/proc/", "/sys/", "/usr/", "/etc/")
_CHANGES = frozenset(
    {f"os.{name}" for name in ("mkdir", "rmdir", "remove", "rename", "link", "symlink", "truncate", "chmod", "chown")}
)
_NEVER = frozenset(
    {"pickle.find_class", "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.spawn"}
    | {"socket.connect", "socket.bind", "ctypes.dlopen", "exec"}
)


class Place:
    """A reader's own directory, whose files are rewritten without being made anew.

    Attributes:
        allowed: what paths of its files begin with.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.allowed = tuple({str(directory), os.path.realpath(directory)})
        self._fds: dict[str, int] = {}

    def put(self, name: str, data: bytes) -> Path:
        """Makes ``data`` the content of a file; returns its path."""
        path = self.directory / name
        fd = self._fds.get(name)
        if fd is None or os.fstat(fd).st_nlink == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            fd = self._fds[name] = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.pwrite(fd, data, 0)
        os.ftruncate(fd, len(data))
        return path

    def remove(self, name: str) -> None:
        """Sees to it that there is no file of that name."""
        fd = self._fds.pop(name, None)
        if fd is not None:
            os.close(fd)
            (self.directory / name).unlink(missing_ok=True)


@dataclass(frozen=True)
class Reader:
    """What takes bytes that another program, or another process, has written.

    Attributes:
        name: of its inputs in the corpus.
        read: calls it with bytes.
        mutate: changes bytes as their format has them; see :mod:`tests.fuzz._mutations`.
        handled: the errors, beside ours, that all its callers handle.
    """

    name: str
    read: Callable[[bytes, Place], object]
    mutate: Callable[[bytes, Random], bytes]
    handled: tuple[type[Exception], ...] = ()


@dataclass(frozen=True)
class Fault:
    """What an execution did that none may; ``kind`` is the same for the same defect."""

    kind: str
    text: str


class Guard:
    """Sees what an execution opens and starts. There is one in a process: an audit hook stays for ever."""

    def __init__(self) -> None:
        self._allowed: tuple[str, ...] | None = None  # while an execution runs
        self._thread = 0
        self.seen: list[str] = []
        sys.addaudithook(self._audit)

    def watch(self, place: Place) -> None:
        """Watches this process from now on, while a reader reads, whose own directory this is."""
        self.seen.clear()
        self._thread = threading.get_ident()
        self._allowed = place.allowed

    def stop(self) -> None:
        """Stops watching."""
        self._allowed = None

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if self._allowed is None or threading.get_ident() != self._thread:  # a rank's heartbeat has one of its own
            return
        if event == "open":
            self._check_path(event, args[0], writes=bool(args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)))
        elif event in _CHANGES:
            self._check_path(event, args[0], writes=True)
        elif event in _NEVER and not _imports():
            self._refuse(f"{event} {str(args)[:80]}")

    def _check_path(self, event: str, path: Any, *, writes: bool) -> None:
        assert self._allowed is not None
        if not isinstance(path, (str, bytes, os.PathLike)):
            return
        text = os.fsdecode(path)
        if ".." in text:
            text = os.path.normpath(text)
        if text.startswith(self._allowed) or (not writes and text.startswith((*_SYSTEM, *_LIBRARIES))):
            return
        if not _imports():
            self._refuse(f"{event} {text[:80]!r}")

    def _refuse(self, what: str) -> None:
        self.seen.append(what)
        raise PermissionError(f"a reader does not do this: {what}")


def _imports() -> bool:
    """Returns whether an import is under way: a module that is first needed now."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


GUARD = Guard()
_peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def execute(reader: Reader, data: bytes, place: Place) -> Fault | str:
    """Lets a reader read; returns ``"read"``, ``"refused"``, or what is wrong."""
    global _peak
    outcome: Fault | str = "read"
    began = time.perf_counter()
    GUARD.watch(place)
    try:
        reader.read(data, place)
        GUARD.stop()
    except ModelExportError as error:
        outcome = "refused"
        if len(str(error)) > LONG:
            outcome = Fault(f"a long message from {_where(error)}", f"{len(str(error)):,} characters: {error}"[:300])
    except reader.handled:
        outcome = "refused"
    except Exception as error:
        outcome = Fault(f"{type(error).__name__} at {_where(error)}", f"{str(error)[:300]!r}")
    GUARD.stop()
    seconds, before = time.perf_counter() - began, _peak
    _peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if GUARD.seen:
        return Fault(f"does {GUARD.seen[0].split()[0]}", GUARD.seen[0])
    if seconds > SLOW and isinstance(outcome, str) and (seconds := _processor_seconds(reader, data, place)) > SLOW:
        return Fault("slow", f"{seconds:.1f} s")
    if (_peak - before) << 10 > LARGE + 64 * len(data) and isinstance(outcome, str):
        return Fault("large", f"{(_peak - before) >> 10} MiB for {len(data):,} bytes")
    return outcome


def _processor_seconds(reader: Reader, data: bytes, place: Place) -> float:
    """Seconds of a processor that the reader takes once more: the machine may have been busy."""
    began = time.process_time()
    with contextlib.suppress(Exception):
        reader.read(data, place)
    return time.process_time() - began


def _where(error: BaseException) -> str:
    """The innermost line of the package that an error passed."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename.startswith(_PACKAGE)] or frames[-1:]
    return f"{own[-1].filename.removeprefix(_PACKAGE)}:{own[-1].lineno} ({own[-1].name})"
