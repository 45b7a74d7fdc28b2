"""How tensors may be cut: by their family, and by what their number format keeps together. From headers alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelexport.checkpoints.safetensors.file import Checkpoint, open_checkpoint
from modelexport.errors import CheckpointError, PlanError
from modelexport.models.rules import expected_rules, left_out, tensor_rules
from modelexport.sharding.boxes import Box, slices, volume
from modelexport.sharding.plan import Parallelism
from modelexport.sharding.rules import TensorRule
from modelexport.sharding.shard_plan import ShardPlan, build_shard_plan
from tests.helpers.models import (
    SCHEMES,
    LlamaShape,
    headers_only,
    make_llama,
    quantised_headers,
    tensor_shapes,
    with_tensor,
    without,
)
from tests.helpers.shard_plans import layers_of

FAMILIES = ("llama", "mistral", "qwen2", "phi3", "mixtral", "deepseek_v3", "deepseek_v2")
ROOMY = LlamaShape(hidden=512, heads=8, kv_heads=4, head_dim=128, intermediate=1024, vocab=211)
LATENT = replace(
    ROOMY, model_type="deepseek_v3", nope_dim=128, rope_dim=128, value_dim=128, expert_intermediate=1024, dense_layers=0
)


def rules_of(checkpoint: Checkpoint) -> dict[str, TensorRule]:
    return {rule.name: rule for rule in tensor_rules(checkpoint)}


def plan_of(checkpoint: Checkpoint, tp: int = 1, pp: int = 1, ep: int = 1) -> ShardPlan:
    rules = tensor_rules(checkpoint)
    return build_shard_plan(rules, Parallelism(tp, pp, ep), layers=layers_of(rules))


# --------------------------------------------------------------------- families


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_every_tensor_of_a_family_has_its_rule(model_type: str, tied: bool) -> None:
    shape = LlamaShape(model_type=model_type, tied=tied, attention_bias=True, mlp_bias=True, layers=3)
    checkpoint = headers_only(shape)
    rules = rules_of(checkpoint)
    assert {name: rule.shape for name, rule in rules.items()} == tensor_shapes(shape)
    assert layers_of(list(rules.values())) == 3
    layers = [-1 if r.stages and "first" in r.stages else 9 if r.stages else r.layer for r in rules.values()]
    assert layers == sorted(layers, key=lambda n: -1 if n is None else n), "before, layer by layer, behind"
    for rule in rules.values():
        assert rule.name == f"{rule.module}.{rule.parameter}"
        assert (rule.layer is None) == bool(rule.stages)
        assert (rule.expert is None) == (".experts." not in rule.name)
        assert rule.path.format(e=rule.expert) in rule.module
        if rule.dim is not None:
            assert rule.parts[0].start == 0
            assert rule.parts[-1].stop == rule.shape[rule.dim]
            assert all(a.stop == b.start for a, b in zip(rule.parts, rule.parts[1:], strict=False))
    embedding = rules["model.embed_tokens.weight"]
    assert embedding.stages == (("first", "last") if tied else ("first",))
    assert expected_rules(checkpoint.config or {}, "BF16") == list(rules.values())


@pytest.mark.parametrize("model_type", FAMILIES)
def test_checkpoints_that_transformers_saved(model_type: str) -> None:
    checkpoint = open_checkpoint(make_llama(model_type=model_type, layers=1))
    assert set(rules_of(checkpoint)) == set(checkpoint.infos)
    assert expected_rules(checkpoint.config or {}, lambda name: checkpoint.infos[name].dtype) == list(
        rules_of(checkpoint).values()
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[LlamaShape, Parallelism]:
    """A model of any family, and a parallelism that suits it."""
    tp = draw(st.sampled_from([1, 2, 3, 4]))
    kv = draw(st.sampled_from([n for n in range(1, 9) if n % tp == 0 or tp % n == 0]))
    model_type = draw(st.sampled_from(FAMILIES))
    ep = draw(st.integers(1, 3)) if model_type in ("mixtral", "deepseek_v3", "deepseek_v2") else 1
    layers = draw(st.integers(1, 3))
    shape = LlamaShape(
        model_type=model_type,
        hidden=draw(st.integers(1, 7)),
        heads=math.lcm(kv, tp) * draw(st.integers(1, 2)),
        kv_heads=kv,
        head_dim=draw(st.integers(1, 4)),
        intermediate=tp * draw(st.integers(1, 4)),
        vocab=draw(st.integers(1, 21)),
        layers=layers,
        attention_bias=draw(st.booleans()),
        mlp_bias=draw(st.booleans()),
        tied=draw(st.booleans()),
        experts=ep * draw(st.integers(1, 2)),
        query_rank=draw(st.sampled_from([None, 3])),
        kv_rank=draw(st.integers(1, 5)),
        nope_dim=draw(st.integers(1, 4)),
        rope_dim=draw(st.integers(1, 4)),
        value_dim=draw(st.integers(1, 4)),
        expert_intermediate=tp * draw(st.integers(1, 3)),
        shared_experts=draw(st.sampled_from([None, 1, 2])),
        dense_layers=draw(st.integers(0, layers if ep == 1 else layers - 1)),
    )
    return shape, Parallelism(tp, draw(st.integers(1, shape.layers)), ep)


@given(cases())
@settings(max_examples=60)
def test_what_ranks_hold_covers_every_tensor_and_fits_together(case: tuple[LlamaShape, Parallelism]) -> None:
    shape, grid = case
    plan = plan_of(headers_only(shape), grid.tp, grid.pp, grid.ep)
    for name, rule in plan.rules.items():
        counts = np.zeros(rule.shape, np.int16)
        for rank in range(grid.size):
            for _, box in plan.owned(name, rank):
                counts[slices(box)] += 1
        assert (counts == 1).all(), name
    for rank in range(grid.size):
        for name in plan.names(rank):
            if not name.endswith(".bias"):
                continue
            weight = plan.held(name.replace(".bias", ".weight"), rank)
            column = plan.rules[name.replace(".bias", ".weight")].dim == 0
            rows = [box[0] for _, box in weight] if column else [(0, plan.rules[name].shape[0])]
            assert [box[0] for _, box in plan.held(name, rank)] == rows, "column bias cut, row bias whole"


def test_fused_modules_are_cut_part_by_part() -> None:
    plan = plan_of(headers_only(model_type="phi3", hidden=64, heads=4, kv_heads=2, intermediate=24), tp=4)
    held = [[box[0] for _, box in plan.held("model.layers.0.self_attn.qkv_proj.weight", rank)] for rank in range(4)]
    assert held == [
        [(0, 16), (64, 80), (96, 112)],
        [(16, 32), (64, 80), (96, 112)],
        [(32, 48), (80, 96), (112, 128)],
        [(48, 64), (80, 96), (112, 128)],
    ]
    held = [[box[0] for _, box in plan.held("model.layers.1.mlp.gate_up_proj.weight", rank)] for rank in range(4)]
    assert held == [[(6 * r, 6 * r + 6), (24 + 6 * r, 30 + 6 * r)] for r in range(4)]
    assert [p.role for p in plan.rules["model.layers.0.self_attn.qkv_proj.weight"].parts] == [
        "attention.q",
        "attention.k",
        "attention.v",
    ]


def test_experts_go_to_their_ranks_and_routers_to_all() -> None:
    plan = plan_of(headers_only(model_type="mixtral", experts=4), tp=2, ep=2)
    prefix = "model.layers.0.block_sparse_moe"
    assert [bool(plan.held(f"{prefix}.experts.1.w2.weight", rank)) for rank in range(4)] == [True, True, False, False]
    assert plan.held(f"{prefix}.experts.3.w2.weight", 3)[0][1] == ((0, 128), (192, 384))
    assert plan.held(f"{prefix}.experts.3.w1.weight", 3)[0][1] == ((192, 384), (0, 128))
    assert plan.owners(f"{prefix}.gate.weight", 2) == (0, 1, 2, 3)
    with pytest.raises(PlanError, match=r"4 experts cannot be divided equally among ep 3 ranks.*ep 2"):
        plan_of(headers_only(model_type="mixtral", experts=4), ep=3)


# --------------------------------------------------------------- number formats

# For each: what of a tensor belongs to the weight's element (row, column). Written down from the formats' definitions.
Where = Callable[[int, int], tuple[int, ...]]
BELONGS: dict[str, dict[str, Where]] = {
    "int8": {"weight": lambda r, c: (r, c), "weight_scale": lambda r, c: (r, 0)},
    "fp8-static": {
        "weight": lambda r, c: (r, c),
        "weight_scale": lambda r, c: (0,),
        "input_scale": lambda r, c: (0,),
    },
    "fp8-block": {"weight": lambda r, c: (r, c), "weight_scale": lambda r, c: (r // 128, c // 128)},
    "int4": {
        "weight_packed": lambda r, c: (r, c // 8),
        "weight_scale": lambda r, c: (r, c // 128),
        "weight_shape": lambda r, c: (0,),
    },
    "int4-asym": {
        "weight_packed": lambda r, c: (r, c // 8),
        "weight_scale": lambda r, c: (r, c // 32),
        "weight_zero_point": lambda r, c: (r // 8, c // 32),
        "weight_shape": lambda r, c: (0,),
    },
    "int4-actorder": {
        "weight_packed": lambda r, c: (r, c // 8),
        "weight_scale": lambda r, c: (r, (7 * c) % (c // 32 + 1)),  # of any group at all
        "weight_g_idx": lambda r, c: (c,),
        "weight_shape": lambda r, c: (0,),
    },
    "int8-wo": {
        "weight_packed": lambda r, c: (r, c // 4),
        "weight_scale": lambda r, c: (r, 0),
        "weight_shape": lambda r, c: (0,),
    },
    "nvfp4": {
        "weight_packed": lambda r, c: (r, c // 2),
        "weight_scale": lambda r, c: (r, c // 16),
        "weight_global_scale": lambda r, c: (0,),
        "input_global_scale": lambda r, c: (0,),
    },
    "mxfp4": {"weight_packed": lambda r, c: (r, c // 2), "weight_scale": lambda r, c: (r, c // 32)},
    "mxfp8": {"weight": lambda r, c: (r, c), "weight_scale": lambda r, c: (r, c // 32)},
}


def holds(boxes: list[Box], where: tuple[int, ...]) -> bool:
    return any(all(a <= i < b for i, (a, b) in zip(where, box, strict=True)) for box in boxes)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("model_type", ["llama", "phi3", "mixtral", "deepseek_v3"])
@pytest.mark.parametrize("tp", [2, 8])
def test_a_rank_holds_all_that_its_weights_need_and_no_more(scheme: str, model_type: str, tp: int) -> None:
    """Against a table by hand: packed words, scales, zero points of the elements that a rank computes with."""
    shape = replace(LATENT if model_type == "deepseek_v3" else ROOMY, model_type=model_type, layers=1, experts=2)
    checkpoint, plain = quantised_headers(scheme, shape), headers_only(shape)
    plan, wanted = plan_of(checkpoint, tp), plan_of(plain, tp)
    rng = np.random.default_rng(0)
    linears = {rule.module for rule in plan.rules.values() if rule.parameter in ("weight_scale", "weight_packed")}
    assert len(linears) == {"llama": 7, "phi3": 4, "mixtral": 10, "deepseek_v3": 14}[model_type]
    for module in linears:
        own = {r.parameter: r for r in plan.rules.values() if r.module == module}
        assert set(own) == set(BELONGS[scheme])
        for rank in range(tp):
            weight = [box for _, box in wanted.held(f"{module}.weight", rank)]
            held = {suffix: [box for _, box in plan.held(rule.name, rank)] for suffix, rule in own.items()}
            rows, cols = plain.infos[f"{module}.weight"].shape
            for _ in range(40):
                r, c = int(rng.integers(rows)), int(rng.integers(cols))
                mine = holds(weight, (r, c))
                for suffix, where in BELONGS[scheme].items():
                    place = where(r, c)
                    shared = own[suffix].dim is None or (suffix == "weight_g_idx" and own[suffix].dim == 0)
                    if mine:
                        assert holds(held[suffix], place), (module, suffix, rank, r, c)
                    elif not shared and len(place) == 2 and own[suffix].dim is not None:
                        assert not holds(held[suffix], place), (module, suffix, rank, r, c)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_main_replicas_of_quantised_tensors_tile_them(scheme: str) -> None:
    shape = replace(ROOMY, model_type="mixtral", layers=2, experts=2, attention_bias=False)
    plan = plan_of(quantised_headers(scheme, shape), tp=8, pp=2, ep=2)
    for name, rule in plan.rules.items():
        counts = np.zeros(rule.shape, np.int16)
        for rank in range(plan.parallelism.size):
            for _, box in plan.owned(name, rank):
                counts[slices(box)] += 1
        assert (counts == 1).all(), name


@pytest.mark.parametrize(
    ("scheme", "changes", "tp", "words", "works"),
    [
        ("int4", {"intermediate": 384}, 2, "3 units of 128 cannot be divided equally among 2 ranks (mlp.down_proj", 1),
        ("int4", {"intermediate": 384}, 6, "8 heads cannot be divided equally among 6 ranks", 1),
        ("int8", {"intermediate": 384}, 8, "", 8),
        (
            "int4",
            {"head_dim": 64},
            8,
            "4 units of 2 heads cannot be divided equally among 8 ranks (self_attn.o_proj",
            4,
        ),
        ("fp8-block", {"intermediate": 1000}, 2, "1000 is no multiple of 128", 1),
        ("fp8-block", {"head_dim": 64}, 4, "2 units of 2 key/value heads cannot be divided equally among 4 ranks", 2),
        ("fp8-block", {"head_dim": 64, "heads": 8, "kv_heads": 1}, 4, "", 4),
        ("fp8-block", {"head_dim": 96}, 2, "384 elements that must stay together cannot be cut over 2 ranks", 1),
        ("fp8-block", {"head_dim": 96, "kv_heads": 8}, 2, "", 2),
        ("int4-asym", {"kv_heads": 1, "head_dim": 4, "heads": 64}, 8, "", 8),
        ("int4-actorder", {"intermediate": 8 * 45}, 3, "8 heads cannot be", 1),
        ("nvfp4", {"intermediate": 48}, 2, "3 units of 16", 1),
        ("mxfp8", {"intermediate": 96}, 4, "3 units of 32", 1),
    ],
)
def test_what_would_split_a_group_is_refused_with_the_largest_that_works(
    scheme: str, changes: dict[str, int], tp: int, words: str, works: int
) -> None:
    checkpoint = quantised_headers(scheme, replace(ROOMY, layers=1), **changes)
    if works == tp:
        assert plan_of(checkpoint, tp)
        return
    with pytest.raises(PlanError) as caught:
        plan_of(checkpoint, tp)
    assert words in str(caught.value)
    assert str(caught.value).endswith(f"The largest that does: tp {works}, pp 1, ep 1")
    assert plan_of(checkpoint, works)


def test_parts_of_a_fused_module_that_share_a_block_stay_together() -> None:
    """The 3 * 64 query rows end within a block of 128: no rank could have its part of the scales."""
    shape = LlamaShape(model_type="phi3", hidden=192, heads=3, kv_heads=3, intermediate=768)
    assert plan_of(quantised_headers("fp8-block", shape))
    with pytest.raises(PlanError, match=r"576 elements that must stay together .* 3 ranks \(self_attn.qkv_proj"):
        plan_of(quantised_headers("fp8-block", shape), tp=3)
    assert plan_of(quantised_headers("fp8-block", replace(shape, hidden=384)), tp=3), "whole blocks: each by itself"


def test_scales_of_the_kv_cache_go_with_their_layer() -> None:
    checkpoint = quantised_headers("int8", layers=4, kv_heads=4)
    names = [f"model.layers.{i}.self_attn.{s}" for i in range(4) for s in ("k_scale", "v_scale")]
    for name in names:
        checkpoint = with_tensor(checkpoint, name, (1,))
    with pytest.raises(CheckpointError, match=r"8 tensor.s. are not part of a llama model"):
        tensor_rules(checkpoint)
    assert checkpoint.config is not None
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    quantization = {**checkpoint.config["quantization_config"], "kv_cache_scheme": scheme}
    checkpoint = without(checkpoint, quantization_config=quantization)
    plan = plan_of(checkpoint, tp=2, pp=2)
    assert [name for name in plan.rules if name in names] == names
    assert [plan.stages(name) for name in names] == [(0,)] * 4 + [(1,)] * 4
    assert [plan.rules[name].role for name in names[:2]] == ["attention.k", "attention.v"]
    assert plan.owners(names[-1], 3) == (2, 3)


# --------------------------------------------------------------- what is wrong


def test_everything_that_is_wrong_is_said_at_once() -> None:
    checkpoint = quantised_headers("int4", attention_bias=True)
    prefix = "model.layers.1.self_attn"
    checkpoint = without(checkpoint, f"{prefix}.q_proj.weight_scale", f"{prefix}.k_proj.bias", "lm_head.weight")
    checkpoint = with_tensor(checkpoint, f"{prefix}.o_proj.weight_packed", (128, 32), "I32")
    checkpoint = with_tensor(checkpoint, "vision.weight", (3,))
    with pytest.raises(CheckpointError) as caught:
        tensor_rules(checkpoint)
    text = str(caught.value)
    for words in (
        "/nonexistent: ",
        f"{prefix}.q_proj.weight_scale is missing",
        f"{prefix}.k_proj.bias is missing, though config.json says attention_bias",
        "lm_head.weight is missing",
        f"{prefix}.o_proj.weight_packed is I32 [128, 32] but config.json makes it I32 [128, 16]",
        "1 tensor(s) are not part of a llama model of 2 layers: vision.weight",
    ):
        assert words in text


def test_what_cannot_be_read() -> None:
    plain = headers_only()
    with pytest.raises(CheckpointError, match=r"no config\.json; give --config DIR"):
        tensor_rules(replace(plain, config=None))
    with pytest.raises(PlanError, match="unknown architecture 'lama'; did you mean 'llama'"):
        tensor_rules(without(plain, model_type="lama"))
    with pytest.raises(PlanError, match=r"quant_method 'eetq'.*compressed-tensors, .* only"):
        tensor_rules(without(plain, quantization_config={"quant_method": "eetq"}))
    with pytest.raises(CheckpointError, match=r"F8_E4M3 .* makes it BF16 or F16 or F32"):
        tensor_rules(with_tensor(plain, "model.layers.0.mlp.up_proj.weight", (384, 128), "F8_E4M3"))
    with pytest.raises(CheckpointError, match="1000000000000 layers, but there are only 21 tensors"):
        tensor_rules(without(plain, num_hidden_layers=10**12))
    mixtral = headers_only(model_type="mixtral")
    with pytest.raises(CheckpointError, match="2 layers of 10000000 experts, but there are only"):
        tensor_rules(without(mixtral, num_local_experts=10**7))
    for keys in ({"num_hidden_layers": 10**12}, {"num_local_experts": 10**12}):
        with pytest.raises(CheckpointError, match=r"layers of .* experts; at most 1,000,000 are believed"):
            expected_rules({**(mixtral.config or {}), **keys}, "BF16")
    with pytest.raises(CheckpointError, match="num_local_experts is missing"):
        tensor_rules(without(mixtral, num_local_experts=None))
    checkpoint = quantised_headers("int4")
    assert checkpoint.config is not None
    quantization = checkpoint.config["quantization_config"]
    groups = {"group_0": {**quantization["config_groups"]["group_0"], "format": "marlin-24"}}
    with pytest.raises(CheckpointError, match="no rules are known for format 'marlin-24'"):
        tensor_rules(without(checkpoint, quantization_config={**quantization, "config_groups": groups}))


def test_what_is_no_part_of_the_model_is_named() -> None:
    buffer = "model.layers.0.self_attn.rotary_emb.inv_freq"
    tied = with_tensor(headers_only(tied=True), "lm_head.weight", (211, 128))
    tied = with_tensor(tied, buffer, (16,), "F32")
    assert left_out(tied) == {
        "lm_head.weight": "tied to model.embed_tokens.weight, written once",
        buffer: "a buffer that every engine computes itself",
    }
    assert not {"lm_head.weight", buffer} & set(rules_of(tied)), "no second copy appears"
    assert left_out(headers_only()) == {}


def test_biases_that_only_the_checkpoint_knows_of() -> None:
    name = "model.layers.0.mlp.up_proj.bias"
    checkpoint = with_tensor(headers_only(), name, (384,))
    assert rules_of(checkpoint)[name].dim == 0
    config = checkpoint.config or {}
    assert name not in {rule.name for rule in expected_rules(config, "BF16")}
    asked = expected_rules(config, "BF16", has=lambda wanted: wanted == name)
    assert asked == list(rules_of(checkpoint).values())
    qwen = headers_only(model_type="qwen2")
    assert expected_rules(qwen.config or {}, "BF16", has=lambda _: True)
    names = {rule.name for rule in expected_rules(qwen.config or {}, "BF16", has=lambda wanted: "proj" in wanted)}
    assert names == set(qwen.infos), "its other linears never have one"


def test_expected_tensors_of_a_quantised_model() -> None:
    for scheme in SCHEMES:
        checkpoint = quantised_headers(scheme)
        assert expected_rules(checkpoint.config or {}, "BF16") == tensor_rules(checkpoint)


def test_a_share_of_a_weight_is_what_its_bytes_say() -> None:
    """The bytes of all ranks at tp 8 are those of the checkpoint, but for what is replicated."""
    plan = plan_of(quantised_headers("int4", replace(ROOMY, kv_heads=8)), tp=8)
    whole = sum(math.prod(rule.shape) for rule in plan.rules.values() if rule.dim is not None)
    held = sum(
        volume(box) for n, r in plan.rules.items() if r.dim is not None for k in range(8) for _, box in plan.held(n, k)
    )
    assert held == whole
