"""What somebody named may be anything: only regular files are read, and only what takes bytes is written into."""

from __future__ import annotations

import errno
import os
import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from modelexport.errors import CheckpointError, UsageError
from modelexport.system.small_files import (
    check_place,
    file_sha256,
    is_failing,
    open_regular,
    read_at,
    read_json,
    read_small,
    write_small,
)

pytestmark = pytest.mark.timeout(30)


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def zeros_without_end(path: Path) -> None:
    path.symlink_to("/dev/zero")


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


STRANGE = {
    a_pipe: "is a named pipe; a regular file is needed",
    zeros_without_end: "is a link to /dev/zero, a character device",
    Path.mkdir: "is a directory; a regular file is needed",
    a_socket: "cannot be read: No such device or address",
}


@pytest.mark.parametrize(("make", "reason"), STRANGE.items())
@pytest.mark.parametrize("read", [open_regular, read_small, read_json, file_sha256])
def test_only_regular_files_are_read(
    tmp_path: Path, make: Callable[[Path], None], reason: str, read: Callable[[Path], object]
) -> None:
    make(tmp_path / "file")
    with pytest.raises(CheckpointError, match=f"file: {reason}"):
        read(tmp_path / "file")


def test_a_file_behind_links_is_read_and_a_larger_one_is_not(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"12345678")
    (tmp_path / "link").symlink_to("blob")
    (tmp_path / "outer").symlink_to("link")
    assert read_small(tmp_path / "outer", largest=8) == b"12345678"
    with pytest.raises(UsageError, match=r"outer: 8 bytes, at most 7 are read"):
        read_small(tmp_path / "outer", largest=7, error=UsageError)


def test_a_file_whose_size_is_not_told_is_bounded_all_the_same() -> None:
    status = Path("/proc/self/status")
    assert status.stat().st_size == 0
    assert b"VmRSS" in read_small(status)
    with pytest.raises(CheckpointError, match="at most 10 are read"):
        read_small(status, largest=10)


def test_writing_follows_links_and_keeps_permissions(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"old")
    target.chmod(0o640)
    (tmp_path / "link").symlink_to("target")
    write_small(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (target.read_bytes(), stat.S_IMODE(target.stat().st_mode)) == (b"new", 0o640)
    (tmp_path / "dangling").symlink_to("not yet")
    write_small(tmp_path / "dangling", b"made")
    assert (tmp_path / "not yet").read_bytes() == b"made"
    assert {path.name for path in tmp_path.iterdir()} == {"target", "link", "dangling", "not yet"}


def test_a_pipe_is_written_into_where_somebody_reads_it(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(UsageError, match="--html PIPE: is a named pipe that no process reads"):
        write_small(pipe, b"page", label="--html PIPE")
    page = bytes(range(256)) * 1024  # more than a pipe holds
    got: list[bytes] = []
    fd = os.open(pipe, os.O_RDWR)  # a reader that waits, even while nobody writes
    with open(fd, "rb") as file:
        reader = threading.Thread(target=lambda: got.append(file.read(len(page))))
        reader.start()
        write_small(pipe, page)
        reader.join()
    assert got == [page]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a device")
def test_a_device_is_written_into_and_stays_one(tmp_path: Path) -> None:
    for name, minor in (("full", 7), ("null", 3)):
        try:
            os.mknod(tmp_path / name, 0o600 | stat.S_IFCHR, os.makedev(1, minor))
        except PermissionError:
            pytest.skip("this root makes no devices")
    with pytest.raises(UsageError, match="full: cannot be written: No space left on device"):
        write_small(tmp_path / "full", b"page")
    write_small(tmp_path / "null", b"page")
    assert all(stat.S_ISCHR(path.lstat().st_mode) for path in tmp_path.iterdir())
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Path.mkdir, "out: is a directory; name a file in it"),
        (a_socket, "out: is a socket, which no file is written to"),
        (lambda path: path.symlink_to("out"), "out: cannot be written: Too many levels of symbolic links"),
        (lambda path: path.symlink_to("gone/away"), "there is no directory .*gone"),
    ],
)
def test_what_takes_no_file_is_refused_before_and_after_the_work(
    tmp_path: Path, make: Callable[[Path], None], reason: str
) -> None:
    make(tmp_path / "out")
    before = (tmp_path / "out").lstat()
    with pytest.raises(UsageError, match=reason):
        check_place(tmp_path / "out")
    with pytest.raises(UsageError, match=reason):
        write_small(tmp_path / "out", b"page")
    assert os.path.samestat((tmp_path / "out").lstat(), before)


def test_a_write_that_fails_leaves_the_old_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"old")

    def no_room(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", no_room)
    with pytest.raises(CheckpointError, match="No space left"):
        write_small(tmp_path / "file", b"new", error=CheckpointError)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]


def test_reading_at_a_place_takes_as_many_calls_as_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pread = os.pread
    (tmp_path / "file").write_bytes(b"0123456789")
    monkeypatch.setattr(os, "pread", lambda fd, count, offset: pread(fd, min(count, 2), offset))
    with open_regular(tmp_path / "file") as file:
        assert read_at(file.fileno(), 5, 3) == b"34567"
        assert read_at(file.fileno(), 9, 6) == b"6789"


def test_a_disk_that_fails_is_told_from_a_file_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError) as absent:
        read_small(tmp_path / "none")
    assert not is_failing(absent.value)
    (tmp_path / "file").write_bytes(b"something")

    def refuse(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(CheckpointError) as failing:
        read_small(tmp_path / "file")
    assert is_failing(failing.value)
