"""The sources of the values of a GGUF file's header: keys of config.json, or what follows from several of them.

Small pieces of data for the table of :mod:`modelexport.checkpoints.gguf.architectures`. Where config.json is silent,
what transformers' class of the model has stands in the table (``defaults``): here a key either has a value or not.

Each goes both ways: ``read`` makes the value of config.json's keys, ``write`` the keys of the value. What ``write``
returns is a proposal, since several keys may make one value: whoever asks reads the whole config.json again.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol, cast

from modelexport.checkpoints.gguf.file import Value
from modelexport.checkpoints.rope import read_rope_config
from modelexport.errors import CheckpointError, shown
from modelexport.system.json_values import JsonValues

_FULL = "full_attention"
MOST_HEAD_DIM = 1 << 16  # each feature has a frequency
MOST_LAYERS = 1 << 16
MOST_SECTIONS = 4
_NO_FLAGS: tuple[str, tuple[str, str]] = ("", ("", ""))
_NO_LETTERS: tuple[str, Mapping[str, str]] = ("", MappingProxyType({}))


class ValueSource(Protocol):
    """The origin of a value."""

    def read(self, config: JsonValues) -> Value | None:
        """The value; None: the file gets none.

        Raises:
            CheckpointError: config.json lacks a key, or has a value of the wrong kind there.
            PlanError: llama.cpp cannot be told what is there.
        """

    def write(self, value: Value | None, known: ModelConfig) -> Mapping[str, Any]:
        """The keys of config.json that make the value, a dot leads into a part; empty where they cannot be told yet.

        Args:
            value: the file's; None: it has none.
            known: the keys that are told already (``said``), and what is assumed of such a model.
        """


@dataclass(frozen=True)
class ModelConfig(JsonValues):
    """A config.json's values, and what its models' class assumes where it is silent.

    Attributes:
        said: the keys that config.json itself has a value for.
    """

    said: frozenset[str] = frozenset()


def _present(config: JsonValues, keys: Sequence[str]) -> tuple[JsonValues, str]:
    """The object and the key of the first of some keys that has a value; of none, the first. A dot leads into a part.

    What config.json says comes before what is assumed, by whichever of its names.
    """
    said = config.said if isinstance(config, ModelConfig) else frozenset()
    for key in sorted(keys, key=lambda key: key.partition(".")[0] not in said):
        holder, name = _inside(config, key)
        if holder.has(name):
            return holder, name
    return _inside(config, keys[0])


def _inside(config: JsonValues, key: str) -> tuple[JsonValues, str]:
    *parts, name = key.split(".")
    for part in parts:
        config = config.object(part)
    return config, name


def _name(keys: Sequence[str], known: ModelConfig) -> str:
    """The one of several names that a model type has for a key: the one that something is assumed of, or the first."""
    for key in keys:
        holder, name = _inside(known, key)
        if name in holder.content:
            return key
    return keys[0]


def _is_told(factor: str | ValueSource, known: ModelConfig) -> bool:
    keys = (factor,) if isinstance(factor, str) else getattr(factor, "keys", None)
    return isinstance(factor, Fixed) if keys is None else not known.said.isdisjoint(keys)


def shortest_float32(value: float) -> float:
    """The number of the fewest decimal digits that is the same in float32."""
    try:
        wanted = struct.pack("<f", value)
    except OverflowError:  # of a file's float64
        return value
    texts = (f"{value:.{digits}g}" for digits in range(1, 18))
    return next((float(text) for text in texts if struct.pack("<f", float(text)) == wanted), value)


def by_period(period: int, layers: int) -> tuple[bool, ...]:
    """The layers with a sliding window, where each last of a period has none, as llama.cpp counts; 0: all have."""
    return tuple(period == 0 or i % period < period - 1 for i in range(layers))


@dataclass(frozen=True)
class Whole:
    """A whole number: of the first of some keys that is there."""

    keys: tuple[str, ...]
    optional: bool = False
    least: int = 1
    plus: int = 0

    def read(self, config: JsonValues) -> int | None:
        holder, key = _present(config, self.keys)
        if self.optional and not holder.has(key):
            return None
        return holder.whole(key, least=self.least) + self.plus

    def write(self, value: Value | None, known: ModelConfig) -> Mapping[str, Any]:
        if value is None:
            return {_name(self.keys, known): None} if self.optional else {}
        return {_name(self.keys, known): value - self.plus if isinstance(value, int) else value}


def whole(*keys: str, optional: bool = False, least: int = 1, plus: int = 0) -> Whole:
    """A whole number, by the names that its key may have."""
    return Whole(keys, optional, least, plus)


@dataclass(frozen=True)
class Number:
    """A positive number: of the first of some keys that is there."""

    keys: tuple[str, ...]
    optional: bool = False

    def read(self, config: JsonValues) -> float | None:
        holder, key = _present(config, self.keys)
        if self.optional and not holder.has(key):
            return None
        return holder.number(key)

    def write(self, value: Value | None, known: ModelConfig) -> Mapping[str, Any]:
        if value is None:
            return {_name(self.keys, known): None} if self.optional else {}
        key = _name(self.keys, known)
        if isinstance(value, float):
            holder, name = _inside(known, key)
            usual = holder.content.get(name)
            value = int(value) if type(usual) is int and value.is_integer() else shortest_float32(value)
        return {key: value}


def number(*keys: str, optional: bool = False) -> Number:
    """A positive number, by the names that its key may have."""
    return Number(keys, optional)


@dataclass(frozen=True)
class Negative:
    """A negative number: of the first of some keys that is there."""

    keys: tuple[str, ...]

    def read(self, config: JsonValues) -> float | None:
        holder, key = _present(config, self.keys)
        if not holder.has(key):
            return None
        value = holder.content[key]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not -math.inf < value < 0:
            raise CheckpointError(f"{holder.where}: {key} is {shown(value)}; a negative number is needed")
        return float(value)

    def write(self, value: Value | None, known: ModelConfig) -> Mapping[str, Any]:
        return {_name(self.keys, known): shortest_float32(value) if isinstance(value, float) else value}


@dataclass(frozen=True)
class Flag:
    """True or False by a key; False where it is missing."""

    key: str

    def read(self, config: JsonValues) -> bool:
        return flag(config, self.key)

    def write(self, value: Value | None, known: ModelConfig) -> Mapping[str, Any]:
        return {self.key: False if value is None else value}


def flag(config: JsonValues, key: str) -> bool:
    """A truth value; False where it is missing.

    Raises:
        CheckpointError: it is something else.
    """
    found = config.content.get(key)
    if found is not None and not isinstance(found, bool):
        raise CheckpointError(f"{config.where}: {key} is {shown(found)}; true or false is needed")
    return bool(found)


@dataclass(frozen=True)
class Fixed:
    """The same for every model of the architecture."""

    value: Value

    def read(self, config: JsonValues) -> Value:
        return self.value

    def write(self, value: Value | None, known: ModelConfig) -> Mapping[str, Any]:
        return {}


@dataclass(frozen=True)
class HeadDim:
    """The features of a head: said, or the hidden ones shared out among the heads."""

    def read(self, config: JsonValues) -> int:
        if config.has("head_dim"):
            return config.whole("head_dim", most=MOST_HEAD_DIM)
        return max(1, HIDDEN.read(config) // HEADS.read(config))

    def write(self, value: Value | None, known: ModelConfig) -> Mapping[str, Any]:
        if not (_is_told(HIDDEN, known) and _is_told(HEADS, known)):
            return {}
        usual = max(1, HIDDEN.read(known) // HEADS.read(known))
        told = usual if value is None else value
        return {"head_dim": told} if told != usual or "head_dim" in known.content else {}


@dataclass(frozen=True)
class Required:
    """A whole number that no model does without."""

    keys: tuple[str, ...]

    def read(self, config: JsonValues) -> int:
        holder, key = _present(config, self.keys)
        return holder.whole(key, most=_MOST.get(self.keys[0], 1 << 53))

    def write(self, value: Value | None, known: ModelConfig) -> Mapping[str, Any]:
        return {} if value is None else {_name(self.keys, known): value}


_MOST = {"num_hidden_layers": MOST_LAYERS}
HIDDEN = Required(("hidden_size", "n_embd", "d_model"))
HEADS = Required(("num_attention_heads", "n_head", "n_heads"))
LAYERS = Required(("num_hidden_layers", "n_layer", "n_layers"))
HEAD_DIM = HeadDim()


@dataclass(frozen=True)
class KvHeads:
    """Heads of keys and values: said, or as many as of queries."""

    keys: tuple[str, ...] = ("num_key_value_heads", "num_kv_heads", "attn_config.kv_n_heads")

    def read(self, config: JsonValues) -> int:
        holder, key = _present(config, self.keys)
        return holder.whole(key, HEADS.read(config))

    def write(self, value: Value | None, known: ModelConfig) -> Mapping[str, Any]:
        if value is None and not _is_told(HEADS, known):
            return {}
        return {_name(self.keys, known): HEADS.read(known) if value is None else value}


KV_HEADS = KvHeads()


def fused_heads(config: JsonValues) -> tuple[int, int]:
    """Falcon's heads of keys, and the queries for each of them.

    Raises:
        CheckpointError: one number is no multiple of the other.
    """
    heads = HEADS.read(config)
    groups = heads
    if config.content.get("new_decoder_architecture"):
        groups = config.whole("num_kv_heads", heads)
    elif config.content.get("multi_query", True):
        groups = 1
    if heads % groups:
        raise CheckpointError(f"{config.where}: {heads} heads are no multiple of num_kv_heads {groups}")
    return groups, heads // groups


@dataclass(frozen=True)
class FusedKvHeads:
    """Falcon's heads of keys."""

    def read(self, config: JsonValues) -> int:
        return fused_heads(config)[0]

    def write(self, value: Value | None, known: ModelConfig) -> Mapping[str, Any]:
        return {}


@dataclass(frozen=True)
class Product:
    """The product of some numbers: of keys, or of sources."""

    factors: tuple[str | ValueSource, ...]

    def read(self, config: JsonValues) -> int | None:
        found = [
            Whole((each,), True, 0).read(config) if isinstance(each, str) else each.read(config)
            for each in self.factors
        ]
        return None if None in found else math.prod(int(str(each)) for each in found)

    def write(self, value: Value | None, known: ModelConfig) -> Mapping[str, Any]:
        missing = [each for each in self.factors if not _is_told(each, known)]
        if len(missing) != 1 or not isinstance(missing[0], str) or not isinstance(value, int):
            return {}
        rest = Product(tuple(each for each in self.factors if each != missing[0])).read(known)
        return {missing[0]: value // rest} if rest and value % rest == 0 else {}


@dataclass(frozen=True)
class Sum:
    """The sum of whole numbers, by their keys."""

    keys: tuple[str, ...]

    def read(self, config: JsonValues) -> int:
        return sum(config.whole(key) for key in self.keys)

    def write(self, value: Value | None, known: ModelConfig) -> Mapping[str, Any]:
        missing = [key for key in self.keys if not _is_told(key, known)]
        if len(missing) != 1 or not isinstance(value, int):
            return {}
        return {missing[0]: value - sum(known.whole(key) for key in self.keys if key != missing[0])}


@dataclass(frozen=True)
class Quotient:
    """The whole quotient of two sources."""

    dividend: ValueSource
    divisor: ValueSource

    def read(self, config: JsonValues) -> int:
        return int(str(self.dividend.read(config))) // max(1, int(str(self.divisor.read(config))))

    def write(self, value: Value | None, known: ModelConfig) -> Mapping[str, Any]:
        return {}


@dataclass(frozen=True)
class EachLayer:
    """A list with the same for each layer."""

    value: str

    def read(self, config: JsonValues) -> tuple[str, ...]:
        return (self.value,) * LAYERS.read(config)

    def write(self, value: Value | None, known: ModelConfig) -> Mapping[str, Any]:
        return {}


@dataclass(frozen=True)
class First:
    """The first of some sources that has a value."""

    sources: tuple[ValueSource, ...]

    def read(self, config: JsonValues) -> Value | None:
        return next((found for each in self.sources if (found := each.read(config)) is not None), None)

    def write(self, value: Value | None, known: ModelConfig) -> Mapping[str, Any]:
        nothing: dict[str, Any] = {}
        for each in self.sources:
            if isinstance(each, Fixed) and each.value == value:  # which is what it is where the ones before say nothing
                return nothing
            nothing |= each.write(None, known)
        if value is None:
            return nothing
        return next((found for each in self.sources if (found := each.write(value, known))), {})


@dataclass(frozen=True)
class If:
    """A value of the models of which a key says something, and 0, empty or false counts as nothing."""

    key: str
    source: ValueSource

    def read(self, config: JsonValues) -> Value | None:
        holder, key = _inside(config, self.key)
        return self.source.read(config) if holder.content.get(key) else None

    def write(self, value: Value | None, known: ModelConfig) -> Mapping[str, Any]:
        return {} if value is None else self.source.write(value, known)


@dataclass(frozen=True)
class Says:
    """True where a key has a certain value."""

    key: str
    value: object

    def read(self, config: JsonValues) -> bool:
        return bool(config.content.get(self.key) == self.value)

    def write(self, value: Value | None, known: ModelConfig) -> Mapping[str, Any]:
        return {} if value is None else {self.key: self.value if value else None}


@dataclass(frozen=True)
class Word:
    """A certain word, where the first of some keys that is there has it."""

    keys: tuple[str, ...]
    value: str

    def read(self, config: JsonValues) -> str | None:
        holder, key = _present(config, self.keys)
        return self.value if holder.content.get(key) == self.value else None

    def write(self, value: Value | None, known: ModelConfig) -> Mapping[str, Any]:
        return {_name(self.keys, known): value} if value == self.value else {}


@dataclass(frozen=True)
class EveryFourth:
    """A list that has one value for each layer but every fourth, and another one for these.

    Attributes:
        usual: of all layers but every fourth.
        other: of every fourth.
    """

    usual: int | str = 1
    other: int | str = 0

    def read(self, config: JsonValues) -> Value:
        return cast(Value, tuple(self.usual if (i + 1) % 4 else self.other for i in range(LAYERS.read(config))))

    def write(self, value: Value | None, known: ModelConfig) -> Mapping[str, Any]:
        return {}


@dataclass(frozen=True)
class LastOfEach:
    """The numbers of the layers that are the last of as many as a key says."""

    key: str

    def read(self, config: JsonValues) -> tuple[int, ...]:
        each = config.whole(self.key)
        return tuple(range(each - 1, LAYERS.read(config), each))

    def write(self, value: Value | None, known: ModelConfig) -> Mapping[str, Any]:
        return {}


@dataclass(frozen=True)
class Choice:
    """A number for each of the words that a key may have."""

    key: str
    numbers: Mapping[str, int]

    def read(self, config: JsonValues) -> int:
        found = config.text(self.key)
        if found not in self.numbers:
            known = " or ".join(self.numbers)
            raise CheckpointError(f"{config.where}: {self.key} is '{shown(found)}'; {known} is needed")
        return self.numbers[found]

    def write(self, value: Value | None, known: ModelConfig) -> Mapping[str, Any]:
        words = [word for word, number in self.numbers.items() if number == value]
        return {self.key: words[0]} if words else {}


@dataclass(frozen=True)
class Sections:
    """The frequencies that turn by each of four positions of a token: text's, an image's, its rows and columns."""

    key: str
    optional: bool = False

    def read(self, config: JsonValues) -> tuple[int, ...] | None:
        holder, key = _inside(config, self.key)
        if self.optional and not holder.has(key):
            return None
        found = holder.numbers(key)
        if len(found) > MOST_SECTIONS or not all(each.is_integer() and 0 <= each <= MOST_HEAD_DIM for each in found):
            raise CheckpointError(
                f"{holder.where}: {key} is {shown(list(found))}; at most {MOST_SECTIONS} whole numbers are needed"
            )
        return (*map(int, found), *(0,) * (MOST_SECTIONS - len(found)))

    def write(self, value: Value | None, known: ModelConfig) -> Mapping[str, Any]:
        if not isinstance(value, (list, tuple)):
            return {}
        return {self.key: list(value[:3] if len(value) == MOST_SECTIONS and not value[3] else value)}


@dataclass(frozen=True)
class DeepstackMapping:
    """For each layer, the number of the projector whose features of an image are added before it, or -1; by the layers
    of all projectors, of which the first stands in place of the tokens (Granite 4 Vision).

    Attributes:
        key: of these layers' numbers.
    """

    key: str

    def read(self, config: JsonValues) -> tuple[int, ...] | None:
        if not config.has(self.key):
            return None
        found, layers = config.numbers(self.key), LAYERS.read(config)
        if not all(each.is_integer() and -layers <= each < layers for each in found):
            raise CheckpointError(
                f"{config.where}: {self.key} is {shown(list(found))}; numbers of {layers} layers are needed"
            )
        numbers = {layer: number for number, layer in enumerate(sorted(int(each) % layers for each in found)) if number}
        return tuple(numbers.get(layer, -1) for layer in range(layers))

    def write(self, value: Value | None, known: ModelConfig) -> Mapping[str, Any]:
        if not isinstance(value, (list, tuple)):
            return {}
        return {self.key: [0, *(layer for layer, number in enumerate(value) if int(str(number)) >= 0)]}


@dataclass(frozen=True)
class AdjustedWidth:
    """The features of LFM2's MLP: two thirds of what is said, times a factor, as a multiple of a number."""

    def read(self, config: JsonValues) -> int:
        width = config.whole("block_ff_dim" if config.has("block_ff_dim") else "intermediate_size")
        if not config.content.get("block_auto_adjust_ff_dim"):
            return width
        width = int(2 * width / 3)
        if config.has("block_ffn_dim_multiplier"):
            width = int(config.number("block_ffn_dim_multiplier") * width)
        each = config.whole("block_multiple_of")
        return each * -(-width // each)

    def write(self, value: Value | None, known: ModelConfig) -> Mapping[str, Any]:
        return {} if value is None else {"intermediate_size": value, "block_auto_adjust_ff_dim": False}


@dataclass(frozen=True)
class Kinds:
    """The kinds of the layers, by a list of config.json, or by what its models' class makes of a period.

    Attributes:
        key: the list: ``layer_types``.
        period: the key of every how many layers one is another kind, where there is no list; "" where nothing says so.
        usual, other: the kinds of the layers but each last of a period, and of this one.
        offset: the key of which one of a period is of the other kind, where that need not be the last.
        letters: a key whose text has a letter for each layer, and what the letters mean.
        first_of: of how many layers the first is of the other kind, where config.json says nothing; 0: nothing follows.
        last_of: the same of the last, and the very first layer is of the other kind, too.
        every: each so many layers, counted back from the last one, one is of the other kind, where nothing is said.
        flags: a key whose list has 0 or 1 for each layer, and the kinds that these mean.
    """

    key: str = "layer_types"
    period: str = ""
    usual: str = "sliding_attention"
    other: str = "full_attention"
    offset: str = ""
    letters: tuple[str, Mapping[str, str]] = _NO_LETTERS
    first_of: int = 0
    last_of: int = 0
    every: int = 0
    flags: tuple[str, tuple[str, str]] = _NO_FLAGS

    def read(self, config: JsonValues) -> tuple[str, ...] | None:
        found = config.texts(self.key)
        holder, name = _inside(config, self.flags[0])
        if found is None and holder.has(name):
            found = tuple(self.flags[1][each != 0] for each in holder.numbers(name))
        if found is None and config.has(self.letters[0]):
            found = tuple(self.letters[1].get(letter, letter) for letter in config.text(self.letters[0]))
        if found is not None and not any(map(config.has, LAYERS.keys)):
            return found  # the list says how many there are
        layers = LAYERS.read(config)
        if found is None and self.offset and config.has(self.offset):
            each, first = config.whole(self.period), config.whole(self.offset, least=0)
            found = tuple(self.other if i % each == first else self.usual for i in range(layers))
        if found is None and self.period and config.has(self.period):
            each = config.whole(self.period)
            found = tuple(self.usual if (i + 1) % each else self.other for i in range(layers))
        if found is None and self.first_of:
            found = tuple(self.usual if i % self.first_of else self.other for i in range(layers))
        if found is None and self.last_of:
            found = tuple(self.usual if i and (i + 1) % self.last_of else self.other for i in range(layers))
        if found is None and self.every:
            found = tuple(self.usual if (layers - 1 - i) % self.every else self.other for i in range(layers))
        if found is not None and len(found) < layers:
            raise CheckpointError(f"{config.where}: {self.key} has {len(found)} entries, there are {layers} layers")
        return None if found is None else found[:layers]


@dataclass(frozen=True)
class Count:
    """The number of layers, by the list of their kinds where nothing else says it."""

    kinds: Kinds

    def read(self, config: JsonValues) -> int:
        found = self.kinds.read(config)
        return LAYERS.read(config) if found is None else len(found)

    def write(self, value: Value | None, known: ModelConfig) -> Mapping[str, Any]:
        return {}


@dataclass(frozen=True)
class Where:
    """For each layer, whether it is of one of some kinds; None where nothing says of which each is.

    Attributes:
        among: the kinds.
        others: the one kind of all other layers; "" where there are several.
    """

    among: tuple[str, ...]
    kinds: Kinds = Kinds()
    others: str = "full_attention"

    def read(self, config: JsonValues) -> tuple[bool, ...] | None:
        found = self.kinds.read(config)
        return None if found is None else tuple(kind in self.among for kind in found)

    def write(self, value: Value | None, known: ModelConfig) -> Mapping[str, Any]:
        """Of a number, too, which is llama.cpp's other way to say it: see :func:`by_period`."""
        if not self.others:
            return {}
        if isinstance(value, int):
            value = by_period(value, LAYERS.read(known)) if _is_told(LAYERS, known) else None
        if not isinstance(value, (list, tuple)):
            return {}
        return {self.kinds.key: [self.among[0] if has else self.others for has in value]}


@dataclass(frozen=True)
class Among:
    """For each layer, whether its number is in a list; of no layer, where there is no list.

    Attributes:
        key: of the list.
        start: the number of the first layer.
    """

    key: str
    start: int = 0

    def read(self, config: JsonValues) -> tuple[bool, ...]:
        holder, key = _inside(config, self.key)
        listed = holder.numbers(key) if holder.has(key) else ()
        return tuple(i + self.start in listed for i in range(LAYERS.read(config)))

    def write(self, value: Value | None, known: ModelConfig) -> Mapping[str, Any]:
        if not isinstance(value, (list, tuple)):
            return {}
        return {self.key: [i + self.start for i, has in enumerate(value) if has]}


_INDEXER_LETTERS = MappingProxyType({"F": "full", "S": "shared"})


@dataclass(frozen=True)
class IndexerTypes:
    """For each layer, whether it has an indexer of its own, which others take the selected tokens from (GLM-5.2)."""

    kinds: Kinds = Kinds("indexer_types", letters=("index_topk_pattern", _INDEXER_LETTERS))

    def read(self, config: JsonValues) -> tuple[bool, ...]:
        found = self.kinds.read(config)
        if found is not None:
            return tuple(kind == "full" for kind in found)
        each, first = config.whole("index_topk_freq", 1), config.whole("index_skip_topk_offset", 2, least=0)
        return tuple(max(i - first + 1, 0) % each == 0 for i in range(LAYERS.read(config)))

    def write(self, value: Value | None, known: ModelConfig) -> Mapping[str, Any]:
        if not isinstance(value, (list, tuple)):
            return {}
        return {self.kinds.key: ["full" if has else "shared" for has in value]}


@dataclass(frozen=True)
class Heads:
    """Heads of queries: of each layer, where a list says it."""

    key: str

    def read(self, config: JsonValues) -> Value:
        if not config.has(self.key):
            return HEADS.read(config)
        found = config.numbers(self.key)
        layers = LAYERS.read(config)
        if len(found) < layers or not all(each.is_integer() and each > 0 for each in found):
            raise CheckpointError(
                f"{config.where}: {self.key} is {shown(list(found))}; {layers} positive whole numbers are needed"
            )
        return tuple(map(int, found[:layers]))

    def write(self, value: Value | None, known: ModelConfig) -> Mapping[str, Any]:
        if not isinstance(value, (list, tuple)) or not value:
            return HEADS.write(value, known)
        return {self.key: list(value), **HEADS.write(value[0], known)}


@dataclass(frozen=True)
class SlidingHeads:
    """Heads of queries of each layer: those with a sliding window have a number of their own (Step 3.7).

    Attributes:
        key: of that number; where it is missing, they have as many as the others.
    """

    key: str

    def read(self, config: JsonValues) -> Value:
        heads, kinds = HEADS.read(config), Kinds().read(config)
        own = config.whole(self.key, heads)
        return heads if kinds is None else tuple(heads if kind == _FULL else own for kind in kinds)

    def write(self, value: Value | None, known: ModelConfig) -> Mapping[str, Any]:
        kinds = Kinds().read(known) if _is_told(LAYERS, known) else None
        if not isinstance(value, (list, tuple)) or kinds is None:
            return {} if isinstance(value, (list, tuple)) else HEADS.write(value, known)
        own = {kind == _FULL: heads for kind, heads in zip(kinds, value, strict=False)}
        told = {self.key: own[False]} if False in own else {}
        return {**told, **HEADS.write(own.get(True, own.get(False)), known)}


@dataclass(frozen=True)
class NumberOfKind:
    """For each layer, the number of its kind; or a list says the numbers.

    Attributes:
        numbers: of the kinds.
        key: of the list, where ``layer_types`` says nothing; it may have more than there are layers.
    """

    numbers: Mapping[str, int]
    key: str

    def read(self, config: JsonValues) -> tuple[int, ...] | None:
        found = Kinds().read(config)
        if found is None and config.has(self.key):
            listed, layers = config.numbers(self.key), LAYERS.read(config)
            if len(listed) < layers or not set(listed) <= set(self.numbers.values()):
                raise CheckpointError(
                    f"{config.where}: {self.key} is {shown(list(listed))}; {layers} of "
                    f"{', '.join(map(str, self.numbers.values()))} are needed"
                )
            return tuple(map(int, listed[:layers]))
        strange = [kind for kind in found or () if kind not in self.numbers]
        if strange:
            raise CheckpointError(
                f"{config.where}: layer_types has '{shown(strange[0])}'; one of {', '.join(self.numbers)} is needed"
            )
        return None if found is None else tuple(self.numbers[kind] for kind in found)

    def write(self, value: Value | None, known: ModelConfig) -> Mapping[str, Any]:
        kinds = {number: kind for kind, number in self.numbers.items()}
        if not isinstance(value, (list, tuple)) or not set(value) <= kinds.keys():
            return {}
        return {Kinds().key: [kinds[int(str(each))] for each in value]}


@dataclass(frozen=True)
class OfEachLayer:
    """A number, once for each layer."""

    source: ValueSource

    def read(self, config: JsonValues) -> tuple[float, ...]:
        return (float(str(self.source.read(config))),) * LAYERS.read(config)

    def write(self, value: Value | None, known: ModelConfig) -> Mapping[str, Any]:
        return self.source.write(value[0], known) if isinstance(value, (list, tuple)) and value else {}


@dataclass(frozen=True)
class Limits:
    """For each layer, what the numbers of its MLP are cut off at; 0: nothing is.

    Attributes:
        key: of the list, which has null or 0 in such a layer.
    """

    key: str

    def read(self, config: JsonValues) -> tuple[float, ...] | None:
        found = config.content.get(self.key)
        if found is None:
            return None
        layers = LAYERS.read(config)
        if not isinstance(found, list) or len(found) < layers:
            raise CheckpointError(f"{config.where}: {self.key} is {shown(found)}; a list for {layers} layers is needed")
        limits = found[:layers]
        if not all(each is None or (type(each) in (int, float) and 0 <= each < math.inf) for each in limits):
            raise CheckpointError(f"{config.where}: {self.key} is {shown(limits)}; numbers from 0, or null, are needed")
        return tuple(float(each or 0) for each in limits)

    def write(self, value: Value | None, known: ModelConfig) -> Mapping[str, Any]:
        if not isinstance(value, (list, tuple)):
            return {}
        return {self.key: [shortest_float32(float(str(each))) or None for each in value]}


@dataclass(frozen=True)
class RotatedFeatures:
    """The features of a head that are rotated: by ``partial_rotary_factor``."""

    def read(self, config: JsonValues) -> int:
        return int(HEAD_DIM.read(config) * read_rope_config(config.content).part)

    def write(self, value: Value | None, known: ModelConfig) -> Mapping[str, Any]:
        return {}


_BASES = ("rope_parameters.rope_theta", "rope_theta")


@dataclass(frozen=True)
class OneBase:
    """The bases of the rotary embedding of each layer, where all that are rotated have the one that all others say.

    Attributes:
        key: of the list.
    """

    key: str

    def read(self, config: JsonValues) -> tuple[float, ...] | None:
        if not config.has(self.key):
            return None
        holder, name = _present(config, _BASES)
        return tuple(holder.number(name) if each else 0 for each in config.numbers(self.key))

    def write(self, value: Value | None, known: ModelConfig) -> Mapping[str, Any]:
        return {}


@dataclass(frozen=True)
class BaseWhere:
    """The base of the rotary embedding for some layers, 0 for the others.

    Attributes:
        where: which they are.
    """

    where: Where

    def read(self, config: JsonValues) -> tuple[float, ...] | None:
        rotated = self.where.read(config)
        holder, name = _present(config, _BASES)
        return None if rotated is None else tuple(holder.number(name) if has else 0 for has in rotated)

    def write(self, value: Value | None, known: ModelConfig) -> Mapping[str, Any]:
        return {}


@dataclass(frozen=True)
class Rotated:
    """For each layer, whether it is rotated: whether a list has a base other than 0 for it; None: all are.

    Attributes:
        key: of the list.
    """

    key: str

    def read(self, config: JsonValues) -> tuple[bool, ...] | None:
        found = config.numbers(self.key) if config.has(self.key) else ()
        return None if all(found) else tuple(each != 0 for each in found)

    def write(self, value: Value | None, known: ModelConfig) -> Mapping[str, Any]:
        if not isinstance(value, (list, tuple)) or known.said.isdisjoint(("rope_parameters", "rope_theta")):
            return {}
        holder, name = _present(known, _BASES)
        return {self.key: [holder.number(name) if has else 0 for has in value]}


_BY_LAYER = "per_layer_config"


@dataclass(frozen=True)
class OfFullLayers:
    """A number of Gemma 4's layers with full attention, where it is another one than that of the others.

    Attributes:
        key: of a layer's own settings (``per_layer_config``).
        every: the key of the same for all of these layers.
        usual: what it is where nothing says so.
    """

    key: str
    every: str
    usual: int | None = None

    def read(self, config: JsonValues) -> int | None:
        own = config.object(_BY_LAYER)
        for i, kind in enumerate(Kinds().read(config) or ()):
            if kind == _FULL and own.object(str(i)).has(self.key):
                return own.object(str(i)).whole(self.key, most=MOST_HEAD_DIM)
        return config.whole(self.every, most=MOST_HEAD_DIM) if config.has(self.every) else self.usual

    def write(self, value: Value | None, known: ModelConfig) -> Mapping[str, Any]:
        return {} if value is None else {self.every: value}


@dataclass(frozen=True)
class KvHeadsByLayer:
    """Heads of keys and values: of each layer, where those with full attention have another number."""

    full: OfFullLayers

    def read(self, config: JsonValues) -> Value:
        heads, full, kinds = KV_HEADS.read(config), self.full.read(config), Kinds().read(config)
        return heads if full is None or kinds is None else tuple(full if kind == _FULL else heads for kind in kinds)

    def write(self, value: Value | None, known: ModelConfig) -> Mapping[str, Any]:
        """Of models whose layers with full attention have no values of their own: no others have another number."""
        if not isinstance(value, (list, tuple)):
            return KV_HEADS.write(value, known)
        kinds = Kinds().read(known)
        if kinds is None:
            return {}
        own = {kind == _FULL: heads for kind, heads in zip(kinds, value, strict=False)}
        told = {"attention_k_eq_v": True, self.full.every: own.get(True)}
        return {**told, **KV_HEADS.write(own.get(False), known)}


@dataclass(frozen=True)
class DoubleSlidingKvHeads:
    """Heads of keys and values of each layer: those with a sliding window have twice as many (MiMo-V2-Flash)."""

    kinds: Kinds

    def read(self, config: JsonValues) -> Value:
        heads, kinds = KV_HEADS.read(config), self.kinds.read(config) or ()
        return tuple(heads if kind == _FULL else 2 * heads for kind in kinds)

    def write(self, value: Value | None, known: ModelConfig) -> Mapping[str, Any]:
        if not isinstance(value, (list, tuple)):
            return {}
        kinds = self.kinds.read(known) if _is_told(LAYERS, known) else None
        own = next((heads for kind, heads in zip(kinds or (), value, strict=False) if kind == _FULL), None)
        return {} if own is None else KV_HEADS.write(own, known)


@dataclass(frozen=True)
class DoubleWidth:
    """The features of an MLP: twice as many in the layers that have no keys and values of their own."""

    def read(self, config: JsonValues) -> Value:
        width = config.whole("intermediate_size")
        if not flag(config, "use_double_wide_mlp"):
            return width
        layers = LAYERS.read(config)
        shared = layers - config.whole("num_kv_shared_layers", 0, least=0)
        return tuple(width if i < shared else 2 * width for i in range(layers))

    def write(self, value: Value | None, known: ModelConfig) -> Mapping[str, Any]:
        by_layer = isinstance(value, (list, tuple)) and value
        width = value[0] if by_layer and isinstance(value, (list, tuple)) else value
        return {} if width is None else {"intermediate_size": width, "use_double_wide_mlp": bool(by_layer)}


@dataclass(frozen=True)
class Leading:
    """The number of the first layers that are of a kind.

    Attributes:
        kind: theirs.
        kinds: of all layers.
        others: the one kind of all other layers; "" where another key says it as well.
    """

    kind: str
    kinds: Kinds
    others: str = ""

    def read(self, config: JsonValues) -> int | None:
        found = self.kinds.read(config)
        return None if found is None else next((i for i, kind in enumerate(found) if kind != self.kind), len(found))

    def write(self, value: Value | None, known: ModelConfig) -> Mapping[str, Any]:
        if not self.others or not isinstance(value, int) or not _is_told(LAYERS, known):
            return {}
        return {self.kinds.key: [self.kind if i < value else self.others for i in range(LAYERS.read(known))]}


@dataclass(frozen=True)
class Only:
    """A number for the layers of some kinds, 0 for the others; the number alone where nothing says which they are."""

    source: ValueSource
    where: Where | Among

    def read(self, config: JsonValues) -> Value | None:
        value, layers = self.source.read(config), self.where.read(config)
        if layers is None or value is None:
            return value
        return tuple(int(str(value)) if has else 0 for has in layers)

    def write(self, value: Value | None, known: ModelConfig) -> Mapping[str, Any]:
        if not isinstance(value, (list, tuple)):
            return self.source.write(value, known)
        numbers = {each for each in value if each}
        if len(numbers) != 1 or not (layers := self.where.write([bool(each) for each in value], known)):
            return {}
        return {**layers, **self.source.write(numbers.pop(), known)}


@dataclass(frozen=True)
class Requirement:
    """A condition that llama.cpp's graph of an architecture takes for granted.

    Attributes:
        key: of config.json.
        values: those that it may have; None among them: it may be missing.
        equal: or the value that it must have; what follows from others.
        unless: a key and its value, of models whose graph is another one.
        otherwise: the value that it must have in these; None: any.
        why: what llama.cpp computes.
    """

    key: str
    values: tuple[object, ...] = ()
    equal: ValueSource | None = None
    unless: tuple[str, object] | None = None
    otherwise: ValueSource | None = None
    why: str = ""

    def _wanted(self, config: JsonValues) -> object:
        """The value that the key must have; None where several will do."""
        source = self.otherwise if self._is_other(config) else self.equal
        wanted = None if source is None else source.read(config)
        return list(wanted) if isinstance(wanted, tuple) else wanted

    def _is_other(self, config: JsonValues) -> bool:
        return self.unless is not None and bool(config.content.get(self.unless[0]) == self.unless[1])

    def write(self, known: ModelConfig) -> Mapping[str, Any]:
        """The key with a value that it may have, where what is assumed is none."""
        if self.check(known) is None:
            return {}
        wanted = self._wanted(known)
        if wanted is not None:
            return {self.key: wanted}
        return {self.key: next((each for each in self.values if each is not None), None)}

    def check(self, config: JsonValues) -> str | None:
        """Returns what is wrong with a config.json; None where nothing is."""
        if self._is_other(config) and self.otherwise is None:
            return None
        holder, key = _inside(config, self.key)
        found = holder.content.get(key)
        allowed = self.values
        wanted = self._wanted(config)
        if wanted is not None:
            allowed = (*self.values, wanted)
        if any(type(found) is type(each) and found == each for each in allowed) or (
            isinstance(found, (int, float)) and not isinstance(found, bool) and found in allowed
        ):
            return None
        listed = " or ".join("nothing" if each is None else str(each).lower() for each in allowed)
        return f"{self.key} is {shown(found)}, and llama.cpp {self.why or f'computes such a model with {listed}'}"


@dataclass(frozen=True)
class SameLayers:
    """A requirement that layers are of a kind by one list where they are of another by a second.

    Attributes:
        kinds, others: the lists.
        pairs: kinds of the second list -> those that the first must have.
        usual: the kind of all layers of the first, where config.json says nothing.
        why: what llama.cpp computes.
    """

    kinds: Kinds
    others: Kinds
    pairs: Mapping[str, str]
    usual: str
    why: str

    @property
    def key(self) -> str:
        """The key of config.json that it is about."""
        return self.kinds.key

    def write(self, known: ModelConfig) -> Mapping[str, Any]:
        """The first list, as the second wants it."""
        return {self.key: [self.pairs[kind] for kind in self.others.read(known) or () if kind in self.pairs]}

    def check(self, config: JsonValues) -> str | None:
        """Returns what is wrong with a config.json; None where nothing is."""
        others = self.others.read(config) or ()
        found = self.kinds.read(config) or (self.usual,) * len(others)
        number = next(
            (i for i, (one, two) in enumerate(zip(found, others, strict=False)) if self.pairs.get(two) != one), None
        )
        if number is None:
            return None
        return (
            f"{self.key}[{number}] is '{shown(found[number])}' in a layer that is '{shown(others[number])}' by "
            f"{self.others.key}, and llama.cpp {self.why}"
        )


@dataclass(frozen=True)
class NoLayer:
    """A requirement that no layer is of a kind."""

    kind: str
    kinds: Kinds

    def check(self, config: JsonValues) -> str | None:
        """Returns what is wrong with a config.json; None where nothing is."""
        found = self.kinds.read(config)
        return (
            f"a layer is '{self.kind}', which llama.cpp has none of beside its others"
            if found is not None and self.kind in found
            else None
        )


@dataclass(frozen=True)
class EveryKind:
    """A requirement that there is a layer of each of some kinds."""

    kinds: tuple[str, ...]
    key: str = "layer_types"

    def write(self, known: ModelConfig) -> Mapping[str, Any]:
        """Nothing: the file's own values say which layers there are."""
        return {}

    def check(self, config: JsonValues) -> str | None:
        """Returns what is wrong with a config.json; None where nothing is."""
        found = Kinds(self.key).read(config)
        missing = [kind for kind in self.kinds if found is not None and kind not in found]
        return f"{self.key} has no '{missing[0]}', and llama.cpp fails on such a model without one" if missing else None
