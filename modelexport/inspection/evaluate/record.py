"""Figures of an evaluation, kept in the checkpoint that they are of: in its modelexport.json and on its card.

Of both files the new one takes the old one's place in one step; weights are not touched.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modelexport.checkpoints.formats.hf import CARD, RECORD
from modelexport.errors import CheckpointError, UsageError
from modelexport.inspection.card import model_card
from modelexport.inspection.record.reading import ExportRecord, read_record
from modelexport.system.small_files import has_file, read_small, write_small

__all__ = ["HELD_OUT", "check_record_is_there", "save_evaluation"]

HELD_OUT = "modelexport's held-out text"
"""What records call the package's own text."""
_DIGITS = 9
"""Significant ones: what is beyond differs between processors."""
_KEPT = ("text", "windows", "windows_in_text", "window", "dtype", "comparison", "model")


def check_record_is_there(directory: Path) -> ExportRecord:
    """The record of a checkpoint, which figures are to be kept in; refused before an hour of evaluation.

    Raises:
        UsageError: it was not exported by this program.
        CheckpointError: its record is damaged, or cannot be written.
    """
    record = read_record(directory)
    if record is None:
        raise UsageError(
            f"{directory} has no {RECORD}, which figures are kept in: leave out --save (checkpoints that modelexport "
            "wrote have one)"
        )
    if not os.access(directory, os.W_OK):
        raise CheckpointError(f"{directory} cannot be written to, and --save keeps the figures there")
    return record


def save_evaluation(directory: Path, figures: Mapping[str, Any]) -> None:
    """Put figures into a checkpoint's record, as ``evaluation``, and onto its card.

    Args:
        figures: what ``as_json()`` of an evaluation gives; of it only what is measured is kept, no path and no time.

    Raises:
        UsageError: the checkpoint has no record.
        CheckpointError: the record is damaged, or cannot be written.
    """
    found = check_record_is_there(directory)
    card = model_card(found.content)
    kept = {key: figures[key] for key in _KEPT if figures.get(key) is not None}
    record = {**found.content, "evaluation": _rounded(kept)}
    write_small(directory / RECORD, (json.dumps(record, indent=1) + "\n").encode(), error=CheckpointError)
    path = directory / CARD
    if not has_file(directory, CARD) or read_small(path) == card.encode():  # a card that somebody has edited is theirs
        write_small(path, model_card(record).encode(), error=CheckpointError)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
    return value
