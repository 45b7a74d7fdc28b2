"""Sizes and tables as a person reads them; for every part of the package that prints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

_SHORTEST = 14
"""Characters that are left of the longest names in a narrow table."""


def size_text(nbytes: float) -> str:
    """``nbytes`` in decimal units with three significant digits, e.g. ``"7.35 MB"``."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if nbytes < 999.5 or unit == "TB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    raise AssertionError("unreachable")


def duration_text(seconds: float) -> str:
    """A time as it is said of what lies ahead, e.g. ``"45 s"``, ``"12 min"``, ``"3 h 20 min"``."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, indent: str = "") -> Iterator[str]:
    """Lines of a table of words: every column flush left."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    for row in (header, *rows):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        yield indent + "  ".join(cells).rstrip()


def table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, width: int | None = None, optional: Sequence[str] = ()
) -> Iterator[str]:
    """Lines of a table: first column flush left, the others flush right.

    Args:
        width: of the terminal; None: as wide as it comes. To fit it, columns are left out, which a last line says, and
            the first column's names lose their beginnings.
        optional: headers of the columns that may be left out, the first ones first.
    """
    widths = {name: max(len(row[i]) for row in (header, *rows)) for i, name in enumerate(header)}
    left_out: list[str] = []
    names = widths[header[0]]
    if width is not None:
        for name in (None, *optional):
            left_out += [name] if name in widths else []
            others = sum(2 + widths[each] for each in header[1:] if each not in left_out)
            names = min(widths[header[0]], width - others)
            if names >= min(widths[header[0]], _SHORTEST):
                break
        names = max(names, min(widths[header[0]], _SHORTEST))
    kept = [i for i, name in enumerate(header) if name not in left_out]
    for row in (header, *rows):
        cells = [row[i].rjust(widths[header[i]]) for i in kept[1:]]
        yield "  ".join([_ending(row[0], names).ljust(names), *cells]).rstrip()
    if left_out:
        yield f"(no room: {', '.join(left_out)})"


def _ending(name: str, longest: int) -> str:
    """The end of a module's name, which tells more than its beginning."""
    return name if len(name) <= longest else ".." + name[len(name) - longest + 2 :]
