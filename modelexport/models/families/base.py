"""A model family as data: its modules, how each is cut, and the keys of its sizes in config.json.

A family file holds one :class:`Family` and no code. Names are those on disk in a Hugging Face checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from modelexport.checkpoints.draft_names import PREFIX

Partition = Literal["column", "row", "replicated"]
Kind = Literal["linear", "norm", "embedding", "head", "router", "vector", "other"]

MOST_DIGITS = 9


@dataclass(frozen=True, kw_only=True)
class ExpertStack:
    """Linears of all experts of a layer in one tensor, whose dim 0 counts the experts, or is theirs joined.

    Attributes:
        linears: (role, path) of each, the path relative to the layer's prefix and with ``{e}`` for the expert's number,
            in their order along the output features; all have as many of these.
        parameter: of theirs: ``weight`` or ``bias``.
        transposed: whether the tensor is ``[experts, in, out]``, and not ``[experts, out, in]``.
        interleaved: whether the output features are of each linear in turn, and not of one behind those of the other.
        joined: of a tensor without a dim of its own for the experts (``[experts * out, in]``, and ``[experts * in,
            out]`` where it is transposed): how many lie there one behind the other.
        axis: the model axis that is cut: of the output features of each, or of the input features where the role ends
            in ``.down``; None: nothing is.
        why: why they are never quantised; "" where they may be.
    """

    linears: tuple[tuple[str, str], ...]
    parameter: str = "weight"
    transposed: bool = False
    interleaved: bool = False
    joined: int | None = None
    axis: str | None = None
    why: str = ""

    def by_expert(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the tensor with a dim 0 that counts the experts."""
        return shape if self.joined is None else (self.joined, shape[0] // self.joined, *shape[1:])


@dataclass(frozen=True, kw_only=True)
class Module:
    """One module of a model, or, with ``{e}`` in its path, one of every expert of a layer.

    Attributes:
        path: its name, relative to the layer's prefix for modules of a decoder layer; ``{e}`` is an expert's number.
        kind: what it is. Only a ``linear`` is quantised: a ``router`` decides between experts on small differences. A
            ``vector`` is a parameter of one dim that stands beside a module's weight, or alone, and is no bias. What
            is ``other`` stays as it is: a convolution, a stack of experts, a part of a model that is no language model.
        role: what it does, e.g. ``"attention.q"``; modules that an engine fuses share ``fused_into``.
        partition: ``column`` cuts the output features (dim 0), ``row`` the input features (dim 1).
        axis: the model axis that the features of that dimension run along: ``heads``, ``kv_heads``, ``head`` (one of
            them), ``intermediate``, ``vocab``, ``experts`` or one of the family's own (:class:`Axis`); None for the
            hidden one, and for a fused module. A module along an axis of size 0 is not there.
        across: the same for the dimension of a weight that is not cut.
        parts: of a module that is fused on disk: (role, axis) of each that it consists of, in order along dim 0.
        fused_into: the fused module of an engine that this one becomes a part of, if any.
        bias: whether it has one: True, False, or the key of config.json that says so; None where nothing does.
        parameter: the name of its tensor, where it is not ``weight`` (of a ``vector``).
        layers: which layers have it: by their numbers, or in families whose first layers are ``dense`` and whose
            others are not.
        unless: an axis: models along which anything runs do not have the module.
        shape: of its tensor, where no axes make it: of each dim, a number or the name of a model axis.
        why: why it stays as it is, of a linear that is never quantised, or of a stack of them.
        dim: the dimension that ``axis`` runs along and that is cut, where ``partition`` does not say: of a stack.
        stacked: whether dim 0 counts a layer's experts.
        either_way: whether checkpoints of the model have it with its last two dims in either order.
        experts: of a stack of experts' linears: which they are; None where they cannot be taken apart.
        in_memory: what transformers calls the module, where that is not its name on disk: in full, with ``{i}`` for
            the layer's number and ``{e}`` for the expert's.
    """

    path: str
    kind: Kind
    role: str
    partition: Partition = "replicated"
    axis: str | None = None
    parts: tuple[tuple[str, str], ...] = ()
    fused_into: str | None = None
    bias: str | bool | None = None
    across: str | None = None
    parameter: str = "weight"
    layers: Literal["all", "dense", "sparse"] | frozenset[int] = "all"
    unless: str | None = None
    shape: tuple[int | str, ...] | None = None
    why: str = ""
    dim: int | None = None
    stacked: bool = False
    either_way: bool = False
    experts: ExpertStack | None = None
    in_memory: str = ""

    @property
    def cut_dim(self) -> int | None:
        """The dimension of its weight that tensor parallelism cuts; None: every rank has it whole."""
        if self.partition == "replicated":
            return None
        return self.dim if self.dim is not None else {"column": 0, "row": 1}[self.partition]

    @property
    def is_expert(self) -> bool:
        """True if a layer has one such module for each expert."""
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
        """Returns whether config.json announces a bias."""
        return bool(config.get(self.bias)) if isinstance(self.bias, str) else bool(self.bias)


@dataclass(frozen=True, kw_only=True)
class Axis:
    """A model axis that not every family has, by the keys of config.json that say its size.

    Attributes:
        features: keys that are added up: the features of a head, or of whatever ``times`` counts; none: one.
        times: the key of how many of these there are; None for one.
        heads: whether ``times`` counts attention heads, which no cut may separate.
        optional: whether models may lack it: where a key is missing, null or 0.
        of, each: in place of keys, another axis (``hidden`` too) and how many features there are for each of its own,
            side by side: of each head its query, key and value.
    """

    features: tuple[str, ...] = ()
    times: str | None = None
    heads: bool = False
    optional: bool = False
    of: str = ""
    each: int = 1


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """A module whose outputs may be divided by a number each, where those that read them are multiplied by it.

    The function of the model stays the same: that is what activations' outliers are moved into weights by.

    Attributes:
        source: role of a norm, or of a linear (or of a part of one that is fused on disk) that nothing but products
            lies between and its readers.
        into: roles of all that read it, routers too; those that a layer has not are skipped. Where both are experts',
            each expert's source goes into its own.
        part: of a derived family, which tells modules by their paths (``*`` for an expert's number) and not by roles:
            the role of the part of a fused source that is scaled; "" for the whole.
        share: the same where no roles are known: which of how many equal parts of the source's rows.
        layers: those where it holds; None: all.
        offset: what is added to a norm's weight before anything is multiplied by it, where that is not the same for
            all norms of the family.
    """

    source: str
    into: tuple[str, ...]
    part: str = ""
    share: tuple[int, int] | None = None
    layers: frozenset[int] | None = None
    offset: float | None = None


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model family: every model whose ``model_type`` is ``name`` or one of ``aliases``.

    Attributes:
        variants: model types that lack some of the modules -> the architecture's name and the roles of these.
        layer_prefix: name of decoder layer ``i``, with ``{i}``.
        before, layer, after: modules ahead of the decoder layers, in each of them, and behind them; written
            in this order.
        ignored_tensors: suffixes of tensors that carry no weights (buffers that old checkpoints saved).
        ignored_patterns: patterns that are searched for in the names of further ones -> why they are left out.
        axes: its own, beside those that every family has.
        dense_layers: the key of config.json that counts the first layers, which have no experts; None: all have.
        scalings: what scales into what, in a decoder layer, in the order in which it is done. Linears come first: their
            rows, which read a norm, are then no larger than others merely because what reads them is small.
        dimensions: of a family that is derived from one model, or declared for a part of one: that model's.
        notes: what a user should know of how its models are exported, a line each.
        defaults: what holds where config.json says nothing, by its keys. Files of models that transformers saved, or
            their makers wrote, leave out what their class has anyway.
        keys: what config.json calls a key that has another name in most of them: ``{"hidden_size": "n_embd"}``.
        mlp_ratio: where nothing says ``intermediate_size``: so many times the hidden size; 0: it must be said.
        norm_offset: what is added to a norm's weight before anything is multiplied by it.
        old_prefix: what the names of its tensors begin with, but in old checkpoints did not.
        linears: of a derived family: every Linear in memory, ``{i}`` for a layer's number, and that which its weight
            is saved under, with the layers that have it.
        is_part: whether it was declared for a model that is a part of this one; ``dimensions`` are then of the part.
        carried: patterns that are searched for in the names of tensors beside the language model's, which are taken
            over as they are.
        norms_centre: whether norms take the mean away first, as LayerNorm does.
        computed_as: the model type that transformers computes its language models as, where that is another.
    """

    name: str
    architecture: str
    aliases: tuple[str, ...] = ()
    variants: Mapping[str, tuple[str, tuple[str, ...]]] = field(default_factory=dict)
    layer_prefix: str = "model.layers.{i}"
    before: tuple[Module, ...]
    layer: tuple[Module, ...]
    after: tuple[Module, ...]
    ignored_tensors: tuple[str, ...] = field(default=())
    ignored_patterns: Mapping[str, str] = field(default_factory=dict)
    axes: Mapping[str, Axis] = field(default_factory=dict)
    dense_layers: str | None = None
    scalings: tuple[Scaling, ...] = ()
    dimensions: Dimensions | None = None
    notes: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    mlp_ratio: int = 0
    norm_offset: float = 0.0
    norms_centre: bool = False
    old_prefix: str = ""
    linears: tuple[tuple[str, str, frozenset[int]], ...] = ()
    is_part: bool = False
    carried: tuple[str, ...] = ()
    computed_as: str = ""

    def of_type(self, model_type: str) -> Family:
        """The family as the models of one of its types have it."""
        if model_type not in self.variants:
            return self
        architecture, lacking = self.variants[model_type]
        layer = tuple(module for module in self.layer if module.role not in lacking)
        return replace(self, name=model_type, architecture=architecture, variants={}, layer=layer)

    def complete(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """``config`` with what its models leave unsaid, and by the keys that most others have."""
        said = {key: value for key, value in config.items() if value is not None}
        own = {key: said[name] for key, name in self.keys.items() if name in said}
        return {**config, **{key: value for key, value in self.defaults.items() if key not in said}, **own}

    @property
    def is_derived(self) -> bool:
        """True if it was derived from transformers for one model, and not declared in a file."""
        return self.dimensions is not None and not self.is_part

    @property
    def has_experts(self) -> bool:
        """True if its layers have experts."""
        return any(module.is_expert for module in self.layer)

    @property
    def has_stacks(self) -> bool:
        """True if its experts are stacked in tensors that can be taken apart."""
        return any(module.experts is not None for module in self.layer)

    def apart(self) -> Family:
        """The same for checkpoints in which every expert has linears of its own, in place of stacks of them."""
        stacks = [module.experts for module in self.layer if module.experts is not None]
        if not stacks:
            return self
        biased = {path for stack in stacks if stack.parameter == "bias" for _, path in stack.linears}
        layer: list[Module] = []
        for module in self.layer:
            if module.experts is None:
                layer.append(module)
            elif module.experts.parameter == "weight":
                layer += _expert_linears(module, module.experts, biased)
        dimensions = self.dimensions
        if dimensions is not None:
            counted = ((module.experts, module.shape[0]) for module in self.layer if module.experts and module.shape)
            counts = [stack.joined or size for stack, size in counted]
            dimensions = replace(dimensions, experts=max(count for count in counts if isinstance(count, int)))
        return replace(self, layer=tuple(layer), dimensions=dimensions)

    def below(self, prefix: str, inside: str, dimensions: Dimensions, names: Collection[str]) -> Family:
        """The same for a model that it is a part of.

        Args:
            prefix: in front of its tensors' names, ``"language_model."``.
            inside: what that stands in place of, ``"model."``; "" where nothing.
            dimensions: its own.
            names: every tensor of the checkpoint. The head may stand beside the part.
        """
        outer = prefix.strip(".").split(".") if prefix else []
        modules = {name.rpartition(".")[0] for name in names}

        def placed(module: Module) -> Module:
            paths = [
                ".".join([*outer[:depth], module.path.removeprefix(inside)]) for depth in range(len(outer), -1, -1)
            ]
            own = next((path for path in paths if path in modules), paths[0]) if module.kind == "head" else paths[0]
            return replace(module, path=own, in_memory="")

        return replace(
            self,
            layer_prefix=prefix + self.layer_prefix.removeprefix(inside),
            before=tuple(map(placed, self.before)),
            layer=tuple(replace(module, in_memory="") for module in self.layer),
            after=tuple(map(placed, self.after)),
            dimensions=dimensions,
            linears=(),
            old_prefix="",
            is_part=not self.is_derived,
        )

    def as_in(self, names: Collection[str]) -> Family:
        """The same as a checkpoint whose tensors have these names has it: with stacks of experts, or these apart."""
        if not self.has_stacks:
            return self
        layers = self._before_number
        stacks = (module.experts for module in self.layer if module.experts is not None)
        firsts = {f".{path.format(e=0)}." for stack in stacks for _, path in stack.linears}
        is_apart = any(name.startswith(layers) and any(first in name for first in firsts) for name in names)
        return self.apart() if is_apart else self

    @property
    def attention(self) -> str:
        """The path of what caches keys and values in a layer; "" where nothing is known to."""
        linears = (module for module in self.layer if module.kind == "linear" and module.role.startswith("attention."))
        return next((module.path.rpartition(".")[0] for module in linears), "")

    def modules_of_layer(self, dimensions: Dimensions, layer: int) -> Iterator[tuple[str, int | None, Module]]:
        """(path, expert, module) of every module of a layer: experts one by one, where the first of theirs stands."""
        modules = [module for module in self.layer if dimensions.has(module, layer)]
        experts = [module for module in modules if module.is_expert]
        for module in modules:
            if not module.is_expert:
                yield module.path, None, module
            elif module is experts[0]:
                for e in range(dimensions.experts):
                    yield from ((each.path.format(e=e), e, each) for each in experts)

    def left_out(self, tensor: str, dimensions: Dimensions) -> str | None:
        """The reason why a tensor of a checkpoint is no part of the model, or None where it may be one."""
        if tensor.endswith(self.ignored_tensors or ("\0",)):
            return "a buffer that every engine computes itself"
        if self.draft_root(tensor, dimensions) is not None:  # transformers ignores them by numbers that it knows
            return None
        for pattern, why in self.ignored_patterns.items():
            if re.search(pattern, tensor):
                return why
        return None

    @cached_property
    def _before_number(self) -> str:
        """The names of all decoder layers up to their number: ``"model.layers."``."""
        return self.layer_prefix.partition("{i}")[0]

    def draft_root(self, tensor: str, dimensions: Dimensions) -> str | None:
        """The name of the part of the model that a draft layer's tensor is below, ``"model.layers.61"`` or ``"mtp"``;
        None for tensors that are of no draft layer: see :mod:`modelexport.models.families.drafts`."""
        prefix = self._before_number
        if tensor.startswith(prefix):
            number, _, path = tensor[len(prefix) :].partition(".")
            if path and number.isdecimal() and len(number) <= MOST_DIGITS:
                behind = 0 <= int(number) - dimensions.layers < dimensions.prediction_layers
                return f"{prefix}{number}" if behind else None
        root = mtp_root(tensor)
        if root is None or any(mtp_root(f"{m.path}.") for m in (*self.before, *self.layer, *self.after)):
            return None
        return root


def _expert_linears(module: Module, stack: ExpertStack, biased: Collection[str]) -> Iterator[Module]:
    """The linears that every expert has in place of a part of a stack."""
    for role, path in stack.linears:
        partition: Partition = "row" if role.endswith(".down") else "column"
        out_in = list(stack.by_expert(tuple(size for size in (module.shape or ()) if isinstance(size, int))))[1:]
        if stack.transposed:
            out_in.reverse()
        yield Module(
            path=path,
            kind="linear",
            role=role,
            partition=partition if stack.axis is not None else "replicated",
            axis=stack.axis,
            shape=(out_in[0] // len(stack.linears), out_in[1]) if len(out_in) == 2 else None,
            fused_into=f"{path.partition('.{e}.')[0]}.w13" if role in ("expert.gate", "expert.up") else None,
            bias=path in biased,
            layers=module.layers,
            why=stack.why,
        )


def mtp_root(name: str) -> str | None:
    """A name up to its first part that says multi-token prediction; None where none does."""
    if PREFIX not in name:  # of a hundred thousand names none
        return None
    parts = name.split(".")
    end = next((number for number, part in enumerate(parts[:-1], 1) if part.startswith(PREFIX)), None)
    return None if end is None else ".".join(parts[:end])


@dataclass(frozen=True)
class AxisSize:
    """Features along a model axis, those of them that no cut may separate, and attention heads (0: it has none).

    ``shared``: of keys and values, whose heads ranks share where there are fewer of them than ranks.
    """

    size: int
    unit: int = 1
    heads: int = 0
    shared: bool = False

    def times(self, each: int) -> AxisSize:
        """With ``each`` features in place of one."""
        return AxisSize(self.size * each, self.unit * each, self.heads, self.shared)


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
    dense_layers: int = 0
    prediction_layers: int = 0
    own_axes: tuple[tuple[str, AxisSize], ...] = ()

    @property
    def most_blocks(self) -> int:
        """Layers, or experts of all layers where these are more: what a loop over the model runs over."""
        return max(self.layers, self.experts * (self.layers - self.dense_layers))

    def axis(self, name: str) -> AxisSize:
        """The numbers of a model axis."""
        return self._axes[name]

    @cached_property
    def _axes(self) -> dict[str, AxisSize]:
        standard = {
            "heads": AxisSize(self.heads * self.head_dim, self.head_dim, self.heads),
            "kv_heads": AxisSize(self.kv_heads * self.head_dim, self.head_dim, self.kv_heads, shared=True),
            "intermediate": AxisSize(self.intermediate),
            "vocab": AxisSize(self.vocab),
            "experts": AxisSize(self.experts),
            "hidden": AxisSize(self.hidden),
            "head": AxisSize(self.head_dim),
        }
        return standard | dict(self.own_axes)

    def axis_size(self, axis: str) -> int:
        """Features along a model axis, e.g. ``heads * head_dim``."""
        return self.axis(axis).size

    def axis_unit(self, axis: str) -> int:
        """Features that no cut along this axis may separate (a head)."""
        return self.axis(axis).unit

    def axis_heads(self, axis: str) -> int:
        """Attention heads along this axis, 0 where there are none."""
        return self.axis(axis).heads

    def has(self, module: Module, layer: int) -> bool:
        """Returns whether a decoder layer has a module of its family's."""
        if isinstance(module.layers, frozenset):
            if layer not in module.layers:
                return False
        elif module.layers != "all" and (module.layers == "dense") != (layer < self.dense_layers):
            return False
        if module.unless is not None and self.axis_size(module.unless):
            return False
        axes = [axis for _, axis in module.axes] + ([module.across] if module.across is not None else [])
        return all(self.axis_size(axis) for axis in axes)

    def stored_shapes(self, module: Module) -> tuple[tuple[int, ...], ...]:
        """The shapes that a module's weight may have in a checkpoint; the first is :meth:`weight_shape`."""
        shape = self.weight_shape(module)
        swapped = (*shape[:-2], shape[-1], shape[-2]) if module.either_way else shape
        return (shape,) if swapped == shape else (shape, swapped)

    def weight_shape(self, module: Module) -> tuple[int, ...]:
        """The shape of a module's weight, ``[out_features, in_features]``; of a norm or vector ``[features]``."""
        if module.shape is not None:
            return tuple(size if isinstance(size, int) else self.axis_size(size) for size in module.shape)
        along = sum(self.axis_size(axis) for _, axis in module.axes) if module.axes else self.hidden
        if module.kind in ("norm", "vector"):
            return (along,)
        across = self.hidden if module.across is None else self.axis_size(module.across)
        return (across, along) if module.partition == "row" else (along, across)
