"""``modelexport models``: the model types that can be exported."""

from __future__ import annotations

from argparse import Namespace


def run(given: Namespace) -> int:
    """Runs the command; returns its exit status."""
    from modelexport.inspection.listings.models import print_models

    return print_models(given.name, as_json=given.json)
