"""The steps of an export plan, their tasks, and the part of each that a rank reads and emits."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING

from modelexport.checkpoints.safetensors.file import TensorInfo
from modelexport.models.architecture import Dimensions, Family, Module
from modelexport.models.decoded import StoredLinear
from modelexport.models.engines import loadable_tp
from modelexport.models.matching import Place
from modelexport.models.rules import module_rules
from modelexport.quantization.methods.base import KeptSubtree
from modelexport.quantization.methods.mxfp4 import BLOCK as MXFP4_GROUP
from modelexport.sharding.plan import Cut, Parallelism, Range, scale_range
from modelexport.sharding.rules import TensorRule

if TYPE_CHECKING:
    from modelexport.layers import Box
    from modelexport.quantization.formats.base import NumberFormat, ScaleGranularity
    from modelexport.quantization.methods.base import Axes


@dataclass(frozen=True)
class OutputTensor:
    """A tensor that a task writes. ``axes`` as in :class:`modelexport.quantization.methods.base.StoredTensorSpec`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    axes: Axes
    nbytes: int


@dataclass(frozen=True)
class TensorTask:
    """One source tensor (or a slab of its rows) and what becomes of it.

    Attributes:
        info: the source tensor; where it is quantised in the source, the weight that it stands for, which lies nowhere.
        place: the module it belongs to.
        parameter: ``weight`` or ``bias``.
        rows: the slab of rows that this task covers.
        cut: which part each rank holds and owns, in the whole tensor's coordinates.
        number_format: what it is written in; None: as it is.
        outputs: the tensors written for it.
        shared_scale: modules of the step with the same word here share the scale of their whole weights.
        stored: how the source has it, where its numbers are kept as they are there. Its owner reads it whole.
        source_bytes: bytes of the source that it is read from, where these are not the tensor's own.
        cached: "k" or "v": nothing is read; the scale of the layer's cached keys or values is made.
    """

    info: TensorInfo
    place: Place
    parameter: str
    rows: Range
    cut: Cut
    number_format: NumberFormat | None
    outputs: tuple[OutputTensor, ...]
    shared_scale: str = ""
    stored: StoredLinear | None = None
    source_bytes: int | None = None
    cached: str | None = None

    @property
    def module(self) -> Module:
        """The family's declaration of its module."""
        return self.place.module

    @property
    def path(self) -> str:
        """The module's name within its layer, ``""`` outside of the layers."""
        return self.place.path

    @property
    def quantised(self) -> bool:
        """True if numbers of the source are rounded."""
        return self.number_format is not None and self.stored is None

    @property
    def reach(self) -> ScaleGranularity:
        """Of what is rounded, how far its widest scale reaches; "block" of what is not."""
        return self.number_format.scale_granularity if self.quantised and self.number_format is not None else "block"

    @property
    def is_cast(self) -> bool:
        """True where scales are chosen that keep the source's values, MXFP4's, as they are."""
        return self.number_format is not None and self.number_format.observer == "exact"

    @property
    def full_shape(self) -> tuple[int, int]:
        """Shape of the whole weight, of a matrix."""
        return (self.info.shape[0], self.info.shape[1])

    @property
    def alignment(self) -> tuple[int, int]:
        """Elements of the weight along dim 0 and dim 1 that its outputs keep together."""
        return alignment(self.outputs)

    @property
    def cut_alignment(self) -> tuple[int, int]:
        """The same for ranks that quantise it; groups of the source's, where these keep their scales."""
        rows, columns = self.alignment
        return (rows, math.lcm(columns, MXFP4_GROUP)) if self.is_cast else (rows, columns)

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
        box = self.owned_box(rank)
        if box is None:
            return None
        dim = self.cut.dim
        varies = dim is not None and any(axis is not None and axis[0] == dim for axis in output.axes)
        if not varies and any(self.cut.owns(r) for r in range(rank)):
            return None  # the same on every rank: the first owner emits it
        spans = []
        for number, size in enumerate(output.shape):
            axis = output.axes[number] if number < len(output.axes) else None
            spans.append((0, size) if axis is None else scale_range(box[axis[0]], axis[1], size))
        return tuple(spans)


@dataclass(frozen=True)
class ExportStep:
    """A unit that is read, quantised, gathered and written together: a layer or a part of one, or a slab of an
    embedding.

    Attributes:
        scaled_with: of a part, the tasks of the whole layer that share scales of whole weights, its own among them.
    """

    id: str
    layer: str
    index: int | None
    tasks: tuple[TensorTask, ...]
    scaled_with: tuple[TensorTask, ...] = ()

    @property
    def read(self) -> Iterable[TensorTask]:
        """The tasks whose tensors are read for the step."""
        return {id(task): task for task in (*self.tasks, *self.scaled_with)}.values()

    @property
    def source_bytes(self) -> int:
        """Bytes read for the step, over all ranks."""
        return sum(
            _slab_bytes(task, task.info.shape, task.info.nbytes if task.source_bytes is None else task.source_bytes)
            for task in self.tasks
        )

    @property
    def output_bytes(self) -> int:
        """Bytes written for the step, over all ranks."""
        return sum(_slab_bytes(task, out.shape, out.nbytes) for task in self.tasks for out in task.outputs)


@dataclass(frozen=True)
class ExportPlan:
    """Everything an export decides before it reads a weight; :func:`modelexport.exporting.plan.build_plan` makes it.

    Attributes:
        method: the quantisation method that spells what is quantised.
        left_out: tensors of the source that are not written -> why.
        unquantised: modules kept in the source's dtype -> why.
        kv_cache: the KV cache whose scales are written, by its name in ``kv_caches.CACHES``; None: there are none.
        calibrated: whether decoder layers are quantised one by one while samples run through them.
        notes: what to know of how the model is exported.
        file_type: of a mixture of block types, llama.cpp's number of it; None: it is none.
    """

    family: Family
    dimensions: Dimensions
    parallelism: Parallelism
    method: str
    steps: tuple[ExportStep, ...]
    left_out: dict[str, str] = field(default_factory=dict)
    unquantised: dict[str, str] = field(default_factory=dict)
    kv_cache: str | None = None
    calibrated: bool = False
    notes: tuple[str, ...] = ()
    file_type: int | None = None

    @cached_property
    def needs_ranges(self) -> bool:
        """True if the magnitudes of activations must be known, for static scales or the KV cache's."""
        return any(
            task.cached is not None or (task.quantised and task.number_format.has_static_inputs)  # type: ignore[union-attr]
            for step in self.steps
            for task in step.tasks
        )

    def formats(self) -> dict[str, NumberFormat]:
        """Every quantised linear -> its number format, in the model's order."""
        return dict(self._formats)

    @cached_property
    def _formats(self) -> dict[str, NumberFormat]:
        found: dict[str, NumberFormat] = {}
        announced: dict[NumberFormat, NumberFormat] = {}
        for step in self.steps:
            for task in step.tasks:
                own = task.number_format
                if own is not None and task.parameter == "weight":
                    if own not in announced:
                        announced[own] = replace(own, scale_dtype=None)  # dtypes are not announced
                    found[full_name(step.layer, task.path)] = announced[own]
        return found

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

    def rules(self) -> list[TensorRule]:
        """The rules by which the tensors that are written may be cut, in the order of the file."""
        rules: dict[str, TensorRule] = {}
        for step in self.steps:
            for _, group in groupby(step.tasks, key=lambda task: id(task.place)):
                tasks = list(group)
                tensors = {out.name: (out.dtype, out.shape, out.axes) for task in tasks for out in task.outputs}
                rules.update((rule.name, rule) for rule in module_rules(tasks[0].place, self.dimensions, tensors))
        return list(rules.values())

    def admissible_tp(self) -> list[int]:
        """Tensor-parallel sizes at which an engine can load the result (vocabulary padded by the engine)."""
        limits, kv_units = set(), set()
        for task in self._weights():
            dim = task.module.cut_dim
            if task.module.kind != "linear" or dim is None:
                continue
            for _, axis in task.module.axes:
                if self.dimensions.axis(axis).shared:
                    kv_units.add(task.alignment[dim])
                    continue
                unit = math.lcm(self.dimensions.axis_unit(axis), task.alignment[dim])
                limits.add((self.dimensions.axis_size(axis), unit))
        return loadable_tp(limits, self.dimensions.kv_heads, self.dimensions.head_dim, kv_units)

    def ignored(self) -> list[str]:
        """The modules that engines must not take for quantised linears: kept ones, heads (tied ones too), routers.

        A head is among them unless the source has quantised it.
        """
        quantised = self.formats()
        heads = [m for m in self.family.after if m.kind == "head" and m.path not in quantised]
        names = [name for head in heads for name in (head.path, head.in_memory) if name]
        for step in self.steps:
            for task in step.tasks:
                kept = task.module.kind == "linear" and task.number_format is None
                if task.parameter == "weight" and (kept or task.module.kind == "router"):
                    names.append(full_name(step.layer, task.path))
                    if task.module.in_memory:
                        names.append(task.module.in_memory.replace("{i}", str(step.index)))
                    if kept and task.place.draft is not None and not task.module.is_expert:
                        fused = task.module.fused_into  # vLLM's draft classes do not say what they fuse it of
                        names += [full_name(step.layer, fused)] if fused else []
                elif task.place.draft is not None and task.module.kind == "head" and task.number_format is None:
                    names += [step.layer, task.module.in_memory]
        return list(dict.fromkeys([*names, *self._kept_in_memory()]))

    def kept_subtrees(self) -> list[KeptSubtree]:
        """The stacks of experts that are kept, and what is kept outside of the language model's layers: draft layers
        too."""
        roots: dict[str, dict[str, None]] = {}
        for step in self.steps:
            for task in step.tasks:
                if (task.module.why or task.place.draft is not None) and task.number_format is None:
                    for root, path in self._roots(step, task):
                        roots.setdefault(path, {})[root] = None
        subtrees = [KeptSubtree(path, tuple(names)) for path, names in roots.items()]
        quantised = list(self.formats())
        return [each for each in subtrees if not any(map(re.compile(each.pattern).match, quantised))]

    def _roots(self, step: ExportStep, task: TensorTask) -> Iterator[tuple[str, str]]:
        """(full name, path) of the parts of the model that nothing is quantised in because of a kept module."""
        above = self.family.layer_prefix.split(".")[:-1]  # "model", "language_model", "layers"
        if task.place.draft is not None:
            root = task.place.draft.root
            parts = root.split(".")
            yield root, ".".join(parts[len(above) - 1 :] if parts[:-1] == above else parts[-1:])
            if parts[:-1] != above:  # an engine may build it as the layer behind the last (vLLM's Ernie)
                for number in range(self.dimensions.layers, self.dimensions.layers + self.dimensions.prediction_layers):
                    yield f"{'.'.join(above)}.{number}", f"{above[-1]}.{number}"
        elif step.index is None:
            name = full_name(step.layer, task.path).split(".")
            apart = next(
                (n for n, (own, other) in enumerate(zip(name, above, strict=False)) if own != other), len(above)
            )
            if apart < len(name):
                yield ".".join(name[: apart + 1]), name[apart]
        elif task.module.stacked:
            for path in dict.fromkeys((task.path, _experts_root(task.path))):
                yield full_name(step.layer, path), f"{above[-1]}.*.{path}"

    def _kept_in_memory(self) -> Iterator[str]:
        """Every Linear of transformers' model whose weight is not quantised, of families that know them all."""
        quantised = set()
        for step in self.steps:
            for task in step.tasks:
                if task.number_format is not None:
                    own = task.module.in_memory.replace("{i}", str(step.index))
                    quantised |= {full_name(step.layer, task.path), own}
        for name, saved, layers in self.family.linears:
            for layer in sorted(layers) or (None,):
                if saved.replace("{i}", str(layer)) not in quantised:
                    yield name.replace("{i}", str(layer))

    def general_path(self, step: ExportStep, task: TensorTask) -> str:
        """The name under which a task's module is taken together with its like: of all layers, and all experts; those
        of a draft layer apart."""
        if task.place.draft is not None:
            return full_name(task.place.part, task.module.general_path if task.path else "")
        return task.module.general_path if task.path else _NUMBER.sub("*", step.layer)

    @property
    def source_bytes(self) -> int:
        """Bytes of the tensors that are read."""
        return sum(step.source_bytes for step in self.steps)

    def peak_rank_bytes(self) -> int:
        """Upper estimate of a rank's buffers: two steps' shards of the source and two of the output."""
        most = dict.fromkeys((True, False), 0)
        for source in most:
            for rank in range(self.parallelism.tp):
                known: dict[tuple[object, ...], int] = {}
                found = (self._rank_bytes(step, rank, source, known) for step in self.steps)
                most[source] = max(most[source], max(found, default=0))
        return 2 * sum(most.values())

    def _rank_bytes(self, step: ExportStep, rank: int, source: bool, known: dict[tuple[object, ...], int]) -> int:
        total = 0
        for task in step.tasks:
            if source and task.stored is not None:
                total += task.stored.nbytes if task.cut.owns(rank) else 0
                continue
            alike = (id(task.cut), id(task.outputs), task.rows, task.info.shape, task.info.dtype)
            if alike not in known:  # experts are
                known[alike] = _source_bytes(task, rank) if source else _output_bytes(task, rank)
            total += known[alike]
        return total

    def _weights(self) -> Iterator[TensorTask]:
        for step in self.steps:
            yield from (task for task in step.tasks if task.parameter == "weight")


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def alignment(outputs: Iterable[OutputTensor]) -> tuple[int, int]:
    """Elements of a weight along dim 0 and dim 1 that all of these tensors keep together."""
    units = [1, 1]
    for output in outputs:
        for axis in output.axes:
            if axis is not None and axis[0] < len(units):
                units[axis[0]] = math.lcm(units[axis[0]], axis[1])
    return (units[0], units[1])


def _experts_root(path: str) -> str:
    """The engines' name for the experts of a layer, of which ``path`` is a stack: ``experts``, beside or above it."""
    parts = path.split(".")
    end = parts.index("experts") if "experts" in parts else len(parts) - 1
    return ".".join([*parts[:end], "experts"])


def full_name(*parts: str) -> str:
    """Join the parts of a tensor's name, skipping empty ones."""
    return ".".join(part for part in parts if part)


def _box(shape: tuple[int, ...], dim: int | None, span: Range, rows: Range) -> Box:
    return tuple(span if d == dim else rows if d == 0 else (0, size) for d, size in enumerate(shape))


def _slab_bytes(task: TensorTask, shape: tuple[int, ...], nbytes: int) -> int:
    whole = task.info.shape[0] if task.info.shape else 1
    return nbytes * (task.rows[1] - task.rows[0]) // max(1, whole) if shape else nbytes


def _source_bytes(task: TensorTask, rank: int) -> int:
    """Bytes of the source that a rank reads for a task."""
    box = task.owned_box(rank)
    return 0 if box is None else task.info.nbytes * _volume(box) // max(1, math.prod(task.info.shape))


def _output_bytes(task: TensorTask, rank: int) -> int:
    """Bytes that a rank emits for a task."""
    total = 0
    for out in task.outputs:
        box = task.output_box(out, rank)
        if box is not None:
            total += out.nbytes * _volume(box) // max(1, math.prod(out.shape))
    return total


def _volume(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)
