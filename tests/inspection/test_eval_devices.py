"""Evaluations on an accelerator that tests/helpers/fake_accelerator.py makes: the figures of the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.marks import few
from tests.helpers.models import make_llama
from tests.helpers.tiny_models import tiny_checkpoint
from tests.helpers.warm import run_warm
from tests.inspection._quantised import save_quantised, with_cache_scales

pytestmark = pytest.mark.timeout(180)
KINDS = ["llama", "qwen3_moe", "granitemoehybrid", "deepseek_v3", "gemma3_text"]


def evaluated(*line: str) -> dict[str, Any]:
    """The figures of a process of its own, where there is an accelerator."""
    line = ("-m", "tests.helpers.fake_accelerator", "eval", *line, "--json")
    done = run_warm(*line, imported="transformers.models.llama.modeling_llama")
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    del found["seconds"]
    return found


@pytest.mark.parametrize("kind", few(KINDS, "llama"))
def test_the_figures_are_those_of_the_cpu(kind: str, tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text(json.dumps({"input_ids": [(7 * i) % 199 + 3 for i in range(60)]}) + "\n")
    source = make_llama() if kind == "llama" else tiny_checkpoint(kind)
    checkpoint = save_quantised(source, tmp_path / "ckpt", "fp8-static") if kind == "llama" else source
    line = [str(checkpoint), "--against", str(source), "--text", str(text), "--windows", "3", "--window", "16"]
    there, here = evaluated(*line), evaluated(*line, "--device", "cpu")
    assert there.pop("device") == "fakegpu"
    assert there == here
    assert here["comparison"]["mean_kl"] > (1e-6 if kind == "llama" else -1)


SMALL = """
import torch
from modelexport.assets import demo_documents, demo_model_path
from modelexport.inspection.evaluate import evaluate
from modelexport.quantization.calibration import products
from tests.helpers import fake_accelerator
fake_accelerator.register()
products._is_faster = lambda: False  # the accelerator multiplies by MKL
found = []
for device in ("fakegpu", "cpu"):
    before = fake_accelerator.operations.total()
    source, text = demo_model_path(), demo_documents("heldout")
    few = {"window": 64, "max_windows": 1, "max_new_tokens": 3}
    found.append(evaluate(source, source, text, **few, device=torch.device(device)))
    print(fake_accelerator.operations.total() > before)
assert found[0] == found[1]
"""


def test_small_models_have_the_figures_of_the_cpu() -> None:
    """Those that run without transformers, sentences too."""
    done = run_warm("-c", SMALL)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["True", "False"]


CONTINUATIONS = """
import sys
import torch
from modelexport.inspection.evaluate.continuations import ContinuationScorer
from modelexport.models.opening import open_model
from modelexport.quantization.calibration import products
from tests.helpers import fake_accelerator
fake_accelerator.register()
products._is_faster = lambda: False  # the accelerator multiplies by MKL
asked = [([1, 2, 3], [4, 5]), ([7] * 40, [8]), ([9], list(range(60)))]
found = []
for device in ("fakegpu", "cpu"):
    before = fake_accelerator.operations.total()
    found.append(ContinuationScorer(open_model(sys.argv[1]), torch.float32, torch.device(device)).scores(asked))
    print(fake_accelerator.operations.total() > before)
assert found[0] == found[1]
"""


def test_continuations_have_the_figures_of_the_cpu(tmp_path: Path) -> None:
    """As tasks of lm-eval ask for them; keys and values go through an FP8 cache, too."""
    plain = save_quantised(make_llama(), tmp_path / "plain", "fp8-static")
    checkpoint = with_cache_scales(plain, tmp_path / "ckpt", {"layers.0.self_attn.k_scale": 0.1})
    done = run_warm("-c", CONTINUATIONS, str(checkpoint), imported="transformers.models.llama.modeling_llama")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["True", "False"]
