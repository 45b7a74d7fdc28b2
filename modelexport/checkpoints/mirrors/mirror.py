"""A directory that looks like a whole checkpoint, of which parts are on the disk: those that are read, for as long.

Weight files are sparse, of their full size. They are cut into chunks; one process fills these (see
:mod:`~modelexport.checkpoints.mirrors.fetching`), any number reads. Whoever opens a file in the directory reads it as
any other, once the chunks that it needs are there. Beside ``files/``, the directory, lie

- ``manifest.json``: names, sizes and ETags of the files. It is written last, and its time of change is made of its
  content: journals compare sizes and times.
- ``table``: a version for each chunk, odd where it is there; then a byte for each, set by readers that wait for it.
- ``passed``: a byte for each rank of the machine and step, set when the rank has read all that the step needs.
- ``failed``: why no more chunks will come.
- ``lock``: held by the process that fills it.

A chunk's version is counted up before it is let go, and again once it is there anew. A reader compares versions before
and after: what was let go meanwhile is read again.
"""

from __future__ import annotations

import bisect
import fcntl
import hashlib
import json
import mmap
import os
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelexport.checkpoints.staging.journal import boot_id
from modelexport.errors import CheckpointError, quoted
from modelexport.system.small_files import LARGEST_JSON, read_json, read_small, write_small

if TYPE_CHECKING:
    import numpy as np

__all__ = ["CHUNK", "Extent", "Mirror", "RemoteFile", "mirror_of", "stamped"]

CHUNK = 4 << 20
"""Bytes that come and go together."""
Extent = tuple[Path, int, int]
"""A file, and the first and the last byte but one of a part of it."""
_SHORT, _LONG = 0.002, 0.05
_CHECKED = 1.0  # seconds between looks whether anybody still fills it


@dataclass(frozen=True)
class RemoteFile:
    """A file of the mirror, and what says that it is still the same."""

    name: str
    size: int
    etag: str


class Mirror:
    """One process's view of a mirror.

    Args:
        home: holds the mirror; see the module.

    Attributes:
        directory: looks like the checkpoint's.
        files: those that are sparse.
        versions: uint32, one for each chunk.
        wanted: uint8, one for each chunk.

    Raises:
        CheckpointError: there is none.
    """

    def __init__(self, home: Path) -> None:
        import numpy as np

        self.home, self.directory = home, home / "files"
        self.files = _files(home / "manifest.json")
        self._first: dict[str, int] = {}
        count = 0
        for file in self.files:
            self._first[file.name] = count
            count += -(-file.size // CHUNK)
        table = _mapped(home / "table", 5 * count)
        self.versions: np.ndarray = np.frombuffer(table, np.uint32, count)
        self.wanted: np.ndarray = np.frombuffer(table, np.uint8, count, 4 * count)
        self._looked = time.monotonic()

    @classmethod
    def make(cls, home: Path, files: Sequence[RemoteFile], fill: Callable[[Path], None]) -> Mirror:
        """Makes a mirror, or takes up what an earlier run has left of the same files. By the holder of the lock.

        Args:
            fill: puts into the directory what is read before any chunk is: headers, and whole small files.

        Raises:
            OSError: the disk is full, or fails.
        """
        listed = [[file.name, file.size, file.etag] for file in files]
        content = {"boot": boot_id(), "chunk": CHUNK, "files": listed}
        manifest = home / "manifest.json"
        (home / "failed").unlink(missing_ok=True)
        (home / "passed").unlink(missing_ok=True)
        # After another boot of the machine the table may be on the disk, and what it says is there not.
        if not manifest.is_file() or read_json(manifest, largest=LARGEST_JSON) != content:
            manifest.unlink(missing_ok=True)
            shutil.rmtree(home / "files", ignore_errors=True)
            (home / "files").mkdir()
            for file in files:
                with open(home / "files" / file.name, "xb") as sparse:
                    sparse.truncate(file.size)
            with open(home / "table", "wb") as table:
                table.truncate(5 * sum(-(-file.size // CHUNK) for file in files))
            fill(home / "files")
            write_small(manifest, json.dumps(content).encode(), error=CheckpointError)
            stamp = int.from_bytes(hashlib.sha256(json.dumps(listed).encode()).digest()[:7])
            os.utime(manifest, ns=(stamp, stamp))
        made = cls(home)
        made.wanted[:] = 0
        return made

    def chunks(self, path: Path, start: int, stop: int) -> slice:
        """The chunks that bytes ``[start, stop)`` of a file lie in; none of another file."""
        first = self._first.get(path.name)
        if first is None or stop <= start or path.parent != self.directory:
            return slice(0, 0)
        return slice(first + start // CHUNK, first - (-stop // CHUNK))

    def place(self, chunk: int) -> tuple[RemoteFile, int]:
        """The file that a chunk is of, and its first byte there."""
        file = self.files[bisect.bisect_right(list(self._first.values()), chunk) - 1]
        return file, (chunk - self._first[file.name]) * CHUNK

    def wait(self, extents: Iterable[Extent], progress: Callable[[int, int], None] = lambda done, chunks: None) -> None:
        """Returns once all these parts are there, or were; asks for all of them first.

        Args:
            progress: called with (chunks that have come, chunks in all) whenever one is waited for.

        Raises:
            CheckpointError: they cannot be had.
        """
        spans = [self.chunks(*extent) for extent in extents]
        for span in spans:
            self._ask(span)
        chunks = sorted({chunk for span in spans for chunk in range(span.start, span.stop)})
        for done, chunk in enumerate(chunks):
            if self.versions[chunk] % 2 == 0:
                progress(done, len(chunks))
                self._there(slice(chunk, chunk + 1))

    def read(self, path: Path, start: int, stop: int, read: Callable[[], int]) -> int:
        """Calls ``read``, which reads bytes ``[start, stop)`` of a file or some of them, when they are there.

        Raises:
            CheckpointError: they cannot be had.
        """
        span = self.chunks(path, start, stop)
        while True:
            before = self._there(span)
            got = read()
            if (self.versions[span] == before).all():
                return got

    def _ask(self, span: slice) -> None:
        missing = (self.versions[span] % 2 == 0).nonzero()[0]
        if missing.size:  # nothing else is written: other processes write to the same table
            self.wanted[missing + span.start] = 1

    def _there(self, span: slice) -> np.ndarray:
        """The versions of chunks, once all of them are there."""
        pause = _SHORT
        while True:
            versions: np.ndarray = self.versions[span].copy()
            if (versions % 2 == 1).all():
                return versions
            self._ask(span)
            self._check()
            time.sleep(pause)
            pause = min(_LONG, pause * 1.5)

    def _check(self) -> None:
        """Raises a CheckpointError where nothing will come any more."""
        failed = self.home / "failed"
        if failed.is_file():
            raise CheckpointError(read_small(failed).decode(errors="replace"))
        if time.monotonic() - self._looked < _CHECKED:
            return
        self._looked = time.monotonic()
        held = lock(self.home)
        if held is not None:
            os.close(held)
            raise CheckpointError(
                f"{self.home}: the process that read the model from the hub is gone: run the same command again"
            )

    def fail(self, reason: str) -> None:
        """Has all readers that wait raise a CheckpointError."""
        with_name = self.home / "failed.new"
        with_name.write_text(reason, encoding="utf-8")
        with_name.rename(self.home / "failed")

    def passing(self, ranks: int, steps: int) -> np.ndarray:
        """Makes the table of what is read, uint8 ``[ranks, steps]``, all zero."""
        import numpy as np

        path = self.home / "passed"
        path.unlink(missing_ok=True)
        with open(path, "xb") as file:
            file.truncate(max(1, ranks * steps))
        return np.frombuffer(_mapped(path, ranks * steps), np.uint8, ranks * steps).reshape(ranks, steps)

    def passed(self, rank: int, step: int, steps: int) -> None:
        """Says that a rank of this machine has read all that a step needs; where there is a table."""
        with suppress(FileNotFoundError), open(self.home / "passed", "r+b", buffering=0) as table:
            os.pwrite(table.fileno(), b"\1", rank * steps + step)


def _files(manifest: Path) -> list[RemoteFile]:
    """The files that a manifest lists.

    Raises:
        CheckpointError: it is damaged, or none of ours.
    """
    listed = read_json(manifest, largest=LARGEST_JSON).get("files")
    entries: list[Any] = listed if isinstance(listed, list) else [listed]
    for entry in entries:
        if not _is_file(entry):
            raise CheckpointError(
                f"{manifest}: lists {quoted(entry)} where a file's name, its bytes and its version are to be; remove "
                f"{manifest.parent}, and run the same command again"
            )
    return [RemoteFile(*entry) for entry in entries]


def _is_file(entry: Any) -> bool:
    if not isinstance(entry, list) or len(entry) != 3:
        return False
    name, size, etag = entry
    return isinstance(name, str) and isinstance(etag, str) and type(size) is int and 0 <= size < 1 << 62


def mirror_of(directory: Path) -> Mirror | None:
    """The mirror whose files lie in a directory; None where these are files like others."""
    home = directory.parent
    return Mirror(home) if directory.name == "files" and (home / "manifest.json").is_file() else None


def stamped(paths: Iterable[Path]) -> list[Path]:
    """Files that change whenever one of these does: of those of a mirror, whose times say nothing, its manifest."""
    found: dict[Path, None] = {}
    mirrors: dict[Path, Mirror | None] = {}
    for path in paths:
        if path.parent not in mirrors:
            mirrors[path.parent] = mirror_of(path.parent)
        mirror = mirrors[path.parent]
        found[path if mirror is None or path.is_symlink() else mirror.home / "manifest.json"] = None
    return list(found)


def lock(home: Path) -> int | None:
    """Takes the lock of whoever fills a mirror; returns its descriptor, or None where another process has it."""
    fd = os.open(home / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


def _mapped(path: Path, size: int) -> mmap.mmap:
    """A table, shared with all who map it."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        found = os.fstat(fd).st_size
        if found < size:
            raise CheckpointError(
                f"{path}: has {found:,} bytes, {size:,} are needed; remove {path.parent}, and try again"
            )
        return mmap.mmap(fd, max(1, size))
    finally:
        os.close(fd)
