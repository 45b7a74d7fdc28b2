"""Mixtures: llama.cpp's names for an assignment of block types to all tensors of a model (``q4_k_m``).

Follows ``llama-quantize`` of the llama.cpp that llama-cpp-python 0.3.36 contains (src/llama-quant.cpp): a mixture has a
block type, and rules that give some tensors another one: the head, the value projections, ``ffn_down`` of some layers.
What a tensor is follows from its name in a GGUF file. Rows that blocks do not divide take a type of smaller blocks.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from modelexport.quantization import formats
from modelexport.quantization.ggml_layouts import LAYOUTS

if TYPE_CHECKING:
    import torch

    from modelexport.quantization.formats.base import NumberFormat

__all__ = [
    "MIXTURES",
    "Mixture",
    "MixtureFormats",
    "MixtureModel",
    "MixtureTensor",
    "find",
    "names",
    "number_format_of",
    "of_file_type",
    "resolve",
]

Kind = Literal["embedding", "head", "v", "k", "output", "down", "other"]

_KINDS: tuple[tuple[str, Kind], ...] = (
    (r"output\.weight", "head"),
    (r"(per_layer_)?token_embd\.weight", "embedding"),
    (r".*attn_(qkv|kv_b|v)\.weight", "v"),
    (r".*attn_k\.weight", "k"),
    (r".*attn_output\.weight", "output"),
    (r".*ffn_down.*", "down"),
)
"""Names of tensors in a GGUF file -> what they are to a mixture; the first that matches counts."""

_KEPT = (
    ("", r".*indexer\.[qk]_proj\.weight", "the projections of MiniMax's indexers"),
    (
        "glm5-next",
        r".*(indexer.+|hc_.+|ssm_([fg]_[ab]|beta)|attn_(kv_a_mqa|k_b|v_b))\.weight",
        "the small linears of GLM-5.3's attention",
    ),
)
"""Tensors that no mixture quantises: an architecture ("": any), their names, and what they are."""

_EIGHT_BITS = (("glm5-next", r".*attn_q_[ab]\.weight"),)
"""Tensors that every mixture gives Q8_0: an architecture and their names."""

_SMALLER = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "IQ4_XS": "IQ4_NL"}
"""The type of smaller blocks that takes a type's place where its own do not divide a row."""

_MXFP4 = "mxfp4-wo"
"""The number format of the block type MXFP4."""

_LARGE = {"llama": 80, "qwen2": 80, "deci": 80, "olmo": 80, "jais2": 68}
"""The number of layers of the models of an architecture whose value projections get more bits."""


@dataclass(frozen=True)
class TypeRule:
    """A block type for the tensors of a kind that meet every condition.

    Attributes:
        to: the block type.
        first: only the first so many tensors of the kind.
        part: only the layers before ``layers // part``.
        more: only the layers of the first eighth, of the last, and every third of those between.
        queries: only models with at least so many query heads for each key/value head.
        eight: only models with eight experts a layer (True), or only others (False).
        falcon: only models of the architecture ``falcon`` (True), or only others (False).
        importance: only where blocks are fitted with the importance of inputs (True), or only where they are not.
    """

    to: str
    first: int | None = None
    part: int | None = None
    more: bool = False
    queries: int = 0
    eight: bool | None = None
    falcon: bool | None = None
    importance: bool | None = None

    def holds(self, model: MixtureModel, number: int, count: int) -> bool:
        """Returns whether a tensor meets the conditions, the ``number``-th (from 0 on) of ``count`` of its kind."""
        return (
            (self.first is None or number < self.first)
            and (self.part is None or number < count // self.part)
            and (not self.more or _gets_more(number, count))
            and model.queries >= self.queries
            and self.eight in (None, model.experts == 8)
            and self.falcon in (None, model.architecture == "falcon")
            and self.importance in (None, model.importance)
        )


def _gets_more(number: int, count: int) -> bool:
    eighth = count // 8
    return number < eighth or number >= 7 * count // 8 or (number - eighth) % 3 == 2


@dataclass(frozen=True)
class Mixture:
    """A mixture of block types.

    Attributes:
        name: as ``--quant`` has it; llama.cpp spells it in capitals.
        file_type: llama.cpp's number of it, ``general.file_type`` of a file.
        block_type: of the tensors that no rule means.
        experts: of stacks of experts; "": as the others.
        v, output, down: the rules of ``attn_v`` (and what is fused with it), ``attn_output`` and ``ffn_down``; of each,
            the first that holds counts.
        needs_importance: whether llama.cpp makes it with the importance of inputs only.
    """

    name: str
    file_type: int
    block_type: str
    experts: str = ""
    v: tuple[TypeRule, ...] = ()
    output: tuple[TypeRule, ...] = ()
    down: tuple[TypeRule, ...] = ()
    needs_importance: bool = False

    def _rules(self) -> tuple[TypeRule, ...]:
        return (*self.v, *self.output, *self.down)

    def given_types(self) -> list[str]:
        """The block types that it gives tensors whose rows are multiples of a block, in most models."""
        rules = (rule.to for rule in self._rules() if rule.eight is not True and rule.falcon is not True)
        head = "Q8_0" if self.block_type == "Q8_0" else "Q6_K"
        return list(dict.fromkeys((self.block_type, head, *filter(None, (self.experts,)), *rules)))

    def block_types(self) -> list[str]:
        """Every block type that it may give a tensor, those of smaller blocks included."""
        found = [*self.given_types(), *(rule.to for rule in self._rules()), "Q8_0"]
        return list(dict.fromkeys([*found, *(_SMALLER[each] for each in found if each in _SMALLER)]))


_EIGHT = TypeRule("Q5_K", eight=True, falcon=False)
_IQ4_V = (TypeRule("Q5_K", queries=4),)
_IQ4_DOWN = (TypeRule("Q5_K", part=8, importance=False),)

MIXTURES = {
    mixture.name: mixture
    for mixture in (
        Mixture(
            "q2_k",
            10,
            "Q2_K",
            v=(TypeRule("Q4_K", queries=4), TypeRule("Q3_K")),
            output=(_EIGHT, TypeRule("Q3_K", falcon=False)),
            down=(TypeRule("Q3_K"),),
        ),
        Mixture(
            "q2_k_s",
            21,
            "Q2_K",
            v=(TypeRule("Q4_K", queries=4),),
            down=(TypeRule("Q4_K", part=8),),
            needs_importance=True,
        ),
        Mixture("q3_k_s", 11, "Q3_K", output=(_EIGHT,)),
        Mixture(
            "q3_k_m",
            12,
            "Q3_K",
            v=(TypeRule("Q5_K", first=2), TypeRule("Q4_K")),
            output=(_EIGHT, TypeRule("Q4_K", falcon=False)),
            down=(TypeRule("Q5_K", part=16), TypeRule("Q4_K", falcon=False), TypeRule("Q4_K", more=True)),
        ),
        Mixture(
            "q3_k_l",
            13,
            "Q3_K",
            v=(TypeRule("Q5_K"),),
            output=(TypeRule("Q5_K", eight=False, falcon=False), TypeRule("Q4_K", falcon=True)),
            down=(TypeRule("Q4_K", falcon=True), TypeRule("Q5_K")),
        ),
        Mixture(
            "q4_k_s",
            14,
            "Q4_K",
            v=(TypeRule("Q5_K", first=4),),
            output=(_EIGHT,),
            down=(TypeRule("Q5_K", part=8, falcon=False),),
        ),
        Mixture(
            "q4_k_m",
            15,
            "Q4_K",
            v=(TypeRule("Q6_K", more=True),),
            output=(_EIGHT,),
            down=(
                TypeRule("Q6_K", part=16, falcon=True),
                TypeRule("Q5_K", more=True, falcon=True),
                TypeRule("Q6_K", more=True, falcon=False),
            ),
        ),
        Mixture("q5_k_s", 16, "Q5_K"),
        Mixture("q5_k_m", 17, "Q5_K", v=(TypeRule("Q6_K", more=True),), down=(TypeRule("Q6_K", more=True),)),
        Mixture("q6_k", 18, "Q6_K"),
        Mixture("q4_0", 2, "Q4_0", down=(TypeRule("Q4_1", part=8, importance=True),)),
        Mixture("q4_1", 3, "Q4_1"),
        Mixture("q5_0", 8, "Q5_0", down=(TypeRule("Q5_1", part=8, importance=True),)),
        Mixture("q5_1", 9, "Q5_1"),
        Mixture("q8_0", 7, "Q8_0"),
        Mixture("mxfp4_moe", 38, "Q8_0", experts="MXFP4"),
        Mixture("iq4_nl", 25, "IQ4_NL", v=_IQ4_V, output=(_EIGHT,), down=_IQ4_DOWN),
        Mixture("iq4_xs", 30, "IQ4_XS", v=_IQ4_V, output=(_EIGHT,), down=_IQ4_DOWN),
    )
}


@dataclass(frozen=True)
class MixtureModel:
    """The facts of a model that rules ask for.

    Attributes:
        architecture: llama.cpp's name of it.
        layers: decoder layers in the file.
        heads, kv_heads: attention heads of the first layer.
        experts: of a layer; 0 where it has none.
        tied: whether the embedding serves as the head.
        importance: whether blocks are fitted with the importance of inputs.
    """

    architecture: str
    layers: int
    heads: int
    kv_heads: int
    experts: int
    tied: bool
    importance: bool

    @property
    def queries(self) -> int:
        """Query heads for each key/value head."""
        return self.heads // self.kv_heads if self.kv_heads else 0

    @property
    def is_large(self) -> bool:
        """True for the sizes whose value projections are small beside the rest."""
        if self.layers != _LARGE.get(self.architecture):
            return False
        return self.architecture != "llama" or (self.experts != 8 and self.heads != self.kv_heads)


@dataclass(frozen=True)
class MixtureTensor:
    """A tensor of a GGUF file that a mixture decides about.

    Attributes:
        name: in the file.
        modules: those whose weights it holds.
        shape: of each weight, ``(out_features, in_features)``.
        layer: its decoder layer; None outside.
    """

    name: str
    modules: tuple[str, ...]
    shape: tuple[int, int]
    layer: int | None

    @property
    def is_stack(self) -> bool:
        """True where it holds a layer's experts."""
        return "_exps." in self.name

    @property
    def kind(self) -> Kind:
        """The kind that rules of a mixture are for."""
        return next((kind for pattern, kind in _KINDS if re.fullmatch(pattern, self.name)), "other")


@dataclass(frozen=True)
class MixtureFormats:
    """The number formats that a mixture gives the modules of one model.

    Attributes:
        formats: module -> its number format.
        kept: modules that no block type holds -> why.
        notes: what has another type than the mixture says, a line each.
    """

    mixture: Mixture
    formats: Mapping[str, NumberFormat]
    kept: Mapping[str, str]
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The mixture's."""
        return self.mixture.name


def find(name: str) -> Mixture | None:
    """Returns the mixture of that name, in capitals or with "-" for "_" too; None where there is none."""
    return MIXTURES.get(name.lower().replace("-", "_"))


def names() -> list[str]:
    """Returns the names of all mixtures."""
    return list(MIXTURES)


def of_file_type(number: object) -> Mixture | None:
    """Returns the mixture with that ``general.file_type``; None where it is none of them."""
    return next((mixture for mixture in MIXTURES.values() if mixture.file_type == number), None)


def number_format_of(
    block_type: str, *, observer: str = "amax", scale_dtype: torch.dtype | None = None
) -> NumberFormat:
    """Returns the number format of a block type.

    Args:
        observer, scale_dtype: see :class:`~modelexport.quantization.formats.base.NumberFormat`.
    """
    name = LAYOUTS[block_type].number_format if block_type in LAYOUTS else _MXFP4
    return formats.get(name, observer=observer, scale_dtype=scale_dtype)


def resolve(
    mixture: Mixture,
    tensors: Iterable[MixtureTensor],
    model: MixtureModel,
    number_format: Callable[[str], NumberFormat] = number_format_of,
) -> MixtureFormats:
    """The number format of every module that a mixture means.

    Args:
        tensors: all of the file that may be quantised, in any order. A module that has several of them gets the type of
            most bits among theirs.
        number_format: that of a block type.
    """
    given: dict[str, str] = {}
    kept: dict[str, str] = {}
    smaller: Counter[tuple[str, str, str, int]] = Counter()
    joined: Counter[tuple[str, str]] = Counter()
    for tensor, wanted in _wanted(mixture, tensors, model, number_format):
        rows, columns = tensor.shape
        taken = _fitting(wanted, columns, number_format)
        if rows < 2:  # one dim to llama.cpp
            kept.update(dict.fromkeys(tensor.modules, "one row: llama.cpp keeps vectors as they are"))
            continue
        own = [what for name, pattern, what in _KEPT if name in ("", model.architecture) and _is(tensor, pattern)]
        if own:
            kept.update(dict.fromkeys(tensor.modules, f"llama.cpp keeps {own[0]}"))
            continue
        if taken is None:
            why = f"{columns:,} input features are no multiple of the block of any type"
            kept.update(dict.fromkeys(tensor.modules, why))
            continue
        if taken != wanted:
            smaller[_general(tensor.name), taken, wanted, columns] += len(tensor.modules)
        for module in tensor.modules:
            before = given.setdefault(module, taken)
            if before != taken:
                joined[before, taken] += 1
                given[module] = max(before, taken, key=lambda name: _bits(number_format(name)))
    notes = [
        f"{count} {'linear' if count == 1 else 'linears'} ({name} of the file): {taken} in place of {wanted}: "
        f"{columns:,} input features are no multiple of {_block(number_format(wanted))}"
        for (name, taken, wanted, columns), count in smaller.items()
    ]
    notes += [
        f"{count} {'linear is' if count == 1 else 'linears are'} several tensors of the file, {one} and {other} by "
        f"{mixture.name}: the one with more bits is taken for both"
        for (one, other), count in joined.items()
    ]
    if mixture.needs_importance and not model.importance:
        notes.append(
            f"{mixture.name} without the importance of inputs loses much, and llama.cpp refuses to make it: "
            "--algorithm imatrix finds it"
        )
    found = {module: number_format(block_type) for module, block_type in given.items() if module not in kept}
    return MixtureFormats(mixture, found, kept, tuple(notes))


def _wanted(
    mixture: Mixture,
    tensors: Iterable[MixtureTensor],
    model: MixtureModel,
    number_format: Callable[[str], NumberFormat],
) -> Iterator[tuple[MixtureTensor, str]]:
    """Each tensor with its block type, whether that type's blocks divide a row or not."""
    ordered = sorted(tensors, key=lambda tensor: (-1 if tensor.layer is None else tensor.layer, tensor.name))
    counts = Counter(tensor.kind for tensor in ordered)
    seen: Counter[Kind] = Counter()
    for tensor in ordered:
        kind = tensor.kind
        number, count = seen[kind], counts[kind]
        seen[kind] += 1
        if kind == "down":
            count = model.layers
            if model.experts > 1 and tensor.layer is not None:  # a layer has shared experts and others
                number = tensor.layer
        if mixture.experts and tensor.is_stack:
            yield tensor, mixture.experts
        elif any(name == model.architecture and _is(tensor, pattern) for name, pattern in _EIGHT_BITS):
            yield tensor, "Q8_0"
        else:
            yield tensor, _block_type(mixture, model, kind, number, count, tensor.shape[1], number_format)


def _block_type(
    mixture: Mixture,
    model: MixtureModel,
    kind: Kind,
    number: int,
    count: int,
    columns: int,
    number_format: Callable[[str], NumberFormat],
) -> str:
    """The block type of a tensor, whether its blocks divide a row or not."""
    own = mixture.block_type
    if kind == "head" or (kind == "embedding" and model.tied):
        if own == "Q8_0" or model.architecture == "falcon" or columns % _block(number_format(own)):
            return "Q8_0"
        return "Q6_K"
    rules: Mapping[Kind, Sequence[TypeRule]] = {"v": mixture.v, "output": mixture.output, "down": mixture.down}
    found = next((rule.to for rule in rules.get(kind, ()) if rule.holds(model, number, count)), own)
    if kind in ("v", "k") and model.experts == 8:
        return "Q8_0"
    if kind == "v" and model.is_large and found in ("Q3_K", "Q4_K"):
        return "Q5_K"
    return found


def _fitting(wanted: str, columns: int, number_format: Callable[[str], NumberFormat]) -> str | None:
    """``wanted``, or the type of smaller blocks in its place; None where neither divides a row."""
    if columns % _block(number_format(wanted)) == 0:
        return wanted
    smaller = _SMALLER.get(wanted)
    return smaller if smaller is not None and columns % _block(number_format(smaller)) == 0 else None


def _block(number_format: NumberFormat) -> int:
    return number_format.alignment[1]


def _bits(number_format: NumberFormat) -> float:
    import torch

    return number_format.bits_per_weight((1, 256), torch.bfloat16)


def _is(tensor: MixtureTensor, pattern: str) -> bool:
    return re.fullmatch(pattern, tensor.name) is not None


def _general(name: str) -> str:
    return re.sub(r"(?<=blk\.)\d+", "*", name)
