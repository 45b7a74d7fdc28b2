"""Heartbeat files in a workspace: the work of a rank, and runs of which no process is left."""

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

from modelexport.distributed.supervision.status import leaves_behind
from modelexport.distributed.transport.messages import NUMBER, TEXT, WHOLE, LostPeerError, read_message
from modelexport.system.ownership import OWNED_MODE, ForeignError, check_own_directory

__all__ = ["Heart", "condition", "last_heartbeat", "remove_gone", "remove_rank", "sweep_dead_runs"]

_SECONDS = 10.0
_CLOSED = "closed the workspace"
_SIZE = 1024  # bytes of the file, always: what was written once needs no room to be written again
_FIELDS = {"time": NUMBER, "doing": TEXT, "bytes": WHOLE, "host": TEXT, "pid": WHOLE, "started": TEXT, "machine": TEXT}
_FORSAKEN_SECONDS = 86400.0  # without a heartbeat, after which a process of another machine counts as dead


def _machine() -> str:
    """The scope in which process ids are unique: the host, its running kernel, the namespace of process ids."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()}/{boot}/{os.stat('/proc/self/ns/pid').st_ino}"


def _process(pid: int) -> tuple[str, str] | None:
    """A process's state (a letter) and the moment it started, None where there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return fields[0], fields[19]


def _path(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank:05d}.alive"


class Heart:
    """Keeps ``rank-NNNNN.alive`` in ``directory`` (made if missing) up to date from a background thread.

    Attributes:
        owner: the owner that this user's files have in the directory.

    Raises:
        ForeignError: the directory is another user's, or written by others.
        OSError: it cannot be made or written.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        self._directory, self._path = directory, _path(directory, rank)
        process = _process(os.getpid())
        self._origin = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": process[1] if process else "",
            "machine": _machine(),
        }
        self._doing, self._bytes = "opened the workspace", 0
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        leaves_behind(directory)
        try:
            self._begin()
        except ForeignError:
            raise
        except OSError:
            with contextlib.suppress(OSError):  # as it was: the error tells of the directory, not of its state
                self._path.unlink(missing_ok=True)
                directory.rmdir()
            raise
        self._thread = threading.Thread(target=self._run, name="modelexport-heartbeat", daemon=True)
        self._thread.start()

    def _begin(self) -> None:
        while True:
            self._directory.mkdir(OWNED_MODE, parents=True, exist_ok=True)
            try:
                self.owner = check_own_directory(self._directory, private=True)
                return self._write()
            except FileNotFoundError:
                continue  # another rank closed, and took the empty directory with it

    def beat(self, doing: str, nbytes: int = 0) -> None:
        """Writes at once what this rank is doing, and with how many bytes."""
        self._doing, self._bytes = doing, nbytes
        self._write()

    def stop(self) -> None:
        """Stops beating; the file stays and says that this rank has closed."""
        self._stopped.set()
        self._thread.join()
        # Where that cannot be written (the directory was removed under us) others go by this process's end.
        with contextlib.suppress(OSError):
            self.beat(_CLOSED)

    def _run(self) -> None:
        while not self._stopped.wait(_SECONDS):
            try:
                self._write()
            except OSError:
                # The directory is gone or the server is: whoever needs the file finds that out by itself.
                return

    def _write(self) -> None:
        state = {"time": time.time(), "doing": self._doing, "bytes": self._bytes, **self._origin}
        text = json.dumps(state).encode("ascii").ljust(_SIZE)
        assert len(text) == _SIZE, text
        with self._lock:
            # Never truncated: a reader finds the former state or this one, whatever happens to us meanwhile.
            fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                os.pwrite(fd, text, 0)
            finally:
                os.close(fd)


def _read(path: Path) -> dict[str, Any]:
    """A rank's state.

    Raises:
        OSError: there is none, or it cannot be read.
        LostPeerError: it is none, or is just being written.
    """
    with open(path, "rb") as file:
        return read_message(file.read(_SIZE), f"{path}", _FIELDS)


def last_heartbeat(directory: Path, rank: int) -> str:
    """Describes, for messages, the last heartbeat of ``rank``: its time and the work under way."""
    try:
        state = _read(_path(directory, rank))
        size = f" of {state['bytes']} bytes" if state["bytes"] else ""
        return (
            f"last heartbeat {time.time() - state['time']:.1f} s ago on {state['host']} (pid {state['pid']}), "
            f"{state['doing']}{size}"
        )
    except FileNotFoundError:
        return "no heartbeat: it has not opened the workspace, or has closed it"
    except (OSError, LostPeerError):
        return "its heartbeat is just being written"


def condition(directory: Path, rank: int) -> str:
    """ "absent": not opened yet, or closed with nothing left to read; "living"; "closed"; "dead": ended unclosed.

    A process on another machine counts as living as long as it has not closed.
    """
    try:
        state = _read(_path(directory, rank))
        if state["doing"] == _CLOSED:
            return "closed"
        return "dead" if _has_ended(state) else "living"
    except FileNotFoundError:
        return "absent"
    except (OSError, LostPeerError):
        return "living"  # just being written


def _has_ended(state: dict[str, Any]) -> bool:
    if state["machine"] != _machine():
        return False
    process = _process(state["pid"])
    # Ended, and not yet waited for by its parent; or ended long ago, and another process has its id.
    return process is None or process[0] in "ZX" or process[1] != state["started"]


def remove_rank(directory: Path, rank: int) -> None:
    """Removes all that ``rank`` left in a run's directory, and the directory once it is empty.

    For a rank that has ended and that nobody will read from any more. Whatever cannot be removed stays.
    """
    with contextlib.suppress(OSError):
        paths = [*directory.glob(f".rank-{rank:05d}.*"), *directory.glob(f"rank-{rank:05d}.*")]
        # Its heartbeat last: as long as anything is there, it is known whose.
        for path in sorted(paths, key=lambda path: path == _path(directory, rank)):
            path.unlink(missing_ok=True)
        directory.rmdir()


def remove_gone(directory: Path) -> None:
    """Removes the files of ranks that have closed, or were killed on this machine; called when no rank reads them."""
    for heart in directory.glob("rank-[0-9][0-9][0-9][0-9][0-9].alive"):
        rank = int(heart.name[5:10])
        if condition(directory, rank) in ("closed", "dead"):
            remove_rank(directory, rank)


def sweep_dead_runs(workspace: Path, own: Path) -> None:
    """Removes the files of killed runs from ``workspace``.

    A run is dead when every rank that opened it ran on this machine and has ended, or ran on another one, or on one
    that lost power before its heartbeat was on the disk, and has given no sign of life for a day (the times are the
    file server's). ``own`` is a living run's directory.
    """
    now = max((heart.stat().st_mtime for heart in own.glob("rank-*.alive")), default=0.0)
    for directory in workspace.glob("run-*"):
        if directory != own and _same_owner(directory, own) and _all_dead(directory, now):
            shutil.rmtree(directory, ignore_errors=True)  # another rank may be sweeping the same


def _same_owner(directory: Path, own: Path) -> bool:
    """Returns whether a directory is this user's: what lies in others' is not even opened."""
    try:
        return directory.lstat().st_uid == (own.lstat().st_uid if own.exists() else os.geteuid())
    except OSError:
        return False


def _all_dead(directory: Path, now: float) -> bool:
    hearts = list(directory.glob("rank-*.alive"))
    try:
        return bool(hearts) and all(_is_dead(heart, now) for heart in hearts)
    except OSError:
        return False


def _is_dead(heart: Path, now: float) -> bool:
    with contextlib.suppress(LostPeerError):  # just being written, or never written whole
        state = _read(heart)
        if state["machine"] == _machine():
            return _has_ended(state)
    return now - heart.stat().st_mtime > _FORSAKEN_SECONDS
