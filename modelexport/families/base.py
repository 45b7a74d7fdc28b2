"""What a model family declares, as data: its modules, how each is cut, and where its numbers stand in config.json.

A family file holds one :class:`Family` and no code. Names are those on disk in a Hugging Face checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from modelexport.errors import CheckpointError

Partition = Literal["column", "row", "replicated"]
Kind = Literal["linear", "norm", "embedding", "head", "router"]

EXPERT_KEYS = ("num_local_experts", "n_routed_experts", "num_experts")


@dataclass(frozen=True, kw_only=True)
class Module:
    """One module of a model, or, with ``{e}`` in its path, one of every expert of a layer.

    Attributes:
        path: its name, relative to the layer's prefix for modules of a decoder layer; ``{e}`` is an expert's number.
        kind: what it is. Only a ``linear`` is quantised: a ``router`` decides between experts on small differences.
        role: what it does, e.g. ``"attention.q"``; modules that an engine fuses share ``fused_into``.
        partition: ``column`` cuts the output features (dim 0), ``row`` the input features (dim 1).
        axis: the model axis that the features of that dimension run along: ``heads``, ``kv_heads``, ``intermediate``,
            ``vocab`` or ``experts``; None for the hidden one, and for a fused module.
        parts: of a module that is fused on disk: (role, axis) of each that it consists of, in order along dim 0.
        fused_into: the fused module of an engine that this one becomes a part of, if any.
        bias: whether it has one: True, False, or the key of config.json that says so; None where nothing does.
    """

    path: str
    kind: Kind
    role: str
    partition: Partition = "replicated"
    axis: str | None = None
    parts: tuple[tuple[str, str], ...] = ()
    fused_into: str | None = None
    bias: str | bool | None = None

    @property
    def is_expert(self) -> bool:
        """Whether a layer has one such module for each expert."""
        return "{e}" in self.path

    @property
    def general_path(self) -> str:
        """Its path with ``*`` for an expert's number."""
        return self.path.replace("{e}", "*")

    @property
    def axes(self) -> tuple[tuple[str, str], ...]:
        """(role, axis) of each part along the dimension that may be cut; one where nothing is fused, perhaps none."""
        return self.parts or (((self.role, self.axis),) if self.axis is not None else ())

    def has_bias(self, config: Mapping[str, Any]) -> bool:
        """Whether config.json announces a bias."""
        return bool(config.get(self.bias)) if isinstance(self.bias, str) else bool(self.bias)


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

    @property
    def has_experts(self) -> bool:
        """Whether its layers have experts."""
        return any(module.is_expert for module in self.layer)

    def modules_of_layer(self, dimensions: Dimensions) -> Iterator[tuple[str, int | None, Module]]:
        """(path, expert, module) of every module of a layer: experts one by one, where the first of theirs stands."""
        experts = [module for module in self.layer if module.is_expert]
        for module in self.layer:
            if not module.is_expert:
                yield module.path, None, module
            elif module is experts[0]:
                for e in range(dimensions.experts):
                    yield from ((each.path.format(e=e), e, each) for each in experts)


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
    experts: int = 0

    def axis_size(self, axis: str) -> int:
        """Features along a model axis, e.g. ``heads * head_dim``."""
        return {
            "heads": self.heads * self.head_dim,
            "kv_heads": self.kv_heads * self.head_dim,
            "intermediate": self.intermediate,
            "vocab": self.vocab,
            "experts": self.experts,
        }[axis]

    def axis_unit(self, axis: str) -> int:
        """Features that no cut along this axis may separate (a head)."""
        return self.head_dim if axis in ("heads", "kv_heads") else 1

    def axis_heads(self, axis: str) -> int:
        """Attention heads along this axis, 0 where there are none."""
        return {"heads": self.heads, "kv_heads": self.kv_heads}.get(axis, 0)

    def weight_shape(self, module: Module) -> tuple[int, ...]:
        """The shape of a module's weight, ``[out_features, in_features]``; a norm's is ``[hidden]``."""
        if not module.axes:
            return (self.hidden,)
        along = sum(self.axis_size(axis) for _, axis in module.axes)
        return (self.hidden, along) if module.partition == "row" else (along, self.hidden)


def read_dimensions(config: Mapping[str, Any], family: Family | None = None) -> Dimensions:
    """Read :class:`Dimensions` from a config.json's content; experts only for a family that has any.

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
    experts = 0
    if family is not None and family.has_experts:
        experts = whole(next((key for key in EXPERT_KEYS if config.get(key) is not None), EXPERT_KEYS[0]))
    return Dimensions(
        layers=whole("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=whole("head_dim", hidden // heads),
        intermediate=whole("intermediate_size"),
        vocab=whole("vocab_size"),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        experts=experts,
    )
