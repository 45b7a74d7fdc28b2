"""The journal of an export: what it is, then one line for each finished step, so that a killed one can go on.

A line is appended by one ``write`` as a rule, and begins with the CRC-32 of the rest of it. A line that a kill cut off,
or that a disk has spoilt, is dropped when the journal is next opened, with everything after it: a step that is not in
the journal is simply done again. Lines are not fsynced: what a dead process has written survives it. A machine that
dies may keep the journal and lose the data, so the journal names the boot it belongs to, and after another boot its
steps do not count. Where several machines write, it names the boots of all: their file system keeps the journal that
one has written, and has not what another one had yet to send.

A run that was cut off holds the place until it is finished or given up, unless it can never be finished: see
:func:`_why_lost`.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from modelexport.checkpoints import raw_io
from modelexport.errors import CheckpointError
from modelexport.system.small_files import read_small

VERSION = 3
LARGEST_JOURNAL = 1 << 30
"""Bytes: what the record of an export says of each module, and the checksum of every piece besides."""
_CHECKED = re.compile(rb'\{"crc32":(\d{1,10}),(.+)\n', re.DOTALL)
_ABSENT = "(not given)"


class Journal:
    """An open journal, made by :meth:`open` or :meth:`join`.

    Attributes:
        path: the file.
        done: records of the finished steps, by step; those of earlier runs and this object's own.
        resumed: whether an earlier run of the same export left it.
        restarted: whether an earlier run of the same export left it, but before this machine, or another one that
            writes, was last booted, so that its steps do not count.
        lost: why an earlier run of another export, which left it, can never be finished; "" where there was none.
    """

    def __init__(
        self,
        path: Path,
        fd: int,
        done: dict[str, dict[str, Any]],
        *,
        resumed: bool,
        restarted: bool = False,
        lost: str = "",
    ) -> None:
        self.path = path
        self.done = done
        self.resumed = resumed
        self.restarted = restarted
        self.lost = lost
        self._fd = fd

    @classmethod
    def open(
        cls, path: Path, fingerprint: Mapping[str, Any], inputs: Iterable[Path] = (), *, boot: str | None = None
    ) -> Journal:
        """Go on with the journal at ``path``, if it is of this fingerprint and boot, or begin it anew.

        Args:
            inputs: the files that the bytes to be written are made from.
            boot: what :func:`boot_ids` says of the machines that write; None: this one alone does.

        Raises:
            OtherExport: it has finished steps of another fingerprint, and can still be finished; it is left as it was.
            OSError: it cannot be read or written.
        """
        wanted = json.loads(json.dumps(fingerprint))
        boot = boot_id() if boot is None else boot
        lines, good = _read(path)
        head = lines[0] if lines and lines[0].get("modelexport") == VERSION else None
        same = head is not None and head.get("fingerprint") == wanted
        lost = ""
        if head is not None and not same and _steps(lines):
            lost = _why_lost(lines, boot)
            if not lost:
                raise OtherExport(differences(head.get("fingerprint") or {}, wanted))
        if head is not None and same and head.get("boot") == boot:
            os.truncate(path, good)
            return cls(path, os.open(path, _APPEND), _steps(lines), resumed=True)
        fd = os.open(path, _APPEND | os.O_CREAT | os.O_TRUNC, 0o666)
        journal = cls(path, fd, {}, resumed=False, restarted=same, lost=lost)
        states = {str(each): _state(each) for each in inputs}
        try:
            journal._append({"modelexport": VERSION, "fingerprint": wanted, "boot": boot, "inputs": states})
        except OSError:
            journal.close()
            raise
        return journal

    @classmethod
    def join(cls, path: Path) -> Journal:
        """Open the journal that another process has begun, to read its steps and perhaps append some.

        Raises:
            OSError: there is none.
        """
        fd = os.open(path, _APPEND)
        lines, _ = _read(path)
        return cls(path, fd, _steps(lines), resumed=bool(_steps(lines)))

    def append(self, step: str, record: Mapping[str, Any]) -> None:
        """Append one finished step.

        Raises:
            CheckpointError: no room, or an I/O error.
        """
        try:
            self._append({"step": step, "record": record})
        except OSError as error:
            if error.errno in raw_io.DISK_FULL:
                raise raw_io.disk_full(self.path, len(json.dumps(record)), error) from error
            raise CheckpointError(f"{self.path}: cannot be written: {error.strerror or error}") from error
        self.done[step] = dict(record)

    def publishing(self, directory: Path) -> None:
        """Note, on disk, that ``directory`` is complete and about to become the target.

        Raises:
            OSError: it cannot be written.
        """
        self._append({"publishing": directory.stat().st_ino})
        os.fsync(self._fd)

    def ended(self, reason: str) -> None:
        """Note that the run came to an end by itself, and would again.

        Raises:
            OSError: it cannot be written.
        """
        self._append({"ended": reason})

    def has_steps(self) -> bool:
        """Returns whether the file holds finished steps, of any run."""
        return bool(self.done) or bool(_steps(_read(self.path)[0]))

    def close(self) -> None:
        """Close the file; harmless when it is closed already."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _append(self, entry: Mapping[str, Any]) -> None:
        text = json.dumps(entry, separators=(",", ":")).encode()[1:]
        line = b'{"crc32":%d,%b\n' % (zlib.crc32(text), text)
        before = os.fstat(self._fd).st_size
        done = 0
        try:
            while done < len(line):  # what falls short is tried again, for the reason
                done += os.write(self._fd, line[done:])
        except OSError:
            if done:
                os.ftruncate(self._fd, before)  # half a line would swallow the next one
            raise


class OtherExport(Exception):
    """The journal belongs to another export. ``differences``: (dotted key, its value, the new value)."""

    def __init__(self, differences: list[tuple[str, str, str]]) -> None:
        super().__init__(f"{len(differences)} differences")
        self.differences = differences


_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC


def published_inode(path: Path) -> int | None:
    """The inode of the directory that was about to become the target, if the export at ``path`` got that far."""
    lines, _ = _read(path)
    inode = lines[-1].get("publishing") if lines else None
    return inode if isinstance(inode, int) else None


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """The differences of two fingerprints: (dotted key, old value, new value) as JSON text, sorted by key."""
    old, new = dict(_flat(before)), dict(_flat(now))
    return [
        (key, old.get(key, _ABSENT), new.get(key, _ABSENT))
        for key in sorted(old.keys() | new.keys())
        if old.get(key, _ABSENT) != new.get(key, _ABSENT)
    ]


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", json.dumps(value)


def _read(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The whole lines, up to the first one that is damaged, and the bytes they take."""
    if not path.exists():
        return [], 0
    text = read_small(path, largest=LARGEST_JOURNAL)
    lines: list[dict[str, Any]] = []
    good = 0
    for line in text.splitlines(keepends=True):
        checked = _CHECKED.fullmatch(line)
        if checked is None or zlib.crc32(checked[2]) != int(checked[1]):
            break
        entry = _entry(line)
        if entry is None:
            break
        lines.append(entry)
        good += len(line)
    return lines, good


def _entry(line: bytes) -> dict[str, Any] | None:
    """The content of a line whose checksum is right; None where no journal has such a one."""
    try:
        entry: dict[str, Any] = json.loads(line)
    except (ValueError, RecursionError):
        return None
    kinds = {"fingerprint": dict, "record": dict, "inputs": dict, "step": str, "ended": str}
    return entry if all(isinstance(entry[key], kinds[key]) for key in kinds.keys() & entry.keys()) else None


def _steps(lines: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {entry["step"]: entry["record"] for entry in lines if "step" in entry and "record" in entry}


def _why_lost(lines: list[dict[str, Any]], boot: str) -> str:
    """The reason why no command can finish the run that wrote these lines; "" where one may.

    It ended by itself with an error that its files lead to; or one of these files is another one by now, or gone from
    a directory that has others (an empty one may be where a disk is mounted). Files are compared within one boot
    alone: another machine may have others by these names.
    """
    if "ended" in lines[-1]:
        return f"it failed, and would again: {lines[-1]['ended']}"
    inputs = lines[0].get("inputs")
    if lines[0].get("boot") == boot and isinstance(inputs, dict):
        for name, state in inputs.items():
            found = _state(Path(name))
            if found is None and state is not None and any(Path(name).parent.glob("*")):
                return f"{name} is no longer there"
            if found is not None and found != state:
                return f"{name} has changed since"
    return ""


def _state(path: Path) -> list[int] | None:
    """The facts that change with a file's content; None where there is no such file."""
    try:
        status = path.stat()
    except (OSError, ValueError):  # of a name with a null character
        return None
    return [status.st_size, status.st_mtime_ns]


def boot_ids(ids: Iterable[str]) -> str:
    """Returns what tells one boot of several machines from another, from the :func:`boot_id` of each."""
    return "+".join(sorted(set(ids)))


def boot_id() -> str:
    """Returns what tells one boot of this machine from another; "" where the system does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
