"""The device memory that is predicted: a bound on what the fake accelerator counts, not far from it."""

from __future__ import annotations

import json
import re
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
    ("int4", "gptq"), ("int4", "awq"), ("fp8-static", "rtn"), ("nvfp4", "autoround"),
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


def line_of(
    model: Path, directory: Path, quant: str, algorithm: str, *, samples: int = 16, length: int = 64
) -> list[str]:
    text = directory / "samples.jsonl"
    rows = [[(7 * i + 3 * j * j) % 199 + 3 for j in range(length + 30)] for i in range(20)]
    text.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    line = f"--model {model} --quant {quant} --algorithm {algorithm} --device fakegpu --calib {text}".split()
    if algorithm == "autoround":
        line += ["--autoround-steps", "2"]
    return [*line, "--calib-samples", str(samples), "--calib-length", str(length)]


def weights(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(out.glob("*.safetensors"))}


def predicted_and_peak(line: list[str], out: Path) -> tuple[int, int]:
    imported = "transformers.models.llama.modeling_llama"
    done = run_warm("-c", EXPORT, *line, "--out", str(out), imported=imported)
    assert done.returncode == 0, done.stderr[-3000:]
    plan, peak = json.loads(done.stdout)
    assert plan["predicted"] == sum(plan["parts"].values())
    return plan["predicted"], peak


@pytest.mark.parametrize(("name", "quant", "algorithm"), few(CASES, CASES[0], slow=(CASES[1], CASES[4], CASES[5])))
def test_the_prediction_is_a_bound_within_half_as_much_again(
    name: str, quant: str, algorithm: str, tmp_path: Path
) -> None:
    model = make_llama(**(DENSE if name == "dense" else MOE))
    predicted, peak = predicted_and_peak(line_of(model, tmp_path, quant, algorithm), tmp_path / "out")
    print(f"{name} {algorithm}: {predicted:,} predicted, {peak:,} seen")
    assert peak <= predicted <= 1.5 * peak


KINDS = [
    *("gpt_oss", "jamba", "llama4_text", "granitemoehybrid", "deepseek_v3", "gemma3_text", "gemma3n_text"),
    *("gemma4_text", "qwen3_next", "mixtral", "nemotron_h", "falcon_h1"),
]
FAMILIES = [(kind, algorithm) for algorithm in ("smoothquant+mse", "gptq") for kind in KINDS]


@pytest.mark.parametrize(("kind", "algorithm"), few(FAMILIES, slow=FAMILIES[4:]))
def test_the_prediction_is_a_bound_in_other_families(kind: str, algorithm: str, tmp_path: Path) -> None:
    line = [*line_of(tiny_checkpoint(kind), tmp_path, "int4", algorithm, length=128), "--group-size", "32"]
    predicted, peak = predicted_and_peak(line, tmp_path / "out")
    print(f"{kind} {algorithm}: {predicted:,} predicted, {peak:,} seen")
    assert peak <= predicted


CUT = [
    ("moe", "int4", "gptq", 0.65, "experts lie in the host's memory"),
    ("moe", "int4", "awq", 0.65, "experts lie in the host's memory"),
    ("moe", "fp8-static", "rtn", 0.9, "experts lie in the host's memory"),
    ("dense", "int4", "gptq", 0.85, "rows of a linear are rounded at a time"),
    ("gpt_oss", "int4:32", "awq+gptq", 0.9, "experts lie in the host's memory"),
]


@pytest.mark.parametrize(("name", "quant", "algorithm", "part", "cut"), few(CUT, CUT[2], slow=(CUT[1], CUT[3], CUT[4])))
def test_a_layer_that_does_not_fit_is_cut_and_has_the_same_bytes(
    name: str, quant: str, algorithm: str, part: float, cut: str, tmp_path: Path
) -> None:
    model = tiny_checkpoint(name) if name == "gpt_oss" else make_llama(**(DENSE if name == "dense" else MOE))
    line = line_of(model, tmp_path, quant, algorithm, samples=2 if name == "dense" else 16)
    whole, _ = predicted_and_peak(line, tmp_path / "whole")
    budget = int(whole * part)
    line += ["--device-memory", str(budget)]
    predicted, peak = predicted_and_peak(line, tmp_path / "cut")
    print(f"{name} {algorithm}: {whole:,} whole, {budget:,} allowed, {predicted:,} predicted, {peak:,} seen")
    assert peak <= predicted <= budget
    assert weights(tmp_path / "cut") == weights(tmp_path / "whole")
    said = run_warm("-m", "tests.helpers.fake_accelerator", *line, "--dry-run").stdout
    assert cut in " ".join(said.split())


def test_what_does_not_fit_is_refused_in_one_line(tmp_path: Path) -> None:
    line = [*line_of(make_llama(**DENSE), tmp_path, "int4", "gptq", samples=2), "--device-memory", "20000000"]
    done = run_warm("-m", "tests.helpers.fake_accelerator", *line, "--out", str(tmp_path / "out"))
    assert done.returncode == 1
    assert re.fullmatch(
        r"modelexport: model\.layers\.0 needs [\d.]+ MB of device memory, [\d.]+ MB of it for mlp\.down_proj and its "
        r"Hessian, on which gptq works, and there are 20 MB: type --device-memory \d+ where the device has that, or "
        r"--device cpu",
        " ".join(done.stderr.split()),
    )
    assert not (tmp_path / "out").exists()


def test_a_budget_is_a_number_of_bytes() -> None:
    with pytest.raises(UsageError, match="--device-memory 0: a number of bytes is needed"):
        ExportRecipe(device_memory=0)
