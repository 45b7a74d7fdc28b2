"""``modelexport``: exports a model."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import replace
from typing import TYPE_CHECKING

from modelexport.distributed.environment import external_rank
from modelexport.errors import HubError
from modelexport.recipe import ExportRecipe
from modelexport.settings import parse_assignments
from modelexport.system.startup import process_seconds
from modelexport.system.terminal import show

if TYPE_CHECKING:
    from modelexport.exporting.result import ExportResult


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
        if error.result is not None and not recipe.json:
            _show(error.result, recipe)
        raise
    if external_rank() in (None, 0):
        _show(result, recipe)
    return 0


def _show(result: ExportResult, recipe: ExportRecipe) -> None:
    """Prints a result; its seconds are those since the process began, imports and all."""
    if recipe.quiet and not recipe.json:
        return
    if not recipe.dry_run:
        result = replace(result, seconds=process_seconds())
    stands = "" if recipe.dry_run else f"{recipe.out} is complete"
    if recipe.json:
        show(json.dumps(result.as_json(), indent=1), stands=stands)
    else:
        from modelexport.cli.summary import summary

        show(summary(result), stands=stands)
