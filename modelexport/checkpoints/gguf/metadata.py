"""The metadata of a GGUF file: the values that llama.cpp's loader reads, from config.json.

Read by the table of :mod:`modelexport.checkpoints.gguf.architectures`. As in llama.cpp's own conversion, a sliding
window of Mistral's or Qwen2's is not told: the model attends to everything, which differs only behind the window, and
is a warning. What else llama.cpp cannot be told is an error.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from modelexport.checkpoints.gguf.architectures import ARCHITECTURES, LEFT_OUT, VALUES, Drafts, GgufArchitecture
from modelexport.checkpoints.gguf.defaults import DEFAULTS
from modelexport.checkpoints.gguf.file import Value
from modelexport.checkpoints.gguf.values import HEAD_DIM, LAYERS, MOST_HEAD_DIM, ModelConfig, shortest_float32
from modelexport.checkpoints.rope import RopeConfig, read_rope_config
from modelexport.errors import CheckpointError, PlanError, shown
from modelexport.system.json_values import JsonValues

NEXTN = "nextn_predict_layers"
"""The value that counts the draft layers among the blocks."""
_ORIGINAL = "original_max_position_embeddings"
ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function", "activation", "mlp_hidden_act")
_ROPE_KEYS = {
    "rotary_emb_base": "rope_theta",
    "rotary_pct": "partial_rotary_factor",
    "rope_pct": "partial_rotary_factor",
    "attn_config.rope_theta": "rope_theta",
}
"""Names that older models have for settings of the rotary embedding; a dot leads into a part."""
_FILE_TYPES = {
    "F32": 0,
    "F16": 1,
    "Q4_0": 2,
    "Q4_1": 3,
    "Q8_0": 7,
    "Q5_0": 8,
    "Q5_1": 9,
    "Q2_K": 10,
    "Q3_K": 12,
    "Q4_K": 15,
    "Q5_K": 17,
    "Q6_K": 18,
    "IQ4_NL": 25,
    "IQ4_XS": 30,
    "BF16": 32,
    "MXFP4": 38,
    "NVFP4": 39,
}


@dataclass(frozen=True)
class Rope:
    """The rotary embedding: values for the header, and tensors of factors (float32) by name."""

    values: Mapping[str, Value] = field(default_factory=dict)
    factors: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


def model_types() -> tuple[str, ...]:
    """Every model type that the table has, in its order."""
    return tuple(dict.fromkeys(kind for each in ARCHITECTURES for kind in each.model_types))


_NEVER_NULL = ("hidden_act", "max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_parameters")


def read_config(config: Mapping[str, Any]) -> ModelConfig:
    """config.json with what transformers assumes of such a model where it is silent."""
    # Null says something of its own (no window), but for what no model is without.
    said = {key: value for key, value in config.items() if value is not None or key not in _NEVER_NULL}
    for key, usual in _ROPE_KEYS.items():
        part, _, name = key.rpartition(".")
        holder = said.get(part) if part else said
        if isinstance(holder, Mapping) and name in holder and usual not in said:
            said[usual] = holder[name]
    assumed = DEFAULTS.get(str(config.get("model_type")), {})
    content = {**assumed, **said}
    for key, part in assumed.items():
        if isinstance(part, Mapping) and isinstance(said.get(key), Mapping):
            content[key] = {**part, **said[key]}
    return ModelConfig(content, said=frozenset(key for key, value in said.items() if value is not None))


_MOST_NAMED = 12


def is_written(model_type: str) -> bool:
    """Returns whether the table has a model type."""
    return model_type not in LEFT_OUT and model_type in model_types()


def refusal(model_type: str, unnamed: Sequence[str] = ()) -> str:
    """The reason why a model type that the table lacks is not written.

    Args:
        unnamed: its tensors of which no architecture's names are known, ``*`` in place of numbers.
    """
    if model_type in LEFT_OUT:
        return f"--format gguf: '{model_type}' is not written: {LEFT_OUT[model_type]}; --format hf holds it"
    names = f" and no names are known for {', '.join(unnamed[:_MOST_NAMED])}" if unnamed else ""
    names += f" and {len(unnamed) - _MOST_NAMED} others" if len(unnamed) > _MOST_NAMED else ""
    return (
        f"--format gguf: no architecture of llama.cpp is known for '{shown(model_type)}'{names}; --format hf holds it. "
        f"Known are {', '.join(model_types())}"
    )


def architecture(config: Mapping[str, Any]) -> GgufArchitecture:
    """The model's architecture.

    Raises:
        PlanError: none is known here for its type, or llama.cpp would compute the model otherwise; all that differs.
        CheckpointError: a value is of the wrong kind.
    """
    model_type, read = str(config.get("model_type")), read_config(config)
    if not is_written(model_type):
        raise PlanError(refusal(model_type))
    of_type = [each for each in ARCHITECTURES if model_type in each.model_types]
    found = next((each for each in of_type if not any(rule.check(read) for rule in each.applies)), of_type[-1])
    wrong = [why for rule in (*found.applies, *found.rules) if (why := rule.check(read)) is not None]
    key = next(filter(read.has, ACTIVATIONS), ACTIVATIONS[0])
    activation = read.content.get(key, found.activations[0])
    if activation not in found.activations:
        wrong.append(f"{key} is '{shown(activation)}', and llama.cpp computes {found.activations[0]} in such a model")
    if wrong:
        raise PlanError(f"--format gguf: {'; '.join(wrong)}")
    return found


def constants(config: Mapping[str, Any]) -> dict[str, tuple[tuple[float, ...], str]]:
    """The tensors of a file whose numbers (float32) config.json says: name -> (the numbers, what they are).

    Raises:
        PlanError, CheckpointError: as :func:`architecture` and :func:`read_rope`.
    """
    target, read = architecture(config), read_config(config)
    found = {name: (own, "factors of the rotary embedding") for name, own in read_rope(config).factors.items()}
    for name, source in target.filled.items():
        numbers = (float(str(source.read(read))),) * HEAD_DIM.read(read)
        found |= {f"blk.{i}.{name}": (numbers, "a number of config.json") for i in range(LAYERS.read(read))}
    return found


def draft_kinds(model_type: str) -> list[Drafts]:
    """The draft layers of llama.cpp's architectures of a model type; none where they have no place for them."""
    return [each.drafts for each in ARCHITECTURES if model_type in each.model_types and each.drafts is not None]


def why_no_drafts(model_type: str) -> str:
    """The reason why draft layers that llama.cpp has a place for are not written; ``""`` where it has none, or they
    are."""
    return next((each.no_drafts for each in ARCHITECTURES if model_type in each.model_types and each.no_drafts), "")


def model_values(config: Mapping[str, Any], *, vocab: int, rope: Rope, drafts: int = 0) -> dict[str, Value]:
    """The model's numbers, under llama.cpp's keys.

    Args:
        drafts: draft layers, which are counted among the blocks, too.

    Raises:
        PlanError: see :func:`architecture`.
        CheckpointError: a value is missing or of the wrong kind.
    """
    target, read = architecture(config), read_config(config)
    found: dict[str, Value] = {}
    for key, source in {**VALUES, **target.values}.items():
        value = vocab if key == "vocab_size" else None if source is None else source.read(read)
        if value is not None:
            found[key] = value
    if drafts:
        assert target.drafts is not None
        found["block_count"] = int(str(found["block_count"])) + drafts
        for key, source in target.drafts.listed.items():
            own, value = found[key], source.read(read)
            assert isinstance(own, tuple)
            found[key] = (*own, *[value] * drafts)
        found[NEXTN] = drafts
    found |= rope.values
    return {"general.architecture": target.name, **{f"{target.name}.{key}": value for key, value in found.items()}}


def untold_window(config: Mapping[str, Any]) -> str | None:
    """A warning that llama.cpp's graph of the model has no sliding window, and the model has; None where it is told.

    Raises:
        PlanError, CheckpointError: as :func:`architecture`.
    """
    window, used = config.get("sliding_window"), config.get("use_sliding_window", True)
    if not window or not used or "attention.sliding_window" in architecture(config).values:
        return None
    return (
        f"sliding_window is {shown(window)}, and llama.cpp's graph of such a model has none: it attends to all tokens, "
        "which differs behind the window"
    )


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


def read_rope(config: Mapping[str, Any]) -> Rope:
    """The rotary embedding, in llama.cpp's terms.

    Raises:
        PlanError: llama.cpp has nothing like it.
        CheckpointError: a value is missing or of the wrong kind.
    """
    target, read = architecture(config), read_config(config)
    if target.rotated is None:
        return Rope()
    said = read_rope_config(read.content)
    features = int(str(target.rotated.read(read)))
    if features > MOST_HEAD_DIM:
        raise CheckpointError(
            f"config.json: {features:,} features of a head are rotated; {MOST_HEAD_DIM:,} are believed"
        )
    base = said.theta or 1e4
    part = (
        read.whole("rotary_dim") if "rotary_dim" in read.said else int(features * (said.part if target.partial else 1))
    )
    if target.halved and said.part != 0.5:
        raise PlanError(
            f"--format gguf: rope_parameters.full_attention has partial_rotary_factor {said.part}, and llama.cpp "
            "rotates 0.5 of a head's features in such a model's layers without a sliding window"
        )
    values: dict[str, Value] = {"rope.dimension_count": part, "rope.freq_base": base}
    sliding = _base_of_sliding_layers(read, said.part if target.alike else 1)
    if sliding is not None:
        values["rope.freq_base_swa"] = sliding
    if target.plain_rope:
        values["rope.scaling.type"] = "none"
    return _scaled(target, said, read, values, features)


def _base_of_sliding_layers(read: JsonValues, part: float) -> float | None:
    """The base of layers with a sliding window, of models that have two.

    Args:
        part: of a head's features that llama.cpp rotates in these layers.
    """
    if read.object("rope_parameters").has("sliding_attention"):
        said = read_rope_config(read.content, "sliding_attention")
        if said.kind != "default" or said.part != part:
            raise PlanError(
                f"--format gguf: rope_parameters.sliding_attention has rope_type '{shown(said.kind)}' for {said.part} "
                f"of a head's features, and llama.cpp rotates {'all' if part == 1 else part}, unscaled, in layers with "
                "a sliding window"
            )
        return said.theta
    return read.number("rope_local_base_freq") if read.has("rope_local_base_freq") else None


def _scaled(
    target: GgufArchitecture, said: RopeConfig, read: JsonValues, values: dict[str, Value], features: int
) -> Rope:
    kind, found, base = said.kind, said.scaling, said.theta or 1e4
    if target.proportional:
        if kind != "proportional" or found.number("factor", 1.0) != 1:
            raise PlanError(
                f"--format gguf: rope_parameters.full_attention has rope_type '{shown(kind)}' and factor "
                f"{found.number('factor', 1.0)}, and llama.cpp computes proportional with 1 in such a model"
            )
        turned = int(said.part * features // 2)
        factors = (*(1.0,) * turned, *(_NOT_TURNED,) * (features // 2 - turned))
        return Rope({**values, "rope.dimension_count": features}, {"rope_freqs.weight": factors})
    if kind == "default":
        return Rope(values)
    if kind == "dynamic" and target.alpha and found.has("alpha"):
        # Its base, as transformers' class of the model computes it for all texts that are no longer than it reads.
        return Rope({**values, "rope.freq_base": base * found.number("alpha") ** (features / (features - 2))})
    if not target.plain_rope:
        if kind == "linear":
            scaled: dict[str, Value] = {"rope.scaling.type": "linear", "rope.scaling.factor": found.number("factor")}
            return Rope(values | scaled)
        if kind == "yarn":
            return Rope(values | _yarn(target, found, read))
        if kind == "llama3":
            rotated = features // 2 if target.halved else features
            factors = _llama3(found, base, rotated)
            return Rope(values, {"rope_freqs.weight": (*factors, *(1.0,) * (features // 2 - len(factors)))})
        if kind in ("longrope", "su") and target.longrope:
            return _longrope(found, read, values)
    model_type = read.content.get("model_type")
    raise PlanError(f"--format gguf: llama.cpp has no rotary embedding of type '{shown(kind)}' for '{model_type}'")


def _yarn(target: GgufArchitecture, found: JsonValues, read: JsonValues) -> dict[str, Value]:
    """YaRN (Peng et al., 2023); llama.cpp derives the attention's factor from the scale, as YaRN does."""
    own = [key for key in ("attention_factor", "mscale", "mscale_all_dim") if found.has(key)]
    values: dict[str, Value] = {"rope.scaling.type": "yarn", "rope.scaling.factor": found.number("factor")}
    if target.yarn and own:
        alike = target.yarn == "mscale alike"
        wanted = found.number("mscale_all_dim", 1.0) if alike else 1.0
        if own != ["mscale", "mscale_all_dim"] or found.number("mscale") != wanted:
            needed = "mscale and mscale_all_dim that are the same" if alike else "mscale 1 and an mscale_all_dim"
            listed = ", ".join(f"{key} {shown(found.content[key])}" for key in own)
            raise PlanError(f"--format gguf: rope_scaling has {listed}, and llama.cpp computes with {needed}")
        scale = 0.1 if alike else 1.0  # deepseek2's loader divides by it
        own, values["rope.scaling.yarn_log_multiplier"] = [], scale * found.number("mscale_all_dim")
    if own or (found.content.get("truncate") is False and target.name != "gpt-oss"):
        what = ", ".join(own) or "truncate false"
        raise PlanError(f"--format gguf: rope_scaling of type yarn has {what}, which llama.cpp cannot be told")
    original = found if found.has(_ORIGINAL) else None
    values["rope.scaling.original_context_length"] = (
        read.whole("max_position_embeddings") if original is None else original.whole(_ORIGINAL)
    )
    for key in ("beta_fast", "beta_slow"):
        if found.has(key):
            values[f"rope.scaling.yarn_{key}"] = found.number(key)
    return values


_NOT_TURNED = 1e30  # what a frequency is divided by, as llama.cpp's converter has it
FACTOR_TOLERANCE = 1e-5
"""Of factors of the rotary embedding, relative: others compute them in float32."""


def restore_rope(
    target: GgufArchitecture, known: ModelConfig, values: Mapping[str, Any], factors: Mapping[str, Sequence[float]]
) -> dict[str, Any]:
    """The settings of config.json by which :func:`read_rope` gives the values and the factors that a file has.

    Args:
        known: the model's other settings.
        values: of the file, without the architecture's name.
        factors: tensors of factors by name.

    Raises:
        CheckpointError: no settings give them; or a value is of the wrong kind.
    """
    if target.rotated is None:
        return {}
    said = JsonValues(values, "the GGUF file")
    features = int(str(target.rotated.read(known)))
    part = 0.5 if target.halved else said.whole("rope.dimension_count", features) / features
    base = shortest_float32(said.number("rope.freq_base", 1e4))
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": base}
    if part != 1 or known.has("partial_rotary_factor"):
        rope["partial_rotary_factor"] = part
    found: dict[str, Any] = {}
    kind = said.text("rope.scaling.type", "linear")
    if "rope_freqs.weight" in factors and target.proportional:
        turned = sum(each == 1 for each in factors["rope_freqs.weight"])
        rope |= {"rope_type": "proportional", "partial_rotary_factor": 2 * turned / features}
    elif "rope_freqs.weight" in factors:
        rotated = features // 2 if target.halved else features
        rope |= _restored_llama3(factors["rope_freqs.weight"][: rotated // 2], base, rotated)
    elif factors:
        original = said.whole("rope.scaling.original_context_length")
        rope |= {"rope_type": "longrope", _ORIGINAL: original}
        rope |= {f"{name[13:-7]}_factor": list(map(shortest_float32, own)) for name, own in factors.items()}
        if said.has("rope.scaling.attn_factor"):
            rope["attention_factor"] = shortest_float32(said.number("rope.scaling.attn_factor"))
        found[_ORIGINAL] = original
    elif kind == "yarn" or (kind == "linear" and said.has("rope.scaling.factor")):
        rope |= {"rope_type": kind, "factor": shortest_float32(said.number("rope.scaling.factor"))}
        if kind == "yarn":
            rope |= _restored_yarn(target, said)
    elif kind not in ("none", "linear"):
        raise CheckpointError(f"{said.where}: rope.scaling.type is '{shown(kind)}', which nothing here is read of")
    if not (known.has("rope_local_base_freq") or said.has("rope.freq_base_swa")):
        return {**found, "rope_parameters": rope}
    swa = shortest_float32(said.number("rope.freq_base_swa", 1e4))
    sliding = {"rope_type": "default", "rope_theta": swa}
    if target.alike and "partial_rotary_factor" in rope:
        sliding["partial_rotary_factor"] = part
    return {**found, "rope_parameters": {"full_attention": rope, "sliding_attention": sliding}}


def _restored_yarn(target: GgufArchitecture, said: JsonValues) -> dict[str, Any]:
    found: dict[str, Any] = {_ORIGINAL: said.whole("rope.scaling.original_context_length")}
    for key in ("beta_fast", "beta_slow"):
        if said.has(f"rope.scaling.yarn_{key}"):
            found[key] = shortest_float32(said.number(f"rope.scaling.yarn_{key}"))
    if said.has("rope.scaling.yarn_log_multiplier"):
        scale = shortest_float32(said.number("rope.scaling.yarn_log_multiplier"))
        if target.yarn == "mscale 1":
            found |= {"mscale": 1.0, "mscale_all_dim": scale}
        else:
            found |= dict.fromkeys(("mscale", "mscale_all_dim"), shortest_float32(10 * scale))
    if target.name == "gpt-oss":  # of every such model, and llama.cpp has no word for it
        found["truncate"] = False
    return found


def _restored_llama3(own: Sequence[float], base: float, features: int) -> dict[str, Any]:
    """Settings that give these factors: where several do, the usual ones, and the numbers are the same."""
    for scaling in _usual_llama3(max(own, default=1.0)):
        made = _llama3(JsonValues(scaling), base, features)
        if len(made) == len(own) and all(
            abs(a - b) <= FACTOR_TOLERANCE * abs(b) for a, b in zip(own, made, strict=True)
        ):
            return {"rope_type": "llama3", **scaling}
    raise CheckpointError(
        "rope_freqs.weight holds factors of which no factor, low_freq_factor, high_freq_factor and "
        "original_max_position_embeddings is recognised"
    )


def _usual_llama3(factor: float) -> Iterator[dict[str, float | int]]:
    for high in (4.0, 2.0, 8.0, 16.0, 32.0):
        for original in (8192, *(1 << power for power in range(4, 21) if power != 13)):
            scaling = {"low_freq_factor": 1.0, "high_freq_factor": high, _ORIGINAL: original}
            yield {"factor": shortest_float32(factor), **scaling}


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
    original, most = holder.whole(_ORIGINAL, least=2), read.whole("max_position_embeddings")
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
