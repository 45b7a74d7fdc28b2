"""``modelexport report``: sizes, errors and scales of a checkpoint on one page."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from modelexport.inspection.report import Report, gather, read_log, write_page
from modelexport.system.small_files import check_place
from modelexport.system.tables import duration_text, size_text
from modelexport.system.terminal import show

_LISTED = 5


def run(given: Namespace) -> int:
    """Runs the command; returns its exit status."""
    return print_report(given.checkpoint, given.html, given.config, given.log, as_json=given.json)


def print_report(
    checkpoint: Path, html: Path | None, config: Path | None, log: Path | None = None, *, as_json: bool
) -> int:
    """Reports on a checkpoint; returns the exit status, 0.

    Args:
        html: where the page goes; None: a short text is printed instead.
        config: the model's config.json, where the checkpoint has none of its own.
        log: the log of the run that wrote it, to be drawn as well.
        as_json: print the page's content as JSON.
    """
    if html is not None:
        check_place(html, label=f"--html {html}")  # before the checkpoint is read
    run = None if log is None else read_log(log)
    report = replace(gather(checkpoint, config), run=run)
    nbytes = None if html is None else write_page(report, html)
    if as_json:
        show(json.dumps(report.as_json(), indent=1))
    elif nbytes is None:
        show("\n".join(_text(report)))
    else:
        show(f"wrote {html} ({size_text(nbytes)})", stands=f"{html} is complete")
    return 0


def _text(report: Report) -> Iterator[str]:
    """Yields the report as a few lines of text."""
    inspection = report.inspection
    names = ", ".join(inspection.architectures) or inspection.model_type or "no architecture named"
    yield f"{report.name}: {names}, {inspection.layers_text}, {inspection.parameters:,} parameters"
    yield (
        f"weights: {size_text(inspection.nbytes)}, {inspection.bits:.2f} bits a parameter, {inspection.ratio:.2f} "
        "times smaller than in 16 bits"
    )
    for part in report.parts:
        formats = ", ".join(f"{name} {size_text(nbytes)}" for name, nbytes in part.formats.items())
        yield f"  {part.name}: {formats}"
    known = [(row.worst_db, row.worst) for row in report.modules if row.worst_db is not None]
    if known:
        worst, name = min(known)
        yield f"worst SQNR: {worst:.2f} dB, {name}"
    if report.run is not None:
        yield f"run: {report.run.state} after {duration_text(report.run.seconds)} {report.run.error}".rstrip()
        for rank in report.run.ranks[:_LISTED]:
            moved = size_text(rank.nbytes)
            yield f"  rank {rank.rank}: {moved}, last turned to '{rank.phase}' after {duration_text(rank.since)}"
    if inspection.tensor_parallel_sizes:
        yield f"loads at tensor-parallel sizes: {', '.join(map(str, inspection.tensor_parallel_sizes))}"
    for title, lines in (("warning", report.warnings), ("outlier", report.outliers), ("not known", report.unknown)):
        yield from (f"{title}: {line}" for line in lines[:_LISTED])
        if len(lines) > _LISTED:
            yield f"{title}: and {len(lines) - _LISTED} more"
    yield "--html FILE writes all of it as a page, with the errors and the scales drawn"
