"""compressed-tensors: what vLLM, SGLang and transformers read, and the native form of our number formats.

Follows https://github.com/vllm-project/compressed-tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from modelexport.errors import CheckpointError, shown
from modelexport.quantization.methods.base import (
    AS_WEIGHT,
    EMBEDDING,
    Axes,
    ModelQuantization,
    QuantizationConfig,
    QuantizationFiles,
    Scheme,
    StoredTensorSpec,
    WeightSlice,
    is_size,
    mapping,
    number_pattern,
    optional,
    strings,
)
from modelexport.system.dtypes import FLOATS

if TYPE_CHECKING:
    from torch import Tensor

    from modelexport.quantization.methods.base import NumberFormatProtocol

METHOD = "compressed-tensors"
FORMAT = "hf"
SCALES = None
KV_SCALES = {"k": "k_scale", "v": "v_scale"}
KV_SHAPE = (1,)
SIDE_FILES: tuple[str, ...] = ()
_KV_SCHEME = {
    "num_bits": 8,
    "type": "float",
    "symmetric": True,
    "strategy": "tensor",
    "group_size": None,
    "dynamic": False,
}
KV_CACHES: Mapping[str, Mapping[str, Any]] = {
    "fp8": _KV_SCHEME,
    "fp8-head": {**_KV_SCHEME, "strategy": "attn_head"},
}
_VALUES = {("int", 8): "I8", ("float", 8): "F8_E4M3"}
_FLOATS = {
    "nvfp4-pack-quantized": ("float", 4, "tensor_group"),
    "mxfp4-pack-quantized": ("float", 4, "group"),
    "mxfp8-quantized": ("float", 8, "group"),
}
HOLDS_HEADS = True
_HEAD = "lm_head"  # no "Linear" to vLLM
_NUMBER = re.compile(r"\.\d+(?=\.|$)")


def read(value: Mapping[str, Any]) -> QuantizationConfig:
    """Reads a ``quantization_config``.

    Raises:
        CheckpointError: a part of it has the wrong type, or a pattern is no regular expression.
    """
    fmt = value.get("format")
    schemes = []
    for name, group in mapping(value.get("config_groups") or {}, "config_groups").items():
        group = mapping(group, f"config_groups.{name}")
        weights = group.get("weights")
        if weights is None:  # activations alone: nothing is stored differently
            continue
        schemes.append(
            Scheme(
                shown(name),
                strings(group.get("targets"), f"config_groups.{name}.targets"),
                shown(group.get("format") or fmt or ""),
                mapping(weights, f"config_groups.{name}.weights"),
                optional(group.get("input_activations"), f"config_groups.{name}.input_activations"),
                optional(group.get("output_activations"), f"config_groups.{name}.output_activations"),
            )
        )
    return QuantizationConfig(
        METHOD,
        None if fmt is None else shown(fmt),
        None if (status := value.get("quantization_status")) is None else shown(status),
        tuple(schemes),
        strings(value.get("ignore"), "ignore"),
        optional(value.get("kv_cache_scheme"), "kv_cache_scheme"),
    )


def tensor_specs(scheme: Scheme, shape: tuple[int, int]) -> dict[str, StoredTensorSpec]:
    """The tensors, by suffix, that a linear of that shape (``[out, in]``) has under a scheme.

    Raises:
        CheckpointError: the format is not known here.
    """
    bits, kind = scheme.bits, str(scheme.weights.get("type"))
    shapes, axes = _scales(scheme, shape)
    tensors: dict[str, StoredTensorSpec]
    if scheme.format in ("int-quantized", "float-quantized", "naive-quantized"):
        dtype = _VALUES.get((kind, bits))
        if dtype is None or scheme.weights.get("scale_dtype") in ("torch.uint8", "uint8"):
            raise CheckpointError(f"{scheme.name}: {scheme.format} cannot hold {bits}-bit {shown(kind)} weights")
        tensors = {
            "weight": StoredTensorSpec((dtype,), (shape,), AS_WEIGHT),
            "weight_scale": StoredTensorSpec(FLOATS, shapes, axes),
        }
        if not scheme.symmetric:
            tensors["weight_zero_point"] = StoredTensorSpec((dtype,), shapes, axes)
    elif scheme.format == "pack-quantized" and kind == "int":
        tensors = _packed(scheme, shape, bits)
    elif scheme.format in _FLOATS and (kind, bits, scheme.weights.get("strategy")) != _FLOATS[scheme.format]:
        raise CheckpointError(f"{scheme.name}: {scheme.format} does not hold {scheme.describe()}")
    elif scheme.format in ("nvfp4-pack-quantized", "mxfp4-pack-quantized"):
        nv = scheme.format.startswith("nv")
        if shape[1] % 2:
            raise CheckpointError(f"{scheme.name}: {scheme.format} has two numbers a byte, but rows of {shape[1]}")
        tensors = {
            "weight_packed": StoredTensorSpec(("U8",), ((shape[0], shape[1] // 2),), ((0, 1), (1, 2))),
            "weight_scale": StoredTensorSpec(("F8_E4M3",) if nv else ("U8", "F8_E8M0"), shapes, axes),
        }
        if nv:
            tensors["weight_global_scale"] = StoredTensorSpec(("F32",), ((1,),))
            if scheme.inputs is not None:
                tensors["input_global_scale"] = StoredTensorSpec(("F32",), ((1,),))
    elif scheme.format == "mxfp8-quantized":
        tensors = {
            "weight": StoredTensorSpec(("F8_E4M3",), (shape,), AS_WEIGHT),
            "weight_scale": StoredTensorSpec(("U8", "F8_E8M0"), shapes, axes),
        }
    else:
        raise CheckpointError(
            f"{scheme.name}: no rules are known for format '{scheme.format}' with {scheme.describe()}"
        )
    return {**tensors, **_static(scheme.inputs, "input"), **_static(scheme.outputs, "output")}


def _packed(scheme: Scheme, shape: tuple[int, int], bits: int) -> dict[str, StoredTensorSpec]:
    """int32 words, several weights of a row to each."""
    rows, cols = shape
    shapes, axes = _scales(scheme, shape)
    per_word = 32 // bits if 32 % bits == 0 else 0
    indexed = scheme.weights.get("actorder") in ("group", "dynamic", True)
    if indexed:  # any column may belong to any group: a part of the columns still needs the scales of all groups
        axes = axes[:1]
    tensors = {
        "weight_packed": StoredTensorSpec(("I32",), ((rows, _ceil(cols * bits, 32)),), ((0, 1), (1, per_word or cols))),
        "weight_scale": StoredTensorSpec(FLOATS, shapes, axes),
        "weight_shape": StoredTensorSpec(("I64", "I32"), ((2,),)),
    }
    if not scheme.symmetric:
        packed = tuple((_ceil(rows * bits, 32), *rest) for _, *rest in shapes)
        tensors["weight_zero_point"] = StoredTensorSpec(("I32",), packed, ((0, per_word or rows), *axes[1:]))
    if indexed:
        tensors["weight_g_idx"] = StoredTensorSpec(("I32",), ((cols,),), ((1, 1),))
    return tensors


def _static(part: Mapping[str, Any] | None, prefix: str) -> dict[str, StoredTensorSpec]:
    """The tensors of calibrated activations: a scale, and a zero point where they are not symmetric."""
    if part is None or part.get("dynamic") is not False:
        return {}
    tensors = {f"{prefix}_scale": StoredTensorSpec(FLOATS, ((1,), ()))}
    if not part.get("symmetric", True):
        tensors[f"{prefix}_zero_point"] = StoredTensorSpec(("I8",), ((1,), ()))
    return tensors


def _scales(scheme: Scheme, shape: tuple[int, int]) -> tuple[tuple[tuple[int, ...], ...], Axes]:
    """The shapes that a weight's scales may have, and how they go with it."""
    rows, cols = shape
    strategy = scheme.weights.get("strategy")
    if strategy == "tensor":
        return ((1,), ()), ()
    if strategy == "channel":
        return ((rows, 1),), ((0, 1), None)
    if strategy in ("group", "tensor_group"):
        group = scheme.weights.get("group_size")
        if not is_size(group):
            raise CheckpointError(f"{scheme.name}: strategy '{strategy}' with group_size {shown(group)}")
        return ((rows, _ceil(cols, group)),), ((0, 1), (1, group))
    if strategy == "block":
        block = scheme.weights.get("block_structure")
        if not isinstance(block, list) or len(block) != 2 or not all(map(is_size, block)):
            raise CheckpointError(f"{scheme.name}: strategy 'block' with block_structure {shown(block)}")
        return ((_ceil(rows, block[0]), _ceil(cols, block[1])),), ((0, block[0]), (1, block[1]))
    raise CheckpointError(f"{scheme.name}: unknown strategy '{shown(strategy)}' for weights")


def layout(number_format: NumberFormatProtocol) -> str | None:
    """The library's name of it."""
    return number_format.checkpoint_format


def refusal(number_format: NumberFormatProtocol, shape: tuple[int, int]) -> str | None:
    """None: it is their native form."""
    return None


def embedding_refusal(number_format: NumberFormatProtocol) -> str | None:
    """Returns why engines do not look rows up in a number format; None where they do."""
    scheme = number_format.weight_arguments()
    rounds_inputs = number_format.input_arguments() is not None
    if number_format.checkpoint_format == "pack-quantized" and scheme.get("symmetric") and not rounds_inputs:
        return None
    return "engines look rows of an embedding up in packed integers without zero points: choose int4 or int8-wo for it"


def quantization_files(announced: ModelQuantization) -> QuantizationFiles:
    """A config group for each number format.

    With one format the group is every linear that is not ignored. With several, each group names its modules: by one
    pattern for all layers where all of them have the same format, since engines look for fused modules by those of
    their parts.
    """
    groups = announced.groups()
    mixed = len(groups) > 1
    config_groups = {}
    for number, (number_format, modules) in enumerate(groups):
        group = number_format.config_group()
        assert group is not None
        apart = [name for name in modules if name == _HEAD or name in announced.embeddings]
        targets = _targets(modules, announced) if mixed else ["Linear", *apart]
        if any(name in announced.embeddings for name in modules):
            targets.append(EMBEDDING)  # several of vLLM's models do not tell their embedding its name
        config_groups[f"group_{number}"] = {**group, "targets": targets}
    formats = list(dict.fromkeys(number_format.checkpoint_format for number_format, _ in groups))
    config = {
        "quant_method": METHOD,
        "format": formats[0] if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": config_groups,
        "ignore": announced.ignored(),
        "kv_cache_scheme": None if announced.kv_cache is None else dict(KV_CACHES[announced.kv_cache]),
    }
    return QuantizationFiles(config)


def _targets(modules: list[str], announced: ModelQuantization) -> list[str]:
    """Patterns for modules that are alike in all layers, names for the others.

    Engines translate names into their own, and patterns not: a pattern leaves open what comes before the layers.
    """
    mine = set(modules)
    others = {_in_any_layer(name) for name in (*announced.formats, *announced.unquantised) if name not in mine}
    targets: dict[str, None] = {}
    for name in modules:
        general = _in_any_layer(name)
        if general in others or general == name:
            targets[name] = None
        else:
            targets[rf"re:(.*\.)?{number_pattern(general)}$"] = None
    return list(targets)


def _in_any_layer(name: str) -> str:
    """A module's name from the list of layers on, with ``*`` for numbers; the name itself outside of layers."""
    parts = _NUMBER.sub(".*", name).split(".")
    return ".".join(parts[max(0, parts.index("*") - 1) :]) if "*" in parts else name


def encode(number_format: NumberFormatProtocol, tensors: Mapping[str, Tensor], part: WeightSlice) -> dict[str, Tensor]:
    """The tensors as they are."""
    return dict(tensors)


def decode(number_format: NumberFormatProtocol, tensors: Mapping[str, Tensor], part: WeightSlice) -> dict[str, Tensor]:
    """The tensors as they are; 8-bit integers as words where the number format has words, or the other way round.

    Tools lay integers of 8 bits out either way ("int-quantized", "naive-quantized", "pack-quantized"), whether inputs
    are rounded or not; our number formats have words where only weights are.
    """
    packed = number_format.checkpoint_format == "pack-quantized"
    if ("weight_packed" if packed else "weight") in tensors or number_format.weight_bits != 8:
        return dict(tensors)
    import torch

    from modelexport.quantization.methods import _nibbles

    found = {suffix: tensor for suffix, tensor in tensors.items() if suffix not in ("weight", "weight_packed")}
    if packed:
        found["weight_packed"] = _nibbles.int8_to_words(tensors["weight"])
        found["weight_shape"] = torch.tensor(part.shape, dtype=torch.int64, device=tensors["weight"].device)
        if "weight_zero_point" in tensors:
            columns = tensors["weight_zero_point"].t().clone(memory_format=torch.contiguous_format)
            found["weight_zero_point"] = _nibbles.int8_to_words(columns).t().contiguous()
    else:
        del found["weight_shape"]
        found["weight"] = _nibbles.words_to_int8(tensors["weight_packed"], part.extent[1])
    return found


def dequantise(number_format: NumberFormatProtocol, tensors: Mapping[str, Tensor], part: WeightSlice) -> Tensor:
    """The weight, float32 ``[out, in]``; column c is of the group that ``weight_g_idx[c]`` says, where there is one."""
    if "weight_g_idx" not in tensors:
        return number_format.dequantise(decode(number_format, tensors, part))
    import torch

    rows, cols = part.extent
    bits = number_format.weight_bits
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)

    def unpacked(words: Tensor) -> Tensor:
        """Words along the last dim as what they hold, from 0 up."""
        return ((words.unsqueeze(-1) >> shifts) & (2**bits - 1)).flatten(-2)

    groups = tensors["weight_g_idx"].long()
    codes = unpacked(tensors["weight_packed"])[:, :cols]
    zeros = torch.full_like(tensors["weight_scale"], 2 ** (bits - 1), dtype=torch.int32)
    if "weight_zero_point" in tensors:
        zeros = unpacked(tensors["weight_zero_point"].t().contiguous()).t()[:rows]
    return (codes - zeros[:, groups]).float() * tensors["weight_scale"].float()[:, groups]


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
