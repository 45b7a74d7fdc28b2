"""Every declared model type against transformers: names, shapes, biases, what config.json may leave out, and cuts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from modelexport.models.architecture import (
    Dimensions,
    Family,
    Module,
    family_of,
    known_model_types,
    read_dimensions,
    ties_embeddings,
)
from modelexport.models.families.base import Axis
from tests.helpers.models import copy_checkpoint
from tests.helpers.tiny_models import tiny_checkpoint

DECLARED = [
    "cohere2",
    "cwm",
    "deepseek_v2",
    "deepseek_v3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "glm4",
    "gpt2",
    "gpt_neox",
    "gpt_oss",
    "granite",
    "helium",
    "llama",
    "ministral",
    "ministral3",
    "mistral",
    "mixtral",
    "olmo2",
    "olmo3",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "seed_oss",
    "smollm3",
    "starcoder2",
]
NOT_DENSE = {"mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss"}


def config_of(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return found


def saved_tensors(directory: Path) -> dict[str, tuple[int, ...]]:
    with safe_open(directory / "model.safetensors", "pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (not a dict)


def declared_tensors(family: Family, dims: Dimensions, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Of each weight, bias and vector that the family has, its shape."""
    found: dict[str, tuple[int, ...]] = {}

    def add(name: str, module: Module) -> None:
        found[f"{name}.{module.parameter}"] = dims.weight_shape(module)
        if module.has_bias(family.complete(config)):
            found[f"{name}.bias"] = dims.weight_shape(module)[:1]

    for module in (*family.before, *family.after):
        if module.kind != "head" or not dims.tied_embeddings:
            add(module.path, module)
    for layer in range(dims.layers):
        for path, _, module in family.modules_of_layer(dims, layer):
            add(f"{family.layer_prefix.format(i=layer)}.{path}", module)
    return found


def config_class(model_type: str) -> Any:
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type]


def test_the_types_that_are_declared() -> None:
    assert set(DECLARED) <= set(known_model_types())
    for model_type in DECLARED:
        family = family_of({"model_type": model_type})
        assert model_type in (family.name, *family.aliases), "not derived"
        assert family.dimensions is None


@pytest.mark.parametrize("model_type", DECLARED)
def test_tensors_are_those_that_transformers_saves(model_type: str) -> None:
    directory = tiny_checkpoint(model_type)
    config = config_of(directory)
    family = family_of(config)
    dims = read_dimensions(config, family)
    assert declared_tensors(family, dims, config) == saved_tensors(directory)
    assert dims.tied_embeddings == ties_embeddings(config)
    assert family.of_type(model_type).architecture == config["architectures"][0] or model_type in family.aliases


@pytest.mark.parametrize("model_type", DECLARED)
def test_what_a_config_leaves_out_is_what_transformers_takes(model_type: str) -> None:
    """Ties, biases and the size of a head, which files often do not say."""
    family, own = family_of({"model_type": model_type}), config_class(model_type)()
    said = family.complete({"model_type": model_type})
    assert said.get("tie_word_embeddings", False) == own.tie_word_embeddings
    keys = {module.bias for module in (*family.layer, *family.after) if isinstance(module.bias, str)}
    assert {key: bool(said.get(key)) for key in keys} == {key: bool(getattr(own, key, False)) for key in keys}
    for key, value in family.defaults.items():
        assert getattr(own, key) == value, key
    if not model_type.startswith("deepseek"):  # whose head_dim is that of its rotary part
        head = getattr(own, "head_dim", None) or own.hidden_size // own.num_attention_heads
        sized = {"hidden_size": own.hidden_size, "num_attention_heads": own.num_attention_heads}
        assert said.get("head_dim", sized["hidden_size"] // sized["num_attention_heads"]) == head
    for key, name in family.keys.items():
        assert own.attribute_map.get(key, name) == name


@pytest.mark.parametrize("model_type", sorted(set(DECLARED) - NOT_DENSE - {"gpt2"}))
def test_cuts_are_those_of_transformers_own_plan(model_type: str) -> None:
    family, own = family_of({"model_type": model_type}), config_class(model_type)
    plan = {path.removeprefix("layers.*."): style for path, style in own.base_model_tp_plan.items()}
    plan = {path: style for path, style in plan.items() if not style.startswith("replicated")}
    linears = {module.path: module.partition for module in family.layer if module.kind == "linear"}
    words = {path: "column" if style.startswith("colwise") else "row" for path, style in plan.items()}
    assert words == linears


def test_an_axis_may_be_a_multiple_of_another() -> None:
    """GPT-NeoX: the rows of a head's query, key and value lie together, and no cut separates them."""
    config = config_of(tiny_checkpoint("gpt_neox"))
    family = family_of(config)
    dims = read_dimensions(config, family)
    heads = config["num_attention_heads"]
    head_dim = config["hidden_size"] // heads
    axis = dims.axis("heads_qkv")
    assert (axis.size, axis.unit, axis.heads) == (3 * heads * head_dim, 3 * head_dim, heads)
    assert family.axes["heads_qkv"] == Axis(of="heads", each=3)
    assert dims.axis("head").size == head_dim
    assert dims.axis("hidden").size == config["hidden_size"]


def test_gpt2_names_its_sizes_otherwise() -> None:
    config = {"model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_inner": None}
    family = family_of(config)
    dims = read_dimensions(config, family)
    assert (dims.hidden, dims.heads, dims.layers, dims.intermediate) == (768, 12, 12, 3072)
    assert dims.tied_embeddings
    assert dims.axis("positions").size == 1024
    assert read_dimensions({**config, "n_inner": 1000}, family).intermediate == 1000
    shapes = {module.role: dims.weight_shape(module) for module in family.layer}
    assert shapes["mlp.in"] == (768, 3072), "as it lies on disk: [in_features, out_features]"
    assert shapes["attention.qkv_bias"] == (2304,)
    assert not any(module.kind == "linear" for module in family.layer)


def test_a_stack_of_experts_is_one_tensor() -> None:
    config = config_of(tiny_checkpoint("gpt_oss"))
    family = family_of(config)
    dims = read_dimensions(config, family)
    assert dims.experts == 0, "there are none that could be dealt out one by one"
    shapes = {module.role: dims.weight_shape(module) for module in family.layer}
    experts, hidden, width = config["num_local_experts"], config["hidden_size"], config["intermediate_size"]
    assert shapes["experts.gate_up"] == (experts, hidden, 2 * width)
    assert shapes["experts.down_bias"] == (experts, hidden)
    assert shapes["router"] == (experts, hidden)
    assert shapes["attention.sinks"] == (config["num_attention_heads"],)


@pytest.mark.parametrize(
    ("config", "tied"),
    [
        (None, False),
        ({}, False),
        ({"tie_word_embeddings": True}, True),
        ({"model_type": "gemma2"}, False),  # its numbers are missing: whoever reads them says so
        ({"model_type": "nobody-knows"}, False),
    ],
)
def test_ties_of_configs_that_say_little(config: dict[str, Any] | None, tied: bool) -> None:
    assert ties_embeddings(config) is tied


def test_a_tie_that_is_left_unsaid() -> None:
    config = config_of(tiny_checkpoint("gemma2"))
    del config["tie_word_embeddings"]
    assert ties_embeddings(config)
    assert not ties_embeddings({**config, "tie_word_embeddings": False})


def test_gpt2_without_its_prefix_is_the_same_model(tmp_path: Path) -> None:
    """As the first checkpoints have it: no prefix, and the masks of the attention as tensors."""
    from modelexport.exporting import export
    from modelexport.inspection.verify import verify_checkpoint

    source = tiny_checkpoint("gpt2")

    def old(tensors: dict[str, Any]) -> dict[str, Any]:
        found = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
        return found | {f"h.{layer}.attn.bias": torch.ones(1, 1, 8, 8) for layer in range(2)}

    before = copy_checkpoint(source, tmp_path / "old", tensors=old)
    for name, directory in (("new", source), ("from_old", before)):
        export(model=str(directory), quant="none", out=str(tmp_path / name), evaluate=False, quiet=True)
    written = [load_file(tmp_path / name / "model.safetensors") for name in ("new", "from_old")]
    assert written[0].keys() == written[1].keys() == load_file(source / "model.safetensors").keys()
    assert all(torch.equal(tensor, written[1][name]) for name, tensor in written[0].items())
    record = json.loads((tmp_path / "from_old" / "modelexport.json").read_text())
    assert set(record["left_out"]) == {f"transformer.h.{layer}.attn.bias" for layer in range(2)}
    assert verify_checkpoint(tmp_path / "from_old", against=before).problems == []
