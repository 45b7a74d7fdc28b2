"""Adapters merged into the checkpoint that they are for: weights are adapted as they are read.

The view of a model with adapters, in the way of :mod:`modelexport.models.decoded`: whatever works on a checkpoint
(plan, calibration, rotation, comparison) works on the adapted one, with the bytes that merging into a checkpoint of
its own first would give. An adapted weight is ``W + scaling * B @ A`` in float32, rounded once to the weight's dtype;
of DoRA its rows are then given the lengths that were learnt. Several adapters add their differences, each times its
weight.

Every element is a sum over the rank in one order, by operations that round one element at a time: the same whichever
rectangle is asked for, and so at any number of ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from modelexport.checkpoints.adapters import Adapter, AdapterModule
from modelexport.checkpoints.safetensors.file import Checkpoint, Reader, TensorInfo, torch_dtype
from modelexport.checkpoints.safetensors.reader import ComputedTensor
from modelexport.errors import CheckpointError, did_you_mean, listed, quoted
from modelexport.models.architecture import ties_embeddings
from modelexport.models.matching import ModelDescription, Place, describe
from modelexport.models.ties import untie
from modelexport.sharding.plan import Range

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["AdaptedTensor", "Difference", "adapted", "without_adapters"]

_TILE = 1 << 16
"""Elements that are worked on together: they and what is added to them stay in the cache."""


@dataclass(frozen=True)
class Difference:
    """The part that one adapter adds to one weight, or to a bias.

    Attributes:
        module: its matrices.
        scaling: the factor of their product.
        weight: of the adapter.
        transposed: whether the product's rows are the weight's columns: of embeddings, and of GPT-2's linears.
    """

    module: AdapterModule
    scaling: float
    weight: float
    transposed: bool = False

    @property
    def sources(self) -> Iterator[TensorInfo]:
        """The tensors that it is computed from."""
        yield from self.module.parts.values()

    def factors(self, reader: Reader, rows: Range, cols: Range) -> tuple[Tensor, Tensor]:
        """``[rows, rank]`` and ``[rank, cols]`` in float32, whose product is that part of the difference, unscaled."""
        if self.transposed:
            left, right = (
                reader.read_stored(self.module.a, cols=rows).t(),
                reader.read_stored(self.module.b, rows=cols).t(),
            )
        else:
            left, right = reader.read_stored(self.module.b, rows=rows), reader.read_stored(self.module.a, cols=cols)
        return left.float().contiguous(), right.float().contiguous()


@dataclass(frozen=True)
class AdaptedTensor:
    """A tensor of a checkpoint with what adapters make of it.

    Attributes:
        info: the tensor.
        base: it without adapters, where that is computed, too.
        replaced: the tensor of an adapter that stands in its place.
        differences: what is added.
    """

    info: TensorInfo
    base: ComputedTensor | None
    replaced: TensorInfo | None
    differences: tuple[Difference, ...]

    @property
    def sources(self) -> Collection[TensorInfo]:
        """The tensors that it is computed from."""
        own = (self.info,) if self.base is None else self.base.sources
        return [
            *(own if self.replaced is None else (self.replaced,)),
            *(s for d in self.differences for s in d.sources),
        ]

    def read(self, reader: Reader, rows: Range, cols: Range, out: Tensor | None = None) -> Tensor:
        """Rows and columns of it, adapted in float32 and rounded to its dtype.

        Raises:
            CheckpointError: a file cannot be read, or its values mean nothing.
        """
        import torch

        found = self._base(reader, rows, cols)
        out = torch.empty(found.shape, dtype=torch_dtype(self.info.dtype)) if out is None else out
        if not self.differences:
            return out.copy_(found)
        if len(self.info.shape) == 1:
            return out.copy_(self._vector(reader, found.float(), rows))
        factors = [each.factors(reader, rows, cols) for each in self.differences]
        lengths = [self._lengths(reader, each, rows) for each in self.differences]
        step = max(1, _TILE // max(1, found.shape[1]))
        for start in range(0, found.shape[0], step):
            tile = slice(start, start + step)
            base = found[tile].float()
            added = [
                self._added(difference, base, left[tile], right, None if length is None else length[tile])
                for difference, (left, right), length in zip(self.differences, factors, lengths, strict=True)
            ]
            out[tile] = self._sum(base, added)
        return out

    def _base(self, reader: Reader, rows: Range, cols: Range) -> Tensor:
        """The part of the tensor that adapters add to."""
        if self.replaced is None and self.base is not None:
            return self.base.read(reader, rows, cols)
        dims = len(self.info.shape)
        return reader.read_stored(
            self.replaced or self.info, rows=rows if dims else None, cols=cols if dims > 1 else None
        )

    def _vector(self, reader: Reader, base: Tensor, rows: Range) -> Tensor:
        for each in self.differences:
            base = (
                base + reader.read_stored(each.module.parts["b_bias"], rows=rows).float() * each.scaling * each.weight
            )
        return base

    def _added(
        self, difference: Difference, base: Tensor, left: Tensor, right: Tensor, length: Tensor | None
    ) -> tuple[Tensor, bool]:
        """The part that a difference adds, and whether it is the whole adapted part instead."""
        product = _product(left, right).mul_(difference.scaling)
        if length is None:
            return product if difference.weight == 1 else product.mul_(difference.weight), False
        whole = product.add_(base).mul_(length.unsqueeze(1))
        if len(self.differences) == 1 and difference.weight == 1:
            return whole, True
        return whole.sub_(base).mul_(difference.weight), False

    @staticmethod
    def _sum(base: Tensor, added: Sequence[tuple[Tensor, bool]]) -> Tensor:
        for part, is_whole in added:
            base = part if is_whole else base.add(part)
        return base

    def _lengths(self, reader: Reader, difference: Difference, rows: Range) -> Tensor | None:
        """The factors of DoRA for rows of the weight, ``[rows]``; None: it is none.

        That is the length that was learnt, over the one that the row has with the product added.
        """
        import torch

        from modelexport.quantization.kernels.searching import sum_in_halves

        magnitude = difference.module.parts.get("magnitude")
        if magnitude is None:
            return None
        wanted = reader.read_stored(magnitude, rows=rows).float().reshape(-1)
        columns = (0, self.info.shape[1])
        step = max(1, _TILE // max(1, columns[1]))
        squares = []
        for start in range(rows[0], rows[1], step):
            tile = (start, min(start + step, rows[1]))
            left, right = difference.factors(reader, tile, columns)
            row = self._base(reader, tile, columns).float() + _product(left, right).mul_(difference.scaling)
            squares.append(sum_in_halves(row.double().square().t()))
        lengths = torch.cat(squares).sqrt().float() if squares else wanted
        return wanted / lengths


def _product(left: Tensor, right: Tensor) -> Tensor:
    """``left @ right``, rank by rank: one rounding for each product and one for each sum, in this order."""
    import torch

    total = torch.zeros(left.shape[0], right.shape[1])
    term = torch.empty_like(total)
    for k in range(left.shape[1]):
        torch.mul(left[:, k : k + 1], right[k], out=term)
        total.add_(term)
    return total


def adapted(checkpoint: Checkpoint, adapters: Sequence[Adapter]) -> tuple[Checkpoint, list[str]]:
    """The model with adapters merged into it; without adapters, as it is.

    A head that is tied to the embedding becomes a tensor of its own where an adapter changes one of the two alone.

    Returns:
        The checkpoint, and what to know of it, a line each.

    Raises:
        CheckpointError: an adapter has a module that the model has not, or one of another shape; two adapters have the
            same tensor whole. Everything that is wrong is listed.
        PlanError: the architecture is unknown.
    """
    if not adapters:
        return checkpoint, []
    notes = []
    model = ModelDescription.of(checkpoint)
    changed = _untied(checkpoint, model, adapters)
    if changed is not checkpoint:
        checkpoint, model = changed, ModelDescription.of(changed)
        notes.append(
            "the head is no longer tied to the embedding: an adapter changes one of them alone, and so config.json "
            "says tie_word_embeddings false"
        )
    merge = _Merge(checkpoint, model)
    for adapter in adapters:
        merge.add(adapter)
        notes.append(_described(adapter))
    if merge.problems:
        raise CheckpointError(f"{checkpoint.directory}:{listed(dict.fromkeys(merge.problems))}")
    places = {name: place for adapter in adapters for name, place in adapter.placements.items()}
    computed = {**checkpoint.computed, **merge.computed()}
    return replace(checkpoint, computed=computed, placements={**checkpoint.placements, **places}), notes


def without_adapters(tensor: ComputedTensor) -> ComputedTensor | None:
    """Returns a computed tensor as it is before adapters change it; None: it lies in the files."""
    return tensor.base if isinstance(tensor, AdaptedTensor) else tensor


def _described(adapter: Adapter) -> str:
    parts = []
    if adapter.modules:
        weight = "" if adapter.weight == 1 else f", times {adapter.weight:g}"
        alpha = f"alpha {adapter.alpha:g}"
        parts.append(f"{adapter.kind} of rank {adapter.rank}, {alpha}, added to {len(adapter.modules)} weights{weight}")
    if adapter.replaced:
        parts.append(f"{len(adapter.replaced)} tensors taken from it whole")
    made = f"; trained on {adapter.base}" if adapter.base else ""
    return f"adapter {adapter.name} is merged: {', '.join(parts)}{made}"


def _untied(checkpoint: Checkpoint, model: ModelDescription, adapters: Sequence[Adapter]) -> Checkpoint:
    """The checkpoint with a head of its own, where it is tied and an adapter changes it or the embedding alone."""
    if not ties_embeddings(checkpoint.config):
        return checkpoint
    family = model.family
    heads, embeddings = (
        {path for m in modules if m.kind == kind for path in (m.path, m.in_memory) if path}
        for modules, kind in ((family.after, "head"), (family.before, "embedding"))
    )
    ends = heads | embeddings
    for adapter in adapters:
        names = {*adapter.modules, *(name.removesuffix(".weight") for name in adapter.replaced)}
        found = sorted(names & ends)
        if found and not adapter.keeps_ties:
            return untie(checkpoint)
        if names & heads:
            raise CheckpointError(
                f"{adapter.directory}: {sorted(names & heads)[0]} is adapted with ensure_weight_tying, and in the "
                "model it is tied to the embedding: only adapters of the embedding are merged so"
            )
    return checkpoint


class _Merge:
    """Collects what adapters change in a checkpoint, and what is wrong on the way."""

    def __init__(self, checkpoint: Checkpoint, model: ModelDescription) -> None:
        self.checkpoint, self.model = checkpoint, model
        self.places = {place.name: place for place in model.places()}
        self.saved = dict(self._saved_names())
        self.differences: dict[str, list[Difference]] = {}
        self.replaced: dict[str, TensorInfo] = {}
        self.problems: list[str] = []

    def _saved_names(self) -> Iterator[tuple[str, str]]:
        """The modules whose names in memory, which adapters have, are not those on disk."""
        for name, saved, layers in self.model.family.linears:
            for layer in sorted(layers) or (None,):
                yield name.replace("{i}", str(layer)), saved.replace("{i}", str(layer))
        for name, place in self.places.items():  # after them: a head that was tied has its own weight now
            own = place.module.in_memory.replace("{i}", str(place.layer)).replace("{e}", str(place.expert))
            if own:
                yield own, name

    def _name_of(self, module: str) -> str:
        """The name on disk of a module of the model that an adapter was trained on."""
        for name in (module, self.saved.get(module, ""), self.model.family.old_prefix + module):
            if f"{name}.weight" in self.checkpoint.infos or name in self.places:
                return name
        return module

    def add(self, adapter: Adapter) -> None:
        """Takes an adapter's changes up."""
        for name, info in adapter.replaced.items():
            self._replace(adapter, name, info)
        for name, module in adapter.modules.items():
            saved = self._name_of(name)
            place, base = self.places.get(saved), self.checkpoint.infos.get(f"{saved}.weight")
            if base is None:
                self.problems.append(self._unknown(adapter, name))
                continue
            self._add(adapter, name, module, place, base)

    def _add(self, adapter: Adapter, name: str, module: AdapterModule, place: Place | None, base: TensorInfo) -> None:
        is_linear = place is not None and place.module.kind in ("linear", "head", "router")
        transposed = module.is_embedding or (adapter.is_transposed and not is_linear)
        ends = (module.b.shape[0], module.a.shape[1])
        shape = ends[::-1] if transposed else ends
        if shape != base.shape:
            self.problems.append(
                f"{adapter.name} is for a {name} of {list(shape)}, by the shapes of its matrices; the model's is "
                f"{list(base.shape)}"
            )
            return
        if transposed and "magnitude" in module.parts:
            self.problems.append(f"{adapter.name}: {name} lies transposed in the model: its DoRA cannot be merged")
            return
        difference = Difference(module, adapter.scaling(name), adapter.weight, transposed)
        self.differences.setdefault(base.name, []).append(difference)
        if "b_bias" in module.parts:
            bias = self.checkpoint.infos.get(f"{base.name.removesuffix('.weight')}.bias")
            if bias is None:
                self.problems.append(f"{adapter.name}: {name} has a bias in its lora_B, and the model has none there")
            else:
                self.differences.setdefault(bias.name, []).append(difference)

    def _replace(self, adapter: Adapter, name: str, info: TensorInfo) -> None:
        module, _, parameter = name.rpartition(".")
        base = self.checkpoint.infos.get(name) or self.checkpoint.infos.get(f"{self._name_of(module)}.{parameter}")
        if base is None:
            self.problems.append(self._unknown(adapter, name))
        elif base.shape != info.shape:
            self.problems.append(f"{adapter.name}: {name} is {list(info.shape)}, the model's is {list(base.shape)}")
        elif base.name in self.replaced:
            self.problems.append(f"{adapter.name}: {name} is in another adapter, too, in place of the model's")
        else:
            self.replaced[base.name] = info

    def _unknown(self, adapter: Adapter, name: str) -> str:
        model = describe(self.model.family, self.model.dimensions)
        return f"{adapter.name} adapts {quoted(name)}, and {model} has no such module{did_you_mean(name, self.places)}"

    def computed(self) -> Mapping[str, ComputedTensor]:
        """The tensors that are changed."""
        changed = Counter([*self.differences, *self.replaced])
        return {
            name: AdaptedTensor(
                self.checkpoint.infos[name],
                self.checkpoint.computed.get(name),
                self.replaced.get(name),
                tuple(self.differences.get(name, ())),
            )
            for name in changed
        }
