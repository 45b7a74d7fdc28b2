"""GPTQ's layout: 4- or 8-bit integers in groups of input channels; read by vLLM (symmetric), SGLang, transformers.

The tensors are described in ``_gptq.py``. Symmetric formats are written as GPTQModel's format "gptq", whose zero
points are stored minus one, since every reader takes it. Asymmetric ones are written as "gptq_v2", which stores them as
they are: minus one, a zero point of 0 would borrow from its neighbour in the word, and GPTQModel's own loader carries
it back only in part.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from modelexport.errors import CheckpointError, PlanError, shown
from modelexport.quantization.methods import _gptq
from modelexport.quantization.methods.base import (
    ModelQuantization,
    QuantizationConfig,
    QuantizationFiles,
    Scheme,
    StoredTensorSpec,
    WeightSlice,
    is_size,
    mapping,
    optional,
    strings,
)

if TYPE_CHECKING:
    from torch import Tensor

    from modelexport.quantization.methods.base import NumberFormatProtocol

METHOD = "gptq"
HOLDS_HEADS = True
FORMAT = "gptq"
DESCRIPTION = "GPTQ's words, in Hugging Face's files"
HUB_LIBRARY = "transformers"
SCALES = "F16"
"""What AutoGPTQ and GPTQModel write, and the one dtype that all of their kernels compute in. vLLM takes any dtype and
rounds it to that of the model as it loads."""
KV_SCALES: Mapping[str, str] = {}
SIDE_FILES: tuple[str, ...] = ("quantize_config.json",)
KV_SHAPE: tuple[int, ...] = ()

_BITS = (4, 8)
_LONGEST = 1 << 16  # of a pattern, in characters
_FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
_FUSED |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}


def read(value: Mapping[str, Any]) -> QuantizationConfig:
    """Reads the ``quantization_config`` of AutoGPTQ, GPTQModel, transformers or ourselves.

    ``dynamic``'s rules are read in their order: those with "-:" keep modules, the others give modules other bits,
    groups or symmetry. Rules about anything that only decides how a weight was quantised change nothing here.

    The method is "gptq" where the tensors are as we write them; else "gptq_v1" or "gptq_v2", which read the others.

    Raises:
        CheckpointError: another layout, another number of bits than 4 or 8, or a part of it has the wrong type.
    """
    layout = str(value.get("checkpoint_format") or value.get("format") or "gptq").lower()
    if layout not in ("gptq", "gptq_v2"):
        raise CheckpointError(
            f"config.json: quantization_config: gptq checkpoint_format '{shown(layout)}' is not known here; "
            "known: gptq, gptq_v2; give the unquantised model, or one converted to these"
        )
    if value.get("pack_dtype", "int32") not in ("int32", None):
        raise CheckpointError(
            f"config.json: quantization_config: pack_dtype is '{shown(value['pack_dtype'])}', not int32"
        )
    only = _only(value)
    schemes: list[Scheme] = []
    ignored: list[str] = []
    quantising = ""  # of the rules before: what they mean is quantised, whatever later ones keep
    for pattern, changes in (optional(value.get("dynamic"), "dynamic") or {}).items():
        skips, rule = pattern.startswith("-:"), pattern.removeprefix("-:").removeprefix("+:")
        if skips or changes is False:
            ignored.append(f"re:{quantising}{only}(?:{rule})")
        else:
            merged = {**value, **mapping(changes, f"dynamic['{pattern}']")}
            schemes.append(_scheme(merged, pattern, layout, f"re:{only}(?:{rule})"))
            quantising += f"(?!{rule})"
        if skips and len(quantising) > _LONGEST:
            raise CheckpointError(
                f"config.json: quantization_config: dynamic has {len(schemes):,} rules that quantise before "
                f"'{shown(pattern)}', which keeps: put those that keep first"
            )
    if not value.get("lm_head", False):
        ignored.append("lm_head")
    schemes.append(_scheme(value, METHOD, layout, f"re:{only}" if only else "Linear"))
    method = METHOD if all(map(_is_ours, schemes)) else {"gptq": "gptq_v1"}.get(layout, layout)
    spelled = tuple(replace(scheme, method=method) for scheme in schemes)
    return QuantizationConfig(method, layout, None, spelled, tuple(ignored), None, "part")


def _is_ours(scheme: Scheme) -> bool:
    """Returns whether its tensors are just as we would write them."""
    return "actorder" not in scheme.weights and scheme.symmetric is (scheme.format == "gptq")


def _only(value: Mapping[str, Any]) -> str:
    """A regular expression that must match ahead in a name for its module to be quantised; empty: any name."""
    listed = value.get("modules_in_block_to_quantize") or []
    if not isinstance(listed, list):
        raise CheckpointError(
            f"config.json: quantization_config: modules_in_block_to_quantize must be a list, is {shown(listed)}"
        )
    names: list[str] = []
    for item in listed:  # a list of names, or of lists of names
        names += strings(item if isinstance(item, list) else [item], "modules_in_block_to_quantize")
    if names and value.get("lm_head", False):
        names.append("lm_head")
    return f"(?=.*(?:{'|'.join(map(re.escape, names))}))" if names else ""


def _scheme(value: Mapping[str, Any], name: str, layout: str, target: str) -> Scheme:
    """The scheme of the modules that ``target`` means, from ``value``."""
    bits, group, symmetric = value.get("bits"), value.get("group_size", 128), value.get("sym", True)
    if bits not in _BITS or not is_size(bits):
        raise CheckpointError(
            f"config.json: quantization_config: gptq with {shown(bits)} bits ({shown(name)}); 4 and 8 are known: "
            "give the unquantised model"
        )
    if not is_size(group) and group != -1:
        raise CheckpointError(f"config.json: quantization_config: group_size must be a size or -1, is {shown(group)}")
    weights: dict[str, Any] = {
        "num_bits": bits,
        "type": "int",
        "symmetric": bool(symmetric),
        "strategy": "channel" if group == -1 else "group",
        "group_size": None if group == -1 else group,
        "dynamic": False,
    }
    if value.get("desc_act", False) and group != -1:
        weights["actorder"] = "weight" if value.get("static_groups", False) else "group"
    return Scheme(shown(name), (target,), layout, weights, None, None, METHOD)


def tensor_specs(scheme: Scheme, shape: tuple[int, int]) -> dict[str, StoredTensorSpec]:
    """``qweight``, ``qzeros``, ``scales`` and ``g_idx`` of a linear ``[out, in]``.

    Raises:
        CheckpointError: its channels do not fill the words, or its groups do not divide its inputs.
    """
    return _gptq.tensor_specs(scheme, shape)


def refusal(number_format: NumberFormatProtocol, shape: tuple[int, int]) -> str | None:
    """Returns why a linear cannot be gptq, and what to type instead; None where it can."""
    if not number_format.quantised:
        return None
    weights = number_format.weight_arguments()
    if (
        weights.get("type") != "int"
        or weights.get("num_bits") not in _BITS
        or weights.get("strategy") not in ("group", "channel")
        or number_format.input_arguments() is not None
        or number_format.checkpoint_format != "pack-quantized"  # whose words encode() takes
    ):
        return (
            "checkpoint format gptq holds 4- and 8-bit integers with activations as they are (--quant int4, int4-asym, "
            f"int8-wo or int8-wo-asym), not {number_format.name}: choose one of these, or --format hf"
        )
    per_word = 32 // _gptq.bits_of(number_format)
    for what, size in (("out_features", shape[0]), ("in_features", shape[1])):
        if size % per_word:
            return (
                f"checkpoint format gptq packs {per_word} channels into a word, and {what} {size} is not a multiple "
                f"of that: --format hf takes it, or keep the module unquantised"
            )
    return None


def quantization_files(announced: ModelQuantization) -> QuantizationFiles:
    """The number format of most modules; the others', and the modules that are kept, as ``dynamic`` rules.

    Raises:
        PlanError: symmetric and asymmetric formats in one model, whose zero points are stored in different ways.
    """
    groups = announced.groups()
    symmetric = {_gptq.is_symmetric(number_format) for number_format, _ in groups}
    if len(symmetric) > 1:
        names = ", ".join(dict.fromkeys(number_format.name for number_format, _ in groups))
        raise PlanError(
            f"checkpoint format gptq stores zero points in one way for a whole model, but {names} are asked for: "
            "choose symmetric or asymmetric ones, or --format hf"
        )
    settings = {name: _settings(number_format) for name, number_format in announced.formats.items()}
    usual = max(groups, key=lambda group: len(group[1]))[0]
    dynamic: dict[str, Any] = {f"-:{re.escape(name)}$": {} for name in announced.unquantised if name != "lm_head"}
    dynamic |= {f"-:{subtree.pattern}": {} for subtree in announced.subtrees}
    for name, own in settings.items():
        if own != _settings(usual):
            dynamic[f"+:{_pattern(name, settings)}$"] = own
    config = {
        "quant_method": METHOD,
        **_settings(usual),
        "desc_act": False,
        "static_groups": False,
        "checkpoint_format": "gptq" if symmetric == {True} else "gptq_v2",
        "pack_dtype": "int32",
        "lm_head": "lm_head" in announced.formats,
        "dynamic": dynamic,
        "meta": {"quantizer": [f"modelexport:{announced.version}"]},
    }
    return QuantizationFiles(config)


def _settings(number_format: NumberFormatProtocol) -> dict[str, Any]:
    return {
        "bits": _gptq.bits_of(number_format),
        "group_size": _gptq.group_size(number_format),
        "sym": _gptq.is_symmetric(number_format),
    }


def _pattern(name: str, settings: Mapping[str, Any]) -> str:
    """A pattern for a module, and for the one that vLLM makes of it and its siblings before it looks for rules."""
    layer, experts, _ = name.partition(".experts.")
    if experts and all(own == settings[name] for other, own in settings.items() if other.startswith(layer + experts)):
        return f"{re.escape(layer)}\\.experts(?:\\..*)?"
    parent, _, last = name.rpartition(".")
    fused = _FUSED.get(last)
    return re.escape(name) if fused is None else f"{re.escape(parent)}\\.(?:{last}|{fused})"


def encode(number_format: NumberFormatProtocol, tensors: Mapping[str, Tensor], part: WeightSlice) -> dict[str, Tensor]:
    """``weight_packed``, ``weight_scale``, ``weight_zero_point`` -> ``qweight``, ``qzeros``, ``scales``, ``g_idx``."""
    return _gptq.encode(number_format, tensors, part)


def decode(number_format: NumberFormatProtocol, tensors: Mapping[str, Tensor], part: WeightSlice) -> dict[str, Tensor]:
    """The inverse of :func:`encode`, and as well of what others write.

    Raises:
        CheckpointError: the columns were grouped by activation order, or the format is symmetric and its zero points
            are not in the middle.
    """
    return _gptq.decode(number_format, tensors, part, minus_one=False)


def dequantise(number_format: NumberFormatProtocol, tensors: Mapping[str, Tensor], part: WeightSlice) -> Tensor:
    """The weight, float32 ``[out, in]``, whatever ``g_idx`` says of its columns; they are in its own order.

    :func:`decode` refuses columns that were grouped by activation order, since no number format has a group of its own
    for each column. Their values are exact here, as those of a number format are.

    Raises:
        CheckpointError: a column's group is none that has scales; or a symmetric format's zero points are not in the
            middle.
    """
    return _gptq.dequantise(number_format, tensors, part, minus_one=False)
