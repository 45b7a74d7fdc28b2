"""config.json of a GGUF file that has none, from the file's values."""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from modelexport.checkpoints.formats import gguf
from modelexport.checkpoints.gguf.file import Entry, encode_header, read_gguf
from modelexport.checkpoints.gguf.metadata import model_types, model_values, read_rope
from modelexport.checkpoints.safetensors.file import Checkpoint
from modelexport.errors import CheckpointError
from modelexport.models.rules import expected_rules
from modelexport.sharding.plan import Parallelism
from modelexport.sharding.shard_plan import build_shard_plan
from tests.helpers.gguf_models import NOT_IN_TRANSFORMERS, gguf_tiny_config
from tests.helpers.shard_plans import layers_of

REFUSED = ("jamba", "nemotron_h")
READ_AS = {
    **dict.fromkeys(("mistral", "internlm3", "iquestcoder"), "llama"),
    "granitemoeshared": "granitemoe",
    **dict.fromkeys(("granite_docling_text", "granite4_vision_text"), "granite"),
    "glm4_moe_lite": "deepseek_v3",
    **dict.fromkeys(("qwen2_5_vl_text", "qwen2_5_omni_text"), "qwen2_vl_text"),
    "qwen3_omni_moe_text": "qwen3_vl_moe_text",
}
"""Types that llama.cpp does not tell from others, which compute the same."""
NO_NUMBERS = {
    *("architectures", "transformers_version", "dtype", "mamba_chunk_size", "chunk_size"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
}
SAID_OTHERWISE = {
    "lfm2": {"block_auto_adjust_ff_dim"},  # the width is said as it is
    "gpt2": {"n_inner"},  # four times the hidden features, which null means
    "gpt_bigcode": {"n_inner"},
    "falcon": {"num_kv_heads", "ffn_hidden_size"},  # there is one, whatever this says
    "exaone4": {"sliding_window_pattern"},  # no layer has a window
    "hunyuan_vl_text": {"rope_parameters"},  # the base that alpha makes
    "dots1": {"sliding_window"},  # as here
    "minimax_m3_vl_text": {"rotary_dim"},  # partial_rotary_factor counts
    "cohere2_moe": {"prefix_dense_intermediate_size"},  # as wide as the experts, which null means
}


def write_headers(directory: Path, config: dict[str, Any], without: Collection[str] = (), **others: Any) -> None:
    """A file of zeros of the model, without config.json; ``others``: values in the place of its own."""
    rules = expected_rules(config, "BF16", apart=True)
    plan = build_shard_plan(rules, Parallelism(), layers=layers_of(rules))
    directory.mkdir(exist_ok=True)
    gguf.lay_out(plan, config).create(directory)
    if not without and not others:
        return
    path = directory / gguf.FILE
    found = read_gguf(path)
    values = {**model_values(config, vocab=config["vocab_size"], rope=read_rope(config))}
    name = values["general.architecture"]
    values |= {f"{name}.{key}": value for key, value in others.items()}
    kept = {key: value for key, value in values.items() if key.partition(".")[2] not in without}
    entries = [Entry(info.name, info.dtype, info.shape) for info in found.infos.values()]
    header, offsets, size = encode_header(kept, entries)
    content = bytearray(size)
    content[: len(header)] = header
    old = path.read_bytes()
    for info, at in zip(found.infos.values(), offsets, strict=True):
        content[at : at + info.nbytes] = old[info.offset : info.offset + info.nbytes]
    path.write_bytes(content)


def opened(directory: Path, config: dict[str, Any] | None = None) -> Checkpoint:
    return gguf.open(directory, config, expected_rules)


def config_of(checkpoint: Checkpoint) -> dict[str, Any]:
    assert checkpoint.config is not None
    return checkpoint.config


def llama(**changes: Any) -> dict[str, Any]:
    return {**gguf_tiny_config("llama"), **changes}


@pytest.mark.parametrize("kind", [kind for kind in model_types() if kind not in (*NOT_IN_TRANSFORMERS, *REFUSED)])
def test_it_makes_the_same_model(tmp_path: Path, kind: str) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = gguf_tiny_config(kind)
    write_headers(tmp_path, config)
    found = opened(tmp_path)
    own = opened(tmp_path, config)
    assert {name: (info.dtype, info.shape) for name, info in found.infos.items()} == {
        name: (info.dtype, info.shape) for name, info in own.infos.items()
    }
    assert found.placements == own.placements
    made = config_of(found)
    assert made["model_type"] == READ_AS.get(kind, kind)
    assert found.notes[0].startswith("config.json was made from the GGUF file's values")
    assert not own.notes
    if kind not in READ_AS:
        theirs = CONFIG_MAPPING[kind](**{k: v for k, v in config.items() if k != "time_step_limit"}).to_dict()
        ours = CONFIG_MAPPING[kind](**made).to_dict()
        keys = theirs.keys() - NO_NUMBERS - SAID_OTHERWISE.get(kind, set())
        assert {key: ours.get(key) for key in keys} == {key: theirs[key] for key in keys}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_told_is_refused(tmp_path: Path, kind: str) -> None:
    write_headers(tmp_path, gguf_tiny_config(kind))
    with pytest.raises(CheckpointError, match=f"none can be made from its values: as {kind}: .*Give --config DIR"):
        opened(tmp_path)
    opened(tmp_path, gguf_tiny_config(kind))


@pytest.mark.parametrize(
    ("kind", "scaling"),
    [
        ("llama", {"rope_type": "linear", "factor": 4.0}),
        ("llama", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "beta_fast": 16.0}),
        (
            "llama",
            {
                "rope_type": "llama3",
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 512,
            },
        ),
        (
            "phi3",
            {
                "rope_type": "longrope",
                "short_factor": [1.0, 1.1] * 8,
                "long_factor": [1.25, 3.5] * 8,
                "original_max_position_embeddings": 512,
            },
        ),
        (
            "deepseek_v3",
            {
                "rope_type": "yarn",
                "factor": 40.0,
                "original_max_position_embeddings": 512,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        ),
    ],
)
def test_scaled_rotary_embeddings(tmp_path: Path, kind: str, scaling: dict[str, Any]) -> None:
    config = {**gguf_tiny_config(kind), "max_position_embeddings": 2048}
    config["rope_parameters"] = {**scaling, "rope_theta": 10000.0}
    config.pop("original_max_position_embeddings", None)
    write_headers(tmp_path, config)
    made = config_of(opened(tmp_path))["rope_parameters"]
    assert {key: made[key] for key in (*scaling, "rope_theta")} == config["rope_parameters"]


def test_factors_of_no_known_settings_are_refused(tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.5, "high_freq_factor": 7.0}
    scaling |= {"original_max_position_embeddings": 3000, "rope_theta": 5e5}
    config = llama(rope_parameters=scaling, head_dim=128)
    write_headers(tmp_path, config)
    with pytest.raises(CheckpointError, match=r"rope_freqs.weight holds factors of which .* Give --config DIR"):
        opened(tmp_path)
    assert not opened(tmp_path, config).notes


def test_a_value_that_nothing_is_known_of_is_refused(tmp_path: Path) -> None:
    write_headers(tmp_path, llama(), **{"attention.clamp_kqv": 8.0})
    with pytest.raises(CheckpointError, match=r"llama.attention.clamp_kqv is 8.0, of which nothing is known"):
        opened(tmp_path)


def test_a_value_that_is_missing_is_named(tmp_path: Path) -> None:
    write_headers(tmp_path, llama(), without=["attention.layer_norm_rms_epsilon"])
    with pytest.raises(CheckpointError, match=r"llama.attention.layer_norm_rms_epsilon is missing in the file"):
        opened(tmp_path)


def test_an_architecture_that_is_not_known(tmp_path: Path) -> None:
    header, _, size = encode_header({"general.architecture": "xverse"}, [Entry("token_embd.weight", "F32", (8, 8))])
    (tmp_path / "model.gguf").write_bytes(header.ljust(size, b"\0"))
    with pytest.raises(CheckpointError, match=r"no config.json is known for its architecture 'xverse'"):
        opened(tmp_path)


def test_what_llama_cpp_assumes_need_not_be_said(tmp_path: Path) -> None:
    """Of sizes that follow from others, and of the layers with a window, which older files do not number."""
    config = llama(num_key_value_heads=4, head_dim=32)
    derived = ["attention.head_count_kv", "attention.key_length", "attention.value_length", "vocab_size"]
    write_headers(tmp_path, config, without=[*derived, "rope.freq_base", "rope.dimension_count"])
    assert config_of(opened(tmp_path))["num_key_value_heads"] == 4
    kinds = ["sliding_attention", "full_attention"]
    pattern = "attention.sliding_window_pattern"
    for number, (kind, period) in enumerate({"gemma2": 2, "gemma3_text": 6, "cohere2": 4, "gpt_oss": 2}.items()):
        config = gguf_tiny_config(kind)
        config |= {"num_hidden_layers": 6, "layer_types": [kinds[(i + 1) % period == 0] for i in range(6)]}
        write_headers(tmp_path / str(number), config, without=[pattern])
        assert config_of(opened(tmp_path / str(number)))["layer_types"] == config["layer_types"]
        write_headers(tmp_path / str(number), config, **{pattern: 3})
        other = config_of(opened(tmp_path / str(number)))["layer_types"]
        assert other == [kinds[i % 3 == 2] for i in range(6)]


def test_a_head_and_biases_are_told_by_the_arrays(tmp_path: Path) -> None:
    for number, changes in enumerate([{"tie_word_embeddings": True}, {"attention_bias": True}, {"mlp_bias": True}]):
        config = llama(**changes)
        write_headers(tmp_path / str(number), config)
        made = config_of(opened(tmp_path / str(number)))
        keys = ("tie_word_embeddings", "attention_bias", "mlp_bias")
        assert {key: made[key] for key in keys} == {key: config.get(key, False) for key in keys}


@pytest.mark.parametrize(("kind", "layers"), [("gemma2", 46), ("gemma3_text", 62)])
def test_gemma_of_27_billion_scales_by_the_hidden_features(tmp_path: Path, kind: str, layers: int) -> None:
    kinds = ["sliding_attention"] * layers
    sizes = {"num_hidden_layers": layers, "layer_types": kinds, "hidden_size": 64, "intermediate_size": 64}
    config = {**gguf_tiny_config(kind), **sizes, "head_dim": 32, "query_pre_attn_scalar": 16}
    write_headers(tmp_path, config)
    assert config_of(opened(tmp_path))["query_pre_attn_scalar"] == 16
    assert math.isclose(config["hidden_size"] / config["num_attention_heads"], 16)


def test_a_config_beside_it_wins(tmp_path: Path) -> None:
    config = {**gguf_tiny_config("mistral")}
    write_headers(tmp_path, config)
    assert config_of(opened(tmp_path))["model_type"] == "llama"
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert config_of(opened(tmp_path))["model_type"] == "mistral"
