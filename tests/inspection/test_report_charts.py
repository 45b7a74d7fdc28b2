"""The report's charts: colours that can be read and mean the same everywhere, and sizes that stay small."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest

from modelexport.checkpoints.safetensors.file import Checkpoint
from modelexport.inspection.opened import open_contents
from modelexport.inspection.report import gather, render
from modelexport.inspection.report.charts import HEAT_STEPS, FormatColours, histogram, scale_domain
from modelexport.inspection.report.figures import Cell, ErrorGrid, ModuleKinds, make_grid
from modelexport.inspection.report.page import TEMPLATES, environment
from modelexport.inspection.report.scales import ScaleCounts
from tests.helpers.models import quantised_headers
from tests.inspection._page import Page

pytestmark = pytest.mark.timeout(180)

STYLE = (TEMPLATES / "style.css").read_text()


def heat_page(macro: str, *arguments: object) -> Page:
    """What a macro of the heat map's template writes."""
    template: Any = environment().get_template("heat_map.html.j2").module
    return Page(f"<html>{getattr(template, macro)(*arguments)}</html>")


def grid(*rows: list[float | None]) -> ErrorGrid:
    cells = {
        f"m{n}": [None if value is None else Cell(value, value, 1, f"layer.{i}.m{n}") for i, value in enumerate(row)]
        for n, row in enumerate(rows)
    }
    return ErrorGrid(list(range(len(rows[0]))), 1, cells, {})


def steps(found: ErrorGrid) -> list[int | None]:
    """The class of every cell, row by row."""
    page = heat_page("heat_map", found, "what")
    cells = [e for e in page.all("td") if e.attributes.get("class") != "sum"]
    return [int(e.attributes["class"][1:]) if "class" in e.attributes else None for e in cells]


def test_noise_is_no_news() -> None:
    assert set(steps(grid([31.6, 31.7, 31.65], [31.62, 31.6, 31.66]))) == {HEAT_STEPS // 2}


def test_colours_go_from_the_best_to_the_worst() -> None:
    assert steps(grid([40.0, 30.0, None, 20.0])) == [0, HEAT_STEPS // 2, None, HEAT_STEPS - 1]
    found = steps(grid([float(n) for n in range(40, 10, -1)]))
    assert found == sorted(found, key=lambda step: step or 0)
    assert set(found) == set(range(HEAT_STEPS))


def test_figures_stand_in_the_cells_or_below() -> None:
    few, many = grid([20.06] * 16), grid([20.06] * 17, [None] * 16 + [3.0])
    assert not heat_page("heat_figures", few).all("table")
    assert [e.text for e in heat_page("heat_map", few, "what").all("td")] == ["20.1"] * 18
    below = heat_page("heat_figures", many)
    assert [e.text for e in below.all("td")] == ["20.1", "-"] * 16 + ["20.1", "3.0"]
    page = heat_page("heat_map", many, "what")
    assert page.all("td", class_="h6")[0].attributes["title"] == "layer.16.m1: 3.00 dB"


def test_of_many_layers_a_few_share_a_column() -> None:
    checkpoint = quantised_headers("int4", layers=50)
    modules = open_contents_of(checkpoint)
    kinds = ModuleKinds(modules)
    figures = {m.name: float(10 + (m.index or 0)) for m in modules if m.stored.quantised}
    whole = make_grid(figures, kinds)
    assert whole is not None
    assert (whole.together, len(whole.layers), len(whole.rows)) == (1, 50, 7)
    found = make_grid(figures, kinds, most=100)
    assert found is not None
    assert found.together == 4
    assert found.layers == list(range(0, 50, 4))
    cells = found.rows["mlp.up_proj"]
    assert [cell and (cell.worst, cell.mean, cell.count) for cell in cells[:2]] == [(10.0, 11.5, 4), (14.0, 15.5, 4)]
    last = cells[-1]
    assert last is not None
    assert (last.worst, last.count) == (58.0, 2)


def open_contents_of(checkpoint: Checkpoint) -> list[Any]:
    from modelexport.models.modules import read_architecture, read_modules
    from modelexport.quantization.methods import read_quantization_config

    config = checkpoint.config
    return read_modules(checkpoint, read_architecture(config), read_quantization_config(config))


def test_histograms_have_one_axis() -> None:
    counts = [ScaleCounts("a", "int8", counts={8 * 120: 10, 8 * 120 + 4: 30}, least=2.0**-7, most=2.0**-6.2, seen=40)]
    counts.append(ScaleCounts("b", "mxfp4", counts={8 * 110: 5}, least=2.0**-17, most=2.0**-17, powers=True, seen=5))
    domain = scale_domain(counts)
    assert domain is not None
    assert domain[0] < -17.5
    assert -6.2 < domain[1] < -5.5
    colours = FormatColours(["bf16", "int8", "mxfp4"])
    assert [colours.of(name) for name in ("bf16", "int8", "mxfp4", "fp32")] == ["c0", "c1", "c2", "c0"]
    page = Page(f"<html>{histogram(counts[0], domain, colours)}</html>")
    bars = page.all("rect")
    assert [bar.text for bar in bars] == ["0.0078 to 0.0088: 10", "0.012 to 0.013: 30"]
    area = [float(b.attributes["width"][:-1]) * float(b.attributes["height"]) for b in bars]
    assert area[1] / area[0] == pytest.approx(3, rel=0.01)
    [bar] = Page(f"<html>{histogram(counts[1], domain, colours)}</html>").all("rect")
    assert float(bar.attributes["x"][:-1]) > 0
    assert scale_domain([]) is None


# -------------------------------------------------------------------------- colours


def _luminance(colour: str) -> float:
    parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    red, green, blue = (p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(a: str, b: str) -> float:
    """Of two colours, as WCAG 2 has it: 1 to 21."""
    low, high = sorted((_luminance(a), _luminance(b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("number", [0, 1], ids=["light", "dark"])
def test_everything_can_be_read(number: int) -> None:
    blocks = re.findall(r":root\{([^}]*)\}", STYLE)
    colours = dict(re.findall(r"--([a-z0-9-]+):(#[0-9a-f]{6})", blocks[number]))
    for name in ("ink", "muted", "link"):
        assert contrast(colours["page"], colours[name]) >= 4.5
        assert contrast(colours["raised"], colours[name]) >= 4.5
    assert contrast(colours["alert-page"], colours["alert"]) >= 4.5
    assert all(contrast(colours[f"c{n}"], colours["page"]) >= 3 for n in range(7))
    rules = re.findall(r"\.h(\d)\{background:var\(--(h\d)\);color:([^}]*)\}", STYLE)
    assert len(rules) == HEAT_STEPS
    for _, background, text in rules:
        ink = text if text.startswith("#") else colours[text[len("var(--") : -1]]
        assert contrast(colours[background], ink) >= 4.5
    lightness = [_luminance(colours[f"h{n}"]) for n in range(HEAT_STEPS)]
    assert lightness == sorted(lightness, reverse=not number)


# ----------------------------------------------------------------------------- size


def save_large(checkpoint: Checkpoint, directory: Path) -> Path:
    """A checkpoint of any size: its headers, a file with nothing in it, and a record of errors."""
    header: dict[str, Any] = {}
    at = 0
    for name, info in checkpoint.infos.items():
        header[name] = {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": [at, at + info.nbytes]}
        at += info.nbytes
    content = json.dumps(header).encode()
    directory.mkdir()
    with open(directory / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(content)) + content)
        file.truncate(8 + len(content) + at)
    (directory / "config.json").write_text(json.dumps(checkpoint.config))
    modules = open_contents(directory).modules
    record = {
        "recipe": {"quant": "fp8-block"},
        "producer": {},
        "versions": {},
        "layers": [],
        "sha256": {},
        "sqnr_db": {m.name: 30.0 - n % 7 for n, m in enumerate(modules) if m.stored.quantised},
        "unquantised": {m.name: "kept" for m in modules if not m.stored.quantised},
    }
    (directory / "modelexport.json").write_text(json.dumps(record))
    return directory


@pytest.mark.parametrize(
    "shape",
    [
        {"layers": 126, "hidden": 16384, "heads": 128, "kv_heads": 8, "intermediate": 53248, "vocab": 128256},
        {"layers": 24, "model_type": "deepseek_v3", "experts": 64, "hidden": 7168, "heads": 128},
    ],
    ids=["llama-405b", "deepseek"],
)
def test_pages_of_large_models_are_small(shape: dict[str, Any], tmp_path: Path) -> None:
    out = save_large(quantised_headers("fp8-block", **shape), tmp_path / "large")
    report = gather(out)
    assert report.sqnr is not None
    assert len(report.sqnr.layers) == shape["layers"]
    content = render(report)
    assert len(content) < 200_000
    page = Page(content)
    page.check_self_contained()
    assert f"input_layernorm ({shape['layers']})" in page.text("kept")
