"""The rotary embedding as config.json has it: in ``rope_parameters`` (transformers 5), or spread over older keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from modelexport.errors import CheckpointError, shown
from modelexport.system.json_values import JsonValues

_NUMBERS = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
)


@dataclass(frozen=True)
class RopeConfig:
    """The rotary embedding by config.json.

    Attributes:
        theta: its base; None where that is not said.
        part: of a head's features that are rotated, above 0 and at most 1.
        kind: ``rope_type``: ``"default"``, ``"llama3"``.
        scaling: all else that is said with it, e.g. ``factor``; what should be a number is one.
    """

    theta: float | None
    part: float
    kind: str
    scaling: JsonValues


def read_rope_config(config: Mapping[str, Any], layers: str = "full_attention") -> RopeConfig:
    """Read the rotary embedding's settings.

    Args:
        layers: of models with one for each kind of layer, the kind.

    Raises:
        CheckpointError: one of them is of the wrong kind.
    """
    values = JsonValues(config)
    key = "rope_parameters" if values.has("rope_parameters") else "rope_scaling"
    own = values.object(key)
    if isinstance(own.content.get(layers), dict):
        own = own.object(layers)
    for name in filter(own.has, _NUMBERS):
        own.number(name)

    def either(name: str) -> float | None:
        holder = own if own.has(name) else values
        return holder.number(name) if holder.has(name) else None

    part = either("partial_rotary_factor")
    if part is not None and part > 1:
        raise CheckpointError(f"config.json: partial_rotary_factor is {shown(part)}; at most 1 is possible")
    kind = own.text("rope_type", own.text("type", "default"))
    return RopeConfig(either("rope_theta"), 1.0 if part is None else part, kind, own)
