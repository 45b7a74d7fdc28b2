"""The device memory that is predicted: a bound on what the fake accelerator counts, not far from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from modelexport.errors import UsageError
from modelexport.recipe import ExportRecipe
from tests.helpers.marks import few
from tests.helpers.models import make_llama
from tests.helpers.tiny_models import tiny_checkpoint
from tests.helpers.warm import run_warm

pytestmark = pytest.mark.timeout(300)

DENSE = {"hidden": 512, "heads": 8, "kv_heads": 4, "intermediate": 1536, "layers": 1}
MOE = {**DENSE, "model_type": "qwen3_moe", "experts": 8, "expert_intermediate": 256}
CASES = [(name, quant, algorithm) for name in ("dense", "moe") for quant, algorithm in (
    ("int4", "gptq"), ("int4", "awq"), ("fp8-static", "rtn"),
)]  # fmt: skip

EXPORT = """
import contextlib, io, json, os, sys
os.environ["MODELEXPORT_KERNELS"] = "reference"
from modelexport.cli import main
from tests.helpers import fake_accelerator
fake_accelerator.register()
printed = io.StringIO()
line = [*sys.argv[1:-2], "--json"]
with contextlib.redirect_stdout(printed):
    assert main([*line, "--dry-run"]) == 0
plan = json.loads(printed.getvalue())["device_memory"]
fake_accelerator.memory.peak = 0
with contextlib.redirect_stdout(io.StringIO()):
    assert main([*line, *sys.argv[-2:]]) == 0
print(json.dumps([plan, fake_accelerator.memory.peak]))
"""


def line_of(model: Path, directory: Path, quant: str, algorithm: str, *, length: int = 64) -> list[str]:
    text = directory / "samples.jsonl"
    rows = [[(7 * i + 3 * j * j) % 199 + 3 for j in range(length + 30)] for i in range(20)]
    text.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    line = [
        "--model",
        str(model),
        "--quant",
        quant,
        "--algorithm",
        algorithm,
        "--device",
        "fakegpu",
        "--calib",
        str(text),
    ]
    return [*line, "--calib-samples", "16", "--calib-length", str(length)]


def predicted_and_peak(line: list[str], out: Path) -> tuple[int, int]:
    imported = "transformers.models.llama.modeling_llama"
    done = run_warm("-c", EXPORT, *line, "--out", str(out), imported=imported)
    assert done.returncode == 0, done.stderr[-3000:]
    plan, peak = json.loads(done.stdout)
    assert plan["predicted"] == sum(plan["parts"].values())
    return plan["predicted"], peak


@pytest.mark.parametrize(("name", "quant", "algorithm"), few(CASES, CASES[0]))
def test_the_prediction_is_a_bound_within_half_as_much_again(
    name: str, quant: str, algorithm: str, tmp_path: Path
) -> None:
    model = make_llama(**(DENSE if name == "dense" else MOE))
    predicted, peak = predicted_and_peak(line_of(model, tmp_path, quant, algorithm), tmp_path / "out")
    print(f"{name} {algorithm}: {predicted:,} predicted, {peak:,} seen")
    assert peak <= predicted <= 1.5 * peak


@pytest.mark.extended
@pytest.mark.parametrize("algorithm", ["awq+gptq", "smoothquant+mse"])
@pytest.mark.parametrize("kind", ["gpt_oss", "deepseek_v3", "granitemoehybrid", "gemma3_text", "qwen3_next", "mixtral"])
def test_the_prediction_is_a_bound_in_other_families(kind: str, algorithm: str, tmp_path: Path) -> None:
    line = [*line_of(tiny_checkpoint(kind), tmp_path, "int4", algorithm, length=128), "--group-size", "32"]
    predicted, peak = predicted_and_peak(line, tmp_path / "out")
    print(f"{kind} {algorithm}: {predicted:,} predicted, {peak:,} seen")
    assert peak <= predicted


def test_a_budget_is_a_number_of_bytes_of_a_device() -> None:
    with pytest.raises(UsageError, match="--device-memory 0: a number of bytes is needed"):
        ExportRecipe(device_memory=0)
    with pytest.raises(UsageError, match="is of GPUs, and --device is cpu"):
        ExportRecipe(device="cpu", device_memory=1 << 30)
