"""Markdown of untrusted text: it stays text, on one line, whatever is in it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

__all__ = ["code", "plain", "table"]

_LONGEST = 200
_SPECIAL = re.compile(r"([\\`*_\[\]|~$]|(?<=www)\.|:(?=//))", re.IGNORECASE)
_BAR, _ESCAPED_BAR = re.compile(r"(?<!\\)\|"), r"\\|"  # also within code: GitHub's tables are cut before it is read
_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}


def plain(text: object) -> str:
    """Returns it as text within a line: nothing in it is markup, a link or HTML."""
    line = _one_line(text)
    for character, entity in _ENTITIES.items():
        line = line.replace(character, entity)
    return _SPECIAL.sub(r"\\\1", line)


def code(text: object) -> str:
    """Returns it as a span of code, between as many backticks as it needs."""
    line = _one_line(text)
    runs = [len(run) for run in re.findall(r"`+", line)]
    fence = "`" * (max(runs, default=0) + 1)
    padding = " " if runs or not line.strip() else ""
    return f"{fence}{padding}{line}{padding}{fence}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yields lines of a table, its first column flush left and the others right; cells are Markdown already."""
    yield f"| {' | '.join(header)} |"
    yield f"| --- |{' ---: |' * (len(header) - 1)}"
    for row in rows:
        yield f"| {' | '.join(_BAR.sub(_ESCAPED_BAR, cell) for cell in row)} |"


def _one_line(text: object) -> str:
    """Returns its words with single blanks between, without control characters, cut where it is very long."""
    line = " ".join("".join(c if c.isprintable() else " " for c in str(text)).split())
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."
