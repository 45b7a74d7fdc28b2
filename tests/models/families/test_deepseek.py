"""DeepSeek: latent attention, whose low-rank projections every rank holds, and layers that are not all alike."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from modelexport.checkpoints.safetensors.file import Checkpoint, open_checkpoint
from modelexport.errors import CheckpointError, PlanError
from modelexport.exporting import export
from modelexport.exporting.plan import build_plan
from modelexport.inspection.diff import diff_checkpoints
from modelexport.inspection.inspect import inspect_checkpoint
from modelexport.inspection.verify import verify_checkpoint
from modelexport.models.architecture import family_of, read_dimensions
from modelexport.models.rules import expected_rules, left_out, tensor_rules
from modelexport.quantization.assignment import Assignment
from modelexport.resharding import reshard
from modelexport.sharding.plan import Parallelism
from modelexport.sharding.shard_plan import ShardPlan, build_shard_plan
from tests.exporting.test_export import digests
from tests.helpers.marks import few
from tests.helpers.models import LlamaShape, config_json, copy_checkpoint, headers_only, make_llama, quantised_headers
from tests.helpers.shard_plans import layers_of

pytestmark = pytest.mark.timeout(120)

V3: dict[str, Any] = {"model_type": "deepseek_v3", "heads": 8, "layers": 3, "experts": 4, "query_rank": 24}
WHOLE = (
    *("self_attn.q_a_proj", "self_attn.q_a_layernorm", "self_attn.kv_a_proj_with_mqa", "self_attn.kv_a_layernorm"),
    *("input_layernorm", "post_attention_layernorm", "mlp.gate"),
)


def plan_of(checkpoint: Checkpoint, tp: int = 1, pp: int = 1, ep: int = 1) -> ShardPlan:
    rules = tensor_rules(checkpoint)
    return build_shard_plan(rules, Parallelism(tp, pp, ep), layers=layers_of(rules))


def resharded(checkpoint: Path, out: Path, **settings: Any) -> Path:
    reshard(checkpoint=str(checkpoint), out=str(out), quiet=True, **settings)
    return out


# --------------------------------------------------------------------- plans


@pytest.mark.parametrize("scheme", [None, "int8", "fp8-static", "mxfp8"])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_what_comes_before_the_heads_is_whole_on_every_rank(tp: int, scheme: str | None) -> None:
    checkpoint = (
        headers_only(**V3)
        if scheme is None
        else quantised_headers(scheme, **{**V3, "query_rank": 128}, intermediate=512)
    )
    plan = plan_of(checkpoint, tp=tp, ep=2, pp=3)
    whole = [rule for rule in plan.rules.values() if rule.path in WHOLE]
    assert len(whole) >= 3 * 6 + 2 * 2, "three layers, the last two of them with a router and its correction"
    for rule in whole:
        ranks = [rank for rank in range(plan.parallelism.size) if plan.held(rule.name, rank)]
        assert rule.dim is None
        assert len(ranks) == 2 * tp, "all ranks of the layer's stage"
        assert plan.owners(rule.name, ranks[-1]) == tuple(ranks)


def test_heads_of_three_sizes_are_cut_alike() -> None:
    plan = plan_of(headers_only(**V3, nope_dim=16, rope_dim=8, value_dim=32), tp=4)
    layer = "model.layers.0.self_attn"
    for name, dim, size in (("q_b_proj", 0, 24), ("kv_b_proj", 0, 48), ("o_proj", 1, 32)):
        for rank in range(4):
            ((part, box),) = plan.held(f"{layer}.{name}.weight", rank)
            assert part is not None
            assert (box[dim], part.heads) == ((2 * size * rank, 2 * size * (rank + 1)), 8)


@pytest.mark.parametrize("tp", [3, 5, 6, 7])
def test_ranks_that_heads_do_not_suit(tp: int) -> None:
    with pytest.raises(PlanError) as caught:
        plan_of(headers_only(**V3), tp=tp)
    text = str(caught.value)
    assert f"8 heads cannot be divided equally among {tp} ranks (self_attn.q_b_proj, self_attn.kv_b_proj, self" in text
    assert text.endswith(f"The largest that does: tp {2 if tp == 3 else 4}, pp 1, ep 1")


def test_layers_differ() -> None:
    plan = plan_of(headers_only(**V3), tp=2, ep=2)
    by_layer = [{rule.path for rule in plan.rules.values() if rule.layer == i} for i in range(3)]
    assert {path for path in by_layer[0] if path.startswith("mlp.")} == {
        f"mlp.{k}_proj" for k in ("gate", "up", "down")
    }
    assert by_layer[1] == by_layer[2]
    assert "mlp.experts.{e}.up_proj" in by_layer[1]
    assert not plan.held("model.layers.1.mlp.experts.3.up_proj.weight", 0), "the second ep rank's"
    ((_, box),) = plan.held("model.layers.2.mlp.shared_experts.up_proj.weight", 0)
    assert box[0] == (0, 128), "what every token uses is cut over tp, and on every ep rank"
    small = {r.name for r in tensor_rules(headers_only(**{**V3, "query_rank": None}, shared_experts=None))}
    assert "model.layers.0.self_attn.q_proj.weight" in small
    assert not [name for name in small if "q_a_" in name or "q_b_" in name or "shared" in name]


@pytest.mark.parametrize("quant", ["none", "int4"])
@pytest.mark.parametrize("tp", [1, 2, 3, 5, 8])
def test_an_export_cuts_whole_heads_at_any_number_of_ranks(tp: int, quant: str) -> None:
    """With groups of 128 inputs of o_proj, that are four heads there: these four stay together everywhere."""
    checkpoint = headers_only(**{**V3, "query_rank": 128})
    plan = build_plan(checkpoint, Assignment.parse(quant), Parallelism(tp))
    cuts = {task.path: task.cut for step in plan.steps for task in step.tasks if task.path.startswith("self_attn")}
    heads = {
        path: [(start // size, stop // size) for start, stop in cuts[f"self_attn.{path}"].owned]
        for path, size in (("q_b_proj", 24), ("kv_b_proj", 48), ("o_proj", 32))
    }
    assert heads["q_b_proj"] == heads["kv_b_proj"] == heads["o_proj"]
    if quant == "int4":
        assert all(start % 4 == 0 and stop % 4 == 0 for start, stop in heads["o_proj"])
    assert cuts["self_attn.q_a_proj"].dim is None


# ------------------------------------------------------------------ config.json


def test_what_config_json_must_say() -> None:
    config = config_json(LlamaShape(**V3))
    family = family_of(config)
    real = {key: value for key, value in config.items() if key not in ("head_dim", "num_key_value_heads")}
    assert read_dimensions(real, family).kv_heads == 8
    assert read_dimensions({**config, "n_shared_experts": 0}, family).axis_size("shared_intermediate") == 0
    for key, value, text in (
        ("kv_lora_rank", None, "kv_lora_rank is missing; a positive whole number is needed"),
        ("first_k_dense_replace", -1, "first_k_dense_replace is -1; a whole number, 0 or more, is needed"),
        ("q_lora_rank", "24", "q_lora_rank is '24'"),
        ("n_routed_experts", None, "num_local_experts is missing"),
    ):
        with pytest.raises(CheckpointError, match=text):
            read_dimensions({**config, key: value}, family)
    with pytest.raises(CheckpointError, match="at most 1,000,000 are believed"):
        expected_rules({**config, "num_hidden_layers": 10**12}, "BF16")
    sparse = {**V3, "layers": 9, "dense_layers": 8, "experts": 90}
    assert plan_of(headers_only(**sparse)), (
        "9 * 90 experts would be more than there are tensors, but only one layer has"
    )
    checkpoint, name = headers_only(**V3), "model.layers.1.mlp.gate.e_score_correction_bias"
    infos = {**checkpoint.infos, name: headers_only(**{**V3, "experts": 5}).infos[name]}
    with pytest.raises(CheckpointError, match=r"e_score_correction_bias is \[5\] but config.json .*\[4\]"):
        tensor_rules(replace(checkpoint, infos=infos))


# -------------------------------------------------------- exported and resharded


@pytest.mark.parametrize("quant", few(["none", "int8", "fp8"], "int8"))
def test_round_trips_end_with_the_same_directory(quant: str, tmp_path: Path) -> None:
    source = make_llama(**V3, dtype="bfloat16")
    export(model=str(source), quant=quant, out=str(tmp_path / "start"), evaluate=False, quiet=True)
    export(model=str(source), quant=quant, out=str(tmp_path / "two"), evaluate=False, quiet=True, tp=2, timeout=60.0)
    start = digests(tmp_path / "start")
    assert digests(tmp_path / "two") == start
    sharded = resharded(tmp_path / "start", tmp_path / "sharded", tp=4, ep=2, pp=2)
    assert diff_checkpoints(tmp_path / "start", sharded).equal
    assert digests(resharded(sharded, tmp_path / "back")) == start
    dcp = resharded(sharded, tmp_path / "dcp", format="dcp", tp=2, pp=3)
    assert digests(resharded(dcp, tmp_path / "from-dcp")) == start
    for found in (tmp_path / "start", sharded):
        assert inspect_checkpoint(found).warnings == []
        assert verify_checkpoint(found, source).problems == []
    rows = {row.name: (row.kind, row.count, row.number_format) for row in inspect_checkpoint(sharded).rows}
    stored = "bf16" if quant == "none" else quant
    assert rows["self_attn.kv_a_proj_with_mqa"] == ("linear", 3, stored)
    assert rows["self_attn.kv_a_layernorm"] == ("norm", 3, "bf16")
    assert rows["mlp.gate"] == ("router", 2, "bf16")
    assert (rows["mlp.down_proj"][1], rows["mlp.shared_experts.down_proj"][1]) == (1, 2)


@pytest.mark.parametrize("model_type", ["deepseek_v3", "deepseek_v2"])
@pytest.mark.parametrize("format_name", ["trtllm", "vllm-sharded", "megatron"])
def test_formats_that_have_no_place_for_it(model_type: str, format_name: str, tmp_path: Path) -> None:
    source = make_llama(**{**V3, "model_type": model_type})
    with pytest.raises(PlanError, match=rf"--format {format_name}\b") as caught:
        resharded(source, tmp_path / "out", format=format_name, tp=2)
    text = str(caught.value)
    assert "latent.q_a" in text
    assert "hf and dcp can" in text or "--format hf and --format dcp hold them" in text
    assert "quantised" not in text
    assert not list(tmp_path.iterdir())


# -------------------------------------------------- layers that only draft tokens


def with_drafting_layer(source: Path, target: Path, **config: Any) -> Path:
    """As the published checkpoints have it: one layer more than num_hidden_layers, with modules of its own."""

    def add(tensors: dict[str, torch.Tensor]) -> None:
        last = {name: t for name, t in tensors.items() if name.startswith("model.layers.2.")}
        tensors |= {name.replace("layers.2.", "layers.3.", 1): t.clone() for name, t in last.items()}
        tensors["model.layers.3.eh_proj.weight"] = torch.ones(128, 256, dtype=torch.bfloat16)
        tensors["model.layers.3.shared_head.norm.weight"] = torch.ones(128, dtype=torch.bfloat16)

    return copy_checkpoint(source, target, tensors=add, config=config)


def test_layers_that_only_draft_tokens_are_carried(tmp_path: Path) -> None:
    plain = make_llama(**V3)
    source = with_drafting_layer(plain, tmp_path / "source", num_nextn_predict_layers=1)
    assert left_out(open_checkpoint(source)) == {}
    assert inspect_checkpoint(source).warnings == []
    result = reshard(checkpoint=str(source), out=str(tmp_path / "sharded"), tp=2, quiet=True)
    assert not result.left_out
    assert not result.warnings
    assert diff_checkpoints(tmp_path / "sharded", source).equal
    export(model=str(source), quant="fp8", out=str(tmp_path / "out"), evaluate=False, quiet=True)
    for found in ("sharded", "out"):
        assert json.loads((tmp_path / found / "config.json").read_text())["num_nextn_predict_layers"] == 1
        assert verify_checkpoint(tmp_path / found, source).problems == []


def test_a_layer_more_than_config_json_counts_is_refused(tmp_path: Path) -> None:
    plain = make_llama(**V3)
    unknown = with_drafting_layer(plain, tmp_path / "unknown")
    with pytest.raises(CheckpointError, match=r"are not part of a deepseek_v3 model of 3 layers: model.layers.3"):
        tensor_rules(open_checkpoint(unknown))
