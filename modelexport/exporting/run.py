"""The ranks of an export: processes of our own, or those that torchrun and the like started.

Under another launcher every process runs the whole of :func:`~modelexport.exporting.export`. They find the source and
plan each by themselves, compare what they found, and from then on each is one rank; global rank 0 opens and publishes
the target.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelexport.checkpoints.hub_source import opened_source
from modelexport.checkpoints.source import Source, is_local, source_bytes
from modelexport.checkpoints.staging import SOURCE, resolve_target, staging_directory
from modelexport.distributed import launch
from modelexport.distributed.launch import MultiprocessConfig
from modelexport.errors import UsageError
from modelexport.exporting.extents import step_extents
from modelexport.exporting.prepare import PreparedExport, parse_assignment, prepare
from modelexport.exporting.record import target_of_export
from modelexport.jobs import hub
from modelexport.jobs.hosts import agree, check_coherent, is_spread, run_as_rank
from modelexport.jobs.progress import JobSteps, ProgressHandler, StepCost, show_progress
from modelexport.jobs.ranks import own_ranks, run_under_launcher, single
from modelexport.quantization import formats, kernels
from modelexport.recipe import ExportRecipe
from modelexport.system.run_log import LogFile
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
    if source is not None and source.checkpoint is not None and recipe.tp > 1:
        raise UsageError(f"--tp {recipe.tp}: {source.label} is exported by the process that holds it: leave out tp")
    if recipe.push_to_hub is not None:
        hub.check_login(recipe.push_to_hub)
    if recipe.tp > 1:
        launch.prestart(_preloaded(recipe))
    with ExitStack() as stack:
        if source is None:
            assert recipe.out is not None
            home = staging_directory(resolve_target(recipe.out)) / SOURCE
            source = stack.enter_context(opened_of(recipe, home, quiet=recipe.quiet or recipe.json))
        prepared = prepare(recipe, source)
        prepared.warn()
        target = stack.enter_context(target_of_export(prepared))
        done = target.begin()
        job = job_of(prepared, done)
        fetch_ahead(prepared, done)
        kind = rank_class_of(prepared)
        from modelexport.exporting.rank import run_rank

        log = None if recipe.log is None else LogFile.begin(recipe.log)
        with _show_progress(prepared, done, recipe.tp, log) as handler:
            with own_ranks(recipe.tp, recipe.timeout, _preloaded(recipe), handler, log) as config:
                launch.launch_subprocesses(run_rank, config, None, 0, job, kind)
            record = target.finish(single(handler.results))
        return prepared, record


def opened_of(
    recipe: ExportRecipe, home: Path | None = None, *, leads: bool = True, quiet: bool = True
) -> AbstractContextManager[Source]:
    """The source that a recipe names; see :func:`~modelexport.checkpoints.hub_source.opened_source`."""
    return opened_source(
        recipe.model,
        recipe.revision,
        home=home,
        download=recipe.download,
        leads=leads,
        guess=home is not None,
        quiet=quiet,
    )


def fetch_ahead(prepared: PreparedExport, done: Collection[str], ranks: Sequence[int] | None = None) -> None:
    """Has what the steps read fetched ahead of them, of a source that is not on this machine.

    Args:
        done: the steps of which nothing is read.
        ranks: those on this machine; None: all.
    """
    fetcher, plan, recipe = prepared.source.fetcher, prepared.plan, prepared.recipe
    if fetcher is None:
        return
    read_twice = bool(recipe.of_kind("rotate", "assign")) or (plan.needs_ranges and not plan.calibrated)
    own = range(recipe.tp) if ranks is None else ranks
    fetcher.follow(
        [step_extents(prepared.checkpoint, step, None if plan.calibrated else own) for step in plan.steps],
        {number for number, step in enumerate(plan.steps) if step.id in done},
        len(own),
        keep=read_twice,
    )


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
            assert recipe.out is not None
            first = config.rank - config.local_rank
            name = f"{SOURCE}-{first}" if is_spread(config) else SOURCE
            leads = config.local_rank == 0
            with ranks.zero_first(leads):  # one download for each machine
                home = staging_directory(resolve_target(recipe.out)) / name
                found = stack.enter_context(opened_of(recipe, home, leads=leads))
        launch.phase("planning the export")
        prepared = prepare(recipe, found)
        if config.rank == 0:
            prepared.warn()
            if recipe.push_to_hub is not None:
                hub.check_login(recipe.push_to_hub)
        agree(prepared.checkpoint, recipe)
        with target_of_export(prepared) as target:

            def work(done: dict[str, Any]) -> None:
                begin = config.rank - config.local_rank
                own = range(begin, begin + config.local_world_size)
                if source is None and not is_local(recipe.model):  # the same on all machines, whatever these have
                    with ranks.zero_first(config.local_rank == 0):
                        fetch_ahead(prepared, done, own)
                run_rank(job_of(prepared, done, spread=is_spread(config)), rank_class_of(prepared))

            record = run_under_launcher(
                config,
                target,
                work=work,
                collect=lambda record, result: record,
                progress=lambda done, log: _show_progress(
                    prepared, done, config.world_size, log, shown=config.rank == 0
                ),
                log=recipe.log,
                all_write=recipe.transport == "direct",
            )
            return prepared, record

    with ExitStack() as stack:
        return run_as_rank(config, export_as_rank)


def _preloaded(recipe: ExportRecipe) -> tuple[str, ...]:
    """The modules to import once for all ranks; there kernels are loaded, or compiled, if there is work for them."""
    modules = (*PRELOAD, *(CALIBRATION_PRELOAD if recipe.is_calibrated else ()))
    if not recipe.is_calibrated and kernels.is_little(source_bytes(recipe.model)):
        return modules
    words = {formats.canonical(word.strip()) for word in re.split("[=,:]", recipe.quant)}
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
        read_back_along=prepared.read_back_along,
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
    prepared: PreparedExport, done: Mapping[str, Any], world: int, log: LogFile | None, *, shown: bool = True
) -> AbstractContextManager[ProgressHandler]:
    recipe, plan = prepared.recipe, prepared.plan
    costs = {
        step.id: StepCost(step.source_bytes, step.output_bytes, plan.calibrated and step.index is not None)
        for step in plan.steps
    }
    quiet = recipe.quiet or recipe.json or not shown
    steps = JobSteps(costs, done, along=prepared.read_back_along)
    return show_progress("export", steps, world, quiet=quiet, log=log if shown else None)
