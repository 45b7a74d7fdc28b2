"""config.json of a TensorRT-LLM checkpoint, from the model's own and back.

Follows ``from_hugging_face`` of TensorRT-LLM's ``LLaMAConfig`` (which Mistral and Mixtral use too), ``QWenConfig`` and
``Phi3Config``. Only what these classes know is written; what they cannot say of a model is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modelexport.checkpoints.rope import RopeConfig, read_rope_config
from modelexport.checkpoints.safetensors.sharded import raise_problems
from modelexport.errors import CheckpointError, PlanError, quoted, shown
from modelexport.sharding.plan import Parallelism
from modelexport.sharding.shard_plan import ShardPlan
from modelexport.system.dtypes import torch_name
from modelexport.system.json_values import JsonValues

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "phi3": "Phi3ForCausalLM",
}
_RENORMALISE = 1  # MoeConfig.ExpertScaleNormalizationMode.RENORMALIZE
_NEEDED = ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size")
# The same in both: TensorRT-LLM's key, Hugging Face's.
_SAME = {
    "num_hidden_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_key_value_heads",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_position_embeddings",
    "head_size": "head_dim",
}


def engine_config(
    plan: ShardPlan, config: Mapping[str, Any], quantization: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """TensorRT-LLM's config.json for a model and a parallelism.

    Args:
        config: the model's config.json.
        quantization: its ``quantization``; None: nothing is quantised.

    Raises:
        PlanError: TensorRT-LLM's has no place for the model's architecture, or for something in its config.json;
            everything that has none.
        CheckpointError: a value of the model's is missing or of the wrong kind.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise PlanError(f"--format trtllm: no config.json for '{shown(model_type)}'; there is for {known}")
    read, rope = JsonValues(config), read_rope_config(config)
    heads = read.whole("num_attention_heads")
    found: dict[str, Any] = {
        "architecture": ARCHITECTURES[model_type],
        "dtype": torch_name(next(rule.dtype for rule in plan.rules.values() if rule.role == "embedding")),
        "logits_dtype": "float32",
        **{key: read.whole(own) for key, own in _SAME.items() if read.has(own)},
        "num_key_value_heads": read.whole("num_key_value_heads", heads),
        "head_size": read.whole("head_dim", max(1, read.whole("hidden_size") // heads)),
        "hidden_act": read.text("hidden_act", "silu"),
        "norm_epsilon": read.number("rms_norm_eps", 1e-6),
        "position_embedding_type": "rope_gpt_neox",
        "rotary_base": 10000.0 if rope.theta is None else rope.theta,
        "rotary_scaling": _scaling(rope),
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
        # The vocabulary's rows are spread over the ranks, so that no rank holds (or writes) the whole of it.
        "use_parallel_embedding": plan.parallelism.tp > 1,
        "embedding_sharding_dim": 0,
        "mapping": _mapping(plan.parallelism),
        "quantization": dict(quantization or {"quant_algo": None, "kv_cache_quant_algo": None}),
    }
    return found | _of_family(model_type, read, rope, plan, found)


def _scaling(rope: RopeConfig) -> dict[str, Any] | None:
    """The scaling of the rotary embedding, but for what has a key of its own."""
    if rope.kind == "default":
        return None
    own = ("rope_theta", "partial_rotary_factor")
    said = {key: value for key, value in rope.scaling.content.items() if key not in own}
    return {**said, "type": rope.kind, "rope_type": rope.kind}


def _mapping(grid: Parallelism) -> dict[str, int]:
    return {
        "world_size": grid.tp * grid.pp,
        "tp_size": grid.tp,
        "pp_size": grid.pp,
        "moe_tp_size": grid.tp // grid.ep,
        "moe_ep_size": grid.ep,
    }


def _of_family(
    model_type: str, read: JsonValues, rope: RopeConfig, plan: ShardPlan, found: Mapping[str, Any]
) -> dict[str, Any]:
    biased = {rule.role for rule in plan.rules.values() if rule.parameter == "bias"}
    activation = found["hidden_act"]
    gated = "swiglu" if activation == "silu" else activation  # TensorRT-LLM's name where gate and up are one array
    if model_type == "phi3":
        return {"hidden_act": gated, **_rope_of_phi3(read, rope)}
    if model_type == "qwen2":
        return {"attn_bias": True, "mlp_bias": False, "qwen_type": "qwen2"}
    of_attention = biased & {"attention.q", "attention.k", "attention.v", "attention.o"}
    of_mlp = biased & {"mlp.gate", "mlp.up", "mlp.down"}
    for there, every in ((of_attention, 4), (of_mlp, 3)):
        if there and len(there) < every:
            raise PlanError(
                f"--format trtllm: only {', '.join(sorted(there))} have biases; its config.json can only say that all "
                "of the attention or of the MLP have, or none"
            )
    biases = {"attn_bias": bool(of_attention), "mlp_bias": bool(of_mlp)}
    if model_type != "mixtral":
        return biases
    experts, chosen = read.whole("num_local_experts"), read.whole("num_experts_per_tok")
    moe = {"num_experts": experts, "top_k": chosen, "normalization_mode": _RENORMALISE}
    return {**biases, "hidden_act": gated, "moe": moe}


def _rope_of_phi3(read: JsonValues, rope: RopeConfig) -> dict[str, Any]:
    """Phi-3 spells a rotary embedding for long texts out in keys of its own."""
    found = {"rotary_pct": rope.part}
    if rope.kind == "default":
        return found
    if rope.kind not in ("longrope", "su") or not read.has("original_max_position_embeddings"):
        raise PlanError(
            f"--format trtllm: its config.json for Phi-3 has no place for a rope_scaling '{shown(rope.kind)}'"
        )
    return {
        **found,
        "rotary_scaling": None,
        "position_embedding_type": "long_rope",
        "original_max_position_embeddings": read.whole("original_max_position_embeddings"),
        "longrope_scaling_short_factors": list(rope.scaling.numbers("short_factor")),
        "longrope_scaling_long_factors": list(rope.scaling.numbers("long_factor")),
    }


def read_mapping(directory: Path, engine: Mapping[str, Any]) -> Parallelism:
    """The parallelism that a TensorRT-LLM checkpoint is cut for.

    Raises:
        CheckpointError: its config.json contradicts itself, or tells of something that the reader cannot undo
            (an embedding cut along its features); everything that is wrong.
    """
    mapping = engine.get("mapping")
    if not isinstance(mapping, dict):
        raise CheckpointError(f"{directory}: its config.json has no mapping, as TensorRT-LLM's has")
    problems = []

    def size(key: str, default: int) -> int:
        value = mapping.get(key, default)
        if type(value) is int and (value > 0 or value == -1):  # -1: not told
            return default if value == -1 else value
        problems.append(f"mapping.{key} is {quoted(value)}, a positive whole number is needed")
        return 1

    tp, pp = size("tp_size", 1), size("pp_size", 1)
    ep = size("moe_ep_size", 1)
    moe_tp = size("moe_tp_size", max(1, tp // ep))
    if ep > 1 and ep * moe_tp != tp:
        problems.append(f"mapping: moe_tp_size {moe_tp} times moe_ep_size {ep} is not tp_size {tp}")
    world = size("world_size", tp * pp)
    if world != tp * pp:
        problems.append(f"mapping: world_size {world} is not tp_size {tp} times pp_size {pp}")
    if engine.get("use_parallel_embedding") and engine.get("embedding_sharding_dim", 0) != 0:
        problems.append(
            f"embedding_sharding_dim is {engine['embedding_sharding_dim']}: an embedding that is cut along its "
            "features is not read; convert it with embedding_sharding_dim 0"
        )
    raise_problems(directory / "config.json", problems)
    return Parallelism(tp, pp, ep)


def model_config(directory: Path, engine: Mapping[str, Any]) -> dict[str, Any]:
    """The model's config.json, as far as TensorRT-LLM's tells it.

    Raises:
        CheckpointError: it does not tell enough; asks for the model's own.
    """
    kinds = {architecture: kind for kind, architecture in ARCHITECTURES.items()}
    architecture = engine.get("architecture")
    lacking = [key for key in _NEEDED if not isinstance(engine.get(key), int)]
    if architecture not in kinds or lacking:
        why = f"lacks {', '.join(lacking)}" if lacking else f"is for '{architecture}'"
        raise CheckpointError(
            f"{directory}: its config.json, which is TensorRT-LLM's, {why}: the model's tensors cannot be told "
            "from it; give --config DIR, the directory or file of the model's config.json"
        )
    kind = kinds[architecture]
    moe = engine["moe"] if isinstance(engine.get("moe"), dict) else {}
    found: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": kind,
        "dtype": engine.get("dtype"),
        "hidden_act": "silu" if engine.get("hidden_act") == "swiglu" else engine.get("hidden_act"),
        "tie_word_embeddings": bool(engine.get("tie_word_embeddings", engine.get("share_embedding_table", False))),
        "rope_theta": engine.get("rotary_base"),
        "rope_scaling": engine.get("rotary_scaling"),
        "rms_norm_eps": engine.get("norm_epsilon"),
        **{own: engine.get(key) for key, own in _SAME.items()},
    }
    if kind in ("llama", "mistral"):
        found |= {"attention_bias": bool(engine.get("attn_bias")), "mlp_bias": bool(engine.get("mlp_bias"))}
    if kind == "mixtral":
        found |= {"num_local_experts": moe.get("num_experts"), "num_experts_per_tok": moe.get("top_k")}
    if kind == "phi3":
        found["partial_rotary_factor"] = engine.get("rotary_pct")
        if engine.get("position_embedding_type") == "long_rope":
            found["original_max_position_embeddings"] = engine.get("original_max_position_embeddings")
            found["rope_scaling"] = {
                "type": "longrope",
                "short_factor": engine.get("longrope_scaling_short_factors"),
                "long_factor": engine.get("longrope_scaling_long_factors"),
            }
    return {key: value for key, value in found.items() if value is not None}
