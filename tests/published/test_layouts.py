"""Checkpoints laid out as their makers published them, through every command; the results are docs/models.md.

    python -m pytest -m slow tests/published
    MODELEXPORT_WRITE_DOCS=1 python -m pytest -m slow tests/published
    MODELEXPORT_WRITE_DOCS=1 python -m pytest -m slow tests/published -k "real_size or write"

The second one writes the page, the third its real sizes alone; otherwise each layout must be found as its line says.
"""

from __future__ import annotations

import os
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.helpers.marks import few
from tests.published._layouts import LAYOUTS
from tests.published._page import DOCUMENT, committed, document
from tests.published._real import REAL, cell, planned, repositories, weights
from tests.published._runs import DONE, NOT_DONE, Outcome, examine

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore")]  # transformers warns of many things

WRITE = os.environ.get("MODELEXPORT_WRITE_DOCS") == "1"
SOME = ("Qwen2.5-VL", "Gemma 3", "Kimi K2.5", "InternVL3", "compressed-tensors, W4A16, Gemma 3", "Mistral Small 3.1")
REAL_SOME = ("Llama 3.1", "gpt-oss", "Llama 4 Scout", "Granite 4.0 H", "Jamba", "Llama 3.2 Vision", "DBRX")
outcomes: dict[str, Outcome] = {}
real_sizes: dict[str, str] = {}


def same_version() -> None:
    """Skip where another transformers is installed than the page was made with."""
    if DOCUMENT.is_file() and f"transformers {version('transformers')};" not in DOCUMENT.read_text(encoding="utf-8"):
        pytest.skip(f"docs/models.md is not about transformers {version('transformers')}")


@pytest.mark.parametrize("name", few(SOME, "Gemma 3"))
def test_a_few_layouts(name: str, tmp_path: Path) -> None:
    same_version()
    found = examine(LAYOUTS[name], tmp_path, steps=("plan", "int4", "reshard"))
    expected = committed()[name]
    assert found.cells == {step: expected.cells[step] for step in found.cells}
    assert found.quantised == expected.quantised


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout(name: str, tmp_path: Path) -> None:
    before = committed().get(name, Outcome())
    outcomes[name] = replace(examine(LAYOUTS[name], tmp_path), real=before.real, engine=before.engine)
    if not WRITE:
        same_version()
        assert outcomes[name] == committed().get(name)


def real_size(name: str, root: Path) -> str:
    """The cell of a layout's real sizes; plans have the weights that its makers count, and linears of int4's size."""
    plans = {}
    for number, repository in enumerate(repositories(name)):
        real, plan = REAL[repository], planned(name, repository, root / str(number))
        plans[repository] = plan
        assert weights(plan) == pytest.approx(1e9 * real.weights, rel=0.01), repository
        bits = [row.bits for row in plan.rows if row.number_format == "int4"]
        assert max(bits) <= 1.03 * (4 + 16 / real.group), (repository, bits)
        experts = [
            row for row in plan.rows if ".experts." in f".{row.name}" and row.weights and not _is_draft(row.name)
        ]
        assert {row.number_format for row in experts} <= {"int4"}, repository
    return cell(plans)


def _is_draft(row: str) -> bool:
    """Returns whether a row is of a draft layer: these have their names in full."""
    return row.startswith(("model.", "mtp."))


@pytest.mark.parametrize("name", few(REAL_SOME, "Llama 3.1"))
def test_a_few_real_sizes(name: str, tmp_path: Path) -> None:
    same_version()
    assert real_size(name, tmp_path) == committed()[name].real


@pytest.mark.slow
@pytest.mark.timeout(300)  # DeepSeek-V3 has 46000 linears
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_real_size(name: str, tmp_path: Path) -> None:
    if (expected := committed().get(name)) is None or expected.cells["plan"] != DONE:
        real_sizes[name] = NOT_DONE
        return
    real_sizes[name] = real_size(name, tmp_path)
    if not WRITE:
        same_version()
        assert real_sizes[name] == expected.real


@pytest.mark.slow
def test_write_the_page() -> None:
    """After all others, where asked to: lines of layouts that were not run stay as they are."""
    if not WRITE:
        pytest.skip("writes docs/models.md with MODELEXPORT_WRITE_DOCS=1")
    assert outcomes or real_sizes, "no layout was examined in this run"
    found = {**committed(), **outcomes}
    for name, real in real_sizes.items():
        found[name] = replace(found[name], real=real)
    DOCUMENT.write_text(document(found, version("transformers")), encoding="utf-8")


def test_the_page_is_whole() -> None:
    same_version()
    found = committed()
    assert list(found) == list(LAYOUTS)
    assert DOCUMENT.read_text(encoding="utf-8") == document(found, version("transformers"))
    assert len(found) >= 50
