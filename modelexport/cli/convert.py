"""``modelexport convert``: the numbers of a quantised checkpoint, encoded for another format."""

from __future__ import annotations

from argparse import Namespace

from modelexport.cli.export import print_export
from modelexport.recipe import ExportRecipe


def run(given: Namespace) -> int:
    """Runs the command; returns its exit status."""
    return print_export(ExportRecipe.from_mapping({**vars(given), "quant": "keep"}, where="command line"))
