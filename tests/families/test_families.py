"""Every family file, against what transformers saves and how it cuts the same modules itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import safe_open

from modelexport.errors import CheckpointError
from modelexport.families import Family, Module, family_of, known_model_types, read_dimensions
from modelexport.families.llama import FAMILY as LLAMA
from modelexport.families.mixtral import FAMILY as MIXTRAL
from modelexport.families.phi3 import FAMILY as PHI3
from modelexport.families.qwen2 import FAMILY as QWEN2
from tests._models import LlamaShape, config_json, describe, make_llama, tensor_shapes

FAMILIES = (LLAMA, MIXTRAL, PHI3, QWEN2)
SHAPES = [
    LlamaShape(model_type="mistral", head_dim=48),
    LlamaShape(model_type="qwen2", tied=True, heads=6, kv_heads=3, hidden=96),
    LlamaShape(model_type="phi3", intermediate=200),
    LlamaShape(model_type="mixtral", experts=3, layers=1, kv_heads=1),
]
# transformers holds Mixtral's experts stacked, and under another name, in memory.
IN_MEMORY = {
    "block_sparse_moe.gate": "mlp.gate",
    "block_sparse_moe.experts.{e}.w1": "mlp.experts.gate_up_proj",
    "block_sparse_moe.experts.{e}.w3": "mlp.experts.gate_up_proj",
    "block_sparse_moe.experts.{e}.w2": "mlp.experts.down_proj",
}


def modules_of(family: Family) -> tuple[Module, ...]:
    return (*family.before, *family.layer, *family.after)


def saved_tensors(directory: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor, read by safetensors."""
    with safe_open(directory / "model.safetensors", "pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (not a dict)


def test_the_model_types_there_are() -> None:
    assert known_model_types() == ["llama", "mistral", "mixtral", "phi3", "qwen2"]
    assert family_of({"model_type": "mistral"}) is LLAMA
    for family in FAMILIES:
        assert family_of({"model_type": family.name}) is family


@pytest.mark.parametrize("shape", SHAPES, ids=describe)
def test_a_family_names_and_sizes_every_weight_that_transformers_saves(shape: LlamaShape) -> None:
    directory = make_llama(**vars(shape))
    saved = saved_tensors(directory)
    assert saved == tensor_shapes(shape), "and so do the headers that other tests plan with"
    config = json.loads((directory / "config.json").read_text())
    family = family_of(config)
    dims = read_dimensions(config, family)
    assert dims == read_dimensions(config_json(shape), family)
    declared = {m.path: dims.weight_shape(m) for m in (*family.before, *family.after)}
    for i in range(shape.layers):
        for path, _, module in family.modules_of_layer(dims):
            declared[f"{family.layer_prefix.format(i=i)}.{path}"] = dims.weight_shape(module)
    weights = {name.removesuffix(".weight"): size for name, size in saved.items() if name.endswith(".weight")}
    if shape.tied:
        del declared["lm_head"]
    assert weights == declared


@pytest.mark.parametrize("shape", SHAPES, ids=describe)
def test_biases_are_where_the_family_says(shape: LlamaShape) -> None:
    config, family = config_json(shape), family_of(config_json(shape))
    dims = read_dimensions(config, family)
    with_bias = {path for path, _, module in family.modules_of_layer(dims) if module.has_bias(config)}
    names = {name.removesuffix(".bias") for name in tensor_shapes(shape) if name.endswith(".bias")}
    assert {name.split(".", 3)[3] for name in names} == with_bias
    assert bool(with_bias) == (shape.model_type == "qwen2")


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_partitions_are_those_of_transformers_own_tensor_parallelism(family: Family) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config_class = type(AutoConfig.for_model(family.name))
    plan = {path.removeprefix("layers.*."): style for path, style in config_class.base_model_tp_plan.items()}
    linears = [module for module in family.layer if module.kind == "linear"]
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
        assert set(IN_MEMORY.values()) - {"mlp.gate"} <= {
            path.removeprefix("layers.*.") for path in config_class.base_model_ep_plan
        }


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_declarations_hold_together(family: Family) -> None:
    modules = modules_of(family)
    roles = [module.role for module in modules]
    assert len(set(roles)) == len(roles)
    fused: dict[str, list[str]] = {}
    for module in modules:
        assert (module.partition != "replicated") == (module.kind in ("linear", "embedding", "head")), module.path
        assert not (module.parts and module.axis), "a fused module's axes are its parts'"
        assert (module.kind == "norm") == (not module.axes), module.path
        assert not module.parts or module.partition == "column"
        assert module.is_expert == module.role.startswith("expert.")
        assert module.general_path == module.path.replace("{e}", "*")
        if module.fused_into:
            fused.setdefault(module.fused_into, []).append(module.role.split(".")[1])
    pairs = {"self_attn.qkv_proj": ["q", "k", "v"], "mlp.gate_up_proj": ["gate", "up"]}
    experts = {"self_attn.qkv_proj": ["q", "k", "v"], "block_sparse_moe.experts.w13": ["gate", "up"]}
    assert fused == {"mixtral": experts, "phi3": {}}.get(family.name, pairs)


def test_experts_come_one_by_one() -> None:
    dims = read_dimensions(config_json(LlamaShape(model_type="mixtral", experts=2)), MIXTRAL)
    found = list(MIXTRAL.modules_of_layer(dims))
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
