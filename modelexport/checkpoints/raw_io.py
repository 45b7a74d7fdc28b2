"""Bytes between tensors and files: positional reads and writes of rectangles, and the Linux calls around it.

Why not simply ``pread`` and ``pwrite``: a column shard of a matrix is thousands of short segments. A strided copy
through a short-lived mapping of a few MiB read 2 to 4 KiB segments at 12 to 14 GB/s, one system call for each at
1.6 to 3.7; of a file not in the page cache the mapping brought in 2.3 GB/s, the calls 0.2. Writing, with several
processes at once, the mapping was up to four times as fast, and never much slower.

So whole rows go through one ``preadv`` / ``pwrite`` and narrow columns through a mapping, where that cannot end in
SIGBUS: for reading it is populated first (``MADV_POPULATE_READ``, Linux 5.14), so that a disk error or a file cut
short is an error code; for writing the file's blocks must be reserved, so that the disk cannot be full.
Elsewhere the segments go one by one.

Everything here raises plain :class:`OSError`; the callers know the tensor's name and make a
:class:`~modelexport.errors.CheckpointError` of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import shutil
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelexport.errors import CheckpointError
from modelexport.system.limits import file_size_limit
from modelexport.system.run_log import READ, WRITTEN

if TYPE_CHECKING:
    import numpy as np
    import torch
    from typing_extensions import TypeIs

    Array = np.ndarray | torch.Tensor

MAPPED_BLOCK = 8 << 20
"""Bytes of a file that are mapped at once."""
JOINED_BLOCK = 512 << 10
"""Bytes that are brought together for one write; they should stay in the cache meanwhile."""
WIDE_SEGMENT = 64 << 10
"""From this many bytes on, one system call per segment costs nothing against its copy."""
WIDE_PITCH = 256 << 10
"""From this many bytes between segments on, it costs less than populating the pages between them."""
ONE_CALL = 1 << 30
"""Linux moves at most 2 GiB - 4 KiB in one read or write."""

_POPULATE_READ = 22
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_RENAME_NOREPLACE, _RENAME_EXCHANGE = 1, 2
_SYNC_FILE_RANGE_WRITE = 2
_AT_FDCWD = -100
# File systems of this machine alone, on which a shared mapping and pwrite see the same pages. On NFS two
# hosts that dirty one page through mappings write back the whole page each, and the later one wins.
_LOCAL_FILE_SYSTEMS = frozenset(
    {0xEF53, 0x58465342, 0x9123683E, 0x01021994, 0x794C7630, 0xF2F52010, 0x2FC12FC1}
)  # ext2/3/4, xfs, btrfs, tmpfs, overlayfs, f2fs, zfs
_UNSUPPORTED = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@lru_cache(maxsize=1)
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    off = ctypes.c_int64
    prototypes = {
        "fallocate": [ctypes.c_int, ctypes.c_int, off, off],
        "sync_file_range": [ctypes.c_int, off, off, ctypes.c_uint],
        "renameat2": [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint],
        "fstatfs": [ctypes.c_int, ctypes.c_void_p],
    }
    for name, argtypes in prototypes.items():
        function = getattr(libc, name, None)
        if function is not None:
            function.argtypes = argtypes
            function.restype = ctypes.c_int
    return libc


def _call(name: str, *args: Any) -> None:
    """Call a libc function that returns 0 or -1; a missing one counts as ENOSYS."""
    function = getattr(_libc(), name, None)
    if function is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    while function(*args) != 0:
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


def allocate(fd: int, size: int) -> bool:
    """Give the file ``size`` bytes of disk now, so that a full disk is known before any work is done.

    Not ``os.posix_fallocate``: glibc emulates that by a write into every block where the file system has no
    such call. There the file is only given its size. Writing into allocated blocks is also 1.5 times faster.

    Returns:
        Whether the blocks are really reserved.
    """
    if size == 0:
        return True
    try:
        _call("fallocate", fd, 0, 0, size)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        os.ftruncate(fd, size)
        return False
    return True


def reserve(fd: int, size: int) -> bool:
    """Takes ``size`` bytes of disk, or of memory, for a file that keeps its length; False where none can be taken so.

    Raises:
        OSError: there is no room.
    """
    try:
        _call("fallocate", fd, _KEEP_SIZE, 0, size)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        return False
    return True


def punch_hole(fd: int, offset: int, length: int) -> bool:
    """Give the disk back what a part of a file takes, which then reads as zeros; False where the file system cannot."""
    try:
        _call("fallocate", fd, _PUNCH_HOLE | _KEEP_SIZE, offset, length)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        return False
    return True


def begin_writeback(fd: int, offset: int, length: int) -> None:
    """Ask the kernel to start writing these pages to disk, without waiting for them, where it can."""
    with contextlib.suppress(OSError):  # an optimisation: the error, if it is one, comes back from fsync
        _call("sync_file_range", fd, offset, length, _SYNC_FILE_RANGE_WRITE)


def rename_exchange(a: Path, b: Path) -> bool:
    """Swap two names in one step; False where the file system cannot."""
    return _renameat2(a, b, _RENAME_EXCHANGE)


def rename_no_replace(source: Path, target: Path) -> bool:
    """Rename unless ``target`` exists (FileExistsError); False where the file system cannot promise that."""
    return _renameat2(source, target, _RENAME_NOREPLACE)


def _renameat2(source: Path, target: Path, flags: int) -> bool:
    try:
        _call("renameat2", _AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flags)
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            return False
        raise
    return True


def can_map_for_writing(fd: int) -> bool:
    """Returns whether a mapping may be written instead of ``pwrite``: all blocks reserved, on a disk of this
    machine."""
    status = os.fstat(fd)
    return status.st_blocks * 512 >= status.st_size and _is_local(fd)


def _is_local(fd: int) -> bool:
    buffer = (ctypes.c_long * 32)()  # struct statfs begins with the type as a long
    try:
        _call("fstatfs", fd, ctypes.addressof(buffer))
    except OSError:
        return False
    return (buffer[0] & 0xFFFFFFFF) in _LOCAL_FILE_SYSTEMS


def disk_full(path: Path, needed: int, error: OSError) -> CheckpointError:
    """The error for a write that found no room: what was needed, what is free or allowed, what to do."""
    limit = file_size_limit()
    if error.errno == errno.EFBIG and limit is not None:
        return CheckpointError(
            f"{path}: {needed:,} bytes are needed, and ulimit -f lets this process write files of {limit:,}: type "
            "ulimit -f unlimited, then run the same command again"
        )
    try:
        free = f"{shutil.disk_usage(path.parent).free:,} bytes are free on its file system"
    except OSError:
        free = "the free space could not be read"
    return CheckpointError(
        f"{path}: no room for {needed:,} bytes ({error.strerror}); {free}. "
        "Free some space or choose an --out elsewhere, then run the same command again"
    )


def empty(shape: Sequence[int], itemsize: int) -> np.ndarray:
    """Room for elements of a size, whatever they mean: bytes that only move need no torch, and no dtype."""
    import numpy as np

    return np.empty(tuple(shape), np.dtype(f"u{itemsize}" if itemsize in (1, 2, 4, 8) else f"V{itemsize}"))


def geometry(array: Array) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Shape, bytes from one element to the next along each dim, and bytes of an element."""
    if _is_numpy(array):
        return array.shape, array.strides, array.itemsize
    size = array.element_size()
    return tuple(array.shape), tuple(stride * size for stride in array.stride()), size


def _is_numpy(array: Array) -> TypeIs[np.ndarray]:
    return not hasattr(array, "data_ptr")  # without importing torch


def _address(array: Array) -> int:
    return array.ctypes.data if _is_numpy(array) else array.data_ptr()


def contiguous(array: Array) -> Array:
    """The array itself, or a copy whose elements lie in row-major order without gaps."""
    if not _is_numpy(array):
        return array.contiguous()
    import numpy as np

    return np.ascontiguousarray(array) if array.ndim else array


def row_bytes(array: Array, inner_dim: int) -> np.ndarray | None:
    """The memory of a CPU tensor as uint8 ``[rows, segment]``, without a copy, strided by row where it is.

    Dimensions from ``inner_dim`` on form the segment and must be contiguous; those before it are the rows and
    must have one common stride. Returns None where the tensor's strides are not so. The array does not keep
    the tensor alive.
    """
    import numpy as np

    shape, strides, segment = geometry(array)
    for length, stride in zip(reversed(shape[inner_dim:]), reversed(strides[inner_dim:]), strict=True):
        if length != 1 and stride != segment:
            return None
        segment *= length
    rows, pitch = 1, 0
    for length, stride in zip(reversed(shape[:inner_dim]), reversed(strides[:inner_dim]), strict=True):
        if length == 1:
            continue
        if rows == 1:
            pitch = stride
        elif stride != rows * pitch:
            return None
        rows *= length
    if rows <= 1 or pitch == 0:
        if rows > 1:  # an expanded tensor: one row seen many times
            return None
        pitch = segment
    if rows * segment == 0:
        return np.empty((rows, segment), np.uint8)
    if pitch < segment:
        return None
    span = (rows - 1) * pitch + segment
    memory = memoryview((ctypes.c_uint8 * span).from_address(_address(array)))
    return np.ndarray((rows, segment), np.uint8, memory, 0, (pitch, 1))


def same_bytes(a: Array, b: Array) -> bool:
    """Returns whether two arrays in memory hold the same bytes in row-major order.

    ``torch.equal`` takes seven times as long, and finds that NaN is not NaN and that -0 is 0.
    """
    if a.nbytes != b.nbytes:
        return False
    a, b = contiguous(a), contiguous(b)
    left, right = ctypes.c_void_p(_address(a)), ctypes.c_void_p(_address(b))
    return _libc().memcmp(left, right, ctypes.c_size_t(a.nbytes)) == 0


def read_exactly(fd: int, view: memoryview, offset: int) -> int:
    """Fill ``view`` from the file at ``offset``; returns the bytes got, fewer only at the end of the file."""
    done, total = 0, len(view)
    while done < total:
        got = os.preadv(fd, [view[done : done + ONE_CALL]], offset + done)
        if got == 0:
            break
        done += got
        READ.add(got)
    return done


def write_exactly(fd: int, view: memoryview, offset: int) -> None:
    """Write all of ``view`` at ``offset``, however many calls it takes."""
    done, total = 0, len(view)
    while done < total:
        written = os.pwrite(fd, view[done : done + ONE_CALL], offset + done)
        if written == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done += written
        WRITTEN.add(written)


def read_rows(fd: int, memory: np.ndarray, offset: int, pitch: int) -> int:
    """Read ``memory.shape[0]`` segments, ``pitch`` bytes apart in the file, the first at ``offset``.

    Returns:
        The bytes read; fewer than ``memory.size`` only where the file ends early.
    """
    rows, segment = memory.shape
    if memory.size == 0:
        return 0
    if rows == 1 or (pitch == segment and memory.flags.c_contiguous):
        return read_exactly(fd, memory.reshape(-1).data, offset)
    done = 0
    if segment < WIDE_SEGMENT and pitch < WIDE_PITCH and _end(memory, offset, pitch) <= os.fstat(fd).st_size:
        done = _through_mapping(fd, memory, offset, pitch, write=False)
    total = done * segment
    for row in range(done, rows):
        got = read_exactly(fd, memory[row].data, offset + row * pitch)
        total += got
        if got < segment:
            break
    return total


def write_rows(fd: int, memory: np.ndarray, offset: int, pitch: int, *, mappable: bool) -> None:
    """Write the rows of ``memory`` into the file, ``pitch`` bytes apart, the first at ``offset``.

    Bytes between the segments are never touched, so that several processes may fill one page, each its part.
    ``mappable``: what :func:`can_map_for_writing` says of the file.
    """
    rows, segment = memory.shape
    if memory.size == 0:
        return
    if pitch == segment or rows == 1:
        write_joined(fd, [memory], offset)
        return
    done = 0
    if mappable and segment < WIDE_SEGMENT and _end(memory, offset, pitch) <= os.fstat(fd).st_size:
        done = _through_mapping(fd, memory, offset, pitch, write=True)
    for row in range(done, rows):
        write_exactly(fd, memory[row].data, offset + row * pitch)


def _end(memory: np.ndarray, offset: int, pitch: int) -> int:
    return offset + (memory.shape[0] - 1) * pitch + memory.shape[1]


def write_joined(fd: int, columns: Sequence[np.ndarray], offset: int) -> None:
    """Write rows whose columns lie in several places of memory, uint8 ``[rows, segment i]``, side by side.

    They are brought together a cache-sized block of rows at a time: 7 GB/s, where a write for each segment
    reaches a tenth of that.
    """
    import numpy as np

    if len(columns) == 1 and columns[0].flags.c_contiguous:
        write_exactly(fd, columns[0].reshape(-1).data, offset)
        return
    rows, width = columns[0].shape[0], sum(column.shape[1] for column in columns)
    scratch = np.empty((min(rows, max(1, JOINED_BLOCK // width)), width), np.uint8)
    for row in range(0, rows, len(scratch)):
        block = scratch[: rows - row]
        at = 0
        for column in columns:
            np.copyto(block[:, at : at + column.shape[1]], column[row : row + len(block)])
            at += column.shape[1]
        write_exactly(fd, block.reshape(-1).data, offset + row * width)


def _through_mapping(fd: int, memory: np.ndarray, offset: int, pitch: int, *, write: bool) -> int:
    """Copy rows through mappings of the file; returns how many rows were done before one was refused."""
    rows, segment = memory.shape
    step = max(1, MAPPED_BLOCK // pitch)
    for row in range(0, rows, step):
        part = memory[row : row + step]
        start = offset + row * pitch
        page = start - start % mmap.ALLOCATIONGRANULARITY
        length = start - page + (len(part) - 1) * pitch + segment
        access = mmap.PROT_READ | mmap.PROT_WRITE if write else mmap.PROT_READ
        try:
            mapping = mmap.mmap(fd, length, flags=mmap.MAP_SHARED, prot=access, offset=page)
        except (OSError, ValueError):  # no mappings on this file system, or the file is shorter than that
            return row
        with contextlib.closing(mapping):
            try:
                if not write:
                    mapping.madvise(_POPULATE_READ)
            except OSError:  # an old kernel or a bad sector: the plain calls say which
                return row
            _copy_mapped(mapping, part, start - page, pitch, write=write)
        (WRITTEN if write else READ).add(part.size)
    return rows


def _copy_mapped(mapping: mmap.mmap, memory: np.ndarray, start: int, pitch: int, *, write: bool) -> None:
    import numpy as np

    # A function of its own: the array must be gone before the mapping is closed.
    flat = np.frombuffer(mapping, np.uint8)[start:]
    mapped = np.lib.stride_tricks.as_strided(flat, memory.shape, (pitch, 1), writeable=write)
    if write:
        np.copyto(mapped, memory)
    else:
        np.copyto(memory, mapped)
