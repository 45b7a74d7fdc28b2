"""Stacks of experts taken apart: each has linears of its own, read where they lie in the stack; and the inverse.

The view of a checkpoint whose experts of a layer are one tensor (``experts.gate_up_proj``, ``[experts, 2 *
intermediate, hidden]``), in the way of :mod:`modelexport.models.decoded`: whatever works on linears works on it, with
the bytes that a checkpoint of the same weights by expert gives. No stack is ever in memory, only what is asked for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from modelexport.checkpoints.safetensors.file import Checkpoint, Reader, TensorInfo, tensor_nbytes, torch_dtype
from modelexport.checkpoints.safetensors.placement import Placement, whole_place
from modelexport.errors import CheckpointError, PlanError
from modelexport.models.architecture import family_of, read_dimensions
from modelexport.models.decoded import ScaledStack, StoredLinear, StoredStack, decoded
from modelexport.models.families.base import ExpertStack, Module
from modelexport.models.in_memory import MemoryTensor
from modelexport.models.matching import ModelDescription, too_many_blocks
from modelexport.quantization.methods import read_quantization_config
from modelexport.sharding.plan import Range
from modelexport.system.dtypes import FLOATS

if TYPE_CHECKING:
    from torch import Tensor

    from modelexport.checkpoints.safetensors.reader import ComputedTensor

__all__ = [
    "JoinedStack",
    "TransposedLinear",
    "apart_as",
    "as_written",
    "experts_apart",
    "experts_stacked",
    "held",
    "stacked_as",
]


@dataclass(frozen=True)
class TransposedLinear:
    """The linear of an expert in a stack that has input features ahead of output features.

    Attributes:
        stored: what lies there: ``[in, out of all the expert's linears]``.
        start, step: the first of its output features among those, and how many further the next one is.
        scaled: the stack, where its numbers are quantised.
    """

    stored: TensorInfo
    start: int
    step: int
    scaled: ScaledStack | None = None

    @property
    def sources(self) -> tuple[TensorInfo, ...]:
        """The tensors that it is read from."""
        return (self.stored, *(() if self.scaled is None else self.scaled.scales.values()))

    def read(self, reader: Reader, rows: Range, cols: Range, out: Tensor | None = None) -> Tensor:
        """Rows and columns of it, in its dtype.

        Raises:
            CheckpointError: a file cannot be read.
        """
        first = self.start + self.step * rows[0]
        last = self.start + self.step * (rows[1] - 1) + 1 if rows[1] > rows[0] else first
        found = reader.read_stored(self.stored, rows=cols, cols=(first, last))
        weight = found[:, :: self.step].t().contiguous()
        return weight if self.scaled is None else self.scaled.decoded(reader, weight)


@dataclass(frozen=True)
class JoinedStack:
    """A stack whose experts' linears (or their biases) lie each by itself.

    Attributes:
        stack: which they are, and how they lie in it.
        weight: the stack, which lies nowhere.
        parts: for each expert its linears', in their order, and what they are computed by, where they are.
    """

    stack: ExpertStack
    weight: TensorInfo
    parts: tuple[tuple[tuple[TensorInfo, ComputedTensor | None], ...], ...]

    @property
    def sources(self) -> Collection[TensorInfo]:
        """The tensors that it is read from."""
        found: list[TensorInfo] = []
        for own in self.parts:
            for info, computed in own:
                found += [info] if computed is None else computed.sources
        return found

    def read(self, reader: Reader, rows: Range, cols: Range, out: Tensor | None = None) -> Tensor:
        """A part of dim 0 and of dim 1, in its dtype.

        Raises:
            CheckpointError: a file cannot be read.
        """
        import torch

        height = 1 if self.stack.joined is None else self.weight.shape[0] // len(self.parts)
        found = []
        for e in range(rows[0] // height, -(-rows[1] // height)):
            expert = self._expert(reader, e)
            expert = expert.unsqueeze(0) if self.stack.joined is None else expert
            found.append(expert[max(0, rows[0] - e * height) : rows[1] - e * height, cols[0] : cols[1]])
        if not found:
            return torch.empty(0, cols[1] - cols[0], *self.weight.shape[2:], dtype=torch_dtype(self.weight.dtype))
        return torch.cat(found, out=out) if out is not None else torch.cat(found)

    def _expert(self, reader: Reader, number: int) -> Tensor:
        import torch

        own = []
        for info, computed in self.parts[number]:
            spans = [(0, size) for size in (*info.shape, 1)[:2]]
            own.append(reader.read_stored(info) if computed is None else computed.read(reader, spans[0], spans[1]))
        whole = torch.stack(own, dim=1).flatten(0, 1) if self.stack.interleaved else torch.cat(own)
        return whole.t() if self.stack.transposed and self.stack.parameter != "bias" else whole


def experts_stacked(checkpoint: Checkpoint) -> Checkpoint:
    """The same model with the stacks that checkpoints of its type have in place of linears of each expert.

    A model whose experts are quantised, one by one, is returned as it is, and so is one whose checkpoints have no
    stacks, or of which any expert is missing.

    Raises:
        CheckpointError: config.json lacks a number.
        PlanError: the architecture is unknown.
    """
    config = checkpoint.config
    family = None if config is None else family_of(config)
    if config is None or family is None or not family.has_stacks or family.as_in(checkpoint.infos) is family:
        return checkpoint
    dimensions = read_dimensions(config, family)
    if too_many_blocks(dimensions, len(checkpoint.infos)):  # whoever plans says so
        return checkpoint
    joined: dict[str, JoinedStack] = {}
    for place in ModelDescription(config, family, dimensions, None).places():
        experts = place.module.experts
        if experts is not None:
            name, shape = place.tensor(place.module.parameter), dimensions.weight_shape(place.module)
            parts = _parts_of(checkpoint, experts, place.name.removesuffix(place.path), experts.by_expert(shape)[0])
            dtypes = {info.dtype for own in parts for info, _ in own}
            if len(dtypes) != 1 or not dtypes <= set(FLOATS):
                return checkpoint
            (dtype,) = dtypes
            weight = TensorInfo(name, dtype, shape, checkpoint.directory, 0, tensor_nbytes(dtype, shape))
            joined[name] = JoinedStack(experts, weight, parts)
    taken = {info.name for stack in joined.values() for own in stack.parts for info, _ in own}
    infos = {name: info for name, info in checkpoint.infos.items() if name not in taken}
    if family.as_in(infos) is not family:
        return checkpoint
    infos |= {name: stack.weight for name, stack in joined.items()}
    computed = {name: each for name, each in checkpoint.computed.items() if name not in taken}
    return replace(checkpoint, infos=infos, computed={**computed, **joined})


def _parts_of(
    checkpoint: Checkpoint, experts: ExpertStack, prefix: str, count: int
) -> tuple[tuple[tuple[TensorInfo, ComputedTensor | None], ...], ...]:
    """The linears of each expert of a layer; none where one is missing."""
    names = [[f"{prefix}{path.format(e=e)}.{experts.parameter}" for _, path in experts.linears] for e in range(count)]
    if any(name not in checkpoint.infos for own in names for name in own):
        return ()
    return tuple(tuple((checkpoint.infos[name], checkpoint.computed.get(name)) for name in own) for own in names)


def experts_apart(checkpoint: Checkpoint) -> Checkpoint:
    """The same model with linears of each expert in place of stacks, in draft layers too; a model without stacks is
    returned as it is.

    Raises:
        CheckpointError: config.json lacks a number; or a stack has not the shape that config.json gives it.
        PlanError: the architecture is unknown.
    """
    stacks = _stacks(checkpoint)
    if not stacks:
        return checkpoint
    swapped = any(_is_swapped(stack.module, stack.shape, checkpoint.infos[name]) for name, stack in stacks.items())
    infos: dict[str, TensorInfo] = {}
    placements = dict(checkpoint.placements)
    computed = dict(checkpoint.computed)
    for name, info in checkpoint.infos.items():
        stack = stacks.get(name)
        if stack is None:
            infos[name] = info
            continue
        whole = computed.pop(name, None)
        if isinstance(whole, StoredStack):
            for quantised, own_places in _stored_linears(stack, whole):
                infos[quantised.weight.name] = quantised.weight
                computed[quantised.weight.name] = quantised
                placements |= own_places
            continue
        if isinstance(whole, MemoryTensor):
            for own, tensor in _memory_linears(stack, info, whole, transposed=stack.experts.transposed != swapped):
                infos[own.name], computed[own.name] = own, tensor
            continue
        scaled = whole if isinstance(whole, ScaledStack) else None
        lies = info if scaled is None else scaled.stored
        places = placements.pop(name, None) or (whole_place(lies),)
        for linear in _linears(stack, lies, places, transposed=stack.experts.transposed != swapped, scaled=scaled):
            infos[linear.info.name] = linear.info
            if linear.computed is None:
                placements[linear.info.name] = linear.places
            else:
                computed[linear.info.name] = linear.computed
                placements[linear.computed.stored.name] = linear.places
    return replace(checkpoint, infos=infos, placements=placements, computed=computed)


def apart_as(checkpoint: Checkpoint, other: Checkpoint) -> Checkpoint:
    """The checkpoint with experts apart where another one of the same model has them so, and else as it is; so, too,
    where nothing here knows the model."""
    try:
        apart = experts_apart(checkpoint)
    except (CheckpointError, PlanError):
        return checkpoint
    fresh = {name.rpartition(".")[0] for name in apart.infos if name not in checkpoint.infos}
    return checkpoint if fresh.isdisjoint(name.rpartition(".")[0] for name in other.infos) else apart


def stacked_as(checkpoint: Checkpoint, other: Checkpoint) -> Checkpoint:
    """The checkpoint with stacks of experts where another one of the same model has them, and else as it is; so, too,
    where nothing here knows the model."""
    try:
        stacked = experts_stacked(checkpoint)
    except (CheckpointError, PlanError):
        return checkpoint
    return stacked if stacked.infos.keys() - checkpoint.infos.keys() <= other.infos.keys() else checkpoint


def as_written(checkpoint: Checkpoint, names: Collection[str]) -> Checkpoint:
    """A checkpoint whose stacks of experts are quantised, with the quantised tensors of each expert's linears in place
    of theirs, if these are what was written; any other as it is, damaged ones too.

    Args:
        names: every tensor that was written.
    """
    if checkpoint.infos.keys() <= set(names) or read_quantization_config(checkpoint.config) is None:
        return checkpoint
    try:
        apart = experts_apart(decoded(checkpoint))
    except (CheckpointError, PlanError):
        return checkpoint
    infos: dict[str, TensorInfo] = {}
    for name, info in apart.infos.items():
        linear = apart.computed.get(name)
        own = (info,) if linear is None or held(linear) is None else linear.sources
        infos |= {each.name: each for each in own}
    if infos.keys().isdisjoint(set(names) - checkpoint.infos.keys()):
        return checkpoint
    return replace(checkpoint, infos=infos, placements=apart.placements)


def held(computed: ComputedTensor | None) -> StoredLinear | ScaledStack | None:
    """Returns the quantised tensors that a weight is decoded from; None where it is made of others."""
    if isinstance(computed, TransposedLinear):
        return computed.scaled
    return computed if isinstance(computed, StoredLinear) else None


@dataclass(frozen=True)
class _Stack:
    """A stack of a checkpoint: its module, with what is in front of the names of the linears."""

    module: Module
    experts: ExpertStack
    prefix: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _OfOne:
    """A weight or bias of one expert; of a computed one, the places are those of what it is computed from."""

    info: TensorInfo
    places: tuple[Placement, ...]
    computed: TransposedLinear | None = None


def _stacks(checkpoint: Checkpoint) -> dict[str, _Stack]:
    """The stacks of a checkpoint by their tensors' names.

    Raises:
        CheckpointError, PlanError: as :func:`experts_apart`.
    """
    config = checkpoint.config
    family = None if config is None else family_of(config, checkpoint.infos)
    if config is None or family is None or not family.has_stacks:
        return {}
    dimensions = read_dimensions(config, family)
    if too_many_blocks(dimensions, len(checkpoint.infos)):  # whoever plans says so
        return {}
    found = {}
    for place in ModelDescription(config, family, dimensions, None).with_drafts(checkpoint).places():
        experts = place.module.experts
        info = checkpoint.infos.get(place.tensor(place.module.parameter))
        if experts is None or info is None:
            continue
        shape = dimensions.weight_shape(place.module)
        if info.shape not in dimensions.stored_shapes(place.module):
            raise CheckpointError(
                f"{checkpoint.directory}: {info.name} is {list(info.shape)}, but config.json makes it {list(shape)}"
            )
        found[info.name] = _Stack(place.module, experts, place.name.removesuffix(place.path), shape)
    return found


def _is_swapped(module: Module, shape: tuple[int, ...], info: TensorInfo) -> bool:
    """Returns whether a checkpoint certainly has the last two dims in the other order; of both kinds of stacks one is
    not square."""
    return module.either_way and info.shape != shape


def _linears(
    stack: _Stack, info: TensorInfo, places: Sequence[Placement], *, transposed: bool, scaled: ScaledStack | None
) -> Iterator[_OfOne]:
    """The weights or biases that a stack holds, expert by expert."""
    experts, dtype = stack.experts, info.dtype if scaled is None else scaled.weight.dtype
    is_bias = experts.parameter == "bias"
    number_of_experts, *sizes = experts.by_expert(info.shape)
    each = tuple(sizes)
    shape = each[::-1] if transposed and not is_bias else each
    count = shape[0] // len(experts.linears)
    shape = (count, *shape[1:])
    step = len(experts.linears) if experts.interleaved else 1
    for e in range(number_of_experts):
        if experts.joined is None:
            own = tuple(place.at(e) for place in places if place.box[0][0] <= e < place.box[0][1])
        else:
            own = _rows(places, e * each[0], 1, each[0])
        stored = replace(info, name=f"{info.name}[{e}]", shape=each, nbytes=info.nbytes // number_of_experts)
        for number, (_, path) in enumerate(experts.linears):
            start = number if experts.interleaved else number * count
            name = f"{stack.prefix}{path.format(e=e)}.{experts.parameter}"
            linear = TensorInfo(name, dtype, shape, info.path, 0, tensor_nbytes(dtype, shape))
            if transposed and not is_bias:
                yield _OfOne(linear, own, TransposedLinear(stored, start, step, scaled))
            else:
                yield _OfOne(linear, _rows(own, start, step, count))


def _memory_linears(
    stack: _Stack, info: TensorInfo, whole: MemoryTensor, *, transposed: bool
) -> Iterator[tuple[TensorInfo, MemoryTensor]]:
    """As :func:`_linears`, of a stack that is in memory."""
    experts = stack.experts
    number_of_experts, *sizes = experts.by_expert(info.shape)
    out_in = tuple(sizes[::-1] if transposed and experts.parameter != "bias" else sizes)
    count = out_in[0] // len(experts.linears)
    whole = replace(whole, experts=number_of_experts)
    for e in range(number_of_experts):
        for number, (_, path) in enumerate(experts.linears):
            start, step = (number, len(experts.linears)) if experts.interleaved else (number * count, 1)
            shape = (count, *out_in[1:])
            name = f"{stack.prefix}{path.format(e=e)}.{experts.parameter}"
            own = TensorInfo(name, info.dtype, shape, info.path, 0, tensor_nbytes(info.dtype, shape))
            yield own, replace(whole, expert=e, start=start, step=step, transposed=transposed)


def _stored_linears(
    stack: _Stack, whole: StoredStack
) -> Iterator[tuple[StoredLinear, dict[str, tuple[Placement, ...]]]]:
    """The quantised linears that a stack holds, expert by expert, and the places of their tensors."""
    experts = stack.experts
    step = len(experts.linears) if experts.interleaved else 1
    for e, expert in enumerate(whole.experts):
        count = expert.weight.shape[0] // len(experts.linears)
        for number, (_, path) in enumerate(experts.linears):
            start = number if experts.interleaved else number * count
            name = f"{stack.prefix}{path.format(e=e)}"
            tensors, places = {}, {}
            for suffix, info in expert.tensors.items():
                shape = (count, *info.shape[1:])
                tensors[suffix] = TensorInfo(
                    f"{name}.{suffix}", info.dtype, shape, info.path, 0, tensor_nbytes(info.dtype, shape)
                )
                places[tensors[suffix].name] = _rows(whole.placements[info.name], start, step, count)
            dtype, out_in = expert.weight.dtype, (count, expert.weight.shape[1])
            weight = TensorInfo(f"{name}.weight", dtype, out_in, expert.weight.path, 0, tensor_nbytes(dtype, out_in))
            yield replace(expert, tensors=tensors, weight=weight), places


def _rows(places: Iterable[Placement], start: int, step: int, count: int) -> tuple[Placement, ...]:
    found = (place.every(step, start, count) for place in places)
    return tuple(place for place in found if place is not None)
