"""vLLM's own loader fills every parameter of its draft models from our exports, kept and quantised."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from modelexport.exporting import export
from tests.conformance._published import published_checkpoint
from tests.conformance._vllm import VLLM, needs_vllm
from tests.helpers.drafts import BELOW_MODEL, KINDS, add_draft_layer

pytestmark = [pytest.mark.slow, needs_vllm, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(1200)]

# vLLM reads MiMo-V2-Flash's config.json by its publishers' own keys, which transformers does not save
PUBLISHED = tuple(kind for kind in KINDS if kind not in BELOW_MODEL)

# --format, --quant and --draft; vLLM joins keys of fewer rows than a block, as the small models have, to no queries
CASES = [
    (kind, container, quant, draft)
    for kind in PUBLISHED
    for container, quant in (("hf", "none"), ("hf", "int4"), ("hf", "fp8"), ("fp8-block", "fp8-block"))
    for draft in ("keep", "quantise")
    if kind == "deepseek_v3" or (container, draft) != ("fp8-block", "quantise")
]


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What ``vllm_parameters.py`` prints of the draft model of each export, by its directory's name."""
    root = tmp_path_factory.mktemp("drafts")
    outs = []
    for kind in PUBLISHED:
        add_draft_layer(published_checkpoint(kind, root / f"{kind}-plain"), root / kind)
    for kind, container, quant, draft in CASES:
        out = root / f"{kind} {container} {quant} {draft}"
        settings: dict[str, Any] = {"group_size": 32} if quant == "int4" else {}
        settings |= {"quant": quant, "format": container, "draft": draft}
        export(model=str(root / kind), out=str(out), evaluate=False, quiet=True, **settings)
        outs.append(str(out))
    script = Path(__file__).with_name("vllm_parameters.py")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "PYTHON"))}
    command = [str(VLLM), str(script), "--draft", *outs]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, env=environment)
    lines = [json.loads(line[11:]) for line in done.stdout.splitlines() if line.startswith("PARAMETERS ")]
    assert len(lines) == len(outs), done.stderr[-2000:]
    return {Path(line["checkpoint"]).name: line for line in lines}


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_every_parameter_is_filled(printed: dict[str, dict[str, Any]], case: tuple[str, ...]) -> None:
    result = printed[" ".join(case)]
    assert "error" not in result, result["error"]
    assert result["missing"] == []


@pytest.mark.parametrize("case", [case for case in CASES if case[-1] == "keep"], ids=" ".join)
def test_what_is_kept_is_unquantised_there_too(printed: dict[str, dict[str, Any]], case: tuple[str, ...]) -> None:
    methods = printed[" ".join(case)]["methods"]
    assert all("Unquantized" in name or "KVCache" in name for name in methods), methods
