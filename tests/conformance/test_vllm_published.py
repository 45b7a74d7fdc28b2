"""vLLM's own loader fills every parameter of its models from exports of the published layouts: a column of a page.

    python -m pytest -m slow tests/conformance/test_vllm_published.py
    MODELEXPORT_WRITE_DOCS=1 python -m pytest -m slow tests/conformance/test_vllm_published.py

MODELEXPORT_VLLM_PYTHON names an interpreter with vLLM. The second one writes the column of docs/models.md.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from modelexport.exporting import export
from tests.conformance._vllm import VLLM, needs_vllm
from tests.published._layouts import LAYOUTS
from tests.published._page import DOCUMENT, committed, document
from tests.published._writing import write

pytestmark = [pytest.mark.slow, needs_vllm, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(3000)]

SETTINGS: dict[str, dict[str, Any]] = {
    "none": {"quant": "none"},
    "int4": {"quant": "int4", "group_size": 32},
    "fp8": {"quant": "fp8"},
}
BLOCKS = {"quant": "*experts*=mxfp4-wo,*=none", "format": "mxfp4"}  # gpt-oss' experts, as vLLM reads them quantised
DRAFT_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
SAID = 200
"""How much of what vLLM says is kept."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, ...]]:
    """Layout -> of each export, how many parameters vLLM has and fills, or what it says."""
    root = tmp_path_factory.mktemp("published")
    outs: dict[str, list[str]] = {}
    for number, (name, layout) in enumerate(LAYOUTS.items()):
        source, outs[name] = write(layout, root / str(number) / "source"), []
        for quant, settings in SETTINGS.items():
            if quant == "int4" and layout.config.get("model_type") == "gpt_oss":
                settings = BLOCKS
            out = source.with_name(quant)
            export(model=str(source), out=str(out), quiet=True, evaluate=False, **settings)
            _rename_vision(out / "config.json")
            outs[name].append(str(out))
    every = [out for group in outs.values() for out in group]
    models = _filled(every, root)
    drafts = _filled([out for out in every if _has_draft(Path(out))], root, "--draft")
    return {name: tuple(_part(models[out], drafts.get(out)) for out in group) for name, group in outs.items()}


def _rename_vision(path: Path) -> None:
    """Gives Kimi K2.5's vision_config the names by which vLLM reads it: by the published ones it has its sizes from
    defaults."""
    config = json.loads(path.read_text())
    if config["model_type"] != "kimi_k25":
        return
    vision = {**config["vision_config"], "model_type": "kimi_k25_vision"}
    for theirs, own in (("init_pos_emb_", "pos_emb_"), ("vt_", "")):
        vision |= {own + key.removeprefix(theirs): value for key, value in vision.items() if key.startswith(theirs)}
    config |= {"vision_config": vision, "projection_hidden_size": vision["mm_hidden_size"]}
    path.write_text(json.dumps(config))


def _has_draft(out: Path) -> bool:
    config = json.loads((out / "config.json").read_text())
    return any((config.get("text_config") or config).get(key) for key in DRAFT_LAYERS)


def _filled(outs: Sequence[str], root: Path, *options: str) -> dict[str, str]:
    """Export -> its parameters' number, if all are filled, or what vLLM says."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "PYTHON"))}
    command = [str(VLLM), str(Path(__file__).with_name("vllm_parameters.py")), *options, *outs]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2000, check=False, env=environment)
    printed = [json.loads(line[11:]) for line in done.stdout.splitlines() if line.startswith("PARAMETERS ")]
    assert len(printed) == len(outs), done.stderr[-2000:]
    return {result["checkpoint"]: _said(result, root) for result in printed}


def _said(result: Mapping[str, Any], root: Path) -> str:
    if "error" in result:
        words = " ".join(str(result["error"]).split())
        return re.sub(rf"{root}/\d+/\w+", "CKPT", words)[:SAID].replace("|", "/")
    missing = result["missing"]
    return f"{len(missing)} not filled, {missing[0]} first" if missing else str(result["parameters"])


def _part(model: str, draft: str | None) -> str:
    """An export's part of the page's cell: the numbers of the model and its draft layers, or the first words."""
    for said in (model, draft):
        if said is not None and not said.isdecimal():
            return said
    return model if draft is None else f"{model} + {draft}"


def test_the_page_has_what_vllm_fills(found: dict[str, tuple[str, ...]]) -> None:
    lines = committed()
    if os.environ.get("MODELEXPORT_WRITE_DOCS") == "1":
        lines = {name: replace(line, engine=found[name]) for name, line in lines.items()}
        DOCUMENT.write_text(document(lines, version("transformers")), encoding="utf-8")
    assert found == {name: line.engine for name, line in lines.items()}


def test_nothing_that_it_builds_stays_unfilled(found: dict[str, tuple[str, ...]]) -> None:
    assert [name for name, said in found.items() if "not filled" in " ".join(said)] == []
