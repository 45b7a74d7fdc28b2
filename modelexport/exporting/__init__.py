"""export(): from a source checkpoint to a quantised one, step by step.

    resolve the source -> plan (headers only) -> staging directory with config, side files and file headers
    -> ranks read, quantise, gather, write, read back -> record -> one rename

Importing this module is cheap; torch is imported once the rank processes are on their way.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelexport.checkpoints.safetensors.file import Checkpoint, plan_layout
from modelexport.checkpoints.source import Source, resolve_source, source_bytes
from modelexport.distributed import launch
from modelexport.distributed.launch import MultiprocessConfig
from modelexport.errors import ModelExportError, UsageError
from modelexport.exporting.after import evaluated, pushed
from modelexport.exporting.checks import check_apart, check_calibration, check_early, check_kept, check_work
from modelexport.exporting.plan import ExportPlan, build_plan, full_name
from modelexport.exporting.record import ExportResult
from modelexport.exporting.target import Prepared, announcement, export_target
from modelexport.jobs import hub
from modelexport.jobs.hosts import agree, external_config, is_spread, run_as_rank
from modelexport.jobs.ranks import Heard, heard, own_ranks, single, take_part
from modelexport.models import checkpoint_formats
from modelexport.models.draft_layers import without_drafts
from modelexport.models.engines import Linear
from modelexport.models.engines import warnings as engine_warnings
from modelexport.models.opening import open_model
from modelexport.models.rules import tensor_rules
from modelexport.models.target_plan import TargetPlan, check_source, plan_target
from modelexport.models.ties import untie
from modelexport.quantization import kernels
from modelexport.quantization.assignment import KEEP, Assignment
from modelexport.quantization.calibration.cut import ROWS
from modelexport.quantization.methods import QUANTIZATION_KEYS, of_method
from modelexport.recipe import ExportRecipe
from modelexport.sharding.plan import Parallelism
from modelexport.system.startup import without_collector
from modelexport.system.terminal import note

if TYPE_CHECKING:
    from modelexport.exporting.calibrated.samples import Samples
    from modelexport.exporting.rank import RankJob
    from modelexport.quantization.algorithms.base import Options

PRELOAD = ("torch", "torch.distributed", "safetensors", "modelexport.exporting.rank", "modelexport.models.preloading")

CALIBRATION_PRELOAD = (
    "modelexport.exporting.calibrated.rank",
    "modelexport.quantization.kernels.feedback_fused",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",  # for what every model's module imports, seconds of it
)


def export(recipe: ExportRecipe | None = None, **settings: Any) -> ExportResult:
    """Export a model: quantise it in ``tp`` rank processes and write one checkpoint.

    Args:
        recipe: the settings; or give them as keyword arguments, named like the fields of
            :class:`~modelexport.recipe.ExportRecipe`.

    Returns:
        What was written and how good it is. With ``dry_run`` nothing is written.

    Raises:
        UsageError: a setting is wrong, or the target exists.
        CheckpointError: the source is missing, damaged or holds NaN or Inf.
        PlanError: the architecture is unknown or a dimension does not suit the number format.
        RankFailedError: a rank process failed; nothing was published, and the same call resumes.
        HubError: with ``push_to_hub``, before the work: nobody is logged in; after it: the checkpoint stands, but was
            not pushed.
    """
    if recipe is None:
        recipe = ExportRecipe.from_mapping(settings, where="export()")
    elif settings:
        raise UsageError("export(): give a recipe or settings, not both")
    began = time.perf_counter()
    if recipe.out is None and not recipe.dry_run:
        raise UsageError("no target given: add --out DIR")
    check_early(recipe)
    if recipe.dry_run:
        prepared = prepare(recipe)
        _warn(prepared)
        label = prepared.source.label
        return ExportResult.preview(prepared.plan, prepared.recipe, label, prepared.target, prepared.warnings)
    config = external_config(recipe)
    if config is None:
        prepared, record = _launch(recipe)
    else:
        prepared, record = _take_part(recipe, config)
    seconds = time.perf_counter() - began
    assert recipe.out is not None
    result = ExportResult.of(record, prepared.plan, prepared.recipe, prepared.target, seconds, prepared.warnings)
    first = config is None or config.rank == 0
    if recipe.evaluate and prepared.source.is_demo and first:
        result = evaluated(result, prepared.source)
    return pushed(result, recipe) if recipe.push_to_hub is not None and first else result


def _launch(recipe: ExportRecipe) -> tuple[Prepared, dict[str, Any]]:
    """Export in rank processes of our own; returns the record too."""
    if recipe.push_to_hub is not None:
        hub.check_login(recipe.push_to_hub)
    if recipe.tp > 1:
        launch.prestart(_preloaded(recipe))
    prepared = prepare(recipe)
    _warn(prepared)
    with export_target(prepared) as target:
        done = target.begin()
        job = _job(prepared, done)
        from modelexport.exporting.rank import run_rank

        with _heard(prepared, done) as (on_event, results):
            config = own_ranks(recipe.tp, recipe.timeout, _preloaded(recipe), on_event)
            launch.launch_subprocesses(run_rank, config, None, 0, job)
        return prepared, target.finish(single(results))


def _preloaded(recipe: ExportRecipe) -> tuple[str, ...]:
    """What the ranks share: kernels are compiled, or loaded, once for all of them, where there is work for them."""
    if recipe.is_calibrated:
        return (*PRELOAD, *CALIBRATION_PRELOAD, *kernels.modules(recipe.quant, recipe.observer))
    return (*PRELOAD, *kernels.modules(recipe.quant, recipe.observer, source_bytes(recipe.model)))


def _take_part(recipe: ExportRecipe, config: MultiprocessConfig) -> tuple[Prepared, dict[str, Any]]:
    """Export as one of the ranks that another launcher started; returns the record too."""
    from modelexport.distributed import ranks

    def export_as_rank() -> tuple[Prepared, dict[str, Any]]:
        from modelexport.exporting.rank import run_rank

        if "autoquant" not in recipe.algorithms:
            _assignment(recipe)  # a wrong name is said before a model is downloaded
        with ranks.zero_first(config.local_rank == 0):  # one download for each machine
            source = resolve_source(recipe.model, recipe.revision)
        launch.phase("planning the export")
        prepared = prepare(recipe, source)
        if config.rank == 0:
            _warn(prepared)
            if recipe.push_to_hub is not None:
                hub.check_login(recipe.push_to_hub)
        agree(prepared.checkpoint, recipe)
        with export_target(prepared) as target:
            record = take_part(
                config,
                target,
                work=lambda done: run_rank(_job(prepared, done, spread=is_spread(config))),
                tell=lambda record, result: record,
                hear=lambda done: _heard(prepared, done, shown=config.rank == 0),
            )
            return prepared, record

    return run_as_rank(config, export_as_rank)


def prepare(recipe: ExportRecipe, source: Source | None = None) -> Prepared:
    """Read the headers and plan the export; no weight is read and nothing is written."""
    if "autoquant" not in recipe.algorithms:
        _assignment(recipe)  # before a download, for a wrong name's sake
    method = checkpoint_formats.method_of(recipe.format)
    source = source or resolve_source(recipe.model, recipe.revision)
    check_apart(recipe, source)
    with without_collector():  # a hundred thousand small objects: the collector would walk them over and over
        checkpoint, dropped = without_drafts(open_model(source.directory, recipe.config))
        if "autoquant" in recipe.algorithms:
            recipe = _autoquant(recipe, source, checkpoint)
        assignment = _assignment(recipe)
        if assignment is None:
            check_kept(source, checkpoint)
        rotated = "rotation" in recipe.algorithms
        if rotated:
            from modelexport.exporting.calibrated.rotation import rotation_changes

            rotation_changes(checkpoint)  # whether it can be
        plan = build_plan(
            checkpoint,
            assignment,
            Parallelism(tp=recipe.tp),
            method=method.METHOD,
            kv_cache=recipe.kv_cache is not None,
            rows=ROWS if recipe.is_calibrated else None,
            untied=rotated,
        )
        if rotated:
            checkpoint = untie(checkpoint)
        if plan.needs_ranges or plan.calibrated:
            check_calibration(recipe, source, checkpoint)
        check_work(recipe, plan)
        prepared = Prepared(recipe, source, checkpoint, plan, _target(recipe, checkpoint, plan))
        if recipe.quant == KEEP:
            check_source(prepared.target, checkpoint)
        return replace(prepared, warnings=(*dropped, *_warnings(prepared)))


def _autoquant(recipe: ExportRecipe, source: Source, checkpoint: Checkpoint) -> ExportRecipe:
    """The recipe with the number formats that autoquant chooses, on the first rank for all.

    Raises:
        UsageError: a candidate is unknown.
        PlanError: no choice is within the budget; or the source is quantised.
    """
    from modelexport.distributed import collectives, ranks
    from modelexport.exporting.calibrated.autoquant import assigned

    check_calibration(recipe, source, checkpoint)
    if recipe.quant != ExportRecipe.quant:
        raise UsageError(
            f"--quant {recipe.quant}: autoquant chooses the number formats itself, among --candidates "
            f"{recipe.candidates}: leave out --quant, or autoquant"
        )

    def choose() -> tuple[str, float, str]:
        found = assigned(
            checkpoint,
            _samples(recipe, source),
            candidates=recipe.candidates,
            bits=recipe.bits,
            group_size=recipe.group_size,
            refusal=of_method(checkpoint_formats.method_of(recipe.format).METHOD).refusal,
            progress=launch.phase,
        )
        return found.quant, found.bits, found.sensitivities.by

    # Alone without a meeting, whose errors begin with who failed in what.
    quant, used, by = choose() if collectives.get_world_size() == 1 else ranks.compute_and_broadcast(choose)
    if not recipe.quiet and not recipe.json and ranks.is_main_process():
        note(f"autoquant: {used:.2f} bits per weight, by {by}: {quant}")
    return replace(recipe, quant=quant, group_size=None)


def _target(recipe: ExportRecipe, checkpoint: Checkpoint, plan: ExportPlan) -> TargetPlan:
    """Where the plan's tensors go: seen as a checkpoint that is yet to be cut for the target's parallelism."""
    whole = plan_layout(list(plan.outputs()), max_shard_bytes=recipe.max_shard_bytes)
    announced = announcement(plan)
    config = {key: value for key, value in (checkpoint.config or {}).items() if key not in QUANTIZATION_KEYS}
    if announced is not None:
        config["quantization_config"] = announced.config
    rules = tensor_rules(replace(checkpoint, infos=whole.infos, config=config, placements={}, left_out={}))
    parallelism = Parallelism(recipe.target_tp, recipe.target_pp, recipe.target_ep)
    return plan_target(
        recipe.format,
        rules,
        config,
        parallelism,
        max_shard_bytes=recipe.max_shard_bytes,
        source=checkpoint.directory,
    )


def _warnings(prepared: Prepared) -> tuple[str, ...]:
    """What engines are known to refuse of what will be written, and what its format has to say of the source."""
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
    found = engine_warnings(recipe.format, linears.values(), tp=recipe.target_tp, model=kind)
    positions = config.get("max_position_embeddings")
    if (plan.needs_ranges or plan.calibrated) and isinstance(positions, int) and recipe.calib_length > positions:
        found.append(
            f"--calib-length {recipe.calib_length} is beyond the {positions} positions that the model knows "
            "(max_position_embeddings): what its activations are there says little"
        )
    notes = getattr(checkpoint_formats.get(recipe.format), "notes", None)
    if notes is not None:
        found += notes(prepared.target.plan, prepared.checkpoint.config or {}, prepared.checkpoint.directory)
    return tuple(found)


def _warn(prepared: Prepared) -> None:
    """Say it before the work starts."""
    if not prepared.recipe.quiet and not prepared.recipe.json:
        for warning in prepared.warnings:
            note(f"warning: {warning}")


def _assignment(recipe: ExportRecipe) -> Assignment | None:
    """What ``--quant`` says; None where every linear keeps what it has."""
    method = checkpoint_formats.method_of(recipe.format)
    if recipe.quant == KEEP:
        return None
    with without_collector():
        from modelexport.checkpoints.safetensors.file import torch_dtype

        scales = None if method.SCALES is None else torch_dtype(method.SCALES)
        return Assignment.parse(
            recipe.quant, group_size=recipe.group_size, observer=recipe.observer, scale_dtype=scales
        )


def _job(prepared: Prepared, done: dict[str, Any], *, spread: bool = False) -> RankJob:
    with without_collector():
        from modelexport.exporting.rank import RankJob

    recipe = prepared.recipe
    assert recipe.out is not None
    through_files = recipe.transport == "nfs" or spread
    return RankJob(
        source=prepared.checkpoint,
        plan=prepared.plan,
        layout=prepared.layout,
        out=Path(recipe.out),
        transport=recipe.transport,
        workspace=recipe.workspace if through_files else None,
        spread=spread,
        timeout=recipe.timeout,
        done=done,
        samples=_samples(recipe, prepared.source),
        options=_options(recipe),
    )


def _samples(recipe: ExportRecipe, source: Source) -> Samples:
    from modelexport.exporting.calibrated.samples import Samples

    return Samples(
        path=recipe.calib,
        tokenizer=source.directory,
        count=recipe.calib_samples,
        length=recipe.calib_length,
        seed=recipe.calib_seed,
        algorithms=recipe.algorithms,
        ranges=recipe.calib_range,
        all_experts=recipe.calib_experts == "all",
        memory=recipe.calib_memory,
    )


def _options(recipe: ExportRecipe) -> Options:
    from modelexport.quantization.algorithms.base import Options

    return Options(
        alpha=recipe.alpha,
        grid=recipe.grid,
        damping=recipe.damping,
        block=recipe.block_size,
        act_order=recipe.act_order,
        seed=recipe.calib_seed,
    )


def _heard(prepared: Prepared, done: Mapping[str, Any], *, shown: bool = True) -> AbstractContextManager[Heard]:
    recipe = prepared.recipe
    sizes = {step.id: step.output_bytes for step in prepared.plan.steps}
    return heard("export", sizes, done, quiet=recipe.quiet or recipe.json or not shown)


__all__ = ["ModelExportError", "Prepared", "export", "prepare"]
