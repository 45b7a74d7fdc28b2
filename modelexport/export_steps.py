"""What an export plan consists of: steps, their tasks, and the part of each that a rank reads and emits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from modelexport.checkpoints.safetensors_file import TensorInfo
from modelexport.families import Dimensions, Family, Module
from modelexport.sharding.plan import Cut, Parallelism, Range, admissible_tp, scale_range

if TYPE_CHECKING:
    from modelexport.layers import Box
    from modelexport.quantization.formats.base import NumberFormat


@dataclass(frozen=True)
class OutputTensor:
    """A tensor that a task writes. ``units`` as in :class:`modelexport.quantization.formats.TensorSpec`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    units: tuple[int | None, ...]
    nbytes: int


@dataclass(frozen=True)
class TensorTask:
    """One source tensor (or a slab of its rows) and what becomes of it.

    Attributes:
        info: the source tensor.
        module: the family's declaration of the module it belongs to.
        path: the module's name within its layer, ``""`` where the layer is the module.
        parameter: ``weight`` or ``bias``.
        rows: the slab of rows that this task covers.
        cut: which part each rank holds and owns, in the whole tensor's coordinates.
        quantised: whether the number format is applied.
        outputs: the tensors written for it.
    """

    info: TensorInfo
    module: Module
    path: str
    parameter: str
    rows: Range
    cut: Cut
    quantised: bool
    outputs: tuple[OutputTensor, ...]

    def owned_box(self, rank: int) -> Box | None:
        """The rectangle of the source that ``rank`` reads and emits, or None."""
        if not self.cut.owns(rank):
            return None
        return _box(self.info.shape, self.cut.dim, self.cut.owned[rank], self.rows)

    def held_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of what ``rank`` holds (at least what it emits)."""
        box = _box(self.info.shape, self.cut.dim, self.cut.held[rank], self.rows)
        return tuple(stop - start for start, stop in box)

    def output_box(self, output: OutputTensor, rank: int) -> Box | None:
        """The rectangle of ``output`` that ``rank`` emits, or None where it emits none of it."""
        if not self.cut.owns(rank):
            return None
        dim = self.cut.dim
        varies = dim is not None and dim < len(output.shape) and output.units[dim] is not None
        if not varies and any(self.cut.owns(r) for r in range(rank)):
            return None  # the same on every rank: the first owner emits it
        span = self.cut.owned[rank]
        spans = {0: self.rows} if dim is None else {0: self.rows, dim: span}
        return tuple(
            scale_range(spans[d], unit, size) if d in spans else (0, size)
            for d, (size, unit) in enumerate(zip(output.shape, output.units, strict=True))
        )


@dataclass(frozen=True)
class Step:
    """What is read, quantised, gathered and written together: a layer, or a slab of an embedding."""

    id: str
    layer: str
    index: int | None
    tasks: tuple[TensorTask, ...]

    @property
    def source_bytes(self) -> int:
        """Bytes read for the step, over all ranks."""
        return sum(_slab_bytes(task, task.info.shape, task.info.nbytes) for task in self.tasks)

    @property
    def output_bytes(self) -> int:
        """Bytes written for the step, over all ranks."""
        return sum(_slab_bytes(task, out.shape, out.nbytes) for task in self.tasks for out in task.outputs)


@dataclass(frozen=True)
class ExportPlan:
    """Everything an export decides before it reads a weight; :func:`modelexport.export_plan.build_plan` makes it.

    Attributes:
        left_out: tensors of the source that are not written -> why.
        unquantised: modules kept in the source's dtype -> why.
    """

    family: Family
    dimensions: Dimensions
    parallelism: Parallelism
    number_format: NumberFormat
    steps: tuple[Step, ...]
    left_out: dict[str, str] = field(default_factory=dict)
    unquantised: dict[str, str] = field(default_factory=dict)

    def outputs(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """(name, dtype, shape) of every tensor written, in the order of the file."""
        seen = set()
        for step in self.steps:
            for task in step.tasks:
                for out in task.outputs:
                    name = full_name(step.layer, task.path, out.name)
                    if name not in seen:
                        seen.add(name)
                        yield name, out.dtype, out.shape

    def admissible_tp(self) -> list[int]:
        """Tensor-parallel sizes at which an engine can load the result (vocabulary padded by the engine)."""
        limits = []
        for task in self._weights():
            if task.module.kind != "linear" or task.cut.dim is None:
                continue
            for _, axis in task.module.axes:
                if axis == "kv_heads":
                    continue
                unit = self.dimensions.axis_unit(axis)
                if task.quantised:
                    unit = math.lcm(unit, self.number_format.alignment[task.cut.dim])
                limits.append((self.dimensions.axis_size(axis), unit))
        return admissible_tp(sorted(set(limits)), self.dimensions.kv_heads)

    def ignored(self) -> list[str]:
        """The modules that engines must not take for quantised linears: heads (tied ones too) and routers."""
        routers = (
            full_name(step.layer, task.path)
            for step in self.steps
            for task in step.tasks
            if task.module.kind == "router" and task.parameter == "weight"
        )
        return [*(module.path for module in self.family.after if module.kind == "head"), *routers]

    def general_path(self, step: Step, task: TensorTask) -> str:
        """The name under which a task's module is taken together with its like: of all layers, and all experts."""
        return task.module.general_path if task.path else step.layer

    def peak_rank_bytes(self) -> int:
        """Upper estimate of a rank's buffers: two steps' shards of the source and two of the output."""
        tp = self.parallelism.tp
        reads = [max(self._rank_bytes(step, rank, True) for rank in range(tp)) for step in self.steps]
        writes = [max(self._rank_bytes(step, rank, False) for rank in range(tp)) for step in self.steps]
        return 2 * max(reads, default=0) + 2 * max(writes, default=0)

    def _rank_bytes(self, step: Step, rank: int, source: bool) -> int:
        total = 0
        for task in step.tasks:
            box = task.owned_box(rank)
            if box is None:
                continue
            if source:
                total += task.info.nbytes * _volume(box) // max(1, math.prod(task.info.shape))
            else:
                for out in task.outputs:
                    out_box = task.output_box(out, rank)
                    if out_box is not None:
                        total += out.nbytes * _volume(out_box) // max(1, math.prod(out.shape))
        return total

    def _weights(self) -> Iterator[TensorTask]:
        for step in self.steps:
            yield from (task for task in step.tasks if task.parameter == "weight")


def full_name(*parts: str) -> str:
    """Join the parts of a tensor's name, skipping empty ones."""
    return ".".join(part for part in parts if part)


def _box(shape: tuple[int, ...], dim: int | None, span: Range, rows: Range) -> Box:
    return tuple(span if d == dim else rows if d == 0 else (0, size) for d, size in enumerate(shape))


def _slab_bytes(task: TensorTask, shape: tuple[int, ...], nbytes: int) -> int:
    whole = task.info.shape[0]
    return nbytes * (task.rows[1] - task.rows[0]) // max(1, whole) if shape else nbytes


def _volume(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)
