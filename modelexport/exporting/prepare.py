"""Everything of an export that comes before its first weight: checks, the plan, the target's layout, warnings."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from modelexport import __version__
from modelexport.checkpoints.adapters import Adapter, adapters_in, parse_setting, read_adapter
from modelexport.checkpoints.safetensors.file import Checkpoint, Layout
from modelexport.checkpoints.source import Source, is_local, resolve_source
from modelexport.checkpoints.staging import check_target, resolve_target
from modelexport.distributed import launch
from modelexport.errors import PlanError, UsageError
from modelexport.exporting.plan import ExportPlan, build_plan, full_name, why_untied
from modelexport.exporting.plan.mixtures import with_mixtures
from modelexport.inspection.record.reading import read_record
from modelexport.models import checkpoint_formats
from modelexport.models.adapted import adapted, without_adapters
from modelexport.models.architecture import experts_of_token, language_config, why_no_language_model
from modelexport.models.decoded import decoded
from modelexport.models.draft_layers import without_drafts
from modelexport.models.engines import Linear
from modelexport.models.engines import warnings as engine_warnings
from modelexport.models.in_memory import is_gathered
from modelexport.models.language_part import language_part_alone
from modelexport.models.multipliers import multiplied
from modelexport.models.opening import open_model
from modelexport.models.stacked import experts_apart, experts_stacked, held
from modelexport.models.structure import by_structure, check_whole
from modelexport.models.target_plan import TargetPlan, check_source, plan_target
from modelexport.models.ties import untie
from modelexport.models.tokenizers import may_be_restored, tokenizer_of
from modelexport.quantization import algorithms, devices
from modelexport.quantization.assignment import KEEP, Assignment
from modelexport.quantization.calibration.cut import ROWS
from modelexport.quantization.calibration.images import check_processor, image_rows
from modelexport.quantization.calibration.text import TokenDocuments, has_tokenizer, shares
from modelexport.quantization.methods import QUANTIZATION_KEYS, of_method
from modelexport.quantization.methods.base import ModelQuantization, QuantizationFiles
from modelexport.recipe import ExportRecipe
from modelexport.sharding.plan import Parallelism
from modelexport.system.run_log import check_log
from modelexport.system.startup import without_collector
from modelexport.system.terminal import note

if TYPE_CHECKING:
    from modelexport.exporting.calibrated.device_memory import DeviceMemory

_TOKENS_OF_A_SCALE = 1000
"""Fewer are too few for a static scale."""
_ROTATED = "no longer tied to the embedding, which has not taken in the last norm as it has"

__all__ = ["PreparedExport", "check_early", "parse_assignment", "prepare", "quantization_files"]


@dataclass(frozen=True)
class PreparedExport:
    """An export before its first weight is read.

    Attributes:
        rounded_before: those of the plan's notes that say which numbers were rounded in the source already.
        assignment: of autoquant, what modelexport.json keeps of it; None without.
        device_memory: what calibration takes of a device, where one computes: of a dry run, or with a budget.
    """

    recipe: ExportRecipe
    source: Source
    checkpoint: Checkpoint
    plan: ExportPlan
    target: TargetPlan
    warnings: tuple[str, ...] = ()
    adapters: tuple[Adapter, ...] = ()
    rounded_before: tuple[str, ...] = ()
    device_memory: DeviceMemory | None = None
    assignment: Mapping[str, Any] | None = None

    @property
    def layout(self) -> Layout:
        """The files of the target, and the place of every tensor in them."""
        return self.target.layout

    @property
    def is_calibrated(self) -> bool:
        """True if samples run through the model, for statistics or for static scales."""
        return self.plan.needs_ranges or self.plan.calibrated

    @property
    def read_back_along(self) -> bool:
        """True if modules are read back as soon as they are written, and not all at the end: of several ranks nobody
        but the first knows when all pieces of a module are there, and a tensor may lie in several places."""
        return self.recipe.tp == 1 and not self.layout.placements

    def warn(self) -> None:
        """Prints the warnings, before the work starts."""
        if not self.recipe.quiet and not self.recipe.json:
            for warning in self.warnings:
                note(f"warning: {warning}")


def prepare(recipe: ExportRecipe, source: Source | None = None) -> PreparedExport:
    """Read the headers and plan the export; no weight is read and nothing is written."""
    if not recipe.of_kind("assign"):
        parse_assignment(recipe)  # before a download, for a wrong name's sake
    method = checkpoint_formats.method_of(recipe.format)
    adapters = _adapters(recipe)
    source = source or resolve_source(recipe.model, recipe.revision)
    _check_apart(recipe, source)
    with without_collector():  # a hundred thousand small objects: the collector would walk them over and over
        opened = source.checkpoint or open_model(source.directory, recipe.config)
        if recipe.unknown_architecture == "structure":
            opened = by_structure(opened)
        ranks = {"tp": recipe.tp, "target-tp": recipe.target_tp, "target-pp": recipe.target_pp}
        check_whole(opened.config, {**ranks, "target-ep": recipe.target_ep})
        _check_gathered(recipe, opened)
        checkpoint, dropped = without_drafts(opened, _why_no_drafts(recipe, opened.config))
        if recipe.quant != KEEP or recipe.of_kind("assign"):
            checkpoint = _with_experts_apart(recipe, decoded(checkpoint))
        elif checkpoint_formats.wants_experts_apart(recipe.format):
            checkpoint = experts_apart(checkpoint)
        elif checkpoint_formats.has_experts_apart(checkpoint.format):
            checkpoint = experts_stacked(checkpoint)
        checkpoint, merged = adapted(checkpoint, adapters)
        if checkpoint_formats.wants_language_part(recipe.format):
            checkpoint, beside = language_part_alone(checkpoint)
            dropped = [*dropped, *beside]
        if checkpoint_formats.wants_multiplied(recipe.format):
            checkpoint = multiplied(checkpoint)
        chosen = None
        if recipe.of_kind("assign"):
            recipe, chosen = _autoquant(recipe, source, checkpoint)
        assignment = parse_assignment(recipe)
        if assignment is None:
            _check_kept(source, checkpoint)
        rotated = bool(recipe.of_kind("rotate"))
        if rotated:
            from modelexport.exporting.calibrated.rotation import rotation_changes

            rotation_changes(checkpoint)  # whether it can be
        untied = _ROTATED if rotated else why_untied(checkpoint, assignment, method.METHOD)
        if assignment is not None and assignment.mixtures:
            assignment = with_mixtures(recipe, untie(checkpoint) if untied else checkpoint, assignment)
        plan = build_plan(
            checkpoint,
            assignment,
            Parallelism(tp=recipe.tp),
            method=method.METHOD,
            kv_cache=recipe.kv_cache,
            rows=ROWS if recipe.is_calibrated else None,
            untied=untied,
            quantise_drafts=recipe.draft == "quantise",
            casts=recipe.algorithm == ExportRecipe.algorithm,
        )
        if untied:
            checkpoint = untie(checkpoint)
        calibrated = plan.needs_ranges or plan.calibrated
        if calibrated:
            _check_calibration(recipe, source, checkpoint)
        recipe = replace(recipe, device=devices.chosen(recipe.device, calibrated=calibrated))
        _check_work(recipe, plan)
        plan = _with_scalings(recipe, checkpoint, plan)
        before = tuple(_second_rounding(checkpoint, plan))
        notes = (*checkpoint.notes, *merged, *_unmerged(source, adapters), *before, *_device_notes(recipe, calibrated))
        plan = replace(plan, notes=(*plan.notes, *notes))
        target = _target(recipe, checkpoint, plan)
        memory = _device_memory(recipe, checkpoint, plan) if calibrated else None
        prepared = PreparedExport(recipe, source, checkpoint, plan, target, (), adapters, before, memory, chosen)
        if recipe.quant == KEEP:
            check_source(prepared.target, checkpoint)
        return replace(prepared, warnings=(*dropped, *_warnings(prepared)))


def _check_gathered(recipe: ExportRecipe, checkpoint: Checkpoint) -> None:
    """Refuse what reads tensors of several layers at a time, of a model that ranks gather layer by layer.

    Raises:
        UsageError: the recipe has something of the kind.
    """
    wanted = [f"--algorithm {recipe.algorithm}"] if recipe.of_kind("rotate", "assign") else []
    wanted += ["--adapter"] if recipe.adapter else []
    if wanted and is_gathered(checkpoint):
        raise UsageError(
            f"{wanted[0]} reads several layers at a time, and the model is in the memory of several ranks, which "
            "gather one: leave it out, or save the model and export that"
        )


def _device_notes(recipe: ExportRecipe, calibrated: bool) -> Iterator[str]:
    """Says which device computes, where it is not the CPU."""
    kind = devices.kind_of(recipe.device)
    if kind != devices.CPU and calibrated:
        yield (
            f"calibrated on {kind}: the same bytes at any --tp on devices of this kind; a CPU adds in another order, "
            f"and rounds some numbers otherwise (--device {devices.CPU} has its bytes)"
        )
    elif kind != devices.CPU:
        yield f"quantised on {kind}, to the bytes that a CPU gives"


def _device_memory(recipe: ExportRecipe, checkpoint: Checkpoint, plan: ExportPlan) -> DeviceMemory | None:
    """The device memory that calibration takes; None on the CPU, and where it need not be known yet: what is free is
    for each rank to ask.

    Raises:
        PlanError: it is more than the recipe, or the device of a dry run, has.
    """
    if devices.kind_of(recipe.device) == devices.CPU or (recipe.device_memory is None and not recipe.dry_run):
        return None
    from modelexport.exporting.calibrated.device_memory import budget_of, fitted

    return fitted(plan, recipe, language_config(checkpoint.config or {}, checkpoint.infos), budget_of(recipe))


def _with_experts_apart(recipe: ExportRecipe, checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with linears of each expert in place of stacks, if the recipe rounds any of them, or its format
    has no stacks of transformers'. Without them, if the source's format has none either."""
    apart = experts_apart(checkpoint)
    if recipe.of_kind("assign") or checkpoint_formats.wants_experts_apart(recipe.format):
        return apart
    if checkpoint_formats.has_experts_apart(checkpoint.format):
        checkpoint = experts_stacked(checkpoint)
    if apart is checkpoint:
        return apart
    assignment = parse_assignment(recipe)
    assert assignment is not None
    linears = (name.removesuffix(".weight") for name in apart.infos.keys() - checkpoint.infos.keys())
    return apart if any(map(assignment.rounds, linears)) else checkpoint


def _adapters(recipe: ExportRecipe) -> tuple[Adapter, ...]:
    """The adapters of the recipe.

    Raises:
        UsageError: one is not there, or is given twice; or the source's numbers are kept.
        CheckpointError: one cannot be merged.
    """
    if recipe.adapter and recipe.quant == KEEP:
        raise UsageError(
            f"--adapter {recipe.adapter[0]}: --quant {KEEP} keeps the source's numbers, to which nothing can be added: "
            "choose a number format, or --quant none"
        )
    given = [parse_setting(text) for text in recipe.adapter]
    directories = [directory for directory, _ in given]
    for directory in directories:
        if directories.count(directory) > 1:
            raise UsageError(f"--adapter {directory} is given twice: give it once, with a weight: {directory}=2")
    return tuple(read_adapter(directory, weight) for directory, weight in given)


def _unmerged(source: Source, adapters: Collection[Adapter]) -> Iterator[str]:
    """Says which adapters lie with the model and are not merged into it."""
    merged = {adapter.directory for adapter in adapters}
    for directory in adapters_in(source.directory):
        if directory.resolve() not in merged:
            named = shlex.quote(str(directory))
            yield f"an adapter lies in {directory}, and is not merged: --adapter {named} merges it"


def _why_no_drafts(recipe: ExportRecipe, config: Mapping[str, Any] | None) -> str:
    """The reason why draft layers are not written; ``""`` where they are."""
    if recipe.draft == "drop":
        return "--draft drop"
    if recipe.of_kind("rotate"):
        return f"--algorithm {recipe.algorithm} rotates the hidden states that they read"
    return checkpoint_formats.why_no_drafts(recipe.format, config)


def _second_rounding(checkpoint: Checkpoint, plan: ExportPlan) -> Iterator[str]:
    """Says which numbers were rounded before, and how far, where the source's own record has it."""
    quantised = {task.info.name for step in plan.steps for task in step.tasks if task.quantised}
    stored = {name: without_adapters(tensor) for name, tensor in checkpoint.computed.items()}
    casts = {task.info.name for step in plan.steps for task in step.tasks if task.is_cast}
    linears = {name: linear for name, linear in stored.items() if name in quantised}
    counts = Counter(
        (found.number_format.name, name in casts)
        for name, linear in linears.items()
        if (found := held(linear)) is not None
    )
    record = read_record(checkpoint.directory) if counts else None
    errors = {} if record is None else record.sqnr_db
    worst = min((errors[name] for name in map(_module_of, linears) if name in errors), default=None)
    before = "" if worst is None else f" (whose worst SQNR was {worst:.2f} dB, by its record)"
    for (name, is_cast), count in counts.items():
        how = "decoded and rounded a second time"
        if is_cast:
            how += " with powers of two as scales, by which values stay as they are where the exponents allow it"
        yield (
            f"{count} linears are {name} in the source{before}: they are {how}, and errors are those against the "
            "decoded weights"
        )


def _module_of(weight: str) -> str:
    return weight.removesuffix(".weight")


def _autoquant(recipe: ExportRecipe, source: Source, checkpoint: Checkpoint) -> tuple[ExportRecipe, dict[str, Any]]:
    """The recipe with the number formats that autoquant chooses, on the first rank for all; and what is recorded of it.

    Raises:
        UsageError: a candidate is unknown.
        PlanError: no choice is within the budget.
    """
    from modelexport.distributed import collectives, ranks
    from modelexport.exporting.calibrated.autoquant import assigned

    _check_calibration(recipe, source, checkpoint)
    (algorithm,) = recipe.of_kind("assign")
    if recipe.quant != ExportRecipe.quant:
        raise UsageError(
            f"--quant {recipe.quant}: {algorithm.name} chooses the number formats itself: leave out --quant, or "
            f"{algorithm.name}"
        )

    def choose() -> tuple[str, dict[str, Any]]:
        (found,) = assigned(
            checkpoint,
            recipe,
            source.directory,
            method=of_method(checkpoint_formats.method_of(recipe.format).METHOD),
            progress=launch.phase,
        )
        return found.quant, found.recorded()

    # Alone without a meeting, whose errors begin with who failed in what.
    quant, chosen = choose() if collectives.get_world_size() == 1 else ranks.compute_and_broadcast(choose)
    if not recipe.quiet and not recipe.json and ranks.is_main_process():
        note(f"{algorithm.name}: {chosen['bits']:.2f} bits per weight, by {chosen['by']}: {quant}")
    return replace(recipe, quant=quant, group_size=None), chosen


def _target(recipe: ExportRecipe, checkpoint: Checkpoint, plan: ExportPlan) -> TargetPlan:
    """The layout of the target: the planned tensors, cut for the target's parallelism."""
    announced = quantization_files(plan)
    config = {key: value for key, value in (checkpoint.config or {}).items() if key not in QUANTIZATION_KEYS}
    if announced is not None:
        config["quantization_config"] = announced.config
    return plan_target(
        recipe.format,
        plan.rules(),
        config,
        Parallelism(recipe.target_tp, recipe.target_pp, recipe.target_ep),
        max_shard_bytes=recipe.max_shard_bytes,
        source=checkpoint.directory,
    )


def quantization_files(plan: ExportPlan) -> QuantizationFiles | None:
    """The quantization config of a plan, for config.json and files beside it; None where nothing is quantised."""
    formats = plan.formats()
    if not formats and plan.kv_cache is None:
        return None
    embeddings = [module.path for module in plan.family.before if module.kind == "embedding" and module.path in formats]
    announced = ModelQuantization(
        formats, plan.ignored(), plan.kv_cache, __version__, plan.kept_subtrees(), embeddings, plan.file_type
    )
    return of_method(plan.method).quantization_files(announced)


def _warnings(prepared: PreparedExport) -> tuple[str, ...]:
    """Warnings of engines known to refuse the planned checkpoint, and notes of its format on the source."""
    recipe, plan = prepared.recipe, prepared.plan
    linears: dict[tuple[object, ...], Linear] = {}
    for step in plan.steps:
        for task in step.tasks:
            if task.number_format is not None:
                alike = (task.module.general_path, task.number_format, task.info.shape)
                linears.setdefault(
                    alike,
                    Linear(
                        full_name(step.layer, task.path),
                        task.number_format.name,
                        task.full_shape,
                        task.number_format.group_size,
                        task.module.role,
                        task.module.partition,
                        task.module.is_expert,
                    ),
                )
    config = prepared.checkpoint.config or {}
    kind = str(config.get("model_type", ""))
    tp, cache = recipe.target_tp, plan.kv_cache
    found = engine_warnings(recipe.format, linears.values(), tp=tp, model=kind, cache=cache)
    positions = config.get("max_position_embeddings")
    if (plan.needs_ranges or plan.calibrated) and isinstance(positions, int) and recipe.calib_length > positions:
        found.append(
            f"--calib-length {recipe.calib_length} is beyond the {positions} positions that the model knows "
            "(max_position_embeddings): what its activations are there says little"
        )
    if plan.calibrated:
        found += _few_tokens(prepared)
    if plan.needs_ranges:
        found += _few_for_scales(recipe)
    notes = getattr(checkpoint_formats.get(recipe.format), "notes", None)
    if notes is not None:
        found += notes(prepared.target.plan, prepared.checkpoint.config or {}, prepared.checkpoint.directory)
    return tuple(found)


def _few_tokens(prepared: PreparedExport) -> Iterator[str]:
    """Yields what algorithms would fit to fewer tokens than it has numbers: a Hessian that is singular but for damping.

    Tokens are taken to be shared evenly by a layer's experts.
    """
    recipe, plan = prepared.recipe, prepared.plan
    fitting = [
        stage.name for kind in ("fold", "round") for stage in recipe.of_kind(kind)
        if "hessian" in stage.wanted(recipe.settings_of(stage.name))
    ]  # fmt: skip
    if not fitting:
        return
    chosen = experts_of_token(language_config(prepared.checkpoint.config or {}, prepared.checkpoint.infos))
    worst: dict[bool, tuple[int, str, int]] = {}
    for step in plan.steps:
        quantised = [task for task in step.tasks if task.number_format is not None and step.index is not None]
        experts = len({task.path.rpartition(".")[0] for task in quantised if task.module.is_expert})
        for task in quantised:
            routed = task.module.is_expert and chosen and recipe.calib_experts != "all"
            needed = task.full_shape[1] * (-(-experts // chosen) if routed and chosen else 1)
            name = full_name(step.layer, task.path)
            known = worst.get(task.module.is_expert)
            if known is None or known[0] < needed:
                worst[task.module.is_expert] = (needed, name, task.full_shape[1])
    tokens = recipe.calib_samples * recipe.calib_length
    for is_expert, (needed, name, features) in sorted(worst.items()):
        if tokens < needed:
            yield (
                f"{fitting[0]} fits the {features:,} input features of {name} to {tokens:,} tokens"
                f"{', which the experts share' if is_expert else ''}: too few to tell them apart; give --calib-samples "
                f"{-(-needed // recipe.calib_length)} or more (of --calib-length {recipe.calib_length})"
            )


def _few_for_scales(recipe: ExportRecipe) -> Iterator[str]:
    """Yields the number of tokens that static scales are fitted to, where it is small.

    Of numbers that are drawn alike one in N + 1 is beyond the largest of N others.
    """
    tokens = recipe.calib_samples * recipe.calib_length
    if tokens < _TOKENS_OF_A_SCALE:
        yield (
            f"static scales are fitted to {tokens:,} tokens: about one token in {tokens + 1:,} will be beyond all of "
            f"them, where {_TOKENS_OF_A_SCALE:,} are usual; give --calib-samples "
            f"{-(-_TOKENS_OF_A_SCALE // recipe.calib_length)} or more (of --calib-length {recipe.calib_length})"
        )


def parse_assignment(recipe: ExportRecipe) -> Assignment | None:
    """The assignment that ``--quant`` describes; None where every linear keeps its number format.

    Raises:
        UsageError: ``--quant`` cannot be read, or is a mixture that ``--format`` has no blocks for.
    """
    method = checkpoint_formats.method_of(recipe.format)
    if recipe.quant == KEEP:
        return None
    with without_collector():
        from modelexport.checkpoints.safetensors.file import torch_dtype

        scales = None if method.SCALES is None else torch_dtype(method.SCALES)
        found = Assignment.parse(
            recipe.quant, group_size=recipe.group_size, observer=recipe.observer, scale_dtype=scales
        )
    if found.mixtures and not getattr(method, "HOLDS_MIXTURES", False):
        raise UsageError(
            f"--quant {found.mixtures[0].name}: it is a mixture of llama.cpp's block types, and --format "
            f"{recipe.format} holds none: add --format gguf"
        )
    return found


def check_early(recipe: ExportRecipe, source: Source | None = None) -> None:
    """Checks, before anything heavy is imported, the target and the files that calibration reads.

    Args:
        source: the model, where it is in memory.

    Raises:
        UsageError: the target exists; an adapter, the text or the tokenizer is missing; or a setting goes with none of
            the others.
        CheckpointError: an adapter cannot be merged.
    """
    if recipe.draft == "quantise" and recipe.quant == KEEP:
        raise UsageError(
            f"--draft quantise rounds linears, and --quant {KEEP} (convert) rounds none: leave out one of the two"
        )
    _adapters(recipe)
    if source is None and is_local(recipe.model):
        source = resolve_source(recipe.model, recipe.revision)
    if source is not None:
        _check_apart(recipe, source)
    if recipe.out is not None and not recipe.dry_run:
        check_target(recipe.out, overwrite=recipe.overwrite)
    if recipe.log is not None and not recipe.dry_run:
        check_log(recipe.log, recipe.out)
    reads_text = recipe.reads_samples or "-static" in recipe.quant
    if reads_text and recipe.quant != KEEP and source is not None:
        _check_text(recipe, source)


def _check_text(recipe: ExportRecipe, source: Source, checkpoint: Checkpoint | None = None) -> None:
    """Checks that what reads the calibration text is there.

    Args:
        checkpoint: the source, where it has been opened: its format may make a tokenizer.

    Raises:
        UsageError: a text, the tokenizer or the processor is missing, or an image; or a text has no share of the
            samples.
    """
    place = source.directory if checkpoint is None else tokenizer_of(checkpoint, source.directory)
    later = checkpoint is None and may_be_restored(source.directory)
    for share in shares(recipe.calib, recipe.calib_samples):
        documents = TokenDocuments(share.text, place, 1)
        try:
            if not later:
                documents.check()
        except UsageError as error:
            if source.checkpoint is None or has_tokenizer(source.directory):
                raise
            raise UsageError(
                f"{source.label} has no tokenizer, which is needed to read the calibration text: give tokenizer=..., "
                'an object or its directory, or calib=FILE.jsonl with a list of "input_ids" on each line'
            ) from error
        if next(image_rows(documents.path), None) is not None:
            check_processor(source.directory, documents.label)


def _check_calibration(recipe: ExportRecipe, source: Source, checkpoint: Checkpoint) -> None:
    """Checks what calibration needs, before ranks are started; the text itself is checked where it is read.

    Raises:
        PlanError: calibration cannot run the model.
        UsageError: the text or the tokenizer is missing.
    """
    refusal = why_no_language_model(checkpoint.config or {})
    if refusal:
        plain = [name for name, algorithm in algorithms.registered().items() if not algorithm.needs_samples]
        raise PlanError(
            f"{checkpoint.directory}: {refusal}: calibration runs language models only; choose --algorithm "
            f"{' or '.join(plain)}, a --quant without static scales, and no --kv-cache"
        )
    _check_text(recipe, source, checkpoint)


def _check_apart(recipe: ExportRecipe, source: Source) -> None:
    """Refuse a target that the source is, or lies in.

    Raises:
        UsageError: it is one, or nothing can be written there.
    """
    if recipe.out is not None and source.directory.resolve().is_relative_to(resolve_target(recipe.out)):
        raise UsageError(f"--out {recipe.out} would replace the source, {source.directory}: choose another target")


def _check_work(recipe: ExportRecipe, plan: ExportPlan) -> None:
    """Refuse algorithms that there is nothing for.

    Raises:
        PlanError: an algorithm cannot work with one of the number formats.
        UsageError: no linear is quantised, and an algorithm is for those that are.
    """
    idle = [found.name for found in recipe.of_kind("assign", "fold", "round") if found.name != ExportRecipe.algorithm]
    if idle and not plan.formats() and not recipe.of_kind("assign") and recipe.quant != KEEP:
        raise UsageError(
            f"--algorithm {recipe.algorithm}: --quant {recipe.quant} leaves every linear as it is, so that there is "
            f"nothing for {' and '.join(idle)} to do: choose a number format, e.g. --quant int4, or leave out "
            "--algorithm"
        )
    recipe.check_number_formats(plan.formats().values())


def _with_scalings(recipe: ExportRecipe, checkpoint: Checkpoint, plan: ExportPlan) -> ExportPlan:
    """The plan with what scales into what, where scales are to be folded: declared, or proved on a small model.

    Raises:
        PlanError: there is nothing of that; the message says why.
    """
    family, folding = plan.family, [algorithm.name for algorithm in recipe.of_kind("fold")]
    if not folding or not plan.formats():
        return plan
    why = "the family declares no scalings"
    if family.is_derived:
        from modelexport.models.derived.scalings import with_scalings

        try:
            family = with_scalings(family, language_config(checkpoint.config or {}, checkpoint.infos))
        except PlanError as error:
            why = str(error)
    if not family.scalings:
        rounding = [name for name, algorithm in algorithms.registered().items() if algorithm.kind == "round"]
        raise PlanError(
            f"--algorithm {recipe.algorithm}: {' and '.join(folding)} cannot move scales within a {family.name} model: "
            f"{why}. {', '.join(rounding)} move none"
        )
    if family is plan.family:
        return plan
    return replace(plan, family=family, notes=(*plan.notes, *family.notes[len(plan.family.notes) :]))


def _check_kept(source: Source, checkpoint: Checkpoint) -> None:
    """Refuse to convert what is not quantised.

    Raises:
        PlanError: it is not.
    """
    if not any((checkpoint.config or {}).get(key) for key in QUANTIZATION_KEYS):
        raise PlanError(
            f"{source.directory} is not quantised, so that there is nothing to convert: modelexport --model "
            f"{source.directory} --quant FORMAT quantises it, modelexport reshard writes it in another format"
        )
