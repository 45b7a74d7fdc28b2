"""The few kinds of error that modelexport raises on purpose.

A user's error says what is wrong, where, the two numbers that disagree and what to type next, and the
command line prints it without a traceback. Anything else that escapes is a defect of ours and keeps its
traceback.
"""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Iterable
from typing import Any

_SHOWN = 200
"""Characters of a value that a message quotes."""
_LONGEST, _ENDING = 1500, 400
"""Characters of a message, and those of them that its end gets, where it says what to type."""
_OMISSION = 40
"""Characters that say how many were left out."""
_LISTED = 6
"""Lines of a list of problems."""
_NEAREST, _FEW = 3, 24
"""Names that are suggested, and how many there may be for all of them to be told."""


class _Short(reprlib.Repr):
    """``repr`` of what is much too large, or contains itself: of its beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother = 4, 2 * _SHOWN, 2 * _SHOWN
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = 12

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if abs(x) < 1 << 256 else "a number of very many digits"


_SHORT = _Short()


class ModelExportError(Exception):
    """Base of every error raised on purpose.

    Its text has no control character but the newline, and is cut where it is longer than a screen: what is quoted
    in it may come from any file.

    Attributes:
        exit_status: what the command line returns for it.
        final: whether the same command must fail again as long as its files are what they are, so that nothing of an
            unfinished run is worth keeping.
    """

    exit_status = 1
    final = False

    def __str__(self) -> str:
        return _bounded(super().__str__())


class UsageError(ModelExportError, ValueError):
    """The request itself is wrong: an unknown name, flags that exclude each other, a target that exists."""

    exit_status = 2


class CheckpointError(ModelExportError, ValueError):
    """A checkpoint's files are missing, damaged, inconsistent, or hold values that cannot be exported."""


class ValuesError(CheckpointError):
    """A checkpoint holds values that cannot be exported: NaN, Inf, or what leads to them."""

    final = True


class PlanError(ModelExportError, ValueError):
    """The model cannot be cut or quantised as asked (known before any weight is read)."""


class GatherError(ModelExportError, RuntimeError):
    """Ranks could not hand their payloads to the first rank; names the ranks that are missing and why."""


class LimitError(ModelExportError, RuntimeError):
    """A limit of the process or of its machine was reached: open files, memory, threads, the size of a file."""


class OutputError(ModelExportError, RuntimeError):
    """The requested output could not be printed."""


class HubError(ModelExportError, RuntimeError):
    """A finished checkpoint could not be pushed to the hub; nothing of it is lost.

    Attributes:
        result: what the export returned, where one came before it.
    """

    result: Any = None


class RankFailedError(ModelExportError, RuntimeError):
    """A rank process failed and the job was ended.

    Attributes:
        rank: the rank that failed first (the culprit, never a victim that lost its peer).
        phase: what that rank was doing, e.g. ``"quantising model.layers.3"``.
        summary: one line, the rank's own error.
        rank_traceback: the rank's formatted traceback, or ``""`` where it left none (a signal).
        user_error: whether the rank's error was itself a :class:`ModelExportError`, which needs no traceback.
        final: the rank's error's own.
    """

    def __init__(
        self,
        rank: int,
        phase: str,
        summary: str,
        rank_traceback: str = "",
        *,
        user_error: bool = False,
        final: bool = False,
    ) -> None:
        self.rank = rank
        self.phase = phase
        self.summary = summary
        self.rank_traceback = rank_traceback
        self.user_error = user_error
        self.final = final
        super().__init__(summary)

    def __str__(self) -> str:
        where = f" while {self.phase}" if self.phase else ""
        text = _bounded(f"rank {self.rank} failed{where}: {self.summary}")
        if self.rank_traceback and not self.user_error:
            text = f"{text}\n{printable(self.rank_traceback.rstrip())}"
        return text


def nearest(name: str, known: Iterable[str], *, listing: str = "") -> str:
    """``"; did you mean 'x'? known: ..."`` for an unknown ``name``.

    Args:
        known: the names that there are. Where they are many, only the few most like ``name`` are told.
        listing: the command that lists all of them.
    """
    choices = sorted(known)
    if len(choices) <= _FEW:
        return f"{did_you_mean(name, choices) or ';'} known: {', '.join(choices)}"
    every = f" {listing} lists all {len(choices)}" if listing else f" {len(choices)} are known"
    return (did_you_mean(name, choices, most=_NEAREST) or ";") + every


def did_you_mean(name: str, known: Iterable[str], *, most: int = 1) -> str:
    """``"; did you mean 'x'?"``, or ``""`` where none of the ``known`` names is like ``name``."""
    close = [f"'{shown(each)}'" for each in difflib.get_close_matches(name[:_SHOWN], sorted(known), n=most)]
    if not close:
        return ""
    return f"; did you mean {' or '.join([', '.join(close[:-1]), close[-1]] if close[1:] else close)}?"


def shown(value: object) -> str:
    """Untrusted text on one line, cut to the length that a message needs."""
    text = value if isinstance(value, str) else _SHORT.repr(value)
    line = printable(text[: _SHOWN + 1]).replace("\n", "\\n")
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]}..."


def quoted(value: object) -> str:
    """``repr(value)``, as much of it as a message needs."""
    return shown(_SHORT.repr(value))


def listed(problems: Iterable[str]) -> str:
    """Problems, each on a line of its own, to stand behind a colon; those beyond a short list are counted."""
    every = list(problems)
    lines = [_without_middle(printable(each).replace("\n", "\\n"), _SHOWN, _SHOWN // 2) for each in every[:_LISTED]]
    more = [f"... and {len(every) - _LISTED:,} more"] if len(every) > _LISTED else []
    return "".join(f"\n  {line}" for line in [*lines, *more])


def error_text(error: BaseException) -> str:
    """The message of a library's exception on one line; its type where it has none."""
    return shown(" ".join(str(error).split()) or type(error).__name__)


def printable(text: str) -> str:
    """``text`` with escapes in place of control characters, and of all else that is not printed, but newlines."""
    if text.isprintable() or all(line.isprintable() for line in text.split("\n")):
        return text
    return "".join(
        each if each == "\n" or each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


def _bounded(text: str) -> str:
    """A message on one line, but for what :func:`listed` puts on others, and no longer than a screen."""
    line = re.sub(r"\s*\n(?!  \S)\s*", " ", text.strip())
    return _without_middle(printable(line), _LONGEST, _ENDING)


def _without_middle(text: str, longest: int, ending: int) -> str:
    if len(text) <= longest:
        return text
    beginning = longest - ending - _OMISSION
    return f"{text[:beginning]} ... ({len(text) - beginning - ending:,} characters) ... {text[-ending:]}"
