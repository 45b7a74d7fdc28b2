"""Files that appear whole or not at all, and payloads read back from them, both with a running CRC-32."""

from __future__ import annotations

import errno
import os
import secrets
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from modelexport.distributed.transport import memory as _memory
from modelexport.distributed.transport import payload as _payload
from modelexport.distributed.transport.payload import DamagedPayloadError
from modelexport.errors import GatherError
from modelexport.system.limits import advice
from modelexport.system.ownership import ForeignError, check_own_file
from modelexport.system.tensor_memory import tensor_bytes

__all__ = ["open_own", "read_payload", "read_whole", "write_whole"]

_CHUNK = 4 << 20  # bytes stay in the cache between being moved and being checked


def write_whole(directory: Path, name: str, parts: Sequence[bytes | torch.Tensor]) -> int:
    """Writes ``parts`` one after the other as ``directory/name``; returns their CRC-32.

    A hidden temporary file is written, fsynced, closed and renamed, and the directory fsynced.

    Raises:
        GatherError: no room, no permission, or the directory is gone; nothing is left behind.
    """
    temporary = directory / f".{name}.{secrets.token_hex(8)}.tmp"
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            crc = _write_parts(fd, parts)
            os.fsync(fd)
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # an NFS client may report a late write error only here
        os.rename(temporary, directory / name)
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        total = sum(len(part) if isinstance(part, bytes) else part.nbytes for part in parts)
        temporary.unlink(missing_ok=True)  # before the room that is left is measured
        reason = _explain(error, directory)
        raise GatherError(f"cannot write the {total} bytes of {directory / name}: {reason}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return crc


def _explain(error: OSError, directory: Path) -> str:
    text = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        info = os.statvfs(directory)
        free = info.f_bavail * info.f_frsize
        return f"{text} ({free} bytes are free there); make room, or give a larger workspace (--workspace DIR)"
    return text + advice(error)


def _write_parts(fd: int, parts: Sequence[bytes | torch.Tensor]) -> int:
    crc = 0
    for part in parts:
        # One tensor at a time: a copy made for it (a strided or a GPU tensor) is gone before the next.
        view = memoryview(part) if isinstance(part, bytes) else tensor_bytes(_payload.as_bytes(part)).data
        for start in range(0, len(view), _CHUNK):
            chunk = view[start : start + _CHUNK]
            crc = zlib.crc32(chunk, crc)
            while chunk:
                chunk = chunk[os.write(fd, chunk) :]
    return crc


def open_own(path: Path, owner: int) -> tuple[int, int]:
    """Opens a file of a rank for reading; returns the descriptor and the file's size.

    Raises:
        ForeignError: it is a link, no regular file, another user's, or written by others.
        OSError: it cannot be opened.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ForeignError(f"{path} is a link, and ranks write none") from error
        raise
    try:
        return fd, check_own_file(fd, path, owner).st_size
    except BaseException:
        os.close(fd)
        raise


def read_whole(path: Path, owner: int) -> bytes:
    """The content of a small file of a rank.

    Raises:
        ForeignError, OSError: as :func:`open_own`.
    """
    fd, _ = open_own(path, owner)
    with os.fdopen(fd, "rb") as file:
        return file.read()


def read_payload(path: Path, header_bytes: int, expected: int, crc32: int, owner: int) -> tuple[int, Any]:
    """Reads a payload of ``expected`` bytes; returns (its size on disk, its config).

    The tensors lie in the shared arena, so their memory is reused once they go. Where the size differs from what
    is expected nothing is read: (size, None).

    Raises:
        ForeignError: it is not a regular file of ``owner`` that nobody else may write.
        OSError: it cannot be opened or read.
        DamagedPayloadError: its CRC-32 is not ``crc32``, or its header makes no sense.
        GatherError: memory does not suffice.
    """
    fd, size = open_own(path, owner)
    try:
        if size != expected:
            return size, None
        if header_bytes > expected:
            raise DamagedPayloadError(f"its manifest says {header_bytes:,} bytes of a header, and {expected:,} in all")
        header = memoryview(bytearray(header_bytes))
        crc = _read_into(fd, header, 0, 0)
        text, entries = _payload.parse_header(header)
        if header_bytes + (entries[-1].end if entries else 0) != expected:
            raise DamagedPayloadError(f"a payload of {expected} bytes has a header for another size")
        views = [_memory.shared_view(entry.nbytes) if entry.nbytes else None for entry in entries]
        for entry, view in zip(entries, views, strict=True):
            if view is not None:
                crc = _read_into(fd, view, header_bytes + entry.start, crc)
        if crc != crc32:
            raise DamagedPayloadError(f"its {size} bytes have CRC-32 {crc:08x}, its manifest says {crc32:08x}")
        return size, _payload.unpack(text, entries, views)
    finally:
        os.close(fd)


def _read_into(fd: int, view: memoryview, offset: int, crc: int) -> int:
    done = 0
    while done < len(view):
        chunk = view[done : done + _CHUNK]
        count = os.preadv(fd, [chunk], offset + done)
        if count == 0:
            raise DamagedPayloadError(f"a payload ended at byte {offset + done} while it was read")
        crc = zlib.crc32(chunk[:count], crc)
        done += count
    return crc
