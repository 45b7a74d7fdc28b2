"""``modelexport push``: uploads a checkpoint to the Hugging Face Hub."""

from __future__ import annotations

import json
from argparse import Namespace

from modelexport.system.terminal import show


def run(given: Namespace) -> int:
    """Runs the command; returns its exit status."""
    from modelexport.jobs.hub import push

    quiet = given.quiet or given.json
    result = push(given.checkpoint, given.repository, private=given.private, quiet=quiet)
    stands = f"{given.checkpoint} is pushed"
    if given.json:
        show(json.dumps(result.as_json(), indent=1), stands=stands)
    elif not quiet:
        show(f"pushed {given.checkpoint} to {result.url}", stands=stands)
    return 0
