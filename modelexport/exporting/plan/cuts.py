"""The part of each weight that a rank reads and emits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from modelexport.exporting.plan.steps import TensorTask
from modelexport.models.architecture import Dimensions, Module
from modelexport.sharding.plan import (
    Cut,
    Range,
    block_cut,
    cut_along,
    even_cut,
    group_query_cut,
    replicated,
)


class Cuts:
    """Cuts the modules of one model.

    A rank's modules fit each other: what one of a layer must keep whole (a group of o_proj's inputs) is kept whole in
    those that feed it. Where blocks do not divide what an axis has, modules are cut on their own blocks instead; and
    along their rows where a scale is searched that reaches over whole rows, since squared errors cannot be added over
    ranks in the order in which one rank adds them.

    Attributes:
        rows: linears are cut along their rows, on multiples of this, whatever their format; None: as above.
    """

    def __init__(self, dimensions: Dimensions, tp: int, rows: int | None = None) -> None:
        self.dims, self.tp, self.rows = dimensions, tp, rows
        self._owner = 0

    def layer(self, tasks: Sequence[TensorTask]) -> list[TensorTask]:
        """The tasks of a layer, or of a module outside of the layers, with their cuts."""
        units: dict[str, int] = {}
        weights: dict[str, Cut] = {}
        kinds = {_kind(task): task for task in tasks}
        known: dict[tuple[object, ...], Cut] = {}
        found = []
        for task in tasks:
            if task.module.kind == "other":  # any rows will do to pass it on
                cut = self._rows(task)
            elif task.parameter == "bias":  # a column-parallel bias is cut like its weight's rows, another stays whole
                cut = weights[task.path]
                cut = cut if cut.dim == 0 else replicated(task.info.shape[0], self.tp)
            elif task.stored is not None:
                cut = self._one_owner(task)
            else:
                kind = _kind(task)
                if kind not in known:
                    known[kind] = self._cut(task, kinds.values(), units)
                cut = known[kind]
            weights.setdefault(task.path, cut)
            found.append(replace(task, cut=cut))
        return found

    def _rows(self, task: TensorTask) -> Cut:
        if len(task.info.shape) < 2:
            return replicated(task.rows[1], self.tp)
        return cut_along(0, block_cut(task.info.shape[0], 1, self.tp))

    def _cut(self, task: TensorTask, kinds: Iterable[TensorTask], units: dict[str, int]) -> Cut:
        module, shape, number_format = task.module, task.info.shape, task.number_format
        dim, kept = module.cut_dim, task.cut_alignment
        if self.rows is not None and module.kind == "linear":
            return cut_along(0, block_cut(shape[0], math.lcm(kept[0], self.rows), self.tp))
        if dim is None:
            return replicated(task.rows[1], self.tp)
        if number_format is not None and number_format.whole_rows:
            return cut_along(0, block_cut(shape[0], kept[0], self.tp))
        if module.axis is None:  # fused on disk: any rows will do to quantise it
            return cut_along(dim, block_cut(shape[dim], kept[dim], self.tp))
        axis = "heads" if module.axis == "kv_heads" else module.axis
        if axis not in units:
            units[axis] = self._unit(axis, kinds)
        held = self._held(module, shape[dim], units[axis])
        if any(edge % kept[dim] and edge != shape[dim] for span in held for edge in span):
            held = block_cut(shape[dim], kept[dim], self.tp)
        return cut_along(dim, held)

    def _held(self, module: Module, size: int, unit: int) -> tuple[Range, ...]:
        if module.axis == "kv_heads":
            heads, each = self.dims.heads, self.dims.head_dim
            return group_query_cut(heads, self.dims.kv_heads, each, self.tp, unit=unit // each)
        return even_cut(size, unit, self.tp)

    def _unit(self, axis: str, kinds: Iterable[TensorTask]) -> int:
        """Features along ``axis`` that stay together in every module of the layer.

        Where the heads of one axis are those of another, though of another size, in heads.

        Args:
            kinds: one task of all that are alike, as experts' are.
        """
        own = self.dims.axis(axis)
        units = 1  # heads, or features where there are none
        for task in kinds:
            module = task.module
            if module.kind != "linear" or module.axis is None or task.number_format is None:
                continue
            other, dim = self.dims.axis(module.axis), module.cut_dim
            if dim is None or task.parameter != "weight":
                continue
            if module.axis == axis or (own.heads and other.heads == own.heads and module.axis != "kv_heads"):
                aligned = math.lcm(other.unit, task.cut_alignment[dim])
                units = math.lcm(units, aligned // other.unit)
        whole = (own.heads or own.size) % units == 0
        return own.unit * (units if whole else 1)

    def _one_owner(self, task: TensorTask) -> Cut:
        """All of it to one rank, the next one each time: what is quantised already is converted module by module."""
        owner, self._owner = self._owner, (self._owner + 1) % self.tp
        rows = task.info.shape[0]
        held = tuple((0, rows) if rank == owner else (0, 0) for rank in range(self.tp))
        owned = tuple((0 if rank <= owner else rows, 0 if rank < owner else rows) for rank in range(self.tp))
        return Cut(0, held, owned)


def _kind(task: TensorTask) -> tuple[object, ...]:
    """Returns what tasks have in common that are cut alike, as those of a layer's experts are."""
    return (id(task.module), task.parameter, task.is_cast, id(task.outputs), task.info.shape)
