"""ExportPlan: everything an export decides before it reads a weight.

A pure function of the checkpoint's headers, its family, the number format and the parallelism. It says which
tensors there are, who reads and emits which part of each, in which order they are written, and what the
result will weigh. Every violation found is listed at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from modelexport.checkpoints.safetensors_file import Checkpoint, TensorInfo
from modelexport.errors import CheckpointError, PlanError, nearest
from modelexport.families import Dimensions, Family, Module, family_of, read_dimensions

from modelexport.sharding.plan import (
    Cut,
    Parallelism,
    Range,
    admissible_tp,
    cut_along,
    even_cut,
    group_query_cut,
    replicated,
    scale_range,
)

if TYPE_CHECKING:
    from modelexport.layers import Box
    from modelexport.quantization.formats import NumberFormat

SLAB_BYTES = 64 << 20  # an embedding larger than this is exported in slabs of rows, to bound memory
QUANTISABLE = ("BF16", "F16", "F32")


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
    """The whole export; see the module's docstring.

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
            if task.module.kind == "linear" and task.cut.dim is not None and task.module.axis != "kv_heads":
                unit = self.dimensions.axis_unit(task.module.axis or "")
                if task.quantised:
                    unit = math.lcm(unit, self.number_format.alignment[task.cut.dim])
                limits.append((task.info.shape[task.cut.dim], unit))
        return admissible_tp(sorted(set(limits)), self.dimensions.kv_heads)

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


def build_plan(checkpoint: Checkpoint, number_format: NumberFormat, parallelism: Parallelism) -> ExportPlan:
    """Plan the export of ``checkpoint``.

    Raises:
        CheckpointError: config.json is missing or contradicts the tensors, or tensors are missing or unknown.
        PlanError: the architecture is unknown, or a dimension does not suit the number format.
    """
    config = checkpoint.config
    if config is None:
        raise CheckpointError(
            f"{checkpoint.directory} has no config.json; copy the model's config.json beside its weights"
        )
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise PlanError(
            f"{checkpoint.directory} is already quantised (quant_method '{method}'); "
            "give the unquantised checkpoint that it was made from"
        )
    return _Planner(checkpoint, family_of(config), read_dimensions(config), number_format, parallelism).plan()


class _Planner:
    """Builds an :class:`ExportPlan`, collecting what is wrong on the way."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        family: Family,
        dimensions: Dimensions,
        number_format: NumberFormat,
        parallelism: Parallelism,
    ) -> None:
        self.infos = dict(checkpoint.infos)
        self.directory = checkpoint.directory
        self.family = family
        self.dims = dimensions
        self.format = number_format
        self.tp = parallelism.tp
        self.parallelism = parallelism
        self.left_out: dict[str, str] = {}
        self.unquantised: dict[str, str] = {}
        self.problems: list[str] = []
        self.format_problems: list[str] = []

    def plan(self) -> ExportPlan:
        self._drop_buffers()
        self._drop_tied_head()
        steps: list[Step] = []
        for module in self.family.before:
            steps += self._single(module)
        for i in range(self.dims.layers):
            layer = self.family.layer_prefix.format(i=i)
            tasks = [task for module in self.family.layer for task in self._module_tasks(layer, module)]
            steps.append(Step(layer, layer, i, tuple(tasks)))
        for module in self.family.after:
            steps += self._single(module)
        if self.infos:
            names = sorted(self.infos)
            self.problems.append(
                f"{len(names)} tensor(s) are not part of a {self.family.name} model of "
                f"{self.dims.layers} layers: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
            )
        if self.problems:
            raise CheckpointError(f"{self.directory}: " + "; ".join(self.problems[:8]))
        if self.format_problems:
            raise PlanError("; ".join(dict.fromkeys(self.format_problems)))
        return ExportPlan(
            self.family,
            self.dims,
            self.parallelism,
            self.format,
            tuple(steps),
            self.left_out,
            self.unquantised,
        )

    def _drop_buffers(self) -> None:
        for name in [n for n in self.infos if n.endswith(self.family.ignored_tensors or ("\0",))]:
            del self.infos[name]
            self.left_out[name] = "a buffer that every engine computes itself"

    def _drop_tied_head(self) -> None:
        """Tied embeddings are written once; a second copy may only go if it is one."""
        head, embedding = self.infos.get("lm_head.weight"), self.infos.get("model.embed_tokens.weight")
        if not (self.dims.tied_embeddings and head and embedding):
            return
        if not _same_bytes(head, embedding):
            raise CheckpointError(
                f"{self.directory}: config.json ties the embeddings, but lm_head.weight differs from "
                "model.embed_tokens.weight; set tie_word_embeddings to false to export both"
            )
        del self.infos["lm_head.weight"]
        self.left_out["lm_head.weight"] = "tied to model.embed_tokens.weight, written once"

    def _single(self, module: Module) -> list[Step]:
        """Steps of a module outside the decoder layers, in slabs of rows if it is large."""
        tasks = self._module_tasks(module.path, module, in_layer=False)
        if not tasks:
            return []
        weight = tasks[0].info
        row_bytes = max(1, weight.nbytes // max(1, weight.shape[0]))
        rows_per_slab = max(1, SLAB_BYTES // row_bytes)
        if len(tasks) > 1 or weight.nbytes <= SLAB_BYTES:
            return [Step(module.path, module.path, None, tuple(tasks))]
        steps = []
        for start in range(0, weight.shape[0], rows_per_slab):
            rows = (start, min(start + rows_per_slab, weight.shape[0]))
            held = tuple((a + start, b + start) for a, b in even_cut(rows[1] - start, 1, self.tp))
            # The owned ranges tile the slab, not the tensor.
            task = TensorTask(
                weight,
                module,
                "",
                "weight",
                rows,
                Cut(0, held, held),
                tasks[0].quantised,
                tasks[0].outputs,
            )
            steps.append(Step(f"{module.path}[{rows[0]}:{rows[1]}]", module.path, None, (task,)))
        return steps

    def _module_tasks(self, layer: str, module: Module, *, in_layer: bool = True) -> list[TensorTask]:
        name = full_name(layer, module.path) if in_layer else layer
        weight = self.infos.pop(f"{name}.weight", None)
        if weight is None:
            if not (module.kind == "head" and self.dims.tied_embeddings):
                self.problems.append(f"{name}.weight is missing{nearest_hint(name, self.infos)}")
            return []
        path = module.path if in_layer else ""
        if not self._shape_is_right(weight, module):
            return []
        quantised = module.kind == "linear" and self.format.quantised
        self._note_unquantised(name, module, quantised)
        cut = self._cut(module, weight.shape, quantised)
        tasks = [
            TensorTask(
                weight,
                module,
                path,
                "weight",
                (0, weight.shape[0]),
                cut,
                quantised,
                self._outputs(weight, quantised),
            )
        ]
        bias = self.infos.pop(f"{name}.bias", None)
        if bias is not None:
            tasks.append(self._bias(bias, module, path, cut, weight.shape[0]))
        return tasks

    def _bias(self, bias: TensorInfo, module: Module, path: str, cut: Cut, rows: int) -> TensorTask:
        """A column-parallel bias is cut like its weight's rows; a row-parallel one stays whole."""
        if bias.shape != (rows,):
            self.problems.append(f"{bias.name} is {list(bias.shape)} but its weight has {rows} rows")
        own = cut if cut.dim == 0 else replicated(rows, self.tp)
        return TensorTask(bias, module, path, "bias", (0, rows), own, False, self._outputs(bias, False))

    def _shape_is_right(self, weight: TensorInfo, module: Module) -> bool:
        hidden = self.dims.hidden
        along = self.dims.axis_size(module.axis) if module.axis else hidden
        expected = {"column": (along, hidden), "row": (hidden, along), "replicated": (hidden,)}[
            module.partition
        ]
        if weight.shape != expected:
            self.problems.append(
                f"{weight.name} is {list(weight.shape)} but config.json makes it {list(expected)}"
            )
            return False
        if module.kind == "linear" and self.format.quantised:
            if weight.dtype not in QUANTISABLE:
                self.problems.append(
                    f"{weight.name} is {weight.dtype}; only {', '.join(QUANTISABLE)} weights can be quantised"
                )
                return False
            try:
                self.format.check_shape(f"*.{module.path}", (weight.shape[0], weight.shape[1]))
            except PlanError as error:
                self.format_problems.append(str(error))
        return True

    def _note_unquantised(self, name: str, module: Module, quantised: bool) -> None:
        if quantised or module.kind == "norm":
            return
        if module.kind == "linear":
            self.unquantised[name] = "--quant none"
        elif module.kind == "embedding":
            tied = " (and serves as the head)" if self.dims.tied_embeddings else ""
            self.unquantised[name] = f"embedding{tied}: engines look rows up in the model's dtype"
        else:
            self.unquantised[name] = "head: its error goes straight into the logits"

    def _cut(self, module: Module, shape: tuple[int, ...], quantised: bool) -> Cut:
        if module.partition == "replicated" or module.axis is None:
            return replicated(shape[0], self.tp)
        dim = 0 if module.partition == "column" else 1
        unit = self.dims.axis_unit(module.axis)
        if quantised:
            unit = math.lcm(unit, self.format.alignment[dim])
        if shape[dim] % unit:  # reported by check_shape already; any cut will do to go on looking
            unit = 1
        if module.axis == "kv_heads":
            return cut_along(
                dim,
                group_query_cut(self.dims.heads, self.dims.kv_heads, self.dims.head_dim, self.tp),
            )
        return cut_along(dim, even_cut(shape[dim], unit, self.tp))

    def _outputs(self, info: TensorInfo, quantised: bool) -> tuple[OutputTensor, ...]:
        if not quantised:
            name = info.name.rsplit(".", 1)[-1]
            units = (1,) * len(info.shape)
            return (OutputTensor(name, info.dtype, info.shape, units, info.nbytes),)
        from modelexport.checkpoints.safetensors_file import dtype_name, torch_dtype

        specs = self.format.specs((info.shape[0], info.shape[1]), torch_dtype(info.dtype))
        return tuple(
            OutputTensor(
                s.suffix, dtype_name(s.dtype), s.shape, s.units, math.prod(s.shape) * s.dtype.itemsize
            )
            for s in specs
        )


def nearest_hint(name: str, names: dict[str, Any]) -> str:
    """``"; did you mean ..."`` for a missing tensor, or ``""`` where nothing is close."""
    hint = nearest(f"{name}.weight", names)
    return hint.split(" known:")[0] if "did you mean" in hint else ""


def _same_bytes(a: TensorInfo, b: TensorInfo) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    chunk = 8 << 20
    with open(a.path, "rb") as left, open(b.path, "rb") as right:
        left.seek(a.offset)
        right.seek(b.offset)
        for start in range(0, a.nbytes, chunk):
            size = min(chunk, a.nbytes - start)
            if left.read(size) != right.read(size):
                return False
    return True


def _box(shape: tuple[int, ...], dim: int | None, span: Range, rows: Range) -> Box:
    return tuple(span if d == dim else rows if d == 0 else (0, size) for d, size in enumerate(shape))


def _slab_bytes(task: TensorTask, shape: tuple[int, ...], nbytes: int) -> int:
    whole = task.info.shape[0]
    return nbytes * (task.rows[1] - task.rows[0]) // max(1, whole) if shape else nbytes


def _volume(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)
