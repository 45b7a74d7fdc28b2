"""Output of the program: a result on stdout, notes and progress on stderr, whatever has become of either.

A stream may be closed, full, a pipe that nobody reads, or one that knows ASCII only. None of these undoes work that is
done, and none ends in a traceback. Control characters of names that come from files never reach a terminal.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from typing import TYPE_CHECKING, Any, TextIO

from modelexport.errors import OutputError, printable

if TYPE_CHECKING:
    from tqdm import tqdm

__all__ = ["columns", "flush", "note", "open_standard_streams", "progress_bar", "show"]

_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def open_standard_streams() -> None:
    """Opens /dev/null in place of the standard streams that are closed; to be called before any file is opened.

    A closed descriptor's number would be given to the next file: a weight file that is descriptor 1 is written into by
    whatever prints. Ranks inherit what is opened here.
    """
    for fd, (name, mode) in enumerate(_STREAMS):
        try:
            os.fstat(fd)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
            assert opened == fd
            os.set_inheritable(fd, True)
            setattr(sys, name, open(fd, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


def show(text: str, *, stands: str = "") -> None:
    """Prints a result on stdout.

    Args:
        text: one or more lines.
        stands: what has been done whether or not the text can be printed, e.g. "ckpt is complete". Failing to print is
            then no error, and only noted on stderr.

    Raises:
        OutputError: stdout cannot be written.
        BrokenPipeError: its reader has gone.
    """
    try:
        _write(sys.stdout, text)
    except BrokenPipeError:
        _discard(sys.stdout)
        raise
    except OSError as error:
        _discard(sys.stdout)
        reason = f"could not be printed on stdout: {error.strerror or error}"
        if not stands:
            raise OutputError(f"the result {reason}") from error
        note(f"modelexport: {stands}; its summary {reason}")


def note(text: str) -> None:
    """Prints a line on stderr, or nothing where stderr cannot be written."""
    try:
        _write(sys.stderr, text)
    except OSError:
        _discard(sys.stderr)


def flush() -> None:
    """Flushes the standard streams, as far as that can be done."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            try:
                stream.flush()
            except OSError:
                _discard(stream)


def progress_bar(*, quiet: bool, **options: Any) -> tqdm[Any]:
    """tqdm's bar on stderr; silent with ``quiet`` or where stderr is no terminal. ``options`` are tqdm's."""
    from tqdm import tqdm

    stream = sys.stderr
    watched = stream is not None and not stream.closed and stream.isatty()
    return tqdm(leave=False, disable=quiet or not watched, **options)


def columns() -> int | None:
    """The width of stdout's terminal in columns; None where it is none."""
    stream = sys.stdout
    if stream is None or stream.closed or not stream.isatty():
        return None
    return shutil.get_terminal_size().columns


def _write(stream: TextIO | None, text: str) -> None:
    if stream is None or stream.closed:
        return
    encoding = stream.encoding or "utf-8"
    stream.write(printable(text).encode(encoding, "backslashreplace").decode(encoding) + "\n")
    stream.flush()


def _discard(stream: TextIO) -> None:
    """Sends what is still buffered, which the interpreter would try again to write as it ends, to /dev/null."""
    with contextlib.suppress(OSError, ValueError):  # a stream without a descriptor
        fd = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(fd, stream.fileno())
        finally:
            os.close(fd)
