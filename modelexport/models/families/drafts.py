"""Draft layers (multi-token prediction, MTP): how config.json counts them, and which tensors are theirs.

They predict tokens beyond the next one, for speculative decoding; the model itself does not use them. DeepSeek-V3 and
GLM-4.5 number them on behind the decoder layers, others put them below a module whose name begins with
:data:`~modelexport.checkpoints.draft_names.PREFIX`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from modelexport.system.json_values import JsonValues

COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers", "num_mtp_modules")
"""Keys of config.json, or of a part of it that describes the language model, that count draft layers."""


def draft_counts(config: Mapping[str, Any]) -> dict[str, int]:
    """Returns key -> number of draft layers for the keys of config.json that promise any; keys of parts with a dot.

    Raises:
        CheckpointError: a count is no whole number, or negative.
    """
    found = {}
    for where, part in _parts(config):
        values = JsonValues(part, f"config.json: {where[:-1]}" if where else "config.json")
        found.update({f"{where}{key}": values.whole(key, 0, least=0) for key in COUNTS})
    return {key: count for key, count in found.items() if count}


def without_counts(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns config.json's content with no draft layers promised."""
    cleared = {key: 0 if key in COUNTS and value else value for key, value in config.items()}
    for where, part in _parts(config):
        if where:
            cleared[where[:-1]] = {key: 0 if key in COUNTS and value else value for key, value in part.items()}
    return cleared


def _parts(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """config.json itself, and what it says of the parts of a model, with what their keys come behind."""
    yield "", config
    for key, value in config.items():
        if key.endswith("_config") and isinstance(value, Mapping):
            yield f"{key}.", value
