"""The numbers of one model, read from its config.json by what its family says of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from modelexport.errors import CheckpointError
from modelexport.models.families.base import Axis, AxisSize, Dimensions, Family
from modelexport.models.families.drafts import draft_counts
from modelexport.system.json_values import JsonValues

MOST_HEADS = 1 << 13  # many times those of any model
EXPERT_KEYS = ("num_local_experts", "n_routed_experts", "num_experts")


def read_dimensions(config: Mapping[str, Any], family: Family | None = None) -> Dimensions:
    """Read :class:`Dimensions` from a config.json's content; experts and further axes only for a family that has any.

    Raises:
        CheckpointError: a key is missing, or a value is not a positive whole number.
    """
    if family is not None:
        if family.dimensions is not None:
            return family.dimensions
        config = family.complete(config)
    read = _Numbers(config)
    hidden, layers = read.whole("hidden_size"), read.whole("num_hidden_layers")
    heads, kv_heads = read.heads(hidden, family)
    ratio = 0 if family is None else family.mlp_ratio
    dimensions = Dimensions(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=read.whole("head_dim", max(1, hidden // heads)),
        intermediate=read.whole("intermediate_size", ratio * hidden or None),
        vocab=read.whole("vocab_size"),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
    )
    return dimensions if family is None else _with_own(dimensions, family, read)


def _with_own(dimensions: Dimensions, family: Family, read: _Numbers) -> Dimensions:
    """With what only some families have: experts, dense layers, axes of their own."""
    experts = dense = 0
    if family.has_experts:
        experts = read.whole(next(filter(read.has, EXPERT_KEYS), EXPERT_KEYS[0]))
    if family.dense_layers is not None:
        dense = min(dimensions.layers, read.whole(family.dense_layers, least=0))
    axes = {name: read.axis(axis) for name, axis in family.axes.items() if not axis.of}
    found = replace(
        dimensions,
        experts=experts,
        dense_layers=dense,
        prediction_layers=max(draft_counts(read.content).values(), default=0),
        own_axes=tuple(axes.items()),
    )
    multiples = {name: found.axis(axis.of).times(axis.each) for name, axis in family.axes.items() if axis.of}
    return replace(found, own_axes=(*found.own_axes, *multiples.items()))


@dataclass(frozen=True)
class _Numbers(JsonValues):
    """A config.json's."""

    def heads(self, hidden: int, family: Family | None) -> tuple[int, int]:
        """The numbers of query heads and of key/value heads."""
        heads = self.whole("num_attention_heads", most=MOST_HEADS)  # before any loop over a number of a stranger's
        used = {axis for module in family.layer for _, axis in module.axes} if family is not None else {"kv_heads"}
        # Latent attention has keys and values for every head, of sizes that other keys say.
        kv_heads = self.whole("num_key_value_heads", heads) if "kv_heads" in used else heads
        if heads % kv_heads:
            raise CheckpointError(
                f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
            )
        if used & {"heads", "kv_heads"} and not self.has("head_dim") and hidden % heads:
            raise CheckpointError(
                f"config.json: hidden_size {hidden} is not divisible by num_attention_heads {heads}, "
                "and head_dim is not given"
            )
        return heads, kv_heads

    def axis(self, axis: Axis) -> AxisSize:
        keys = (*axis.features, *((axis.times,) if axis.times is not None else ()))
        if axis.optional and not all(self.content.get(key) for key in keys):
            return AxisSize(0)
        features = sum(self.whole(key) for key in axis.features) if axis.features else 1
        times = 1 if axis.times is None else self.whole(axis.times)
        return AxisSize(features * times, features if axis.heads else 1, times if axis.heads else 0)
