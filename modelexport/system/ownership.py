"""The owners of files and directories that a run takes up again, or that its ranks exchange.

Whoever may write a directory can put files there: what a run reads as its own must be this user's. On file servers that
give all files to one user (``all_squash``) this user's files have that owner; those of others cannot be told from them.
"""

from __future__ import annotations

import os
import secrets
import stat

__all__ = ["OWNED_MODE", "ForeignError", "check_own_directory", "check_own_file"]

OWNED_MODE = 0o700
"""Permissions of directories that are for one run's processes alone."""
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class ForeignError(OSError):
    """Another user owns a file or a directory, or may write it; the message says who, and which permissions it has."""


def check_own_directory(path: str | os.PathLike[str], *, private: bool) -> int:
    """Checks that a directory is this user's, and no link.

    Args:
        private: whether nobody else may write it, either.

    Returns:
        The owner that this user's files have there.

    Raises:
        ForeignError: it is not.
        OSError: it cannot be looked at.
    """
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode):
        raise ForeignError(f"{os.fspath(path)} is no directory, or a link to one")
    owner = os.geteuid()
    if status.st_uid != owner and os.access(path, os.W_OK):
        owner = _owner_of_new_files(path)
    _check(path, status, owner, private=private)
    return owner


def check_own_file(fd: int, path: str | os.PathLike[str], owner: int) -> os.stat_result:
    """Checks that an open file is regular, has an owner and is written by nobody else; returns its status.

    Raises:
        ForeignError: it is not.
    """
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise ForeignError(f"{os.fspath(path)} is no regular file")
    _check(path, status, owner, private=True)
    return status


def _check(path: str | os.PathLike[str], status: os.stat_result, owner: int, *, private: bool) -> None:
    if status.st_uid != owner:
        raise ForeignError(f"{os.fspath(path)} belongs to user {status.st_uid}, and this is user {owner}")
    if private and status.st_mode & _WRITABLE_BY_OTHERS:
        mode = stat.S_IMODE(status.st_mode)
        raise ForeignError(f"{os.fspath(path)} may be written by other users (its permissions are {mode:o})")


def _owner_of_new_files(path: str | os.PathLike[str]) -> int:
    probe = os.path.join(path, f".{secrets.token_hex(8)}")
    fd = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        return os.fstat(fd).st_uid
    finally:
        os.close(fd)
        os.unlink(probe)
