"""AWQ's "gemm" layout: 4-bit integers in groups with zero points; read by vLLM, SGLang and transformers.

Follows https://github.com/casper-hansen/AutoAWQ. Of a linear ``[out, in]`` with groups of g:

- ``qweight`` int32 ``[in, out / 8]``: eight output channels a word, nibble i being that of channel ``ORDER[i]``;
- ``qzeros`` int32 ``[in / g, out / 8]``, in the same order;
- ``scales`` ``[in / g, out]``.

A value is (q - zero point) * scale, q and the zero point 0..15: those are our native numbers, which are stored with 8
added. A symmetric format is one whose zero points are all 8.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from modelexport.errors import CheckpointError, PlanError, shown
from modelexport.quantization.methods import _words
from modelexport.quantization.methods.base import (
    Axes,
    ModelQuantization,
    QuantizationConfig,
    QuantizationFiles,
    Scheme,
    StoredTensorSpec,
    WeightSlice,
    is_size,
    strings,
)
from modelexport.system.dtypes import FLOATS

if TYPE_CHECKING:
    from torch import Tensor

    from modelexport.quantization.methods.base import NumberFormatProtocol

METHOD = "awq"
HOLDS_HEADS = True
FORMAT = "awq"
DESCRIPTION = "AutoAWQ's gemm words, in Hugging Face's files"
HUB_LIBRARY = "transformers"
SCALES = "F16"
"""What AutoAWQ, GPTQModel and auto-round write, and the one dtype that all of their kernels compute in. vLLM takes any
dtype and rounds it to that of the model as it loads; transformers runs such models in float16."""
KV_SCALES: Mapping[str, str] = {}
SIDE_FILES: tuple[str, ...] = ("quant_config.json",)
KV_SHAPE: tuple[int, ...] = ()

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_BACK = (0, 4, 1, 5, 2, 6, 3, 7)  # the inverse of it
_BITS = 4
_MIDDLE = 0x88888888 - (1 << 32)  # eight zero points of 8, as int32


def read(value: Mapping[str, Any]) -> QuantizationConfig:
    """Reads the ``quantization_config`` of AutoAWQ, transformers, auto-round or ourselves.

    Raises:
        CheckpointError: another layout than "gemm", another number of bits, or a part of it has the wrong type.
    """
    version = str(value.get("version") or value.get("format") or "gemm").lower()
    if version != "gemm":
        raise CheckpointError(
            f"config.json: quantization_config: awq version '{shown(version)}' is not known here, only 'gemm' is; "
            "give the unquantised model, or one converted to 'gemm'"
        )
    bits = value.get("bits", value.get("w_bit"))
    if bits != _BITS or not is_size(bits):
        raise CheckpointError(f"config.json: quantization_config: awq with {shown(bits)} bits; only {_BITS} are known")
    group = value.get("group_size", value.get("q_group_size"))
    if not is_size(group) and group != -1:
        raise CheckpointError(f"config.json: quantization_config: group_size must be a size or -1, is {shown(group)}")
    symmetric = value.get("zero_point", True) is False or value.get("symmetric") is True
    ignored = strings(value.get("modules_to_not_convert"), "modules_to_not_convert")
    if not value.get("lm_head", False):
        ignored = (*ignored, "lm_head")
    return QuantizationConfig(
        METHOD, version, None, (_scheme(group, symmetric),), tuple(dict.fromkeys(ignored)), None, "part"
    )


def _scheme(group: int, symmetric: bool) -> Scheme:
    weights = {
        "num_bits": _BITS,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "channel" if group == -1 else "group",
        "group_size": None if group == -1 else group,
        "dynamic": False,
    }
    return Scheme(METHOD, ("Linear",), "gemm", weights, None, None, METHOD)


def tensor_specs(scheme: Scheme, shape: tuple[int, int]) -> dict[str, StoredTensorSpec]:
    """``qweight``, ``qzeros`` and ``scales`` of a linear ``[out, in]``.

    Raises:
        CheckpointError: eight of its output channels do not fill a word, or its groups do not divide its inputs.
    """
    rows, cols = shape
    group = scheme.weights.get("group_size") if scheme.weights.get("strategy") == "group" else cols
    if rows % _words.NIBBLES or not isinstance(group, int) or (group and cols % group):
        raise CheckpointError(
            f"{scheme.name}: a linear of {rows} outputs and {cols} inputs cannot be awq in groups of {group}: "
            f"outputs go by {_words.NIBBLES}, inputs by whole groups"
        )
    groups = cols // group if group else 0
    along = (1, group) if scheme.weights.get("strategy") == "group" else None
    packed: Axes = (along, (0, _words.NIBBLES))
    return {
        "qweight": StoredTensorSpec(("I32",), ((cols, rows // _words.NIBBLES),), ((1, 1), (0, _words.NIBBLES))),
        "qzeros": StoredTensorSpec(("I32",), ((groups, rows // _words.NIBBLES),), packed),
        "scales": StoredTensorSpec(FLOATS, ((groups, rows),), (along, (0, 1))),
    }


def refusal(number_format: NumberFormatProtocol, shape: tuple[int, int]) -> str | None:
    """Returns why a linear cannot be awq, and what to type instead; None where it can."""
    if not number_format.quantised:
        return None
    weights = number_format.weight_arguments()
    kind = (weights.get("type"), weights.get("num_bits"))
    if kind != ("int", _BITS) or number_format.input_arguments() is not None:
        return (
            f"checkpoint format awq holds 4-bit integers with activations as they are (--quant int4 or int4-asym), "
            f"not {number_format.name}: choose one of these, or --format hf"
        )
    if shape[0] % _words.NIBBLES:
        return (
            f"checkpoint format awq packs {_words.NIBBLES} output channels into a word, and out_features {shape[0]} "
            f"is not a multiple of that: --format hf takes it, or keep the module unquantised"
        )
    return None


def quantization_files(announced: ModelQuantization) -> QuantizationFiles:
    """One group size for the whole model, and the modules that are kept.

    ``zero_point`` is true for symmetric formats too: zero points are stored, and vLLM has no other kernel for this
    layout. ``symmetric`` is our own word for "all of them are 8", which engines pass over.

    Raises:
        PlanError: several group sizes; or a kept module's name is part of a quantised one's, which engines would then
            take for kept too.
    """
    sizes = dict.fromkeys(_group_size(number_format) for number_format, _ in announced.groups())
    if len(sizes) > 1:
        raise PlanError(
            f"checkpoint format awq has one group size for a whole model, but {', '.join(map(str, sizes))} are "
            "asked for: choose one with --group-size, or --format hf"
        )
    roots = (subtree.path.rpartition("*.")[2] for subtree in announced.subtrees)
    apart = [root for root in roots if not any(root in name for name in announced.formats)]
    unquantised = [*announced.unquantised, *apart]
    for kept in unquantised:
        taken = next((name for name in announced.formats if kept in name), None)
        if taken is not None:
            raise PlanError(
                f"checkpoint format awq names what is not quantised by parts of names, and '{kept}' is a part of "
                f"'{taken}', which is: quantise both or neither, or --format hf"
            )
    config = {
        "quant_method": METHOD,
        "bits": _BITS,
        "group_size": next(iter(sizes), 128),
        "zero_point": True,
        "version": "gemm",
        "symmetric": all(_is_symmetric(number_format) for number_format in announced.formats.values()),
        "lm_head": "lm_head" in announced.formats,
        "modules_to_not_convert": unquantised,
    }
    return QuantizationFiles(config)


def encode(number_format: NumberFormatProtocol, tensors: Mapping[str, Tensor], part: WeightSlice) -> dict[str, Tensor]:
    """``weight_packed``, ``weight_scale``, ``weight_zero_point`` -> ``qweight``, ``qzeros``, ``scales``."""
    import torch

    qweight = _words.reorder(_words.transpose(tensors["weight_packed"], part.extent[1]), ORDER)
    scales = tensors["weight_scale"].t().contiguous()
    if _is_symmetric(number_format):
        shape = (scales.shape[0], part.extent[0] // _words.NIBBLES)
        qzeros = torch.full(shape, _MIDDLE, dtype=torch.int32, device=scales.device)
    else:
        qzeros = _words.reorder(tensors["weight_zero_point"].t().contiguous(), ORDER)
    return {"qweight": qweight, "qzeros": qzeros, "scales": scales}


def decode(number_format: NumberFormatProtocol, tensors: Mapping[str, Tensor], part: WeightSlice) -> dict[str, Tensor]:
    """The inverse of :func:`encode`.

    Raises:
        CheckpointError: the format is symmetric, but a zero point is not 8.
    """
    import torch

    qweight, qzeros = tensors["qweight"], tensors["qzeros"]
    found = {
        "weight_packed": _words.transpose(_words.reorder(qweight, _BACK), part.extent[0]),
        "weight_scale": tensors["scales"].t().contiguous(),
        "weight_shape": torch.tensor(part.shape, dtype=torch.int64, device=qweight.device),
    }
    if not _is_symmetric(number_format):
        found["weight_zero_point"] = _words.reorder(qzeros, _BACK).t().contiguous()
    elif bool((qzeros != _MIDDLE).any()):
        raise CheckpointError(
            "qzeros holds other zero points than 8, but config.json says that the weights are symmetric: "
            "set zero_point to true (and remove symmetric) in its quantization_config"
        )
    return found


def _is_symmetric(number_format: NumberFormatProtocol) -> bool:
    return bool(number_format.weight_arguments().get("symmetric", True))


def _group_size(number_format: NumberFormatProtocol) -> int:
    weights = number_format.weight_arguments()
    return int(weights["group_size"]) if weights.get("strategy") == "group" else -1
