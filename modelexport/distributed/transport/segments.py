"""Anonymous files that ranks map together: how they are made, reserved, sealed, and mapped by the other side.

See :mod:`modelexport.distributed.transport.memory` for what they are used for.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import mmap
import os
import secrets
import tempfile
import threading

import torch

from modelexport.errors import GatherError
from modelexport.system.limits import advice

__all__ = ["Mapping", "Segment", "open_segment", "reserve"]

# Linux's fcntl numbers; Python names them from 3.14 on.
_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW = 0x1, 0x2, 0x4
_SEALS = _F_SEAL_SEAL | _F_SEAL_SHRINK | _F_SEAL_GROW
_RESERVE_STEP = 1 << 20
_RESERVE_CHUNK = 64 << 20  # a signal interrupts one call's work, not all of it

RESIDENT_BYTES = 256 << 20  # of other processes' memory that may stay entered in this one's page tables

_numbers = itertools.count(1)
_resident_total = 0
_resident_lock = threading.RLock()  # __del__ may run inside our own locked code


class Segment:
    """A sparse anonymous file of ``size`` bytes, mapped whole and shared.

    Attributes:
        number: names it between two processes; unique within this one.
        fd: its descriptor, to be passed on.
        sealed: it can neither shrink nor grow (a memfd; not so for the fallback file).
        memory: the mapping. It is never unmapped by hand: it ends with the last view of it.
        address: where it is mapped.
    """

    def __init__(self, fd: int, size: int, sealed: bool) -> None:
        self.number = next(_numbers)
        self.size, self.sealed = size, sealed
        self._map = mmap.mmap(fd, size)
        self.fd = fd  # ours to close from here on
        self.memory = memoryview(self._map)
        self.address = torch.frombuffer(self.memory, dtype=torch.uint8).data_ptr()

    def __del__(self) -> None:
        fd, self.fd = getattr(self, "fd", -1), -1
        if fd >= 0:
            os.close(fd)


def open_segment(size: int) -> Segment:
    """A new segment of ``size`` bytes of address space; no page of it exists yet. Raises OSError."""
    fd, memfd = _anonymous_file()
    try:
        os.ftruncate(fd, size)
        if memfd:
            fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)
        return Segment(fd, size, memfd)
    except OSError:
        os.close(fd)
        raise


def _anonymous_file() -> tuple[int, bool]:
    if hasattr(os, "memfd_create") and os.environ.get("MODELEXPORT_SHM", "memfd") != "file":
        try:
            return os.memfd_create("modelexport", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), True
        except OSError as error:
            if error.errno not in (
                errno.ENOSYS,
                errno.EPERM,
                errno.EACCES,
            ):  # an old kernel, a strict sandbox
                raise
    directory = _file_directory()
    if hasattr(os, "O_TMPFILE"):
        try:
            return os.open(directory, os.O_RDWR | os.O_TMPFILE | os.O_EXCL | os.O_CLOEXEC, 0o600), False
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
                raise
    path = os.path.join(directory, f".modelexport-{secrets.token_hex(16)}")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    os.unlink(path)
    return fd, False


def _file_directory() -> str:
    chosen = os.environ.get("MODELEXPORT_SHM_DIR")
    if chosen:
        return chosen
    return "/dev/shm" if os.access("/dev/shm", os.W_OK | os.X_OK) else tempfile.gettempdir()


def reserve(segment: Segment, start: int, end: int) -> int:
    """Makes the pages from ``start`` to at least ``end`` exist; returns how many bytes were added.

    Raises:
        GatherError: there is no room for them.
    """
    wanted = min(-(-end // _RESERVE_STEP) * _RESERVE_STEP, segment.size)
    offset = start
    while offset < wanted:
        count = min(_RESERVE_CHUNK, wanted - offset)
        try:
            os.posix_fallocate(segment.fd, offset, count)
        except OSError as error:
            raise GatherError(_no_room(segment, wanted - start, error)) from error
        offset += count
    return wanted - start


def _no_room(segment: Segment, nbytes: int, error: OSError) -> str:
    text = f"no room for {nbytes} more bytes of gather buffers: {error.strerror}"
    if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
        where = "memory"
        if not segment.sealed:
            info = os.fstatvfs(segment.fd)
            where = f"{_file_directory()}, where {info.f_bavail * info.f_frsize} bytes are free"
        return (
            f"{text} in {where}; make room there (for a container: --shm-size), set MODELEXPORT_GATHER_BUFFERS=1, "
            "or gather through a directory (--gather nfs --workspace DIR)"
        )
    return text + advice(error)


class Mapping:
    """Another process's segment, mapped here.

    The descriptor is consumed. Received tensors are views of the mapping, which lasts as long as any of them.

    Raises:
        GatherError: the file is shorter than announced, or could still shrink (reading past its end is SIGBUS).
    """

    def __init__(self, fd: int, size: int, sealed: bool) -> None:
        try:
            found = os.fstat(fd).st_size
            if found != size or not size:
                raise GatherError(f"a shared segment has {found} bytes, {size} were announced")
            if sealed and fcntl.fcntl(fd, _F_GET_SEALS) & _SEALS != _SEALS:
                raise GatherError("a shared segment was announced as sealed and is not")
            self._map = mmap.mmap(fd, size)
        except OSError as error:
            what = f"cannot map a shared segment of {size} bytes: {error.strerror}{advice(error)}"
            raise GatherError(what) from error
        finally:
            os.close(fd)
        self.size = size
        self.memory = memoryview(self._map)
        self._resident = 0

    def view(self, offset: int, nbytes: int) -> memoryview:
        if offset < 0 or nbytes < 0 or offset + nbytes > self.size:
            raise GatherError(f"bytes {offset}..{offset + nbytes} lie outside of a shared segment of {self.size}")
        return self.memory[offset : offset + nbytes]

    def consumed(self, end: int) -> None:
        """Counts pages up to ``end`` as read here; drops this mapping's when all mappings' exceed a limit.

        Only this process's page table entries go, the bytes stay in the sender's memory: otherwise all that senders
        ever had in flight would count as resident in the first rank too. Entering the pages anew costs more than
        reading them, so little is left as it is.
        """
        total = self._account(max(0, end - self._resident))
        if total > RESIDENT_BYTES:
            self._map.madvise(mmap.MADV_DONTNEED)
            self._account(-self._resident)

    def _account(self, change: int) -> int:
        global _resident_total
        with _resident_lock:
            self._resident += change
            _resident_total += change
            return _resident_total

    def __del__(self) -> None:
        if getattr(self, "_resident", 0):
            self._account(-self._resident)
