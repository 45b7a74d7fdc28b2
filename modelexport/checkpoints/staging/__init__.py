"""All or nothing: a checkpoint grows in a hidden directory beside its target and appears by one rename.

For a target ``out`` the directory ``.{out name}.modelexport`` beside it (the same file system, so that the rename is
one step) holds ``lock`` and ``ranks.lock`` (see :mod:`~modelexport.checkpoints.staging.locks`), ``journal.jsonl`` (see
:mod:`~modelexport.checkpoints.staging.journal`), ``ckpt/``, the checkpoint itself, and perhaps ``beside/``, what a run
needs only to be resumed, and ``source/``, what of a model on the hub is being read.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from modelexport.checkpoints import raw_io
from modelexport.checkpoints.staging import locks
from modelexport.checkpoints.staging.journal import Journal, OtherExport, published_inode
from modelexport.errors import CheckpointError, UsageError, listed
from modelexport.system.small_files import remove_temporary
from modelexport.system.terminal import note

SOURCE = "source"
LOCK_WAIT = 10.0
"""Seconds that an export waits for the ranks of a killed one to die."""


class Staging:
    """A target directory in the making. Made by :meth:`open` (the launcher) or :meth:`join` (the ranks).

    Attributes:
        out: the target, absolute, links resolved.
        directory: where its files are put meanwhile (``ckpt/``).
    """

    def __init__(self, out: Path, journal: Journal, fds: list[int], *, overwrite: bool, owner: bool) -> None:
        self.out = out
        self.directory = staging_directory(out) / "ckpt"
        self._home = staging_directory(out)
        self._journal = journal
        self._fds = fds
        self._overwrite = overwrite
        self._owner = owner
        self._published = False

    @property
    def done(self) -> dict[str, dict[str, Any]]:
        """The records of the steps that are finished, by step: an interrupted run's, and this object's own."""
        return self._journal.done

    @property
    def beside(self) -> Path:
        """The directory of what a run needs to be resumed and the target does not; may not exist yet."""
        return self._home / "beside"

    @property
    def resumed(self) -> bool:
        """True if an interrupted run of the same export is being resumed."""
        return self._journal.resumed

    @property
    def restarted(self) -> bool:
        """True if there was one, but before this machine, or another one that writes, was last booted: its data may
        never have reached the disk, so the export starts from the beginning."""
        return self._journal.restarted

    @property
    def lost(self) -> str:
        """The reason for which an earlier export here was dropped: it could never have been finished. "" if none
        was."""
        return self._journal.lost

    @classmethod
    def open(
        cls,
        out: str | os.PathLike[str],
        fingerprint: Mapping[str, Any],
        *,
        inputs: Iterable[Path] = (),
        overwrite: bool = False,
        boot: str | None = None,
    ) -> Staging:
        """Begin an export to ``out``, or take up the one that was interrupted there.

        Finished steps of another fingerprint that can still be taken up are never thrown away for the user, not even
        with ``overwrite`` (which is about a finished target): the error says what differs and what to remove.

        Args:
            out: the target directory. Missing parents are made.
            fingerprint: JSON-able; everything that decides the bytes to be written.
            inputs: the files that the bytes are made from: once one of them is another, a run can no longer be
                taken up.
            overwrite: replace ``out``, if it is there, once the new checkpoint is complete.
            boot: see :meth:`Journal.open <modelexport.checkpoints.staging.journal.Journal.open>`.

        Raises:
            UsageError: ``out`` exists, is no checkpoint or cannot be written; another export runs, or another
                was interrupted.
        """
        target = check_target(out, overwrite=overwrite)
        home = staging_directory(target)
        try:
            fds = locks.acquire(home, LOCK_WAIT)
        except locks.Busy as holders:
            raise UsageError(
                f"another export to {target} is running{holders}; wait for it, or end it and run this again"
            ) from None
        except OSError as error:
            raise UsageError(
                f"--out {target}: {home} cannot be made: {error.strerror or error}; choose another --out"
            ) from error
        try:
            journal = _take_up(target, home, fingerprint, inputs, overwrite, boot)
        except BaseException:
            if not os.path.lexists(home / "journal.jsonl"):
                locks.remove(home)
            locks.release(fds)
            raise
        os.close(fds.pop())  # the ranks' lock: from here on they may join
        return cls(target, journal, fds, overwrite=overwrite, owner=True)

    @classmethod
    def join(cls, out: str | os.PathLike[str]) -> Staging:
        """Take part, as a rank, in the export to ``out`` that a launcher has opened. Lasts until this process
        ends or closes it.

        Raises:
            CheckpointError: no export to ``out`` is open.
        """
        target = resolve_target(out)
        home = staging_directory(target)
        fds: list[int] = []
        try:
            fds.append(locks.join(home))
            journal = Journal.join(home / "journal.jsonl")
        except (OSError, locks.Busy) as error:
            locks.release(fds)
            reason = getattr(error, "strerror", None) or f"held by another export{error}"
            raise CheckpointError(f"{home}: there is no export to join: {reason}") from error
        return cls(target, journal, fds, overwrite=False, owner=False)

    def record(self, step: str, record: Mapping[str, Any]) -> None:
        """Note that a step is finished: its bytes have been handed to the kernel. By one process only.

        Raises:
            CheckpointError: the journal cannot be written (with a full disk, what is free).
        """
        self._journal.append(step, record)

    def publish(self) -> None:
        """Put everything on disk, then let the target appear by one rename, and clean up.

        Over an existing target (``overwrite``) the two directories are swapped in one step and the old one is
        deleted. Where the file system cannot swap, the old one is moved aside first, and back by the next
        export should this process die between the two renames. Where the disk refuses the rename itself, it is taken
        back: the same command resumes.

        Raises:
            UsageError: the target has appeared meanwhile and is not to be overwritten.
            CheckpointError: the disk refused the data.
        """
        assert self._owner, "only the process that opened the export publishes it"
        try:
            _fsync_tree(self.directory)
            self._journal.publishing(self.directory)
            take_back = self._rename()
            try:
                _fsync(self.out.parent)
            except OSError:
                take_back()
                raise
        except OSError as error:
            raise CheckpointError(f"{self.out}: cannot be published: {error.strerror or error}") from error
        self._published = True
        self.close()

    def close(self, *, ended: str = "") -> None:
        """Let go. Finished steps stay, to be resumed; where there are none, nothing stays.

        Args:
            ended: why the same export would fail again: then they do not stay either.
        """
        if not self._fds:
            return
        if self._owner:
            if ended:
                with suppress(OSError):  # a full disk: then it stays as any other that was cut off
                    self._journal.ended(ended)
            if self._published or (self._is_useless(ended) and locks.ranks_gone(self._home)):
                self._remove()
        self._journal.close()
        locks.release(self._fds)

    def _is_useless(self, ended: str) -> bool:
        """Returns whether there is nothing to be resumed."""
        try:
            return bool(ended) or not self._journal.has_steps()
        except CheckpointError:  # it cannot be read now: then it stays, and does not hide why the run came to an end
            return False

    def _remove(self) -> None:
        """Removes the staging directory. What the disk does not let go the next export to the target clears away."""
        try:
            _empty(self._home)
            locks.remove(self._home)
        except OSError as error:
            if self._published:  # or there is an error already, of which this one is no part
                note(f"{self._home} is of no more use, and cannot be removed: {error.strerror or error}")

    def __enter__(self) -> Staging:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _rename(self) -> Callable[[], object]:
        """Gives the checkpoint its name; returns what takes it back."""
        try:
            if raw_io.rename_no_replace(self.directory, self.out):
                return lambda: os.rename(self.out, self.directory)
            if not os.path.lexists(self.out):
                os.rename(self.directory, self.out)
                return lambda: os.rename(self.out, self.directory)
        except FileExistsError:
            pass
        if not self._overwrite:
            raise UsageError(_exists(self.out))
        if raw_io.rename_exchange(self.directory, self.out):
            return lambda: raw_io.rename_exchange(self.directory, self.out)
        aside = self._home / "old"
        os.rename(self.out, aside)
        try:
            os.rename(self.directory, self.out)
        except OSError:
            os.rename(aside, self.out)
            raise

        def take_back() -> None:
            os.rename(self.out, self.directory)
            os.rename(aside, self.out)

        return take_back


def staging_directory(out: Path) -> Path:
    """The staging directory of an export to ``out``."""
    return out.parent / f".{out.name}.modelexport"


def _take_up(
    target: Path,
    home: Path,
    fingerprint: Mapping[str, Any],
    inputs: Iterable[Path],
    overwrite: bool,
    boot: str | None,
) -> Journal:
    """With both locks held: clear what a finished export left, check the target, open the journal."""
    try:
        journal_path = home / "journal.jsonl"
        if os.path.lexists(home / "old") and not os.path.lexists(target):
            os.rename(home / "old", target)
        if _was_published(home):
            _empty(home)
        _check_target(target, overwrite)
        # Without its files a journal means nothing.
        if not (home / "ckpt").is_dir():
            journal_path.unlink(missing_ok=True)
        journal = Journal.open(journal_path, fingerprint, inputs, boot=boot)
        if not journal.resumed:
            _remove_tree(home / "ckpt")
            _remove_tree(home / "beside")
            (home / "ckpt").mkdir()
        remove_temporary(home / "ckpt")  # which would be published with the rest
    except OtherExport as other:
        lines = listed(f"{key}: {old} then, {new} now" for key, old, new in other.differences)
        raise UsageError(
            f"an export to {target} was interrupted: run the same command as then to finish it, or give it up with "
            f"rm -r {shlex.quote(str(home))}; this one differs from it:{lines}"
        ) from None
    except OSError as error:
        raise UsageError(f"{home}: cannot be written: {error.strerror or error}") from error
    return journal


def check_target(out: str | os.PathLike[str], *, overwrite: bool) -> Path:
    """The directory that ``--out`` names, if an export may begin there, or an interrupted one may be there.

    Raises:
        UsageError: it exists, and is not to be replaced; or nothing can be written there.
    """
    target = resolve_target(out)
    if not os.path.lexists(staging_directory(target)):
        _check_target(target, overwrite)
    return target


def resolve_target(out: str | os.PathLike[str]) -> Path:
    """The directory that ``--out`` names, absolute, links resolved.

    Raises:
        UsageError: nothing can be written to what it names.
    """
    if not os.fspath(out):
        raise UsageError("--out is empty; name a directory to write the checkpoint to")
    try:
        target = Path(out).resolve()
    except (OSError, ValueError, RuntimeError) as error:
        raise UsageError(f"--out {os.fspath(out)!r}: {error}") from error
    if not target.name:
        raise UsageError(f"--out {os.fspath(out)!r}: the root directory cannot be a target; name one below it")
    return target


def _exists(target: Path) -> str:
    return f"{target} exists already; choose another --out, or give --overwrite to replace it"


def _check_target(target: Path, overwrite: bool) -> None:
    if not os.path.lexists(target):
        return
    if not overwrite:
        raise UsageError(_exists(target))
    if not target.is_dir():
        raise UsageError(f"{target} is not a directory; --overwrite replaces only a checkpoint's directory")
    names = sorted(os.listdir(target))
    if names and not any(name == "config.json" or name.endswith(".safetensors") for name in names):
        raise UsageError(
            f"{target} holds no checkpoint but {', '.join(names[:3])}, which --overwrite would delete; "
            "choose another --out, or remove it yourself"
        )
    if target.is_mount():
        raise UsageError(f"{target} is a mount point, which no rename can replace; choose a directory below it")


def _was_published(home: Path) -> bool:
    """Returns whether the rename of the export that left this journal was done, and only the cleaning up was cut off:
    ``ckpt`` is no longer what was about to become the target, but gone, or the old target."""
    inode = published_inode(home / "journal.jsonl")
    ckpt = home / "ckpt"
    return inode is not None and not (ckpt.is_dir() and ckpt.stat().st_ino == inode)


def _empty(home: Path) -> None:
    """Remove everything but the locks; the journal last, for it tells what the rest is."""
    for path in (home / "ckpt", home / "old", home / "beside", *home.glob(f"{SOURCE}*")):
        _remove_tree(path)
    (home / "journal.jsonl").unlink(missing_ok=True)


def _remove_tree(path: Path) -> None:
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def _fsync_tree(directory: Path) -> None:
    found = [Path(parent) / name for parent, _, names in os.walk(directory) for name in names]
    for path in found:  # the disk gets all its work before the first wait
        _with_fd(path, lambda fd: raw_io.begin_writeback(fd, 0, 0))
    for path in found:
        _fsync(path)
    for parent, _, _ in os.walk(directory, topdown=False):
        _fsync(Path(parent))


def _fsync(path: Path) -> None:
    _with_fd(path, os.fsync)


def _with_fd(path: Path, do: Any) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        do(fd)
    finally:
        os.close(fd)
