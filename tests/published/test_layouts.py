"""Checkpoints laid out as their makers published them, through every command; the results are docs/models.md.

    python -m pytest -m slow tests/published
    MODELEXPORT_WRITE_DOCS=1 python -m pytest -m slow tests/published

The second one writes the page; otherwise each layout must be found as its line there says.
"""

from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.helpers.marks import few
from tests.published._layouts import LAYOUTS
from tests.published._page import DOCUMENT, committed, document
from tests.published._runs import Outcome, examine

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore")]  # transformers warns of many things

WRITE = os.environ.get("MODELEXPORT_WRITE_DOCS") == "1"
SOME = ("Qwen2.5-VL", "Gemma 3", "Kimi K2.5", "InternVL3", "compressed-tensors, W4A16, Gemma 3", "Mistral Small 3.1")
outcomes: dict[str, Outcome] = {}


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
    outcomes[name] = examine(LAYOUTS[name], tmp_path)
    if not WRITE:
        same_version()
        assert outcomes[name] == committed().get(name)


@pytest.mark.slow
def test_write_the_page() -> None:
    """After all others, where asked to: lines of layouts that were not run stay as they are."""
    if not WRITE:
        pytest.skip("writes docs/models.md with MODELEXPORT_WRITE_DOCS=1")
    assert outcomes, "no layout was examined in this run"
    DOCUMENT.write_text(document({**committed(), **outcomes}, version("transformers")), encoding="utf-8")


def test_the_page_is_whole() -> None:
    same_version()
    found = committed()
    assert list(found) == list(LAYOUTS)
    assert DOCUMENT.read_text(encoding="utf-8") == document(found, version("transformers"))
    assert len(found) >= 50
