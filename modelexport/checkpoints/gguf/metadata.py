"""The metadata of a GGUF file: the values that llama.cpp's loader reads, from config.json.

Follows llama.cpp's own conversion (``convert_hf_to_gguf.py``) and what its loader asks for: ``llama`` is its name for
Llama, Mistral and Mixtral. As there, a sliding window of Mistral's or Qwen2's is not told: the model attends to
everything, which differs only behind the window. What llama.cpp cannot be told is an error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from modelexport.checkpoints.gguf.file import Value, float32_bytes
from modelexport.checkpoints.rope import read_rope_config
from modelexport.errors import CheckpointError, PlanError, shown
from modelexport.system.json_values import JsonValues

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2", "phi3": "phi3"}
# What transformers assumes where config.json is silent.
_CONTEXT = {"llama": 2048, "mistral": 131072, "mixtral": 131072, "qwen2": 32768, "phi3": 4096}
_EPSILON = {"mixtral": 1e-5, "phi3": 1e-5}
_THETA = {"mixtral": 1e6}
_ORIGINAL = "original_max_position_embeddings"
_MOST_HEAD_DIM = 1 << 16  # each feature has a frequency
_FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "BF16": 32, "MXFP4": 38}


@dataclass(frozen=True)
class Rope:
    """The rotary embedding: values for the header, and tensors of factors (float32) by name."""

    values: Mapping[str, Value]
    factors: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    def arrays(self) -> dict[str, bytes]:
        """The factors as they are stored."""
        return {name: float32_bytes(each, name) for name, each in self.factors.items()}


def architecture(config: Mapping[str, Any]) -> str:
    """llama.cpp's name for the model's architecture.

    Raises:
        PlanError: it has none that is known here, or the model's activation is not the one that its graph has.
    """
    model_type = str(config.get("model_type"))
    if model_type not in ARCHITECTURES:
        raise PlanError(
            f"--format gguf: no names are known for '{shown(model_type)}'; they are for {', '.join(ARCHITECTURES)}"
        )
    activation = config.get("hidden_act") or "silu"
    if activation != "silu":
        raise PlanError(
            f"--format gguf: hidden_act is '{shown(activation)}', and llama.cpp computes silu in such a model"
        )
    return ARCHITECTURES[model_type]


def model_values(config: Mapping[str, Any], *, vocab: int, rope: Rope) -> dict[str, Value]:
    """The model's numbers, under llama.cpp's keys.

    Raises:
        PlanError: see :func:`architecture`.
        CheckpointError: a value is missing or of the wrong kind.
    """
    name, model_type = architecture(config), str(config["model_type"])
    read = JsonValues(config)
    heads = read.whole("num_attention_heads")
    head_dim = _head_dim(read)
    found: dict[str, Value] = {
        "block_count": read.whole("num_hidden_layers"),
        "context_length": read.whole("max_position_embeddings", _CONTEXT[model_type]),
        "embedding_length": read.whole("hidden_size"),
        "feed_forward_length": read.whole("intermediate_size"),
        "attention.head_count": heads,
        "attention.head_count_kv": read.whole("num_key_value_heads", heads),
        "attention.layer_norm_rms_epsilon": read.number("rms_norm_eps", _EPSILON.get(model_type, 1e-6)),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "vocab_size": vocab,
    }
    if model_type == "mixtral":
        found["expert_count"] = read.whole("num_local_experts")
        found["expert_used_count"] = read.whole("num_experts_per_tok", 2)
    if model_type == "phi3":
        found["attention.sliding_window"] = read.whole("sliding_window", 0, least=0)
    found |= rope.values
    return {"general.architecture": name, **{f"{name}.{key}": value for key, value in found.items()}}


def file_values(kinds: Mapping[str, int], mixture: int | None = None) -> dict[str, Value]:
    """The value for the type of most weights, or for the mixture of types.

    Args:
        kinds: ggml types -> bytes of linears in each.
        mixture: llama.cpp's number of the mixture that assigned them; None: there was none.
    """
    main = max(kinds, key=lambda name: kinds[name])
    quantised = mixture is not None or any(name not in ("F32", "F16", "BF16") for name in kinds)
    number = _FILE_TYPES[main] if mixture is None else mixture
    return {"general.file_type": number, **({"general.quantization_version": 2} if quantised else {})}


def _head_dim(read: JsonValues) -> int:
    heads = read.whole("num_attention_heads")
    return read.whole("head_dim", max(1, read.whole("hidden_size") // heads), most=_MOST_HEAD_DIM)


def read_rope(config: Mapping[str, Any]) -> Rope:
    """The rotary embedding, in llama.cpp's terms.

    Raises:
        PlanError: llama.cpp has nothing like it.
        CheckpointError: a value is missing or of the wrong kind.
    """
    read, said = JsonValues(config), read_rope_config(config)
    model_type = str(config.get("model_type"))
    head_dim, base = _head_dim(read), said.theta or _THETA.get(model_type, 1e4)
    kind, found = said.kind, said.scaling
    values: dict[str, Value] = {"rope.dimension_count": int(head_dim * said.part), "rope.freq_base": base}
    if kind == "default":
        return Rope(values)
    if kind == "linear":
        scaled: dict[str, Value] = {"rope.scaling.type": "linear", "rope.scaling.factor": found.number("factor")}
        return Rope(values | scaled)
    if kind == "yarn":
        return Rope(values | _yarn(found, read))
    if kind == "llama3":
        return Rope(values, {"rope_freqs.weight": _llama3(found, base, head_dim)})
    if kind in ("longrope", "su") and model_type == "phi3":
        return _longrope(found, read, values)
    raise PlanError(f"--format gguf: llama.cpp has no rotary embedding of type '{shown(kind)}' for '{model_type}'")


def _yarn(found: JsonValues, read: JsonValues) -> dict[str, Value]:
    """YaRN (Peng et al., 2023); llama.cpp derives the attention's factor from the scale, as YaRN does."""
    own = [key for key in ("attention_factor", "mscale", "mscale_all_dim") if found.has(key)]
    if own or found.content.get("truncate") is False:
        what = ", ".join(own) or "truncate false"
        raise PlanError(f"--format gguf: rope_scaling of type yarn has {what}, which llama.cpp cannot be told")
    context = _CONTEXT[str(read.content["model_type"])]
    original = found if found.has(_ORIGINAL) else None
    values: dict[str, Value] = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": found.number("factor"),
        "rope.scaling.original_context_length": (
            read.whole("max_position_embeddings", context) if original is None else original.whole(_ORIGINAL)
        ),
    }
    for key in ("beta_fast", "beta_slow"):
        if found.has(key):
            values[f"rope.scaling.yarn_{key}"] = found.number(key)
    return values


def _llama3(found: JsonValues, base: float, head_dim: int) -> tuple[float, ...]:
    """By what Llama 3.1 divides each frequency: 1 for short waves, the factor for long ones, smoothly between."""
    factor = found.number("factor", 8.0)
    low, high = found.number("low_freq_factor", 1.0), found.number("high_freq_factor", 4.0)
    if high <= low:
        raise CheckpointError(f"{found.where}: high_freq_factor {high} is not above low_freq_factor {low}")
    original = found.number(_ORIGINAL, 8192)
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


def _longrope(found: JsonValues, read: JsonValues, values: dict[str, Value]) -> Rope:
    """LongRoPE (Ding et al., 2024): a factor for each frequency, for short texts and for long ones."""
    holder = read if read.has(_ORIGINAL) else found
    if not holder.has(_ORIGINAL):
        raise PlanError("--format gguf: rope_scaling of type longrope lacks original_max_position_embeddings")
    original, most = holder.whole(_ORIGINAL, least=2), read.whole("max_position_embeddings", _CONTEXT["phi3"])
    scale = most / original
    usual = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
    values = {
        **values,
        "rope.scaling.original_context_length": original,
        "rope.scaling.attn_factor": found.number("attention_factor", usual),
    }
    half = int(str(values["rope.dimension_count"])) // 2
    factors = {}
    for which in ("long", "short"):
        own = found.numbers(f"{which}_factor")
        if len(own) != half:
            raise PlanError(f"--format gguf: rope_scaling.{which}_factor has {len(own)} numbers, the heads want {half}")
        factors[f"rope_factors_{which}.weight"] = own
    return Rope(values, factors)
