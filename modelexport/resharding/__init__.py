"""reshard(): from a checkpoint of any format and parallelism to one of any other, step by step.

open the source (headers only) -> rules of its tensors -> who will hold what -> staging directory with the format's
side files and file headers -> processes read, exchange, write, compare -> one rename
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from modelexport import __version__
from modelexport.checkpoints.formats.hf import SideFiles
from modelexport.checkpoints.safetensors.file import Checkpoint
from modelexport.checkpoints.staging import check_target, resolve_target
from modelexport.distributed import launch
from modelexport.distributed.launch import MultiprocessConfig
from modelexport.errors import UsageError
from modelexport.inspection.card import model_card
from modelexport.inspection.record.reading import ExportRecord, read_record
from modelexport.inspection.record.rows import linears_of
from modelexport.jobs.hosts import agree, check_coherent, is_spread, run_as_rank
from modelexport.jobs.ranks import Progress, own_ranks, run_under_launcher, show_progress, single
from modelexport.jobs.side_files import cards, files_digest, inputs_of, source_config, target_of
from modelexport.jobs.target_directory import TargetDirectory, TargetDirectorySpec
from modelexport.models import checkpoint_formats as formats
from modelexport.models.draft_layers import without_drafts
from modelexport.models.engines import warnings
from modelexport.models.opening import open_model
from modelexport.models.rules import left_out, tensor_rules
from modelexport.models.target_plan import TargetPlan, check_source, plan_target
from modelexport.models.ties import check_ties
from modelexport.quantization.methods import read_quantization_config
from modelexport.recipe import ReshardRecipe
from modelexport.resharding.moves import ReshardJob, run_alone
from modelexport.resharding.plan import Step, deal, plan_steps
from modelexport.sharding.plan import Parallelism
from modelexport.system.small_files import file_sha256
from modelexport.system.startup import without_collector

PRELOAD = ("torch", "modelexport.resharding.rank", "modelexport.models.preloading")


@dataclass(frozen=True)
class PreparedReshard:
    """A resharding before its first weight is read.

    Attributes:
        record: the source's modelexport.json, or None.
        warnings: what is lost, a line each.
        drafts: the source's tensors of draft layers, which are not written -> why.
    """

    recipe: ReshardRecipe
    checkpoint: Checkpoint
    target: TargetPlan
    steps: list[Step]
    record: dict[str, Any] | None
    warnings: tuple[str, ...] = ()
    drafts: Mapping[str, str] = field(default_factory=dict)

    def warn(self) -> None:
        """Print the warnings, before the work starts."""
        if not self.recipe.quiet and not self.recipe.json:
            for warning in self.warnings:
                print(f"warning: {warning}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class ReshardResult:
    """The result of a resharding, or of a dry run (``out`` is None then).

    Attributes:
        source_format, format: the checkpoint formats, as ``--format`` spells them.
        tensors, nbytes: of the model, each element once.
        stored_bytes: of the files written.
        bytes_sent: what processes sent to each other.
        reads: bytes that each process reads.
        plan: lines that say who holds what.
        left_out: what of the source is not part of the model -> what it is.
        warnings: what was said before the work started.
    """

    source: str
    source_format: str
    out: str | None
    format: str
    tp: int
    pp: int
    ep: int
    ranks: int
    tensors: int
    nbytes: int
    stored_bytes: int
    files: list[str]
    reads: list[int] = field(default_factory=list)
    bytes_sent: int = 0
    seconds: float = 0.0
    plan: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """JSON-able form, for ``--json``."""
        return asdict(self)


def reshard(recipe: ReshardRecipe | None = None, **settings: Any) -> ReshardResult:
    """Write a checkpoint anew for another parallelism, or in another format; the values stay as they are.

    Args:
        recipe: the settings; or give them as keyword arguments, named like the fields of
            :class:`~modelexport.recipe.ReshardRecipe`.

    Raises:
        UsageError: a setting is wrong, or the target exists.
        CheckpointError: the source is missing, damaged or not whole, or needs a config.json that was not given.
        PlanError: the model cannot be cut so, or the format cannot hold it; all reasons at once.
        RankFailedError: a process failed; nothing was published, and the same call resumes.

    Example:
        ::

            >>> modelexport.reshard(checkpoint="ckpt", tp=2, out="sharded", quiet=True).tp
            2
    """
    if recipe is None:
        recipe = ReshardRecipe.from_mapping(settings, where="reshard()")
    elif settings:
        raise UsageError("reshard(): give a recipe or settings, not both")
    began = time.perf_counter()
    if recipe.out is None and not recipe.dry_run:
        raise UsageError("no target given: add --out DIR")
    _check_out(recipe)
    if recipe.dry_run:
        prepared = prepare(recipe)
        prepared.warn()
        return _result(prepared, recipe.ranks or 1)
    config = _launcher_config(recipe)
    prepared, world, outcome = _launch(recipe) if config is None else _run_under_launcher(recipe, config)
    return _result(prepared, world, outcome, time.perf_counter() - began)


def prepare(recipe: ReshardRecipe) -> PreparedReshard:
    """Read the headers and plan everything; no weight is read and nothing is written."""
    with without_collector():  # a hundred thousand small objects: the collector would walk them over and over
        return _prepare(recipe)


def _prepare(recipe: ReshardRecipe) -> PreparedReshard:
    formats.get(recipe.format)
    source = Path(os.path.expanduser(recipe.checkpoint))
    opened = open_model(source, recipe.config)
    checkpoint, dropped = without_drafts(opened)
    drafts = {name: why for name, why in checkpoint.left_out.items() if name not in opened.left_out}
    _check_spelling(recipe, checkpoint)
    rules = tensor_rules(checkpoint)
    check_ties(checkpoint)
    target = plan_target(
        recipe.format,
        rules,
        checkpoint.config or {},
        Parallelism(recipe.tp, recipe.pp, recipe.ep),
        max_shard_bytes=recipe.max_shard_bytes,
        source=checkpoint.directory,
    )
    check_source(target, checkpoint)
    record = read_record(checkpoint.directory)
    return PreparedReshard(
        recipe, checkpoint, target, plan_steps(rules, checkpoint.infos), record, tuple(dropped), drafts
    )


def _check_out(recipe: ReshardRecipe) -> None:
    """Refuse, before anything is opened, a target that holds the source, or that is not to be replaced."""
    if recipe.out is None:
        return
    target, source = resolve_target(recipe.out), Path(os.path.expanduser(recipe.checkpoint))
    if os.path.exists(source) and source.resolve().is_relative_to(target):
        raise UsageError(f"--out {recipe.out} would replace the source, {source}: choose another target")
    if not recipe.dry_run:
        check_target(recipe.out, overwrite=recipe.overwrite)


def _check_spelling(recipe: ReshardRecipe, checkpoint: Checkpoint) -> None:
    """Refuse a ``--format`` that is a way to spell quantised linears, where the checkpoint has another or none."""
    if recipe.format in formats.containers():
        return
    quantization = read_quantization_config(checkpoint.config)
    own = None if quantization is None else quantization.method
    if own != formats.method_of(recipe.format).METHOD:
        has = "is not quantised" if own is None else f"is quantised as '{own}'"
        raise UsageError(
            f"reshard --format {recipe.format}: {checkpoint.directory} {has}, and reshard moves tensors as they are: "
            f"modelexport {'--model' if own is None else 'convert'} {recipe.checkpoint} --format {recipe.format} "
            "spells them so"
        )


def _launch(recipe: ReshardRecipe) -> tuple[PreparedReshard, int, dict[str, Any]]:
    """Reshard in processes of our own."""
    world = recipe.ranks or 1
    if world > 1:
        launch.prestart(PRELOAD)
    prepared = prepare(recipe)
    prepared.warn()
    with _target(prepared) as target:
        done = target.begin()
        job = _job(prepared, done, spread=False)
        with _show_progress(prepared, done) as (on_event, results):
            if world == 1 and job.exchange == "direct":  # bytes that only move: done before torch would be imported
                launch.run_alone(run_alone, on_event, job)
            else:
                with without_collector():
                    from modelexport.resharding.rank import run_rank

                config = own_ranks(world, recipe.timeout, PRELOAD, on_event)
                launch.launch_subprocesses(run_rank, config, None, 0, job)
        target.finish(single(results))
        return prepared, world, results[0]


def _launcher_config(recipe: ReshardRecipe) -> MultiprocessConfig | None:
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


def _run_under_launcher(
    recipe: ReshardRecipe, config: MultiprocessConfig
) -> tuple[PreparedReshard, int, dict[str, Any]]:
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
                progress=lambda done: _show_progress(prepared, done, shown=config.rank == 0),
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
        kept = {key: value for key, value in found["recipe"].items() if not key.startswith("target_")}
        ways = target_of(recipe.tp, recipe.pp, recipe.ep)
        written = {**kept, "format": recipe.format, "max_shard_bytes": recipe.max_shard_bytes, **ways}
        changed = {
            "file_sha256": digests,
            "recipe": written,
            "warnings": [*prepared.warnings, *engine_warnings(recipe, found)],
            "left_out": {**(found.get("left_out") or {}), **prepared.drafts},
        }
        return {key: changed.get(key, value) for key, value in found.items()}

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


def engine_warnings(recipe: ReshardRecipe, record: Mapping[str, Any]) -> list[str]:
    """Warnings of engines known to refuse a recorded checkpoint in the form about to be written."""
    kind = (record.get("model") or {}).get("model_type", "")
    return warnings(recipe.format, linears_of(ExportRecord.of(record)), tp=recipe.tp, model=kind)


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
    prepared: PreparedReshard, done: Mapping[str, Any], *, shown: bool = True
) -> AbstractContextManager[Progress]:
    recipe = prepared.recipe
    sizes = {step.id: step.nbytes for step in prepared.steps}
    return show_progress("reshard", sizes, done, quiet=recipe.quiet or recipe.json or not shown)


def _reads(steps: Iterable[Step], world: int) -> list[int]:
    shares = [0] * world
    for step in steps:
        sizes = [unit.nbytes for unit in step.units]
        for nbytes, owner in zip(sizes, deal(sizes, world), strict=True):
            shares[owner] += nbytes
    return shares


def _result(
    prepared: PreparedReshard, world: int, outcome: Mapping[str, Any] | None = None, seconds: float = 0.0
) -> ReshardResult:
    recipe, checkpoint, layout = prepared.recipe, prepared.checkpoint, prepared.target.layout
    return ReshardResult(
        source=recipe.checkpoint,
        source_format=checkpoint.format,
        out=None if outcome is None else recipe.out,
        format=recipe.format,
        tp=recipe.tp,
        pp=recipe.pp,
        ep=recipe.ep,
        ranks=world,
        tensors=len(prepared.target.plan.rules),
        nbytes=sum(step.nbytes for step in prepared.steps),
        stored_bytes=sum(file.size for file in layout.files),
        files=[file.name for file in layout.files],
        reads=_reads(prepared.steps, world),
        bytes_sent=0 if outcome is None else outcome["bytes_sent"],
        seconds=seconds,
        plan=list(prepared.target.plan.describe()),
        left_out={**checkpoint.left_out, **left_out(checkpoint)},
        warnings=prepared.warnings,
    )
