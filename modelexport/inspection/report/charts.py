"""The report's charts: SVG whose lengths across are percentages, so that it fits any width, and tables of cells.

Each has its text: a heat map is a table whose cells say their figures, a drawing is labelled with what it shows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from modelexport.inspection.report.figures import Cell, Grid, OutputError
from modelexport.inspection.report.html import Markup, element
from modelexport.inspection.report.scales import BINS_PER_OCTAVE, ScaleCounts, bin_edge
from modelexport.inspection.report.style import HEAT_STEPS, QUANTISED_COLOURS
from modelexport.system.tables import size_text

__all__ = [
    "Colours",
    "bar",
    "columns",
    "dumbbell",
    "dumbbell_key",
    "error_axis",
    "heat_figures",
    "heat_key",
    "heat_map",
    "histogram",
    "part_text",
    "scale_axis",
    "scale_domain",
]

BIT_DB = 6.0
"""What one bit more of precision is worth: a heat map covers this much at least, or noise would look like news."""
FEW_COLUMNS = 16
"""A heat map of at most so many layers has its figures in its cells."""
_PLAIN = ("bf16", "fp16", "fp32", "fp64", "-")
_MOST_OCTAVES = 24
_HEIGHT = 44.0

Domain = tuple[float, float]
"""Least and largest exponent (of two, or of ten) along an axis."""


class Colours:
    """Which class of colour each number format has: the same on the whole page."""

    def __init__(self, formats: Iterable[str]) -> None:
        quantised = [name for name in dict.fromkeys(formats) if name not in _PLAIN]
        self._classes = {name: f"c{min(n, QUANTISED_COLOURS)}" for n, name in enumerate(quantised, 1)}

    def of(self, number_format: str) -> str:
        """The class for one; unquantised ones share theirs."""
        return self._classes.get(number_format, "c0")


def bar(formats: Mapping[str, int], largest: int, colours: Colours) -> Markup:
    """A bar of bytes, by number format; as wide as its place if it has ``largest`` bytes."""
    parts, start = [], 0.0
    for name, nbytes in formats.items():
        width = max(0.3, 100 * nbytes / max(1, largest)) if nbytes else 0.0
        title = element("title", f"{name}: {size_text(nbytes)}")
        parts.append(_rect(start, width, 0, 16, colours.of(name), title))
        start += width
    label = ", ".join(f"{name} {size_text(nbytes)}" for name, nbytes in formats.items())
    return element("svg", parts, role="img", aria_label=label, height=16)


def columns(parts: Sequence[tuple[str, Mapping[str, int]]], colours: Colours) -> Markup:
    """A column of bytes for each layer, by number format."""
    largest = max((sum(formats.values()) for _, formats in parts), default=1)
    step, height = 100 / max(1, len(parts)), 120.0
    drawn = [element("line", x1="0", x2="100%", y1=height, y2=height, class_="base")]
    for number, (name, formats) in enumerate(parts):
        top = height
        for number_format, nbytes in formats.items():
            tall = height * nbytes / max(1, largest)
            top -= tall
            title = element("title", f"{name}, {number_format}: {size_text(nbytes)}")
            left, wide = step * (number + 0.1), 0.8 * step
            drawn.append(_rect(left, wide, top, tall, colours.of(number_format), title))
    every = max(1, math.ceil(len(parts) / 16))
    for number, (name, _) in enumerate(parts):
        if number % every == 0:
            text = name.rpartition(".")[2]
            drawn.append(element("text", text, x=_percent(step * (number + 0.5)), y=height + 16, text_anchor="middle"))
    label = f"bytes of each of {len(parts)} layers, at most {size_text(largest)}"
    return element("svg", drawn, role="img", aria_label=label, height=height + 22)


# ------------------------------------------------------------------- heat maps


class _Ramp:
    """From decibels to a step of colour: 0 is the least error."""

    def __init__(self, grid: Grid) -> None:
        values = [cell.worst for row in grid.rows.values() for cell in row if cell is not None]
        low, high = min(values, default=0.0), max(values, default=0.0)
        spare = max(0.0, BIT_DB - (high - low)) / 2
        self.low, self.high = low - spare, high + spare

    def step(self, value: float) -> int:
        """The class of a figure."""
        part = (self.high - value) / (self.high - self.low)
        return min(HEAT_STEPS - 1, max(0, int(part * HEAT_STEPS)))


def heat_map(grid: Grid, what: str) -> Markup:
    """A table with a row for each projection and a column for each layer: the worst in each place, its figure said."""
    ramp, few = _Ramp(grid), len(grid.layers) <= FEW_COLUMNS
    body = []
    for name, cells in grid.rows.items():
        known = [cell for cell in cells if cell is not None]
        figures = [_heat_cell(cell, layer, ramp, few) for layer, cell in zip(grid.layers, cells, strict=True)]
        worst, mean = min(cell.worst for cell in known), _mean(known)
        sums = [element("td", f"{value:.1f}", class_="sum") for value in (worst, mean)]
        head = element("th", name, class_="row name", scope="row")
        body.append(element("tr", head, figures, sums))
    head = element("tr", element("th", "layer", class_="row"), _layer_heads(grid, few), _sum_heads())
    table = element(
        "table",
        element("thead", head),
        element("tbody", body),
        class_="heat wide few" if few else "heat wide",
    )
    frame = element("div", table, class_="scroll", tabindex="0", role="region", aria_label=what)
    return Markup(element("p", what, class_="note") + frame)


def _heat_cell(cell: Cell | None, layer: int, ramp: _Ramp, few: bool) -> Markup:
    if cell is None:
        return element("td", "\u00b7" if few else None, title=f"layer {layer}: none")
    text = f"{cell.name}: {cell.worst:.2f} dB"
    if cell.count > 1:
        text = f"worst of {cell.count}, {text}; mean {cell.mean:.2f} dB"
    return element("td", f"{cell.worst:.1f}" if few else None, class_=f"h{ramp.step(cell.worst)}", title=text)


def _layer_heads(grid: Grid, few: bool) -> Iterator[Markup]:
    """The layers' numbers, as many as there is room for."""
    count = len(grid.layers)
    every = 1 if few else next(n for n in (2, 5, 10, 20, 50, 100, 1000, 1 << 30) if count <= n * 14)
    for start in range(0, count, every):
        span = min(every, count - start)
        yield element("th", str(grid.layers[start]), colspan=str(span) if span > 1 else None, scope="col")


def _sum_heads() -> list[Markup]:
    return [element("th", text, class_="sum", scope="col") for text in ("worst", "mean")]


def heat_key(grid: Grid) -> Markup:
    """What the colours mean."""
    ramp = _Ramp(grid)
    steps = [element("i", class_=f"h{step}") for step in range(HEAT_STEPS)]
    ends = f"least error {ramp.high:.0f} dB", f"{ramp.low:.0f} dB"
    return element("p", element("span", ends[0], element("span", steps, class_="ramp"), ends[1]), class_="key")


def heat_figures(grid: Grid) -> Markup | None:
    """Every figure of a heat map whose cells are too small for them; None where they are in its cells."""
    if len(grid.layers) <= FEW_COLUMNS:
        return None
    head = element("tr", element("th", "layer"), [element("th", name, class_="name") for name in grid.rows])
    body = []
    for number, layer in enumerate(grid.layers):
        found = (cells[number] for cells in grid.rows.values())
        figures = [element("td", "-" if cell is None else f"{cell.worst:.1f}") for cell in found]
        body.append(element("tr", element("th", str(layer), scope="row"), figures))
    table = element("table", element("thead", head), element("tbody", body))
    summary = element("summary", "All figures in dB, as a table")
    return element("details", summary, element("div", table, class_="scroll"))


def _mean(cells: Sequence[Cell]) -> float:
    return math.fsum(cell.mean * cell.count for cell in cells) / sum(cell.count for cell in cells)


# ------------------------------------------------------------- scales, and outputs


def scale_domain(scales: Sequence[ScaleCounts]) -> Domain | None:
    """Powers of two between which all scales lie (or nearly all, where they are far apart); None where none are."""
    known = [counts for counts in scales if counts.counts]
    if not known:
        return None
    low = min(math.log2(counts.least) - 0.5 * counts.powers for counts in known)
    high = max(math.log2(counts.most) + 0.5 * counts.powers for counts in known)
    middle = sorted(math.log2(counts.median) for counts in known)[len(known) // 2]
    low, high = max(low, middle - _MOST_OCTAVES), min(high, middle + _MOST_OCTAVES)
    spare = max(0.0, 2.0 - (high - low)) / 2 + 0.02 * (high - low)
    return low - spare, high + spare


def histogram(counts: ScaleCounts, domain: Domain, colours: Colours) -> Markup:
    """How many scales there are of each magnitude; the area is their number, each row's highest bar is full height."""
    bars = [bar for bar in _bars(counts) if domain[0] <= (bar[0] + bar[1]) / 2 <= domain[1]]
    tallest = max((count / (end - start) for start, end, count in bars), default=1.0)
    drawn: list[Markup] = [_vertical(_place(value, domain), _HEIGHT) for _, value in _ticks(domain)]
    for start, end, count in bars:
        tall = max(0.75, (_HEIGHT - 2) * count / (end - start) / tallest)
        left, right = _place(start, domain), _place(end, domain)
        title = element("title", f"{_number(2**start)} to {_number(2**end)}: {count:,}")
        drawn.append(_rect(left, right - left, _HEIGHT - tall, tall, colours.of(counts.number_format), title))
    drawn.append(element("line", x1="0", x2="100%", y1=_HEIGHT, y2=_HEIGHT, class_="base"))
    label = (
        f"histogram of {counts.seen:,} scales of {counts.name}: from {_number(counts.least)} to "
        f"{_number(counts.most)}, median about {_number(counts.median)}"
    )
    return element("svg", drawn, role="img", aria_label=label, height=_HEIGHT)


def _bars(counts: ScaleCounts) -> Iterator[tuple[float, float, int]]:
    """Exponents of two between which each bar stands, and how many scales it is for."""
    for number in sorted(counts.counts):
        if counts.powers:  # a power of two itself: the bar stands around it
            middle = math.log2(bin_edge(number))
            yield middle - 0.45, middle + 0.45, counts.counts[number]
        elif number >= BINS_PER_OCTAVE:
            yield math.log2(bin_edge(number)), math.log2(bin_edge(number + 1)), counts.counts[number]


def scale_axis(domain: Domain) -> Markup:
    """The figures below the histograms."""
    texts = [
        element("text", text, x=_percent(_place(value, domain)), y=12, text_anchor="middle")
        for text, value in _ticks(domain)
    ]
    return element("svg", texts, height=18, aria_hidden="true")


def _ticks(domain: Domain) -> list[tuple[str, float]]:
    """Round figures along an axis of powers of two: decades, or finer where there are few of them."""
    low, high = (bound * math.log10(2) for bound in domain)
    digits: tuple[int, ...] = (1,) if high - low > 3 else (1, 3) if high - low > 1.6 else (1, 2, 5)
    found = [
        (digit, exponent)
        for exponent in range(math.floor(low), math.ceil(high) + 1)
        for digit in digits
        if low <= exponent + math.log10(digit) <= high
    ]
    every = max(1, math.ceil(len(found) / 8))
    return [(_number(d * 10.0**e), (e + math.log10(d)) / math.log10(2)) for d, e in found[::every]]


def dumbbell(row: OutputError, domain: Domain) -> Markup:
    """An error before (a ring) and after (a disc), along powers of ten."""
    before, after = (100 * (math.log10(v) - domain[0]) / (domain[1] - domain[0]) for v in (row.before, row.after))
    ticks = [_vertical(100 * (n - domain[0]) / (domain[1] - domain[0]), 20.0) for n in _decades(domain)]
    marks = [
        element("line", x1=_percent(before), x2=_percent(after), y1=10, y2=10, class_="link"),
        element("circle", element("title", part_text(row.before)), class_="before", cx=_percent(before), cy=10, r=5),
        element("circle", element("title", part_text(row.after)), class_="after", cx=_percent(after), cy=10, r=5),
    ]
    label = f"from {part_text(row.before)} to {part_text(row.after)}"
    return element("svg", ticks, marks, role="img", aria_label=label, height=20)


def dumbbell_key() -> Markup:
    """What the marks mean."""
    marks = []
    for kind, text in (("before", "rounded to nearest"), ("after", "as written")):
        mark = element("svg", element("circle", class_=kind, cx="6", cy="6", r="5"), class_="mark", aria_hidden="true")
        marks.append(element("li", mark, text))
    return element("ul", marks, element("li", "on a logarithmic scale"), class_="key")


def part_text(value: float) -> str:
    """A part of a whole, in percent with three digits."""
    return f"{100 * value:#.3g} %" if value >= 1e-6 else f"{100 * value:.1e} %"


def error_axis(errors: Sequence[OutputError]) -> Domain:
    """Powers of ten between which the errors lie, with some room."""
    values = [math.log10(value) for row in errors for value in (row.before, row.after)]
    low, high = min(values), max(values)
    room = max(0.15, 0.08 * (high - low))
    return low - room, high + room


def _decades(domain: Domain) -> range:
    return range(math.ceil(domain[0]), math.floor(domain[1]) + 1)


def _rect(left: float, wide: float, top: float, tall: float, kind: str, title: Markup) -> Markup:
    """``left`` and ``wide`` in percent, ``top`` and ``tall`` in pixels."""
    place = {"x": _percent(left), "width": _percent(wide), "y": f"{top:.2f}", "height": f"{tall:.2f}"}
    return element("rect", title, class_=kind, **place)


def _vertical(percent: float, height: float) -> Markup:
    return element("line", x1=_percent(percent), x2=_percent(percent), y1=0, y2=height, class_="grid")


def _place(exponent: float, domain: Domain) -> float:
    return 100 * min(1.0, max(0.0, (exponent - domain[0]) / (domain[1] - domain[0])))


def _percent(value: float) -> str:
    return f"{value:.2f}%"


def _number(value: float) -> str:
    """A scale with as many digits as a reader compares: ``0.0034``, ``1.2e-05``."""
    return f"{value:.2g}" if value < 1000 else f"{value:.3g}"
