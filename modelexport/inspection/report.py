"""``modelexport report``: everything that is known of a checkpoint, on one page of HTML that needs no network."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from modelexport.errors import UsageError
from modelexport.inspection.report_data import Report, gather
from modelexport.inspection.report_page import render
from modelexport.tables import size_text
from modelexport.terminal import show

__all__ = ["Report", "gather", "print_report", "render", "write_page"]

_LISTED = 5


def print_report(checkpoint: Path, html: Path | None, config: Path | None, *, as_json: bool) -> int:
    """Report on a checkpoint; returns the exit status, 0.

    Args:
        html: where the page goes; None: a short text is printed instead.
        config: the model's config.json, where the checkpoint has none of its own.
        as_json: print what the page shows as JSON.

    Raises:
        CheckpointError: no checkpoint there, or a damaged one.
        UsageError: the page cannot be written there.
    """
    if html is not None:
        _check_place(html)  # before the checkpoint is read
    report = gather(checkpoint, config)
    nbytes = None if html is None else write_page(report, html)
    if as_json:
        show(json.dumps(report.as_json(), indent=1))
    elif nbytes is None:
        show("\n".join(_text(report)))
    else:
        show(f"wrote {html} ({size_text(nbytes)})", stands=f"{html} is complete")
    return 0


def write_page(report: Report, path: Path) -> int:
    """Write the page; a file that is there is replaced by one rename. Returns its bytes.

    Raises:
        UsageError: ``path`` is a directory, or its directory cannot be written to.
    """
    _check_place(path)
    content = render(report).encode("utf-8")
    temporary = None
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            os.fchmod(file.fileno(), 0o666 & ~_umask())
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            with suppress(OSError):
                os.unlink(temporary)
        raise UsageError(f"--html {path}: cannot be written: {error.strerror or error}") from error
    return len(content)


def _check_place(path: Path) -> None:
    if path.is_dir():
        raise UsageError(f"--html {path}: is a directory; name a file in it, e.g. {path / 'report.html'}")
    if not path.parent.is_dir():
        raise UsageError(f"--html {path}: there is no directory {path.parent}; make it first")


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def _text(report: Report) -> Iterator[str]:
    """The page in a few lines."""
    inspection = report.inspection
    names = ", ".join(inspection.architectures) or inspection.model_type or "no architecture named"
    yield f"{report.name}: {names}, {inspection.layers} layers, {inspection.parameters:,} parameters"
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
    if inspection.tensor_parallel_sizes:
        yield f"loads at tensor-parallel sizes: {', '.join(map(str, inspection.tensor_parallel_sizes))}"
    for title, lines in (("warning", report.warnings), ("outlier", report.outliers), ("not known", report.unknown)):
        yield from (f"{title}: {line}" for line in lines[:_LISTED])
        if len(lines) > _LISTED:
            yield f"{title}: and {len(lines) - _LISTED} more"
    yield "--html FILE writes all of it as a page, with the errors and the scales drawn"
