"""compressed-tensors: what config.json says of a model, with one number format and with several."""

from __future__ import annotations

import json
import re

import pytest

from modelexport.quantization import formats
from modelexport.quantization.formats import of_scheme
from modelexport.quantization.methods import compressed_tensors
from modelexport.quantization.methods.base import ModelQuantization
from tests.quantization._weights import BLOCKS

NAMES = [name for name in formats.names() if name not in ("none", *BLOCKS)]
LINEARS = [f"model.layers.{i}.{path}" for i in range(12) for path in ("self_attn.q_proj", "mlp.up_proj")]


def announced(*assigned: tuple[str, str], kept: tuple[str, ...] = ("lm_head",)) -> ModelQuantization:
    """Linears with (pattern, number format), first match wins."""
    found = {}
    for name in LINEARS:
        first = next((quant for pattern, quant in assigned if re.search(pattern, name)), None)
        if first is not None:
            found[name] = formats.get(first)
    return ModelQuantization(found, [*kept, *(name for name in LINEARS if name not in found)])


@pytest.mark.parametrize("quant", NAMES)
def test_one_format_has_what_engines_insist_on(quant: str) -> None:
    number_format = formats.get(quant)
    config = compressed_tensors.quantization_files(announced(("", quant))).config
    assert config["quant_method"] == "compressed-tensors"
    assert config["quantization_status"] == "compressed", "transformers loads random weights without it"
    assert config["ignore"] == ["lm_head"], "transformers gives NaN without it"
    group = config["config_groups"]["group_0"]
    assert group["targets"] == ["Linear"]
    assert config["format"] == group["format"] == number_format.checkpoint_format
    assert json.loads(json.dumps(config)) == config


@pytest.mark.parametrize("quant", NAMES)
def test_is_understood_by_compressed_tensors(quant: str) -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    number_format = formats.get(quant)
    config = compressed_tensors.quantization_files(announced(("", quant))).config
    parsed = quantization.QuantizationConfig.model_validate(config).model_dump(mode="json")
    group = parsed["config_groups"]["group_0"]
    for theirs, ours in (
        (group["weights"], number_format.weight_arguments()),
        (group["input_activations"], number_format.input_arguments()),
    ):
        assert (theirs is None) == (ours is None)
        if ours is not None:
            assert {key: theirs[key] for key in ours} == ours


@pytest.mark.parametrize("quant", NAMES)
def test_what_is_announced_is_read_again(quant: str) -> None:
    read = compressed_tensors.read(compressed_tensors.quantization_files(announced(("", quant))).config)
    scheme = read.scheme_of(LINEARS[0])
    assert scheme is not None
    assert of_scheme(scheme) == formats.get(quant)
    assert read.scheme_of("lm_head") is None


def test_mixed_formats_are_told_apart_by_patterns_and_names() -> None:
    given = announced((r"layers\.3\.mlp", "int4"), (r"layers\.5\.mlp", "none"), ("mlp", "int8"), ("self_attn", "fp8"))
    given = ModelQuantization(
        {k: f for k, f in given.formats.items() if f.quantised}, [*given.unquantised, LINEARS[11]]
    )
    config = compressed_tensors.quantization_files(given).config
    assert config["format"] == "mixed-precision"
    targets = {group["format"]: group["targets"] for group in config["config_groups"].values()}
    assert targets["float-quantized"] == [r"re:(.*\.)?layers\.\d+\.self_attn\.q_proj$"], (
        "alike in all layers: one pattern"
    )
    assert targets["pack-quantized"] == ["model.layers.3.mlp.up_proj"]
    assert len(targets["int-quantized"]) == 10
    read = compressed_tensors.read(config)
    for name in LINEARS:
        scheme, expected = read.scheme_of(name), given.formats.get(name)
        assert (scheme is None) == (expected is None), name
        assert scheme is None or of_scheme(scheme) == expected, name


def test_kv_cache() -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    from dataclasses import replace

    config = compressed_tensors.quantization_files(replace(announced(("", "fp8")), kv_cache="fp8")).config
    parsed = quantization.QuantizationConfig.model_validate(config)
    assert parsed.kv_cache_scheme.num_bits == 8
    assert compressed_tensors.read(config).kv_cache_scheme == config["kv_cache_scheme"]
