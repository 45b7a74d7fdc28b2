"""The cuts of each tensor of a checkpoint over ranks: its family's, on the units that its number format keeps together.

The tensors of a quantised linear go with its weight: a rank that holds some of its rows holds their scales, their zero
points and their packed words. Where a format keeps several elements of the weight together (a group, a block, a packed
word), all of its tensors are cut there and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from modelexport.checkpoints.safetensors.file import Checkpoint, TensorInfo, dtype_names
from modelexport.errors import CheckpointError, PlanError, did_you_mean
from modelexport.models.architecture import Dimensions, Family, Module, family_of, read_dimensions
from modelexport.models.families.base import AxisSize
from modelexport.quantization.methods import (
    FLOATS,
    QuantizationConfig,
    Scheme,
    StoredTensorSpec,
    extras,
    methods,
    read_quantization_config,
    tensor_specs,
)
from modelexport.sharding.rules import CutRange, Spread, TensorRule

Stages = tuple[Literal["first", "last"], ...]

KV_SCALES = ("q_scale", "k_scale", "v_scale", "k_zero_point", "v_zero_point")
_LISTED = 8
MOST_BLOCKS = 1_000_000


@dataclass(frozen=True)
class Place:
    """One module of the model, where it stands. ``path`` is as its family declares it."""

    name: str
    module: Module
    layer: int | None = None
    expert: int | None = None
    stages: Stages = ()

    def tensor(self, suffix: str) -> str:
        """The name of a tensor of the module; parameters of the model itself have no module in front."""
        return f"{self.name}.{suffix}" if self.name else suffix


def places(family: Family, dims: Dimensions) -> Iterator[Place]:
    """Every module of a model in its order: before the layers, layer by layer, behind them; no head that is tied."""
    for module in family.before:
        tied = dims.tied_embeddings and module.kind == "embedding"
        yield Place(module.path, module, stages=("first", "last") if tied else ("first",))
    for i in range(dims.layers):
        prefix = family.layer_prefix.format(i=i)
        for path, expert, module in family.modules_of_layer(dims, i):
            yield Place(f"{prefix}.{path}" if path else prefix, module, i, expert)
    for module in family.after:
        if not (module.kind == "head" and dims.tied_embeddings):
            yield Place(module.path, module, stages=("last",))


def tensor_rules(checkpoint: Checkpoint) -> list[TensorRule]:
    """The rules by which every tensor of a checkpoint may be cut, from its headers and its config.json.

    Any number format of the quantisation methods that are known, or none. Tensors that are no part of the model have
    no rule (:func:`left_out` names them).

    Returns:
        In the model's order: before the layers, layer by layer, behind them.

    Raises:
        CheckpointError: config.json is missing or contradicts the tensors; everything that is missing, unknown or of
            the wrong dtype or shape is listed.
        PlanError: an unknown architecture, or another method of quantisation.
    """
    model = _Model.of(checkpoint)
    dropped = left_out(checkpoint)
    infos = {name: info for name, info in checkpoint.infos.items() if name not in dropped}
    builder = _Builder(model, f"{checkpoint.directory}: ", infos=infos)
    rules = [rule for place in places(model.family, model.dims) for rule in builder.found(place)]
    if model.quantization is not None and model.quantization.kv_cache_scheme is not None:
        rules = _with_kv_scales(rules, builder)
    builder.finish()
    return rules


def left_out(checkpoint: Checkpoint) -> dict[str, str]:
    """The tensors of a checkpoint that are no part of its model -> why; a second copy of tied embeddings is one."""
    model = _Model.of(checkpoint)
    found = {}
    embedding = next((m.path for m in model.family.before if m.kind == "embedding"), "")
    heads = tuple(f"{m.path}." for m in model.family.after if m.kind == "head")
    own = {f"{m.path}.{m.parameter}" for m in model.family.before if m.kind == "other"}  # a tied head's bias
    for name in checkpoint.infos:
        reason = model.family.left_out(name, model.dims)
        if reason is not None:
            found[name] = reason
        elif model.dims.tied_embeddings and name.startswith(heads) and name not in own:
            found[name] = f"tied to {embedding}.weight, written once"
    return found


def expected_rules(
    config: Mapping[str, Any], dtypes: Callable[[str], str] | str, *, has: Callable[[str], bool] | None = None
) -> list[TensorRule]:
    """The same for a model of which only config.json is known: its tensors must be these, with these shapes.

    Args:
        config: config.json's content.
        dtypes: the dtype of a tensor by its name, or that of all; where config.json leaves it open.
        has: whether a tensor is there that config.json does not announce: asked for the bias of each module that may
            have one. None: there is none.

    Raises:
        CheckpointError: config.json lacks a number, or contradicts itself.
        PlanError: an unknown architecture, or another method of quantisation.
    """
    model = _Model.read(config, "config.json")
    if model.dims.most_blocks > MOST_BLOCKS:  # nothing else to hold a stranger's number against
        each = f" of {model.dims.experts} experts" if model.dims.experts else ""
        raise CheckpointError(f"config.json: {model.dims.layers} layers{each}; at most {MOST_BLOCKS:,} are believed")
    builder = _Builder(model, "config.json: ", dtypes=dtypes if callable(dtypes) else lambda _: dtypes, has=has)
    return [rule for place in places(model.family, model.dims) for rule in builder.expected(place)]


@dataclass(frozen=True)
class _Model:
    """The model as config.json describes it."""

    config: Mapping[str, Any]
    family: Family
    dims: Dimensions
    quantization: QuantizationConfig | None

    @classmethod
    def read(cls, config: Mapping[str, Any], where: str) -> _Model:
        family = family_of(dict(config))
        quantization = read_quantization_config(config)
        if quantization is not None and quantization.method not in methods():
            raise PlanError(
                f"{where}: the model is quantised (quant_method '{quantization.method}'), and how such tensors may be "
                f"cut is known for {', '.join(methods())} only; give a checkpoint of these, or an unquantised one"
            )
        if quantization is not None and (why := getattr(methods()[quantization.method], "NO_SOURCE", "")):
            raise PlanError(f"{where}: {why}")
        return cls(family.complete(config), family, read_dimensions(config, family), quantization)

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> _Model:
        directory, count = checkpoint.directory, len(checkpoint.infos)
        if checkpoint.config is None:
            raise CheckpointError(
                f"{directory} has no config.json; give --config DIR, the directory or file of the model's config.json"
            )
        model = cls.read(checkpoint.config, str(directory))
        for what, number in (("layers", model.dims.layers), ("experts", model.dims.most_blocks)):
            if number > count:  # before any loop over a number that a stranger wrote
                raise CheckpointError(
                    f"{directory}: config.json says {number} {what}, but there are only {count} tensors"
                )
        return model

    def scheme(self, place: Place) -> Scheme | None:
        if self.quantization is None or place.module.kind not in ("linear", "head"):
            return None
        return self.quantization.scheme_of(place.name)


@dataclass
class _Builder:
    """Makes rules, and collects what is wrong on the way."""

    model: _Model
    where: str
    infos: dict[str, TensorInfo] = field(default_factory=dict)
    dtypes: Callable[[str], str] = lambda name: "BF16"
    has: Callable[[str], bool] | None = None
    problems: list[str] = field(default_factory=list)

    def found(self, place: Place) -> list[TensorRule]:
        """The rules of a module's tensors; they are taken from ``infos``."""
        promises = self._promises(place)
        bias = f"{place.name}.bias"
        if place.module.kind != "other" and (bias in self.infos or place.module.has_bias(self.model.config)):
            promises["bias"] = self._bias(place)
        tensors = {}
        for suffix, promise in promises.items():
            name = place.tensor(suffix)
            info = self.infos.pop(name, None)
            if info is None:
                self.problems.append(f"{name} is missing{self._hint(name, place, suffix)}")
            elif info.dtype not in promise.dtypes or info.shape not in promise.shapes:
                self.problems.append(f"{name} is {info.dtype} {list(info.shape)} but config.json makes it {promise}")
            else:
                tensors[suffix] = (info.dtype, info.shape)
        return _rules(place, self.model.dims, promises, tensors)

    def expected(self, place: Place) -> list[TensorRule]:
        """The rules of the tensors that a module must have."""
        promises = self._promises(place)
        bias = f"{place.name}.bias"
        if place.module.has_bias(self.model.config) or (
            self.has is not None and place.module.bias is not False and self.has(bias)
        ):
            promises["bias"] = self._bias(place)
        tensors = {}
        for suffix, promise in promises.items():
            wanted = self.dtypes(place.tensor(suffix)) if len(promise.dtypes) > 1 else ""
            tensors[suffix] = (wanted if wanted in promise.dtypes else promise.dtypes[0], promise.shapes[0])
        return _rules(place, self.model.dims, promises, tensors)

    def finish(self) -> None:
        """Raise, if anything was wrong or something is left over."""
        if self.infos:
            names, family = sorted(self.infos), self.model.family.name
            self.problems.append(
                f"{len(names)} tensor(s) are not part of a {family} model of {self.model.dims.layers} layers: "
                f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
            )
        if self.problems:
            problems = list(dict.fromkeys(self.problems))
            more = f"; and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
            raise CheckpointError(self.where + "; ".join(problems[:_LISTED]) + more)

    def _promises(self, place: Place) -> dict[str, StoredTensorSpec]:
        shape, scheme = self.model.dims.weight_shape(place.module), self.model.scheme(place)
        if scheme is not None:
            try:
                extra = extras(scheme, (shape[0], shape[1]))
                present = {s: promise for s, promise in extra.items() if place.tensor(s) in self.infos}
                return {**tensor_specs(scheme, (shape[0], shape[1])), **present}
            except CheckpointError as error:
                self.problems.append(str(error))
        dtypes = dtype_names() if place.module.kind == "other" else (*FLOATS, "F64")
        stored = self.model.dims.stored_shapes(place.module)
        plain = StoredTensorSpec(dtypes, stored, tuple((d, 1) for d in range(len(shape))))
        return {place.module.parameter: plain}

    def _bias(self, place: Place) -> StoredTensorSpec:
        rows = self.model.dims.weight_shape(place.module)[0]
        return StoredTensorSpec((*FLOATS, "F64"), ((rows,),), ((0, 1),))

    def _hint(self, name: str, place: Place, suffix: str) -> str:
        announced = place.module.bias
        if suffix == "bias" and isinstance(announced, str):
            return f", though config.json says {announced}"
        return did_you_mean(name, self.infos) if len(self.infos) < 200 else ""


def _rules(
    place: Place,
    dims: Dimensions,
    promises: Mapping[str, StoredTensorSpec],
    tensors: Mapping[str, tuple[str, tuple[int, ...]]],
) -> list[TensorRule]:
    """The rules of one module's tensors: ``suffix -> (dtype, shape)``."""
    module = place.module
    along = module.cut_dim
    parts: tuple[CutRange, ...] = ()
    if along is not None:
        kept = math.lcm(
            *(axis[1] for p in promises.values() for axis in p.axes if axis is not None and axis[0] == along)
        )
        parts = weight_parts(module, dims, kept)
    rules = []
    for suffix, (dtype, shape) in tensors.items():
        dim, unit = _own_dim(promises[suffix], along, len(shape))
        if dim and shape != promises[suffix].shapes[0] and module.either_way:  # its last two dims are swapped
            dim = 2 * len(shape) - 3 - dim
        rules.append(
            TensorRule(
                name=place.tensor(suffix),
                dtype=dtype,
                shape=shape,
                module=place.name,
                path=module.path,
                parameter=suffix,
                role=module.role,
                layer=place.layer,
                stages=place.stages,
                expert=place.expert,
                experts=shape[0] if module.stacked and shape else 0,
                dim=dim,
                parts=() if dim is None else tuple(_per(part, unit) for part in parts),
            )
        )
    return rules


def weight_parts(module: Module, dims: Dimensions, kept: int = 1) -> tuple[CutRange, ...]:
    """The ranges of a module's cut dimension, in elements of its weight.

    Args:
        kept: elements along it that its number format keeps together.
    """
    parts: list[CutRange] = []
    start = 0
    for role, axis in module.axes:
        along = dims.axis(axis)
        size, heads = along.size, along.heads
        unit = math.lcm(along.unit, kept)
        if along.shared and heads == 1:
            unit = size  # never cut, only shared: its last block may be short
        parts.append(
            CutRange(
                role=role,
                start=start,
                stop=start + size,
                unit=unit,
                spread=_spread(axis, along),
                heads=heads,
            )
        )
        start += size
    if any(part.start % kept for part in parts):  # two of them share a group: they cannot be told apart
        return (CutRange(role=module.role, start=0, stop=start, unit=start),)
    return tuple(parts)


def _spread(name: str, axis: AxisSize) -> Spread:
    if name == "vocab":
        return "padded"
    return "kv_heads" if axis.shared else "heads" if axis.heads else "even"


def _own_dim(promise: StoredTensorSpec, along: int | None, rank: int) -> tuple[int | None, int]:
    """The dim of a tensor that runs along the weight's cut one, and the weight's elements for each of its own."""
    for dim, axis in enumerate(promise.axes[:rank]):
        if axis is not None and axis[0] == along:
            return dim, axis[1]
    return None, 1


def _per(part: CutRange, unit: int) -> CutRange:
    """A part of the weight, in elements of a tensor that has one for each ``unit`` of it."""
    if unit == 1:
        return part
    kept = -(-part.unit // unit)
    return replace(part, start=part.start // unit, stop=-(-part.stop // unit), unit=kept, stands_for=unit)


def _with_kv_scales(rules: Sequence[TensorRule], builder: _Builder) -> list[TensorRule]:
    """Add the scales of the KV cache, one number each, at the end of their layers."""
    prefix = builder.model.family.layer_prefix
    quantization, attention = builder.model.quantization, builder.model.family.attention or "self_attn"
    assert quantization is not None
    own = methods()[quantization.method].KV_SCALES.values()
    added: dict[int, list[TensorRule]] = {}
    for i in range(builder.model.dims.layers):
        for where in dict.fromkeys((*KV_SCALES, *own)):
            module, _, suffix = f"{prefix.format(i=i)}.{attention}.{where}".rpartition(".")
            info = builder.infos.get(f"{module}.{suffix}")
            if info is not None and math.prod(info.shape) == 1:
                del builder.infos[info.name]
                added.setdefault(i, []).append(
                    TensorRule(
                        name=info.name,
                        dtype=info.dtype,
                        shape=info.shape,
                        module=module,
                        path=module.removeprefix(f"{prefix.format(i=i)}."),
                        parameter=suffix,
                        role=f"attention.{suffix[0]}",
                        layer=i,
                    )
                )
    ordered: list[TensorRule] = []
    for number, rule in enumerate(rules):
        ordered.append(rule)
        if rule.layer is not None and (number + 1 == len(rules) or rules[number + 1].layer != rule.layer):
            ordered += added.get(rule.layer, [])
    return ordered
