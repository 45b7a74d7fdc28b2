"""Our shard plans against transformers: its own tensor and expert parallelism, and what a rank's part computes.

transformers cuts with DTensors; here each rank saves what it holds, and that must be the slice that
:class:`~modelexport.sharding.shard_plan.ShardPlan` gives. It refuses fewer key/value heads than ranks, gathers the
outputs of what is fused on disk, and leaves DeepSeek-V3's attention whole; for these, a rank's part is made a small
model of its own, and the sum over the ranks of what their parts compute must be what the whole computes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from modelexport.checkpoints.safetensors.file import open_checkpoint
from modelexport.models.rules import tensor_rules
from modelexport.sharding.boxes import slices
from modelexport.sharding.plan import Parallelism
from modelexport.sharding.shard_plan import ShardPlan, build_shard_plan
from tests.helpers.marks import extended
from tests.helpers.models import copy_checkpoint, make_llama
from tests.helpers.shard_plans import layers_of
from tests.helpers.tiny_models import tiny_checkpoint
from tests.helpers.warm import run_warm

pytestmark = pytest.mark.timeout(240)

SHAPE = {"heads": 8, "kv_heads": 4, "hidden": 128, "intermediate": 192, "layers": 1, "vocab": 211, "dtype": "float32"}
MODELS = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {"tied": True},
    "phi3": {},
    "mixtral": {"experts": 4},
    "deepseek_v2": {"layers": 2, "mlp_bias": True, "attention_bias": True},
    "deepseek_v3": {"query_rank": None, "dense_layers": 0},
}


def checkpoint(model_type: str, **changes: object) -> Path:
    return make_llama(**{"model_type": model_type, **SHAPE, **MODELS[model_type], **changes})


def plan_of(directory: Path, parallelism: Parallelism) -> ShardPlan:
    rules = tensor_rules(open_checkpoint(directory))
    return build_shard_plan(rules, parallelism, layers=layers_of(rules))


def part(plan: ShardPlan, tensors: dict[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    """What a rank holds: the rectangles of each tensor one behind the other."""
    found = {}
    for name in plan.names(rank):
        pieces = [tensors[name][slices(box)] for _, box in plan.held(name, rank)]
        found[name] = torch.cat(pieces, plan.rules[name].dim or 0) if len(pieces) > 1 else pieces[0]
    return found


def in_memory(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The parameters' names as transformers has them; a layer's experts stacked, gate before up."""
    found: dict[str, torch.Tensor] = {}
    stacks: dict[str, dict[str, list[torch.Tensor]]] = {}
    for name, tensor in tensors.items():
        layer, _, expert = name.replace("block_sparse_moe", "mlp").partition(".experts.")
        if expert:  # in the order of their numbers
            stacks.setdefault(layer, {}).setdefault(expert.split(".")[1], []).append(tensor)
        elif not name.endswith("e_score_correction_bias"):  # a buffer there
            found[layer] = tensor
    for layer, own in stacks.items():
        kinds = ("w1", "w2", "w3") if "w1" in own else ("gate_proj", "down_proj", "up_proj")
        gates, downs, ups = (own[kind] for kind in kinds)
        pairs = [torch.cat([gate, up]) for gate, up in zip(gates, ups, strict=True)]
        found[f"{layer}.experts.gate_up_proj"] = torch.stack(pairs)
        found[f"{layer}.experts.down_proj"] = torch.stack(downs)
    return found


def run_transformers(out: Path, ranks: int, models: dict[str, Path]) -> None:
    arguments = [f"{name}={directory}" for name, directory in models.items()]
    program = "tests.conformance._transformers_tp_rank"
    if ranks == 2:
        done = run_warm("-m", program, str(ranks), str(out), *arguments)
    else:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        done = subprocess.run(
            [sys.executable, *launcher, "-m", program, str(out), *arguments],
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            cwd=Path(__file__).parents[2],
        )
    assert done.returncode == 0, done.stderr[-4000:]


SOME = ("llama", "mixtral")


@pytest.mark.parametrize(
    ("names", "ranks"),
    [
        extended(SOME, 2),
        extended(tuple(MODELS), 2),
        pytest.param(tuple(MODELS), 4, marks=pytest.mark.slow),
    ],
)
def test_each_rank_holds_in_transformers_what_our_plan_gives_it(
    tmp_path: Path, names: tuple[str, ...], ranks: int
) -> None:
    from transformers import AutoModelForCausalLM

    models = {name: checkpoint(name) for name in names}
    run_transformers(tmp_path, ranks, {**models, "ep-mixtral": models["mixtral"]})
    for name, directory in {**models, "ep-mixtral": models["mixtral"]}.items():
        whole = load_file(directory / "model.safetensors")
        plan = plan_of(directory, Parallelism(tp=ranks))
        with torch.no_grad():
            logits = AutoModelForCausalLM.from_pretrained(directory)(torch.arange(1, 17)[None]).logits
        for rank in range(ranks):
            expected = part(plan, whole, rank)
            if name == "ep-mixtral":  # attention is still cut; of the experts, whole ones are dealt out
                dealt = part(plan_of(directory, Parallelism(ep=ranks)), whole, rank)
                expected = {n: t for n, t in expected.items() if ".experts." not in n}
                expected |= {n: t for n, t in dealt.items() if ".experts." in n}
            if name == "deepseek_v3":
                expected |= {n: t for n, t in whole.items() if ".self_attn." in n}
            expected = in_memory(expected)
            found = load_file(tmp_path / f"{name}-rank{rank}.safetensors")
            torch.testing.assert_close(found.pop("logits"), logits, rtol=0, atol=1e-5)
            if name == "qwen2":
                expected["lm_head.weight"] = expected["model.embed_tokens.weight"]  # tied: cut alike
            assert set(found) == set(expected)
            for key, tensor in found.items():
                if name == "phi3" and ("qkv_proj" in key or "gate_up_proj" in key):
                    # Any equal shares of the rows: it gathers the output before it uses it.
                    assert torch.equal(tensor, whole[key].chunk(ranks)[rank]), key
                else:
                    assert torch.equal(tensor, expected[key]), f"{name} {key} on rank {rank} of {ranks}"
            uncut = {key for key, tensor in in_memory(whole).items() if tensor.shape == found[key].shape}
            if name == "deepseek_v3":
                uncut = {key for key in uncut if ".self_attn." not in key}
            low_rank = ("q_a_proj.weight", "q_a_proj.bias", "kv_a_proj_with_mqa.weight", "kv_a_proj_with_mqa.bias")
            row_biases = ("o_proj.bias", "down_proj.bias")
            assert all("norm" in key or key.endswith(("mlp.gate.weight", *row_biases, *low_rank)) for key in uncut), (
                "norms, routers, low-rank projections and the biases of row-parallel linears are whole on every rank, "
                "and nothing else"
            )


TINY = ("cohere2", "gemma2", "gemma3_text", "gpt_neox", "granite", "starcoder2")


@pytest.mark.extended
def test_ranks_of_other_families_hold_what_our_plan_gives_them(tmp_path: Path) -> None:
    """Plain column and row cuts; those of heads that are fused one by one among them."""
    models = {
        name: copy_checkpoint(
            tiny_checkpoint(name),
            tmp_path / name,
            tensors=lambda found: {key: tensor.float() for key, tensor in found.items()},
        )
        for name in TINY
    }
    run_transformers(tmp_path, 2, models)
    for name, directory in models.items():
        whole = load_file(directory / "model.safetensors")
        plan = plan_of(directory, Parallelism(tp=2))
        for rank in range(2):
            found = load_file(tmp_path / f"{name}-rank{rank}.safetensors")
            assert torch.isfinite(found.pop("logits")).all()
            expected = part(plan, whole, rank)
            embedding = next(key for key in expected if "embed" in key)
            head = expected.pop("embed_out.weight", None)
            if head is not None or "lm_head.weight" not in expected:  # renamed as it is loaded; or tied, and cut alike
                expected["lm_head.weight"] = expected[embedding] if head is None else head
            assert set(found) == set(expected)
            for key, tensor in found.items():
                if key == "gpt_neox.embed_in.weight":  # which transformers' plan forgets
                    assert torch.equal(tensor, whole[key])
                    continue
                assert torch.equal(tensor, expected[key]), f"{name} {key} on rank {rank}"
        cut = {key for key, tensor in expected.items() if key in whole and tensor.shape != whole[key].shape}
        matrices = {key for key, tensor in whole.items() if tensor.dim() == 2}
        assert matrices <= cut | {"embed_out.weight"}


def load_part(directory: Path, tensors: dict[str, torch.Tensor], source: Path, ranks: int) -> torch.nn.Module:
    """A rank's part as a model of its own: fewer heads, fewer hidden units."""
    from transformers import AutoModelForCausalLM

    config = json.loads((source / "config.json").read_text())
    if "kv_lora_rank" in config:
        config["moe_intermediate_size"] //= ranks
    else:
        config["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
    config["num_attention_heads"] //= ranks
    config["num_key_value_heads"] = max(1, config["num_key_value_heads"] // ranks)
    config["intermediate_size"] //= ranks
    config["tie_word_embeddings"] = True  # neither end of the model is looked at
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    ends = ("model.embed_tokens.weight", "lm_head.weight")
    own = {name: tensor.contiguous() for name, tensor in tensors.items() if name not in ends}
    own["model.embed_tokens.weight"] = torch.zeros(config["vocab_size"], config["hidden_size"])
    save_file(own, directory / "model.safetensors", metadata={"format": "pt"})
    model, info = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", output_loading_info=True)
    assert not any(info.values()), info
    return model


def computed(model: torch.nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """What the first layer's attention and MLP make of ``x``, before anything is added."""
    layer = model.model.layers[0]
    with torch.no_grad():
        position = model.model.rotary_emb(x, torch.arange(x.shape[1])[None])
        attention = layer.self_attn(hidden_states=x, position_embeddings=position, attention_mask=None)[0]
        mlp = layer.mlp(x)
    return {"attention": attention, "mlp": mlp[0] if isinstance(mlp, tuple) else mlp}


@pytest.mark.parametrize(
    ("model_type", "changes", "ranks"),
    [
        ("llama", {"kv_heads": 2}, 4),  # two ranks share a key/value head
        ("llama", {"kv_heads": 1}, 8),
        ("qwen2", {"kv_heads": 2}, 8),
        ("phi3", {}, 2),
        ("phi3", {"kv_heads": 2}, 4),
        ("mixtral", {"kv_heads": 2}, 4),
        ("deepseek_v3", {}, 4),
        ("deepseek_v3", {"query_rank": 48, "shared_experts": 2}, 8),
    ],
)
def test_the_parts_of_all_ranks_compute_together_what_the_whole_does(
    tmp_path: Path, model_type: str, changes: dict[str, int], ranks: int
) -> None:
    from transformers import AutoModelForCausalLM

    source = checkpoint(model_type, **changes)
    whole = load_file(source / "model.safetensors")
    plan = plan_of(source, Parallelism(tp=ranks))
    x = torch.randn(2, 12, 128, generator=torch.Generator().manual_seed(0))
    wanted = computed(AutoModelForCausalLM.from_pretrained(source, attn_implementation="eager"), x)
    total = {name: torch.zeros_like(value) for name, value in wanted.items()}
    for rank in range(ranks):
        tensors = part(plan, whole, rank)
        for name, tensor in tensors.items():
            if rank > 0 and name.endswith(("o_proj.bias", "down_proj.bias")):
                tensors[name] = torch.zeros_like(tensor)  # added once, to the sum
        for name, value in computed(load_part(tmp_path / str(rank), tensors, source, ranks), x).items():
            total[name] += value
    for name, value in wanted.items():
        torch.testing.assert_close(total[name], value, rtol=0, atol=2e-6 + 2e-6 * float(value.abs().max()))
