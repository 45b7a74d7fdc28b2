"""``modelexport diff``: the differences of two checkpoints."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from modelexport.inspection.diff import Diff, diff_checkpoints
from modelexport.system.tables import size_text
from modelexport.system.terminal import show

_LISTED = 10


def run(given: Namespace) -> int:
    """Runs the command; returns its exit status."""
    return print_diff(given.a, given.b, given.config, as_json=given.json)


def print_diff(a: Path, b: Path, config: Path | None, *, as_json: bool) -> int:
    """Prints the differences; returns the exit status: 0 equal, 1 not."""
    result = diff_checkpoints(a, b, config)
    show(json.dumps(result.as_json(), indent=1) if as_json else "\n".join(_report(result)))
    return 0 if result.equal else 1


def _report(result: Diff) -> Sequence[str]:
    lines = []
    for found in result.differences[:_LISTED]:
        lines.append(f"{found.tensor}: {found.text}")
        if found.what == "values" and found.largest is not None:
            lines[-1] += f"; largest difference {found.largest:g}"
    if len(result.differences) > _LISTED:
        lines.append(f"and {len(result.differences) - _LISTED} more (--json lists all)")
    lines += [f"not compared: {name}: {why}" for name, why in list(result.left_out.items())[:_LISTED]]
    kinds = f"{result.a} ({result.formats[0]}) and {result.b} ({result.formats[1]})"
    if result.equal:
        return [f"equal: {result.tensors} tensors, {size_text(result.nbytes)}, in {kinds}", *lines]
    tensors = len({found.tensor for found in result.differences})
    return [f"different: {tensors} tensors of {kinds}:", *lines]
