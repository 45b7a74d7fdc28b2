"""Tensors grouped into modules, and the number format of each, told from names, dtypes and shapes alone.

Works on headers, for checkpoints of any maker: nothing is read and torch is not imported.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from modelexport.checkpoints.safetensors.file import Checkpoint, TensorInfo
from modelexport.errors import CheckpointError, ModelExportError
from modelexport.models.architecture import Dimensions, Family, family_of, read_dimensions
from modelexport.models.draft_layers import draft_modules
from modelexport.quantization.formats import name_of
from modelexport.quantization.methods import QuantizationConfig, Scheme, StoredTensorSpec, gguf, tensor_specs
from modelexport.system.dtypes import dtype_bits

PLAIN = {"BF16": "bf16", "F16": "fp16", "F32": "fp32", "F64": "fp64", "F8_E4M3": "fp8", "F8_E5M2": "fp8-e5m2"}
_SCALES = (
    "weight_scale",
    "weight_scale_inv",
    "scales",
    "weight.absmax",
    "SCB",
    "weights_scaling_factor",
    "per_channel_scale",
)
_BITSANDBYTES = ("absmax", "quant_map", "nested_absmax", "nested_quant_map", "quant_state")


@dataclass(frozen=True)
class StoredWeight:
    """The storage of a module's weight.

    Attributes:
        number_format: the name as ``--quant`` spells it where there is one, else the dtype.
        shape: the weight's shape in elements, ``[out_features, in_features]`` for a linear; None: not told.
        scale: name of the tensor of scales within the module, ``""`` if it has none.
        unit: weight elements along dim 0 and dim 1 that no cut may separate (a group, a packed word, a block).
        quantised: whether the numbers need something beside them to mean anything.
    """

    number_format: str
    shape: tuple[int, ...] | None = None
    scale: str = ""
    unit: tuple[int, int] = (1, 1)
    quantised: bool = False


@dataclass(frozen=True)
class StoredModule:
    """One module of a checkpoint.

    Attributes:
        stack, index, path: ``"model.layers"``, 3, ``"self_attn.q_proj"`` for a module of a layer; ``""``, None
            and the name for the others. Further numbers in ``path`` (experts) are written ``*``.
        kind: ``linear``, ``norm``, ``embedding``, ``head`` or ``other``; by the family where it is known.
        tensors: name within the module -> where it lies.
        is_draft: whether it is of a draft layer (multi-token prediction).
    """

    name: str
    stack: str
    index: int | None
    path: str
    kind: str
    stored: StoredWeight
    tensors: Mapping[str, TensorInfo]
    is_draft: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(info.nbytes for info in self.tensors.values())

    @property
    def is_flat(self) -> bool:
        """True where its numbers are stored without rows and columns, or in an order that is not theirs."""
        flat = self.stored.shape is not None and len(self.stored.shape) < 2
        return flat or "weight.absmax" in self.tensors or "W_q" in self.tensors

    @property
    def weights(self) -> int:
        """Elements of its weight, packed ones counted one by one; 0 where it has none."""
        return math.prod(self.stored.shape) if self.stored.shape is not None else 0

    @property
    def parameters(self) -> int:
        """Weights and biases; scales, zero points and shapes are no parameters."""
        return self.weights + sum(math.prod(i.shape) for s, i in self.tensors.items() if s.endswith("bias"))


@dataclass(frozen=True)
class Architecture:
    """The family and the dimensions of a model, or the ``reason`` why they are not known.

    ``kinds``, ``shapes`` and ``fused`` are of its modules, by their path within a layer: what they are, their
    weights', and what engines fuse them into.
    """

    family: Family | None = None
    dimensions: Dimensions | None = None
    reason: str = ""
    kinds: Mapping[str, str] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    fused: Mapping[str, str] = field(default_factory=dict)


def read_architecture(config: Mapping[str, Any] | None, names: Collection[str] = ()) -> Architecture:
    """The family and dimensions of the model that config.json describes; ``names``: every tensor of the checkpoint."""
    if config is None:
        return Architecture(reason="there is no config.json")
    try:
        family = family_of(config, names)
        dimensions = read_dimensions(config, family)
    except ModelExportError as error:
        return Architecture(reason=str(error))
    modules = (*family.before, *family.layer, *family.after)
    own = {m.general_path: m for m in reversed(modules)}  # of those that share a path, the first is the weight
    kinds = {path: m.kind for path, m in own.items()}
    shapes = {path: dimensions.weight_shape(m) for path, m in own.items()}
    fused = {path: m.fused_into for path, m in own.items() if m.fused_into is not None}
    return Architecture(family, dimensions, "", kinds, shapes, fused)


def read_modules(
    checkpoint: Checkpoint, architecture: Architecture, quantization: QuantizationConfig | None
) -> list[StoredModule]:
    """Every module of a checkpoint, in the order of its tensors."""
    grouped: dict[str, dict[str, TensorInfo]] = {}
    for name, info in checkpoint.infos.items():
        module, suffix = _split(name, checkpoint.infos)
        grouped.setdefault(module, {})[suffix] = info
    drafts: dict[str, str] = {}
    if architecture.family is not None and architecture.dimensions is not None:
        found = draft_modules(architecture.family, architecture.dimensions, checkpoint.infos)
        drafts = {each.name: each.module.kind for each in found}
    modules = []
    for name, tensors in grouped.items():
        stack, index, path = layer_path(name)
        scheme = quantization.scheme_of(name) if quantization is not None else None
        if quantization is not None and architecture.kinds.get(path) == "embedding":
            scheme = quantization.scheme_of_kind(name, "embedding")
        stored = recognise(tensors, scheme, quantization.method if quantization is not None else "")
        kind = drafts.get(name) or architecture.kinds.get(path) or _guess_kind(name, stored)
        if scheme is not None and kind in ("linear", "head", "embedding"):
            stored = _as_announced(stored, scheme, tensors, architecture.shapes.get(path))
        modules.append(StoredModule(name, stack, index, path, kind, stored, tensors, name in drafts))
    return modules


def layer_path(module: str) -> tuple[str, int | None, str]:
    """``"model.layers.3.mlp.experts.7.up_proj"`` -> ``("model.layers", 3, "mlp.experts.*.up_proj")``."""
    parts = module.split(".")
    first = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    if first is None:
        return "", None, module
    rest = ["*" if part.isdecimal() else part for part in parts[first + 1 :]]
    return ".".join(parts[:first]), int(parts[first]), ".".join(rest)


def recognise(tensors: Mapping[str, TensorInfo], scheme: Scheme | None, method: str) -> StoredWeight:
    """Tell a module's number format from its tensors; ``scheme`` settles how many bits are packed in a word."""
    if "weight_packed" in tensors:
        return _packed(tensors, scheme)
    if "qweight" in tensors:
        return _transposed_words(tensors, method, scheme)
    if "blocks" in tensors and "scales" in tensors:  # gpt-oss: [experts, rows, groups, 16 bytes of two]
        *outer, groups, _ = tensors["blocks"].shape
        return StoredWeight("mxfp4", (*outer, groups * 32), "scales", (1, 32), True)
    if "W_q" in tensors:  # hqq: no header tells its bits
        held = math.prod(tensors["W_q"].shape) * dtype_bits(tensors["W_q"].dtype)
        return StoredWeight("hqq", (held // _bits_of(scheme),), "scale", (1, 1), True)
    info = tensors.get("weight")
    if info is None:
        return StoredWeight("-")
    if method == gguf.METHOD and info.dtype == "U8" and (blocks := gguf.stored_shape(info.shape)) is not None:
        return StoredWeight("gguf", blocks, "", (1, blocks[1] // max(1, info.shape[1])), True)
    plain = PLAIN.get(info.dtype, info.dtype.lower())
    scale = next((name for name in _SCALES if name in tensors), "")
    if not scale:
        return StoredWeight("int8" if info.dtype == "I8" else plain, info.shape, quantised=_needs_scale(info))
    if info.dtype == "U8":
        return _bytes(tensors, info, scale)
    shape, scales = info.shape, tensors[scale]
    unit = _unit(shape, scales, scheme)
    name = {"I8": "int8"}.get(info.dtype, plain)
    if info.dtype == "F8_E4M3" and scales.dtype in ("U8", "F8_E8M0"):
        name = "mxfp8"
    elif unit[0] > 1:
        name += "-block"
    elif info.dtype == "I8" and unit[1] > 1:
        name += "-wo"
    return StoredWeight(name, shape, scale, unit, True)


def _bits_of(scheme: Scheme | None) -> int:
    """Bits of a weight as config.json has them; 4 where it does not say."""
    bits = scheme.weights.get("num_bits") if scheme is not None else None
    return bits if isinstance(bits, int) and 1 <= bits <= 16 else 4


def _as_announced(
    stored: StoredWeight, scheme: Scheme, tensors: Mapping[str, TensorInfo], wanted: tuple[int, ...] | None
) -> StoredWeight:
    """The same with the name and the units of the scheme that config.json says, if its method is known.

    Args:
        wanted: the shape that config.json makes the weight. It is its shape where the tensors are those promised for
            it: numbers of a few bits are packed in more ways than headers tell apart.
    """
    shape = stored.shape
    try:
        if wanted is not None and len(wanted) == 2 and _are(tensor_specs(scheme, (wanted[0], wanted[1])), tensors):
            shape = wanted
        if shape is None or len(shape) != 2:
            return stored
        promises = tensor_specs(scheme, (shape[0], shape[1]))
    except CheckpointError:  # a scheme that is not known, or does not go with this shape: told by its tensors alone
        return stored
    stored = replace(stored, shape=shape)
    number_format = name_of(scheme)
    if number_format is None:
        return stored
    units = [1, 1]
    for dim, unit in (axis for promise in promises.values() for axis in promise.axes if axis is not None):
        units[dim] = math.lcm(units[dim], unit)
    return replace(stored, number_format=number_format, unit=(units[0], units[1]))


def _are(promises: Mapping[str, StoredTensorSpec], tensors: Mapping[str, TensorInfo]) -> bool:
    """Returns whether all expected tensors are there, with the expected dtypes and shapes."""
    found = ((tensors.get(suffix), promise) for suffix, promise in promises.items())
    return all(info is not None and info.dtype in p.dtypes and p.has_shape(info.shape) for info, p in found)


def _packed(tensors: Mapping[str, TensorInfo], scheme: Scheme | None) -> StoredWeight:
    info, scales = tensors["weight_packed"], tensors.get("weight_scale")
    scale = "weight_scale" if scales is not None else ""
    if info.dtype == "U8":
        shape = _widened(info.shape, 2)
        name = "nvfp4" if scales is not None and scales.dtype == "F8_E4M3" else "mxfp4"
        return StoredWeight(name, shape, scale, _joined(_unit(shape, scales), 2), True)
    bits = _bits_of(scheme)
    shape = (*info.shape[:-1], info.shape[-1] * 32 // bits) if info.shape else info.shape
    name = f"int{bits}" + ("-asym" if "weight_zero_point" in tensors else "") + ("-wo" if bits == 8 else "")
    return StoredWeight(name, shape, scale, _joined(_unit(shape, scales), 32 // bits), True)


def _transposed_words(tensors: Mapping[str, TensorInfo], method: str, scheme: Scheme | None) -> StoredWeight:
    """AutoAWQ's and GPTQ's int32 words; both store ``[in, out]``, packed along out and in respectively."""
    rows, cols = (*tensors["qweight"].shape, 1, 1)[:2]
    scales = tensors.get("scales")
    if method == "awq" or not (method.startswith("gptq") or "g_idx" in tensors):
        shape, name = (cols * 8, rows), "int4-awq"
    else:
        bits = _bits_of(scheme)
        shape, name = (cols, rows * 32 // bits), f"int{bits}-gptq"
    groups = scales.shape[0] if scales is not None and scales.shape else 1
    return StoredWeight(
        name, shape, "scales" if scales is not None else "", (8, max(1, shape[1] // max(1, groups))), True
    )


def _bytes(tensors: Mapping[str, TensorInfo], info: TensorInfo, scale: str) -> StoredWeight:
    """Two 4-bit numbers to a byte, as modelopt and bitsandbytes store them."""
    scales = tensors[scale]
    if scale == "weight.absmax":
        kind = "fp4" if "weight.quant_state.bitsandbytes__fp4" in tensors else "nf4"
        return StoredWeight(kind, (2 * math.prod(info.shape),), scale, (1, 1), True)
    if scales.dtype == "F8_E4M3" or scales.dtype in ("U8", "F8_E8M0"):
        shape = _widened(info.shape, 2)
        name = "nvfp4" if scales.dtype == "F8_E4M3" else "mxfp4"
        return StoredWeight(name, shape, scale, _joined(_unit(shape, scales), 2), True)
    # modelopt's int4 packs two output rows into a byte
    shape = (2 * info.shape[0], *info.shape[1:])
    rows, cols = _unit(shape, scales)
    return StoredWeight("int4", shape, scale, (math.lcm(rows, 2), cols), True)


def _unit(shape: tuple[int, ...], scales: TensorInfo | None, scheme: Scheme | None = None) -> tuple[int, int]:
    """Weight elements that share a scale, along each dimension in which there is more than one scale."""
    block = scheme.weights.get("block_structure") if scheme is not None else None
    if isinstance(block, list) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block):
        return (block[0], block[1])
    if scales is None or len(shape) != 2 or len(scales.shape) != 2:
        return (1, 1)
    rows, cols = (-(-size // count) if count else 1 for size, count in zip(shape, scales.shape, strict=True))
    if scales.shape[1] == 1:
        cols = 1
    elif cols > 1:
        cols = 1 << (cols - 1).bit_length()  # the last group may be short; sizes of groups are powers of two
    if rows > 1:
        rows = 1 if scales.shape[0] == 1 else 1 << (rows - 1).bit_length()
    return (rows, cols)


def _joined(unit: tuple[int, int], per_word: int) -> tuple[int, int]:
    return (unit[0], math.lcm(unit[1], per_word))


def _widened(shape: tuple[int, ...], times: int) -> tuple[int, ...]:
    return (*shape[:-1], shape[-1] * times) if shape else shape


def _needs_scale(info: TensorInfo) -> bool:
    return info.dtype in ("I8", "U8", "I32", "F8_E4M3", "F8_E5M2", "F4") and len(info.shape) >= 2


def _split(name: str, names: Collection[str]) -> tuple[str, str]:
    """A tensor's module and its name within it."""
    module, _, suffix = name.rpartition(".")
    if module.endswith(".weight") and suffix.startswith(_BITSANDBYTES):
        return module.removesuffix(".weight"), f"weight.{suffix}"
    if module.endswith(".weight.quant_state"):
        return module.removesuffix(".weight.quant_state"), f"weight.quant_state.{suffix}"
    for ending in ("blocks", "scales", "bias"):  # gpt-oss: experts.gate_up_proj_blocks
        own = suffix.removesuffix(f"_{ending}")
        if module.endswith(".experts") and own != suffix and f"{module}.{own}_blocks" in names:
            return f"{module}.{own}", ending
    return module, suffix


def _guess_kind(name: str, stored: StoredWeight) -> str:
    """For architectures that no family file knows."""
    last = name.rpartition(".")[2]
    if stored.shape is None:
        return "other"
    if last == "lm_head":
        return "head"
    if "embed" in last or last in ("wte", "wpe"):
        return "embedding"
    return {1: "norm", 2: "linear"}.get(len(stored.shape), "other")
