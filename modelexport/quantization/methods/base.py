"""The terms of all quantisation methods: the numbers that a linear holds, and the tensors that hold them.

A method (``quant_method`` in config.json) is how a checkpoint encodes quantised linears: the names, dtypes, shapes and
packing of their tensors, and the entry of config.json that announces them. Schemes are in compressed-tensors' terms
whatever the method (https://github.com/vllm-project/compressed-tensors), so that a linear read by one method can be
written by another. Importing a method does not import torch: headers are checked without it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeGuard

from modelexport.errors import CheckpointError, shown
from modelexport.quantization.ggml_layouts import LAYOUTS
from modelexport.quantization.methods._patterns import matcher

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Axes = tuple["tuple[int, int] | None", ...]
"""For each dim of a tensor: (the weight's dim that it runs along, elements of the weight for each of its own); None
where it does not vary with the weight. Fewer than its dims: the others do not vary."""

AS_WEIGHT: Axes = ((0, 1), (1, 1))

MOST_PATTERNS = 20_000


class NumberFormatProtocol(Protocol):
    """A number format as a method sees it; :class:`modelexport.quantization.formats.base.NumberFormat` is one."""

    @property
    def name(self) -> str: ...

    @property
    def weight_bits(self) -> int: ...

    @property
    def checkpoint_format(self) -> str: ...

    @property
    def quantised(self) -> bool: ...

    @property
    def group_size(self) -> int | None: ...

    @property
    def has_static_inputs(self) -> bool: ...

    def weight_arguments(self) -> dict[str, Any]: ...

    def input_arguments(self) -> dict[str, Any] | None: ...

    def config_group(self) -> dict[str, Any] | None: ...

    def scheme(self, method: str = ...) -> Scheme: ...

    def dequantise(self, tensors: Mapping[str, Tensor], *, dtype: torch.dtype = ...) -> Tensor: ...


@dataclass(frozen=True)
class StoredTensorSpec:
    """A tensor that must be there: the dtypes and the shapes that it may have, and how it goes with the weight.

    What is written has the first shape, and the scales' dtype if that is among ``dtypes``, else the first of these.
    """

    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    axes: Axes = ()
    most: int = 0
    """Of texts in bytes: how many there may be, in one dim, whatever the shapes."""

    def __str__(self) -> str:
        return f"{' or '.join(self.dtypes)} {self.shapes_text}"

    @property
    def shapes_text(self) -> str:
        """The shapes, ``"[384, 128] or [128, 384]"``."""
        if self.most:
            return f"of at most {self.most} bytes"
        return " or ".join(str(list(shape)) for shape in self.shapes)

    def has_shape(self, shape: tuple[int, ...]) -> bool:
        """Returns whether the tensor may have that shape."""
        return shape in self.shapes or (len(shape) == 1 and 0 < shape[0] <= self.most)


@dataclass(frozen=True)
class StoredView:
    """Another look at a tensor's bytes, which are contiguous: of another dtype and shape.

    Attributes:
        axes: the dims of the weight that its dims run along.
    """

    dtype: str
    shape: tuple[int, ...]
    axes: Axes = ()


@dataclass(frozen=True)
class Scheme:
    """The quantisation of some linears.

    Attributes:
        name: by which config.json has it.
        targets: classes, names or patterns of modules.
        format: the method's word for how the tensors are laid out; compressed-tensors' ``format``, modelopt's
            ``quant_algo``.
        weights, inputs, outputs: compressed-tensors' arguments: ``num_bits``, ``type``, ``symmetric``, ``strategy``,
            ``group_size``, ``block_structure``, ``dynamic``, ...; None for what is not rounded.
        method: the quantisation method that promises the tensors.
    """

    name: str
    targets: tuple[str, ...]
    format: str
    weights: Mapping[str, Any]
    inputs: Mapping[str, Any] | None
    outputs: Mapping[str, Any] | None
    method: str = "compressed-tensors"

    def describe(self) -> str:
        """In words, e.g. ``"int8 weights per channel, int8 activations per token (dynamic)"``."""
        text = f"{_numbers(self.weights)} weights per {_extent(self.weights)}"
        for what, part in (("activations", self.inputs), ("outputs", self.outputs)):
            if part is not None:
                when = "static" if part.get("dynamic") is False else "dynamic"
                text += f", {_numbers(part)} {what} per {_extent(part)} ({when})"
        return text

    @property
    def bits(self) -> int:
        """Bits of a weight.

        Raises:
            CheckpointError: it is none.
        """
        bits = self.weights.get("num_bits")
        if not isinstance(bits, int) or isinstance(bits, bool) or not 1 <= bits <= 16:
            raise CheckpointError(f"quantization_config: num_bits is {shown(bits)}; a number of bits is needed")
        return bits

    @property
    def symmetric(self) -> bool:
        """True where its weights have no zero points."""
        return bool(self.weights.get("symmetric", True))

    @property
    def has_static_inputs(self) -> bool:
        """True where a number is stored by which the inputs are scaled."""
        return self.inputs is not None and self.inputs.get("dynamic") in (False, "local")


@dataclass(frozen=True)
class ReadOnlyNumbers:
    """Numbers that a method decodes, and that no number format holds.

    Attributes:
        name: for people, ``"nf4"``.
    """

    name: str
    scheme: Scheme


Matching = Literal["name", "wildcard", "part"]


EMBEDDING = "Embedding"
"""The class of embeddings, as targets name it; to vLLM a part of its own class's name."""


@dataclass(frozen=True)
class QuantizationConfig:
    """config.json's ``quantization_config``.

    Attributes:
        method: ``quant_method``, e.g. ``"compressed-tensors"``.
        status: ``quantization_status``; transformers loads random weights unless it is ``"compressed"``.
        ignore: modules that are not quantised.
        kv_cache_scheme: arguments as a scheme's, None where the KV cache is not quantised.
        matching: how ``ignore`` and targets are read: as names, or also as shell wildcards, or also as any part of a
            name; ``re:`` begins a regular expression in each.
    """

    method: str
    format: str | None
    status: str | None
    schemes: tuple[Scheme, ...]
    ignore: tuple[str, ...]
    kv_cache_scheme: Mapping[str, Any] | None
    matching: Matching = "name"

    @property
    def is_compressed_tensors(self) -> bool:
        """True where the rules of compressed-tensors apply."""
        return self.method == "compressed-tensors"

    def __post_init__(self) -> None:
        """Reads every pattern.

        Raises:
            CheckpointError: one is no regular expression, or there are more than anybody needs.
        """
        patterns = len(self._ignored) + len(self._by_pattern)
        if patterns > MOST_PATTERNS:
            why = f"{patterns:,} patterns of modules; at most {MOST_PATTERNS:,} are read: list names instead"
            raise CheckpointError(f"config.json: quantization_config has {why}")

    def ignores(self, module: str) -> bool:
        """Returns whether ``ignore`` means the module."""
        return module in self._exactly or any(matches(module) for matches in self._ignored)

    @cached_property
    def _exactly(self) -> frozenset[str]:
        return frozenset(self.ignore)

    @cached_property
    def _ignored(self) -> list[Callable[[str], bool]]:
        """Of ``ignore``, what may match other names than its own."""
        found = {pattern: matcher(pattern, self.matching, "ignore") for pattern in self.ignore}
        return [matches for matches in found.values() if matches is not None]

    def scheme_of(self, module: str, class_name: str = "Linear") -> Scheme | None:
        """The scheme that a module is quantised with: by its name first, then by its class; None if kept."""
        if self.ignores(module):
            return None
        exact = self._by_name.get(module)
        if exact is not None:
            return exact
        for matches, scheme in self._by_pattern:
            if matches(module):
                return scheme
        return next((scheme for scheme in self.schemes if class_name in scheme.targets), None)

    def scheme_of_kind(self, module: str, kind: str) -> Scheme | None:
        """The same for a module of a family's: linears and heads have schemes; and an embedding, if its own name or
        its class is a target: patterns and other classes do not mean it."""
        if kind in ("linear", "head"):
            return self.scheme_of(module)
        if kind != "embedding" or self.ignores(module):
            return None
        named = self._by_name.get(module)
        return named or next((scheme for scheme in self.schemes if EMBEDDING in scheme.targets), None)

    @cached_property
    def _by_name(self) -> dict[str, Scheme]:
        found: dict[str, Scheme] = {}
        for scheme in self.schemes:
            for target in scheme.targets:
                found.setdefault(target, scheme)
        return found

    @cached_property
    def _by_pattern(self) -> list[tuple[Callable[[str], bool], Scheme]]:
        found = (
            (matcher(target, self.matching, scheme.name), scheme)
            for scheme in self.schemes
            for target in scheme.targets
            if target != "Linear"
        )
        return [(matches, scheme) for matches, scheme in found if matches is not None]


@dataclass(frozen=True)
class WeightSlice:
    """The rectangle of a linear's weight that some tensors belong to.

    Attributes:
        shape: of the whole weight, ``[out_features, in_features]``.
        origin: where the rectangle begins.
        extent: its own shape.
    """

    shape: tuple[int, int]
    origin: tuple[int, int]
    extent: tuple[int, int]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> WeightSlice:
        """All of a weight of that shape."""
        return cls((shape[0], shape[1]), (0, 0), (shape[0], shape[1]))


@dataclass(frozen=True)
class KeptSubtree:
    """A part of a model in which nothing is quantised, whatever modules an engine builds of it.

    Engines take stacks of experts apart, and fuse and rename the linears of towers; they then look their own names up
    among the modules that are kept. Only the root is a name that they share.

    Attributes:
        path: the root, without what comes before it: engines wrap models in prefixes of their own. ``*`` stands for a
            layer's number.
        names: the root in full, one name for each layer.
    """

    path: str
    names: tuple[str, ...]

    @property
    def pattern(self) -> str:
        """A regular expression, for ``re.match``, of the root and of all below it, behind any prefix."""
        return rf"(.*\.)?{number_pattern(self.path)}(\..*)?$"


def number_pattern(path: str) -> str:
    """A regular expression of a path in which ``*`` stands for a number."""
    return r"\d+".join(re.escape(piece) for piece in path.split("*"))


@dataclass(frozen=True)
class ModelQuantization:
    """The quantisation of a model, for config.json to describe.

    Attributes:
        formats: every quantised linear -> its number format, in the model's order.
        unquantised: every linear and head that is kept, in the model's order, heads of tied embeddings too.
        embeddings: those of ``formats`` that are no linears: their rows are looked up.
        file_type: of a mixture, llama.cpp's number of it.
        kv_cache: what the KV cache has scales for, by the name in ``kv_caches.CACHES``; None: it has none.
        version: ours, where a method names the producer.
        subtrees: parts of the model that are kept whole; their linears are among ``unquantised``, too.
    """

    formats: Mapping[str, NumberFormatProtocol]
    unquantised: Sequence[str]
    kv_cache: str | None = None
    version: str = ""
    subtrees: Sequence[KeptSubtree] = ()
    embeddings: Sequence[str] = ()
    file_type: int | None = None

    def ignored(self) -> list[str]:
        """Names of kept linears and heads, and patterns of kept subtrees as compressed-tensors encodes them."""
        return [*self.unquantised, *(f"re:{subtree.pattern}" for subtree in self.subtrees)]

    def groups(self) -> list[tuple[NumberFormatProtocol, list[str]]]:
        """The number formats in the order in which they first appear, each with its modules."""
        found: dict[NumberFormatProtocol, list[str]] = {}
        for name, number_format in self.formats.items():
            found.setdefault(number_format, []).append(name)
        return list(found.items())


@dataclass(frozen=True)
class QuantizationFiles:
    """``quantization_config`` for config.json, and files beside it: name -> content."""

    config: dict[str, Any]
    files: Mapping[str, bytes] = field(default_factory=dict)


class Method(Protocol):
    """The protocol of this package's modules, or of each of their ``METHODS``. Tensors of :meth:`encode` are by suffix.

    A number format's own tensors (its *native* form, which its kernels write and read) are those of
    compressed-tensors. ``encode`` takes them into the method's, ``decode`` takes the method's into them, both exactly
    and for any part of a weight that begins and ends where the specs' axes allow a cut.
    """

    METHOD: str
    """``quant_method`` in config.json."""

    ALIASES: tuple[str, ...]
    """Other names of it in config.json; methods without any need not offer this."""

    FORMAT: str | None
    """As ``--format`` has it; None where it can only be read."""

    DESCRIPTION: str
    """One line for people, of methods with a ``FORMAT`` that is no container's."""

    SCALES: str | None
    """Dtype that scales are rounded to as they are made (``"F32"``); None: the model's."""

    KV_SCALES: Mapping[str, str]
    """Where a KV cache's scales stand within a layer's attention: ``"k" -> "k_proj.k_scale"``; empty: nowhere."""

    KV_CACHES: Mapping[str, str | Mapping[str, Any]]
    """The KV caches that it has words for, by their names in ``kv_caches.CACHES`` -> how config.json says so.

    Methods that have none need not offer this."""

    SIDE_FILES: tuple[str, ...]
    """Files beside the weights that say what ``quantization_config`` says, in checkpoints whose config.json lacks it.

    Their content, with ``quant_method``, is then given to :meth:`read`.
    """

    SETTINGS: tuple[str, tuple[str, ...]]
    """Of methods whose config.json may say nothing: a tensor that only their linears have, and the numbers beside it.

    The numbers are then given to :meth:`read` as ``linears``: module -> name -> number. Other methods do not offer
    this.
    """

    KV_SHAPE: tuple[int, ...]
    """The shape of each that holds one number: ``()`` or ``(1,)``. Those of heads are ``[kv_heads, 1, 1]``."""

    KEPT_LINEARS: Mapping[str, str]
    """The last parts of the names of linears that are never quantised -> why; methods that do not offer it: none."""

    HOLDS_HEADS: bool
    """Whether heads may be quantised; methods that do not offer it have unquantised ones."""

    HOLDS_MIXTURES: bool
    """Whether ``--quant`` may name a mixture of block types; methods that do not offer it have none."""

    READS_TIED: bool
    """Whether engines read one quantised tensor as the embedding and the head; methods that do not offer it: no."""

    FUSES_LINEARS: bool
    """Whether engines join linears to one matrix, of one number format; methods that do not offer it: yes."""

    def read(self, value: Mapping[str, Any]) -> QuantizationConfig:
        """Reads a ``quantization_config``.

        Raises:
            CheckpointError: a part of it has the wrong type or is not known.
        """

    def tensor_specs(self, scheme: Scheme, shape: tuple[int, int]) -> dict[str, StoredTensorSpec]:
        """The tensors, by suffix, that a linear of that shape (``[out, in]``) has under a scheme.

        Raises:
            CheckpointError: the scheme, or the shape under it, is not known.
        """

    def layout(self, number_format: NumberFormatProtocol) -> str | None:
        """The method's word for how it lays out such numbers (a scheme's ``format``); None where it cannot.

        Methods with one layout for each kind of numbers need not offer this.
        """

    def refusal(self, number_format: NumberFormatProtocol, shape: tuple[int, int]) -> str | None:
        """Returns why the method cannot encode such a linear, and what can; None where it can."""

    def extras(self, scheme: Scheme, shape: tuple[int, int]) -> dict[str, StoredTensorSpec]:
        """Tensors that such a linear may have besides; methods without any need not offer this."""

    def read_only_name(self, scheme: Scheme) -> str:
        """The name of a scheme's numbers, of methods whose numbers no number format holds; others do not offer this.

        Such a method offers ``dequantise(number_format: ReadOnlyNumbers, tensors, part)``, the weight in float32.
        """

    def views(
        self, scheme: Scheme, stored: Mapping[str, tuple[str, tuple[int, ...]]], shape: tuple[int, int]
    ) -> dict[str, StoredView]:
        """Other looks at tensors, by suffix, in which rows and columns of the weight can be read by themselves.

        They are what ``dequantise`` is given. Methods without any need not offer this.

        Args:
            stored: suffix -> dtype and shape in the file.
        """

    def weight_multiplier(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        """Returns the factors of the inputs before the linear, ``[in]``; methods without any need not offer this."""

    def quantization_files(self, announced: ModelQuantization) -> QuantizationFiles:
        """Returns the quantization config of such a model, and the files beside config.json."""

    def encode(
        self, number_format: NumberFormatProtocol, tensors: Mapping[str, Tensor], part: WeightSlice
    ) -> dict[str, Tensor]:
        """Native tensors in the method's form."""

    def decode(
        self, number_format: NumberFormatProtocol, tensors: Mapping[str, Tensor], part: WeightSlice
    ) -> dict[str, Tensor]:
        """The method's tensors in native form.

        Raises:
            CheckpointError: they hold what the native form cannot say.
        """


def mapping(value: Any, where: str) -> Mapping[str, Any]:
    """``value``, if it is a JSON object.

    Raises:
        CheckpointError: it is not.
    """
    if not isinstance(value, dict):
        raise CheckpointError(f"config.json: {shown(where)} must be an object, is {type(value).__name__}")
    return value


def optional(value: Any, where: str) -> Mapping[str, Any] | None:
    """``value``, if it is a JSON object or null.

    Raises:
        CheckpointError: it is neither.
    """
    return None if value is None else mapping(value, where)


def is_size(value: Any) -> TypeGuard[int]:
    """Returns whether ``value`` is a number of elements, one or more."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def strings(value: Any, where: str) -> tuple[str, ...]:
    """``value``, if it is a list of names or patterns; none of them for null.

    Raises:
        CheckpointError: it is something else.
    """
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str) or not all(isinstance(s, str) for s in value):
        raise CheckpointError(
            f"config.json: quantization_config: {shown(where)} must be a list of names, is {shown(value)}"
        )
    return tuple(value)


def _numbers(part: Mapping[str, Any]) -> str:
    kind = "fp" if part.get("type") == "float" else shown(part.get("type", "?"))
    if kind in LAYOUTS:
        return kind
    return f"{kind}{shown(part.get('num_bits', '?'))}{'' if part.get('symmetric', True) else ' asymmetric'}"


def _extent(part: Mapping[str, Any]) -> str:
    strategy = part.get("strategy", "?")
    if strategy in ("group", "tensor_group"):
        return f"group of {shown(part.get('group_size'))}"
    block = part.get("block_structure")
    if strategy == "block" and isinstance(block, list):
        return f"block of {shown('x'.join(map(str, block)))}"
    return shown(strategy)
