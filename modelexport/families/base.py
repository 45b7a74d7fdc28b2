"""What a model family declares, as data: its modules, how each is cut, and where its numbers stand in config.json.

A family file holds one :class:`Family` and no code. Names are those on disk in a Hugging Face checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from modelexport.errors import CheckpointError

Partition = Literal["column", "row", "replicated"]
Kind = Literal["linear", "norm", "embedding", "head"]


@dataclass(frozen=True, kw_only=True)
class Module:
    """One module of a model.

    Attributes:
        path: its name, relative to the layer's prefix for modules of a decoder layer.
        kind: what it is. Only a ``linear`` is quantised.
        role: what it does, e.g. ``"attention.q"``; modules that an engine fuses share ``fused_into``.
        partition: ``column`` cuts the output features (dim 0), ``row`` the input features (dim 1).
        axis: the model axis that the cut dimension runs along: ``heads``, ``kv_heads``, ``intermediate`` or
            ``vocab``; None where nothing is cut.
        fused_into: the fused module of an engine that this one becomes a part of, if any.
        bias: the key of config.json that says whether it has a bias, None where no key does.
    """

    path: str
    kind: Kind
    role: str
    partition: Partition = "replicated"
    axis: str | None = None
    fused_into: str | None = None
    bias: str | None = None


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model family: every model whose ``model_type`` is ``name`` or one of ``aliases``.

    Attributes:
        layer_prefix: name of decoder layer ``i``, with ``{i}``.
        before, layer, after: modules ahead of the decoder layers, in each of them, and behind them; written
            in this order.
        ignored_tensors: suffixes of tensors that carry no weights (buffers that old checkpoints saved).
    """

    name: str
    architecture: str
    aliases: tuple[str, ...] = ()
    layer_prefix: str = "model.layers.{i}"
    before: tuple[Module, ...]
    layer: tuple[Module, ...]
    after: tuple[Module, ...]
    ignored_tensors: tuple[str, ...] = field(default=())


@dataclass(frozen=True, kw_only=True)
class Dimensions:
    """The numbers of one model that its cuts depend on, read from its config.json."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied_embeddings: bool

    def axis_size(self, axis: str) -> int:
        """Features along a model axis, e.g. ``heads * head_dim``."""
        return {
            "heads": self.heads * self.head_dim,
            "kv_heads": self.kv_heads * self.head_dim,
            "intermediate": self.intermediate,
            "vocab": self.vocab,
        }[axis]

    def axis_unit(self, axis: str) -> int:
        """Features that no cut along this axis may separate (a head)."""
        return self.head_dim if axis in ("heads", "kv_heads") else 1


def read_dimensions(config: Mapping[str, Any]) -> Dimensions:
    """Read :class:`Dimensions` from a config.json's content.

    Raises:
        CheckpointError: a key is missing, or a value is not a positive whole number.
    """

    def whole(key: str, default: int | None = None) -> int:
        value = config.get(key, default)
        if value is None and default is not None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            found = "is missing" if value is None else f"is {value!r}"
            raise CheckpointError(f"config.json: {key} {found}; a positive whole number is needed")
        return value

    heads = whole("num_attention_heads")
    hidden = whole("hidden_size")
    kv_heads = whole("num_key_value_heads", heads)
    if heads % kv_heads:
        raise CheckpointError(
            f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    if config.get("head_dim") is None and hidden % heads:
        raise CheckpointError(
            f"config.json: hidden_size {hidden} is not divisible by num_attention_heads {heads}, "
            "and head_dim is not given"
        )
    return Dimensions(
        layers=whole("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=whole("head_dim", hidden // heads),
        intermediate=whole("intermediate_size"),
        vocab=whole("vocab_size"),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
    )
