"""The Llama family file, against what transformers saves and how it cuts the same modules itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from modelexport.errors import CheckpointError, PlanError, UsageError
from modelexport.models.architecture import Dimensions, family_of, known_model_types, read_dimensions
from modelexport.models.families.llama import FAMILY
from tests.helpers.models import LlamaShape, config_json, describe, make_llama, tensor_shapes

SHAPES = [
    LlamaShape(),
    LlamaShape(tied=True, dtype="float16"),
    LlamaShape(hidden=96, heads=6, kv_heads=3, head_dim=32, attention_bias=True, mlp_bias=True),
    LlamaShape(kv_heads=1, layers=1, mlp_bias=True),
]


def saved_tensors(directory: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor, read by safetensors."""
    found: dict[str, tuple[int, ...]] = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                found[name] = tuple(file.get_slice(name).get_shape())
    return found


@pytest.mark.parametrize("shape", SHAPES, ids=describe)
def test_the_family_names_every_tensor_that_transformers_saves(shape: LlamaShape) -> None:
    saved = set(saved_tensors(make_llama(**vars(shape))))
    modules = [module.path for module in (*FAMILY.before, *FAMILY.after)]
    for i in range(shape.layers):
        modules += [f"{FAMILY.layer_prefix.format(i=i)}.{module.path}" for module in FAMILY.layer]
    declared = {f"{module}.{parameter}" for module in modules for parameter in ("weight", "bias")}
    assert saved <= declared
    missing = {name for name in declared - saved if name.endswith(".weight")}
    assert missing == ({"lm_head.weight"} if shape.tied else set())


@pytest.mark.parametrize("shape", SHAPES, ids=describe)
def test_models_agree(shape: LlamaShape) -> None:
    """What the other tests plan with, headers alone, is what transformers saves."""
    directory = make_llama(**vars(shape))
    assert saved_tensors(directory) == tensor_shapes(shape)
    config = json.loads((directory / "config.json").read_text())
    assert read_dimensions(config) == read_dimensions(config_json(shape))
    expected = Dimensions(
        layers=shape.layers,
        hidden=shape.hidden,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim or shape.hidden // shape.heads,
        intermediate=shape.intermediate,
        vocab=shape.vocab,
        tied_embeddings=shape.tied,
    )
    assert read_dimensions(config) == expected


def test_partitions_are_those_of_transformers_own_tensor_parallelism() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    plan = {**LlamaConfig.base_model_tp_plan}
    assert len(plan) >= 7
    ours = {f"layers.*.{module.path}": module for module in FAMILY.layer}
    for path, style in plan.items():
        if path in ours:
            word = "column" if style.startswith("colwise") else "row" if style.startswith("rowwise") else style
            assert word == ours[path].partition, path
    linears = {path for path, module in ours.items() if module.kind == "linear"}
    assert linears <= set(plan)
    assert LlamaForCausalLM._tp_plan["lm_head"].startswith("colwise")


def test_every_cut_runs_along_an_axis() -> None:
    for module in (*FAMILY.before, *FAMILY.layer, *FAMILY.after):
        assert (module.partition == "replicated") == (module.axis is None), module.path
        assert (module.kind == "norm") == (module.partition == "replicated"), module.path
    roles = [module.role for module in (*FAMILY.before, *FAMILY.layer, *FAMILY.after)]
    assert len(set(roles)) == len(roles)
    fused: dict[str, list[str]] = {}
    for module in FAMILY.layer:
        if module.fused_into:
            fused.setdefault(module.fused_into, []).append(module.role.split(".")[1])
    assert fused == {"self_attn.qkv_proj": ["q", "k", "v"], "mlp.gate_up_proj": ["gate", "up"]}


# -------------------------------------------------------------- which family


def test_llama_is_known_by_its_model_type() -> None:
    assert family_of({"model_type": "llama"}) is FAMILY
    assert "llama" in known_model_types()
    assert known_model_types() == sorted(known_model_types())


def test_an_unknown_architecture_is_told_the_nearest_and_how_to_list_all() -> None:
    with pytest.raises(PlanError) as caught:
        family_of({"model_type": "lama"})
    text = str(caught.value)
    assert "unknown architecture 'lama'; did you mean 'llama', '" in text
    assert "modelexport models lists all " in text
    assert len(text) < 200


@pytest.mark.parametrize("config", [{}, {"model_type": None}, {"model_type": 3}])
def test_a_config_without_a_model_type(config: dict[str, Any]) -> None:
    with pytest.raises((UsageError, CheckpointError), match="no model_type"):
        family_of(config)


# ------------------------------------------------------------- config's numbers


def test_defaults_of_old_configs() -> None:
    """The first Llama's config.json has neither num_key_value_heads nor head_dim nor tie_word_embeddings."""
    config = config_json(LlamaShape(hidden=96, heads=6))
    for key in ("num_key_value_heads", "tie_word_embeddings"):
        del config[key]
    dims = read_dimensions(config)
    assert (dims.kv_heads, dims.head_dim, dims.tied_embeddings) == (6, 16, False)
    assert read_dimensions({**config, "num_key_value_heads": None, "head_dim": None}) == dims


def test_axes() -> None:
    dims = read_dimensions(config_json(LlamaShape(hidden=96, heads=6, kv_heads=2, head_dim=32)))
    assert dims.axis_size("heads") == 192
    assert dims.axis_size("kv_heads") == 64
    assert dims.axis_size("intermediate") == 384
    assert dims.axis_size("vocab") == 211
    assert [dims.axis_unit(axis) for axis in ("heads", "kv_heads", "intermediate", "vocab")] == [32, 32, 1, 1]


@pytest.mark.parametrize(
    "key",
    ["hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size", "vocab_size"],
)
@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "is missing"),
        (0, "is 0"),
        (-4, "is -4"),
        ("8", "is '8'"),
        (8.0, "is 8.0"),
        (True, "is True"),
        ([8], r"is \[8\]"),
    ],
)
def test_numbers_that_are_none(key: str, value: object, words: str) -> None:
    config = {**config_json(LlamaShape()), key: value}
    with pytest.raises(CheckpointError, match=f"config.json: {key} {words}; a positive whole number is needed"):
        read_dimensions(config)


def test_numbers_that_do_not_divide() -> None:
    config = config_json(LlamaShape())
    with pytest.raises(CheckpointError, match="num_attention_heads 4 is not a multiple of num_key_value_heads 3"):
        read_dimensions({**config, "num_key_value_heads": 3})
    with pytest.raises(CheckpointError, match="hidden_size 130 is not divisible by num_attention_heads 4"):
        read_dimensions({**config, "hidden_size": 130})
    assert read_dimensions({**config, "hidden_size": 130, "head_dim": 32}).head_dim == 32
