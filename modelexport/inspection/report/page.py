"""The page of a report: one HTML document that needs nothing beside itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from modelexport import __version__
from modelexport.inspection.report.charts import Colours
from modelexport.inspection.report.data import Group, Report
from modelexport.inspection.report.figures import OUTLIER_DB
from modelexport.inspection.report.html import Child, Markup, breakable, element
from modelexport.inspection.report.parts import (
    MOST_LISTED,
    at,
    count_text,
    listed,
    number,
    pairs,
    plus_minus,
    value_text,
)
from modelexport.inspection.report.sections import (
    evaluation_section,
    modules_section,
    output_error_section,
    scales_section,
    size_section,
    weight_error_section,
)
from modelexport.inspection.report.style import STYLE
from modelexport.system.tables import size_text

__all__ = ["render"]

_MOST_OUTLIERS = 8
_EMPTY: tuple[object, ...] = (None, [], {})
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def render(report: Report) -> str:
    """The document. The same report gives the same text, and a page that runs and loads nothing."""
    colours = Colours(row.number_format for row in report.modules)
    sections = [
        ("warnings", "Warnings", _warnings(report)),
        ("size", "Size", size_section(report, colours)),
        ("error", "Error of the weights", weight_error_section(report)),
        ("outputs", "Error of the outputs", output_error_section(report)),
        ("evaluation", "Evaluation", evaluation_section(report)),
        ("scales", "Quantisation scales", scales_section(report, colours)),
        ("modules", "Modules", modules_section(report)),
        ("loading", "Loading it", _loading(report)),
        ("kept", "What stayed as it was", _kept(report)),
        ("recipe", "Recipe and versions", _recipe(report)),
    ]
    shown = [(key, title, list(content)) for key, title, content in sections]
    shown = [(key, title, content) for key, title, content in shown if content]
    links = [element("a", title, href=f"#{key}") for key, title, _ in shown]
    body = [
        element("header", _head(report), element("nav", links, aria_label="Sections")),
        element("main", [element("section", element("h2", t), content, id=key) for key, t, content in shown]),
        element("footer", element("p", f"Written by modelexport {__version__} from the files of the checkpoint.")),
    ]
    head = [
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("meta", name="color-scheme", content="light dark"),
        element("title", f"{report.name}: modelexport report"),
        element("style", Markup(STYLE)),
    ]
    document = element("html", element("head", head), element("body", body), lang="en")
    return f"<!DOCTYPE html>\n{document}\n"


# ------------------------------------------------------------------- the summary


def _head(report: Report) -> Iterator[Markup]:
    inspection = report.inspection
    yield element("h1", report.name)
    yield element("p", _sentence(report), class_="lede")
    tiles = [
        ("Parameters", count_text(inspection.parameters), f"{inspection.parameters:,}"),
        (
            "Size of the weights",
            size_text(inspection.nbytes),
            f"{size_text(2 * inspection.parameters)} in 16 bits: {inspection.ratio:.2f} times smaller",
        ),
        ("Bits a parameter", f"{inspection.bits:.2f}", "scales and all"),
    ]
    known = [row for row in report.modules if row.worst_db is not None]
    if known:
        worst = min(known, key=lambda row: row.worst_db or 0.0)
        tiles.append(("Worst SQNR", f"{worst.worst_db:.1f} dB", worst.worst or ""))
    divergence = number(at(report.evaluation, "comparison", "mean_kl"))
    if divergence is not None:
        error = number(at(report.evaluation, "comparison", "kl_standard_error"))
        tiles.append(("KL divergence", f"{divergence:.4f}", f"nats a token{plus_minus(error)}"))
    elif inspection.tensor_parallel_sizes:
        sizes = ", ".join(map(str, inspection.tensor_parallel_sizes))
        most = max(inspection.tensor_parallel_sizes)
        tiles.append(("Tensor parallelism", f"up to {most}" if most > 1 else "1 only", sizes))
    yield element("dl", [_tile(*tile) for tile in tiles], class_="tiles")


def _tile(title: str, figure: str, note: str) -> Markup:
    below = note if " " in note else breakable(note)
    return element("div", element("dt", title), element("dd", figure), element("dd", below, class_="sub"))


def _sentence(report: Report) -> list[Child]:
    """What it is, in a line or two."""
    inspection, recipe = report.inspection, report.recipe
    model = inspection.architectures[0] if inspection.architectures else inspection.model_type or "a model"
    tied = ", tied embeddings" if inspection.tied_embeddings else ""
    parts: list[Child] = [f"{model} with {inspection.layers} layers{tied}. "]
    method = (inspection.quantization or {}).get("quant_method")
    stored = dict.fromkeys((*([method] if method else []), *([inspection.format] if inspection.format != "hf" else [])))
    formats = _quantised_formats(report)
    if formats:
        algorithm = recipe.get("algorithm")
        by = f" by {algorithm}" if algorithm not in (None, "rtn") else ", rounded to nearest" if algorithm else ""
        cache = ", with scales for the KV cache" if (inspection.quantization or {}).get("kv_cache_scheme") else ""
        parts.append(f"Quantised to {_and(formats)}{by}{cache}; stored as {' in '.join(stored)}. ")
    else:
        parts.append(f"Not quantised; stored as {inspection.format}. ")
    if report.is_recorded:
        parts.append(f"Made from {report.source or 'an unnamed source'} by {_producer(report)}.")
    return parts


def _and(words: Sequence[str]) -> str:
    return " and ".join(part for part in (", ".join(words[:-1]), words[-1]) if part)


def _producer(report: Report) -> str:
    return " ".join(str(value) for value in report.producer.values()) or "an unnamed program"


def _quantised_formats(report: Report) -> list[str]:
    """By the bytes they take, the most first."""
    sizes: dict[str, int] = {}
    plain = ("bf16", "fp16", "fp32", "fp64", "-")
    for part in report.parts:
        for name, nbytes in part.formats.items():
            if name not in plain:
                sizes[name] = sizes.get(name, 0) + nbytes
    return sorted(sizes, key=lambda name: -sizes[name])[:6]


def _warnings(report: Report) -> Iterator[Markup]:
    texts: list[tuple[str, str]] = [("", text) for text in report.warnings]
    texts = [*texts[:MOST_LISTED], *([("", f"and {len(texts) - MOST_LISTED} more")] * (len(texts) > MOST_LISTED))]
    texts += [("Outlier. ", text) for text in report.outliers[:_MOST_OUTLIERS]]
    if len(report.outliers) > _MOST_OUTLIERS:
        more = len(report.outliers) - _MOST_OUTLIERS
        texts.append(("", f"and {more} more linears, {OUTLIER_DB:.0f} dB or more below the median of their kind"))
    unseen = report.calibration.get("unseen_experts")
    if isinstance(unseen, list) and unseen:
        what = f"No calibration token came to {len(unseen)} experts, which were rounded to nearest: {listed(unseen)}."
        texts.append(("Calibration. ", what))
    if texts:
        items = [element("li", element("b", kind) if kind else None, text) for kind, text in texts]
        yield element("ul", items, class_="alerts")
    else:
        yield element("p", "None: nothing in the headers, in config.json and in the record looks wrong.")
    if report.unknown:
        yield element("p", "Not known:", class_="note")
        yield element("ul", [element("li", text) for text in report.unknown], class_="plain note")


# ----------------------------------------------------------------------- loading


def _loading(report: Report) -> Iterator[Markup]:
    inspection = report.inspection
    yield element("h3", "Tensor-parallel sizes")
    if inspection.tensor_parallel_sizes:
        yield element("ul", [element("li", str(n)) for n in inspection.tensor_parallel_sizes], class_="sizes")
        yield element(
            "p",
            "At these sizes every rank gets whole heads, and whole groups of the numbers that share a scale.",
            class_="note",
        )
    else:
        yield element("p", f"Not known: {inspection.tensor_parallel_note}.")
    yield element("h3", "Files")
    files = [(entry["name"], f"{size_text(entry['bytes'])}, {entry['tensors']} tensors") for entry in inspection.files]
    if len(files) > MOST_LISTED:
        files = [*files[:MOST_LISTED], (f"and {len(files) - MOST_LISTED} more", "")]
    yield pairs(files)
    if inspection.quantization is not None:
        yield element("h3", "quantization_config")
        yield pairs(_announced(inspection.quantization))


def _announced(quantization: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What config.json tells engines."""
    method, layout = quantization["quant_method"], quantization["format"]
    yield "method", f"{method}, {layout}" if layout else str(method)
    for name, group in list(quantization["config_groups"].items())[:MOST_LISTED]:
        yield str(name), f"{listed(group['targets'])}: {group['scheme']}"
    yield "ignored", listed(quantization["ignore"]) or "nothing"
    scheme = quantization["kv_cache_scheme"]
    yield "KV cache", "in the model's dtype" if scheme is None else value_text(scheme)


def _kept(report: Report) -> Iterator[Markup]:
    for groups, title in ((report.unquantised, "Not quantised"), (report.left_out, "Not written")):
        if groups:
            yield element("h3", title)
            yield element("ul", [element("li", _group(group)) for group in groups], class_="plain")


def _group(group: Group) -> list[Child]:
    kinds = [name if count == 1 else f"{name} ({count})" for name, count in group.modules.items()]
    return [element("span", listed(kinds), class_="name"), f": {group.reason}"]


# ------------------------------------------------------------ recipe and versions


def _recipe(report: Report) -> Iterator[Markup]:
    if not report.is_recorded:
        return
    made = {"source": report.source, "producer": _producer(report), **report.versions}
    blocks = [("Recipe", report.recipe), ("Made with", made), ("Calibration", report.calibration)]
    shown = [
        element("div", element("h3", title), pairs((k, value_text(v)) for k, v in values.items() if v not in _EMPTY))
        for title, values in blocks
        if values
    ]
    yield element("div", shown, class_="pairs")
