"""Small parts of the report's page: tables, and figures and settings as a reader has them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from modelexport.inspection.report.html import Markup, element

__all__ = ["MOST_LISTED", "at", "count_text", "listed", "number", "pairs", "plus_minus", "table", "value_text"]

MOST_LISTED = 20
"""Warnings, files, settings and the like that are shown."""


def table(heads: Sequence[str | tuple[str, str | None]], rows: Sequence[Iterable[Markup]]) -> Markup:
    """A table in a frame that scrolls; a head may be a text with its class."""
    named = [(head, None) if isinstance(head, str) else head for head in heads]
    head = element("tr", [element("th", text, class_=kind, scope="col") for text, kind in named])
    body = [element("tr", cells) for cells in rows]
    whole = element("table", element("thead", head), element("tbody", body), class_="wide")
    return element("div", whole, class_="scroll", tabindex="0", role="region", aria_label=named[0][0])


def pairs(values: Iterable[tuple[str, str]]) -> Markup:
    """A table of two columns: names and values."""
    rows = [
        element("tr", element("th", key, scope="row"), element("td", value, class_="long")) for key, value in values
    ]
    return element("table", element("tbody", rows))


def listed(values: Sequence[object]) -> str:
    """The first few, and how many more."""
    shown = ", ".join(map(str, values[:6]))
    return f"{shown} and {len(values) - 6} more" if len(values) > 6 else shown


def count_text(number: int) -> str:
    """A large number in three digits: ``"8.03 B"``."""
    for size, unit in ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e4, " k")):
        if number >= size:
            return f"{number / (1e3 if unit == ' k' else size):.3g}{unit}"
    return f"{number:,}"


def at(value: Any, *keys: str) -> Any:
    """What stands under these keys, one below the other; None where one is missing."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def number(value: Any) -> float | None:
    """A finite number; None for anything else."""
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e30
    return float(value) if good else None


def plus_minus(error: float | None) -> str:
    """A standard error, to stand after its figure."""
    return "" if error is None else f" \u00b1 {error:.4f}"


def value_text(value: Any) -> str:
    """A setting of a stranger's record, in a line."""
    if isinstance(value, dict):
        known = [f"{key} {value_text(part)}" for key, part in value.items() if part is not None]
        return listed(known)
    if isinstance(value, list):
        return listed(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) and abs(value) < 1 << 60 else str(value)
