"""LayerConfig: the layer that a rank emits, and the merge of the ranks' parts into one.

A tree of dataclasses whose leaves are numbers, strings and tensors. :func:`split` separates it into JSON and
named tensors and :func:`restore` is its inverse; :func:`merge` joins the ranks' parts along each partition.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from modelexport.distributed.transport.tree import register_config, restore, split
from modelexport.system.dtypes import as_integers

__all__ = [
    "LayerConfig",
    "ModuleConfig",
    "TensorShard",
    "merge",
    "restore",
    "split",
    "to_json",
]

Box = tuple[tuple[int, int], ...]


@register_config
@dataclass
class TensorShard:
    """A rectangle of one tensor of the checkpoint.

    Attributes:
        dtype: safetensors name of the dtype, e.g. ``"F8_E4M3"``.
        global_shape: shape of the whole tensor as the checkpoint stores it.
        offset: where the rectangle begins in it.
        shape: the rectangle's shape.
        data: its elements, or None where only the description travels.
    """

    dtype: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    data: Tensor | None = None

    @property
    def box(self) -> Box:
        """Half-open range along each dimension."""
        return tuple((o, o + n) for o, n in zip(self.offset, self.shape, strict=True))

    @property
    def is_whole(self) -> bool:
        """True if the rectangle is the whole tensor."""
        return self.shape == self.global_shape


@register_config
@dataclass
class ModuleConfig:
    """One module of a layer (a linear, norm, embedding or head) as one rank holds it.

    Attributes:
        kind: ``linear``, ``norm``, ``embedding``, ``head``, ``router``, ``vector`` or ``other``.
        role: what it does, e.g. ``"attention.q"``.
        partition: ``column`` (cut along dim 0), ``row`` (dim 1) or ``replicated``.
        global_shape, local_shape: of its weight in elements, ``[out_features, in_features]`` for a linear;
            ``local_shape`` is what the rank holds, which may be more than it emits.
        number_format: ``none`` or the name given to ``--quant``.
        group_size: weights along ``in_features`` that share a scale, or None.
        tensors: name within the module (``weight``, ``weight_scale``, ``bias``) -> the shard emitted;
            empty where another rank emits what this one holds.
        noise, signal: sums of (w - rounded)^2 and w^2 over the weights that the rank emits; None where nothing is
            rounded, or compared.
    """

    kind: Literal["linear", "norm", "embedding", "head", "router", "vector", "other"]
    role: str
    partition: Literal["column", "row", "replicated"]
    global_shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    number_format: str = "none"
    group_size: int | None = None
    tensors: dict[str, TensorShard] = field(default_factory=dict)
    noise: float | None = None
    signal: float | None = None


@register_config
@dataclass
class LayerConfig:
    """A layer: a decoder layer, or what stands before and after them (embedding, final norm, head).

    Attributes:
        name: its name in the checkpoint, e.g. ``"model.layers.3"``.
        index: number of a decoder layer, None for the others.
        modules: module name relative to ``name`` (``""`` where the layer is one module) -> its config.
    """

    name: str
    index: int | None
    modules: dict[str, ModuleConfig] = field(default_factory=dict)

    def tensor_name(self, module: str, tensor: str) -> str:
        """Full name of a tensor in the checkpoint."""
        return ".".join(part for part in (self.name, module, tensor) if part)


def merge(parts: Sequence[LayerConfig]) -> LayerConfig:
    """Join the parts of one layer that the ranks (or consecutive slabs of it) emitted.

    For each tensor the shards are joined along the dimension in which they differ. The result covers their
    bounding box, which is the whole tensor if the parts are all of them. Shards without data merge to a
    description without data.

    Raises:
        ValueError: the parts disagree on what they describe, overlap, or leave a hole.
    """
    if not parts:
        raise ValueError("nothing to merge")
    first = parts[0]
    merged = LayerConfig(first.name, first.index)
    for part in parts:
        if (part.name, part.index) != (first.name, first.index):
            raise ValueError(f"parts of different layers: {first.name} and {part.name}")
        if list(part.modules) != list(first.modules):
            raise ValueError(f"{first.name}: parts have modules {list(first.modules)} and {list(part.modules)}")
    for name in first.modules:
        modules = [part.modules[name] for part in parts]
        head = modules[0]
        for module in modules:
            if _nature(module) != _nature(head):
                raise ValueError(f"{first.name} {name}: parts disagree: {_nature(head)} and {_nature(module)}")
        tensor_names = dict.fromkeys(tensor for module in modules for tensor in module.tensors)
        tensors = {
            tensor: _join([m.tensors[tensor] for m in modules if tensor in m.tensors], merged.tensor_name(name, tensor))
            for tensor in tensor_names
        }
        noise, signal = (_sum(getattr(module, key) for module in modules) for key in ("noise", "signal"))
        merged.modules[name] = replace(head, local_shape=head.global_shape, tensors=tensors, noise=noise, signal=signal)
    return merged


def _sum(values: Iterable[float | None]) -> float | None:
    """Sum of those that are there, correctly rounded; None where none is."""
    there = [value for value in values if value is not None]
    return math.fsum(there) if there else None


def to_json(layer: LayerConfig) -> dict[str, Any]:
    """The description of a whole layer as plain JSON, as modelexport.json keeps it.

    Data, offsets and local shapes are left out: what is merged is whole.
    """
    modules = {}
    for name, module in layer.modules.items():
        fields = {key: getattr(module, key) for key in ("kind", "role", "partition", "number_format", "group_size")}
        tensors = {t: {"dtype": s.dtype, "shape": list(s.global_shape)} for t, s in module.tensors.items()}
        modules[name] = {**fields, "shape": list(module.global_shape), "tensors": tensors}
    return {"name": layer.name, "index": layer.index, "modules": modules}


def _nature(module: ModuleConfig) -> tuple[object, ...]:
    """The fields in which all parts of a module must agree."""
    return (
        module.kind,
        module.role,
        module.partition,
        module.global_shape,
        module.number_format,
        module.group_size,
    )


def _join(shards: list[TensorShard], name: str) -> TensorShard:
    """Join rectangles that differ along one dimension at most."""
    first = shards[0]
    if len(shards) == 1:
        return first
    for shard in shards:
        if (shard.dtype, shard.global_shape) != (first.dtype, first.global_shape):
            raise ValueError(
                f"{name}: parts disagree: {first.dtype} {list(first.global_shape)} "
                f"and {shard.dtype} {list(shard.global_shape)}"
            )
    varying = [d for d in range(len(first.shape)) if len({shard.box[d] for shard in shards}) > 1]
    if len(varying) != 1:
        raise ValueError(f"{name}: {len(shards)} parts do not tile it along one dimension")
    dim = varying[0]
    ordered = sorted(shards, key=lambda shard: shard.box[dim])
    for left, right in pairwise(ordered):
        if left.box[dim][1] != right.box[dim][0]:
            raise ValueError(
                f"{name}: a part ends at {left.box[dim][1]} and the next begins at {right.box[dim][0]} "
                f"along dimension {dim}"
            )
    datas = [shard.data for shard in ordered]
    present = [data for data in datas if data is not None]
    if present and len(present) != len(datas):
        raise ValueError(f"{name}: some parts have data and others have none")
    shape = list(first.shape)
    shape[dim] = ordered[-1].box[dim][1] - ordered[0].box[dim][0]
    data = _concatenate(present, dim) if present else None
    return TensorShard(first.dtype, first.global_shape, ordered[0].offset, tuple(shape), data)


def _concatenate(pieces: list[Tensor], dim: int) -> Tensor:
    """``torch.cat`` for every dtype: those without arithmetic (fp8, uint16, ...) are copied as integers."""
    return torch.cat([as_integers(piece) for piece in pieces], dim).view(pieces[0].dtype)
