"""export(): from a source checkpoint to a quantised one, step by step.

    resolve the source -> plan (headers only) -> staging directory with config, side files and file headers
    -> ranks read, quantise, gather, write, read back -> record -> one rename

Importing this module is cheap; torch is imported once the rank processes are on their way.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelexport import __version__
from modelexport.checkpoints.hf import RECORD, SideFiles, copy_side_files, quantization_config, write_config
from modelexport.checkpoints.safetensors_file import (
    INDEX_NAME,
    Checkpoint,
    Layout,
    open_checkpoint,
    plan_layout,
)
from modelexport.checkpoints.source import Source, resolve_source
from modelexport.checkpoints.staging import Staging
from modelexport.distributed import launch
from modelexport.errors import ModelExportError, RankFailedError, UsageError
from modelexport.export_plan import ExportPlan, build_plan
from modelexport.export_record import ExportResult, make_record
from modelexport.recipe import ExportRecipe
from modelexport.sharding.plan import Parallelism
from modelexport.startup import quick_imports

if TYPE_CHECKING:
    from modelexport.quantization.formats.base import NumberFormat

PRELOAD = (
    "torch",
    "torch.distributed",
    "safetensors",
    "modelexport.export_rank",
    "modelexport.quantization.kernels.fused",
)

EVALUATED_WINDOWS = 32  # of 197; a few seconds, with a standard error that tells the formats apart


@dataclass(frozen=True)
class Prepared:
    """An export before its first weight is read."""

    recipe: ExportRecipe
    source: Source
    checkpoint: Checkpoint
    plan: ExportPlan
    layout: Layout


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
    """
    if recipe is None:
        recipe = ExportRecipe.from_mapping(settings, where="export()")
    elif settings:
        raise UsageError("export(): give a recipe or settings, not both")
    began = time.perf_counter()
    if recipe.out is None and not recipe.dry_run:
        raise UsageError("no target given: add --out DIR")
    if recipe.tp > 1 and not recipe.dry_run:
        launch.prestart(PRELOAD)
    number_format = _number_format(recipe)  # a wrong name is said before a model is downloaded
    source = resolve_source(recipe.model, recipe.revision)
    if recipe.out is not None and source.directory.resolve().is_relative_to(Path(recipe.out).resolve()):
        raise UsageError(f"--out {recipe.out} would replace the source, {source.directory}: choose another target")
    prepared = prepare(recipe, source, number_format)
    if recipe.dry_run:
        return ExportResult.preview(prepared.plan, source.label, prepared.layout)
    assert recipe.out is not None
    with Staging.open(Path(recipe.out), _fingerprint(prepared), overwrite=recipe.overwrite) as staging:
        if staging.restarted and not recipe.quiet:
            print("the machine has restarted since an export here was cut off: it begins anew", file=sys.stderr)
        side, done = _write_around(prepared, staging)
        outcome = _run_ranks(prepared, done)
        if len(prepared.layout.files) > 1:  # last: without it nobody takes the files for a checkpoint
            (staging.directory / INDEX_NAME).write_text(prepared.layout.index_json())
        beside = _files_beside_weights(prepared.layout, staging.directory)
        record = make_record(prepared.plan, recipe, source.label, side, beside, outcome)
        (staging.directory / RECORD).write_text(json.dumps(record, indent=1) + "\n")
        staging.publish()
    seconds = time.perf_counter() - began
    result = ExportResult.of(record, prepared.plan, Path(recipe.out), prepared.layout, seconds)
    return _evaluated(result, source) if recipe.evaluate and source.is_demo else result


def _evaluated(result: ExportResult, source: Source) -> ExportResult:
    """Add perplexity and a sentence, before and after: the demo model comes with text that it has not seen."""
    from modelexport.assets import demo_documents

    with quick_imports():
        import transformers  # noqa: F401 (most of what an evaluation has to wait for)

        from modelexport.inspection.evaluate import evaluate

    assert result.out is not None
    evaluation = evaluate(result.out, source.directory, demo_documents("heldout"), max_windows=EVALUATED_WINDOWS)
    return replace(result, evaluation=evaluation)


def prepare(recipe: ExportRecipe, source: Source, number_format: NumberFormat) -> Prepared:
    """Read the headers and plan the export; no weight is read and nothing is written."""
    checkpoint = open_checkpoint(source.directory)
    plan = build_plan(checkpoint, number_format, Parallelism(tp=recipe.tp))
    layout = plan_layout(list(plan.outputs()), max_shard_bytes=recipe.max_shard_bytes)
    return Prepared(recipe, source, checkpoint, plan, layout)


def _number_format(recipe: ExportRecipe) -> NumberFormat:
    from modelexport.quantization import formats

    with quick_imports():
        return formats.get(recipe.quant, group_size=recipe.group_size)


def _fingerprint(prepared: Prepared) -> dict[str, Any]:
    """What must be equal for an interrupted export to be resumed: the source's files and the settings."""
    digest = hashlib.sha256((prepared.source.directory / "config.json").read_bytes())
    for path in sorted({info.path for info in prepared.checkpoint.infos.values()}):
        stat = os.stat(path)
        digest.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    recipe = prepared.recipe
    return {
        "model": str(prepared.source.directory),
        "source_files": digest.hexdigest(),
        "quant": recipe.quant,
        "group_size": prepared.plan.number_format.group_size,
        "format": recipe.format,
        "max_shard_bytes": recipe.max_shard_bytes,
        "modelexport": __version__,
    }


def _write_around(prepared: Prepared, staging: Staging) -> tuple[SideFiles, dict[str, Any]]:
    """Everything but the weights: side files, config.json, the weight files' headers.

    Also returns the steps that are done already, with their records: none if a weight file had to be made.
    """
    payload, directory = staging.directory, prepared.source.directory
    weights = {info.path for info in prepared.checkpoint.infos.values()}
    side = copy_side_files(directory, payload, weights)
    plan = prepared.plan
    heads = [module.path for module in plan.family.after if module.kind == "head"]
    quantization = quantization_config(plan.number_format, ignore=heads)
    write_config(directory, payload, quantization)
    made = prepared.layout.create(payload)
    return side, {} if made else dict(staging.done)


def _files_beside_weights(layout: Layout, directory: Path) -> dict[str, Path]:
    """Name -> path of every file of a checkpoint but its weights and the record that is yet to be written."""
    other = {file.name for file in layout.files} | {RECORD}
    paths = {str(path.relative_to(directory)): path for path in directory.rglob("*") if path.is_file()}
    return {name: path for name, path in paths.items() if name not in other}


def _run_ranks(prepared: Prepared, done: dict[str, Any]) -> dict[str, Any]:
    """Run the rank processes; returns the first rank's result: the checks and the layers' descriptions."""
    with quick_imports():
        from modelexport.export_rank import RankJob, run_rank

    recipe = prepared.recipe
    assert recipe.out is not None
    job = RankJob(
        prepared.checkpoint,
        prepared.plan,
        prepared.layout,
        Path(recipe.out),
        recipe.transport,
        recipe.workspace,
        recipe.timeout,
        done,
    )
    results: list[dict[str, Any]] = []
    with _progress(prepared, done, quiet=recipe.quiet or recipe.json) as advance:

        def on_event(rank: int, event: dict[str, Any]) -> None:
            if event.get("kind") == "step":
                advance(event)
            elif event.get("kind") == "result":
                results.append(event)

        config = launch.MultiprocessConfig(
            world_size=recipe.tp,
            local_world_size=recipe.tp,
            model_parallelism=recipe.tp,
            backend="gloo",
            timeout=recipe.timeout,
            preload=PRELOAD,
            on_event=on_event,
        )
        launch.launch_subprocesses(run_rank, config, None, 0, job)
    if len(results) != 1:
        raise RankFailedError(0, "reporting the result", f"{len(results)} results arrived instead of 1")
    return results[0]


@contextmanager
def _progress(prepared: Prepared, done: dict[str, Any], *, quiet: bool) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A bar in bytes written, with the layer in hand; silent where nobody watches."""
    from tqdm import tqdm

    steps = {step.id: step for step in prepared.plan.steps}
    total = sum(step.output_bytes for step in steps.values())
    resumed = sum(steps[name].output_bytes for name in done if name in steps)
    if resumed and not quiet:
        tqdm.write(f"resuming: {len(done)} of {len(steps)} steps are done already", file=sys.stderr)
    with tqdm(
        total=total,
        initial=resumed,
        unit="B",
        unit_scale=True,
        desc="export",
        leave=False,
        disable=True if quiet else None,
    ) as bar:

        def advance(event: dict[str, Any]) -> None:
            bar.set_postfix_str(event["step"], refresh=False)
            bar.update(event["bytes"])

        yield advance


__all__ = ["ModelExportError", "Prepared", "export", "prepare"]
