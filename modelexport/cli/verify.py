"""``modelexport verify``: a checkpoint against its record, its config.json and its source."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path

from modelexport.inspection.verify import ModuleError, Verification, db_text, verify_checkpoint
from modelexport.system.tables import table
from modelexport.system.terminal import columns, show

_LISTED = 20


def run(given: Namespace) -> int:
    """Runs the command; returns its exit status."""
    return print_verification(given.checkpoint, given.against, given.config, given.adapter or (), as_json=given.json)


def print_verification(
    directory: Path,
    against: Path | None,
    config: Path | None = None,
    adapters: Sequence[str] = (),
    *,
    as_json: bool,
) -> int:
    """Prints the findings; returns the exit status: 0 good, 1 something is wrong."""
    result = verify_checkpoint(directory, against, config, adapters=adapters)
    if as_json:
        show(json.dumps(result.as_json(), indent=1))
    else:
        show("\n".join(_report(result)))
    return 0 if result.ok else 1


def _report(result: Verification) -> Iterator[str]:
    if result.modules:
        yield from _error_table(result.modules)
        yield ""
    for note in result.notes[:_LISTED]:
        yield f"note: {note}"
    if len(result.notes) > _LISTED:
        yield f"note: and {len(result.notes) - _LISTED} more (--json lists all)"
    if result.problems:
        count = len(result.problems)
        yield f"{result.checkpoint}: {count} problem{'s' if count > 1 else ''}"
        yield from (f"- {problem}" for problem in result.problems[:_LISTED])
        if count > _LISTED:
            yield f"- and {count - _LISTED} more (--json lists all)"
        return
    verdict = "not all checked" if result.unchecked else "good"
    yield from (f"not checked: {line}" for line in result.unchecked)
    hashes = f"; SHA-256 of {result.hashes} as exported" if result.hashes else ""
    same = f"; {result.identical} equal to the source's to the byte" if result.against is not None else ""
    again = f"; {result.requantised} as rounding the source gives, to the bit" if result.requantised else ""
    yield (
        f"{result.checkpoint}: {verdict}: {result.tensors} tensors, {result.nbytes:,} bytes, as config.json promises; "
        f"no NaN or Inf{hashes}{same}{again}"
    )


def _error_table(modules: Sequence[ModuleError]) -> Iterator[str]:
    """One row per type of linear: the worst and the mean of its SQNR, and which layer is the worst."""
    groups: dict[tuple[str, str], list[ModuleError]] = {}
    for module in modules:
        groups.setdefault((module.path, module.number_format), []).append(module)
    rows = []
    for (path, number_format), group in groups.items():
        values = [m.sqnr_db for m in group if m.sqnr_db is not None]
        nearest = [m.nearest_db for m in group if m.nearest_db is not None]
        rows.append(
            (
                path,
                str(len(group)),
                number_format,
                db_text(min(values, default=None)),
                db_text(math.fsum(values) / len(values) if values else None),
                db_text(min(nearest, default=None)),
                group[0].name,
            )
        )
    header = ("module", "count", "format", "worst SQNR", "mean SQNR", "to nearest", "worst module")
    yield from table(header, rows, width=columns(), optional=("worst module", "mean SQNR", "count", "to nearest"))
