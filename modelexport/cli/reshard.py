"""``modelexport reshard``: a checkpoint for another parallelism, or in another format."""

from __future__ import annotations

import json
from argparse import Namespace

from modelexport.distributed.environment import external_rank
from modelexport.recipe import ReshardRecipe
from modelexport.system.terminal import show


def run(given: Namespace) -> int:
    """Runs the command; returns its exit status."""
    recipe = ReshardRecipe.from_mapping(vars(given), where="command line")
    from modelexport.resharding import reshard

    result = reshard(recipe)
    if external_rank() not in (None, 0):
        return 0
    stands = "" if recipe.dry_run else f"{recipe.out} is complete"
    if recipe.json:
        show(json.dumps(result.as_json(), indent=1), stands=stands)
    elif not recipe.quiet:
        from modelexport.cli.summary import reshard_summary

        show(reshard_summary(result), stands=stands)
    return 0
