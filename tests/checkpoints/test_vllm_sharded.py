"""vLLM's sharded state, against an independent construction of it with torch, and back.

That the engine itself loads it is shown in tests/conformance/test_vllm_sharded_state.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from modelexport.checkpoints.formats import vllm_sharded
from modelexport.errors import CheckpointError, PlanError
from tests.helpers.format_models import Model, assert_same, make_model, reopen, round_trip, write

SHAPES: dict[str, dict[str, Any]] = {
    "biased": {"attention_bias": True, "mlp_bias": True, "vocab": 211, "heads": 8, "kv_heads": 2},
    "tied": {"tied": True, "vocab": 1003},
    "phi3": {"model_type": "phi3", "heads": 8, "kv_heads": 2},
    "mixtral": {"model_type": "mixtral", "heads": 8, "kv_heads": 2},
}


def heads_of(value: torch.Tensor, count: int, tp: int, rank: int) -> torch.Tensor:
    """The rows of a rank's heads, each of ``count`` heads repeated where there are fewer of them than ranks."""
    split = value.view(count, value.shape[0] // count, *value.shape[1:])
    if count < tp:
        split = split.repeat_interleave(tp // count, dim=0)
    return split.chunk(tp)[rank].flatten(0, 1)


def expected(model: Model, rank: int, tp: int, ep: int = 1) -> dict[str, torch.Tensor]:
    """A rank's state_dict, from the whole tensors."""
    config, values = model.config, model.values
    heads = {"q": config["num_attention_heads"]} | dict.fromkeys("kv", config["num_key_value_heads"])
    found = {"model.norm.weight": values["model.norm.weight"]}
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        if name == "lm_head.weight" or "lm_head.weight" in values:  # tied: one of them, the first by name
            value = values.get(name, values["model.embed_tokens.weight"])
            rows = value.new_zeros(-value.shape[0] % 64, value.shape[1])
            found[name] = torch.cat([value, rows]).chunk(tp)[rank]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        own = {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
        now: dict[str, torch.Tensor] = {name: own[name] for name in own if "layernorm" in name}
        for kind in ("weight", "bias"):
            if f"self_attn.qkv_proj.{kind}" in own:
                fused = own[f"self_attn.qkv_proj.{kind}"]
                unit = fused.shape[0] // sum(heads.values())
                parts = dict(zip("qkv", fused.split([heads[n] * unit for n in "qkv"]), strict=True))
                gate, up = own[f"mlp.gate_up_proj.{kind}"].chunk(2)
            elif f"self_attn.q_proj.{kind}" in own:
                parts = {n: own[f"self_attn.{n}_proj.{kind}"] for n in "qkv"}
                gate, up = (own.get(f"mlp.{n}_proj.{kind}", torch.empty(0)) for n in ("gate", "up"))
            else:
                continue
            now[f"self_attn.qkv_proj.{kind}"] = torch.cat([heads_of(parts[n], heads[n], tp, rank) for n in "qkv"])
            if gate.numel():
                now[f"mlp.gate_up_proj.{kind}"] = torch.cat([gate.chunk(tp)[rank], up.chunk(tp)[rank]])
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            if f"{name}.weight" in own:
                now[f"{name}.weight"] = own[f"{name}.weight"].chunk(tp, dim=1)[rank]
            if f"{name}.bias" in own:
                now[f"{name}.bias"] = own[f"{name}.bias"]
        if config["model_type"] == "mixtral":
            now |= experts(own, config["num_local_experts"], rank, tp, ep)
        now |= {f"self_attn.attn._{kind}_scale": torch.tensor(1.0) for kind in ("q", "k", "v", "prob")}
        found |= {prefix + name: value for name, value in now.items()}
    return found


def experts(own: dict[str, torch.Tensor], count: int, rank: int, tp: int, ep: int) -> dict[str, torch.Tensor]:
    group, cut, parts = (rank, 0, 1) if ep > 1 else (0, rank, tp)
    mine = range(group * count // ep, (group + 1) * count // ep)
    w1, w2, w3 = (torch.stack([own[f"block_sparse_moe.experts.{e}.w{n}.weight"] for e in mine]) for n in (1, 2, 3))
    prefix = "block_sparse_moe.experts.routed_experts."
    return {
        prefix + "w13_weight": torch.cat([w1.chunk(parts, dim=1)[cut], w3.chunk(parts, dim=1)[cut]], dim=1),
        prefix + "w2_weight": w2.chunk(parts, dim=2)[cut],
        "block_sparse_moe.gate.weight": own["block_sparse_moe.gate.weight"],
    }


@pytest.mark.parametrize(
    ("shape", "tp", "ep"),
    [*((shape, tp, 1) for shape in SHAPES for tp in (1, 4)), ("mixtral", 2, 2)],
)
def test_files_are_what_torch_makes_of_the_whole_tensors(tmp_path: Path, shape: str, tp: int, ep: int) -> None:
    model = make_model(**SHAPES[shape])
    found = round_trip(vllm_sharded, tmp_path, model, tp, 1, ep)
    assert len(found.left_out) == 4 * 2
    for rank in range(tp):
        want, got = expected(model, rank, tp, ep), load_file(tmp_path / f"model-rank-{rank}-part-0.safetensors")
        assert sorted(got) == sorted(want)
        for name, value in want.items():
            assert got[name].dtype == value.dtype, name
            assert torch.equal(got[name], value), name


def test_parts_and_the_names_of_earlier_versions(tmp_path: Path) -> None:
    model = make_model(**SHAPES["mixtral"])
    write(vllm_sharded, tmp_path, model, model.plan(2), max_shard_bytes=200_000)
    parts = sorted(path.name for path in tmp_path.glob("model-rank-1-*"))
    assert len(parts) > 3
    assert parts[0] == "model-rank-1-part-0.safetensors"
    for path in tmp_path.glob("*.safetensors"):
        tensors = {name.replace(".routed_experts", ""): value for name, value in load_file(path).items()}
        tensors = {name: value for name, value in tensors.items() if "_scale" not in name}
        save_file(tensors, path)
    assert_same(reopen(vllm_sharded, tmp_path), model)
    (tmp_path / parts[1]).unlink()
    (tmp_path / "model-rank-0-part-0.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-rank-0-part-0.safetensors is missing; model-rank-1-part-1.safe"):
        reopen(vllm_sharded, tmp_path)


def test_what_the_format_cannot_hold() -> None:
    quantised = make_model("fp8-static")
    with pytest.raises(PlanError, match=r"the first .*, F8_E4M3;.*--format hf.*--tensor-parallel-size 2"):
        vllm_sharded.arrays(quantised.plan(2), quantised.config)
    mixtral = make_model(model_type="mixtral", heads=12, kv_heads=3, head_dim=8)
    with pytest.raises(PlanError) as caught:
        vllm_sharded.arrays(mixtral.plan(3, 2, 2), mixtral.config)
    text = str(caught.value)
    assert "pp is 2" in text
    assert "ep is 2: vLLM spreads experts over all tp ranks or none; use 1 or 3" in text
    assert "lm_head.weight: its 211 rows are filled up to 256, which 3 ranks cannot share equally" in text


def test_a_last_rank_that_is_missing_and_other_errors(tmp_path: Path) -> None:
    model = make_model(vocab=211)
    write(vllm_sharded, tmp_path, model, model.plan(4))
    for rank in (2, 3):
        (tmp_path / f"model-rank-{rank}-part-0.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"has 64 of 256 rows.*there are 4 ranks, but files of 2; .* last 2 are"):
        reopen(vllm_sharded, tmp_path)
    write(vllm_sharded, tmp_path, model, model.plan(4))
    path = tmp_path / "model-rank-3-part-0.safetensors"
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    tensors["model.layers.0.self_attn.o_proj.weight"] = torch.zeros(128, 33, dtype=torch.bfloat16)
    tensors["model.layers.1.self_attn.attn._k_scale"] = torch.tensor(0.5)
    tensors["model.layers.2.mlp.gate_up_proj.weight"] = torch.zeros(2, 2)
    save_file(tensors, path)
    with pytest.raises(CheckpointError) as caught:
        reopen(vllm_sharded, tmp_path)
    text = str(caught.value)
    assert "model.norm.weight BF16 [128] is missing" in text
    assert "model.layers.0.self_attn.o_proj.weight is BF16 [128, 33], by config.json it is BF16 [128, 32]" in text
    assert "model.layers.1.self_attn.attn._k_scale is not what every unquantised model has there" in text
    assert "model.layers.2.mlp.gate_up_proj.weight is no part of such a model" in text
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config.json; give --config DIR"):
        reopen(vllm_sharded, tmp_path)


def test_a_config_of_absurd_size_is_refused_at_once(tmp_path: Path) -> None:
    model = make_model()
    write(vllm_sharded, tmp_path, model, model.plan(2))
    with pytest.raises(CheckpointError, match=r"num_hidden_layers 1000000000, but there are only \d+ arrays"):
        reopen(vllm_sharded, tmp_path, {**model.config, "num_hidden_layers": 10**9})
    with pytest.raises(CheckpointError, match=r"num_local_experts 1000000000, but there are only \d+ rows"):
        reopen(vllm_sharded, tmp_path, {**model.config, "num_local_experts": 10**9})


def test_other_directories_are_not_taken_for_it(tmp_path: Path) -> None:
    for name in ("model.safetensors", "model-00001-of-00002.safetensors", "model-rank-0.safetensors"):
        (tmp_path / name).write_bytes(b"")
    assert not vllm_sharded.recognises(tmp_path)
