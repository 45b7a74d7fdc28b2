"""The sections of the report's page that have figures: size, errors, evaluation, scales, modules."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

from modelexport.inspection.report.charts import (
    Colours,
    bar,
    columns,
    dumbbell,
    dumbbell_key,
    error_axis,
    heat_figures,
    heat_key,
    heat_map,
    histogram,
    part_text,
    scale_axis,
    scale_domain,
)
from modelexport.inspection.report.data import Report
from modelexport.inspection.report.figures import Grid
from modelexport.inspection.report.html import Markup, element
from modelexport.inspection.report.parts import MOST_LISTED, at, count_text, number, pairs, plus_minus, table
from modelexport.system.tables import size_text

__all__ = [
    "evaluation_section",
    "modules_section",
    "output_error_section",
    "scales_section",
    "size_section",
    "weight_error_section",
]

_MOST_ROWS = 80


def size_section(report: Report, colours: Colours) -> Iterator[Markup]:
    """Bytes by part of the model, by number format and by layer."""
    total, largest = max(1, report.inspection.nbytes), max((part.nbytes for part in report.parts), default=1)
    rows = [
        (
            element("th", part.name, scope="row"),
            element("td", bar(part.formats, largest, colours), class_="bar"),
            element("td", size_text(part.nbytes)),
            element("td", _share(part.nbytes, total)),
            element("td", count_text(part.parameters)),
            element("td", f"{part.bits:.2f}" if part.parameters else "-"),
        )
        for part in report.parts
    ]
    heads = (
        ("part of the model", "left"),
        ("bytes by number format", "left"),
        "size",
        "share",
        "parameters",
        "bits each",
    )
    yield table(heads, rows)
    formats = dict.fromkeys(name for part in report.parts for name in part.formats)
    sums = {name: sum(part.formats.get(name, 0) for part in report.parts) for name in formats}
    yield element(
        "ul",
        [
            element(
                "li",
                element("i", class_=f"swatch {colours.of(name)}"),
                _sum_text(name, nbytes),
            )
            for name, nbytes in sorted(sums.items(), key=lambda item: -item[1])
            if nbytes
        ],
        class_="key",
    )
    yield from _layer_sizes(report, colours)


def _share(nbytes: int, total: int) -> str:
    percent = 100 * nbytes / total
    return f"{percent:.1f} %" if percent >= 0.05 or not nbytes else "< 0.1 %"


def _sum_text(number_format: str, nbytes: int) -> str:
    return f"{'other' if number_format == '-' else number_format} {size_text(nbytes)}"


def _layer_sizes(report: Report, colours: Colours) -> Iterator[Markup]:
    """A chart of the layers where they differ; a sentence where they do not."""
    layers = report.layers
    if not layers:
        return
    if len({json.dumps(layer.formats, sort_keys=True) for layer in layers}) == 1:
        first = layers[0]
        yield element(
            "p", f"Each of the {len(layers)} layers takes {size_text(first.nbytes)}, {first.bits:.2f} bits a parameter."
        )
        return
    yield element("h3", "By layer")
    yield element("p", f"The largest takes {size_text(max(layer.nbytes for layer in layers))}.", class_="note")
    yield columns([(layer.name, layer.formats) for layer in layers[:400]], colours)


# ------------------------------------------------------------------------ errors


def weight_error_section(report: Report) -> Iterator[Markup]:
    """SQNR of the weights; nothing where it is not recorded."""
    if report.sqnr is None:
        return
    yield element(
        "p",
        "Signal to quantisation noise ratio (SQNR) of each linear's weights, against the source's. "
        "More is better; 6 dB are about one bit.",
    )
    yield from _heat(report.sqnr, "SQNR in dB")


def _heat(grid: Grid, what: str) -> Iterator[Markup]:
    if grid.rows:
        experts = any(cell is not None and cell.count > 1 for row in grid.rows.values() for cell in row)
        notes = ["; of many experts, the worst"] if experts else []
        if grid.together > 1:
            notes.append(f"; each column is the worst of {grid.together} layers")
        yield heat_map(grid, f"{what}, by projection and layer{''.join(notes)}")
        yield heat_key(grid)
        figures = heat_figures(grid)
        if figures is not None:
            yield figures
    if grid.hidden:
        yield element("p", f"{grid.hidden} more projections are not shown.", class_="note")
    if grid.outside:
        texts = [f"{name} {value:.2f} dB" for name, value in list(grid.outside.items())[:MOST_LISTED]]
        yield element("p", f"Outside the layers: {', '.join(texts)}.")


def output_error_section(report: Report) -> Iterator[Markup]:
    """Error of the outputs before and after; nothing where nothing was calibrated."""
    if not report.output_errors:
        return
    yield element(
        "p",
        "Mean squared error of each linear's outputs on the calibration samples, as a part of the outputs' own "
        "square: means over the layers.",
    )
    yield dumbbell_key()
    domain = error_axis(report.output_errors)
    rows = [
        (
            element("th", row.name, class_="name", scope="row"),
            element("td", dumbbell(row, domain), class_="bar"),
            element("td", part_text(row.before)),
            element("td", part_text(row.after)),
            element("td", f"{10 * math.log10(row.before / row.after):+.1f} dB"),
            element("td", element("span", part_text(row.worst_after), title=row.worst)),
        )
        for row in report.output_errors
    ]
    heads = (("projection", "left"), ("error", "left"), "to nearest", "as written", "gain", "worst")
    yield table(heads, rows)
    if report.output_sqnr is not None:
        yield element("h3", "As written, by layer")
        yield from _heat(report.output_sqnr, "Signal to noise of the outputs in dB")


def evaluation_section(report: Report) -> Iterator[Markup]:
    """What was measured on text; nothing where nothing was."""
    rows: list[tuple[str, str]] = []
    against = at(report.evaluation, "comparison")
    before, after = (number(at(against, side, "perplexity")) for side in ("reference", "model"))
    alone = number(at(report.evaluation, "model", "perplexity"))
    if before is not None and after is not None:
        rows.append(("Perplexity", f"{before:.2f} before, {after:.2f} after"))
    elif alone is not None:
        rows.append(("Perplexity", f"{alone:.2f}"))
    for key, error, label in (
        ("loss_difference", "loss_standard_error", "Loss, nats a token"),
        ("mean_kl", "kl_standard_error", "KL divergence, nats a token"),
    ):
        value = number(at(against, key))
        if value is not None:
            sign = "+" if key == "loss_difference" else ""
            rows.append((label, f"{value:{sign}.4f}{plus_minus(number(at(against, error)))}"))
    if not rows:
        return
    yield pairs(rows)
    windows, window = (number(report.evaluation.get(key)) for key in ("windows", "window"))
    if windows is not None and window is not None:
        text = report.evaluation.get("text", "a text")
        what = "This checkpoint against its source" if against else "This checkpoint"
        yield element(
            "p",
            f"{what}, on {windows:.0f} windows of {window:.0f} tokens of {text}; \u00b1 is one standard error.",
            class_="note",
        )


# ------------------------------------------------------------------------ scales


def scales_section(report: Report, colours: Colours) -> Iterator[Markup]:
    """Histograms of the scales; nothing where there are none."""
    domain = scale_domain(report.scales)
    if domain is None:
        return
    seen, total = sum(counts.seen for counts in report.scales), sum(counts.total for counts in report.scales)
    part = "" if seen == total else f" {seen:,} of {total:,} were looked at, spread evenly."
    yield element(
        "p",
        "What the stored numbers are multiplied by: how many scales there are of each magnitude, along a logarithmic "
        f"axis. A long tail to the right is a group or a row with an outlier.{part}",
    )
    several = len({counts.number_format for counts in report.scales}) > 1
    rows: list[Markup] = []
    for counts in report.scales[:_MOST_ROWS]:
        if not counts.counts:
            continue
        name = [counts.name, element("span", f" {counts.number_format}", class_="note") if several else None]
        bad = f", {counts.unusable:,} zero or not finite" if counts.unusable else ""
        figures = [
            "median ",
            element("b", f"{counts.median:.2g}"),
            element("br"),
            f"{counts.least:.2g} to {counts.most:.2g}; {count_text(counts.total)} scales{bad}",
        ]
        rows += [
            element("div", name, class_="name"),
            element("div", histogram(counts, domain, colours)),
            element("div", figures, class_="figures"),
        ]
    yield element("div", rows, element("div", scale_axis(domain), class_="axis"), class_="spread")


# ----------------------------------------------------------------------- modules


def modules_section(report: Report) -> Iterator[Markup]:
    """Every kind of module."""
    rows = []
    for row in report.modules[:_MOST_ROWS]:
        worst = "-" if row.worst_db is None else f"{row.worst_db:.2f} dB"
        mean = "-" if row.mean_db is None else f"{row.mean_db:.2f} dB"
        rows.append(
            (
                element("th", row.name, class_="name", scope="row"),
                element("td", f"{row.count:,}"),
                element("td", row.number_format),
                element("td", row.shapes),
                element("td", f"{row.bits:.2f}" if row.parameters else "-"),
                element("td", size_text(row.nbytes)),
                element("td", element("span", worst, title=row.worst)),
                element("td", mean),
            )
        )
    heads = (("module", "left"), "count", "format", "shape", "bits a weight", "size", "worst SQNR", "mean SQNR")
    shown = len(heads) if any(row.worst_db is not None for row in report.modules) else len(heads) - 2
    yield table(heads[:shown], [row[:shown] for row in rows])
    if len(report.modules) > _MOST_ROWS:
        yield element("p", f"And {len(report.modules) - _MOST_ROWS} more kinds (--json lists all).", class_="note")
