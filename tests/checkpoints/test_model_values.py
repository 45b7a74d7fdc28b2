"""What the formats that write a model's numbers make of a config.json with values of the wrong kind."""

from __future__ import annotations

from typing import Any

import pytest

from modelexport.checkpoints.formats import gguf, trtllm
from modelexport.errors import CheckpointError, PlanError
from modelexport.models.rules import expected_rules
from modelexport.sharding.plan import Parallelism
from tests.helpers.format_models import make_model

YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "rope_theta": 1e4}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"rope_parameters": {"rope_theta": "fp8"}}, "config.json: rope_parameters: rope_theta is 'fp8'"),
    ({"rope_parameters": "yarn"}, "config.json: rope_parameters is 'yarn'; an object is needed"),
    ({"rope_scaling": [1]}, "config.json: rope_scaling is [1]; an object is needed"),
    ({"rope_parameters": {**YARN, "factor": "4"}}, "rope_parameters: factor is '4'"),
    ({"rope_parameters": {**LLAMA3, "low_freq_factor": []}}, "low_freq_factor is []"),
    ({"rope_parameters": {"rope_type": 7}}, "rope_type is 7; a text is needed"),
    ({"partial_rotary_factor": 1e300}, "partial_rotary_factor is 1e+300; at most 1"),
    ({"hidden_size": [], "head_dim": None}, "hidden_size is []; a positive whole number is needed"),
    ({"num_attention_heads": "4"}, "num_attention_heads is '4'"),
    ({"max_position_embeddings": {"a": 1}}, "max_position_embeddings is {'a': 1}"),
    ({"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5'"),
]


@pytest.mark.parametrize("module", [gguf, trtllm], ids=["gguf", "trtllm"])
@pytest.mark.parametrize(("keys", "words"), WRONG, ids=lambda value: str(value)[:40])
def test_a_value_of_the_wrong_kind(module: Any, keys: dict[str, Any], words: str) -> None:
    model = make_model(layers=1)
    with pytest.raises(CheckpointError) as caught:
        module.lay_out(model.plan(), {**model.config, **keys})
    assert words in str(caught.value)


@pytest.mark.parametrize("module", [gguf, trtllm], ids=["gguf", "trtllm"])
def test_a_value_that_is_null_is_missing(module: Any) -> None:
    model = make_model(layers=1)
    keys = ("head_dim", "rope_parameters", "rope_scaling", "rope_theta", "rms_norm_eps", "max_position_embeddings")
    plan, bare = model.plan(), {key: value for key, value in model.config.items() if key not in keys}
    assert module.lay_out(plan, {**bare, **dict.fromkeys(keys)}) == module.lay_out(plan, bare)


@pytest.mark.parametrize("keys", [{"max_position_embeddings": 1 << 40}, {"rope_theta": 1e200}], ids=str)
def test_a_number_that_gguf_cannot_say(keys: dict[str, Any]) -> None:
    model = make_model(layers=1)
    with pytest.raises(PlanError, match=r"--format gguf: llama\.\w+.* which the file cannot say"):
        gguf.lay_out(model.plan(), {**model.config, **keys})


@pytest.mark.parametrize(
    ("engine", "config", "words"),
    [
        ({"quantization": "x"}, {}, "config.json: quantization is 'x'; an object is needed"),
        ({"quantization": [1]}, {}, "config.json: quantization is [1]; an object is needed"),
        ({}, {"quantization_config": "x"}, "the model's config.json: quantization_config is 'x'; an object is needed"),
        (
            {"quantization": {"quant_algo": "FP8", "exclude_modules": 7}},
            {},
            "config.json: quantization: exclude_modules is 7; a list of texts is needed",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_quantization_of_trtllm_that_is_none(engine: dict[str, Any], config: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        trtllm.quantized.quantization_config(engine, config, expected_rules, Parallelism(), lambda plan: set)
    assert str(caught.value) == words
