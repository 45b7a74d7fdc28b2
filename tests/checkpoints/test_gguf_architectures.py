"""The table of architectures: a tiny model of every type goes into a GGUF file and comes back."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from modelexport.checkpoints.formats import gguf
from modelexport.checkpoints.gguf.architectures import ARCHITECTURES
from modelexport.checkpoints.gguf.defaults import DEFAULTS
from modelexport.checkpoints.gguf.file import read_gguf
from modelexport.checkpoints.gguf.metadata import architecture, model_types, model_values, read_rope, untold_window
from modelexport.checkpoints.safetensors.file import Reader, torch_dtype
from modelexport.errors import PlanError
from modelexport.models.matching import ModelDescription
from modelexport.models.rules import expected_rules
from tests.helpers.format_models import Model, assert_same, make_model, reopen, write
from tests.helpers.gguf_models import NOT_IN_TRANSFORMERS, gguf_tiny_config
from tests.helpers.tiny_overrides import ROPE

TYPES = [kind for kind in model_types() if kind not in NOT_IN_TRANSFORMERS]


def tiny(kind: str, block_type: str | None = None, changes: Mapping[str, Any] | None = None) -> Model:
    """A model of random numbers; the linears that may be are blocks of a type."""
    config = {**gguf_tiny_config(kind), **(changes or {})}
    if block_type is not None:
        places = ModelDescription.read(config, "config.json").places()
        ignore = [place.name for place in places if place.module.why or place.module.kind != "linear"]
        quantization = {"quant_method": "gguf", "types": {block_type: ["Linear"]}}
        config["quantization_config"] = {**quantization, "ignore": [*ignore, "re:.*kv_b_proj$", "re:.*gate$"]}
    rules = expected_rules(config, "BF16", apart=True)
    generator = torch.Generator().manual_seed(1)
    values = {}
    for rule in rules:
        dtype = torch_dtype(rule.dtype)
        if rule.dtype == "U8":
            values[rule.name] = torch.randint(1, 120, rule.shape, generator=generator, dtype=torch.uint8)
        else:
            values[rule.name] = (1 + torch.rand(rule.shape, generator=generator)).to(dtype)
    return Model(config, rules, values)


@pytest.mark.parametrize("block_type", [None, "Q8_0"])
@pytest.mark.parametrize("kind", TYPES)
def test_a_model_comes_back(tmp_path: Path, kind: str, block_type: str | None) -> None:
    model = tiny(kind, block_type)
    layout = write(gguf, tmp_path, model, model.plan())
    found = read_gguf(tmp_path / "model.gguf")
    stored = sum(info.nbytes for info in found.infos.values())
    assert stored >= sum(info.nbytes for info in layout.infos.values())  # nothing was left out
    assert_same(reopen(gguf, tmp_path), model)


@pytest.mark.parametrize("kind", [kind for kind in DEFAULTS if kind not in NOT_IN_TRANSFORMERS])
def test_what_is_assumed_is_what_transformers_assumes(kind: str) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[kind]
    default = config_class()
    fields = {field.name: field.default for field in dataclasses.fields(config_class)}
    rope = getattr(default, "rope_parameters", None) or {}
    usual, sliding = rope.get("full_attention", rope), rope.get("sliding_attention", {})
    for key, value in DEFAULTS[kind].items():
        if key in ("rope_theta", "partial_rotary_factor"):
            assert usual[key] == value, key
        elif key == "rope_local_base_freq":
            assert sliding["rope_theta"] == value
        elif isinstance(value, dict):
            part = getattr(default, key)
            assert all(
                (part[name] if isinstance(part, dict) else getattr(part, name)) == own for name, own in value.items()
            )
        else:
            assert fields[key] == value, key


def test_the_guide_lists_every_type() -> None:
    page = (Path(__file__).parents[2] / "docs" / "checkpoint-formats.md").read_text()
    rows: dict[str, list[str]] = {}
    for each in ARCHITECTURES:
        rows.setdefault(each.name, []).extend(kind for kind in each.model_types if kind not in rows.get(each.name, []))
    for name, kinds in rows.items():
        assert f"| `{name}` | {', '.join(f'`{kind}`' for kind in kinds)} |\n" in page


def values_of(kind: str, **changes: Any) -> dict[str, Any]:
    config = {**gguf_tiny_config(kind), **changes}
    found = model_values(config, vocab=250, rope=read_rope(config))
    return {key.partition(".")[2]: value for key, value in found.items()}


def test_values_by_layer() -> None:
    gemma = values_of("gemma3_text")
    assert gemma["attention.sliding_window_pattern"] == (True, False)
    assert (gemma["rope.freq_base"], gemma["rope.freq_base_swa"]) == (1e6, 1e4)
    assert values_of("granitemoehybrid")["attention.head_count_kv"] == (0, 2)
    assert values_of("glm4_moe_lite")["leading_dense_block_count"] == 1
    published = {"layer_types": None, "mlp_layer_types": None, "compress_ratios": [0, 4, 128, 0], "num_hash_layers": 2}
    deepseek = values_of("deepseek_v4", **published)
    assert (deepseek["attention.compress_ratios"], deepseek["hash_layer_count"]) == ((0, 4, 128), 2)
    step = values_of("step3p5", swiglu_limits=[None, 7, 0, 16.5])
    assert step["attention.head_count"] == (4, 6, 6, 4)
    assert step["swiglu_clamp_exp"] == (0, 7, 0, 16.5)
    assert step["rope.dimension_count"] == 32  # of which llama.cpp rotates half, where there is no window
    muse = values_of("muse_glimmer_text", num_hidden_layers=5, layer_types=None, layer_rope_theta=None)
    assert muse["attention.sliding_window_pattern"] == (False, True, True, True, False)
    granite = values_of("granite4_vision_text", num_hidden_layers=5, deepstack_target_layers=[3, 0, -1])
    assert granite["deepstack_mapping"] == (-1, -1, -1, 1, 2)
    latent = values_of("deepseek_v3")
    keys = ("attention.key_length", "attention.key_length_mla", "attention.value_length", "rope.dimension_count")
    assert [latent[key] for key in keys] == [80, 32, 64, 16]


@pytest.mark.parametrize(
    ("kind", "changes", "why"),
    [
        (
            "qwen3_moe",
            {"norm_topk_prob": False},
            "norm_topk_prob is False, and llama.cpp computes such a model with true",
        ),
        ("gemma2", {"query_pre_attn_scalar": 99}, "query_pre_attn_scalar is 99, and llama.cpp computes.*with 32"),
        (
            "cohere2",
            {"tie_word_embeddings": False},
            "tie_word_embeddings is False, and llama.cpp has no head of its own",
        ),
        (
            "muse_glimmer_text",
            {"layer_rope_theta": [1e4, 1e4, 1e4]},
            r"layer_rope_theta is \[1.*, and llama.cpp rotates the layers with a sliding window",
        ),
        (
            "deepseek_v4",
            {"layer_types": ["sliding_attention"] * 3},
            "layer_types has no 'compressed_sparse_attention', and llama.cpp fails on such a model without one",
        ),
        ("step3p5", {"query_pre_attn_scalar": 64}, "query_pre_attn_scalar is 64, and llama.cpp computes.*or 32"),
        ("qwen2_moe", {"mlp_only_layers": [0]}, r"mlp_only_layers is \[0\], and llama.cpp has experts in every layer"),
    ],
)
def test_what_llama_cpp_would_compute_otherwise_is_refused(kind: str, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(PlanError, match=why):
        architecture({**gguf_tiny_config(kind), **changes})


def test_other_rotated_features_than_llama_cpp_has_are_refused() -> None:
    rope = {"full_attention": {**ROPE, "partial_rotary_factor": 0.25}, "sliding_attention": ROPE}
    with pytest.raises(PlanError, match=r"partial_rotary_factor 0\.25, and llama\.cpp rotates 0\.5"):
        read_rope({**gguf_tiny_config("step3p5"), "rope_parameters": rope})


def test_a_window_that_is_not_told_is_a_warning() -> None:
    config = gguf_tiny_config("mistral")
    assert "llama.cpp's graph of such a model has none" in str(untold_window({**config, "sliding_window": 4096}))
    assert untold_window({**config, "sliding_window": None}) is None
    assert untold_window(gguf_tiny_config("gemma2")) is None


def test_a_model_of_float16_has_float32_norms(tmp_path: Path) -> None:
    model = make_model(dtype="float16", attention_bias=True)
    write(gguf, tmp_path, model, model.plan())
    found = read_gguf(tmp_path / "model.gguf").infos
    assert {found[f"blk.0.{name}"].dtype for name in ("attn_norm.weight", "attn_q.bias")} == {"F32"}
    assert found["blk.0.attn_q.weight"].dtype == "F16"
    assert_same(reopen(gguf, tmp_path), model)


def test_float32_tensors_of_a_narrow_model_stay_so(tmp_path: Path) -> None:
    """Though bfloat16 would hold their numbers: the file says which they are."""
    model = tiny("mamba")
    rules = [dataclasses.replace(r, dtype="F32") if r.name.endswith("A_log") else r for r in model.rules]
    values = {name: v.float() if name.endswith("A_log") else v for name, v in model.values.items()}
    model = Model(model.config, rules, values)
    write(gguf, tmp_path, model, model.plan())
    found = reopen(gguf, tmp_path)
    assert {found.infos[name].dtype for name in values if name.endswith("A_log")} == {"F32"}


def test_integers_of_64_bits_are_in_32(tmp_path: Path) -> None:
    """Each token's experts in DeepSeek-V4."""
    model = tiny("deepseek_v4")
    rules = [dataclasses.replace(r, dtype="I64") if r.name.endswith("tid2eid") else r for r in model.rules]
    values = {n: torch.arange(v.numel()).view(v.shape) if n.endswith("tid2eid") else v for n, v in model.values.items()}
    model = Model(model.config, rules, values)
    write(gguf, tmp_path, model, model.plan())
    assert read_gguf(tmp_path / "model.gguf").infos["blk.0.ffn_gate_tid2eid.weight"].dtype == "I32"
    assert_same(reopen(gguf, tmp_path), model)


def test_gemma_s_norms_and_mamba_s_decay_are_computed(tmp_path: Path) -> None:
    model = tiny("gemma2")
    write(gguf, tmp_path, model, model.plan())
    info = read_gguf(tmp_path / "model.gguf").infos["blk.1.post_ffw_norm.weight"]
    text = (tmp_path / "model.gguf").read_bytes()[info.offset : info.offset + info.nbytes]
    own = model.values["model.layers.1.post_feedforward_layernorm.weight"]
    assert torch.equal(torch.frombuffer(bytearray(text), dtype=torch.float32), 1 + own.float())
    model = tiny("mamba2")
    write(gguf, tmp_path / "m", model, model.plan())
    info = read_gguf(tmp_path / "m" / "model.gguf").infos["blk.0.ssm_a"]
    assert info.shape == (8, 1)
    text = (tmp_path / "m" / "model.gguf").read_bytes()[info.offset : info.offset + info.nbytes]
    own = -torch.exp(model.values["backbone.layers.0.mixer.A_log"].double())
    assert torch.equal(torch.frombuffer(bytearray(text), dtype=torch.float32), own.float())


def test_rows_of_a_computed_or_turned_tensor_can_be_read(tmp_path: Path) -> None:
    """Ranks read parts of tensors."""
    for kind, names in {
        "deepseek_v3": ["model.layers.1.self_attn.kv_b_proj.weight", "model.layers.0.input_layernorm.weight"],
        "gpt2": ["transformer.h.1.attn.c_attn.weight"],
        "bloom": ["transformer.h.1.self_attention.query_key_value.weight"],
        "mamba": ["backbone.layers.1.mixer.conv1d.weight", "backbone.layers.1.mixer.A_log"],
    }.items():
        model = tiny(kind)
        write(gguf, tmp_path / kind, model, model.plan())
        found = reopen(gguf, tmp_path / kind)
        with Reader(found) as reader:
            for name in names:
                rows = (3, model.values[name].shape[0] - 5)
                assert torch.equal(reader.read(found.infos[name], rows=rows), model.values[name][rows[0] : rows[1]])


def test_a_fused_projection_has_queries_before_keys(tmp_path: Path) -> None:
    model = tiny("gpt_neox")
    write(gguf, tmp_path, model, model.plan())
    info = read_gguf(tmp_path / "model.gguf").infos["blk.0.attn_qkv.weight"]
    text = (tmp_path / "model.gguf").read_bytes()[info.offset : info.offset + info.nbytes]
    fused = model.values["gpt_neox.layers.0.attention.query_key_value.weight"]
    heads = fused.view(4, 3, -1, fused.shape[1]).transpose(0, 1).reshape(fused.shape)
    assert torch.equal(torch.frombuffer(bytearray(text), dtype=torch.bfloat16).view(info.shape), heads)
    assert math.prod(info.shape) == fused.numel()
