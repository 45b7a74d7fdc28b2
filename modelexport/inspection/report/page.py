"""The page of a report: one HTML document without scripts that needs nothing beside itself.

The templates are Jinja2's with autoescape; texts of a checkpoint are never part of a template.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from modelexport import __version__
from modelexport.inspection.report import charts
from modelexport.inspection.report.data import Report
from modelexport.inspection.report.figures import OUTLIER_DB
from modelexport.system.tables import duration_text, size_text

if TYPE_CHECKING:
    from jinja2 import Environment

__all__ = ["TEMPLATES", "environment", "render"]

TEMPLATES = Path(__file__).parent / "templates"
_SECTIONS = {
    "warnings": "Warnings",
    "size": "Size",
    "error": "Error of the weights",
    "outputs": "Error of the outputs",
    "assignment": "Choice of number formats",
    "evaluation": "Evaluation",
    "scales": "Quantisation scales",
    "modules": "Modules",
    "loading": "Loading it",
    "kept": "What stayed as it was",
    "run": "The run",
    "recipe": "Recipe and versions",
}
"""Template of each section -> its title. Sections that come out empty are left out."""


def render(report: Report) -> str:
    """Returns the document; equal reports give equal texts."""
    templates = environment()
    coloured = [row.number_format for row in report.modules]
    if report.assignment is not None and report.chosen_formats is not None:
        coloured += [*report.chosen_formats.formats, *report.assignment.uniform]
    shared = {"report": report, "colours": charts.FormatColours(coloured)}
    contents = ((key, templates.get_template(f"{key}.html.j2").render(shared).strip()) for key in _SECTIONS)
    sections = [(key, _SECTIONS[key], Markup(content)) for key, content in contents if content]  # escaped by Jinja2
    return templates.get_template("page.html.j2").render(shared, sections=sections, version=__version__)


@functools.cache
def environment() -> Environment:
    """Returns the process's environment of the templates: what is not markup is made fit to be shown, then escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    found = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: value if isinstance(value, Markup) else charts.shown_text(value),
        extensions=["jinja2.ext.do"],
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    found.filters |= {
        "breakable": _breakable,
        "count": _count_text,
        "duration": duration_text,
        "listed": _listed,
        "percent": charts.percent_text,
        "plus_minus": lambda error: "" if error is None else f" \u00b1 {error:.4f}",
        "setting": _setting_text,
        "settings": lambda values: [(k, _setting_text(v)) for k, v in values.items() if v not in (None, [], {})],
        "size": size_text,
    }
    found.globals |= {
        "bar": charts.bar,
        "columns": charts.columns,
        "dumbbell": charts.dumbbell,
        "error_domain": charts.error_domain,
        "front": charts.front,
        "heat_scale": charts.HeatScale,
        "heat_steps": charts.HEAT_STEPS,
        "histogram": charts.histogram,
        "most_listed": 20,
        "most_outliers": 8,
        "most_rows": 80,
        "outlier_db": OUTLIER_DB,
        "scale_axis": charts.scale_axis,
        "scale_domain": charts.scale_domain,
        "timeline": charts.timeline,
    }
    return found


def _breakable(name: str) -> Markup:
    """Returns a module's name with places to break a line after its dots."""
    return Markup(".<wbr>").join(charts.shown_text(name).split("."))


def _count_text(number: int) -> str:
    """Returns a large number with three digits: ``"8.03 B"``."""
    for size, unit, least in ((1e12, "T", 1e12), (1e9, "B", 1e9), (1e6, "M", 1e6), (1e3, "k", 1e4)):
        if number >= least:
            return f"{number / size:.3g} {unit}"
    return f"{number:,}"


def _listed(values: Sequence[object]) -> str:
    """Returns the first few values, and the number of the others."""
    shown = ", ".join(map(str, values[:6]))
    return f"{shown} and {len(values) - 6} more" if len(values) > 6 else shown


def _setting_text(value: Any) -> str:
    """Returns a recorded setting as one line."""
    if isinstance(value, Mapping):
        return _listed([f"{key} {_setting_text(part)}" for key, part in value.items() if part is not None])
    if isinstance(value, list):
        return _listed(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) and abs(value) < 1 << 60 else str(value)
