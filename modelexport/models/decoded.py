"""Quantised checkpoints as the plain models that they stand for: linears are decoded as they are read.

Whatever works on an unquantised checkpoint (plan, calibration, rotation, comparison) works on the decoded view of a
quantised one, with the bytes that decoding it into a checkpoint of its own first would give.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from modelexport.checkpoints.safetensors.file import Checkpoint, Reader, TensorInfo, tensor_nbytes, torch_dtype
from modelexport.checkpoints.safetensors.placement import Placement, whole_place
from modelexport.checkpoints.safetensors.reader import ComputedTensor
from modelexport.errors import CheckpointError, UsageError
from modelexport.models.matching import KV_SCALES, Matched, MatchedModule, match, refuse
from modelexport.quantization.methods import (
    QUANTIZATION_KEYS,
    ReadOnlyNumbers,
    Scheme,
    WeightSlice,
    of_method,
    read_only_numbers,
    read_quantization_config,
    tensor_specs,
    views,
)
from modelexport.quantization.methods.base import Axes
from modelexport.sharding.plan import Range, scale_range
from modelexport.system.dtypes import FLOATS, find_dtype

if TYPE_CHECKING:
    from torch import Tensor

    from modelexport.quantization.formats.base import NumberFormat

__all__ = ["ScaledStack", "StoredLinear", "StoredStack", "decoded", "model_dtype", "stored_linear", "viewed"]

_AT_ONCE = 1 << 20
"""Weights that are decoded at a time: with all that is made of them on the way, they fit the cache of a core."""
_SCALE_LIKE = ("scale", "scales", "scale_inv", "scaling_factor")


@dataclass(frozen=True)
class StoredLinear:
    """A linear that is quantised in a checkpoint.

    Attributes:
        method: its quantisation method.
        number_format: what it holds.
        tensors: suffix -> where it lies, of the dtype and shape that it is read in.
        axes: suffix -> the dims of the weight that the tensor's dims run along.
        weight: the weight that it stands for, which lies nowhere.
        exact: whether the number format says what becomes of the inputs, too; else only of the weights.
    """

    method: str
    number_format: NumberFormat | ReadOnlyNumbers
    tensors: Mapping[str, TensorInfo]
    axes: Mapping[str, Axes]
    weight: TensorInfo
    exact: bool = True

    @property
    def sources(self) -> Collection[TensorInfo]:
        """The tensors that hold it."""
        return self.tensors.values()

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(info.nbytes for info in self.tensors.values())

    @cached_property
    def _unit(self) -> tuple[int, int]:
        """Rows and columns of the weight that must be decoded together."""
        units = [1, 1]
        for axes in self.axes.values():
            for axis in axes:
                if axis is not None:
                    units[axis[0]] = math.lcm(units[axis[0]], axis[1])
        return (units[0], units[1])

    def read(self, reader: Reader, rows: Range, cols: Range, out: Tensor | None = None) -> Tensor:
        """Rows and columns of the weight, decoded in float32 and rounded to its dtype.

        They are read and decoded a few rows at a time: what lies between stays in the cache, and fills no fresh pages.

        Raises:
            CheckpointError: a file cannot be read, or its values mean nothing.
        """
        import torch

        from modelexport.quantization import decoding

        shape, dtype = (self.weight.shape[0], self.weight.shape[1]), torch_dtype(self.weight.dtype)
        spans = [_widened(span, unit, size) for span, unit, size in zip((rows, cols), self._unit, shape, strict=True)]
        (first, last), (left, right) = spans
        fits = out is not None and out.dtype == dtype and spans == [tuple(rows), tuple(cols)]
        weight = out if out is not None and fits else torch.empty((last - first, right - left), dtype=dtype)
        across = {suffix: self._stored(reader, suffix, spans) for suffix in self.tensors if self._is_across(suffix)}
        unit = self._unit[0]
        step = max(1, _AT_ONCE // (unit * max(1, right - left))) * unit
        for start in range(first, last, step):
            band = (start, min(start + step, last))
            begin, end = band[0] - first, band[1] - first
            tensors = {
                suffix: self._rows(suffix, across[suffix], (begin, end))
                if suffix in across
                else self._stored(reader, suffix, (band, spans[1]))
                for suffix in self.tensors
            }
            part = WeightSlice(shape, (start, left), (end - begin, right - left))
            try:
                decoding.check_stored(tensors, shape)
                decoding.dequantise(self.method, self.number_format, tensors, part, weight[begin:end])
            except CheckpointError as error:  # of one among hundreds
                raise type(error)(f"{self.weight.name.removesuffix('.weight')}: {error}") from error
        asked = [slice(a - start, b - start) for (a, b), (start, _) in zip((rows, cols), spans, strict=True)]
        return weight if fits else weight[asked[0], asked[1]]

    def _is_across(self, suffix: str) -> bool:
        """Returns True where rows of the weight run along another dim of a tensor than its first: a few lie apart."""
        return any(axis is not None and axis[0] == 0 for axis in self.axes[suffix][1:])

    def _stored(self, reader: Reader, suffix: str, spans: Sequence[Range]) -> Tensor:
        """The part of a tensor that belongs to some rows and columns of the weight."""
        info = self.tensors[suffix]
        parts: list[Range | None] = [None, None]
        for dim, axis in enumerate(self.axes[suffix][: len(info.shape)]):
            if axis is not None and spans[axis[0]] != (0, self.weight.shape[axis[0]]):
                parts[dim] = scale_range(spans[axis[0]], axis[1], info.shape[dim])
        return reader.read_stored(info, rows=parts[0], cols=parts[1])

    def _rows(self, suffix: str, tensor: Tensor, rows: Range) -> Tensor:
        """The part of a tensor, read for some rows of the weight, that belongs to a few of these."""
        for dim, axis in enumerate(self.axes[suffix][: tensor.dim()]):
            if axis is not None and axis[0] == 0:
                begin, end = scale_range(rows, axis[1], tensor.shape[dim])
                tensor = tensor.narrow(dim, begin, end - begin)
        return tensor.contiguous()


@dataclass(frozen=True)
class StoredStack:
    """Linears of all experts of a layer that are quantised in one tensor, and stand for a stack of weights.

    Attributes:
        experts: the weights of each, ``[out, in]``.
        weight: the stack, which lies nowhere.
        transposed: whether that is ``[experts, in, out]``.
        placements: places of the experts' tensors.
    """

    experts: tuple[StoredLinear, ...]
    weight: TensorInfo
    transposed: bool
    placements: Mapping[str, tuple[Placement, ...]]

    @property
    def sources(self) -> Collection[TensorInfo]:
        """The tensors that hold it."""
        return [info for expert in self.experts for info in expert.sources]

    def read(self, reader: Reader, rows: Range, cols: Range, out: Tensor | None = None) -> Tensor:
        """Some experts, and of dim 1 a part, decoded in float32 and rounded to the stack's dtype.

        Raises:
            CheckpointError: a file cannot be read, or its values mean nothing.
        """
        import torch

        shape = (rows[1] - rows[0], cols[1] - cols[0], self.weight.shape[2])
        found = torch.empty(shape, dtype=torch_dtype(self.weight.dtype)) if out is None else out
        for own, expert in zip(found, self.experts[rows[0] : rows[1]], strict=True):
            whole = (0, self.weight.shape[2])
            own.copy_(expert.read(reader, whole, cols).t() if self.transposed else expert.read(reader, cols, whole))
        return found


@dataclass(frozen=True)
class ScaledStack:
    """Weights of all experts of a layer in one tensor of quantised numbers, with one scale for them all.

    Attributes:
        method: its quantisation method.
        number_format: what it holds.
        stored: where the numbers lie, in the weights' own shape.
        scales: suffix -> where a linear's other tensors lie, of one number each.
        weight: the stack of weights, which lies nowhere.
    """

    method: str
    number_format: NumberFormat | ReadOnlyNumbers
    stored: TensorInfo
    scales: Mapping[str, TensorInfo]
    weight: TensorInfo

    @property
    def sources(self) -> Collection[TensorInfo]:
        """The tensors that hold it."""
        return (self.stored, *self.scales.values())

    def read(self, reader: Reader, rows: Range, cols: Range, out: Tensor | None = None) -> Tensor:
        """Some experts, and of dim 1 a part, decoded in float32 and rounded to the stack's dtype.

        Raises:
            CheckpointError: a file cannot be read, or its values mean nothing.
        """
        stored = reader.read_stored(self.stored, rows=rows, cols=cols)
        weight = self.decoded(reader, stored.flatten(0, -2)).view(stored.shape)
        return weight if out is None else out.copy_(weight)

    def decoded(self, reader: Reader, stored: Tensor) -> Tensor:
        """Some of the numbers, ``[rows, columns]`` of any part of the stack, in the weights' dtype.

        Raises:
            CheckpointError: they or the scales mean nothing.
        """
        import torch

        from modelexport.quantization import decoding

        shape = (stored.shape[0], stored.shape[1])
        scales = {suffix: reader.read_stored(info) for suffix, info in self.scales.items()}
        weight = torch.empty(shape, dtype=torch_dtype(self.weight.dtype))
        try:
            decoding.check_stored({"weight": stored, **scales}, shape)
            return decoding.dequantise(
                self.method, self.number_format, {"weight": stored, **scales}, WeightSlice.whole(shape), weight
            )
        except CheckpointError as error:
            raise type(error)(f"{self.weight.name}: {error}") from error


def decoded(checkpoint: Checkpoint) -> Checkpoint:
    """The plain model that a quantised checkpoint stands for; an unquantised one is returned as it is.

    The scales of a KV cache are left out.

    Raises:
        CheckpointError: config.json is missing or contradicts the tensors; or no number format of ours holds a linear.
        PlanError: an unknown architecture, or a method of quantisation whose tensors are not known.
    """
    if read_quantization_config(checkpoint.config) is None:
        return checkpoint
    matched = match(checkpoint)
    problems = matched.problems()
    dtype = model_dtype(matched)
    infos, left_out = dict(checkpoint.infos), dict(checkpoint.left_out)
    computed: dict[str, ComputedTensor] = {}
    placements = dict(checkpoint.placements)
    formats = HeldFormats()
    for module in matched.modules:
        of_a_draft = module.place.draft is not None and module.place.module.parameter in KV_SCALES
        if module.place.is_cache_scale or of_a_draft:
            for info in module.tensors.values():
                left_out[info.name] = "a scale of the source's KV cache: --kv-cache makes new ones"
                del infos[info.name]
        if module.place.module.experts is not None and module.place.module.parameter not in module.tensors:
            quantization = matched.model.quantization
            scheme = None if quantization is None else quantization.scheme_of(module.place.name)
            assert scheme is not None, "config.json quantises stacks"
            shape = matched.model.dimensions.weight_shape(module.place.module)
            stack = _decoded_stack(checkpoint, module, scheme, shape, dtype)
            for info in module.tensors.values():
                del infos[info.name]
            infos[stack.weight.name] = stack.weight
            computed[stack.weight.name] = stack
            placements |= stack.placements
        if module.scheme is None:
            continue
        if module.place.module.experts is not None:
            scaled = _scaled_stack(module, module.scheme, dtype)
            for info in scaled.sources:
                del infos[info.name]
            infos[scaled.weight.name] = scaled.weight
            computed[scaled.weight.name] = scaled
            continue
        try:
            shape = matched.model.dimensions.weight_shape(module.place.module)
            linear = stored_linear(module, module.scheme, shape, dtype, formats)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        for info in linear.sources:
            del infos[info.name]
        infos[linear.weight.name] = linear.weight
        computed[linear.weight.name] = linear
    if problems:
        refuse(str(checkpoint.directory), problems)
    config = {key: value for key, value in (checkpoint.config or {}).items() if key not in QUANTIZATION_KEYS}
    return replace(checkpoint, infos=infos, config=config, left_out=left_out, computed=computed, placements=placements)


def _decoded_stack(
    checkpoint: Checkpoint, matched: MatchedModule, scheme: Scheme, shape: tuple[int, ...], dtype: str
) -> StoredStack:
    """A stack of experts that are quantised in it.

    Args:
        scheme: of each expert's linear.
        shape: of the stack of weights.
        dtype: of the model's unquantised numbers.

    Raises:
        CheckpointError: no number format of ours holds such weights.
    """
    module = matched.place.module
    assert module.experts is not None
    name = matched.place.tensor(module.parameter)
    weight = TensorInfo(name, dtype, shape, Path(), 0, tensor_nbytes(dtype, shape))
    out_in = shape[:0:-1] if module.experts.transposed else shape[1:]
    stored = {ending.removeprefix(f"{module.parameter}_"): info for ending, info in matched.tensors.items()}
    number_format, exact = _held(matched.place.name, scheme, stored)
    axes = {suffix: spec.axes for suffix, spec in tensor_specs(scheme, (out_in[0], out_in[1])).items()}
    experts, placements = [], {}
    for e in range(shape[0]):
        tensors = {}
        for suffix, info in stored.items():
            own = replace(info, name=f"{info.name}[{e}]", shape=info.shape[1:], nbytes=info.nbytes // shape[0])
            tensors[suffix] = own
            parts = checkpoint.placements.get(info.name) or (whole_place(info),)
            placements[own.name] = tuple(part.at(e) for part in parts if part.box[0][0] <= e < part.box[0][1])
        linear = TensorInfo(f"{name}[{e}]", dtype, out_in, Path(), 0, tensor_nbytes(dtype, out_in))
        experts.append(StoredLinear(scheme.method, number_format, tensors, axes, linear, exact))
    return StoredStack(tuple(experts), weight, module.experts.transposed, placements)


def _scaled_stack(matched: MatchedModule, scheme: Scheme, dtype: str) -> ScaledStack:
    """A stack of experts that has one scale.

    Raises:
        CheckpointError: no number format of ours holds such weights.
    """
    parameter = matched.place.module.parameter
    stored = matched.tensors[parameter]
    scales = {name.removeprefix(f"{parameter}_"): info for name, info in matched.tensors.items() if name != parameter}
    number_format, _ = _held(matched.place.name, scheme, scales)
    weight = TensorInfo(stored.name, dtype, stored.shape, Path(), 0, tensor_nbytes(dtype, stored.shape))
    return ScaledStack(scheme.method, number_format, stored, scales, weight)


def model_dtype(matched: Matched) -> str:
    """The dtype of a model's unquantised numbers, as config.json says or as its tensors are."""
    config = matched.model.config
    said = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    if (named := find_dtype(said)) in FLOATS:
        return named
    plain = (info.dtype for module in matched.modules if module.scheme is None for info in module.tensors.values())
    return next((dtype for dtype in plain if dtype in ("BF16", "F16")), "F32")


class HeldFormats:
    """The number formats of one checkpoint's linears: of a hundred thousand that have a few schemes."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, frozenset[str]], tuple[NumberFormat | ReadOnlyNumbers, bool]] = {}
        self._schemes: list[Scheme] = []  # kept, for their ids are keys

    def of(
        self, name: str, scheme: Scheme, tensors: Mapping[str, TensorInfo]
    ) -> tuple[NumberFormat | ReadOnlyNumbers, bool]:
        """Returns what :func:`_held` does.

        Raises:
            CheckpointError: no number format of ours holds such weights.
        """
        key = (id(scheme), frozenset(info.dtype for suffix, info in tensors.items() if suffix.endswith(_SCALE_LIKE)))
        if key not in self._known:
            self._known[key] = _held(name, scheme, tensors)
            self._schemes.append(scheme)
        return self._known[key]


def stored_linear(
    matched: MatchedModule, scheme: Scheme, shape: tuple[int, ...], dtype: str, formats: HeldFormats
) -> StoredLinear:
    """A quantised linear of a checkpoint.

    Args:
        shape: of its weight.
        dtype: of the model's unquantised numbers.
        formats: of the checkpoint's other linears.

    Raises:
        CheckpointError: no number format of ours holds such weights.
    """
    number_format, exact = formats.of(matched.place.name, scheme, matched.tensors)
    stored = {suffix: info for suffix, info in matched.tensors.items() if suffix != "bias"}
    tensors, axes = viewed(scheme, stored, (shape[0], shape[1]))
    axes = {suffix: matched.specs[suffix].axes for suffix in tensors} | axes
    weight = TensorInfo(matched.place.tensor("weight"), dtype, shape, Path(), 0, tensor_nbytes(dtype, shape))
    return StoredLinear(scheme.method, number_format, tensors, axes, weight, exact)


def viewed(
    scheme: Scheme, tensors: Mapping[str, TensorInfo], shape: tuple[int, int]
) -> tuple[dict[str, TensorInfo], dict[str, Axes]]:
    """A linear's tensors of the dtypes and shapes that they are read in; and the axes of those that are not as stored.

    Args:
        tensors: suffix -> where it lies.
        shape: of the weight.
    """
    found = views(scheme, {suffix: (info.dtype, info.shape) for suffix, info in tensors.items()}, shape)
    infos = {suffix: replace(tensors[suffix], dtype=view.dtype, shape=view.shape) for suffix, view in found.items()}
    return {**tensors, **infos}, {suffix: view.axes for suffix, view in found.items()}


def _held(name: str, scheme: Scheme, tensors: Mapping[str, TensorInfo]) -> tuple[NumberFormat | ReadOnlyNumbers, bool]:
    """The number format of a linear's tensors; and whether it says all that the scheme does, or only the weights.

    Raises:
        CheckpointError: none holds such weights.
    """
    from modelexport.quantization.formats import get, has_groups, meaning, names, of_scheme

    only_read = read_only_numbers(scheme)
    if only_read is not None:
        return only_read, False
    scales = {info.dtype for suffix, info in tensors.items() if suffix.endswith(_SCALE_LIKE)}
    floating = sorted(scales.intersection(FLOATS))
    dtype = floating[0] if len(floating) == 1 else "F32" if floating else of_method(scheme.method).SCALES
    kept = None if dtype is None else torch_dtype(dtype)
    try:
        return of_scheme(scheme, scale_dtype=kept), True
    except CheckpointError as error:
        refused = error
    weights = {key: value for key, value in scheme.weights.items() if key != "actorder"}
    size = weights.get("group_size") if weights.get("strategy") == "group" else -1
    for known in names():
        try:
            found = get(known, group_size=size if has_groups(known) else None, scale_dtype=kept)
        except UsageError:  # has not groups of that size
            continue
        if found.quantised and not found.has_static_inputs and meaning(found.weight_arguments()) == meaning(weights):
            return found, False
    raise CheckpointError(f"{name}: {refused}")


def _widened(span: Range, unit: int, size: int) -> Range:
    """The smallest range around ``span`` that begins and ends on multiples of ``unit``, or at the end."""
    return (span[0] // unit * unit, min(-(-span[1] // unit) * unit, size))
