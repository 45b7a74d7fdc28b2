"""``eval --tasks`` beside lm-eval's own model of transformers, on tasks of our own: choices, and whole documents.

Of the decoded weights with inputs rounded, whole in memory, in batches of its own, both must find the same: which
choices are right, and the likelihoods that perplexities are made of. lm-eval and what modelexport needs live in an
environment of their own, named by the variable MODELEXPORT_LM_EVAL_PYTHON (its interpreter).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from modelexport.assets import demo_documents, demo_model_path
from modelexport.exporting import export
from modelexport.resharding import reshard
from tests.helpers.models import make_llama

PYTHON = os.environ.get("MODELEXPORT_LM_EVAL_PYTHON")
SCRIPT = Path(__file__).with_name("lm_eval_oracle.py")
ROOT = Path(__file__).parents[2]
NEAR = 5e-4  # which of two neighbours an activation is rounded to may differ with the order of a sum
QUANTS = ("none", "int4", "fp8", "int8-static", "nvfp4-wo")
TASKS, SHOTS = "endings,documents", 2

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(PYTHON is None, reason="MODELEXPORT_LM_EVAL_PYTHON names no interpreter with lm-eval"),
]

TASK = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
fewshot_split: test
output_type: {kind}
{more}
metadata: {{version: 1}}
"""
CHOICES = """\
doc_to_text: context
doc_to_choice: choices
doc_to_target: label
metric_list: [{metric: acc}, {metric: acc_norm}]"""
ROLLING = """\
doc_to_text: ""
doc_to_target: text
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]"""
WRITING = """\
doc_to_text: text
doc_to_target: text
metric_list: [{metric: exact_match}]"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tasks over the package's held-out text: which of four pieces goes on; whole documents, of which some are longer
    than the model's 512 tokens; and one that has models write."""
    directory = tmp_path_factory.mktemp("tasks")
    documents = [text for text in demo_documents("heldout") if len(text) > 600][:8]
    pieces = [text[start : start + 300] for text in documents for start in (0, 300)]
    questions = []
    for number, piece in enumerate(pieces):
        wrong = [pieces[(number + other) % len(pieces)][200:240] for other in (1, 5, 9)]
        choices = [*wrong[: number % 4], piece[200:240], *wrong[number % 4 :]]
        questions.append({"context": piece[:200], "choices": choices, "label": number % 4})
    (directory / "questions.json").write_text(json.dumps(questions))
    (directory / "texts.json").write_text(json.dumps([{"text": text} for text in documents]))
    for name, data, kind, more in (
        ("endings", "questions", "multiple_choice", CHOICES),
        ("documents", "texts", "loglikelihood_rolling", ROLLING),
        ("writing", "texts", "generate_until", WRITING),
    ):
        text = TASK.format(name=name, data=directory / f"{data}.json", kind=kind, more=more)
        (directory / f"{name}.yaml").write_text(text)
    return directory


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The demo model in several number formats."""
    directory = tmp_path_factory.mktemp("checkpoints")
    for quant in QUANTS:
        options: dict[str, Any] = {"calib_samples": 4, "calib_length": 64} if quant == "int8-static" else {}
        export(quant=quant, out=str(directory / quant), quiet=True, evaluate=False, **options)
    return {quant: directory / quant for quant in QUANTS}


@pytest.fixture(scope="module")
def theirs(tasks: Path, checkpoints: dict[str, Path]) -> dict[str, Any]:
    """The harness' own results, of each number format."""
    done = run(str(SCRIPT), tasks, TASKS, SHOTS, *checkpoints.values())
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(checkpoints, json.loads(done.stdout.splitlines()[-1]), strict=True))


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    own = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    offline = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    command = [str(PYTHON), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=400, check=False, env={**own, **offline})


def ours(*arguments: object) -> dict[str, Any]:
    done = run("-m", "modelexport", "eval", *arguments, "--num-fewshot", SHOTS, "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr == "", "neither bars nor words of the harness"
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def check(found: dict[str, Any], theirs: dict[str, Any], *, side: str = "value") -> None:
    error = "standard_error" if side == "value" else "source_standard_error"
    seen = set()
    for figure in found["results"]:
        task, key = figure["task"], f"{figure['metric']},{figure['filter']}"
        assert figure[side] == pytest.approx(theirs[task][key], rel=NEAR), (task, key)
        wanted = theirs[task][f"{figure['metric']}_stderr,{figure['filter']}"]
        assert figure[error] == (None if wanted == "N/A" else pytest.approx(wanted, rel=NEAR)), (task, key)
        seen.add((task, key))
    assert seen == {(task, key) for task in theirs for key in theirs[task] if "," in key and "_stderr" not in key}


@pytest.mark.parametrize("quant", QUANTS[1:])
def test_number_formats_and_the_source_beside_them(
    quant: str, tasks: Path, checkpoints: dict[str, Path], theirs: dict[str, Any]
) -> None:
    found = ours(checkpoints[quant], "--against", checkpoints["none"], "--tasks", TASKS, "--tasks-path", tasks)
    check(found, theirs[quant])
    check(found, theirs["none"], side="source")
    figures = {figure["metric"]: figure for figure in found["results"]}
    assert figures["word_perplexity"]["value"] > figures["word_perplexity"]["source"]
    assert 0.3 < figures["acc"]["source"] < 1
    assert found["window"] == 512


@pytest.mark.parametrize("kind", ["vllm-sharded", "gguf"])
def test_checkpoint_formats(
    kind: str, tasks: Path, checkpoints: dict[str, Path], theirs: dict[str, Any], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    if kind == "gguf":
        export(model=str(demo_model_path()), quant="none", format="gguf", out=str(out), quiet=True)
    else:
        reshard(checkpoint=str(checkpoints["none"]), format=kind, tp=2, out=str(out), quiet=True)
    found = ours(out, "--against", checkpoints["none"], "--tasks", TASKS, "--tasks-path", tasks)
    check(found, theirs["none"])


def test_experts_that_transformers_stacks(tasks: Path, tmp_path: Path) -> None:
    source = tmp_path / "mixtral"
    shutil.copytree(make_llama(model_type="mixtral", hidden=128, layers=2, vocab=2048), source)
    for path in demo_model_path().glob("tokenizer*"):
        shutil.copy(path, source)
    done = run(str(SCRIPT), tasks, TASKS, SHOTS, source)
    assert done.returncode == 0, done.stderr[-3000:]
    check(ours(source, "--tasks", TASKS, "--tasks-path", tasks), json.loads(done.stdout.splitlines()[-1])[0])


def test_tasks_that_have_models_write_are_refused(tasks: Path) -> None:
    done = run("-m", "modelexport", "eval", "demo", "--tasks", "writing", "--tasks-path", tasks)
    assert done.returncode == 2
    assert done.stderr.startswith("modelexport: --tasks writing has models write text (generate_until)")
    assert len(done.stderr.splitlines()) == 1
