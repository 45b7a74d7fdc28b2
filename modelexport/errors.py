"""The few kinds of error that modelexport raises on purpose.

A user's error says what is wrong, where, the two numbers that disagree and what to type next, and the
command line prints it without a traceback. Anything else that escapes is a defect of ours and keeps its
traceback.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable
from typing import Any

_SHOWN = 100


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
    """Base of every error raised on purpose. ``exit_status`` is what the command line returns for it."""

    exit_status = 1


class UsageError(ModelExportError, ValueError):
    """The request itself is wrong: an unknown name, flags that exclude each other, a target that exists."""

    exit_status = 2


class CheckpointError(ModelExportError, ValueError):
    """A checkpoint's files are missing, damaged, inconsistent, or hold values that cannot be exported."""


class PlanError(ModelExportError, ValueError):
    """The model cannot be cut or quantised as asked (known before any weight is read)."""


class GatherError(ModelExportError, RuntimeError):
    """Ranks could not hand their payloads to the first rank; names the ranks that are missing and why."""


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
    """

    def __init__(
        self, rank: int, phase: str, summary: str, rank_traceback: str = "", *, user_error: bool = False
    ) -> None:
        self.rank = rank
        self.phase = phase
        self.summary = summary
        self.rank_traceback = rank_traceback
        self.user_error = user_error
        where = f" while {phase}" if phase else ""
        text = f"rank {rank} failed{where}: {summary}"
        if rank_traceback and not user_error:
            text = f"{text}\n{rank_traceback.rstrip()}"
        super().__init__(text)


def nearest(name: str, known: Iterable[str]) -> str:
    """``"; did you mean 'x'? known: ..."`` for an unknown ``name``."""
    choices = sorted(known)
    close = difflib.get_close_matches(name, choices, n=1)
    hint = f"; did you mean '{close[0]}'?" if close else ";"
    return f"{hint} known: {', '.join(choices)}"


def shown(value: object) -> str:
    """What a stranger wrote, as much of it as a message needs, on one line."""
    text = value if isinstance(value, str) else _SHORT.repr(value)
    text = text[: _SHOWN + 1].encode("unicode_escape").decode()
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def quoted(value: object) -> str:
    """The same, with quotes around a text."""
    return f"'{shown(value)}'" if isinstance(value, str) else shown(value)
