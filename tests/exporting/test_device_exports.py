"""Exports on an accelerator that tests/helpers/fake_accelerator.py makes: the bytes of the CPU, and what is said."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.helpers.marks import few
from tests.helpers.models import make_llama
from tests.helpers.tiny_models import tiny_checkpoint
from tests.helpers.warm import ROOT, run_warm

pytestmark = pytest.mark.timeout(300)

CASES = [
    ("llama", "fp8", "rtn", ()),
    ("llama", "int4", "gptq", ()),
    ("llama", "int4-asym", "awq+gptq", ()),
    ("llama", "nvfp4", "gptq", ("--kv-cache", "fp8")),
    ("llama", "mxfp4", "mse", ()),
    ("llama", "fp8-static", "smoothquant", ("--calib-range", "percentile")),
    ("llama", "int8-static", "rtn", ()),
    ("llama", "int8", "rotation+gptq", ()),
    ("llama", "", "autoquant", ()),
    ("llama", "int4", "gptq", ("--format", "awq")),
    ("qwen3_moe", "int4", "gptq", ("--group-size", "32")),
    ("deepseek_v3", "fp8-block", "gptq", ()),
    ("granitemoehybrid", "int4", "awq", ("--group-size", "32")),
    ("gpt_oss", "int4", "gptq", ("--group-size", "32")),
    ("qwen3_next", "nvfp4-wo", "awq+gptq", ()),
]


def exported(out: Path, *line: str, tp: int = 1) -> Path:
    """An export in processes of its own, where there is an accelerator; by the kernels that any device runs."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "MODELEXPORT_KERNELS": "reference", "WORLD_SIZE": str(tp)}
    line = ("-m", "tests.helpers.fake_accelerator", *line, "--tp", str(tp), "--out", str(out))
    done = run_warm(*line, cwd=out.parent, env=env, imported="transformers.models.llama.modeling_llama")
    assert done.returncode == 0, done.stderr[-3000:]
    return out


def weights(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(out.glob("*.safetensors"))}


def settings(kind: str, quant: str, algorithm: str, rest: tuple[str, ...], directory: Path) -> list[str]:
    """The command line of an export of a tiny model, on two samples that lie in a directory."""
    text = directory / "samples.jsonl"
    text.write_text(
        "".join(json.dumps({"input_ids": [(7 * i + j) % 199 + 3 for j in range(24)]}) + "\n" for i in (1, 2))
    )
    model = str(make_llama() if kind == "llama" else tiny_checkpoint(kind))
    line = ["--model", model, "--algorithm", algorithm, *(("--quant", quant) if quant else ()), *rest]
    return [*line, "--calib", str(text), "--calib-samples", "2", "--calib-length", "16", "--quiet"]


@pytest.mark.parametrize(
    ("kind", "quant", "algorithm", "rest"), few(CASES, CASES[4], slow=(CASES[2], CASES[12], CASES[14]))
)
def test_the_bytes_are_those_of_the_cpu(
    kind: str, quant: str, algorithm: str, rest: tuple[str, ...], tmp_path: Path
) -> None:
    """The arithmetic here is a CPU's; what this can find is what lies on the wrong device, or is read on the host."""
    line = settings(kind, quant, algorithm, rest, tmp_path)
    there = exported(tmp_path / "there", *line, "--device", "fakegpu")
    here = exported(tmp_path / "here", *line, "--device", "cpu")
    assert weights(there) == weights(here)
    record = json.loads((there / "modelexport.json").read_text())
    assert record["recipe"]["device"] == "fakegpu"
    assert "device" not in json.loads((here / "modelexport.json").read_text())["recipe"]


RANKS = [
    ("llama", "int4", "gptq", ()),
    ("llama", "int8-static", "smoothquant", ("--kv-cache", "fp8")),
    ("qwen3_moe", "int4", "gptq", ("--group-size", "32")),
    ("qwen3_moe", "fp8-static", "awq", ()),
    ("llama", "fp8", "rtn", ()),
    ("llama", "", "autoquant", ()),
    ("qwen3_moe", "int4", "awq+gptq", ("--group-size", "32", "--device-memory", "4000000")),
]


@pytest.mark.parametrize(("kind", "quant", "algorithm", "rest"), few(RANKS, RANKS[0]))
def test_the_bytes_do_not_depend_on_the_number_of_ranks(
    kind: str, quant: str, algorithm: str, rest: tuple[str, ...], tmp_path: Path
) -> None:
    """Those of one rank there are the CPU's, see above."""
    line = settings(kind, quant, algorithm, rest, tmp_path)
    there = exported(tmp_path / "there", *line, "--device", "fakegpu", tp=2)
    assert weights(there) == weights(exported(tmp_path / "alone", *line, "--device", "cpu"))


def test_a_calibrated_export_takes_what_there_is() -> None:
    line = ["--quant", "int4", "--algorithm", "gptq", "--dry-run"]
    done = run_warm("-m", "tests.helpers.fake_accelerator", *line)
    assert done.returncode == 0, done.stderr
    assert "calibrated on fakegpu: the same bytes at any --tp" in " ".join(done.stdout.split())
