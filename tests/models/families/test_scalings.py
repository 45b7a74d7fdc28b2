"""What scales into what, by function: whatever is folded through a family's data, transformers computes the same."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from modelexport.models.architecture import Scaling, family_of, read_dimensions
from modelexport.models.folds import apply_fold, folds_of_layer
from tests.helpers.folded_models import folded, in_float32, linears_of, logits, powers_of_two
from tests.helpers.models import LlamaShape, copy_checkpoint, describe, make_llama
from tests.helpers.tiny_models import tiny_checkpoint

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
TINY = ["cohere2", "gemma", "gemma2", "gemma3_text", "glm4", "gpt_neox", "gpt_oss", "granite", "olmo2", "starcoder2"]
READ_BY_NO_LINEAR = {
    "gemma2": {"attention.post_norm", "mlp.post_norm"},
    "gemma3_text": {"attention.post_norm", "mlp.post_norm"},
    "glm4": {"attention.post_norm", "mlp.post_norm"},
    "olmo2": {"attention.post_norm", "mlp.post_norm", "attention.q_norm", "attention.k_norm"},
    "gpt_oss": {"mlp.norm"},  # by experts in a stack, which stays as it is
}


@pytest.mark.parametrize("model", MODELS, ids=lambda model: describe(LlamaShape(**model)))
def test_what_is_folded_leaves_the_function(tmp_path: Path, model: dict[str, Any]) -> None:
    torch.manual_seed(1)
    source = make_llama(**SHAPE, **model)
    config = json.loads((source / "config.json").read_text())
    copied = copy_checkpoint(source, tmp_path / "folded", tensors=folded(family_of(config), config, powers_of_two))
    wanted, found = logits(source), logits(copied)
    assert float((found - wanted).abs().max()) <= 1e-4 * float(wanted.abs().max())


@pytest.mark.parametrize("model_type", TINY)
def test_what_is_folded_leaves_the_function_of_every_type(tmp_path: Path, model_type: str) -> None:
    """Norms with biases, without a mean, with 1 added to their weights; one norm before attention and MLP; sinks."""
    torch.manual_seed(3)
    source = in_float32(tiny_checkpoint(model_type), tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    family = family_of(config)
    assert family.dimensions is None, "declared"
    copied = copy_checkpoint(source, tmp_path / "folded", tensors=folded(family, config, powers_of_two))
    wanted, found = logits(source), logits(copied)
    assert float((found - wanted).abs().max()) <= 1e-4 * float(wanted.abs().max())


@pytest.mark.parametrize(
    ("model_type", "change"), [("gemma2", {"norm_offset": 0.0}), ("cohere2", {"scalings": "first reader missing"})]
)
def test_that_test_sees_what_a_type_declares(tmp_path: Path, model_type: str, change: dict[str, Any]) -> None:
    torch.manual_seed(4)
    source = in_float32(tiny_checkpoint(model_type), tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    family = family_of(config)
    if "scalings" in change:
        change = {"scalings": (replace(family.scalings[-1], into=family.scalings[-1].into[1:]),)}
    wrong = folded(replace(family, **change), config, powers_of_two)
    wanted, found = logits(source), logits(copy_checkpoint(source, tmp_path / "folded", tensors=wrong))
    assert float((found - wanted).abs().max()) > 1e-2 * float(wanted.abs().max())


def test_a_norm_to_which_one_is_added_is_divided_as_it_can_be_stored(tmp_path: Path) -> None:
    """Its stored weight is rounded to the model's dtype; its readers take what it was divided by then."""
    torch.manual_seed(5)
    source = in_float32(tiny_checkpoint("gemma3_text"), tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    family = family_of(config)
    family = replace(family, scalings=tuple(each for each in family.scalings if each.source.endswith("norm")))
    dims = read_dimensions(config, family)

    def change(tensors: dict[str, Tensor]) -> None:
        for layer in range(dims.layers):
            linears = linears_of(family, config, layer, tensors)
            for fold in folds_of_layer(family, dims, layer, linears, tensors, lambda _: torch.bfloat16):
                before = tensors[f"{fold.fold.source}.weight"] + 1
                wanted = torch.rand(fold.fold.features) * 3 + 0.2
                scale = apply_fold(tensors, {}, fold, wanted)
                after = tensors[f"{fold.fold.source}.weight"]
                assert torch.equal(after, after.bfloat16().float())
                torch.testing.assert_close((after + 1) * scale, before, rtol=1e-6, atol=0)
                torch.testing.assert_close(scale, wanted, rtol=0.1, atol=0)

    wanted, found = logits(source), logits(copy_checkpoint(source, tmp_path / "folded", tensors=change))
    assert float((found - wanted).abs().max()) <= 1e-4 * float(wanted.abs().max())


def test_a_norm_with_a_bias_takes_powers_of_two(tmp_path: Path) -> None:
    """Its bias is stored as it is, and would be rounded otherwise."""
    config = json.loads((tiny_checkpoint("gpt_neox") / "config.json").read_text())
    family = family_of(config)
    dims = read_dimensions(config, family)
    tensors: dict[str, Tensor] = {}
    copy_checkpoint(tiny_checkpoint("gpt_neox"), tmp_path / "copy", tensors=lambda found: tensors.update(found))
    tensors = {name: tensor.float() for name, tensor in tensors.items()}
    linears = linears_of(family, config, 0, tensors)
    folds = folds_of_layer(family, dims, 0, linears, tensors, lambda _: torch.bfloat16)
    assert [fold.fold.exact for fold in folds] == [True, True]
    before = tensors[f"{folds[0].fold.source}.bias"].clone()
    scale = apply_fold(tensors, {}, folds[0], powers_of_two(dims.hidden))
    assert torch.equal(tensors[f"{folds[0].fold.source}.bias"] * scale, before)


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


@pytest.mark.parametrize(
    "model", [*MODELS, *TINY], ids=lambda x: x if isinstance(x, str) else describe(LlamaShape(**x))
)
def test_every_norm_and_gated_product_of_a_layer_has_its_pair(model: dict[str, Any] | str) -> None:
    """Norms over heads apart, which a rotation by position follows."""
    directory = tiny_checkpoint(model) if isinstance(model, str) else make_llama(**SHAPE, **model)
    config = json.loads((directory / "config.json").read_text())
    family = family_of(config)
    dims = read_dimensions(config, family)
    sources = [scaling.source for scaling in family.scalings]
    assert len(set(sources)) == len(sources)
    roles = {role for module in family.layer for role in (module.role, *(role for role, _ in module.parts))}
    assert {role for scaling in family.scalings for role in (scaling.source, *scaling.into)} <= roles
    wanted = {module.role for module in family.layer if module.kind == "norm" and module.axis != "head"}
    wanted -= READ_BY_NO_LINEAR.get(config["model_type"], set())
    wanted |= {role for role in roles if role.endswith(".up")}
    assert wanted <= set(sources)
    for scaling in family.scalings:
        for layer in range(dims.layers):
            present = {module.role for _, _, module in family.modules_of_layer(dims, layer)}
            assert scaling.source not in present or present & set(scaling.into)
