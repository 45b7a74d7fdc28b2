"""Exports tiny models and has vLLM fill its parameters from them; ``python -m`` of this writes docs/engines.md."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from modelexport.exporting import export
from modelexport.models.loading import FILLED_TEST, LOADINGS
from tests.conformance._published import published_checkpoint
from tests.conformance._vllm import VLLM

CLAIMED: Mapping[str, tuple[str, ...]] = next(row.ran for row in LOADINGS if row.test == FILLED_TEST)
CASES = [(kind, quant) for kind, quants in CLAIMED.items() for quant in quants]
# Registered for experts whose inputs are not rounded, and not used: compressed_tensors_moe_w4a4_nvfp4.py, use_a16.
UNUSED = {"nvfp4-wo": "_input_global_scale"}
DOCUMENT = Path(__file__).parents[2] / "docs" / "engines.md"
_HEAD = """\
# Which parameters vLLM fills

vLLM 0.32 reads our checkpoints name by name, and says nothing of a parameter that no tensor fills: it stays
uninitialised. So its model classes are built on a CPU, its own loader is run over exports of tiny models, and its
parameters are compared with those filled. Nothing is computed here; what it computes is compared for the types and
formats that the model card of an export names.

`python -m tests.conformance._vllm_parameters` wrote this page, and
`python -m pytest -m slow tests/conformance/test_vllm_parameters.py` holds all of it against vLLM
(`MODELEXPORT_VLLM_PYTHON` names its interpreter). int4 has groups of 32. Models that are not calibrated have nvfp4-wo
in place of nvfp4. The models are random, of transformers' default architecture, with the keys of config.json that
their publishers write. Types that are missing here vLLM does not load unquantised either, as such models.

Stacked experts are written one by one when they are quantised, by the names that vLLM asks for
(`experts.{e}.gate_proj`, `up_proj`, `down_proj`; minimax_m3's `w1`, `w3`, `w2`). SGLang 0.5.23 looks for the same ones
in granitemoe, granitemoehybrid, llama4, minimax_m3, qwen3_5_moe, qwen3_next and qwen3_vl_moe: its loaders were read,
not run. gpt-oss has its experts read as MXFP4 blocks (`--format mxfp4`) by both.

| model type | parameters, and of these filled: | | | |
| --- | --- | --- | --- | --- |
"""


def fill(cases: Iterable[tuple[str, str]], directory: Path, *options: str) -> dict[tuple[str, str], dict[str, Any]]:
    """What ``vllm_parameters.py`` prints of each model type in each number format, exported below ``directory``."""
    samples = directory / "samples.jsonl"
    numbers = random.Random(0)
    lines = [json.dumps({"input_ids": [numbers.randrange(3, 200) for _ in range(32)]}) for _ in range(4)]
    samples.write_text("\n".join(lines) + "\n")
    outs = {}
    for kind, quant in cases:
        source, out = directory / kind / "source", directory / kind / quant
        if not source.exists():
            published_checkpoint(kind, source)
        settings: dict[str, Any] = {"group_size": 32} if quant == "int4" else {}
        if quant == "nvfp4":
            settings = {"calib": str(samples), "calib_samples": 4, "calib_length": 32}
        export(model=str(source), quant=quant, out=str(out), evaluate=False, quiet=True, **settings)
        outs[str(out)] = (kind, quant)
    script = Path(__file__).with_name("vllm_parameters.py")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "PYTHON"))}
    done = subprocess.run(
        [str(VLLM), str(script), *options, *outs],
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
        env=environment,
    )
    printed = [json.loads(line[11:]) for line in done.stdout.splitlines() if line.startswith("PARAMETERS ")]
    assert len(printed) == len(outs), done.stderr[-2000:]
    found = {outs[result["checkpoint"]]: result for result in printed}
    for (_, quant), result in found.items():
        if quant in UNUSED and "missing" in result:
            result["missing"] = [name for name in result["missing"] if not name.endswith(UNUSED[quant])]
    return found


def page(results: Mapping[tuple[str, str], Mapping[str, Any]]) -> str:
    """docs/engines.md."""
    rows = []
    for kind in sorted(CLAIMED):
        cells = []
        for quant in CLAIMED[kind]:
            parameters, missing = results[kind, quant]["parameters"], results[kind, quant]["missing"]
            cells.append(f"{quant}: {parameters}, {'all' if not missing else parameters - len(missing)}")
        rows.append(f"| {kind} | {' | '.join(cells + [''] * (4 - len(cells)))} |")
    return _HEAD + "\n".join(rows) + "\n"


def main() -> None:
    directory = Path(tempfile.mkdtemp(prefix="modelexport-engines-"))
    try:
        DOCUMENT.write_text(page(fill(CASES, directory)))
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
