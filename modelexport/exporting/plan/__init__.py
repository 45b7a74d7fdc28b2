"""ExportPlan: everything an export decides before it reads a weight.

A pure function of the checkpoint's headers, its family, the number format and the parallelism. It says which
tensors there are, who reads and emits which part of each, in which order they are written, and what the
result will weigh. Every violation found is listed at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import TYPE_CHECKING

from modelexport.checkpoints.safetensors.file import Checkpoint, TensorInfo, tensor_nbytes
from modelexport.errors import CheckpointError, PlanError, did_you_mean
from modelexport.exporting.plan.cuts import Cuts
from modelexport.exporting.plan.linears import UNCUT, SourceLinears, cache_tasks, linear_outputs
from modelexport.exporting.plan.steps import ExportPlan, ExportStep, OutputTensor, StoredLinear, TensorTask, full_name
from modelexport.models.architecture import Dimensions, Family, Module, family_of, read_dimensions
from modelexport.models.ties import check_tied, untie
from modelexport.quantization.methods import Method, of_method
from modelexport.sharding.plan import Cut, Parallelism, even_cut
from modelexport.system.dtypes import FLOATS

if TYPE_CHECKING:
    from modelexport.quantization.assignment import Assignment
    from modelexport.quantization.formats.base import NumberFormat

__all__ = ["ExportPlan", "ExportStep", "OutputTensor", "TensorTask", "build_plan", "full_name"]

SLAB_BYTES = 64 << 20  # an embedding larger than this is exported in slabs of rows, to bound memory
_TOLD = 8  # problems of a source that its error tells; the others are counted


def build_plan(
    checkpoint: Checkpoint,
    assignment: Assignment | None,
    parallelism: Parallelism,
    *,
    method: str = "compressed-tensors",
    kv_cache: bool = False,
    rows: int | None = None,
    untied: bool = False,
) -> ExportPlan:
    """Plan the export of ``checkpoint``.

    Args:
        assignment: which linear gets which number format; None: each keeps what it has in the source.
        method: the quantisation method that the target spells them by.
        kv_cache: whether scales of an FP8 KV cache are to be written.
        rows: where layers are calibrated: linears are cut along their rows only, on multiples of this.
        untied: whether a head that is tied to the embedding becomes a tensor of its own, as what is rotated
            needs: its head has taken in the final norm, its embedding has not.

    Raises:
        CheckpointError: config.json is missing or contradicts the tensors, or tensors are missing or unknown.
        PlanError: the architecture is unknown, a dimension does not suit a number format, the method cannot spell
            one, or the source is quantised and would have to be rounded again.
    """
    config = checkpoint.config
    if config is None:
        raise CheckpointError(
            f"{checkpoint.directory} has no config.json; copy the model's config.json beside its weights"
        )
    family = family_of(config)
    dimensions = read_dimensions(config, family)
    if untied and dimensions.tied_embeddings:
        plan = build_plan(untie(checkpoint), assignment, parallelism, method=method, kv_cache=kv_cache, rows=rows)
        why = "head: no longer tied to the embedding, which has not taken in the last norm as it has"
        told = {module.path: why for module in family.after if module.kind == "head"}
        return replace(plan, unquantised={**plan.unquantised, **told})
    cuts = Cuts(dimensions, parallelism.tp, rows)
    planner = _Planner(checkpoint, family, dimensions, assignment, parallelism, of_method(method), cuts)
    return planner.plan(kv_cache=kv_cache)


class _Planner:
    """Builds an :class:`ExportPlan`, collecting what is wrong on the way."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        family: Family,
        dimensions: Dimensions,
        assignment: Assignment | None,
        parallelism: Parallelism,
        method: Method,
        cuts: Cuts,
    ) -> None:
        self.checkpoint = checkpoint
        self.infos = dict(checkpoint.infos)
        self.config = family.complete(checkpoint.config or {})
        self.directory = checkpoint.directory
        self.family = family
        self.dims = dimensions
        self.assignment = assignment
        self.method = method
        self.tp = parallelism.tp
        self.parallelism = parallelism
        self.left_out = dict(checkpoint.left_out)
        self.unquantised: dict[str, str] = {}
        self.missing: list[str] = []
        self.problems: list[str] = []
        self.format_problems: dict[str, dict[str, None]] = {}  # what is wrong -> the modules where it is
        self.sources = SourceLinears(checkpoint, self.infos)
        self.cuts = cuts
        self.linears: list[str] = []

    def plan(self, *, kv_cache: bool) -> ExportPlan:
        layers, experts = self.dims.layers, self.dims.experts
        if self.dims.most_blocks > len(self.infos):  # before any loop over a number that a stranger wrote
            each = f" of {experts} experts" if experts else ""
            raise CheckpointError(
                f"{self.directory}: config.json says {layers} layers{each}, but there are only "
                f"{len(self.infos)} tensors"
            )
        self._drop_buffers()
        tied = self._drop_tied_head()
        steps: list[ExportStep] = []
        steps += self._outside(self.family.before)
        for i in range(self.dims.layers):
            layer = self.family.layer_prefix.format(i=i)
            modules = self.family.modules_of_layer(self.dims, i)
            tasks = [task for path, _, module in modules for task in self._module_tasks(layer, path, module)]
            tasks += self._cache(layer, kv_cache)
            self._check_fused(layer, tasks)
            steps.append(ExportStep(layer, layer, i, tuple(self.cuts.layer(tasks))))
        steps += self._outside(self.family.after)
        hints = [did_you_mean(name, self.infos) for name in self.missing[:_TOLD]]  # each looks at all names
        missing = zip_longest(self.missing, hints, fillvalue="")
        self.problems[:0] = [f"{name} is missing{hint}" for name, hint in missing]
        if self.infos:
            names = sorted(self.infos)
            self.problems.append(
                f"{len(names)} tensor(s) are not part of a {self.family.name} model of "
                f"{self.dims.layers} layers: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
            )
        self.problems = list(dict.fromkeys(self.problems))
        if self.problems:
            more = f"; and {len(self.problems) - _TOLD} more" if len(self.problems) > _TOLD else ""
            raise CheckpointError(f"{self.directory}: {'; '.join(self.problems[:_TOLD])}{more}")
        if self.format_problems:
            raise PlanError("; ".join(f"{', '.join(paths)}: {text}" for text, paths in self.format_problems.items()))
        if self.assignment is not None:
            self.assignment.check_used(self.linears)
        if tied is not None:  # last: the one check that reads weights
            check_tied(self.checkpoint, *tied)
        return ExportPlan(
            self.family,
            self.dims,
            self.parallelism,
            self.method.METHOD,
            tuple(steps),
            self.left_out,
            self.unquantised,
            kv_cache or (self.assignment is None and self.sources.has_kv_scales),
            self.cuts.rows is not None,
        )

    def _cache(self, layer: str, made: bool) -> list[TensorTask]:
        """The scales of the KV cache: made, taken over where all numbers are kept, else left out."""
        kept = made or self.assignment is None
        if kept and not made:
            self.sources.check_kv_scheme()
        method = self.method if kept else of_method("compressed-tensors")
        tasks = cache_tasks(self.family, method, layer, self.sources, made=made)
        if kept:
            return tasks
        for task in tasks:
            self.left_out[task.info.name] = "a scale of the source's KV cache: --kv-cache fp8 makes new ones"
        return []

    def _drop_buffers(self) -> None:
        for name in list(self.infos):
            reason = self.family.left_out(name, self.dims)
            if reason is not None:
                del self.infos[name]
                self.left_out[name] = reason

    def _drop_tied_head(self) -> tuple[TensorInfo, TensorInfo] | None:
        """Tied embeddings are written once; returns the head dropped and the embedding that it must equal."""
        if not self.dims.tied_embeddings:
            return None
        head, embedding = (
            next((f"{m.path}.weight" for m in modules if m.kind == kind), "")
            for modules, kind in ((self.family.after, "head"), (self.family.before, "embedding"))
        )
        if head not in self.infos or embedding not in self.infos:
            return None
        self.left_out[head] = f"tied to {embedding}, written once"
        return self.infos.pop(head), self.infos[embedding]

    def _outside(self, modules: Sequence[Module]) -> list[ExportStep]:
        """Steps of the modules outside the decoder layers, one for all that have the same name."""
        groups: dict[str, list[Module]] = {}
        for module in modules:
            groups.setdefault(module.path, []).append(module)
        return [step for path, own in groups.items() for step in self._single(path, own)]

    def _single(self, path: str, modules: Sequence[Module]) -> list[ExportStep]:
        """Steps of a module outside the decoder layers, in slabs of rows if it is large."""
        tasks = self.cuts.layer([task for module in modules for task in self._module_tasks(path, "", module)])
        if not tasks:
            return []
        weight = tasks[0].info
        if len(tasks) > 1 or weight.nbytes <= SLAB_BYTES:
            return [ExportStep(path, path, None, tuple(tasks))]
        row_bytes = max(1, weight.nbytes // max(1, weight.shape[0]))
        rows_per_slab = max(1, SLAB_BYTES // row_bytes)
        steps = []
        for start in range(0, weight.shape[0], rows_per_slab):
            rows = (start, min(start + rows_per_slab, weight.shape[0]))
            held = tuple((a + start, b + start) for a, b in even_cut(rows[1] - start, 1, self.tp))
            # The owned ranges tile the slab, not the tensor.
            task = TensorTask(
                weight,
                tasks[0].module,
                "",
                tasks[0].parameter,
                rows,
                Cut(0, held, held),
                tasks[0].number_format,
                tasks[0].outputs,
            )
            steps.append(ExportStep(f"{path}[{rows[0]}:{rows[1]}]", path, None, (task,)))
        return steps

    def _module_tasks(self, layer: str, path: str, module: Module) -> list[TensorTask]:
        name = full_name(layer, path)
        if module.kind == "linear" and not module.why:
            self.linears.append(name)
        if module.kind == "head" and self.dims.tied_embeddings:
            own = [tensor for tensor in self.infos if tensor.startswith(f"{name}.")]
            if own:  # its plain weight is gone by now
                self.problems.append(
                    f"config.json ties the embeddings, but {own[0]} is there; set tie_word_embeddings to false"
                )
            return []
        stored = None
        try:
            stored = self.sources.take(name, module, self.dims)
        except CheckpointError as error:
            self.problems.append(str(error))
            return []
        tensor = full_name(name, module.parameter)
        weight = self.infos.pop(tensor, None) if stored is None else stored.weight
        if weight is None:
            self.missing.append(tensor)
            return []
        # Also of what is refused: it is no stranger.
        bias = self.infos.pop(f"{name}.bias", None) if module.kind != "other" else None
        linear = None if stored is None else stored.linear
        number_format = self._number_format(name, module, weight, linear)
        if not self._shape_is_right(weight, module, number_format, linear):
            return []
        outputs = self._outputs(weight, number_format)
        shared = module.fused_into or (module.general_path if module.is_expert else path)
        tasks = [
            TensorTask(
                weight,
                module,
                path,
                module.parameter,
                (0, _rows(weight)),
                UNCUT,
                number_format,
                outputs,
                shared_scale=shared,
                stored=linear,
            )
        ]
        if bias is None and module.has_bias(self.config):
            why = f"config.json says {module.bias}" if isinstance(module.bias, str) else f"{self.family.name} has one"
            self.problems.append(f"{name}.bias is missing, though {why}")
        if bias is not None:
            tasks.append(self._bias(bias, module, path, weight.shape[0]))
        return tasks

    def _number_format(
        self, name: str, module: Module, weight: TensorInfo, stored: StoredLinear | None
    ) -> NumberFormat | None:
        """The number format of a module; notes the reason where there is none."""
        found = None
        if self.assignment is None and stored is not None:
            found = stored.number_format
            if not stored.exact:
                self.format_problems.setdefault(
                    f"rounds its inputs or orders its groups in the source in a way that no number format of ours has "
                    f"({found.name} is what its weights are): --quant none writes it unquantised",
                    {},
                )[f"*.{module.general_path}"] = None
        elif self.assignment is not None and module.kind == "linear" and not module.why:
            found = self.assignment.of(name)
            if found is not None and not found.quantised:
                found = None
            if found is not None and stored is not None:
                self.format_problems.setdefault(
                    "is quantised in the source, and what is rounded twice is worse than either: --quant none writes "
                    "it unquantised, modelexport convert keeps its numbers in another --format",
                    {},
                )[f"*.{module.general_path}"] = None
        if found is None and (module.why or module.kind not in ("norm", "vector", "other")):
            self.unquantised[name] = self._why_unquantised(name, module)
        return found

    def _why_unquantised(self, name: str, module: Module) -> str:
        if module.why:
            return module.why
        if module.kind == "linear":
            if self.assignment is None:
                return "not quantised in the source"
            return "--quant none" if self.assignment.of(name) is not None else "no pattern of --quant names it"
        if module.kind == "embedding":
            tied = " (and serves as the head)" if self.dims.tied_embeddings else ""
            return f"embedding{tied}: engines look rows up in the model's dtype"
        if module.kind == "router":
            return "router: it picks experts by small differences"
        return "head: its error goes straight into the logits"

    def _bias(self, bias: TensorInfo, module: Module, path: str, rows: int) -> TensorTask:
        if bias.shape != (rows,):
            self.problems.append(f"{bias.name} is {list(bias.shape)} but its weight has {rows} rows")
        return TensorTask(bias, module, path, "bias", (0, rows), UNCUT, None, self._outputs(bias, None))

    def _shape_is_right(
        self, weight: TensorInfo, module: Module, number_format: NumberFormat | None, stored: StoredLinear | None
    ) -> bool:
        expected = self.dims.stored_shapes(module)
        if weight.shape not in expected:
            makes = " or ".join(str(list(shape)) for shape in expected)
            self.problems.append(f"{weight.name} is {list(weight.shape)} but config.json makes it {makes}")
            return False
        if number_format is None:
            return True
        if stored is None and weight.dtype not in FLOATS:
            self.problems.append(f"{weight.name} is {weight.dtype}; only {', '.join(FLOATS)} weights can be quantised")
            return False
        pattern, shape = f"*.{module.general_path}", (weight.shape[0], weight.shape[1])
        try:
            number_format.check_shape(pattern, shape)
        except PlanError as error:
            self.format_problems.setdefault(str(error).removeprefix(f"{pattern}: "), {})[pattern] = None
            return False
        refusal = self.method.refusal(number_format, shape)
        if refusal is not None:
            self.format_problems.setdefault(refusal, {})[pattern] = None
        return refusal is None

    def _check_fused(self, layer: str, tasks: Sequence[TensorTask]) -> None:
        """Modules that engines fuse must be of one format: they are one matrix there."""
        groups: dict[str, list[TensorTask]] = {}
        for task in tasks:
            if task.parameter == "weight" and task.module.kind == "linear":
                groups.setdefault(task.shared_scale, []).append(task)
        for group in groups.values():
            kinds = {_numbers(task.number_format) for task in group}
            if len(kinds) > 1:
                spelled = ", ".join(
                    f"{task.path} {'none' if task.number_format is None else task.number_format.name}"
                    for task in group[:4]
                )
                self.format_problems.setdefault(
                    f"engines join these into one matrix, which has one number format: {spelled}. Give --quant a "
                    "pattern that means all of them",
                    {},
                )[f"{layer}.{group[0].shared_scale}"] = None

    def _outputs(self, info: TensorInfo, number_format: NumberFormat | None) -> tuple[OutputTensor, ...]:
        if number_format is None:
            name = info.name.rsplit(".", 1)[-1]
            axes = tuple((d, 1) for d in range(len(info.shape)))
            nbytes = tensor_nbytes(info.dtype, info.shape)
            return (OutputTensor(name, info.dtype, info.shape, axes, nbytes),)
        return linear_outputs(self.method, number_format, (info.shape[0], info.shape[1]), info.dtype)


def _rows(info: TensorInfo) -> int:
    """Elements along dim 0; 1 of a single number."""
    return info.shape[0] if info.shape else 1


def _numbers(number_format: NumberFormat | None) -> NumberFormat | None:
    """The same, whatever dtype its scales have."""
    return None if number_format is None else replace(number_format, scale_dtype=None)
