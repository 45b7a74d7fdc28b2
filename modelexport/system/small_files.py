"""Files that are read whole, and files that are written whole: the one place that opens paths that users give.

A path may lead anywhere: in a downloaded directory ``config.json`` may be a link to ``/dev/zero`` or a named pipe,
and ``--html`` may name a device. Reading therefore takes regular files alone, found out from the open descriptor, and
of small files no more than a limit. Writing replaces a regular file in one step, the one that a link leads to; what is
no file but takes bytes, a pipe or a terminal, is written into.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from io import BufferedReader
from pathlib import Path
from typing import Any

from modelexport.errors import CheckpointError, ModelExportError, UsageError

__all__ = [
    "LARGEST_CONFIG",
    "LARGEST_JSON",
    "check_place",
    "check_regular",
    "file_sha256",
    "has_file",
    "is_failing",
    "open_regular",
    "read_at",
    "read_json",
    "read_small",
    "remove_temporary",
    "write_small",
]

LARGEST_JSON = 256 << 20
"""Bytes of an index or a record: a million tensors of 100 to 200 bytes each, which no model known has."""
LARGEST_CONFIG = 16 << 20
"""Bytes of a config.json or a recipe: one line for each of a hundred thousand modules."""

_CHUNK = 1 << 20
_TEMPORARY = ".modelexport-"
_FAILING = frozenset({errno.EIO, errno.ENOMEM, errno.EMFILE, errno.ENFILE})
_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
    (stat.S_ISSOCK, "a socket"),
)


def has_file(directory: Path, name: str) -> bool:
    """Returns whether a directory lists a file of that name, readable or not (opening it raises the error)."""
    return os.path.lexists(directory / name) and not (directory / name).is_dir()


def open_regular(
    path: str | os.PathLike[str],
    *,
    largest: int | None = None,
    label: str | None = None,
    error: type[ModelExportError] = CheckpointError,
) -> BufferedReader:
    """Opens a regular file for reading. Links are followed; pipes and devices are neither waited for nor read.

    Args:
        largest: the most bytes that it may have; None: any number.
        label: what an error calls the file; its path where None.
        error: the kind of error: a :class:`UsageError` for a file that the user named.

    Raises:
        ModelExportError: of the kind ``error``: there is none, it is no regular file, or is larger.
    """
    label = label or os.fspath(path)
    try:
        # O_NONBLOCK: opening a named pipe waits for its writer otherwise; regular files ignore it.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except (OSError, ValueError) as reason:
        raise error(f"{label}: cannot be read: {_reason(reason)}") from reason
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise error(f"{label}: {_described(path, status)}; a regular file is needed in its place")
        if largest is not None and status.st_size > largest:
            raise error(_too_large(label, status.st_size, largest))
        return os.fdopen(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def check_regular(
    path: str | os.PathLike[str],
    *,
    largest: int | None = None,
    label: str | None = None,
    error: type[ModelExportError] = CheckpointError,
) -> None:
    """Refuses a file that :func:`open_regular` would refuse, before a library of others opens it.

    Raises:
        ModelExportError: as :func:`open_regular`.
    """
    open_regular(path, largest=largest, label=label, error=error).close()


def read_small(
    path: str | os.PathLike[str],
    *,
    largest: int = LARGEST_JSON,
    label: str | None = None,
    error: type[ModelExportError] = CheckpointError,
) -> bytes:
    """The content of a regular file of at most ``largest`` bytes; arguments as for :func:`open_regular`.

    Raises:
        ModelExportError: of the kind ``error``: it cannot be read, is no regular file, or is larger.
    """
    label = label or os.fspath(path)
    with open_regular(path, largest=largest, label=label, error=error) as file:
        content = bytearray()
        try:
            while piece := file.read(_CHUNK):
                content += piece
                if len(content) > largest:  # it grew, or is one whose size the system does not tell
                    raise error(_too_large(label, len(content), largest))
        except OSError as reason:
            raise error(f"{label}: cannot be read: {_reason(reason)}") from reason
    return bytes(content)


def read_at(fd: int, count: int, offset: int) -> bytes:
    """``count`` bytes of a file from ``offset`` on, however many calls they take; fewer only where the file ends.

    Raises:
        OSError: they cannot be read.
    """
    content = os.pread(fd, count, offset)
    while len(content) < count and (piece := os.pread(fd, count - len(content), offset + len(content))):
        content += piece
    return content


def is_failing(error: BaseException) -> bool:
    """Returns whether a file could not be read since the disk or the process fails, whatever the file may be: no
    reason to go on as if there were none."""
    reason = error if isinstance(error, OSError) else error.__cause__
    return isinstance(reason, OSError) and reason.errno in _FAILING


def read_json(path: Path, *, largest: int = LARGEST_JSON) -> dict[str, Any]:
    """The JSON object in a regular file of at most ``largest`` bytes.

    Raises:
        CheckpointError: it cannot be read, is larger, is not JSON, or holds something else than an object.
    """
    content = read_small(path, largest=largest)
    try:
        parsed = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not valid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, holds a {type(parsed).__name__}")
    return parsed


def file_sha256(path: Path) -> str:
    """The SHA-256 of a regular file of any size, in hexadecimal.

    Raises:
        CheckpointError: it cannot be read.
    """
    import hashlib  # which takes as long as the rest of --help's imports from here

    digest = hashlib.sha256()
    with open_regular(path) as file:
        try:
            while piece := file.read(_CHUNK):
                digest.update(piece)
        except OSError as reason:
            raise CheckpointError(f"{path}: cannot be read: {_reason(reason)}") from reason
    return digest.hexdigest()


# ------------------------------------------------------------------ writing


def check_place(
    path: str | os.PathLike[str], *, label: str | None = None, error: type[ModelExportError] = UsageError
) -> None:
    """Refuses a path that :func:`write_small` could not write to, before what is to be written is worked out.

    Raises:
        ModelExportError: of the kind ``error``.
    """
    _place(path, label or os.fspath(path), error)


def write_small(
    path: str | os.PathLike[str],
    content: bytes,
    *,
    label: str | None = None,
    error: type[ModelExportError] = UsageError,
) -> None:
    """Writes a file whole: at any time it has its old content or the new one, and keeps its permissions.

    A link is followed: the file that it leads to is replaced. A named pipe (that somebody reads) and a character
    device are written into.

    Args:
        label: what an error calls the file, such as ``--html PATH``; its path where None.
        error: the kind of error.

    Raises:
        ModelExportError: of the kind ``error``: a directory, a socket, a block device, a pipe without a reader; no
            room, or no right to write there. Nothing is left behind.
    """
    label = label or os.fspath(path)
    status = _place(path, label, error)
    try:
        if status is None or stat.S_ISREG(status.st_mode):
            _replace(Path(os.path.realpath(path)), content, None if status is None else stat.S_IMODE(status.st_mode))
        else:
            _write_into(path, content)
    except OSError as reason:
        if reason.errno == errno.ENXIO and status is not None and stat.S_ISFIFO(status.st_mode):
            raise error(f"{label}: is a named pipe that no process reads; start its reader first") from reason
        raise error(f"{label}: cannot be written: {_reason(reason)}") from reason


def _place(path: str | os.PathLike[str], label: str, error: type[ModelExportError]) -> os.stat_result | None:
    """The status of the path where a file is to be written; None where there is nothing yet."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        status = None
    except (OSError, ValueError) as reason:
        raise error(f"{label}: cannot be written: {_reason(reason)}") from reason
    if status is None:
        parent = Path(os.path.realpath(path)).parent
        if not parent.is_dir():
            raise error(f"{label}: there is no directory {parent}; make it first")
    elif stat.S_ISDIR(status.st_mode):
        raise error(f"{label}: is a directory; name a file in it")
    elif not (stat.S_ISREG(status.st_mode) or stat.S_ISFIFO(status.st_mode) or stat.S_ISCHR(status.st_mode)):
        raise error(f"{label}: {_described(path, status)}, which no file is written to; name a file")
    return status


def _replace(path: Path, content: bytes, mode: int | None) -> None:
    import secrets

    temporary = path.with_name(f"{_TEMPORARY}{secrets.token_hex(8)}")  # without path's name, which may be a long one
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with os.fdopen(fd, "wb") as file:
            file.write(content)
            file.flush()
            if mode is not None:
                os.fchmod(fd, mode)
            os.fsync(fd)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def remove_temporary(directory: Path) -> None:
    """Removes the files that :func:`write_small`, of a process that was killed in it, has left below a directory.

    Raises:
        OSError: they cannot be removed.
    """
    for path in directory.rglob(f"{_TEMPORARY}{'[0-9a-f]' * 16}"):
        path.unlink(missing_ok=True)


def _write_into(path: str | os.PathLike[str], content: bytes) -> None:
    # Without O_NONBLOCK, opening a pipe waits for a reader, perhaps for ever.
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK)
    with os.fdopen(fd, "wb") as file:
        os.set_blocking(fd, True)
        file.write(content)


def _described(path: str | os.PathLike[str], status: os.stat_result) -> str:
    """``is a link to /dev/zero, a character device``"""
    kind = next((name for is_kind, name in _KINDS if is_kind(status.st_mode)), "something else")
    return f"is a link to {os.path.realpath(path)}, {kind}" if os.path.islink(path) else f"is {kind}"


def _too_large(label: str, size: int, largest: int) -> str:
    return f"{label}: {size:,} bytes, at most {largest:,} are read: it is no such file, or is damaged"


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
