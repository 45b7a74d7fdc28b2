"""The licence and the base model of a source, from the YAML at the top of its model card.

A stranger wrote it: it is read as data, of a bounded size, and of each field only a value of the kind that the Hub
expects is taken. See https://huggingface.co/docs/hub/model-cards.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modelexport.checkpoints.formats.hf import CARD
from modelexport.errors import CheckpointError, error_text
from modelexport.system.small_files import is_failing, open_regular
from modelexport.system.yaml_reading import read_yaml

__all__ = ["known_fields", "read_card_metadata"]

_LARGEST = 1 << 16
_MOST = 50
_FIELDS = {
    "license": re.compile(r"[\w.-]{1,64}", re.ASCII),
    "license_name": re.compile(r"[\w. -]{1,96}", re.ASCII),
    "license_link": re.compile(r"[!-~]{1,256}"),
    "language": re.compile(r"[\w-]{1,24}", re.ASCII),
    "base_model": re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}", re.ASCII),
    "base_model_relation": re.compile(r"quantized"),
}
_LISTS = ("language", "base_model")


def read_card_metadata(directory: Path) -> dict[str, Any]:
    """Fields of a checkpoint's README.md that a card of what is made of it keeps; empty where there are none.

    Returns:
        ``license``, ``license_name``, ``license_link`` and ``base_model_relation`` (``"quantized"`` alone) as text,
        ``language`` and ``base_model`` as lists; whatever is no such value is left out.

    Raises:
        CheckpointError: the disk fails.
    """
    try:
        with open_regular(directory / CARD) as file:
            text = file.read(_LARGEST).decode("utf-8", errors="replace")
    except (CheckpointError, OSError) as error:  # none, or one that cannot be read: there is nothing to keep
        if not is_failing(error):
            return {}
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{directory / CARD}: cannot be read: {error_text(error)}") from error
    lines = text.removeprefix("\ufeff").splitlines()
    if not lines or lines[0].rstrip() != "---":
        return {}
    end = next((i for i, line in enumerate(lines[1:], 1) if line.rstrip() == "---"), None)
    if end is None:
        return {}
    try:
        fields = read_yaml("\n".join(lines[1:end]))
    except ValueError:
        return {}
    return known_fields(fields) if isinstance(fields, dict) else {}


def known_fields(fields: Mapping[Any, Any]) -> dict[str, Any]:
    """Those of a card's fields that are kept, where they are what they should be; see :func:`read_card_metadata`."""
    found: dict[str, Any] = {}
    for name, pattern in _FIELDS.items():
        value = fields.get(name)
        values = value if isinstance(value, list) else [value]
        good = [item for item in values[:_MOST] if isinstance(item, str) and pattern.fullmatch(item)]
        if name in _LISTS and good:
            found[name] = good
        elif good and isinstance(value, str):
            found[name] = good[0]
    return found
