"""Checkpoints of ours as plain transformers models: right values, and damage said by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from modelexport.assets import demo_model_path
from modelexport.checkpoints.formats import hf
from modelexport.errors import CheckpointError, PlanError
from modelexport.inspection.evaluate.models import load_dequantised, load_reference
from modelexport.quantization import formats
from modelexport.quantization.methods.base import ModelQuantization
from modelexport.quantization.methods.compressed_tensors import quantization_files

FORMATS = ["int8", "fp8", "int4"]
IDS = torch.arange(40, 120)[None] * 7 % 2048


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The demo model in each number format, written with the safetensors package rather than our writer."""
    made = {}
    source = load_file(demo_model_path() / "model.safetensors")
    for name in FORMATS:
        number_format = formats.get(name)
        tensors: dict[str, Tensor] = {}
        for full, weight in source.items():
            if full.endswith("_proj.weight"):
                parts = number_format.quantise(weight)
                tensors.update({full.removesuffix("weight") + k: part for k, part in parts.items()})
            else:
                tensors[full] = weight
        directory = made[name] = tmp_path_factory.mktemp(name)
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        linears = {name.removesuffix(".weight"): number_format for name in source if name.endswith("_proj.weight")}
        quantization = quantization_files(ModelQuantization(linears, ["lm_head"])).config
        content = (demo_model_path() / "config.json").read_bytes()
        (directory / "config.json").write_bytes(hf.config_bytes(content, quantization))
    return made


def logits(model: Any) -> Tensor:
    with torch.inference_mode():
        out: Tensor = model(IDS).logits
    return out


def test_reference_is_what_transformers_loads() -> None:
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(demo_model_path(), attn_implementation="eager").float()
    ours = load_reference(demo_model_path())
    assert torch.equal(logits(ours), logits(theirs))
    assert load_reference(demo_model_path(), dtype=torch.bfloat16).dtype == torch.bfloat16
    assert ours.lm_head.weight is ours.model.embed_tokens.weight


@pytest.mark.parametrize("name", FORMATS)
def test_weights_and_activations_are_those_of_the_format(name: str, exported: dict[str, Path]) -> None:
    number_format = formats.get(name)
    source = load_file(demo_model_path() / "model.safetensors")
    model = load_dequantised(exported[name])
    full = "model.layers.2.mlp.down_proj"
    linear = model.get_submodule(full)
    expected = number_format.dequantise(number_format.quantise(source[f"{full}.weight"]))
    assert torch.equal(linear.weight, expected)
    assert torch.equal(model.model.norm.weight, source["model.norm.weight"].float())
    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(0))
    rounded = number_format.fake_quantise_activations(x, {})
    assert torch.equal(rounded, x) == (name == "int4")
    assert torch.equal(linear(x), nn.functional.linear(rounded, expected))
    hooked = sum(len(m._forward_pre_hooks) > 0 for m in model.modules())
    assert hooked == (0 if name == "int4" else 4 * 7)


@pytest.mark.parametrize("name", FORMATS)
def test_logits_against_transformers_with_compressed_tensors(name: str, exported: dict[str, Path]) -> None:
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(exported[name], attn_implementation="eager", dtype=torch.float32)
    ours = load_dequantised(exported[name])
    got, expected = logits(ours), logits(theirs)  # theirs decodes a weight when it is first used
    for full, parameter in ours.named_parameters():
        module, _, suffix = full.rpartition(".")
        assert torch.equal(parameter, getattr(theirs.get_submodule(module), suffix)), full
    if name == "int8":
        # compressed-tensors rounds activations with amax / 127.5, engines (and we) with amax / 127.
        error = (got - logits(load_reference(demo_model_path()))).abs().mean()
        assert (got - expected).abs().mean() < 1.5 * error
    else:
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def damaged(source: Path, target: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    shutil.copytree(source, target)
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


SCALE = "model.layers.1.self_attn.q_proj.weight_scale"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(SCALE), rf"{SCALE} is missing \(int8 weights per channel, .* needs it\)"),
        (
            lambda t: t.update({SCALE: t[SCALE][:-1].clone()}),
            r"BF16 \[511, 1\], but int8 weights per channel.* stores .* \[512, 1\]",
        ),
        (lambda t: t.update({SCALE: t[SCALE].to(torch.int16)}), r"is I16 \[512, 1\], but int8 weights"),
        (lambda t: t.pop("model.norm.weight"), r"model\.norm\.weight is missing \(1 tensors are\)"),
        (lambda t: t.update({"model.extra": torch.ones(2)}), "model.extra belongs to no part"),
        (lambda t: t.update({"model.norm.weight": torch.ones(3)}), "does not fit its config.json"),
    ],
)
def test_damage_is_named(
    change: Callable[[dict[str, Tensor]], object], message: str, exported: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_dequantised(damaged(exported["int8"], tmp_path / "bad", change))


def test_quantised_checkpoint_is_no_reference(exported: dict[str, Path]) -> None:
    with pytest.raises(CheckpointError, match="is quantised"):
        load_reference(exported["fp8"])


def test_other_quantisations_are_refused(exported: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(exported["int8"], tmp_path / "other")
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "eetq"}
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    with pytest.raises(PlanError, match="quant_method 'eetq' is not known"):
        load_dequantised(tmp_path / "other")


def test_targets_by_name_and_pattern(exported: dict[str, Path], tmp_path: Path) -> None:
    """Only what the config targets is decoded, whichever way it says so."""
    source = load_file(demo_model_path() / "model.safetensors")
    quantised = load_file(exported["fp8"] / "model.safetensors")
    chosen = ("model.layers.0.mlp.up_proj", "model.layers.3.self_attn.v_proj")
    tensors = dict(source)
    for name in chosen:
        tensors |= {f"{name}.{k}": quantised[f"{name}.{k}"] for k in ("weight", "weight_scale")}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    quantization = quantization_files(ModelQuantization({chosen[0]: formats.get("fp8")}, ["re:.*gate_proj$"])).config
    quantization["config_groups"]["group_0"]["targets"] = [chosen[0], r"re:model\.layers\.3\..*v_proj$"]
    content = (demo_model_path() / "config.json").read_bytes()
    (tmp_path / "config.json").write_bytes(hf.config_bytes(content, quantization))
    model = load_dequantised(tmp_path)
    hooked = [name for name, module in model.named_modules() if module._forward_pre_hooks]
    assert sorted(hooked) == sorted(chosen)
