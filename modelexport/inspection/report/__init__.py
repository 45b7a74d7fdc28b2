"""A report on a checkpoint: its sizes, errors, scales and warnings, on one page of HTML that needs no network."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from modelexport.inspection.report.data import Report, gather
from modelexport.inspection.report.page import render
from modelexport.inspection.report.timeline import read_log
from modelexport.system.small_files import check_place, write_small

__all__ = ["Report", "gather", "read_log", "render", "report", "write_page"]


def report(
    checkpoint: str | os.PathLike[str],
    html: str | os.PathLike[str] | None = None,
    config: str | os.PathLike[str] | None = None,
    log: str | os.PathLike[str] | None = None,
) -> Report:
    """Reports on a checkpoint.

    Args:
        checkpoint: its directory.
        html: the file that the page is written to; None: none is written.
        config: the model's config.json, where the checkpoint has none of its own.
        log: the log of the run that wrote it (``--log``), to be drawn as well.

    Raises:
        CheckpointError: no checkpoint there, or a damaged one.
        UsageError: the page cannot be written there, or the log cannot be read.

    Example:
        ::

            >>> modelexport.report("ckpt", html="report.html").inspection.layers
            4
    """
    if html is not None:
        check_place(Path(html), label=f"--html {html}")  # before the checkpoint is read
    run = None if log is None else read_log(Path(log))
    found = replace(gather(Path(checkpoint), None if config is None else Path(config)), run=run)
    if html is not None:
        write_page(found, Path(html))
    return found


def write_page(report: Report, path: Path) -> int:
    """Writes the page, see :func:`~modelexport.system.small_files.write_small`; returns its number of bytes.

    Raises:
        UsageError: ``path`` is a directory or takes no file, or its directory cannot be written to.
    """
    content = render(report).encode("utf-8")
    write_small(path, content, label=f"--html {path}")
    return len(content)
