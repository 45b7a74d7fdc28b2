"""Reading modelexport.json: checked as far as other commands rely on it, whoever wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modelexport.checkpoints.formats.hf import RECORD
from modelexport.errors import CheckpointError, shown
from modelexport.system.small_files import has_file, read_json

__all__ = ["read_record"]

Kind = type | tuple[type, ...]
_NEEDED = {"recipe": dict, "sha256": dict, "sqnr_db": dict, "layers": list, "producer": dict, "versions": dict}
_OPTIONAL = dict.fromkeys(("file_sha256", "model", "calibration", "output_error", "left_out"), dict)
_OF_CALIBRATION = {"samples": int, "length": int, "text": str, "unseen_experts": list}
_OF_CALIBRATION_OPTIONAL = {"notes": dict, "rare_experts": dict}
_KINDS = {
    dict: "an object",
    list: "a list",
    int: "a whole number",
    str: "a text",
    float: "a number",
    bool: "true or false",
}


def read_record(directory: Path) -> dict[str, Any] | None:
    """The content of modelexport.json; None where there is none.

    Raises:
        CheckpointError: it cannot be read, or is not what an export writes.
    """
    path = directory / RECORD
    if not has_file(directory, RECORD):
        return None
    record = read_json(path)
    for key, kind in _NEEDED.items():
        if not isinstance(record.get(key), kind):
            raise CheckpointError(f"{path}: has no '{key}'; it is damaged, or of another version of modelexport")
    _check(path, record, _OPTIONAL, "")
    for module, value in record["sqnr_db"].items():
        if not isinstance(value, (int, float)):
            raise CheckpointError(f"{path}: sqnr_db of {shown(module)} is {shown(value)}, no number of decibels")
    errors = record.get("output_error") or {}
    _check(path, errors, dict.fromkeys(errors, dict), "output_error.")
    for when, values in errors.items():
        _check(path, values, dict.fromkeys(values, (int, float)), f"output_error.{shown(when)}.", needed=True)
    if record.get("calibration") is not None:
        _check_calibration(path, record["calibration"])
    return record


def _check_calibration(path: Path, calibration: Mapping[str, Any]) -> None:
    """As the summary of an export that keeps the numbers tells it again."""
    _check(path, calibration, _OF_CALIBRATION, "calibration.", needed=True)
    _check(path, calibration, _OF_CALIBRATION_OPTIONAL, "calibration.")
    unseen = dict(enumerate(calibration["unseen_experts"]))
    _check(path, unseen, dict.fromkeys(unseen, str), "calibration.unseen_experts.", needed=True)
    notes = calibration.get("notes") or {}
    _check(path, notes, dict.fromkeys(notes, str), "calibration.notes.", needed=True)


def _check(path: Path, values: Mapping[Any, Any], kinds: Mapping[Any, Kind], where: str, needed: bool = False) -> None:
    """Checks the type of a value; unless ``needed``, it may be missing or null."""
    for key, kind in kinds.items():
        value = values.get(key)
        if not isinstance(value, kind) and (needed or value is not None):
            found = _KINDS.get(type(value), "missing")
            wanted = "a number" if isinstance(kind, tuple) else _KINDS[kind]
            raise CheckpointError(f"{path}: '{where}{shown(key)}' is {found}, not {wanted}; the record is damaged")
