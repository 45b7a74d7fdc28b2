"""The ranks of an export: processes of our own, or those that torchrun and the like started.

Under another launcher every process runs the whole of :func:`~modelexport.exporting.export`. They find the source and
plan each by themselves, compare what they found, and from then on each is one rank; global rank 0 opens and publishes
the target.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from modelexport.checkpoints.source import Source, resolve_source, source_bytes
from modelexport.distributed import launch
from modelexport.distributed.launch import MultiprocessConfig
from modelexport.errors import UsageError
from modelexport.exporting.prepare import PreparedExport, parse_assignment, prepare
from modelexport.exporting.record import target_of_export
from modelexport.jobs import hub
from modelexport.jobs.hosts import agree, check_coherent, is_spread, run_as_rank
from modelexport.jobs.ranks import Progress, own_ranks, run_under_launcher, show_progress, single
from modelexport.quantization import formats, kernels
from modelexport.recipe import ExportRecipe
from modelexport.system.startup import without_collector

if TYPE_CHECKING:
    from modelexport.exporting.rank import RankExport, RankJob

__all__ = ["job_of", "launcher_config", "rank_class_of", "run_as_launched", "run_own_ranks"]

PRELOAD = ("torch", "torch.distributed", "safetensors", "modelexport.exporting.rank", "modelexport.models.preloading")

CALIBRATION_PRELOAD = (
    "modelexport.exporting.calibrated.rank",
    "modelexport.exporting.calibrated.ranges",
    "modelexport.quantization.kernels.feedback_fused",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",  # for what every model's module imports, seconds of it
)


def run_own_ranks(recipe: ExportRecipe, source: Source | None = None) -> tuple[PreparedExport, dict[str, Any]]:
    """Exports in rank processes of our own, or, of a source in memory, in this one; returns the record too."""
    if source is not None and recipe.tp > 1:
        raise UsageError(f"--tp {recipe.tp}: {source.label} is exported by the process that holds it: leave out tp")
    if recipe.push_to_hub is not None:
        hub.check_login(recipe.push_to_hub)
    if recipe.tp > 1:
        launch.prestart(_preloaded(recipe))
    prepared = prepare(recipe, source)
    prepared.warn()
    with target_of_export(prepared) as target:
        done = target.begin()
        job = job_of(prepared, done)
        kind = rank_class_of(prepared)
        from modelexport.exporting.rank import run_rank

        with _show_progress(prepared, done) as (on_event, results):
            config = own_ranks(recipe.tp, recipe.timeout, _preloaded(recipe), on_event)
            launch.launch_subprocesses(run_rank, config, None, 0, job, kind)
        return prepared, target.finish(single(results))


def launcher_config(recipe: ExportRecipe) -> MultiprocessConfig | None:
    """This process's place among the ranks that another launcher started; None where none did.

    Raises:
        UsageError: it started another number of ranks than ``--tp`` says, or ranks on several machines that
            nothing connects; a workspace is given that nobody needs.
    """
    found = launch.external_config(MultiprocessConfig(backend="gloo", timeout=recipe.timeout))
    if recipe.workspace is not None and recipe.transport == "direct" and not (found and is_spread(found)):
        raise UsageError(
            "--workspace is of use to --gather direct only for ranks on several machines, and these are on one: drop it"
        )
    if found is None:
        return None
    if found.world_size != recipe.tp:
        raise UsageError(f"the launcher started {found.world_size} ranks, and --tp is {recipe.tp}: make both the same")
    found.model_parallelism = recipe.tp
    if is_spread(found):
        if recipe.workspace is None:
            raise UsageError(
                f"{found.local_world_size} of {found.world_size} ranks are on this machine, and shared memory does not "
                "reach the others: add --workspace DIR, a directory that all machines see"
            )
        if recipe.transport == "direct":
            check_coherent(recipe.out, "--gather nfs")
    return found


def run_as_launched(
    recipe: ExportRecipe, config: MultiprocessConfig, source: Source | None = None
) -> tuple[PreparedExport, dict[str, Any]]:
    """Exports as one of the ranks that another launcher started; returns the record too.

    Args:
        source: the model, where it is in the ranks' memory.
    """
    from modelexport.distributed import ranks

    def export_as_rank() -> tuple[PreparedExport, dict[str, Any]]:
        from modelexport.exporting.rank import run_rank

        if not recipe.of_kind("assign"):
            parse_assignment(recipe)  # a wrong name is said before a model is downloaded
        found = source
        if found is None:
            with ranks.zero_first(config.local_rank == 0):  # one download for each machine
                found = resolve_source(recipe.model, recipe.revision)
        launch.phase("planning the export")
        prepared = prepare(recipe, found)
        if config.rank == 0:
            prepared.warn()
            if recipe.push_to_hub is not None:
                hub.check_login(recipe.push_to_hub)
        agree(prepared.checkpoint, recipe)
        with target_of_export(prepared) as target:
            record = run_under_launcher(
                config,
                target,
                work=lambda done: run_rank(job_of(prepared, done, spread=is_spread(config)), rank_class_of(prepared)),
                collect=lambda record, result: record,
                progress=lambda done: _show_progress(prepared, done, shown=config.rank == 0),
            )
            return prepared, record

    return run_as_rank(config, export_as_rank)


def _preloaded(recipe: ExportRecipe) -> tuple[str, ...]:
    """The modules to import once for all ranks; there kernels are loaded, or compiled, if there is work for them."""
    modules = (*PRELOAD, *(CALIBRATION_PRELOAD if recipe.is_calibrated else ()))
    if not recipe.is_calibrated and kernels.is_little(source_bytes(recipe.model)):
        return modules
    words = {word.strip() for word in re.split("[=,:]", recipe.quant)}
    named = [name for name in formats.names() if name in words] or ["none"]
    return (*modules, *(f"{formats.__name__}:load_kernels:{name}:{recipe.observer}" for name in named))


def job_of(prepared: PreparedExport, done: dict[str, Any], *, spread: bool = False) -> RankJob:
    """The export as every rank is given it; ``done``: the journal of an earlier run of the same."""
    with without_collector():
        from modelexport.exporting.rank import RankJob

    return RankJob(
        source=prepared.checkpoint,
        plan=prepared.plan,
        layout=prepared.layout,
        recipe=prepared.recipe,
        tokenizer=prepared.source.directory,
        spread=spread,
        done=done,
    )


def rank_class_of(prepared: PreparedExport) -> type[RankExport]:
    """The layer strategy of the ranks: data-free, with static scales, or calibrated."""
    with without_collector():
        if prepared.plan.calibrated:
            from modelexport.exporting.calibrated.rank import CalibratedExport

            return CalibratedExport
        if prepared.plan.needs_ranges:
            from modelexport.exporting.calibrated.ranges import StaticScaleExport

            return StaticScaleExport
        from modelexport.exporting.rank import RankExport

        return RankExport


def _show_progress(
    prepared: PreparedExport, done: Mapping[str, Any], *, shown: bool = True
) -> AbstractContextManager[Progress]:
    recipe = prepared.recipe
    sizes = {step.id: step.output_bytes for step in prepared.plan.steps}
    return show_progress("export", sizes, done, quiet=recipe.quiet or recipe.json or not shown)
