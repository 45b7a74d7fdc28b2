"""Signs of life in a workspace: what a rank is doing, and which runs nobody is left of."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import threading
import time
from pathlib import Path
from typing import Any

__all__ = ["Heart", "condition", "last_heartbeat", "remove_closed", "sweep_dead_runs"]

_SECONDS = 10.0
_CLOSED = "closed the workspace"


def _machine() -> str:
    """Where process ids mean the same: the running kernel and the namespace of process ids."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"


def _path(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank:05d}.alive"


class Heart:
    """Keeps ``rank-NNNNN.alive`` in ``directory`` (made if missing) up to date from a background thread."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._directory, self._path = directory, _path(directory, rank)
        self._machine = _machine()
        self._doing, self._bytes = "opened the workspace", 0
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        while True:
            directory.mkdir(parents=True, exist_ok=True)
            try:
                self._write()
                break
            except FileNotFoundError:
                continue  # another rank closed, and took the empty directory with it
        self._thread = threading.Thread(target=self._run, name="modelexport-heartbeat", daemon=True)
        self._thread.start()

    def beat(self, doing: str, nbytes: int = 0) -> None:
        """Say now what this rank is doing, and with how many bytes."""
        self._doing, self._bytes = doing, nbytes
        self._write()

    def stop(self) -> None:
        """Stop beating; the file stays and says that this rank has closed."""
        self._stopped.set()
        self._thread.join()
        with contextlib.suppress(FileNotFoundError):  # the directory was removed under us
            self.beat(_CLOSED)

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)

    def _run(self) -> None:
        while not self._stopped.wait(_SECONDS):
            try:
                self._write()
            except OSError:
                # The directory is gone or the server is: whoever needs the file finds that out by itself.
                return

    def _write(self) -> None:
        state = {
            "time": time.time(),
            "doing": self._doing,
            "bytes": self._bytes,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "machine": self._machine,
        }
        with self._lock:
            self._path.write_text(json.dumps(state))


def last_heartbeat(directory: Path, rank: int) -> str:
    """When ``rank`` last showed a sign of life, and what it was doing."""
    try:
        state = json.loads(_path(directory, rank).read_text())
        size = f" of {state['bytes']} bytes" if state["bytes"] else ""
        return (
            f"last heartbeat {time.time() - state['time']:.1f} s ago on {state['host']} (pid {state['pid']}), "
            f"{state['doing']}{size}"
        )
    except FileNotFoundError:
        return "no heartbeat: it has not opened the workspace, or has closed it"
    except (ValueError, KeyError, TypeError):
        return "its heartbeat is just being written"


def remove_closed(directory: Path) -> None:
    """Remove the files of ranks that have closed and left theirs for the first rank to remove."""
    for heart in directory.glob("rank-*.alive"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            if json.loads(heart.read_text())["doing"] == _CLOSED:
                heart.unlink()


def condition(directory: Path, rank: int) -> str:
    """ "absent": not opened yet, or closed with nothing left to read; "living"; "closed"; "dead": ended unclosed.

    A process on another machine counts as living as long as it has not closed.
    """
    try:
        state = json.loads(_path(directory, rank).read_text())
        if state["doing"] == _CLOSED:
            return "closed"
        return "dead" if _has_ended(state) else "living"
    except FileNotFoundError:
        return "absent"
    except (OSError, ValueError, KeyError, TypeError):
        return "living"  # just being written


def _has_ended(state: dict[str, Any]) -> bool:
    if state["machine"] != _machine():
        return False
    try:
        stat = Path(f"/proc/{state['pid']}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] in "ZX"  # ended, and not yet waited for by its parent


def sweep_dead_runs(workspace: Path, own: Path) -> None:
    """Remove what killed runs left in ``workspace``: only if every rank that opened it ran here and is dead."""
    for directory in workspace.glob("run-*"):
        if directory != own and _all_dead(directory):
            shutil.rmtree(directory, ignore_errors=True)  # another rank may be sweeping the same


def _all_dead(directory: Path) -> bool:
    hearts = list(directory.glob("rank-*.alive"))
    try:
        return bool(hearts) and all(_has_ended(json.loads(heart.read_text())) for heart in hearts)
    except (OSError, ValueError, KeyError, TypeError):
        return False
