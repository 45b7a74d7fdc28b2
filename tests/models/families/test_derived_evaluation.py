"""Layers of derived families run one at a time: what ``eval`` says is what transformers says, or one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from modelexport.errors import CheckpointError, ModelExportError, PlanError
from modelexport.inspection.evaluate.losses import cut_windows
from modelexport.inspection.evaluate.text import evaluate_on_text
from modelexport.quantization.calibration.model import kv_heads
from tests.helpers.gguf_models import gguf_tiny_model
from tests.helpers.marks import few
from tests.helpers.tiny_models import NOT_MADE, causal_types, model_class, tiny_checkpoint

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]

WINDOWS, WINDOW = 40, 17  # more tokens than one batch has
RUN = {
    "opt": "calls a part of its body",
    "mamba": "asks for the dtype of its head",
    "mimo_v2_flash": "has sinks in some of its layers, and heads of values of their own size",
    "gptj": "has attention functions of its own",
    "openai-gpt": "returns lists",
    "codegen": "returns tuples",
    "llama4_text": "is its own body",
    "granitemoe": "renames a router",
    "ctrl": "has a bias beside a tied head",
    "falcon_h1": "has infinity in config.json",
    "bert-generation": "has a bias that is tied",
    "gemma3": "is a part of a model that sees, too",
    "gemma4_text": "gives each layer inputs of its own, and shares keys and values",
    "gemma3n_text": "has four hidden states of each token",
    "deepseek_v4": "has four hidden states of each token, behind each other",
    "qwen4_exp_text": "has four hidden states of each token, in one row",
}
REFUSED = {
    "zamba": "shared_transf.self_attn.q_proj.weight, which the checkpoint has not",
    "zaya": "hand more than hidden states to the next",
    "xlm": "its decoder layers do not run one at a time",
    "bert": "what comes behind its layers does not run by itself",
}


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(3, 200, (WINDOWS * WINDOW + 1,), generator=torch.Generator().manual_seed(3))


def by_us(checkpoint: Path, ids: torch.Tensor, directory: Path) -> float:
    text = directory / "ids.jsonl"
    text.write_text(json.dumps({"input_ids": ids.tolist()}))
    return evaluate_on_text(checkpoint, None, text, windows=WINDOWS, window=WINDOW).model.loss


def loaded(model_type: str) -> Any:
    return model_class(model_type).from_pretrained(tiny_checkpoint(model_type), dtype=torch.float32).eval()


def by_transformers(model: Any, ids: torch.Tensor) -> float:
    cut = cut_windows(ids, WINDOW, WINDOWS)
    with torch.inference_mode():
        logits = model(input_ids=cut.inputs, use_cache=False).logits.float()
    return float(functional.cross_entropy(logits.flatten(0, 1), cut.targets.flatten()))


@pytest.mark.parametrize("model_type", few(RUN, "opt", "gemma3n_text"))
def test_the_loss_is_the_whole_models(model_type: str, ids: torch.Tensor, tmp_path: Path) -> None:
    ours = by_us(tiny_checkpoint(model_type), ids, tmp_path)
    assert ours == pytest.approx(by_transformers(loaded(model_type), ids), abs=5e-5)


def test_layers_with_experts_beside_their_mlp_and_other_heads_in_some(ids: torch.Tensor, tmp_path: Path) -> None:
    """As Gemma 4 of 26 billion parameters has them: experts are no part of ``mlp``, and layers with full attention have
    fewer heads of keys."""
    model = gguf_tiny_model("gemma4")
    model.save_pretrained(tmp_path / "source")
    parsed = model.config.text_config
    assert [kv_heads(parsed, layer) for layer in (0, 1)] == [2, 1]
    assert by_us(tmp_path / "source", ids, tmp_path) == pytest.approx(by_transformers(model, ids), abs=5e-5)


@pytest.mark.parametrize("model_type", few(REFUSED, "zaya", "bert"))
def test_what_layers_alone_cannot_compute_is_refused(model_type: str, ids: torch.Tensor, tmp_path: Path) -> None:
    with pytest.raises((PlanError, CheckpointError), match=REFUSED[model_type]) as caught:
        by_us(tiny_checkpoint(model_type), ids, tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_no_type_is_evaluated_wrongly(ids: torch.Tensor, tmp_path: Path) -> None:
    run, said, wrong = 0, list[str](), {}
    for model_type in sorted(set(causal_types()) - set(NOT_MADE)):
        try:
            ours = by_us(tiny_checkpoint(model_type), ids, tmp_path)
        except ModelExportError as error:
            said.append(str(error))
            continue
        run += 1
        theirs = by_transformers(loaded(model_type), ids)
        if abs(ours - theirs) > 5e-4:  # some keep a factor in bfloat16
            wrong[model_type] = (ours, theirs)
    assert not wrong
    assert not [text for text in said if "\n" in text]
    assert run >= 120
