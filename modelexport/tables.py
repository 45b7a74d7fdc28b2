"""Sizes and tables as a person reads them; for every part of the package that prints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def size_text(nbytes: float) -> str:
    """``nbytes`` in decimal units with three significant digits, e.g. ``"7.35 MB"``."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if nbytes < 999.5 or unit == "TB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    raise AssertionError("unreachable")


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, indent: str = "") -> Iterator[str]:
    """Lines of a table of words: every column flush left."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    for row in (header, *rows):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        yield indent + "  ".join(cells).rstrip()


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of a table: first column flush left, the others flush right."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    for row in (header, *rows):
        cells = [
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()
