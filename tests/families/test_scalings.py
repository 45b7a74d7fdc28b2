"""What scales into what, by function: whatever is folded through a family's data, transformers computes the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from modelexport.export_folds import apply_fold, folds_of_layer
from modelexport.families import Family, Scaling, family_of, read_dimensions
from modelexport.quantization import formats
from modelexport.quantization.algorithms.base import Linear
from tests._models import LlamaShape, copy_checkpoint, describe, make_llama

SHAPE: dict[str, Any] = {"hidden": 64, "intermediate": 96, "vocab": 101, "dtype": "float32"}
MODELS = [
    {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "head_dim": 32},
    {"model_type": "mistral", "kv_heads": 4},
    {"model_type": "qwen2", "kv_heads": 1},
    {"model_type": "qwen3", "head_dim": 24},
    {"model_type": "phi3"},
    {"model_type": "mixtral", "experts": 3},
    {"model_type": "qwen3_moe", "experts": 3},
    {"model_type": "deepseek_v3", "shared_experts": 2},
    {"model_type": "deepseek_v2", "query_rank": None, "attention_bias": True, "mlp_bias": True},
]


def linears_of(family: Family, config: dict[str, Any], layer: int, tensors: dict[str, Tensor]) -> dict[str, Linear]:
    """All linears of a layer on one rank; routers are not quantised."""
    found = {}
    for path, _, module in family.modules_of_layer(read_dimensions(config, family), layer):
        name = f"{family.layer_prefix.format(i=layer)}.{path}"
        if module.kind in ("linear", "router"):
            weight = tensors[f"{name}.weight"]
            number_format = formats.get("int8") if module.kind == "linear" else None
            found[name] = Linear(
                name, module.role, number_format, weight, (0, len(weight)), (len(weight), weight.shape[1]), None
            )
    return found


def folded(family: Family, config: dict[str, Any], scale_of: Callable[[int], Tensor]) -> Callable[[Any], Any]:
    """Changes a checkpoint's tensors by scales through every pair of every layer; counts them in ``folds``."""
    dims = read_dimensions(config, family)

    def change(tensors: dict[str, Tensor]) -> None:
        for layer in range(dims.layers):
            linears = linears_of(family, config, layer, tensors)
            for fold in folds_of_layer(family, dims, layer, linears, tensors, lambda name: tensors[name].dtype):
                apply_fold(tensors, {}, fold, scale_of(fold.fold.features))

    return change


def logits(directory: Path) -> Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        out: Tensor = model(torch.arange(1, 49)[None]).logits
    return out


def powers_of_two(features: int) -> Tensor:
    return 2.0 ** torch.randint(-4, 5, (features,))


@pytest.mark.parametrize("model", MODELS, ids=lambda model: describe(LlamaShape(**model)))
def test_what_is_folded_leaves_the_function(tmp_path: Path, model: dict[str, Any]) -> None:
    torch.manual_seed(1)
    source = make_llama(**SHAPE, **model)
    config = json.loads((source / "config.json").read_text())
    copied = copy_checkpoint(source, tmp_path / "folded", tensors=folded(family_of(config), config, powers_of_two))
    wanted, found = logits(source), logits(copied)
    assert float((found - wanted).abs().max()) <= 1e-4 * float(wanted.abs().max())


@pytest.mark.parametrize("source", ["attention.norm", "attention.v", "mlp.norm", "expert.up"])
def test_that_test_sees_what_is_missing(tmp_path: Path, source: str) -> None:
    """A pair that lacks a reader, or has the wrong one, changes the logits."""
    torch.manual_seed(2)
    directory = make_llama(**SHAPE, model_type="mixtral", experts=3)
    config = json.loads((directory / "config.json").read_text())
    family = family_of(config)
    [right] = [scaling for scaling in family.scalings if scaling.source == source]
    wrong = Scaling(
        source=source if right.into[1:] else {"attention.v": "attention.q"}.get(source, "expert.gate"),
        into=right.into[1:] or right.into,
    )
    broken = replace(family, scalings=(wrong,))
    copied = copy_checkpoint(directory, tmp_path / "folded", tensors=folded(broken, config, powers_of_two))
    wanted, found = logits(directory), logits(copied)
    assert float((found - wanted).abs().max()) > 1e-2 * float(wanted.abs().max())


@pytest.mark.parametrize("model", MODELS, ids=lambda model: describe(LlamaShape(**model)))
def test_every_norm_and_gated_product_of_a_layer_has_its_pair(model: dict[str, Any]) -> None:
    """Norms over heads apart, which a rotation by position follows."""
    config = json.loads((make_llama(**SHAPE, **model) / "config.json").read_text())
    family = family_of(config)
    dims = read_dimensions(config, family)
    sources = [scaling.source for scaling in family.scalings]
    assert len(set(sources)) == len(sources)
    roles = {role for module in family.layer for role in (module.role, *(role for role, _ in module.parts))}
    assert {role for scaling in family.scalings for role in (scaling.source, *scaling.into)} <= roles
    wanted = {module.role for module in family.layer if module.kind == "norm" and module.axis != "head"}
    wanted |= {role for role in roles if role.endswith(".up")}
    assert wanted <= set(sources)
    for scaling in family.scalings:
        for layer in range(dims.layers):
            present = {module.role for _, _, module in family.modules_of_layer(dims, layer)}
            assert scaling.source not in present or present & set(scaling.into)
