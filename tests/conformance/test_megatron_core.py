"""Megatron-core itself: its GPTModel loads what we write and computes what transformers does; we read what it saves.

Needs an interpreter that has megatron-core (0.16.1, without its dependencies, beside torch 2.13, does on a CPU):
``MODELEXPORT_MEGATRON_PYTHON=/path/to/python python -m pytest -m slow tests/conformance/test_megatron_core.py``.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from modelexport.checkpoints.formats import megatron
from modelexport.models.rules import expected_rules
from tests.checkpoints.test_megatron import layer_of, padded
from tests.helpers.dcp_models import Values, assert_same, plan_of, read_all, rules_of, values_of, write
from tests.helpers.models import LlamaShape, config_json

PYTHON = os.environ.get("MODELEXPORT_MEGATRON_PYTHON")
SCRIPT = Path(__file__).with_name("_megatron_core.py")
SHAPES = {
    "llama": LlamaShape(hidden=32, heads=4, kv_heads=2, intermediate=24, vocab=128, layers=3),
    "mixtral": LlamaShape(hidden=32, heads=4, kv_heads=2, intermediate=24, vocab=128, model_type="mixtral"),
}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        PYTHON is None, reason="MODELEXPORT_MEGATRON_PYTHON names no interpreter that has megatron-core"
    ),
]


def megatron_core(mode: str, checkpoint: Path, tmp_path: Path, shape: LlamaShape, world: int) -> list[Values]:
    """Runs it; each rank's weights."""
    transformer = {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_query_groups": shape.kv_heads,
        "ffn_hidden_size": shape.intermediate,
        "add_bias_linear": False,
    }
    if shape.model_type == "mixtral":
        transformer |= {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": shape.intermediate}
    model = {
        "vocab_size": shape.vocab,
        "max_sequence_length": 64,
        "position_embedding_type": "rope",
        "share_embeddings_and_output_weights": False,
    }
    config = {"world": world, "strict": "LOG_ALL", "transformer": transformer, "model": model}
    arguments = [str(PYTHON), str(SCRIPT), mode, str(checkpoint), str(tmp_path / mode), json.dumps(config)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return [torch.load(tmp_path / f"{mode}.{rank}", weights_only=True) for rank in range(world)]


def logits_of(shape: LlamaShape, values: Values) -> torch.Tensor:
    from transformers import AutoConfig, AutoModelForCausalLM

    own: dict[str, Any] = {k: v for k, v in config_json(shape).items() if k not in ("architectures", "model_type")}
    config = AutoConfig.for_model(
        shape.model_type, **own, max_position_embeddings=128, rms_norm_eps=1e-5, bos_token_id=1, eos_token_id=2
    )
    model = AutoModelForCausalLM.from_config(config).float().eval()
    assert not any(model.load_state_dict(values))
    with torch.no_grad():
        return model(torch.arange(12).view(1, -1) * 7 % 128).logits


def test_its_forward_pass_is_that_of_transformers(tmp_path: Path) -> None:
    """The interleaving is right if the model computes the same, from a checkpoint written for tp 2 and pp 3."""
    shape = SHAPES["llama"]
    values = values_of(shape, torch.float32)
    write(megatron, tmp_path / "ours", plan_of(rules_of(shape, values), tp=2, pp=3), config_json(shape), values)
    (state,) = megatron_core("load", tmp_path / "ours", tmp_path, shape, 1)
    wanted = logits_of(shape, values)
    assert (state["logits"] - wanted).abs().max() < 1e-4 * wanted.abs().max()


@pytest.mark.parametrize("name", SHAPES)
def test_two_ranks_load_ours(tmp_path: Path, name: str) -> None:
    """All but one norm of Mixtral: without Transformer Engine, Megatron calls it as if it were fused, and says so."""
    shape = SHAPES[name]
    values = values_of(shape, torch.float32)
    write(megatron, tmp_path / "ours", plan_of(rules_of(shape, values)), config_json(shape), values)
    states = megatron_core("load", tmp_path / "ours", tmp_path, shape, 2)
    for i in range(shape.layers):
        qkv = layer_of(shape, values, i)["self_attention.linear_qkv.weight"].chunk(2)
        for state, wanted in zip(states, qkv, strict=True):
            assert torch.equal(state[f"decoder.layers.{i}.self_attention.linear_qkv.weight"], wanted)
        if name == "mixtral":
            experts = layer_of(shape, values, i)["mlp.experts.experts.linear_fc1.weight"]
            for rank, state in enumerate(states):
                found = state[f"decoder.layers.{i}.mlp.experts.local_experts.3.linear_fc1.weight"]
                assert torch.equal(found, torch.cat([half.chunk(2)[rank] for half in experts[3].chunk(2)]))
    embedding = padded(values["model.embed_tokens.weight"], 1).chunk(2)
    assert torch.equal(states[1]["embedding.word_embeddings.weight"], embedding[1])


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", SHAPES)
def test_what_it_saves_is_read(tmp_path: Path, name: str, world: int) -> None:
    shape = SHAPES[name]
    states = megatron_core("save", tmp_path / "theirs", tmp_path, shape, world)
    checkpoint = megatron.open(tmp_path / "theirs", config_json(shape), expected_rules)
    found = read_all(checkpoint)
    assert set(found) == set(values_of(shape))
    assert any("_extra_state" in key or key == "decoder.*" for key in checkpoint.left_out)
    # Written as Megatron keeps them and read again, they must be what its ranks had.
    for i in range(shape.layers):
        layer = layer_of(shape, found, i)
        qkv = torch.cat([s[f"decoder.layers.{i}.self_attention.linear_qkv.weight"] for s in states])
        assert_same({"qkv": layer["self_attention.linear_qkv.weight"]}, {"qkv": qkv})
        own = torch.cat([s[f"decoder.layers.{i}.self_attention.linear_proj.weight"] for s in states], dim=1)
        assert_same({"proj": layer["self_attention.linear_proj.weight"]}, {"proj": own})
        if name == "llama":
            halves = [s[f"decoder.layers.{i}.mlp.linear_fc1.weight"].chunk(2) for s in states]
            fc1 = torch.cat([half[0] for half in halves] + [half[1] for half in halves])
            assert_same({"fc1": layer["mlp.linear_fc1.weight"]}, {"fc1": fc1})
        else:
            experts = layer["mlp.experts.experts.linear_fc1.weight"]
            for e in range(4):
                key = f"decoder.layers.{i}.mlp.experts.local_experts.{e}.linear_fc1.weight"
                halves = [s[key].chunk(2) for s in states]
                fc1 = torch.cat([half[0] for half in halves] + [half[1] for half in halves])
                assert_same({"fc1": experts[e]}, {"fc1": fc1})
    rows = torch.cat([s["output_layer.weight"] for s in states])
    assert_same({"head": found["lm_head.weight"]}, {"head": rows})
