"""The processes of a resharding: our own, or those that torchrun and the like started."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from modelexport import __version__
from modelexport.checkpoints.formats.hf import SideFiles
from modelexport.distributed import launch
from modelexport.distributed.launch import MultiprocessConfig
from modelexport.errors import UsageError
from modelexport.inspection.card import model_card
from modelexport.inspection.record.reading import ExportRecord
from modelexport.inspection.record.rows import linears_of, stored_of
from modelexport.jobs.hosts import agree, check_coherent, is_spread, run_as_rank
from modelexport.jobs.progress import JobSteps, ProgressHandler, StepCost, show_progress
from modelexport.jobs.ranks import own_ranks, run_under_launcher, single
from modelexport.jobs.side_files import cards, files_digest, inputs_of, source_config, target_of
from modelexport.jobs.target_directory import TargetDirectory, TargetDirectorySpec
from modelexport.models.engines import warnings
from modelexport.recipe import ReshardRecipe
from modelexport.resharding.moves import ReshardJob, run_alone
from modelexport.resharding.prepare import PreparedReshard, prepare
from modelexport.system.run_log import LogFile
from modelexport.system.small_files import file_sha256
from modelexport.system.startup import without_collector

PRELOAD = ("torch", "modelexport.resharding.rank", "modelexport.models.preloading")


def launcher_config(recipe: ReshardRecipe) -> MultiprocessConfig | None:
    """The place of this process among the ranks that another launcher started; None where none did.

    Raises:
        UsageError: another number of ranks was started than ``--ranks`` says, or ranks on several machines would
            write into files that only one may.
    """
    found = launch.external_config(MultiprocessConfig(backend="gloo", timeout=recipe.timeout))
    if found is None:
        return None
    if recipe.ranks not in (None, found.world_size):
        raise UsageError(
            f"the launcher started {found.world_size} ranks, and --ranks is {recipe.ranks}: leave it out, or make both "
            "the same"
        )
    if is_spread(found) and recipe.exchange == "direct":
        check_coherent(recipe.out, "--exchange p2p")
    return found


def run_own_ranks(recipe: ReshardRecipe) -> tuple[PreparedReshard, int, dict[str, Any]]:
    """Reshard in processes of our own."""
    world = recipe.ranks or 1
    if world > 1:
        launch.prestart(PRELOAD)
    prepared = prepare(recipe)
    prepared.warn()
    with _target(prepared) as target:
        done = target.begin()
        job = _job(prepared, done, spread=False)
        log = None if recipe.log is None else LogFile.begin(recipe.log)
        with _show_progress(prepared, done, world, log) as handler:
            if world == 1 and job.exchange == "direct":  # bytes that only move: done before torch would be imported
                launch.run_alone(run_alone, handler, log, job)
            else:
                with without_collector():
                    from modelexport.resharding.rank import run_rank

                with own_ranks(world, recipe.timeout, PRELOAD, handler, log) as config:
                    launch.launch_subprocesses(run_rank, config, None, 0, job)
            target.finish(single(handler.results))
        return prepared, world, handler.results[0]


def run_as_launched(recipe: ReshardRecipe, config: MultiprocessConfig) -> tuple[PreparedReshard, int, dict[str, Any]]:
    """Reshard as one of the processes that another launcher started."""

    def reshard_as_rank() -> tuple[PreparedReshard, int, dict[str, Any]]:
        from modelexport.resharding.rank import run_rank

        launch.phase("planning the resharding")
        prepared = prepare(recipe)
        if config.rank == 0:
            prepared.warn()
        agree(prepared.checkpoint, recipe)
        with _target(prepared) as target:
            result = run_under_launcher(
                config,
                target,
                work=lambda done: run_rank(_job(prepared, done, spread=is_spread(config))),
                collect=lambda record, result: result,
                progress=lambda done, log: _show_progress(
                    prepared, done, config.world_size, log, shown=config.rank == 0
                ),
                log=recipe.log,
                all_write=True,
            )
            return prepared, config.world_size, result

    return run_as_rank(config, reshard_as_rank)


def _target(prepared: PreparedReshard) -> TargetDirectory:
    recipe, checkpoint = prepared.recipe, prepared.checkpoint
    assert recipe.out is not None

    def record(side: SideFiles, beside: Mapping[str, Path], outcome: dict[str, Any]) -> dict[str, Any]:
        """An export's record holds for the same tensors in other files too."""
        found = prepared.record
        if found is None:
            return {}
        digests = {name: file_sha256(path) for name, path in sorted(beside.items())}
        kept = {key: value for key, value in found.recipe.items() if not key.startswith("target_")}
        ways = target_of(recipe.tp, recipe.pp, recipe.ep)
        written = {**kept, "format": recipe.format, "max_shard_bytes": recipe.max_shard_bytes, **ways}
        changed = {
            "file_sha256": digests,
            "recipe": written,
            "warnings": [*prepared.warnings, *engine_warnings(recipe, found)],
            "left_out": {**found.left_out, **prepared.drafts},
        }
        return {key: changed.get(key, value) for key, value in found.content.items()}

    fingerprint = {
        "checkpoint": str(checkpoint.directory.resolve()),
        "source_files": files_digest(checkpoint.config, checkpoint.files),
        **recipe.deciding(),
        "modelexport": __version__,
    }
    config = source_config(checkpoint, recipe.config, None)
    known = prepared.record is not None  # a card is made of the record: it is another one in another format
    stale, renamed = cards(checkpoint.directory) if known else (frozenset(), {})
    files = TargetDirectorySpec(
        checkpoint,
        prepared.target,
        fingerprint,
        inputs_of(checkpoint, recipe.config),
        config,
        record,
        stale=stale,
        card=model_card if known else None,
        renamed=renamed,
    )
    return TargetDirectory(recipe.out, files, overwrite=recipe.overwrite, quiet=recipe.quiet)


def engine_warnings(recipe: ReshardRecipe, record: ExportRecord) -> list[str]:
    """Warnings of engines known to refuse a recorded checkpoint in the form about to be written."""
    stored = stored_of(record)
    model = stored.model_type or ""
    return warnings(recipe.format, linears_of(record), tp=recipe.tp, model=model, cache=stored.kv_cache)


def _job(prepared: PreparedReshard, done: dict[str, Any], *, spread: bool) -> ReshardJob:
    recipe = prepared.recipe
    assert recipe.out is not None
    exchange = recipe.exchange or ("auto" if spread else "direct")
    return ReshardJob(
        source=prepared.checkpoint,
        steps=prepared.steps,
        layout=prepared.target.layout,
        out=Path(recipe.out),
        exchange=exchange,
        spread=spread,
        timeout=recipe.timeout,
        done=done,
    )


def _show_progress(
    prepared: PreparedReshard, done: Mapping[str, Any], world: int, log: LogFile | None, *, shown: bool = True
) -> AbstractContextManager[ProgressHandler]:
    recipe = prepared.recipe
    steps = JobSteps({step.id: StepCost(step.nbytes, step.nbytes) for step in prepared.steps}, done, compared=True)
    quiet = recipe.quiet or recipe.json or not shown
    return show_progress("reshard", steps, world, quiet=quiet, log=log if shown else None)
