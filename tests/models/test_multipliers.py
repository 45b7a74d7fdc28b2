"""Falcon-H1's multipliers moved into its weights: the same function, and config.json says so."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from modelexport.checkpoints.safetensors.file import Reader
from modelexport.models.multipliers import multiplied
from modelexport.models.opening import open_model
from tests.helpers.gguf_models import gguf_tiny_model


@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_the_model_computes_the_same(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = gguf_tiny_model("falcon_h1")
    model.save_pretrained(tmp_path)
    moved = multiplied(open_model(tmp_path))
    assert moved.config is not None
    assert (moved.config["key_multiplier"], moved.config["ssm_multipliers"]) == (1.0, [1.0] * 5)
    assert "the multipliers of config.json are in the weights" in moved.notes[-1]
    with Reader(moved) as reader:
        state = {name: reader.read(info) for name, info in moved.infos.items()}
        whole = state["model.layers.1.mamba.in_proj.weight"]
        part = reader.read(moved.infos["model.layers.1.mamba.in_proj.weight"], rows=(100, 540), cols=(3, 7))
    assert torch.equal(part, whole[100:540, 3:7])
    config = copy.deepcopy(model.config)
    config.update({key: value for key, value in moved.config.items() if "multiplier" in key})
    other = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    other.load_state_dict(state)
    ids = torch.arange(3, 40)[None]
    with torch.inference_mode():
        torch.testing.assert_close(other(input_ids=ids).logits, model(input_ids=ids).logits, rtol=1e-4, atol=1e-5)


def test_a_model_without_any_is_as_it_is(tmp_path: Path) -> None:
    from tests.helpers.models import make_llama

    checkpoint = open_model(make_llama())
    assert multiplied(checkpoint) is checkpoint
