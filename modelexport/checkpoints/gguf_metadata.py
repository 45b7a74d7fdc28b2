"""What a GGUF file says of its model: the values that llama.cpp's loader reads, from config.json.

Follows llama.cpp's own conversion (``convert_hf_to_gguf.py``) and what its loader asks for: ``llama`` is its name for
Llama, Mistral and Mixtral. As there, a sliding window of Mistral's or Qwen2's is not told: the model attends to
everything, which differs only behind the window. What llama.cpp cannot be told is an error.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from modelexport.checkpoints.gguf_file import Value
from modelexport.errors import PlanError

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2", "phi3": "phi3"}
# What transformers assumes where config.json is silent.
_CONTEXT = {"llama": 2048, "mistral": 131072, "mixtral": 131072, "qwen2": 32768, "phi3": 4096}
_EPSILON = {"mixtral": 1e-5, "phi3": 1e-5}
_THETA = {"mixtral": 1e6}
_FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "BF16": 32, "MXFP4": 38}


@dataclass(frozen=True)
class Rope:
    """The rotary embedding: values for the header, and tensors of factors (float32) by name."""

    values: Mapping[str, Value]
    factors: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    def arrays(self) -> dict[str, bytes]:
        """The factors as they are stored."""
        return {name: struct.pack(f"<{len(each)}f", *each) for name, each in self.factors.items()}


def architecture(config: Mapping[str, Any]) -> str:
    """llama.cpp's name for the model's architecture.

    Raises:
        PlanError: it has none that is known here, or the model's activation is not the one that its graph has.
    """
    model_type = str(config.get("model_type"))
    if model_type not in ARCHITECTURES:
        raise PlanError(
            f"--format gguf: no names are known for '{model_type}'; they are for {', '.join(ARCHITECTURES)}"
        )
    activation = config.get("hidden_act") or "silu"
    if activation != "silu":
        raise PlanError(f"--format gguf: hidden_act is '{activation}', and llama.cpp computes silu in such a model")
    return ARCHITECTURES[model_type]


def model_values(config: Mapping[str, Any], *, vocab: int, rope: Rope) -> dict[str, Value]:
    """The model's numbers, under llama.cpp's keys.

    Raises:
        PlanError: see :func:`architecture`.
    """
    name, model_type = architecture(config), str(config["model_type"])
    heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
    head_dim = int(config.get("head_dim") or hidden // heads)
    found: dict[str, Value] = {
        "block_count": int(config["num_hidden_layers"]),
        "context_length": int(config.get("max_position_embeddings") or _CONTEXT[model_type]),
        "embedding_length": hidden,
        "feed_forward_length": int(config["intermediate_size"]),
        "attention.head_count": heads,
        "attention.head_count_kv": int(config.get("num_key_value_heads") or heads),
        "attention.layer_norm_rms_epsilon": float(config.get("rms_norm_eps") or _EPSILON.get(model_type, 1e-6)),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "vocab_size": vocab,
    }
    if model_type == "mixtral":
        found["expert_count"] = int(config["num_local_experts"])
        found["expert_used_count"] = int(config.get("num_experts_per_tok") or 2)
    if model_type == "phi3":
        found["attention.sliding_window"] = int(config.get("sliding_window") or 0)
    found |= rope.values
    return {"general.architecture": name, **{f"{name}.{key}": value for key, value in found.items()}}


def file_values(kinds: Mapping[str, int]) -> dict[str, Value]:
    """What the file says of its types: that of most weights.

    Args:
        kinds: ggml types -> bytes of linears in each.
    """
    main = max(kinds, key=lambda name: kinds[name])
    quantised = any(name not in ("F32", "F16", "BF16") for name in kinds)
    return {"general.file_type": _FILE_TYPES[main], **({"general.quantization_version": 2} if quantised else {})}


def read_rope(config: Mapping[str, Any]) -> Rope:
    """The rotary embedding, in llama.cpp's terms. (transformers 5 keeps all of it in ``rope_parameters``.)

    Raises:
        PlanError: llama.cpp has nothing like it.
    """
    joined = config.get("rope_parameters")
    found = dict(joined if isinstance(joined, dict) else config.get("rope_scaling") or {})
    model_type = str(config.get("model_type"))
    head_dim = int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    base = float(found.get("rope_theta") or config.get("rope_theta") or _THETA.get(model_type, 1e4))
    part = float(found.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0)
    kind = str(found.get("rope_type") or found.get("type") or "default")
    values: dict[str, Value] = {"rope.dimension_count": int(head_dim * part), "rope.freq_base": base}
    if kind == "default":
        return Rope(values)
    if kind == "linear":
        scaled: dict[str, Value] = {"rope.scaling.type": "linear", "rope.scaling.factor": float(found["factor"])}
        return Rope(values | scaled)
    if kind == "yarn":
        return Rope(values | _yarn(found, config))
    if kind == "llama3":
        return Rope(values, {"rope_freqs.weight": _llama3(found, base, head_dim)})
    if kind in ("longrope", "su") and model_type == "phi3":
        return _longrope(found, config, values)
    raise PlanError(f"--format gguf: llama.cpp has no rotary embedding of type '{kind}' for '{model_type}'")


def _yarn(found: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Value]:
    """YaRN (Peng et al., 2023); llama.cpp derives the attention's factor from the scale, as YaRN does."""
    own = [key for key in ("attention_factor", "mscale", "mscale_all_dim") if found.get(key) is not None]
    if own or found.get("truncate") is False:
        what = ", ".join(own) or "truncate false"
        raise PlanError(f"--format gguf: rope_scaling of type yarn has {what}, which llama.cpp cannot be told")
    original = found.get("original_max_position_embeddings") or config.get("max_position_embeddings")
    values: dict[str, Value] = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": float(found["factor"]),
        "rope.scaling.original_context_length": int(original or _CONTEXT[str(config["model_type"])]),
    }
    for key in ("beta_fast", "beta_slow"):
        if found.get(key) is not None:
            values[f"rope.scaling.yarn_{key}"] = float(found[key])
    return values


def _llama3(found: Mapping[str, Any], base: float, head_dim: int) -> tuple[float, ...]:
    """By what Llama 3.1 divides each frequency: 1 for short waves, the factor for long ones, smoothly between."""
    factor = float(found.get("factor", 8.0))
    low, high = float(found.get("low_freq_factor", 1.0)), float(found.get("high_freq_factor", 4.0))
    original = float(found.get("original_max_position_embeddings", 8192))
    factors = []
    for i in range(0, head_dim, 2):
        wave = 2 * math.pi * base ** (i / head_dim)
        if wave < original / high:
            factors.append(1.0)
        elif wave > original / low:
            factors.append(factor)
        else:
            smooth = (original / wave - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return tuple(factors)


def _longrope(found: Mapping[str, Any], config: Mapping[str, Any], values: dict[str, Value]) -> Rope:
    """LongRoPE (Ding et al., 2024): a factor for each frequency, for short texts and for long ones."""
    original = config.get("original_max_position_embeddings") or found.get("original_max_position_embeddings")
    most = int(config.get("max_position_embeddings") or _CONTEXT["phi3"])
    if not original:
        raise PlanError("--format gguf: rope_scaling of type longrope lacks original_max_position_embeddings")
    scale = most / int(original)
    factor = found.get("attention_factor") or (
        math.sqrt(1 + math.log(scale) / math.log(int(original))) if scale > 1 else 1.0
    )
    values = {
        **values,
        "rope.scaling.original_context_length": int(original),
        "rope.scaling.attn_factor": float(factor),
    }
    half = int(str(values["rope.dimension_count"])) // 2
    factors = {}
    for which in ("long", "short"):
        own = tuple(float(each) for each in found[f"{which}_factor"])
        if len(own) != half:
            raise PlanError(f"--format gguf: rope_scaling.{which}_factor has {len(own)} numbers, the heads want {half}")
        factors[f"rope_factors_{which}.weight"] = own
    return Rope(values, factors)
