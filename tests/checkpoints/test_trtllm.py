"""TensorRT-LLM's checkpoint, against an independent construction of it with torch, and back."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from modelexport.checkpoints.formats import trtllm
from modelexport.checkpoints.formats.trtllm.config import model_config
from modelexport.errors import CheckpointError, PlanError
from modelexport.sharding.plan import Parallelism
from modelexport.sharding.shard_plan import build_shard_plan
from tests.helpers.format_models import Model, assert_same, make_model, reopen, round_trip, write

SHAPES: dict[str, dict[str, Any]] = {
    "biased": {"attention_bias": True, "mlp_bias": True, "vocab": 211, "layers": 4},
    "tied": {"tied": True, "vocab": 211, "layers": 3},
    "qwen2": {"model_type": "qwen2", "heads": 8, "kv_heads": 2},
    "phi3": {"model_type": "phi3", "heads": 8, "kv_heads": 2},
    "mixtral": {"model_type": "mixtral", "heads": 8, "kv_heads": 2, "layers": 3},
    "wide-heads": {"heads": 4, "kv_heads": 4, "head_dim": 64},
    "float32": {"dtype": "float32", "model_type": "mixtral"},
}


def heads_of(value: torch.Tensor, count: int, tp: int, rank: int) -> torch.Tensor:
    """The rows of a rank's heads, each of ``count`` heads repeated where there are fewer of them than ranks."""
    split = value.view(count, value.shape[0] // count, *value.shape[1:])
    if count < tp:
        split = split.repeat_interleave(tp // count, dim=0)
    return split.chunk(tp)[rank].flatten(0, 1)


def padded_rows(value: torch.Tensor, tp: int, rank: int) -> torch.Tensor:
    missing = -value.shape[0] % tp
    return torch.cat([value, value.new_zeros(missing, value.shape[1])]).chunk(tp)[rank]


def expected(model: Model, rank: int, tp: int, pp: int, ep: int = 1) -> dict[str, torch.Tensor]:
    """A rank's tensors as TensorRT-LLM's conversion makes them: pieces cut off whole tensors, then joined."""
    config, values = model.config, model.values
    at, stage = rank % tp, rank // tp
    layers = torch.tensor_split(torch.arange(config["num_hidden_layers"]), pp)[stage].tolist()
    heads = {"q": config["num_attention_heads"]} | dict.fromkeys("kv", config["num_key_value_heads"])
    found = {}
    embedding = values["model.embed_tokens.weight"]
    if stage == 0:
        found["transformer.vocab_embedding.weight"] = padded_rows(embedding, tp, at)
    if stage == pp - 1:
        found["lm_head.weight"] = padded_rows(values.get("lm_head.weight", embedding), tp, at)
        found["transformer.ln_f.weight"] = values["model.norm.weight"]
    for local, layer in enumerate(layers):
        ours, theirs = f"model.layers.{layer}.", f"transformer.layers.{local}."
        found[theirs + "input_layernorm.weight"] = values[ours + "input_layernorm.weight"]
        found[theirs + "post_layernorm.weight"] = values[ours + "post_attention_layernorm.weight"]
        found[theirs + "attention.dense.weight"] = values[ours + "self_attn.o_proj.weight"].chunk(tp, dim=1)[at]
        for kind in ("weight", "bias"):
            fused = values.get(f"{ours}self_attn.qkv_proj.{kind}")
            size = {
                n: count * config.get("head_dim", config["hidden_size"] // heads["q"]) for n, count in heads.items()
            }
            if fused is not None:
                parts = dict(zip("qkv", fused.split([size[n] for n in "qkv"]), strict=True))
            elif f"{ours}self_attn.q_proj.{kind}" in values:
                parts = {n: values[f"{ours}self_attn.{n}_proj.{kind}"] for n in "qkv"}
            else:
                continue
            joined = torch.cat([heads_of(parts[n], heads[n], tp, at) for n in "qkv"])
            found[f"{theirs}attention.qkv.{kind}"] = joined
        found.update(mlp(model, ours, theirs, (at, tp, ep)))
        for ending, name in (
            ("attention.dense.bias", "self_attn.o_proj.bias"),
            ("mlp.proj.bias", "mlp.down_proj.bias"),
        ):
            if ours + name in values:
                found[theirs + ending] = values[ours + name]
    return found


def mlp(model: Model, ours: str, theirs: str, rank: tuple[int, int, int]) -> dict[str, torch.Tensor]:
    values, (at, tp, ep) = model.values, rank
    if model.config["model_type"] == "mixtral":
        experts = model.config["num_local_experts"]
        cut, group = at // ep, at % ep
        mine = range(group * experts // ep, (group + 1) * experts // ep)
        w1, w2, w3 = (
            torch.stack([values[f"{ours}block_sparse_moe.experts.{e}.{w}.weight"] for e in mine])
            for w in ("w1", "w2", "w3")
        )
        up, gate = (w.chunk(tp // ep, dim=1)[cut] for w in (w3, w1))
        return {
            theirs + "mlp.fc.weight": torch.cat([up, gate], dim=-2),
            theirs + "mlp.proj.weight": w2.chunk(tp // ep, dim=2)[cut],
            theirs + "mlp.router.weight": values[ours + "block_sparse_moe.gate.weight"].float(),
        }
    found = {theirs + "mlp.proj.weight": values[ours + "mlp.down_proj.weight"].chunk(tp, dim=1)[at]}
    if model.config["model_type"] == "phi3":
        gate, up = values[ours + "mlp.gate_up_proj.weight"].chunk(2)
        found[theirs + "mlp.fc.weight"] = torch.cat([up.chunk(tp)[at], gate.chunk(tp)[at]])
        return found
    for kind in ("weight", "bias"):
        for name, module in (("fc", "gate_proj"), ("gate", "up_proj")):
            if f"{ours}mlp.{module}.{kind}" in values:
                found[f"{theirs}mlp.{name}.{kind}"] = values[f"{ours}mlp.{module}.{kind}"].chunk(tp)[at]
    return found


CASES = [
    *((shape, grid) for shape in SHAPES for grid in ((1, 1, 1), (4, 3, 1))),
    *((shape, (2, 2, 1)) for shape in ("biased", "mixtral")),
    *(("mixtral", grid) for grid in ((4, 1, 2), (4, 2, 4))),
]


@pytest.mark.parametrize(("shape", "grid"), CASES)
def test_files_are_what_torch_makes_of_the_whole_tensors(
    tmp_path: Path, shape: str, grid: tuple[int, int, int]
) -> None:
    tp, pp, ep = grid
    model = make_model(**{"layers": 4, **SHAPES[shape]})
    round_trip(trtllm, tmp_path, model, tp, pp, ep)
    assert len(list(tmp_path.glob("*.safetensors"))) == tp * pp
    for rank in range(tp * pp):
        want, got = expected(model, rank, tp, pp, ep), load_file(tmp_path / f"rank{rank}.safetensors")
        assert sorted(got) == sorted(want)
        for name, value in want.items():
            assert got[name].dtype == value.dtype, name
            assert torch.equal(got[name], value), name


def test_config_json_tells_what_the_engine_needs(tmp_path: Path) -> None:
    model = make_model(model_type="mixtral", layers=3)
    model.config.update({"rope_theta": 5e5, "rms_norm_eps": 1e-5, "max_position_embeddings": 128, "hidden_act": "silu"})
    write(trtllm, tmp_path, model, model.plan(4, 2, 2))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["mapping"] == {"world_size": 8, "tp_size": 4, "pp_size": 2, "moe_tp_size": 2, "moe_ep_size": 2}
    assert config["moe"] == {"num_experts": 4, "top_k": 2, "normalization_mode": 1}
    wanted = {
        "architecture": "MixtralForCausalLM",
        "dtype": "bfloat16",
        "logits_dtype": "float32",
        "hidden_act": "swiglu",
        "head_size": 32,
        "norm_epsilon": 1e-5,
        "position_embedding_type": "rope_gpt_neox",
        "rotary_base": 5e5,
        "rotary_scaling": None,
        "use_parallel_embedding": True,
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
    }
    assert {key: config[key] for key in wanted} == wanted
    assert json.loads((tmp_path / "hf_config.json").read_text()) == model.config


@pytest.mark.parametrize("shape", SHAPES)
def test_the_models_config_is_derived_where_it_is_not_there(tmp_path: Path, shape: str) -> None:
    model = make_model(**SHAPES[shape])
    write(trtllm, tmp_path, model, model.plan(2))
    (tmp_path / "hf_config.json").unlink()
    found = reopen(trtllm, tmp_path)
    assert_same(found, model)
    for key, value in model.config.items():
        assert (found.config or {}).get(key) == value, key


def test_rope_scaling_survives(tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}
    model = make_model()
    model.config["rope_parameters"] = {**scaling, "rope_theta": 5e5}  # as transformers 5 spells it
    write(trtllm, tmp_path, model, model.plan())
    engine = json.loads((tmp_path / "config.json").read_text())
    assert engine["rotary_base"] == 5e5
    assert engine["rotary_scaling"] == {**scaling, "type": "llama3"}
    derived = model_config(tmp_path, engine)
    assert (derived["rope_theta"], derived["rope_scaling"]) == (5e5, {**scaling, "type": "llama3"})
    longrope = {"type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [3.0, 4.0]}
    phi = make_model(model_type="phi3")
    phi.config.update({"rope_scaling": longrope, "original_max_position_embeddings": 64})
    write(trtllm, tmp_path / "phi", phi, phi.plan())
    engine = json.loads((tmp_path / "phi" / "config.json").read_text())
    assert (engine["position_embedding_type"], engine["longrope_scaling_long_factors"]) == ("long_rope", [3.0, 4.0])
    assert model_config(tmp_path, engine)["rope_scaling"] == longrope


def test_an_embedding_that_is_whole_on_each_rank_is_read(tmp_path: Path) -> None:
    """TensorRT-LLM's own conversion leaves it so, unless told otherwise."""
    model = make_model(vocab=211)
    write(trtllm, tmp_path, model, model.plan(2))
    for rank in range(2):
        path = tmp_path / f"rank{rank}.safetensors"
        tensors = load_file(path)
        tensors["transformer.vocab_embedding.weight"] = model.values["model.embed_tokens.weight"]
        save_file(tensors, path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "use_parallel_embedding": False}))
    assert_same(reopen(trtllm, tmp_path), model)


def test_a_router_that_needs_float32_stays_float32(tmp_path: Path) -> None:
    model = make_model(model_type="mixtral", layers=2)
    write(trtllm, tmp_path, model, model.plan())
    path = tmp_path / "rank0.safetensors"
    tensors = load_file(path)
    tensors["transformer.layers.1.mlp.router.weight"][0, 0] += 2**-20
    save_file(tensors, path)
    infos = reopen(trtllm, tmp_path).infos
    gates = [infos[f"model.layers.{i}.block_sparse_moe.gate.weight"].dtype for i in range(2)]
    assert gates == ["BF16", "F32"]


def test_what_the_format_cannot_hold() -> None:
    mixtral = make_model(model_type="mixtral")
    with pytest.raises(PlanError, match="ep 4 does not divide tp 2"):
        trtllm.arrays(mixtral.plan(2, 1, 4), mixtral.config)
    half = make_model(model_type="mixtral", dtype="float16")
    with pytest.raises(PlanError, match=r"gate.weight is F16.*F32.*convert the model to bfloat16"):
        trtllm.arrays(half.plan(), half.config)
    model = make_model()
    with pytest.raises(PlanError, match=r"no config\.json for 'gpt2'"):
        trtllm.lay_out(model.plan(), {**model.config, "model_type": "gpt2"})


def test_what_is_joined_must_be_alike() -> None:
    model = make_model(attention_bias=True)
    rules = [replace(r, dtype="F32") if r.name.endswith("1.self_attn.v_proj.weight") else r for r in model.rules]
    rules = [r for r in rules if not r.name.endswith("0.self_attn.k_proj.bias")]
    with pytest.raises(PlanError) as caught:
        trtllm.arrays(build_shard_plan(rules, Parallelism(2), layers=2), model.config)
    text = str(caught.value)
    assert "joins model.layers.1.self_attn.q_proj.weight, BF16, and model.layers.1.self_attn.v_proj.weight, F32" in text
    assert "layers.0.self_attn.q_proj, which has a bias, and model.layers.0.self_attn.k_proj, which has none" in text


def spoil(directory: Path, change: Any, rank: int = 1) -> None:
    path = directory / f"rank{rank}.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_everything_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    model = make_model(layers=2)
    write(trtllm, tmp_path, model, model.plan(2))

    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["transformer.layers.1.mlp.fc.weight"]
        tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1].contiguous()
        tensors["transformer.ln_f.weight"] = tensors["transformer.ln_f.weight"].float()
        tensors["transformer.layers.7.mlp.fc.weight"] = torch.zeros(2)

    spoil(tmp_path, change)
    with pytest.raises(CheckpointError) as caught:
        reopen(trtllm, tmp_path)
    text = str(caught.value)
    assert "rank1.safetensors: transformer.layers.1.mlp.fc.weight BF16 [192, 128] is missing" in text
    assert "lm_head.weight is BF16 [105, 128], by config.json it is BF16 [106, 128]" in text
    assert "transformer.ln_f.weight is F32 [128], by config.json it is BF16 [128]" in text
    assert "transformer.layers.7.mlp.fc.weight is no part of such a model" in text
    (tmp_path / "rank0.safetensors").unlink()
    (tmp_path / "rank1.safetensors").write_bytes(b"short")
    with pytest.raises(CheckpointError, match=r"rank0.safetensors is missing; .*rank1.safetensors: truncated"):
        reopen(trtllm, tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mapping": {"world_size": 4, "tp_size": 3, "pp_size": -2}}, r"pp_size is -2.*world_size 4 is not tp_size 3"),
        ({"mapping": {"tp_size": 4, "moe_tp_size": 4, "moe_ep_size": 2}}, "moe_tp_size 4 times moe_ep_size 2 is not"),
        ({"quantization": {"quant_algo": "FP8"}}, "qkv.weights_scaling_factor F32 .1. is missing"),
        ({"quantization": "FP8"}, "quantization is 'FP8'; an object is needed"),
        ({"num_hidden_layers": 3}, "num_hidden_layers is 3 in config.json, 2 in the model's"),
        ({"use_parallel_embedding": True, "embedding_sharding_dim": 1}, "embedding_sharding_dim is 1"),
        ({"mapping": {"tp_size": 3}}, r"tp 3.*4 heads cannot be divided"),
    ],
)
def test_a_config_that_is_no_use(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    model = make_model()
    write(trtllm, tmp_path, model, model.plan(2))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    (tmp_path / "rank2.safetensors").write_bytes((tmp_path / "rank1.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=message):
        reopen(trtllm, tmp_path)


def test_a_config_of_an_unknown_architecture_asks_for_the_models(tmp_path: Path) -> None:
    model = make_model()
    write(trtllm, tmp_path, model, model.plan())
    (tmp_path / "hf_config.json").unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architecture": "MyForCausalLM"}))
    with pytest.raises(CheckpointError, match=re.escape("is for 'MyForCausalLM': the model's tensors cannot")):
        reopen(trtllm, tmp_path)
    assert_same(reopen(trtllm, tmp_path, model.config), model)


def test_other_directories_are_not_taken_for_it(tmp_path: Path) -> None:
    assert not trtllm.recognises(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(make_model().config))
    assert not trtllm.recognises(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert not trtllm.recognises(tmp_path)
