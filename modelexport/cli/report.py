"""``modelexport report``: sizes, errors and scales of a checkpoint on one page."""

from __future__ import annotations

from argparse import Namespace


def run(given: Namespace) -> int:
    """Runs the command; returns its exit status."""
    from modelexport.inspection.report import print_report

    return print_report(given.checkpoint, given.html, given.config, as_json=given.json)
