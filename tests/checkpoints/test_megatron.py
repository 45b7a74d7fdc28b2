"""megatron: against names and interleaving built here from the model's config, with plain torch operations.

:func:`globals_of` is the independent construction: the global tensors that Megatron-core's GPTModel has for a model.
Ours must load as exactly these with torch's own DCP; and a checkpoint of these, saved by torch, must read as the model.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

from modelexport.checkpoints.formats import dcp, megatron
from modelexport.errors import CheckpointError, PlanError
from modelexport.models.rules import expected_rules
from modelexport.sharding.rules import TensorRule
from tests.helpers.dcp_models import ALONE, Values, assert_same, plan_of, read_all, rules_of, values_of, write
from tests.helpers.models import LlamaShape, config_json

SMALL = LlamaShape(hidden=32, heads=8, kv_heads=2, intermediate=24, vocab=300, layers=2)
SHAPES = {
    "llama": SMALL,
    "tied": LlamaShape(hidden=32, heads=4, kv_heads=4, intermediate=24, vocab=131, layers=3, tied=True),
    "biases": LlamaShape(hidden=32, heads=4, intermediate=24, layers=2, attention_bias=True, mlp_bias=True),
    "wide heads": LlamaShape(hidden=32, heads=4, kv_heads=1, head_dim=16, intermediate=24, vocab=128),
    "qwen2": LlamaShape(hidden=32, heads=4, intermediate=24, model_type="qwen2"),
    "phi3": LlamaShape(hidden=32, heads=4, intermediate=24, model_type="phi3"),
    "mixtral": LlamaShape(hidden=32, heads=4, intermediate=24, model_type="mixtral", layers=3, experts=4),
}


@pytest.fixture
def alone() -> Any:
    """torch's DCP in a single process says so in a warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is", UserWarning)
        yield


def fused_qkv(shape: LlamaShape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """For each key/value head: the query heads that use it, the key, the value."""
    size = shape.head_dim or shape.hidden // shape.heads
    groups = [w.view(shape.kv_heads, -1, size, *w.shape[1:]) for w in (q, k, v)]
    return torch.cat(groups, dim=1).reshape(-1, *q.shape[1:])


def padded(weight: torch.Tensor, tp: int) -> torch.Tensor:
    rows = -len(weight) % (128 * tp)
    return torch.cat([weight, weight.new_zeros(rows, weight.shape[1])])


def layer_of(shape: LlamaShape, values: Values, i: int) -> Values:
    """One decoder layer under Megatron's names, with Transformer Engine's fused norms."""
    own = {name.removeprefix(f"model.layers.{i}."): v for name, v in values.items() if f".layers.{i}." in name}
    found = {}
    if shape.model_type == "phi3":
        size = shape.head_dim or shape.hidden // shape.heads
        sizes = [shape.heads * size, shape.kv_heads * size, shape.kv_heads * size]
        for n, part in zip("qkv", own.pop("self_attn.qkv_proj.weight").split(sizes), strict=True):
            own[f"self_attn.{n}_proj.weight"] = part
        own["mlp.gate_proj.weight"], own["mlp.up_proj.weight"] = own.pop("mlp.gate_up_proj.weight").chunk(2)
    for kind in ("weight", "bias"):
        if f"self_attn.q_proj.{kind}" in own:
            qkv = [own[f"self_attn.{n}_proj.{kind}"] for n in "qkv"]
            found[f"self_attention.linear_qkv.{kind}"] = fused_qkv(shape, *qkv)
        if f"self_attn.o_proj.{kind}" in own:
            found[f"self_attention.linear_proj.{kind}"] = own[f"self_attn.o_proj.{kind}"]
        if f"mlp.gate_proj.{kind}" in own:
            found[f"mlp.linear_fc1.{kind}"] = torch.cat([own[f"mlp.{n}_proj.{kind}"] for n in ("gate", "up")])
            found[f"mlp.linear_fc2.{kind}"] = own[f"mlp.down_proj.{kind}"]
    found["self_attention.linear_qkv.layer_norm_weight"] = own["input_layernorm.weight"]
    norm = own["post_attention_layernorm.weight"]
    if shape.model_type == "mixtral":
        moe = "block_sparse_moe"
        found["pre_mlp_layernorm.weight"] = norm
        found["mlp.router.weight"] = own[f"{moe}.gate.weight"]
        experts = [[own[f"{moe}.experts.{e}.w{n}.weight"] for n in (1, 3, 2)] for e in range(shape.experts)]
        found["mlp.experts.experts.linear_fc1.weight"] = torch.stack([torch.cat(e[:2]) for e in experts])
        found["mlp.experts.experts.linear_fc2.weight"] = torch.stack([e[2] for e in experts])
    else:
        found["mlp.linear_fc1.layer_norm_weight"] = norm
    return found


def globals_of(shape: LlamaShape, values: Values, *, tp: int = 1, numbered: bool = False) -> Values:
    """Megatron's global tensors of a model, layers stacked or numbered."""
    found = {
        "embedding.word_embeddings.weight": padded(values["model.embed_tokens.weight"], tp),
        "decoder.final_layernorm.weight": values["model.norm.weight"],
    }
    if not shape.tied:
        found["output_layer.weight"] = padded(values["lm_head.weight"], tp)
    layers = [layer_of(shape, values, i) for i in range(shape.layers)]
    for name in layers[0]:
        if numbered:
            found |= {f"decoder.layers.{i}.{name}": layer[name] for i, layer in enumerate(layers)}
        else:
            found[f"decoder.layers.{name}"] = torch.stack([layer[name] for layer in layers])
    return found


def opened(directory: Path, config: dict[str, Any] | None = None) -> Any:
    return megatron.open(directory, config, expected_rules)


def saved(directory: Path, state: dict[str, Any]) -> Path:
    torch_dcp.save(state, checkpoint_id=str(directory), **ALONE)
    (directory / "metadata.json").write_text(
        json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1})
    )
    return directory


GRIDS = [("llama", {}), ("llama", {"tp": 2, "pp": 2}), ("llama", {"tp": 8}), ("tied", {"tp": 4, "pp": 3})]
GRIDS += [("biases", {"tp": 2}), ("wide heads", {"tp": 4}), ("qwen2", {"tp": 2, "pp": 2}), ("phi3", {"tp": 2})]
GRIDS += [("mixtral", {"tp": 2, "pp": 2, "ep": 4})]


@pytest.mark.parametrize(("name", "grid"), GRIDS)
@pytest.mark.usefixtures("alone")
def test_ours_is_what_megatron_has(tmp_path: Path, name: str, grid: dict[str, int]) -> None:
    shape = SHAPES[name]
    values = values_of(shape)
    plan = plan_of(rules_of(shape, values), **grid)
    write(megatron, tmp_path, plan, config_json(shape), values)
    wanted = globals_of(shape, values, tp=grid.get("tp", 1))
    loaded = {key: torch.full_like(value, 7) for key, value in wanted.items()}
    torch_dcp.load(loaded, checkpoint_id=str(tmp_path), **ALONE)
    assert_same(loaded, wanted)
    assert megatron.recognises(tmp_path)
    assert not dcp.recognises(tmp_path)
    checkpoint = opened(tmp_path)
    assert list(checkpoint.infos) == list(plan.rules)
    assert_same(read_all(checkpoint), values)
    assert checkpoint.left_out == {"common.pt": "arguments and progress of the run, not looked at"}
    common = torch.load(tmp_path / "common.pt", weights_only=True)
    assert common["checkpoint_version"] == 3.0
    assert json.loads((tmp_path / "metadata.json").read_text())["sharded_backend"] == "torch_dist"


@pytest.mark.parametrize("numbered", [False, True])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.usefixtures("alone")
def test_megatrons_is_the_model(tmp_path: Path, name: str, numbered: bool) -> None:
    shape = SHAPES[name]
    values = values_of(shape)
    state = globals_of(shape, values, tp=2, numbered=numbered)
    state |= {f"optimizer.state.exp_avg.{key}": torch.zeros(2) for key in list(state)}
    state["rng_state/shard_0_1"] = b"x"
    saved(tmp_path, state)
    checkpoint = opened(tmp_path, config_json(shape))
    assert_same(read_all(checkpoint), values)
    assert checkpoint.format == "megatron"
    assert checkpoint.left_out == {
        "optimizer.*": f"optimizer state, {len(state) // 2} entries",
        "rng_state/shard_0_1": "random number state",
    }


@pytest.mark.usefixtures("alone")
def test_other_spellings(tmp_path: Path) -> None:
    """Norms of their own, numbered experts, gate and up apart, a prefix before everything."""
    shape = SHAPES["mixtral"]
    values = values_of(shape)
    state = globals_of(shape, values, numbered=True)
    for i in range(shape.layers):
        layer = f"decoder.layers.{i}."
        state[f"{layer}input_layernorm.weight"] = state.pop(f"{layer}self_attention.linear_qkv.layer_norm_weight")
        fc1 = state.pop(f"{layer}mlp.experts.experts.linear_fc1.weight")
        fc2 = state.pop(f"{layer}mlp.experts.experts.linear_fc2.weight")
        for e in range(shape.experts):
            expert = f"{layer}mlp.experts.experts.{e}."
            state[f"{expert}linear_fc1.weight_w"], state[f"{expert}linear_fc1.weight_v"] = fc1[e].chunk(2)
            state[f"{expert}linear_fc2.weight"] = fc2[e]
    saved(tmp_path, {f"module.{key}": value.clone() for key, value in state.items()})
    checkpoint = opened(tmp_path, config_json(shape))
    assert_same(read_all(checkpoint), values)
    assert checkpoint.left_out == {}


@pytest.mark.usefixtures("alone")
def test_gate_and_up_apart_in_a_fused_model(tmp_path: Path) -> None:
    shape = SHAPES["phi3"]
    values = values_of(shape)
    state = globals_of(shape, values)
    fc1 = state.pop("decoder.layers.mlp.linear_fc1.weight")
    state["decoder.layers.mlp.linear_fc1.weight_w"], state["decoder.layers.mlp.linear_fc1.weight_v"] = (
        half.contiguous() for half in fc1.chunk(2, dim=1)
    )
    saved(tmp_path, state)
    assert_same(read_all(opened(tmp_path, config_json(shape))), values)


@pytest.mark.usefixtures("alone")
def test_layers_that_differ_are_numbered(tmp_path: Path) -> None:
    """A dense layer before one of experts, as some models begin: nothing can be stacked but the experts."""
    dense = LlamaShape(hidden=32, heads=4, intermediate=24)
    sparse = LlamaShape(hidden=32, heads=4, intermediate=24, model_type="mixtral", seed=1)
    first, second = values_of(dense), values_of(sparse)
    values = {name: v for name, v in first.items() if ".layers.1." not in name}
    values |= {name: v for name, v in second.items() if ".layers.1." in name}
    rules = [rule for rule in rules_of(dense, first) if rule.layer != 1]
    rules += [rule for rule in rules_of(sparse, second) if rule.layer == 1]
    config = config_json(dense)
    write(megatron, tmp_path, plan_of(rules, tp=2, pp=2, ep=2), config, values)
    wanted = {f"decoder.layers.0.{name}": value for name, value in layer_of(dense, first, 0).items()}
    wanted |= {f"decoder.layers.1.{name}": value for name, value in layer_of(sparse, second, 1).items()}
    loaded = {key: torch.zeros_like(value) for key, value in wanted.items()}
    torch_dcp.load(loaded, checkpoint_id=str(tmp_path), **ALONE)
    assert_same(loaded, wanted)
    assert_same(read_all(megatron.open(tmp_path, config, lambda *_, **__: rules)), values)
    common = torch.load(tmp_path / "common.pt", weights_only=True)
    assert common["content_metadata"]["non_homogeneous_layers"] is True


def test_each_element_is_stored_once(tmp_path: Path) -> None:
    """Key/value heads that ranks share, norms and embeddings have one home; chunks do not overlap and leave no gap."""
    values = values_of(SMALL)
    arrays = megatron.arrays(plan_of(rules_of(SMALL, values), tp=8, pp=2), config_json(SMALL))
    stored = sum(torch.Size(array.shape).numel() for array in arrays)
    assert stored == sum(value.numel() for value in globals_of(SMALL, values, tp=8).values())
    assert all(array.chunk is not None and len(array.chunk[0]) == len(array.shape) for array in arrays)


# --------------------------------------------------------------------- errors


def test_quantised_models_are_refused() -> None:
    values = values_of(SMALL)
    rules = rules_of(SMALL, values)
    scale = TensorRule(**{**vars(rules[2]), "name": "model.layers.0.x.weight_scale", "parameter": "weight_scale"})
    with pytest.raises(PlanError, match=r"unquantised models only.*weight_scale and 0 more\); use hf or dcp"):
        megatron.arrays(plan_of([*rules, scale]), config_json(SMALL))
    config = config_json(SMALL) | {"quantization_config": {"quant_method": "compressed-tensors"}}
    with pytest.raises(PlanError, match="this one is quantised; use hf or dcp"):
        megatron.arrays(plan_of(rules), config)
    with pytest.raises(CheckpointError, match=r"unquantised models; config.json's is quantised"):
        opened(Path("nowhere"), config)


def test_what_has_no_name_and_mixed_dtypes_are_listed_together() -> None:
    values = values_of(SMALL)
    values["model.layers.1.self_attn.v_proj.weight"] = values["model.layers.1.self_attn.v_proj.weight"].float()
    rules = rules_of(SMALL, values)
    strange = TensorRule(**{**vars(rules[1]), "name": "model.layers.0.gate.weight", "role": "attention.gate"})
    with pytest.raises(PlanError) as caught:
        megatron.arrays(plan_of([*rules, strange]), config_json(SMALL))
    text = str(caught.value)
    assert "hf and dcp can" in text
    assert "model.layers.0.gate.weight (attention.gate) has no name in Megatron" in text
    assert (
        "1.self_attn.v_proj.weight is F32, other tensors of Megatron's decoder.layers.1.self_attention.linear" in text
    )


@pytest.mark.usefixtures("alone")
def test_missing_and_misshapen_tensors_are_listed(tmp_path: Path) -> None:
    values = values_of(SMALL)
    state = globals_of(SMALL, values)
    del state["decoder.layers.mlp.linear_fc2.weight"]
    del state["output_layer.weight"]
    saved(tmp_path / "missing", state)
    with pytest.raises(CheckpointError) as caught:
        opened(tmp_path / "missing", config_json(SMALL))
    text = str(caught.value)
    assert "3 of the model's 21 tensors are missing" in text
    assert "0.mlp.down_proj.weight (as decoder.layers.mlp.linear_fc2.weight or decoder.layers.0.mlp.lin" in text
    assert "lm_head.weight (as output_layer.weight)" in text
    state = globals_of(SMALL, values)
    state["embedding.word_embeddings.weight"] = state["embedding.word_embeddings.weight"][:299].clone()
    state["decoder.layers.mlp.linear_fc1.weight"] = state["decoder.layers.mlp.linear_fc1.weight"][:, :40].clone()
    saved(tmp_path / "misshapen", state)
    with pytest.raises(CheckpointError) as caught:
        opened(tmp_path / "misshapen", config_json(SMALL))
    text = str(caught.value)
    assert "'embedding.word_embeddings.weight': its shape is [299, 32], the model's [300, 32]" in text
    assert "'decoder.layers.mlp.linear_fc1.weight': its shape is [2, 40, 32], the model's [2, 48, 32]" in text


def test_no_config_is_asked_for_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="give --config DIR"):
        opened(tmp_path)


def test_what_is_recognised(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(b"")
    for text, known in (
        ("{", False),
        ('{"sharded_backend": "zarr"}', False),
        ('{"sharded_backend": "torch_dist"}', True),
    ):
        (tmp_path / "metadata.json").write_text(text)
        assert megatron.recognises(tmp_path) is known
