"""Failures of ranks: the root cause among several, and their text.

When a rank dies its peers fail too, a moment later: "connection closed by peer", or a time-out. Those echoes
may even arrive first. So each failure has a level: 0 stands for itself, 1 may be an echo, 2 is one; the root
cause is the earliest of the lowest level.
"""

from __future__ import annotations

import re
import signal
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from modelexport.distributed.transport.messages import FLAG, NUMBER, TEXT, WHOLE, WHOLES, Kind, check_fields
from modelexport.errors import GatherError, ModelExportError, RankFailedError
from modelexport.system.limits import address_space_note, limit_error

OWN, UNCLEAR, ECHO = 0, 1, 2
LEVEL = Kind("a level of 0, 1 or 2", lambda value: type(value) is int and OWN <= value <= ECHO)
_NEEDED: Mapping[str, Kind] = {"rank": WHOLE, "level": LEVEL, "phase": TEXT, "summary": TEXT}
_OPTIONAL: Mapping[str, Kind] = {
    "time": NUMBER,
    "rank_traceback": TEXT,
    "user_error": FLAG,
    "exit_status": WHOLE,
    "final": FLAG,
    "blamed": WHOLES,
    "indirect": FLAG,
}

_PEER_TEXT = re.compile(
    r"closed by (the )?(peer|remote)|connection (was )?(closed|reset|refused|aborted|lost)|broken pipe|"
    r"remote process (has )?exited|peer (closed|is gone|vanished)|socket (is )?closed|"
    r"timed?[ -]?out|time-?out",
    re.IGNORECASE,
)
_GLOO_CONNECTION = re.compile(r"\[\S*gloo/transport/\S+\] .*?\[([^]\s]+)\]:(\d+): ([^.\n]+)")
_SUMMARY_LIMIT = 2000
_TRACEBACK_LIMIT = 60_000


@dataclass(frozen=True)
class Failure:
    """One rank's failure. ``time`` is monotonic seconds, comparable between the processes of one machine."""

    rank: int
    time: float
    level: int
    phase: str
    summary: str
    rank_traceback: str = ""
    user_error: bool = False
    exit_status: int = 1
    final: bool = False
    blamed: Sequence[int] = ()  # of an echo: the ranks that it says were waited for, or left what cannot be used
    indirect: bool = False  # an echo of a rank that was waited for and may have been waiting itself

    @classmethod
    def received(cls, fields: Any, sender: str, **known: Any) -> Failure:
        """A failure of which another process has told.

        Args:
            fields: as its JSON has them.
            sender: whose message it is, for the error.
            known: what this process knows better, or what is to be taken where the message does not say.

        Raises:
            LostPeerError: they are not those of a failure.
        """
        check_fields({**known, **fields} if isinstance(fields, dict) else fields, sender, _NEEDED, _OPTIONAL)
        taken = {name: value for name, value in fields.items() if name in _NEEDED or name in _OPTIONAL}
        return cls(**{**known, **taken})

    def error(self) -> RankFailedError:
        """The exception to raise for this failure."""
        error = RankFailedError(
            self.rank, self.phase, self.summary, self.rank_traceback, user_error=self.user_error, final=self.final
        )
        error.exit_status = self.exit_status
        return error


class EndedByLauncherError(SystemExit):
    """SIGTERM from the process's launcher, most often because another rank has ended."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)

    def __str__(self) -> str:
        return "its process was asked to end (SIGTERM)"


def root_cause(failures: Iterable[Failure]) -> Failure:
    """The earliest failure of the lowest level.

    Where there are only echoes: the one at the end of the chain, if the rank that one blames blames yet another.
    """
    known = {failure.rank: failure for failure in failures}
    cause = min(known.values(), key=lambda failure: (failure.level, failure.indirect, failure.time, failure.rank))
    seen = {cause.rank}
    while True:
        further = [known[rank] for rank in cause.blamed if rank in known and not seen.issuperset(known[rank].blamed)]
        if not further or further[0].rank in seen:
            return cause
        cause = further[0]
        seen.add(cause.rank)


def passed_on(echo: Failure, rank: int, phase: str, *, returned: bool) -> Failure:
    """Rewrites ``echo`` as the failure of ``rank``, which it blames; ``phase`` and ``returned`` are that rank's."""
    what = "its function has returned, and " if returned else ""
    text = f"{what}rank {echo.rank} found, while {echo.phase}: {echo.summary}"
    return replace(echo, rank=rank, phase=phase, summary=text)


def settling_seconds(failures: Iterable[Failure]) -> float:
    """Seconds to wait after the first of ``failures`` for a better one: longer while only echoes are known."""
    return 0.1 if min(failure.level for failure in failures) == OWN else 0.5


def level_of(error: BaseException) -> int:
    """The level of an exception: it stands for itself, or a peer closed a connection or did not come in time.

    An exception may say so itself by an attribute ``peer_failure`` (True or False). Otherwise its whole chain
    counts: an error raised while handling a lost peer is an echo too; a lost peer met while handling another
    error (a barrier in a ``finally``) is unclear, and yields to clear ones.
    """
    if isinstance(error, EndedByLauncherError):
        return UNCLEAR
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    echoes = [_tells_of_peer(link) for link in chain]
    if not any(echoes):
        return OWN
    return ECHO if echoes[-1] else UNCLEAR


def _tells_of_peer(error: BaseException) -> bool:
    declared = getattr(error, "peer_failure", None)
    if declared is not None:
        return bool(declared)
    if isinstance(error, (ConnectionError, TimeoutError)):
        return True
    # gloo and NCCL raise RuntimeError or a subclass of it, and say the rest in words.
    return isinstance(error, RuntimeError) and bool(_PEER_TEXT.search(str(error)))


def exception_message(error: BaseException) -> dict[str, Any]:
    """The JSON form of an exception: level, summary, traceback, user_error, exit_status, final; whom an echo blames.

    A RankFailedError tells of another rank (or of this one, in the words it gave its peers): then ``rank`` and
    ``phase`` are there too, and everything is that rank's.
    """
    if isinstance(error, RankFailedError):
        return {
            "rank": error.rank,
            "phase": error.phase,
            "level": OWN,
            "summary": error.summary,
            "rank_traceback": error.rank_traceback,
            "user_error": error.user_error,
            "exit_status": error.exit_status,
            "final": error.final,
        }
    shown = limit_error(error) or _connection_error(error) or error
    user_error = isinstance(shown, ModelExportError)
    if user_error:
        summary = str(shown)
    else:
        lines = traceback.format_exception_only(type(error), error)
        # The last entry is the exception; those before it belong to a SyntaxError's source line.
        summary = lines[-1].strip().split("\n")[0]
    trace = error.__traceback__
    # The first frame is the launcher's own, which called the function.
    text = "".join(traceback.format_exception(type(error), error, trace.tb_next if trace else None))
    if len(text) > _TRACEBACK_LIMIT:
        half = _TRACEBACK_LIMIT // 2
        text = f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"
    return {
        "level": level_of(error),
        "summary": summary[:_SUMMARY_LIMIT],
        "rank_traceback": text,
        "user_error": user_error,
        "exit_status": getattr(error, "exit_status", 1) if user_error else 1,
        "final": getattr(error, "final", False) if user_error else False,
        "blamed": list(getattr(error, "blamed", ())),
        "indirect": getattr(error, "indirect", False),
    }


def _connection_error(error: BaseException) -> GatherError | None:
    """The sentence for a connection of gloo's that broke by itself: not by the end of a peer, which has a cause."""
    if not isinstance(error, RuntimeError) or isinstance(error, ModelExportError) or _PEER_TEXT.search(str(error)):
        return None
    found = _GLOO_CONNECTION.search(str(error))
    if found is None:
        return None
    address, port, reason = found.groups()
    return GatherError(f"the connection to another rank ({address}:{port}) broke: {reason}")


def describe_exit(exitcode: int, resident_bytes: int, *, was_up: bool, was_done: bool) -> str:
    """A sentence on a process that ended without reporting an error."""
    when = "" if was_up else " before it had started"
    if was_done:
        when = " after its work was done"
    if exitcode < 0:
        try:
            name = signal.Signals(-exitcode).name
        except ValueError:
            name = f"signal {-exitcode}"
        text = f"its process was killed by {name}{when}"
        if -exitcode == signal.SIGKILL:
            text += (
                f"; unless somebody sent that, the machine ran out of memory and the kernel chose this rank, which "
                f"last held {resident_bytes / 1e6:,.0f} MB (see dmesg; fewer ranks on one machine need less)"
            )
        else:
            text += address_space_note()
        return text
    if exitcode == 0:
        return "its process ended with exit status 0, but without having finished its work (os._exit?)"
    text = f"its process ended with exit status {exitcode}{when} and left no error message"
    if not was_up:
        text += (
            " (its output above may say why; a script that starts ranks must do so under "
            "`if __name__ == '__main__':`, because every rank imports it)"
        )
    return text
