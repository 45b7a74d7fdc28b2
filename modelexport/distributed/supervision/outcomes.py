"""The outcome of a rendezvous of all ranks, as data that travels and as the error that every rank raises.

An outcome is a JSON object with a ``kind``: ``value``, ``failed`` (a rank raised), ``usage`` (calls that do not fit
each other or the group) or ``missing`` (ranks that did not come, listed as ``blamed``). All but ``value`` have
``rank``, ``level`` (see :mod:`modelexport.distributed.supervision.failures`) and ``summary``; ``failed`` has the fields
of a ``Failure`` besides.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelexport.distributed.supervision.failures import LEVEL, OWN, Failure, exception_message
from modelexport.distributed.supervision.status import phase_of_error
from modelexport.distributed.transport.messages import FLAG, TEXT, WHOLE, WHOLES, Kind, LostPeerError, check_fields
from modelexport.errors import UsageError, quoted

__all__ = ["Outcome", "RefusalError", "checked", "describe", "difference", "error_of", "is_known", "mark"]

Outcome = dict[str, Any]

_COMMON: Mapping[str, Kind] = {"rank": WHOLE, "level": LEVEL, "summary": TEXT}
_FAILED: Mapping[str, Kind] = {"phase": TEXT, "rank_traceback": TEXT, "user_error": FLAG, "exit_status": WHOLE}
_FIELDS: Mapping[str, Mapping[str, Kind]] = {
    "value": {},
    "usage": _COMMON,
    "missing": {**_COMMON, "blamed": WHOLES},
    "failed": {**_COMMON, **_FAILED, "final": FLAG},
}
_FAILURE_FIELDS = ("rank", "level", "phase", "rank_traceback", "user_error", "exit_status", "final")
_OUTCOME = "_modelexport_outcome"


class RefusalError(UsageError):
    """Wrong arguments of a call, found by the call."""


def checked(outcome: Any) -> Outcome:
    """``outcome`` itself, which a rank has put into the process group's store.

    Raises:
        LostPeerError: it is no outcome.
    """
    sender = "an outcome in the process group's store"
    kind = check_fields(outcome, sender, {"kind": TEXT}, {"others": WHOLE})["kind"]
    if kind not in _FIELDS:
        raise LostPeerError(f"{sender} is of the unknown kind {quoted(kind)}")
    return check_fields(outcome, sender, _FIELDS[kind])


def mark(error: BaseException, outcome: Outcome) -> None:
    """Attaches to ``error`` its outcome, which all ranks know."""
    setattr(error, _OUTCOME, outcome)


def is_known(error: BaseException) -> bool:
    """Returns whether all ranks know of ``error``."""
    return hasattr(error, _OUTCOME)


def difference(calls: dict[int, str]) -> str:
    """Describes a mismatch of the ranks' calls; "" where all are in the same one."""
    ranks: dict[str, list[int]] = {}
    for rank, call in calls.items():
        ranks.setdefault(call, []).append(rank)
    if len(ranks) < 2:
        return ""
    texts = [
        f"{'rank' if len(who) == 1 else 'ranks'} {', '.join(map(str, who))} in {call}" for call, who in ranks.items()
    ]
    return (
        f"the ranks are in different calls: {'; '.join(texts)}; every rank must make the same calls in the same order"
    )


def describe(error: BaseException, call: str, rank: int) -> Outcome:
    """Makes the outcome of ``error`` on ``rank``."""
    known: Outcome | None = getattr(error, _OUTCOME, None)
    if known is not None:
        return known
    if isinstance(error, RefusalError):
        return {"kind": "usage", "level": OWN, "rank": rank, "summary": str(error)}
    phase, _ = phase_of_error(error) or ("", False)
    if call not in phase:
        phase = f"{phase}, in {call}" if phase else f"in {call}"
    # A RankFailedError, which a launcher may raise here, has its own rank and phase.
    return {"kind": "failed", "rank": rank, "phase": phase, **exception_message(error)}


def error_of(outcome: Outcome, rank: int) -> Exception:
    """Makes the exception that ``rank`` raises for an outcome that is no value."""
    summary = outcome["summary"]
    error: Exception
    if outcome["kind"] == "usage":
        error = UsageError(summary)
    elif outcome["kind"] == "missing":
        error = LostPeerError(summary, outcome["blamed"])
    else:
        others = outcome.get("others", 0)
        if others:
            summary += f" (and {others} more {'rank' if others == 1 else 'ranks'} failed)"
        error = Failure(time=0.0, summary=summary, **{name: outcome[name] for name in _FAILURE_FIELDS}).error()
        error.peer_failure = outcome["rank"] != rank  # type: ignore[attr-defined]
    mark(error, outcome)
    return error
