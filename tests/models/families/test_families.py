"""Every family file, against what transformers saves and how it cuts the same modules itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import safe_open

from modelexport.errors import CheckpointError
from modelexport.models.architecture import Family, Module, family_of, read_dimensions
from modelexport.models.families.deepseek_v3 import FAMILY as DEEPSEEK
from modelexport.models.families.llama import FAMILY as LLAMA
from modelexport.models.families.mixtral import FAMILY as MIXTRAL
from modelexport.models.families.phi3 import FAMILY as PHI3
from modelexport.models.families.qwen2 import FAMILY as QWEN2
from modelexport.models.families.qwen3 import FAMILY as QWEN3
from modelexport.models.families.qwen3_moe import FAMILY as QWEN3_MOE
from tests.helpers.models import LlamaShape, config_json, describe, make_llama, tensor_shapes

DEEPSEEK_V2 = DEEPSEEK.of_type("deepseek_v2")
FAMILIES = (DEEPSEEK, DEEPSEEK_V2, LLAMA, MIXTRAL, PHI3, QWEN2, QWEN3, QWEN3_MOE)
SHAPES = [
    LlamaShape(model_type="mistral", head_dim=48),
    LlamaShape(model_type="qwen2", tied=True, heads=6, kv_heads=3, hidden=96),
    LlamaShape(model_type="qwen3", head_dim=48, tied=True, attention_bias=True),
    LlamaShape(model_type="qwen3_moe", experts=3, layers=1, expert_intermediate=64),
    LlamaShape(model_type="phi3", intermediate=200),
    LlamaShape(model_type="mixtral", experts=3, layers=1, kv_heads=1),
    LlamaShape(model_type="deepseek_v3", layers=3, dense_layers=2, query_rank=24, kv_rank=40, shared_experts=2),
    LlamaShape(model_type="deepseek_v3", query_rank=None, dense_layers=0, attention_bias=True),
    LlamaShape(model_type="deepseek_v2", attention_bias=True, mlp_bias=True, tied=True),
]
# transformers holds experts stacked in memory, and Mixtral's under another name.
IN_MEMORY = {
    "block_sparse_moe.gate": "mlp.gate",
    "block_sparse_moe.experts.{e}.w1": "mlp.experts.gate_up_proj",
    "block_sparse_moe.experts.{e}.w3": "mlp.experts.gate_up_proj",
    "block_sparse_moe.experts.{e}.w2": "mlp.experts.down_proj",
    "mlp.experts.{e}.gate_proj": "mlp.experts.gate_up_proj",
    "mlp.experts.{e}.up_proj": "mlp.experts.gate_up_proj",
    "mlp.experts.{e}.down_proj": "mlp.experts.down_proj",
}
DENSE = {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
EXPERTS = {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}


def modules_of(family: Family) -> tuple[Module, ...]:
    return (*family.before, *family.layer, *family.after)


def saved_tensors(directory: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor, read by safetensors."""
    with safe_open(directory / "model.safetensors", "pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (not a dict)


def test_a_family_is_found_by_its_types() -> None:
    assert family_of({"model_type": "mistral"}) is LLAMA
    for family in FAMILIES:
        assert family_of({"model_type": family.name}) == family


@pytest.mark.parametrize("shape", SHAPES, ids=describe)
def test_a_family_names_and_sizes_every_weight_that_transformers_saves(shape: LlamaShape) -> None:
    directory = make_llama(**vars(shape))
    saved = saved_tensors(directory)
    assert saved == tensor_shapes(shape), "and so do the headers that other tests plan with"
    config = json.loads((directory / "config.json").read_text())
    family = family_of(config)
    dims = read_dimensions(config, family)
    assert dims == read_dimensions(config_json(shape), family)
    declared = {f"{m.path}.weight": dims.weight_shape(m) for m in (*family.before, *family.after)}
    for i in range(shape.layers):
        for path, _, module in family.modules_of_layer(dims, i):
            declared[f"{family.layer_prefix.format(i=i)}.{path}.{module.parameter}"] = dims.weight_shape(module)
    if shape.tied:
        del declared["lm_head.weight"]
    assert {name: size for name, size in saved.items() if not name.endswith(".bias")} == declared


@pytest.mark.parametrize("shape", SHAPES, ids=describe)
def test_biases_are_where_the_family_says(shape: LlamaShape) -> None:
    config, family = config_json(shape), family_of(config_json(shape))
    dims = read_dimensions(config, family)
    with_bias = {
        f"{family.layer_prefix.format(i=i)}.{path}"
        for i in range(shape.layers)
        for path, _, module in family.modules_of_layer(dims, i)
        if module.has_bias(config)
    }
    assert {name.removesuffix(".bias") for name in tensor_shapes(shape) if name.endswith(".bias")} == with_bias
    assert bool(with_bias) == (shape.model_type == "qwen2" or shape.attention_bias)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_partitions_are_those_of_transformers_own_tensor_parallelism(family: Family) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config_class = type(AutoConfig.for_model(family.name))
    plan = {path.removeprefix("layers.*."): style for path, style in config_class.base_model_tp_plan.items()}
    linears = [module for module in family.layer if module.kind == "linear" and module.partition != "replicated"]
    assert plan.pop("self_attn.kv_a_proj_with_mqa", "mla_kv_a_proj") == "mla_kv_a_proj", "whole; gradients are summed"
    if family is DEEPSEEK:  # whose plan leaves its attention whole: that of deepseek_v2, with the same, does not
        linears = [module for module in linears if not module.path.startswith("self_attn.")]
    if family is QWEN3_MOE:  # layers without experts, which are not in its data
        plan = {path: style for path, style in plan.items() if path not in DENSE}
    plan = {path: style for path, style in plan.items() if not style.startswith("replicated")}  # norms over heads
    assert linears
    for module in linears:
        style = plan[IN_MEMORY.get(module.path, module.path)]
        found = "column" if "colwise" in style else "row" if "rowwise" in style else style
        assert found == module.partition, module.path
    ours = {IN_MEMORY.get(module.path, module.path) for module in linears}
    assert {path for path in plan if not path.endswith("mlp.experts")} == ours, "all that it cuts, we cut"
    head = AutoModelForCausalLM._model_mapping[config_class]._tp_plan["lm_head"]
    assert head.startswith("colwise")
    if family.has_experts:
        assert {path.removeprefix("layers.*.") for path in config_class.base_model_ep_plan} >= EXPERTS


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_declarations_hold_together(family: Family) -> None:
    modules = modules_of(family)
    roles = [module.role for module in modules]
    assert len(set(roles)) == len(roles)
    fused: dict[str, list[str]] = {}
    for module in modules:
        if not module.role.endswith(("q_a", "kv_a")):  # low-rank projections are linears that nobody cuts
            assert (module.partition != "replicated") == (module.kind in ("linear", "embedding", "head")), module.path
        assert not (module.parts and module.axis), "a fused module's axes are its parts'"
        assert module.axes or module.kind == "norm", module.path
        assert (module.kind == "vector") == (module.parameter != "weight"), module.path
        assert not module.parts or module.partition == "column"
        assert module.is_expert == module.role.startswith("expert.")
        assert module.general_path == module.path.replace("{e}", "*")
        if module.fused_into:
            fused.setdefault(module.fused_into, []).append(module.role.split(".")[1])
    pairs = {"self_attn.qkv_proj": ["q", "k", "v"], "mlp.gate_up_proj": ["gate", "up"]}
    experts = {"self_attn.qkv_proj": ["q", "k", "v"], "block_sparse_moe.experts.w13": ["gate", "up"]}
    latent = {"self_attn.fused_qkv_a_proj": ["q_a", "kv_a"]} | {
        fused: ["gate", "up"] for fused in ("mlp.gate_up_proj", "mlp.experts.w13", "mlp.shared_experts.gate_up_proj")
    }
    many = {"self_attn.qkv_proj": ["q", "k", "v"], "mlp.experts.w13": ["gate", "up"]}
    special = {"mixtral": experts, "qwen3_moe": many, "phi3": {}, "deepseek_v3": latent, "deepseek_v2": latent}
    assert fused == special.get(family.name, pairs)


def test_experts_come_one_by_one() -> None:
    dims = read_dimensions(config_json(LlamaShape(model_type="mixtral", experts=2)), MIXTRAL)
    found = list(MIXTRAL.modules_of_layer(dims, 0))
    assert [(path, expert) for path, expert, module in found if module.is_expert] == [
        (f"block_sparse_moe.experts.{e}.{name}", e) for e in range(2) for name in ("w1", "w2", "w3")
    ]
    assert [path for path, _, module in found if not module.is_expert] == [
        module.path for module in MIXTRAL.layer if not module.is_expert
    ]


def test_the_number_of_experts() -> None:
    config = config_json(LlamaShape(model_type="mixtral", experts=8))
    assert read_dimensions(config, MIXTRAL).experts == 8
    assert read_dimensions(config).experts == 0
    assert read_dimensions({**config, "num_experts": "many"}, LLAMA).experts == 0, "a dense family has none"
    with pytest.raises(CheckpointError, match="num_local_experts is missing"):
        read_dimensions({**config, "num_local_experts": None}, MIXTRAL)
    with pytest.raises(CheckpointError, match="n_routed_experts is 0"):
        read_dimensions({**config, "num_local_experts": None, "n_routed_experts": 0}, MIXTRAL)
