"""reshard(): from a checkpoint of any format and parallelism to one of any other, step by step.

open the source (headers only) -> rules of its tensors -> who will hold what -> staging directory with the format's
side files and file headers -> processes read, exchange, write, compare -> one rename
"""

from __future__ import annotations

import time
from typing import Any

from modelexport.errors import UsageError
from modelexport.recipe import ReshardRecipe
from modelexport.resharding.prepare import check_target_of, prepare
from modelexport.resharding.result import ReshardResult, result_of
from modelexport.resharding.run import launcher_config, run_as_launched, run_own_ranks

__all__ = ["prepare", "reshard"]


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
    check_target_of(recipe)
    if recipe.dry_run:
        prepared = prepare(recipe)
        prepared.warn()
        return result_of(prepared, recipe.ranks or 1)
    config = launcher_config(recipe)
    prepared, world, outcome = run_own_ranks(recipe) if config is None else run_as_launched(recipe, config)
    return result_of(prepared, world, outcome, time.perf_counter() - began)
