"""export(): from a source checkpoint to a quantised one, step by step.

    resolve the source -> plan (headers only) -> staging directory with config, side files and file headers
    -> ranks read, quantise, gather, write, read back -> record -> one rename

Importing this package is cheap; torch is imported once the rank processes are on their way.
"""

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from typing import Any

from modelexport.checkpoints.source import Source
from modelexport.errors import UsageError
from modelexport.exporting.prepare import check_early, prepare
from modelexport.exporting.publish import evaluated, pushed
from modelexport.exporting.result import ExportResult, preview_of, result_of
from modelexport.exporting.run import launcher_config, opened_of, run_as_launched, run_own_ranks
from modelexport.models.in_memory import is_in_memory, opened
from modelexport.quantization.assignment import KEEP
from modelexport.recipe import ExportRecipe

__all__ = ["convert", "export", "prepare"]


def export(recipe: ExportRecipe | None = None, **settings: Any) -> ExportResult:
    """Export a model: quantise it in ``tp`` rank processes and write one checkpoint.

    Args:
        recipe: the settings; or give them as keyword arguments, named like the fields of
            :class:`~modelexport.recipe.ExportRecipe`. ``model`` may then be a module of transformers, or a dict of
            tensors by the names that they have in a checkpoint; with ``config`` (a dict or transformers' object) for
            what has none, and ``tokenizer`` (the object, or a directory) where samples are read; and with ``plan``
            (pattern of names -> dim) where each rank has a part of plain tensors. Such a model is
            exported by this process, to the bytes that saving it and exporting that gives.

    Returns:
        What was written and how good it is. With ``dry_run`` nothing is written.

    Raises:
        UsageError: a setting is wrong, or the target exists.
        CheckpointError: the source is missing, damaged or holds NaN or Inf.
        PlanError: the architecture is unknown or a dimension does not suit the number format.
        RankFailedError: a rank process failed; nothing was published, and the same call resumes.
        HubError: with ``push_to_hub``, before the work: nobody is logged in; after it: the checkpoint stands, but was
            not pushed.

    Example:
        The embedded demo model, in four-bit integers, by two rank processes::

            >>> import modelexport
            >>> result = modelexport.export(quant="int4", tp=2, out="ckpt", evaluate=False, quiet=True)
            >>> result.tensor_parallel_sizes
            [1, 2, 4]
            >>> result.source_bytes / result.output_bytes > 2
            True
    """
    if recipe is not None and settings:
        raise UsageError("export(): give a recipe or settings, not both")
    if is_in_memory(settings.get("model")):
        with opened(*(settings.pop(name, None) for name in ("model", "config", "tokenizer", "plan"))) as source:
            return _exported(ExportRecipe.from_mapping(settings, where="export()"), source)
    return _exported(recipe or ExportRecipe.from_mapping(settings, where="export()"))


def _exported(recipe: ExportRecipe, source: Source | None = None) -> ExportResult:
    """Exports a source, or where it is None what the recipe names."""
    began = time.perf_counter()
    if recipe.out is None and not recipe.dry_run:
        raise UsageError("no target given: add --out DIR")
    check_early(recipe, source)
    if recipe.dry_run:
        with nullcontext(source) if source is not None else opened_of(recipe) as found:
            prepared = prepare(recipe, found)
            prepared.warn()
            return preview_of(prepared)
    config = launcher_config(recipe)
    prepared, record = run_own_ranks(recipe, source) if config is None else run_as_launched(recipe, config, source)
    seconds = time.perf_counter() - began
    assert recipe.out is not None
    result = result_of(prepared, record, seconds)
    first = config is None or config.rank == 0
    if recipe.evaluate and prepared.source.is_demo and first:
        result = evaluated(result, prepared.source, prepared.recipe.device)
    return pushed(result, recipe) if recipe.push_to_hub is not None and first else result


def convert(checkpoint: str | os.PathLike[str], **settings: Any) -> ExportResult:
    """Write a quantised checkpoint in another format, or for another parallelism, without rounding it again.

    Args:
        checkpoint: its directory; of any format, from whichever tool.
        settings: as for :func:`export`: ``format``, ``out``, ``target_tp``, ...

    Raises:
        UsageError, CheckpointError, PlanError, RankFailedError: as :func:`export`.

    Example:
        ::

            >>> modelexport.convert("ckpt", format="awq", out="ckpt-awq", quiet=True).format
            'awq'
    """
    return export(model=os.fspath(checkpoint), quant=KEEP, **settings)
