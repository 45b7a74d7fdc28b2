"""The two ``flock`` locks of a staging directory. The kernel drops them when a process dies, however it dies.

``lock`` is held exclusively by the one process that runs the export, ``ranks.lock`` shared by every rank, so that
a new export waits until the last rank of a killed one is gone. (Two files, because turning an exclusive lock into
a shared one is not atomic: a rival could slip in between.)
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from pathlib import Path

from modelexport.system.ownership import check_own_directory

LOCK, RANKS_LOCK = "lock", "ranks.lock"


class Busy(Exception):
    """Someone else holds a lock; the text says who, as far as is known: `` (pid 1, 2)`` or nothing."""


def acquire(home: Path, wait: float) -> list[int]:
    """Both locks, exclusively, in a directory that is made where it is missing.

    Args:
        home: the staging directory.
        wait: seconds to wait for holders to let go.

    Returns:
        The descriptors of ``lock`` and ``ranks.lock``.

    Raises:
        Busy: still held after ``wait`` seconds.
        OSError: the directory cannot be made or written.
    """
    deadline = time.monotonic() + wait
    while True:
        fds: list[int] = []
        try:
            home.mkdir(parents=True, exist_ok=True)
            check_own_directory(home, private=False)  # an interrupted run is taken up: it must have been this user's
            for name in (LOCK, RANKS_LOCK):
                fds.append(os.open(home / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666))
                fcntl.flock(fds[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The last owner may have removed the file between our two calls: then this is no lock.
                if os.fstat(fds[-1]).st_ino != os.stat(home / name).st_ino:
                    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        # FileExistsError: the last owner removed the directory while mkdir looked whether it is one.
        except (BlockingIOError, FileNotFoundError, FileExistsError) as error:
            holders = _holders(fds[-1]) if fds else ""
            release(fds)
            if isinstance(error, FileExistsError) and home.is_file():
                raise
            if time.monotonic() > deadline:
                if not isinstance(error, BlockingIOError):
                    raise
                raise Busy(holders) from None
            time.sleep(0.05)
        except BaseException:
            release(fds)
            raise
        else:
            return fds


def join(home: Path) -> int:
    """The ranks' lock, shared.

    Raises:
        OSError: no such directory.
        Busy: an export is only just taking it over.
    """
    fd = os.open(home / RANKS_LOCK, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        holders = _holders(fd)
        os.close(fd)
        raise Busy(holders) from None
    return fd


def ranks_gone(home: Path) -> bool:
    """Returns whether no rank holds the ranks' lock."""
    try:
        fd = os.open(home / RANKS_LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def release(fds: list[int]) -> None:
    """Close the descriptors, which drops their locks, and empty the list."""
    while fds:
        os.close(fds.pop())


def remove(home: Path) -> None:
    """Remove the lock files (by their holder) and the directory, unless someone has begun in it anew."""
    (home / RANKS_LOCK).unlink(missing_ok=True)
    (home / LOCK).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        home.rmdir()


def _holders(fd: int) -> str:
    status = os.fstat(fd)
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    pids: set[int] = set()
    with contextlib.suppress(OSError, ValueError), open("/proc/locks", encoding="ascii") as table:
        for line in table:  # "1: FLOCK  ADVISORY  WRITE 708 08:01:1234 0 EOF"; waiting ones have "->" before FLOCK
            fields = line.split()
            if len(fields) > 5 and fields[1] == "FLOCK" and fields[5] == device:
                pids.add(int(fields[4]))
    known = ", ".join(str(pid) for pid in sorted(pids) if pid > 0)
    return f" (pid {known})" if known else ""
