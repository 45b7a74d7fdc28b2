"""Charts of the report as SVG whose horizontal lengths are percentages, so that they fit any width.

Each drawing carries its content as text too, in its label and in the titles of its marks.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from markupsafe import Markup

from modelexport.inspection.record.reading import RecordedAssignment
from modelexport.inspection.report.data import StoredBytes
from modelexport.inspection.report.figures import UNQUANTISED, ErrorGrid, KindOutputError
from modelexport.inspection.report.scales import BINS_PER_OCTAVE, ScaleCounts, bin_edge
from modelexport.inspection.report.timeline import RankTimeline
from modelexport.system.tables import size_text

__all__ = [
    "HEAT_STEPS",
    "FormatColours",
    "HeatScale",
    "bar",
    "columns",
    "dumbbell",
    "error_domain",
    "front",
    "histogram",
    "percent_text",
    "scale_axis",
    "scale_domain",
    "shown_text",
    "timeline",
]

HEAT_STEPS = 7
"""Classes ``h0`` (least error) to ``h6``. An odd number: figures that are equal but for noise are in the middle one."""
_QUANTISED_COLOURS = 6
_HEAT_RANGE_DB = 6.0  # one bit of precision: a heat map covers this much at least, so that noise has no colour
_MOST_OCTAVES = 24
_HISTOGRAM_HEIGHT = 44.0
_FRONT_HEIGHT = 220.0
_FRONT_DECADES = 6  # errors that are smaller than the largest by more are on the base line
_LONGEST_TEXT = 300  # names of modules are shorter
# Control characters, halves of surrogate pairs, and marks that reorder the text around them.
_UNSHOWN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")

Domain = tuple[float, float]
"""Least and largest exponent (of two, or of ten) along an axis."""


def shown_text(value: object) -> str:
    """Returns text of bounded length without characters that a browser does not show; it is not escaped."""
    text = str(value)
    if len(text) > _LONGEST_TEXT:
        text = f"{text[:_LONGEST_TEXT]}..."
    return _UNSHOWN.sub("\ufffd", text)


class FormatColours:
    """The colour class of each number format, the same on the whole page."""

    def __init__(self, formats: Iterable[str]) -> None:
        quantised = [name for name in dict.fromkeys(formats) if name not in UNQUANTISED]
        self._classes = {name: f"c{min(n, _QUANTISED_COLOURS)}" for n, name in enumerate(quantised, 1)}

    def of(self, number_format: str) -> str:
        """Returns the class of a number format; those that are not quantised share one."""
        return self._classes.get(number_format, "c0")


class HeatScale:
    """The colour scale of a heat map: decibels to steps of colour, of which 0 is the least error.

    Attributes:
        low, high: the decibels at the two ends.
    """

    def __init__(self, grid: ErrorGrid) -> None:
        values = [cell.worst for row in grid.rows.values() for cell in row if cell is not None]
        low, high = min(values, default=0.0), max(values, default=0.0)
        spare = max(0.0, _HEAT_RANGE_DB - (high - low)) / 2
        self.low, self.high = low - spare, high + spare

    def step(self, value: float) -> int:
        """Returns the step of a figure."""
        part = (self.high - value) / (self.high - self.low)
        return min(HEAT_STEPS - 1, max(0, int(part * HEAT_STEPS)))


def bar(formats: Mapping[str, int], largest: int, colours: FormatColours) -> Markup:
    """Returns a bar of bytes by number format; ``largest`` bytes fill the width."""
    marks, start = [], 0.0
    for name, nbytes in formats.items():
        width = max(0.3, 100 * nbytes / max(1, largest)) if nbytes else 0.0
        marks.append(_rectangle(start, width, 0, 16, colours.of(name), f"{name}: {size_text(nbytes)}"))
        start += width
    return _svg(16, marks, ", ".join(f"{name} {size_text(nbytes)}" for name, nbytes in formats.items()))


def columns(layers: Sequence[StoredBytes], colours: FormatColours) -> Markup:
    """Returns a column of bytes by number format for each layer."""
    largest = max((layer.nbytes for layer in layers), default=1)
    step, height = 100 / max(1, len(layers)), 120.0
    marks = [_base_line(height)]
    for number, layer in enumerate(layers):
        top = height
        for number_format, nbytes in layer.formats.items():
            tall = height * nbytes / max(1, largest)
            top -= tall
            title = f"{layer.name}, {number_format}: {size_text(nbytes)}"
            marks.append(_rectangle(step * (number + 0.1), 0.8 * step, top, tall, colours.of(number_format), title))
    every = max(1, math.ceil(len(layers) / 16))
    marks += [
        _centred_text(layers[number].name.rpartition(".")[2], step * (number + 0.5), height + 16)
        for number in range(0, len(layers), every)
    ]
    return _svg(height + 22, marks, f"bytes of each of {len(layers)} layers, at most {size_text(largest)}")


def timeline(rank: RankTimeline, largest: float, seconds: float) -> Markup:
    """Returns a rank's rate over the run; ``largest`` bytes a second have the full height."""
    height, width = 28.0, 100 / max(1, len(rank.rates))
    marks = [_base_line(height)]
    for number, rate in enumerate(rank.rates):
        if rate:
            tall = max(0.75, height * rate / max(1.0, largest))
            title = f"{seconds * number / len(rank.rates):.0f} s: {size_text(rate)}/s"
            marks.append(_rectangle(width * number, width, height - tall, tall, "c1", title))
    return _svg(height, marks, f"bytes a second of rank {rank.rank} over {seconds:.0f} s")


def scale_domain(scales: Sequence[ScaleCounts]) -> Domain | None:
    """Returns the powers of two between which all scales lie, or nearly all where they are far apart.

    None where there are no scales.
    """
    known = [counts for counts in scales if counts.counts]
    if not known:
        return None
    low = min(math.log2(counts.least) - 0.5 * counts.powers for counts in known)
    high = max(math.log2(counts.most) + 0.5 * counts.powers for counts in known)
    middle = sorted(math.log2(counts.median) for counts in known)[len(known) // 2]
    low, high = max(low, middle - _MOST_OCTAVES), min(high, middle + _MOST_OCTAVES)
    spare = max(0.0, 2.0 - (high - low)) / 2 + 0.02 * (high - low)
    return low - spare, high + spare


def histogram(counts: ScaleCounts, domain: Domain, colours: FormatColours) -> Markup:
    """Returns a histogram of scales by magnitude: areas are counts, and the highest bar has the full height."""
    bars = [bar for bar in _bars(counts) if domain[0] <= (bar[0] + bar[1]) / 2 <= domain[1]]
    tallest = max((count / (end - start) for start, end, count in bars), default=1.0)
    marks = [_grid_line(_position(value, domain), _HISTOGRAM_HEIGHT) for _, value in _ticks(domain)]
    for start, end, count in bars:
        tall = max(0.75, (_HISTOGRAM_HEIGHT - 2) * count / (end - start) / tallest)
        left, right = _position(start, domain), _position(end, domain)
        title = f"{_scale_text(2**start)} to {_scale_text(2**end)}: {count:,}"
        colour = colours.of(counts.number_format)
        marks.append(_rectangle(left, right - left, _HISTOGRAM_HEIGHT - tall, tall, colour, title))
    marks.append(_base_line(_HISTOGRAM_HEIGHT))
    label = (
        f"histogram of {counts.seen:,} scales of {counts.name}: from {_scale_text(counts.least)} to "
        f"{_scale_text(counts.most)}, median about {_scale_text(counts.median)}"
    )
    return _svg(_HISTOGRAM_HEIGHT, marks, label)


def _bars(counts: ScaleCounts) -> Iterator[tuple[float, float, int]]:
    """Yields each bar's first and last exponent of two, and its number of scales."""
    for number in sorted(counts.counts):
        if counts.powers:  # a power of two itself: the bar stands around it
            middle = math.log2(bin_edge(number))
            yield middle - 0.45, middle + 0.45, counts.counts[number]
        elif number >= BINS_PER_OCTAVE:
            yield math.log2(bin_edge(number)), math.log2(bin_edge(number + 1)), counts.counts[number]


def scale_axis(domain: Domain) -> Markup:
    """Returns the labels of the histograms' axis."""
    return _svg(18, [_centred_text(text, _position(value, domain), 12) for text, value in _ticks(domain)])


def _ticks(domain: Domain) -> list[tuple[str, float]]:
    """Returns round figures along an axis of powers of two: decades, or finer where there are few of them."""
    low, high = (bound * math.log10(2) for bound in domain)
    digits: tuple[int, ...] = (1,) if high - low > 3 else (1, 3) if high - low > 1.6 else (1, 2, 5)
    found = [
        (digit, exponent)
        for exponent in range(math.floor(low), math.ceil(high) + 1)
        for digit in digits
        if low <= exponent + math.log10(digit) <= high
    ]
    every = max(1, math.ceil(len(found) / 8))
    return [(_scale_text(d * 10.0**e), (e + math.log10(d)) / math.log10(2)) for d, e in found[::every]]


def dumbbell(row: KindOutputError, domain: Domain) -> Markup:
    """Returns an error before (a ring) and after (a disc), along powers of ten."""
    before, after = (100 * (math.log10(v) - domain[0]) / (domain[1] - domain[0]) for v in (row.before, row.after))
    decades = range(math.ceil(domain[0]), math.floor(domain[1]) + 1)
    marks = [_grid_line(100 * (n - domain[0]) / (domain[1] - domain[0]), 20.0) for n in decades]
    link = '<line x1="{:.2f}%" x2="{:.2f}%" y1="10" y2="10" class="link"/>'
    marks.append(Markup(link).format(before, after))
    circle = Markup('<circle class="{}" cx="{:.2f}%" cy="10" r="5"><title>{}</title></circle>')
    marks += [
        circle.format("before", before, percent_text(row.before)),
        circle.format("after", after, percent_text(row.after)),
    ]
    return _svg(20, marks, f"from {percent_text(row.before)} to {percent_text(row.after)}")


def front(found: RecordedAssignment, colours: FormatColours) -> Markup:
    """Returns errors against bits per weight: a line through the best choices, number formats for all linears as
    discs, and a larger disc for what was chosen. Errors are along powers of ten."""
    points = [*found.front, found.chosen, *found.uniform.values()]
    exponents = [math.log10(error) for _, error in points if error > 0] or [0.0]
    high = max(exponents) + 0.15
    low = max(min(exponents), high - _FRONT_DECADES) - 0.15
    first, last = min(bits for bits, _ in points), max(bits for bits, _ in points)
    along = first - 0.04 * (last - first) - 0.1, last + 0.04 * (last - first) + 0.1

    def place(point: tuple[float, float]) -> tuple[float, float]:
        down = (high - math.log10(point[1])) / (high - low) if point[1] > 0 else 1.0
        return _position(point[0], along), _FRONT_HEIGHT * min(1.0, down)

    marks = [*_front_axes(along, (low, high)), _base_line(_FRONT_HEIGHT)]
    segment = Markup('<line x1="{:.2f}%" y1="{:.1f}" x2="{:.2f}%" y2="{:.1f}" class="link"/>')
    marks += [segment.format(*place(start), *place(end)) for start, end in itertools.pairwise(found.front)]
    disc = Markup('<circle class="{}" cx="{:.2f}%" cy="{:.1f}" r="{}"><title>{}</title></circle>')
    marks += [disc.format("before", *place(each), 2, _point_text("best", each)) for each in found.front]
    for name, each in found.uniform.items():
        marks.append(disc.format(colours.of(name), *place(each), 5, _point_text(f"all {name}", each)))
    marks.append(disc.format("after", *place(found.chosen), 7, _point_text("chosen", found.chosen)))
    return _svg(_FRONT_HEIGHT + 22, marks, f"error against bits per weight: {_point_text('chosen', found.chosen)}")


def _front_axes(along: tuple[float, float], exponents: Domain) -> Iterator[Markup]:
    """Yields a line and a label for each power of ten of the error, and labels of whole bits."""
    low, high = exponents
    line = Markup('<line x1="0" x2="100%" y1="{0:.1f}" y2="{0:.1f}" class="grid"/>')
    label = Markup('<text x="0" y="{:.1f}">{:g}</text>')
    for exponent in range(math.ceil(low), math.floor(high) + 1):
        top = _FRONT_HEIGHT * (high - exponent) / (high - low)
        yield line.format(top)
        yield label.format(top - 3, 10.0**exponent)
    every = max(1, round((along[1] - along[0]) / 8))
    for bits in range(math.ceil(along[0]), math.floor(along[1]) + 1, every):
        yield _centred_text(str(bits), _position(bits, along), _FRONT_HEIGHT + 16)


def _point_text(what: str, point: tuple[float, float]) -> str:
    return f"{what}: {point[0]:.2f} bits, {point[1]:.3g}"


def percent_text(value: float) -> str:
    """Returns a fraction in percent, with three digits."""
    return f"{100 * value:#.3g} %" if value >= 1e-6 else f"{100 * value:.1e} %"


def error_domain(errors: Sequence[KindOutputError]) -> Domain:
    """Returns the powers of ten between which the errors lie, with a margin."""
    values = [math.log10(value) for row in errors for value in (row.before, row.after)]
    low, high = min(values), max(values)
    margin = max(0.15, 0.08 * (high - low))
    return low - margin, high + margin


def _svg(height: float, marks: Iterable[Markup], label: str | None = None) -> Markup:
    """Returns a drawing; one without a label is hidden from screen readers."""
    described = Markup('role="img" aria-label="{}"').format(shown_text(label)) if label is not None else None
    attributes = described or Markup('aria-hidden="true"')
    return Markup('<svg {} height="{:g}">{}</svg>').format(attributes, height, Markup("").join(marks))


def _rectangle(left: float, width: float, top: float, height: float, colour: str, title: str) -> Markup:
    """``left`` and ``width`` in percent, ``top`` and ``height`` in pixels."""
    mark = '<rect class="{}" x="{:.2f}%" width="{:.2f}%" y="{:.2f}" height="{:.2f}"><title>{}</title></rect>'
    return Markup(mark).format(colour, left, width, top, height, shown_text(title))


def _base_line(height: float) -> Markup:
    return Markup('<line x1="0" x2="100%" y1="{0:g}" y2="{0:g}" class="base"/>').format(height)


def _grid_line(percent: float, height: float) -> Markup:
    return Markup('<line x1="{0:.2f}%" x2="{0:.2f}%" y1="0" y2="{1:g}" class="grid"/>').format(percent, height)


def _centred_text(text: str, percent: float, bottom: float) -> Markup:
    mark = Markup('<text x="{:.2f}%" y="{:g}" text-anchor="middle">{}</text>')
    return mark.format(percent, bottom, shown_text(text))


def _position(exponent: float, domain: Domain) -> float:
    return 100 * min(1.0, max(0.0, (exponent - domain[0]) / (domain[1] - domain[0])))


def _scale_text(value: float) -> str:
    """Returns a scale with as many digits as a reader compares: ``0.0034``, ``1.2e-05``."""
    return f"{value:.2g}" if value < 1000 else f"{value:.3g}"
