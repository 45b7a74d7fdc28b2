"""What config.json's ``quantization_config`` says, and the tensors that it promises for a linear.

Follows compressed-tensors (https://github.com/vllm-project/compressed-tensors); of other methods only the name
and the ignored modules are read. Nothing here imports torch or reads a tensor.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from modelexport.errors import CheckpointError

FLOATS = ("BF16", "F16", "F32")
_VALUES = {("int", 8): "I8", ("float", 8): "F8_E4M3"}


Axes = tuple["tuple[int, int] | None", ...]
"""For each dim of a tensor: (the weight's dim that it runs along, elements of the weight for each of its own); None
where it does not vary with the weight. Fewer than its dims: the others do not vary."""

_AS_WEIGHT: Axes = ((0, 1), (1, 1))


@dataclass(frozen=True)
class Promise:
    """A tensor that must be there: the dtypes and the shapes that it may have, and how it goes with the weight."""

    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    axes: Axes = ()

    def __str__(self) -> str:
        return f"{' or '.join(self.dtypes)} {' or '.join(str(list(shape)) for shape in self.shapes)}"


@dataclass(frozen=True)
class Scheme:
    """One entry of ``config_groups``; ``format`` is its own or the config's."""

    name: str
    targets: tuple[str, ...]
    format: str
    weights: Mapping[str, Any]
    inputs: Mapping[str, Any] | None
    outputs: Mapping[str, Any] | None

    def describe(self) -> str:
        """In words, e.g. ``"int8 weights per channel, int8 activations per token (dynamic)"``."""
        text = f"{_numbers(self.weights)} weights per {_extent(self.weights)}"
        for what, part in (("activations", self.inputs), ("outputs", self.outputs)):
            if part is not None:
                when = "static" if part.get("dynamic") is False else "dynamic"
                text += f", {_numbers(part)} {what} per {_extent(part)} ({when})"
        return text


@dataclass(frozen=True)
class QuantizationConfig:
    """config.json's ``quantization_config``.

    Attributes:
        method: ``quant_method``, e.g. ``"compressed-tensors"``.
        status: ``quantization_status``; transformers loads random weights unless it is ``"compressed"``.
    """

    method: str
    format: str | None
    status: str | None
    schemes: tuple[Scheme, ...]
    ignore: tuple[str, ...]
    kv_cache_scheme: Mapping[str, Any] | None

    @property
    def is_compressed_tensors(self) -> bool:
        """Whether the rules of compressed-tensors apply."""
        return self.method == "compressed-tensors"

    def ignores(self, module: str) -> bool:
        """Whether ``ignore`` names the module (exactly, by ``re:...`` or, for other methods, by wildcard)."""
        return module in self._exactly or any(self._matches(pattern, module) for pattern in self._patterns)

    @cached_property
    def _exactly(self) -> frozenset[str]:
        return frozenset(self.ignore)

    @cached_property
    def _patterns(self) -> tuple[str, ...]:
        """Of ``ignore``, what may match other names than its own."""
        return tuple(p for p in self.ignore if p.startswith("re:") or not self.is_compressed_tensors)

    def scheme_of(self, module: str, class_name: str = "Linear") -> Scheme | None:
        """The scheme that a module is quantised with: by its name first, then by its class; None if kept."""
        if self.ignores(module):
            return None
        for scheme in self.schemes:
            if any(self._matches(target, module) for target in scheme.targets):
                return scheme
        return next((scheme for scheme in self.schemes if class_name in scheme.targets), None)

    def _matches(self, pattern: str, module: str) -> bool:
        if pattern.startswith("re:"):
            return re.match(pattern[3:], module) is not None
        return pattern == module or (not self.is_compressed_tensors and fnmatch.fnmatchcase(module, pattern))


def read_quantization_config(config: Mapping[str, Any] | None) -> QuantizationConfig | None:
    """Read it from config.json's content; None where the model is not quantised.

    Raises:
        CheckpointError: a part of it has the wrong type, or a pattern is no regular expression.
    """
    value = (config or {}).get("quantization_config")
    if not value:
        return None
    value = _mapping(value, "quantization_config")
    fmt = value.get("format")
    schemes = []
    for name, group in _mapping(value.get("config_groups") or {}, "config_groups").items():
        group = _mapping(group, f"config_groups.{name}")
        weights = group.get("weights")
        if weights is None:  # activations alone: nothing is stored differently
            continue
        schemes.append(
            Scheme(
                name,
                _strings(group.get("targets"), f"config_groups.{name}.targets"),
                str(group.get("format") or fmt or ""),
                _mapping(weights, f"config_groups.{name}.weights"),
                _optional(group.get("input_activations"), f"config_groups.{name}.input_activations"),
                _optional(group.get("output_activations"), f"config_groups.{name}.output_activations"),
            )
        )
    ignore = value.get("ignore") or value.get("exclude_modules") or value.get("modules_to_not_convert")
    return QuantizationConfig(
        str(value.get("quant_method", "unknown")),
        None if fmt is None else str(fmt),
        value.get("quantization_status"),
        tuple(schemes),
        _strings(ignore, "ignore"),
        _optional(value.get("kv_cache_scheme"), "kv_cache_scheme"),
    )


def promised(scheme: Scheme, shape: tuple[int, int]) -> dict[str, Promise]:
    """The tensors, by suffix, that a linear of that shape (``[out, in]``) has under a scheme.

    Raises:
        CheckpointError: the format is not known here.
    """
    bits, kind = _bits(scheme.weights), str(scheme.weights.get("type"))
    shapes, axes = _scales(scheme, shape)
    tensors: dict[str, Promise]
    if scheme.format in ("int-quantized", "float-quantized", "naive-quantized"):
        dtype = _VALUES.get((kind, bits))
        if dtype is None:
            raise CheckpointError(f"{scheme.name}: {scheme.format} cannot hold {bits}-bit {kind} weights")
        tensors = {"weight": Promise((dtype,), (shape,), _AS_WEIGHT), "weight_scale": Promise(FLOATS, shapes, axes)}
        if not scheme.weights.get("symmetric", True):
            tensors["weight_zero_point"] = Promise((dtype,), shapes, axes)
    elif scheme.format == "pack-quantized":
        tensors = _packed(scheme, shape, bits)
    elif scheme.format in ("nvfp4-pack-quantized", "mxfp4-pack-quantized"):
        nv = scheme.format.startswith("nv")
        tensors = {
            "weight_packed": Promise(("U8",), ((shape[0], shape[1] // 2),), ((0, 1), (1, 2))),
            "weight_scale": Promise(("F8_E4M3",) if nv else ("U8", "F8_E8M0"), shapes, axes),
        }
        if nv:
            tensors["weight_global_scale"] = Promise(("F32",), ((1,),))
            if scheme.inputs is not None:
                tensors["input_global_scale"] = Promise(("F32",), ((1,),))
    elif scheme.format == "mxfp8-quantized":
        tensors = {
            "weight": Promise(("F8_E4M3",), (shape,), _AS_WEIGHT),
            "weight_scale": Promise(("U8", "F8_E8M0"), shapes, axes),
        }
    else:
        raise CheckpointError(f"{scheme.name}: no rules are known for format '{scheme.format}'")
    return {**tensors, **_static(scheme.inputs, "input"), **_static(scheme.outputs, "output")}


def _packed(scheme: Scheme, shape: tuple[int, int], bits: int) -> dict[str, Promise]:
    """int32 words, several weights of a row to each."""
    rows, cols = shape
    shapes, axes = _scales(scheme, shape)
    per_word = 32 // bits if 32 % bits == 0 else 0
    indexed = scheme.weights.get("actorder") in ("group", "dynamic", True)
    if indexed:  # any column may belong to any group: a part of the columns still needs the scales of all groups
        axes = axes[:1]
    tensors = {
        "weight_packed": Promise(("I32",), ((rows, _ceil(cols * bits, 32)),), ((0, 1), (1, per_word or cols))),
        "weight_scale": Promise(FLOATS, shapes, axes),
        "weight_shape": Promise(("I64", "I32"), ((2,),)),
    }
    if not scheme.weights.get("symmetric", True):
        packed = tuple((_ceil(rows * bits, 32), *rest) for _, *rest in shapes)
        tensors["weight_zero_point"] = Promise(("I32",), packed, ((0, per_word or rows), *axes[1:]))
    if indexed:
        tensors["weight_g_idx"] = Promise(("I32",), ((cols,),), ((1, 1),))
    return tensors


def _static(part: Mapping[str, Any] | None, prefix: str) -> dict[str, Promise]:
    """What calibrated activations store: a scale, and a zero point where they are not symmetric."""
    if part is None or part.get("dynamic") is not False:
        return {}
    tensors = {f"{prefix}_scale": Promise(FLOATS, ((1,), ()))}
    if not part.get("symmetric", True):
        tensors[f"{prefix}_zero_point"] = Promise(("I8",), ((1,), ()))
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
        if not isinstance(group, int) or group < 1:
            raise CheckpointError(f"{scheme.name}: strategy '{strategy}' with group_size {group!r}")
        return ((rows, _ceil(cols, group)),), ((0, 1), (1, group))
    if strategy == "block":
        block = scheme.weights.get("block_structure")
        if not isinstance(block, list) or len(block) != 2 or not all(isinstance(n, int) and n > 0 for n in block):
            raise CheckpointError(f"{scheme.name}: strategy 'block' with block_structure {block!r}")
        return ((_ceil(rows, block[0]), _ceil(cols, block[1])),), ((0, block[0]), (1, block[1]))
    raise CheckpointError(f"{scheme.name}: unknown strategy {strategy!r} for weights")


def _bits(part: Mapping[str, Any]) -> int:
    bits = part.get("num_bits")
    if not isinstance(bits, int) or not 1 <= bits <= 16:
        raise CheckpointError(f"quantization_config: num_bits is {bits!r}; a number of bits is needed")
    return bits


def _numbers(part: Mapping[str, Any]) -> str:
    kind = "fp" if part.get("type") == "float" else part.get("type", "?")
    return f"{kind}{part.get('num_bits', '?')}{'' if part.get('symmetric', True) else ' asymmetric'}"


def _extent(part: Mapping[str, Any]) -> str:
    strategy = str(part.get("strategy", "?"))
    if strategy in ("group", "tensor_group"):
        return f"group of {part.get('group_size')}"
    if strategy == "block":
        return "block of " + "x".join(map(str, part.get("block_structure") or "?"))
    return strategy


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise CheckpointError(f"config.json: {where} must be an object, is {type(value).__name__}")
    return value


def _optional(value: Any, where: str) -> Mapping[str, Any] | None:
    return None if value is None else _mapping(value, where)


def _strings(value: Any, where: str) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str) or not all(isinstance(s, str) for s in value):
        raise CheckpointError(f"config.json: quantization_config: {where} must be a list of names, is {value!r}")
    for pattern in value:
        if pattern.startswith("re:"):
            try:
                re.compile(pattern[3:])
            except re.error as error:
                raise CheckpointError(f"config.json: {where}: '{pattern}' is no regular expression: {error}") from error
    return tuple(value)
