"""The interposed library: built, and its memory as the program that directs it sees it. See ``interposed.c``."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("interposed.c")
KINDS = (
    *("open", "read", "write", "fsync", "mmap", "rename", "unlink", "mkdir", "allocate", "truncate"),
    *("sendmsg", "recvmsg", "munmap", "begin fsync"),
)
OFF, FAIL, SHORT, KILL, DELAY = range(5)
FILES, SOCKETS, MEMFDS, PIPES = 1, 2, 4, 8
_PATH, _SITE, _SCOPES, _EXEMPT, _RECORDS = 256, 160, 4, 8, 1 << 16
PID_BITS = 22
"""Of ``pid`` in a record; the machine's number is above them."""
DATA_SIZE = 1 << 30
"""Bytes of the file, a sparse one, that takes what is written."""


class Record(ctypes.Structure):
    """A call that was logged; ``struct record`` of the library."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("kind", "pid")),
        *((name, ctypes.c_int64) for name in ("inode", "offset", "length", "data", "result")),
        *((name, ctypes.c_int32) for name in ("code", "flags")),
        ("path", ctypes.c_char * _PATH),
        ("other", ctypes.c_char * _PATH),
        ("site", ctypes.c_char * _SITE),
    )


class _Control(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("mode", "code", "sticky", "targets")),
        ("kinds", ctypes.c_uint32),
        *((name, ctypes.c_int32) for name in ("logging", "keeping_data", "want_sites")),
        *((name, ctypes.c_int64) for name in ("nth", "count", "fired")),
        ("exempt", ctypes.c_int32 * _EXEMPT),
        ("scopes", (ctypes.c_char * _PATH) * _SCOPES),
        ("site", ctypes.c_char * _SITE),
        ("fired_site", ctypes.c_char * _SITE),
        ("fired_path", ctypes.c_char * _PATH),
        *((name, ctypes.c_int32) for name in ("fired_pid", "fired_kind", "order", "pad")),
        *((name, ctypes.c_int64) for name in ("records", "data_used", "data_size")),
        ("log", Record * _RECORDS),
    )


@dataclass(frozen=True)
class Fault:
    """What is to happen at one call.

    Attributes:
        mode: FAIL, SHORT, KILL (the process that makes the call) or DELAY.
        kinds: which calls count.
        nth: which of them it happens at, from 1.
        code: the error of FAIL; the microseconds of DELAY.
        site: only calls from this line count; "" counts all.
        sticky: whether all later ones fail, too.
    """

    mode: int
    kinds: tuple[str, ...]
    nth: int
    code: int = 0
    site: str = ""
    sticky: bool = False

    def __str__(self) -> str:
        what = ("nothing", os.strerror(self.code), "short", "killed", f"{self.code} us late")[self.mode]
        at = f" of {self.site}" if self.site else ""
        return f"{what} at call {self.nth}{' and later' if self.sticky else ''} ({', '.join(self.kinds)}){at}"


class Interposed:
    """The control of the library in this process and all that it starts.

    Args:
        scopes: directories whose files are looked at.
    """

    def __init__(self, scopes: Sequence[Path]) -> None:
        with open(os.environ["FAULTS_CONTROL"], "r+b") as file:
            self._map = mmap.mmap(file.fileno(), ctypes.sizeof(_Control))
        self._control = _Control.from_buffer(self._map)
        for number, scope in enumerate(scopes):
            self._control.scopes[number].value = os.fsencode(scope)
        self._control.want_sites = 1

    def exempt(self, pids: Sequence[int]) -> None:
        """Processes in which nothing happens."""
        for number in range(_EXEMPT):
            self._control.exempt[number] = pids[number] if number < len(pids) else 0

    def arm(self, fault: Fault, targets: int = FILES) -> None:
        """From now on calls are counted."""
        control = self._control
        control.count = control.fired = 0
        control.fired_site = control.fired_path = b""
        control.fired_pid, control.targets, control.code = 0, targets, fault.code
        control.kinds = sum(1 << KINDS.index(kind) for kind in fault.kinds)
        control.nth, control.sticky, control.site = fault.nth, fault.sticky, fault.site.encode()
        control.mode = fault.mode

    def disarm(self) -> None:
        """Nothing happens any more, and nothing is logged."""
        self._control.mode, self._control.logging = OFF, 0

    def start_log(self, targets: int = FILES, *, data: bool = False) -> None:
        """Logs from now on; with ``data`` also what is written, and calls of all processes in their effects' order."""
        self._control.records = self._control.data_used = 0
        ctypes.memset(self._control.log, 0, ctypes.sizeof(self._control.log))
        self._control.order, self._control.targets = 0, targets
        self._control.keeping_data, self._control.logging = data, 1

    def log(self) -> list[Record]:
        """What was logged, copied."""
        count = self._control.records
        assert count <= _RECORDS, f"{count:,} calls, more than the log takes"
        return [Record.from_buffer_copy(self._control.log[number]) for number in range(count)]

    def data(self) -> bytes:
        """The bytes that were written, of all calls one after the other."""
        assert self._control.data_used <= DATA_SIZE
        with open(os.environ["FAULTS_DATA"], "rb") as file:
            return file.read(self._control.data_used)

    @property
    def fired(self) -> int:
        """How many calls it happened at."""
        return self._control.fired

    @property
    def fired_at(self) -> str:
        """Kind and site of the first."""
        return self._control.fired_site.decode()

    @property
    def fired_path(self) -> str:
        """The file that it was about."""
        return self._control.fired_path.decode()


def is_built() -> bool:
    """Returns whether the library can be built here."""
    return shutil.which("gcc") is not None


def build(directory: Path) -> Path:
    """Builds the library; returns its path."""
    library = directory / "interposed.so"
    command = ["gcc", "-O1", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-o", str(library), str(SOURCE), "-ldl"]
    subprocess.run(command, check=True, timeout=60)
    return library


def environment(directory: Path) -> dict[str, str]:
    """The environment for a program in which, and in whose children, the library is; builds it in ``directory``."""
    with open(directory / "control", "wb") as fresh:
        fresh.truncate(ctypes.sizeof(_Control))
    with open(directory / "control", "r+b") as file, mmap.mmap(file.fileno(), ctypes.sizeof(_Control)) as memory:
        control = _Control.from_buffer(memory)
        control.data_size = DATA_SIZE
        del control
    with open(directory / "data", "wb") as data:
        data.truncate(DATA_SIZE)
    return {
        **os.environ,
        "LD_PRELOAD": str(build(directory)),
        "FAULTS_CONTROL": str(directory / "control"),
        "FAULTS_DATA": str(directory / "data"),
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
    }


def run_interposed(directory: Path, arguments: Sequence[str]) -> None:
    """Replaces this process by the same program under the library, unless it is so already."""
    if "FAULTS_CONTROL" not in os.environ:
        os.execve(sys.executable, [sys.executable, *arguments], environment(directory))
