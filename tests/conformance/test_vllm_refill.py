"""vLLM's model is filled with the same numbers from the files of an export and from quantise() of tensors in memory."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from modelexport.exporting import export
from tests.conformance._published import published_checkpoint
from tests.conformance._vllm import VLLM, needs_vllm

pytestmark = [pytest.mark.slow, needs_vllm, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]


@pytest.mark.parametrize(("kind", "quant"), [("llama", "fp8"), ("qwen3_moe", "fp8"), ("qwen3", "int4")])
def test_an_engine_is_refilled(kind: str, quant: str, tmp_path: Path) -> None:
    source = published_checkpoint(kind, tmp_path / "source")
    export(model=str(source), quant=quant, out=str(tmp_path / "out"), evaluate=False, quiet=True)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "PYTHON"))}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    script = Path(__file__).with_name("vllm_refill.py")
    command = [str(VLLM), str(script), str(tmp_path / "out"), str(source), quant]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False, env=environment)
    [line] = [line for line in done.stdout.splitlines() if line.startswith("REFILLED ")] or [done.stderr[-2000:]]
    result = json.loads(line.removeprefix("REFILLED "))
    assert result["unlike"] == []
    assert result["parameters"] > 10
