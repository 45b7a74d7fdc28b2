"""The log of a run (``--log``), as rows of a chart: what each rank has read and written, over time.

The log may be one that is still being written, or that a killed run has left.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modelexport.errors import UsageError
from modelexport.system.small_files import LARGEST_JSON, read_small

__all__ = ["RankTimeline", "RunTimeline", "read_log"]

BINS = 100
_MOST_RANKS = 256


@dataclass(frozen=True)
class RankTimeline:
    """One rank's row.

    Attributes:
        rates: bytes read and written a second, in each of :data:`BINS` equal parts of the run.
        phase: the last that it has turned to, ``since`` so many seconds after the run began.
    """

    rank: int
    rates: list[float]
    nbytes: int
    phase: str
    since: float


@dataclass(frozen=True)
class RunTimeline:
    """The last run of a log.

    Attributes:
        state: ``done``, ``failed``, or ``running`` where neither is said.
        error: of a run that failed.
    """

    state: str
    seconds: float
    error: str = ""
    ranks: list[RankTimeline] = field(default_factory=list)

    @property
    def largest(self) -> float:
        """The largest rate of all."""
        return max((rate for rank in self.ranks for rate in rank.rates), default=0.0)


def read_log(path: Path) -> RunTimeline:
    """Reads the last run of a log.

    Raises:
        UsageError: the file cannot be read, or holds no line of a run.
    """
    label = f"--log {path}"
    content = read_small(path, largest=LARGEST_JSON, label=label, error=UsageError)
    lines = list(_lines(content))
    begins = [number for number, line in enumerate(lines) if line.get("phase") == "begin" and line.get("rank") is None]
    lines = lines[begins[-1] if begins else 0 :]
    if not lines:
        raise UsageError(f"{label}: holds no line of a run: give the FILE of an export's --log")
    seconds = max(line["seconds"] for line in lines)
    own = [line for line in lines if line["rank"] is None]
    state = own[-1]["phase"] if own and own[-1]["phase"] in ("done", "failed") else "running"
    ranks = sorted({line["rank"] for line in lines if line["rank"] is not None})[:_MOST_RANKS]
    return RunTimeline(
        state,
        seconds,
        str(own[-1].get("error", "")) if own else "",
        [_row(rank, [line for line in lines if line["rank"] == rank], seconds) for rank in ranks],
    )


def _lines(content: bytes) -> Iterator[dict[str, Any]]:
    """Yields the lines that are a rank's or the launcher's, as far as they are whole."""
    for text in content.splitlines():
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if not isinstance(line, dict) or not isinstance(line.get("rank", ""), int | None):
            continue
        numbers = [line.get(name) for name in ("seconds", "read", "written")]
        if all(isinstance(x, int | float) and 0 <= x < 1e18 for x in numbers) and isinstance(line.get("phase"), str):
            yield line


def _row(rank: int, lines: list[dict[str, Any]], seconds: float) -> RankTimeline:
    width = seconds / BINS or 1.0
    rates, before, at = [0.0] * BINS, 0, 0.0
    for line in lines:
        moved, now = line["read"] + line["written"], line["seconds"]
        first, last = (min(BINS - 1, int(x / width)) for x in (at, now))
        for part in range(first, last + 1):  # what moved between two lines moved evenly
            begin, end = max(at, part * width), min(now, (part + 1) * width)
            share = (end - begin) / (now - at) if now > at else 1.0
            rates[part] += max(0, moved - before) * max(0.0, share) / width
        before, at = moved, now
    turned = [line for line in lines if not line.get("beat")] or lines
    return RankTimeline(rank, rates, before, turned[-1]["phase"], turned[-1]["seconds"])
