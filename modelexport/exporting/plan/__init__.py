"""ExportPlan: everything an export decides before it reads a weight.

A pure function of the checkpoint's headers, its family, the number format and the parallelism. It says which
tensors there are, who reads and emits which part of each, in which order they are written, and what the
result will weigh. Every violation found is listed at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

from modelexport.checkpoints.safetensors.file import Checkpoint, TensorInfo, tensor_nbytes
from modelexport.errors import CheckpointError, PlanError
from modelexport.exporting.plan.cuts import Cuts
from modelexport.exporting.plan.linears import (
    UNCUT,
    check_cache_scheme,
    check_cached_heads,
    kept_cache_scales,
    linear_outputs,
    made_cache_scales,
)
from modelexport.exporting.plan.steps import ExportPlan, ExportStep, OutputTensor, TensorTask, full_name
from modelexport.models.architecture import Module, language_config
from modelexport.models.decoded import HeldFormats, StoredLinear, decoded, model_dtype, stored_linear
from modelexport.models.matching import Matched, MatchedModule, ModelDescription, Place, match, refuse
from modelexport.models.ties import check_tied, untie
from modelexport.quantization import kv_caches
from modelexport.quantization.methods import Method, ReadOnlyNumbers, of_method, refusal
from modelexport.quantization.methods.mxfp4 import BLOCK as MXFP4_GROUP
from modelexport.quantization.mixtures import of_file_type
from modelexport.sharding.plan import Cut, Parallelism, even_cut
from modelexport.system.dtypes import FLOATS

if TYPE_CHECKING:
    from modelexport.quantization.assignment import Assignment
    from modelexport.quantization.formats.base import NumberFormat

__all__ = ["ExportPlan", "ExportStep", "OutputTensor", "TensorTask", "build_plan", "full_name", "why_untied"]

_SAME_BY_EXPERT = "mxfp4-wo writes the same numbers"
_VOCABULARY = ("head", "embedding")
SLAB_BYTES = 64 << 20  # an embedding larger than this is exported in slabs of rows, to bound memory
STEP_BYTES = 1 << 27  # a layer larger than this is exported in several steps, where no samples run through it


def build_plan(
    checkpoint: Checkpoint,
    assignment: Assignment | None,
    parallelism: Parallelism,
    *,
    method: str = "compressed-tensors",
    kv_cache: str | None = None,
    rows: int | None = None,
    untied: str = "",
    quantise_drafts: bool = False,
    casts: bool = False,
) -> ExportPlan:
    """Plan the export of ``checkpoint``.

    Args:
        assignment: which linear gets which number format; None: each keeps what it has in the source.
        method: the quantisation method that the target spells them by.
        kv_cache: the KV cache whose scales are to be written, by its name in ``kv_caches.CACHES``.
        rows: where layers are calibrated: linears are cut along their rows only, on multiples of this.
        untied: the reason why a head that is tied to the embedding becomes a tensor of its own, as what is rotated
            needs: its head has taken in the final norm, its embedding has not. "": it stays tied.
        quantise_drafts: whether draft layers' linears get a number format, too.
        casts: whether linears that are MXFP4 in the source keep their values where a number format can hold them.

    Raises:
        CheckpointError: config.json is missing or contradicts the tensors, or tensors are missing or unknown.
        PlanError: the architecture is unknown, a dimension does not suit a number format, or the method cannot encode
            one.
    """
    if assignment is not None:
        checkpoint = decoded(checkpoint)
    model = ModelDescription.of(checkpoint)
    family, dimensions = model.family, model.dimensions
    if untied and dimensions.tied_embeddings:
        plan = build_plan(
            untie(checkpoint),
            assignment,
            parallelism,
            method=method,
            kv_cache=kv_cache,
            rows=rows,
            quantise_drafts=quantise_drafts,
            casts=casts,
        )
        told = {m.path: f"head: {untied}" for m in family.after if m.kind == "head" and m.path in plan.unquantised}
        # A head that is quantised has no line among those that are not.
        said = () if told else (f"the head is {untied}",)
        return replace(plan, unquantised={**plan.unquantised, **told}, notes=(*plan.notes, *said))
    cuts = Cuts(dimensions, parallelism.tp, rows)
    matched = match(checkpoint, model)
    planner = _Planner(checkpoint, matched, assignment, parallelism, of_method(method), cuts, quantise_drafts, casts)
    return planner.plan(kv_cache)


def why_untied(checkpoint: Checkpoint, assignment: Assignment | None, method: str = "compressed-tensors") -> str:
    """The reason why a head that is tied to the embedding has to become a tensor of its own; "" where it has not.

    Of a head and an embedding that are one, engines take one for a linear and look up rows of the other: no number
    format is read as both, unless the engine of a ``method`` reads them so.

    Raises:
        CheckpointError, PlanError: as :func:`build_plan`.
    """
    if assignment is None or not assignment.is_list or getattr(of_method(method), "READS_TIED", False):
        return ""
    model = ModelDescription.of(checkpoint)
    if not model.dimensions.tied_embeddings:
        return ""
    named = {
        module.kind: found.name
        for module in (*model.family.before, *model.family.after)
        if module.kind in _VOCABULARY
        and (found := assignment.of_vocabulary(module.path)) is not None
        and found.quantised
    }
    if not named:
        return ""
    both = f"; the {next(iter(named))} alone is quantised" if len(named) == 1 else ""
    return f"no longer tied to the embedding: engines read no number format as both{both}"


class _Planner:
    """Builds an :class:`ExportPlan`, collecting what is wrong on the way."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        matched: Matched,
        assignment: Assignment | None,
        parallelism: Parallelism,
        method: Method,
        cuts: Cuts,
        quantise_drafts: bool,
        casts: bool,
    ) -> None:
        self.checkpoint = checkpoint
        self.matched = matched
        self.family, self.dims = matched.model.family, matched.model.dimensions
        self.quantization = matched.model.quantization
        self.dtype = model_dtype(matched)
        self.assignment = assignment
        self.method = method
        self.parallelism = parallelism
        self.left_out = {**checkpoint.left_out, **matched.left_out}
        self.unquantised: dict[str, str] = {}
        self.problems = matched.problems()
        self.format_problems: dict[str, dict[str, None]] = {}  # what is wrong -> the modules where it is
        self.cuts = cuts
        self.quantise_drafts = quantise_drafts
        self.casts = casts
        self.stored_formats = HeldFormats()
        self._known_outputs: dict[tuple[object, ...], tuple[OutputTensor, ...]] = {}

    def plan(self, made_cache: str | None) -> ExportPlan:
        if made_cache is not None:
            config = language_config(self.checkpoint.config or {}, self.checkpoint.infos)
            check_cached_heads(config, self.dims, kv_caches.CACHES[made_cache])
        ties = self._ties()
        steps: list[ExportStep] = []
        for layer, group in groupby(self.matched.modules, key=lambda module: module.place.layer):
            modules = list(group)
            steps += self._outside(modules) if layer is None else self._layer(layer, modules, made_cache)
        if self.problems:
            refuse(str(self.checkpoint.directory), self.problems)
        if self.format_problems:
            raise PlanError("; ".join(f"{', '.join(paths)}: {text}" for text, paths in self.format_problems.items()))
        if self.assignment is not None:
            places = [module.place for module in self.matched.modules]
            linears = [name for place in places for name in self._named_by_patterns(place)]
            kept = (p for p in places if p.module.kind in _VOCABULARY and not p.module.why and p.draft is None)
            self.assignment.check_used(linears, [*(place.name for place in kept), *self._tied_heads()])
        for head, embedding in ties:  # last: the one check that reads weights
            check_tied(self.checkpoint, head, embedding)
        notes = self.family.notes
        if self.quantise_drafts and self.cuts.rows is not None:
            rounded = sum(task.quantised and task.place.draft is not None for step in steps for task in step.tasks)
            said = f"{rounded} linears of draft layers are rounded to nearest: samples do not run through them"
            notes = (*notes, *([said] if rounded else []))
        apart = [
            task.place.name
            for step in steps
            for task in step.tasks
            if task.quantised and task.module.kind in _VOCABULARY
        ]
        if apart and self.cuts.rows is not None:
            notes = (*notes, f"{' and '.join(apart)}: rounded to nearest: calibration is of the layers between")
        if self.assignment is not None:
            notes = (*notes, *self.assignment.notes)
        kept_cache = None
        if self.assignment is None and self.quantization is not None:
            kept_cache = kv_caches.of_scheme(self.quantization.kv_cache_scheme)
        return ExportPlan(
            self.family,
            self.dims,
            self.parallelism,
            self.method.METHOD,
            tuple(steps),
            self.left_out,
            self.unquantised,
            made_cache if kept_cache is None else kept_cache.name,
            self.cuts.rows is not None,
            notes,
            self._file_type(),
        )

    def _file_type(self) -> int | None:
        """llama.cpp's number of the mixture; of a source whose number formats are kept, that which its files have."""
        if self.assignment is not None:
            return None if self.assignment.mixture is None else self.assignment.mixture.file_type
        said = (self.checkpoint.config or {}).get("quantization_config")
        number = said.get("file_type") if isinstance(said, dict) else None
        return None if (mixture := of_file_type(number)) is None else mixture.file_type

    def _named_by_patterns(self, place: Place) -> Iterator[str]:
        """The linears of a module that ``--quant`` may name: of a stack of experts those that it would be apart."""
        module = place.module
        if place.draft is None and module.kind == "linear" and not module.why:
            yield place.name
        elif place.draft is None and module.experts is not None and module.experts.parameter == "weight":
            prefix = place.name.removesuffix(place.path)
            experts = module.experts.by_expert(self.dims.weight_shape(module))[0]
            yield from (f"{prefix}{path.format(e=e)}" for _, path in module.experts.linears for e in range(experts))

    def _tied_heads(self) -> list[str]:
        """The heads that a pattern may name though they are the embedding."""
        if not (self.dims.tied_embeddings and getattr(self.method, "READS_TIED", False)):
            return []
        return [module.path for module in self.family.after if module.kind == "head"]

    def _layer(self, number: int, modules: Iterable[MatchedModule], made_cache: str | None) -> list[ExportStep]:
        layer = self.family.layer_prefix.format(i=number)
        tasks: list[TensorTask] = []
        cache_scales: dict[str, TensorInfo] = {}
        for module in modules:
            if module.place.is_cache_scale:
                cache_scales |= {info.name: info for info in module.tensors.values()}
            else:
                tasks += self._module_tasks(module)
        tasks += self._cache_tasks(number, cache_scales, made_cache)
        self._check_fused(layer, tasks)
        cut = self.cuts.layer(self._cast(tasks))
        whole = self.cuts.rows is not None or made_cache is not None  # what is measured is measured layer by layer
        pieces = [cut] if whole else _pieces(cut)
        shared = _shared(pieces)
        return [ExportStep(name, layer, number, tuple(piece), shared) for name, piece in _numbered(layer, pieces)]

    def _cache_tasks(self, layer: int, found: Mapping[str, TensorInfo], made: str | None) -> list[TensorTask]:
        """The scales of a layer's KV cache: made, taken over where all numbers are kept, else left out."""
        if self.assignment is None and made is None:
            check_cache_scheme(self.quantization, self.method)
            if not found or self.quantization is None:
                return []
            return kept_cache_scales(self.family, self.dims, self.quantization, self.method, layer, found)
        why = "a scale of the source's KV cache: --kv-cache makes new ones"
        self.left_out |= dict.fromkeys(found, why)
        if made is None:
            return []
        return made_cache_scales(self.family, self.dims, self.method, kv_caches.CACHES[made], layer)

    def _ties(self) -> list[tuple[TensorInfo, TensorInfo]]:
        """Heads that are written once with the embedding that they are tied to, and the embeddings.

        They must be equal. A head of other tensors than a plain weight is none, and a problem.
        """
        if not self.dims.tied_embeddings:
            return []
        infos, ties = self.checkpoint.infos, []
        heads, embeddings = (
            [f"{m.path}.weight" for m in modules if m.kind == kind]
            for modules, kind in ((self.family.after, "head"), (self.family.before, "embedding"))
        )
        for head, embedding in zip(heads, embeddings, strict=False):
            own = [name for name in self.matched.left_out if name.startswith(head.removesuffix("weight"))]
            if own and (own != [head] or embedding not in infos):
                self.problems.append(
                    f"config.json ties the embeddings, but {own[0]} is there; set tie_word_embeddings to false"
                )
            elif own:
                ties.append((infos[head], infos[embedding]))
        return ties

    def _outside(self, modules: Iterable[MatchedModule]) -> list[ExportStep]:
        """Steps of modules outside the decoder layers, one for all that have the same name, or draft layer."""
        tasks: dict[str, list[TensorTask]] = {}
        for module in modules:
            tasks.setdefault(module.place.part, []).extend(self._module_tasks(module))
        for part, own in tasks.items():
            self._check_fused(part, own)
        steps: list[ExportStep] = []
        for part, own in tasks.items():
            if own:
                pieces = _pieces(self.cuts.layer(self._cast(own)))
                shared = _shared(pieces)
                steps += (
                    step for name, piece in _numbered(part, pieces) for step in self._single(name, part, piece, shared)
                )
        return steps

    def _single(
        self, name: str, path: str, tasks: Sequence[TensorTask], shared: tuple[TensorTask, ...]
    ) -> list[ExportStep]:
        """Steps of a module outside the decoder layers, in slabs of rows if it is large."""
        weight = tasks[0].info
        if len(tasks) > 1 or not _is_by_rows(tasks[0]) or weight.nbytes <= SLAB_BYTES:
            return [ExportStep(name, path, None, tuple(tasks), shared)]
        row_bytes = max(1, weight.nbytes // max(1, weight.shape[0]))
        rows_per_slab = max(1, SLAB_BYTES // row_bytes)
        steps = []
        for start in range(0, weight.shape[0], rows_per_slab):
            rows = (start, min(start + rows_per_slab, weight.shape[0]))
            held = tuple((a + start, b + start) for a, b in even_cut(rows[1] - start, 1, self.parallelism.tp))
            # The owned ranges tile the slab, not the tensor.
            task = replace(tasks[0], rows=rows, cut=Cut(0, held, held), shared_scale="")
            steps.append(ExportStep(f"{name}[{rows[0]}:{rows[1]}]", path, None, (task,)))
        return steps

    def _module_tasks(self, matched: MatchedModule) -> list[TensorTask]:
        place, module, linear = matched.place, matched.place.module, None
        if module.experts is not None and (matched.scheme is not None or module.parameter not in matched.tensors):
            instead = "fp8-static, calibrated, quantises them" if matched.scheme is not None else _SAME_BY_EXPERT
            self.format_problems.setdefault(
                f"all experts of a layer are quantised in one tensor, which convert cannot write otherwise: --quant "
                f"{instead} expert by expert",
                {},
            )[f"*.{module.general_path}"] = None
            return []
        if matched.scheme is None:
            weight = matched.tensors[module.parameter]
            computed = self.checkpoint.computed.get(weight.name)
            source_bytes = None if computed is None else sum(info.nbytes for info in computed.sources)
        else:
            try:
                shape = self.dims.weight_shape(module)
                linear = stored_linear(matched, matched.scheme, shape, self.dtype, self.stored_formats)
            except CheckpointError as error:
                self.problems.append(str(error))
                return []
            weight, source_bytes = linear.weight, linear.nbytes
        number_format = self._number_format(place, linear)
        if not self._suits(weight, module, number_format, linear):
            return []
        shared = module.fused_into or (module.general_path if module.is_expert else place.path)
        rows = weight.shape[0] if weight.shape else 1
        tasks = [
            TensorTask(
                weight,
                place,
                module.parameter,
                (0, rows),
                UNCUT,
                number_format,
                self._outputs(weight, number_format),
                shared_scale=shared,
                stored=linear,
                source_bytes=source_bytes,
            )
        ]
        bias = matched.tensors.get("bias")
        if bias is not None:
            tasks.append(TensorTask(bias, place, "bias", (0, rows), UNCUT, None, self._outputs(bias, None)))
        return tasks

    def _number_format(self, place: Place, stored: StoredLinear | None) -> NumberFormat | None:
        """The number format of a module; notes the reason where there is none."""
        found, module = None, place.module
        if self.assignment is None and stored is not None and isinstance(stored.number_format, ReadOnlyNumbers):
            self.format_problems.setdefault(
                f"is {stored.number_format.name} in the source, which is only read: modelexport --model CKPT --quant "
                "none writes the weights that it stands for, any other --quant rounds these",
                {},
            )[f"*.{module.general_path}"] = None
        elif self.assignment is None and stored is not None:
            assert not isinstance(stored.number_format, ReadOnlyNumbers)
            found = stored.number_format
            serves_as_head = module.kind == "embedding" and self.dims.tied_embeddings and place.draft is None
            if serves_as_head and not getattr(self.method, "READS_TIED", False):
                self.format_problems.setdefault(
                    f"serves as the head, too, and is {found.name} in the source, which no engine of "
                    f"{self.method.METHOD} checkpoints reads as both: --format gguf keeps it, modelexport --model CKPT "
                    "--quant FORMAT rounds the model anew",
                    {},
                )[place.name] = None
            if not stored.exact:
                self.format_problems.setdefault(
                    f"rounds its inputs or orders its groups in the source in a way that no number format of ours has "
                    f"({found.name} is what its weights are): --quant none writes it unquantised",
                    {},
                )[f"*.{module.general_path}"] = None
        elif self.assignment is not None and module.kind == "linear" and not module.why:
            found = self._assigned(place)
            why = "" if found is None else self._kept_by_method(module) or self._too_narrow(module, found)
            if why:
                self.unquantised[place.name] = why
                return None
        elif self.assignment is not None and module.kind in _VOCABULARY and place.draft is None:
            found = self._of_vocabulary(place)
        if found is None and (module.why or module.kind not in ("norm", "vector", "other")):
            self.unquantised[place.name] = self._why_unquantised(place)
        return found

    def _of_vocabulary(self, place: Place) -> NumberFormat | None:
        """The number format that ``--quant`` gives the head or the embedding by its name; notes why it cannot be."""
        assert self.assignment is not None
        found = self.assignment.of_vocabulary(place.name)
        if found is None and place.module.kind == "embedding":
            found = next(filter(None, map(self.assignment.of_vocabulary, self._tied_heads())), None)
        if found is None or not found.quantised:
            return None
        why = self._no_embedding(found) if place.module.kind == "embedding" else self._no_head(found)
        if why is not None:
            self.format_problems.setdefault(why, {})[place.name] = None
        return found

    def _no_embedding(self, number_format: NumberFormat) -> str | None:
        refusal = getattr(self.method, "embedding_refusal", None)
        if refusal is None:
            return f"{self.method.METHOD} checkpoints have unquantised embeddings: choose --format hf"
        text: str | None = refusal(number_format)
        return text

    def _no_head(self, number_format: NumberFormat) -> str | None:
        if not getattr(self.method, "HOLDS_HEADS", False):
            return f"{self.method.METHOD} checkpoints have unquantised heads: choose --format hf"
        if number_format.weight_arguments().get("strategy") == "block":
            return f"engines cut a head between any two rows, and {number_format.name} has scales of blocks: choose fp8"
        if number_format.has_static_inputs and self.cuts.rows is not None:
            return (
                f"{number_format.name} needs the range of the head's inputs, which layer-by-layer calibration does not "
                "see: choose a format without static scales for it, or --algorithm rtn"
            )
        return None

    def _assigned(self, place: Place) -> NumberFormat | None:
        """The number format that ``--quant`` gives a linear; one of a draft layer has that of the last decoder layer's
        like it, or what a mixture gives it."""
        assert self.assignment is not None
        if place.draft is not None and not self.quantise_drafts:
            return None
        found = self.assignment.of(place.name, like="" if place.draft is None else place.draft.twin)
        if found is None or not found.quantised:
            return None
        if place.draft is not None and found.has_static_inputs:
            self.format_problems.setdefault(
                f"{found.name} needs the ranges of its inputs, and samples do not run through draft layers: choose "
                "--draft keep",
                {},
            )[f"*.{place.module.general_path}"] = None
        return found

    def _kept_by_method(self, module: Module) -> str:
        """The reason why the method has no quantised linear of that name; "" where it may have one."""
        kept: Mapping[str, str] = getattr(self.method, "KEPT_LINEARS", {})
        return kept.get(module.path.rpartition(".")[2], "")

    def _too_narrow(self, module: Module, number_format: NumberFormat) -> str:
        """The reason why a linear is left as it is that reads fewer features than a group has columns; "" for others.

        Of the linears beside a layer's attention and MLP (Gemma 3n's low-rank ones), where the layer's own have groups:
        a model that is narrow as a whole, or a linear that ``--quant`` names, needs another group size.
        """
        beside = module.role == module.path and not (self.assignment is not None and self.assignment.is_list)
        if not beside:
            return ""
        group = number_format.group_size or 0
        features = self.dims.weight_shape(module)[1]
        if features >= group or features % max(1, group) == 0 or self.dims.hidden % group:
            return ""
        sizes = [size for size in number_format.group_sizes if size > 0 and features % size == 0]
        hint = f": --group-size {max(sizes)} quantises it, too" if sizes else ""
        return f"it reads {features} features, fewer than a group of {group} columns{hint}"

    def _why_unquantised(self, place: Place) -> str:
        module = place.module
        if module.why:
            return module.why
        twin = "" if place.draft is None else place.draft.twin
        may_be = module.kind in ("linear", *_VOCABULARY) and (place.draft is None or (self.quantise_drafts and twin))
        if self.assignment is not None and may_be and (why := self.assignment.why_kept(place.name, like=twin)):
            return why
        if module.kind == "linear":
            if self.assignment is None:
                return "not quantised in the source"
            if place.draft is not None and not self.quantise_drafts:
                return "of a draft layer: --draft keep"
            of_list = self.assignment.of(place.name, like=twin) is None
            return "no pattern of --quant names it" if of_list else "--quant none"
        if module.kind == "embedding":
            tied = " (and serves as the head)" if self.dims.tied_embeddings and place.draft is None else ""
            return f"embedding{tied}: engines look rows up in the model's dtype"
        if module.kind == "router":
            return "router: it picks experts by small differences"
        return "head: its error goes straight into the logits"

    def _suits(
        self, weight: TensorInfo, module: Module, number_format: NumberFormat | None, stored: StoredLinear | None
    ) -> bool:
        """Returns whether the weight can be written in the number format; notes the reason where it cannot."""
        if number_format is None:
            return True
        if stored is None and weight.dtype not in FLOATS:
            self.problems.append(f"{weight.name} is {weight.dtype}; only {', '.join(FLOATS)} weights can be quantised")
            return False
        pattern = module.path if module.kind in _VOCABULARY else f"*.{module.general_path}"
        shape = (weight.shape[0], weight.shape[1])
        try:
            number_format.check_shape(pattern, shape)
        except PlanError as error:
            self.format_problems.setdefault(str(error).removeprefix(f"{pattern}: "), {})[pattern] = None
            return False
        why = refusal(self.method, number_format, shape)
        if why is not None:
            self.format_problems.setdefault(why, {})[pattern] = None
        return why is None

    def _check_fused(self, layer: str, tasks: Sequence[TensorTask]) -> None:
        """Modules that engines fuse must be of one format: they are one matrix there."""
        if not getattr(self.method, "FUSES_LINEARS", True):
            return
        groups: dict[str, list[TensorTask]] = {}
        for task in tasks:
            if task.parameter == "weight" and task.module.kind == "linear":
                groups.setdefault(task.shared_scale, []).append(task)
        for group in groups.values():
            alike = {id(task.number_format): task.number_format for task in group}  # hundreds of experts have one
            if len(alike) > 1 and len({_numbers(each) for each in alike.values()}) > 1:
                chosen = ", ".join(
                    f"{task.path} {'none' if task.number_format is None else task.number_format.name}"
                    for task in group[:4]
                )
                self.format_problems.setdefault(
                    f"engines join these into one matrix, which has one number format: {chosen}. Give --quant a "
                    "pattern that means all of them",
                    {},
                )[f"{layer}.{group[0].shared_scale}"] = None

    def _cast(self, tasks: Sequence[TensorTask]) -> list[TensorTask]:
        """The same, with exact scales where MXFP4 is rounded to nearest into a format that holds its values.

        Modules that share a scale have them only together.
        """
        if not self.casts:
            return list(tasks)
        plain = {task.shared_scale for task in tasks if task.parameter == "weight" and not self._is_cast(task)}
        return [
            replace(task, number_format=replace(task.number_format, observer="exact"))
            if task.number_format is not None and self._is_cast(task) and task.shared_scale not in plain
            else task
            for task in tasks
        ]

    def _is_cast(self, task: TensorTask) -> bool:
        """Returns whether a task's weight is MXFP4 in the source, and goes into a format that holds its values."""
        held = self.checkpoint.computed.get(task.info.name)
        if task.parameter != "weight" or not task.quantised or not isinstance(held, StoredLinear):
            return False
        assert task.number_format is not None
        is_mxfp4 = not isinstance(held.number_format, ReadOnlyNumbers) and held.number_format.is_mxfp4
        return is_mxfp4 and task.number_format.holds_mxfp4() and task.full_shape[1] % MXFP4_GROUP == 0

    def _outputs(self, info: TensorInfo, number_format: NumberFormat | None) -> tuple[OutputTensor, ...]:
        if number_format is None:
            name = info.name.rsplit(".", 1)[-1]
            axes = tuple((d, 1) for d in range(len(info.shape)))
            nbytes = tensor_nbytes(info.dtype, info.shape)
            return (OutputTensor(name, info.dtype, info.shape, axes, nbytes),)
        key = (number_format, info.shape, info.dtype)  # the experts of all layers are alike
        if key not in self._known_outputs:
            shape = (info.shape[0], info.shape[1])
            self._known_outputs[key] = linear_outputs(self.method, number_format, shape, info.dtype)
        return self._known_outputs[key]


def _pieces(tasks: Sequence[TensorTask]) -> list[list[TensorTask]]:
    """The tasks of a layer in pieces of at most :data:`STEP_BYTES`, or of what cannot be parted: a module's own, and
    those of all modules among whose scales one is searched for together."""
    if sum(task.info.nbytes for task in tasks) <= STEP_BYTES:
        return [list(tasks)]
    together: dict[str, list[TensorTask]] = {}
    for task in tasks:
        is_searched = task.quantised and task.number_format.searches_whole  # type: ignore[union-attr]
        together.setdefault(f"scale {task.shared_scale}" if is_searched else task.place.name, []).append(task)
    pieces: list[list[TensorTask]] = []
    filled = STEP_BYTES
    for own in together.values():
        size = sum(task.info.nbytes for task in own)
        if filled + size > STEP_BYTES:
            pieces.append([])
            filled = 0
        pieces[-1] += own
        filled += size
    return pieces


def _shared(pieces: Sequence[Sequence[TensorTask]]) -> tuple[TensorTask, ...]:
    """The tasks of a layer's pieces that share the scale of a whole weight with those of another piece."""
    if len(pieces) == 1:
        return ()
    words = Counter(
        word for piece in pieces for word in {task.shared_scale for task in piece if task.reach == "tensor"}
    )
    return tuple(task for piece in pieces for task in piece if task.reach == "tensor" and words[task.shared_scale] > 1)


def _numbered(name: str, pieces: Sequence[list[TensorTask]]) -> Iterator[tuple[str, list[TensorTask]]]:
    """The pieces with the names of their steps."""
    for number, piece in enumerate(pieces, 1):
        yield (name if len(pieces) == 1 else f"{name} ({number} of {len(pieces)})"), piece


def _is_by_rows(task: TensorTask) -> bool:
    """Returns whether rows of a task's outputs follow from the same rows of its weight: no scale spans several."""
    if task.number_format is None:
        return True
    by_rows = all(out.axes[:1] == ((0, 1),) for out in task.outputs)
    return task.stored is None and task.number_format.scale_granularity == "block" and by_rows


def _numbers(number_format: NumberFormat | None) -> NumberFormat | None:
    """The same, whatever dtype its scales have."""
    return None if number_format is None else replace(number_format, scale_dtype=None)
