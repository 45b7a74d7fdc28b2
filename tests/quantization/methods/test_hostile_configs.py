"""What strangers write into ``quantization_config``: a refusal of one line, or promises that can be kept; in time."""

from __future__ import annotations

import contextlib
import re
import time
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from modelexport.errors import CheckpointError, ModelExportError
from modelexport.quantization.formats import of_scheme
from modelexport.quantization.methods import _patterns, extras, read_quantization_config, tensor_specs
from modelexport.quantization.methods._patterns import Pattern
from modelexport.quantization.methods.base import MOST_PATTERNS, Scheme

METHODS = ("compressed-tensors", "modelopt", "modelopt_fp4", "awq", "gptq", "fp8", "mxfp4", "gguf", "trtllm", "other")
NAME = "model.layers.10.mlp.experts.3.down_proj"

words = st.sampled_from(
    [
        "int",
        "float",
        "channel",
        "group",
        "tensor",
        "block",
        "token",
        "tensor_group",
        "local",
        "weight",
        "gemm",
        "gptq",
        "gptq_v2",
        "dynamic",
        "static",
        "FP8",
        "NVFP4",
        "W4A16_AWQ",
        "MIXED_PRECISION",
        "INT8",
        "Q4_0",
        "Linear",
        "torch.uint8",
        "ue8m0",
        "pack-quantized",
        "int-quantized",
        "float-quantized",
        "naive-quantized",
        "nvfp4-pack-quantized",
        "mxfp4-pack-quantized",
        "mxfp8-quantized",
        "lm_head",
        "re:.*",
        "re:(",
        "re:(a+)+$",
        "re:.*q_proj$",
        "a{99999999999}",
        "(?P<a>b)",
        "(?i)x",
    ]
)
scalars = (
    st.sampled_from([None, True, False, 0, 1, -1, 4, 8, 16, 32, 64, 128, 10**30, -(10**30), 4.0, float("nan"), "\n"])
    | words
    | st.sampled_from(["re:" + "(" * 5000, "(" * 300 + ")" * 300, "[" * 4000])
)
values: st.SearchStrategy[Any] = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)
keys = st.sampled_from(
    [
        "num_bits",
        "type",
        "symmetric",
        "strategy",
        "group_size",
        "block_structure",
        "dynamic",
        "actorder",
        "scale_dtype",
        "bits",
        "w_bit",
        "version",
        "sym",
        "zero_point",
        "desc_act",
        "checkpoint_format",
        "lm_head",
        "modules_to_not_convert",
        "ignore",
        "exclude_modules",
        "quant_algo",
        "format",
        "quantized_layers",
        "quantization",
        "config_groups",
        "kv_cache_scheme",
        "kv_cache_quant_algo",
        "activation_scheme",
        "types",
        "weight_block_size",
        "scale_fmt",
        "modules_in_block_to_quantize",
        "pack_dtype",
        "targets",
        "quantization_status",
    ]
)
arguments = st.fixed_dictionaries(
    {"num_bits": st.sampled_from([4, 8]) | values, "type": st.sampled_from(["int", "float"]) | values},
    optional={
        "strategy": st.sampled_from(["channel", "group", "tensor", "block", "tensor_group"]) | values,
        "group_size": st.sampled_from([16, 32, 128, -1]) | values,
        "block_structure": st.just([128, 128]) | values,
        "symmetric": st.booleans() | values,
        "dynamic": st.booleans() | values,
        "actorder": values,
        "scale_dtype": st.just("torch.uint8") | values,
    },
)
groups = st.fixed_dictionaries(
    {"targets": st.just(["Linear"]) | values, "weights": arguments | values},
    optional={"format": words | values, "input_activations": arguments | values, "output_activations": values},
)
configs = st.fixed_dictionaries(
    {"quant_method": st.sampled_from(METHODS)},
    optional={
        "bits": st.sampled_from([4, 8]) | values,
        "group_size": st.sampled_from([32, 128, -1]) | values,
        "quant_algo": words | values,
        "config_groups": st.dictionaries(words, groups, max_size=2) | values,
        "quantized_layers": st.dictionaries(words, st.dictionaries(keys, values, max_size=2), max_size=2) | values,
        "dynamic": st.dictionaries(words, st.dictionaries(keys, values, max_size=2) | values, max_size=2) | values,
        "types": st.dictionaries(words, values, max_size=2),
        "format": words | values,
    },
)


def look_at(value: dict[str, Any]) -> None:
    """All that is done with a configuration before a tensor is read."""
    found = read_quantization_config({"quantization_config": value})
    assert found is not None
    found.ignores(NAME)
    found.scheme_of(NAME)
    for scheme in found.schemes:
        assert "\n" not in scheme.describe()
        assert scheme.has_static_inputs in (True, False)
        keeps_its_word(scheme)


def keeps_its_word(scheme: Scheme) -> None:
    for shape in ((256, 256), (7, 5), (0, 0)):
        try:
            promises = {**tensor_specs(scheme, shape), **extras(scheme, shape)}
        except CheckpointError:
            continue
        for promise in promises.values():
            assert all(isinstance(size, int) and size >= 0 for stored in promise.shapes for size in stored)
            assert all(axis is None or (axis[0] in (0, 1) and axis[1] >= 1) for axis in promise.axes)
    with contextlib.suppress(CheckpointError):
        of_scheme(scheme)


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(configs, st.dictionaries(keys, values, max_size=4))
def test_any_configuration_is_read_or_refused_in_a_line(config: dict[str, Any], more: dict[str, Any]) -> None:
    text = ""
    try:
        look_at({**more, **config})
    except ModelExportError as error:
        text = str(error)
    assert "\n" not in text
    assert len(text) < 1500


@pytest.mark.parametrize(
    "value",
    [
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "FP8"}}},
        {"quant_method": "fp8", "modules_to_not_convert": ["*a*a*a*a*a*a*a*a*a*a*a*b"]},
        {"quant_method": "strange", "ignore": ["*a*a*a*a*a*a*a*a*a*a*a*b"]},
        {"quant_method": "gptq", "bits": 4, "dynamic": {"-:(.+)+Z": {}, "(.*)*(.*)*Y": {"bits": 8}}},
    ],
)
def test_patterns_that_try_for_ever_are_matched_at_once(value: dict[str, Any]) -> None:
    began = time.monotonic()
    look_at(value)
    assert time.monotonic() - began < 20  # for ever


@pytest.mark.parametrize("pattern", [r"(.+)+\1Z", r"(?:(.)\1?)+Z", r"(?:a|(?i:A))+(?:.*)+Z"])
def test_what_can_only_be_tried_is_refused(pattern: str) -> None:
    with pytest.raises(CheckpointError, match=r"ignore: '.*' repeats what repeats"):
        look_at({"quant_method": "compressed-tensors", "config_groups": {}, "ignore": [f"re:{pattern}"]})


@pytest.mark.parametrize(
    ("pattern", "why"), [("(", "missing"), ("a{99999999999}", "too large"), ("(" * 5000, "nested too deeply")]
)
def test_what_is_no_regular_expression_is_refused(pattern: str, why: str) -> None:
    with pytest.raises(CheckpointError, match=f"no regular expression: .*{why}") as refused:
        look_at({"quant_method": "compressed-tensors", "ignore": [f"re:{pattern}"], "config_groups": {}})
    assert len(str(refused.value)) < 300


def test_more_patterns_than_anybody_needs_are_refused() -> None:
    ignore = [f"re:layer{number}$" for number in range(MOST_PATTERNS)]
    with pytest.raises(CheckpointError, match="20,001 patterns"):
        look_at({"quant_method": "compressed-tensors", "config_groups": {}, "ignore": [*ignore, "re:one_more"]})


def test_thousands_of_rules_of_gptq_are_read_in_time_and_in_order() -> None:
    rules: dict[str, Any] = {f"-:model\\.layers\\.{number}\\.": {} for number in range(3000)}
    rules |= {f"+:model\\.layers\\.{number}\\.mlp": {"bits": 8} for number in range(3000, 6000)}
    found = read_quantization_config({"quantization_config": {"quant_method": "gptq", "bits": 4, "dynamic": rules}})
    assert found is not None
    assert found.scheme_of("model.layers.2999.mlp.up_proj") is None
    kept, eight = (
        found.scheme_of("model.layers.5999.self_attn.q_proj"),
        found.scheme_of("model.layers.5999.mlp.up_proj"),
    )
    assert kept is not None
    assert eight is not None
    assert (kept.bits, eight.bits) == (4, 8)


def test_of_two_rules_of_gptq_the_first_counts() -> None:
    config = {
        "quant_method": "gptq",
        "bits": 4,
        "dynamic": {"+:.*up": {"bits": 8}, "-:.*mlp": {}, "+:.*down": {"bits": 8}},
    }
    found = read_quantization_config({"quantization_config": config})
    assert found is not None
    up, down = found.scheme_of("layers.0.mlp.up"), found.scheme_of("layers.0.mlp.down")
    assert up is not None
    assert up.bits == 8
    assert down is None


atoms = st.sampled_from(["a", "b", ".", "[ab]", "[^a]", r"\.", r"\d", "(?:a|b)", "(a|ab)", "^", "$", r"\b", "x", ""])
expressions = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"(?:{pair[0]}|{pair[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{0,2}", "*?", "+?"])).map(
            lambda pair: f"(?:{pair[0]}){pair[1]}"
        ),
        inner.map(lambda text: f"(?={text})"),
        inner.map(lambda text: f"(?!{text})"),
        inner.map(lambda text: f"({text})"),
    ),
    max_leaves=8,
)


@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
@given(expressions, st.text("ab.1x", max_size=7))
def test_sets_of_places_match_what_python_matches(expression: str, name: str) -> None:
    pattern = Pattern(expression, "here")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_patterns, "MOST_BITS", -1.0)
        assert pattern.matches(name) is (re.match(expression, name) is not None)
