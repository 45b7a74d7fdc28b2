"""``modelexport``: exports a model."""

from __future__ import annotations

import json
from argparse import Namespace

from modelexport.distributed.environment import external_rank
from modelexport.errors import HubError
from modelexport.recipe import ExportRecipe
from modelexport.settings import parse_assignments
from modelexport.system.terminal import show


def run(given: Namespace) -> int:
    """Runs the command; returns its exit status."""
    settings = vars(given)
    path = settings.pop("recipe", None)
    overrides = {**parse_assignments(settings.pop("set", [])), **settings}
    if path is not None:
        recipe = ExportRecipe.load(path, overrides)
    else:
        recipe = ExportRecipe.from_mapping(overrides, where="command line")
    return print_export(recipe)


def print_export(recipe: ExportRecipe) -> int:
    """Exports, and prints the result; returns the exit status, 0."""
    from modelexport.exporting import export

    try:
        result = export(recipe)
    except HubError as error:  # what was exported stands: its summary is printed before what went wrong
        if error.result is not None and not (recipe.json or recipe.quiet):
            from modelexport.cli.summary import summary

            show(summary(error.result), stands=f"{recipe.out} is complete")
        raise
    if external_rank() not in (None, 0):
        return 0
    stands = "" if recipe.dry_run else f"{recipe.out} is complete"
    if recipe.json:
        show(json.dumps(result.as_json(), indent=1), stands=stands)
    elif not recipe.quiet:
        from modelexport.cli.summary import summary

        show(summary(result), stands=stands)
    return 0
