"""``modelexport formats``: number formats, checkpoint formats and algorithms."""

from __future__ import annotations

from argparse import Namespace


def run(given: Namespace) -> int:
    """Runs the command; returns its exit status."""
    from modelexport.inspection.listings.formats import print_formats

    return print_formats(given.name, as_json=given.json)
