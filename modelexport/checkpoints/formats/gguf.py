"""GGUF: one file ``model.gguf`` that llama.cpp loads, or parts of it (``model-00001-of-00003.gguf``), with config.json
and the tokenizer's files beside it.

Names and forms are those of llama.cpp's own conversion; which models, and the names of their tensors, are the table of
:mod:`modelexport.checkpoints.gguf.architectures`:

- ``token_embd``, ``blk.N.attn_q``, ..., ``output_norm``, ``output``; a layer's experts are stacked;
- norms, biases, routers and convolutions are float32, computed on their way from what the model has (1 + w, -exp(A));
- where llama.cpp rotates neighbouring elements of a head and Hugging Face's models rotate halves, the rows of q and k
  (and of their biases) are put in that order, which changes no number since blocks lie within rows; so are the rows
  of projections that are fused head by head;
- linears, the embedding and the head are F16, BF16 or F32 as the model is, or blocks (see
  :mod:`modelexport.quantization.methods.gguf`); tied embeddings are stored once;
- beside blocks of NVFP4 stand the numbers that llama.cpp multiplies their products by, ``attn_q.scale``, one for a
  linear; and a value of the file keeps it from rounding their inputs to 4 bits;
- the factors of Llama 3.1's and Phi-3's rotary embeddings are tensors, computed from config.json.

llama.cpp looks at nothing but the file. Its tokenizer is translated where that can be done
(:mod:`modelexport.checkpoints.gguf.tokenizer`); :func:`notes` says where it cannot.
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from modelexport.checkpoints.engine_reading import Rules, open_arrays
from modelexport.checkpoints.gguf.architectures import (
    DRAFT_PARTS,
    FLOAT32,
    ROLES,
    ROPE_FACTORS,
    SCALED,
    SCALED_BEFORE_BIAS,
    TENSORS,
    VALUES,
    GgufArchitecture,
    Stored,
)
from modelexport.checkpoints.gguf.file import (
    MOST_PARTS,
    SCALED_TYPE,
    TYPES,
    Entry,
    GgufFile,
    Value,
    encode_header,
    float32_bytes,
    part_name,
    part_values,
    parts_of,
    read_gguf,
    type_of,
)
from modelexport.checkpoints.gguf.metadata import (
    FACTOR_TOLERANCE,
    architecture,
    constants,
    draft_kinds,
    file_values,
    is_written,
    model_values,
    read_config,
    read_rope,
    refusal,
    untold_window,
    why_no_drafts,
)
from modelexport.checkpoints.gguf.restored_config import NOTE, restored_configs
from modelexport.checkpoints.gguf.tokenizer import describe, read_tokenizer
from modelexport.checkpoints.gguf.tokenizer.restored import restore_tokenizer
from modelexport.checkpoints.gguf.values import HEADS, KV_HEADS, fused_heads
from modelexport.checkpoints.safetensors.arrays import Array, Share, placements
from modelexport.checkpoints.safetensors.conversions import Conversion
from modelexport.checkpoints.safetensors.header import TensorInfo
from modelexport.checkpoints.safetensors.layout import Layout, LayoutFile
from modelexport.checkpoints.safetensors.reader import Checkpoint
from modelexport.checkpoints.safetensors.sharded import (
    Constant,
    divide,
    holds,
    raise_problems,
    stored_form,
    tensor_info,
)
from modelexport.errors import CheckpointError, PlanError, shown
from modelexport.sharding.boxes import whole
from modelexport.sharding.plan import Parallelism
from modelexport.sharding.rules import TensorRule
from modelexport.sharding.shard_plan import ShardPlan, build_shard_plan
from modelexport.system.dtypes import find_dtype
from modelexport.system.json_values import JsonValues
from modelexport.system.small_files import LARGEST_CONFIG, has_file, open_regular, read_json

NAME = "gguf"
EXTENSION = "gguf"
"""Of a format's files: where a directory has none, the module is not even imported to look at it."""
DESCRIPTION = "one file for llama.cpp"
HUB_LIBRARY = "gguf"
HOLDS_DRAFTS = True  # of some architectures: draft_refusal
LOADS_TENSOR_PARALLEL = False
SIDE_FILES = ()
EXPERTS_APART = True
FOLDS_MULTIPLIERS = True
LANGUAGE_PART = True  # what sees and hears is another file to llama.cpp
READS_SOURCE = True  # its tokenizer is part of the file: lay_out wants the source's directory
MAX_SHARD_BYTES = 1 << 63  # one file, unless parts are asked for: not every program on llama.cpp takes parts
FILE = "model.gguf"
_SUFFIX = f".{EXTENSION}"
_LAYER = "blk.{layer}."
_SCALE = "scale"
_INPUT_SCALE = ".input_scale"
_UNSCALED = "NVFP4 (scale 1)"
"""A linear's blocks without a scale beside them, as :mod:`modelexport.quantization.methods.gguf` has them."""
_EXTRA = "general.tensor_extra"
_NUMBERS = re.compile(r"\.\d+(?=\.)")
_DROP = "--draft drop exports the model without them"
_WIDE = "modelexport.float32"
"""The key of the names of those tensors of a model of 16 bits that are float32 in the model, too, one a line."""


@dataclass(frozen=True)
class _Part:
    """The part of a tensor that goes to one array.

    Attributes:
        name: of the array.
        shape: of the array, or of one of those that are stacked in it.
        share: with the origin within that shape.
    """

    name: str
    shape: tuple[int, ...]
    share: Share


@dataclass(frozen=True)
class _Target:
    """A model's architecture, and the numbers that its tensors' forms depend on."""

    architecture: GgufArchitecture
    config: JsonValues

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> _Target:
        return cls(architecture(config), read_config(config))

    def stored(self, rule: TensorRule) -> Stored | None:
        """The arrays that a tensor goes to; None: llama.cpp has no name for it."""
        full = f"{rule.path}.{rule.parameter}"
        for names in (self.architecture.tensors, TENSORS, ROLES):
            for key in (full, rule.path, rule.role):
                if key in names:
                    found = names[key]
                    stored = found if isinstance(found, Stored) else Stored((found,))
                    if rule.parameter == _SCALE and key != full:  # one number, whatever becomes of the weight's rows
                        return Stored(tuple(self._full_name(name, rule) for name in stored.names))
                    if rule.role in ("attention.q", "attention.k"):
                        if self.architecture.pairs:
                            stored = replace(stored, rows="pairs")
                        elif self.architecture.halves:
                            stored = replace(stored, rows="halves")
                    is_norm = stored.is_norm and stored.names[0].removesuffix(".weight").endswith("norm")
                    if is_norm and rule.parameter == "weight":
                        stored = replace(stored, function=self.architecture.norms)
                    return replace(stored, names=tuple(self._full_name(name, rule) for name in stored.names))
        return None

    def _full_name(self, name: str, rule: TensorRule) -> str:
        """An array's name with its block, and the tensor's parameter where it has none of its own."""
        number = self.block(rule)
        block = "" if number is None else _LAYER.format(layer=number)
        return f"{block}{name.removesuffix('.')}" if "." in name else f"{block}{name}.{rule.parameter}"

    def block(self, rule: TensorRule) -> int | None:
        """The block that a tensor is in: its layer, or, of a draft layer, one behind them; None outside of both."""
        return rule.layer if rule.draft is None else self.layers + rule.draft

    @property
    def layers(self) -> int:
        """Decoder layers, without draft layers."""
        return int(str({**VALUES, **self.architecture.values}["block_count"].read(self.config)))  # type: ignore[union-attr]

    def joined(self, block: int, array: str) -> tuple[str, tuple[str, ...]] | None:
        """The array of a draft layer that holds another's rows, and all that it holds; None: it stands by itself.

        Args:
            array: its name, without its block and its parameter.
        """
        joined = {} if self.architecture.drafts is None or block < self.layers else self.architecture.drafts.joined
        return next(((name, parts) for name, parts in joined.items() if array in parts), None)

    def is_scale(self, rule: TensorRule) -> bool:
        """Returns whether a tensor belongs to a weight of another number format."""
        full = f"{rule.path}.{rule.parameter}"
        return rule.parameter not in ("weight", "bias") and full not in {**TENSORS, **self.architecture.tensors}

    def scaled(self) -> frozenset[str]:
        """Names of the arrays, without their block, by whose scale its graph multiplies."""
        return SCALED.get(self.architecture.name, frozenset())

    def heads(self, rule: TensorRule) -> int:
        """Heads along the rows of a tensor."""
        return KV_HEADS.read(self.config) if rule.role == "attention.k" else HEADS.read(self.config)

    @cached_property
    def rotated(self) -> int:
        """Features of a head that are rotated."""
        return int(str(read_rope(self.config.content).values["rope.dimension_count"]))

    def kv_groups(self) -> tuple[int, int]:
        """Heads of keys, and queries for each of them, of a fused tensor of all three."""
        if self.architecture.name != "falcon":
            return HEADS.read(self.config), 1
        return fused_heads(self.config)


def arrays(plan: ShardPlan, config: dict[str, Any], there: Collection[str] | None = None) -> list[Array]:
    """The file's tensors, in the model's order.

    Args:
        there: the arrays of a file that is read: those of draft layers are joined where they are there; None: as they
            are written.

    Raises:
        PlanError: llama.cpp cannot hold the model, or the parallelism is not 1; everything that stands in the way.
    """
    if plan.parallelism.size > 1:
        raise PlanError(
            f"--format {NAME}: {plan.parallelism} was asked for, but a GGUF file is always the whole model: leave "
            "--target-tp, --target-pp and --target-ep out"
        )
    target = _Target.of(config)
    stacks: dict[str, list[tuple[TensorRule, Stored]]] = {}
    rules = list(plan.rules.values())
    for rule in rules:
        stored = target.stored(rule)
        for name in () if stored is None else stored.names:
            assert stored is not None
            stacks.setdefault(name, []).append((rule, stored))
    _check(rules, stacks, target)
    found = list(_joined([_array(name, group, target) for name, group in stacks.items()], target, there))
    if target.architecture.output and "output.weight" not in stacks:
        found += [replace(array, name="output.weight") for array in found if array.name == "token_embd.weight"]
    for name, (numbers, what) in constants(config).items():
        found.append(Constant(FILE, name, "F32", (len(numbers),), (), content=float32_bytes(numbers, name), what=what))
    return found


def _joined(found: Sequence[Array], target: _Target, there: Collection[str] | None) -> Iterator[Array]:
    """The arrays with those of draft layers in one that llama.cpp wants as one.

    Raises:
        PlanError: they differ in number format.
    """
    whole_of: dict[str, str] = {}
    parts: dict[str, list[str]] = {}
    for array in found:
        number, _, own = array.name.removeprefix("blk.").partition(".")
        module, _, parameter = own.rpartition(".")
        joined = target.joined(int(number), module) if number.isdecimal() else None
        if joined is not None:
            prefix = _LAYER.format(layer=number)
            name = f"{prefix}{joined[0]}.{parameter}"
            if there is None or name in there:
                whole_of[array.name] = name
                parts[name] = [f"{prefix}{part}.{parameter}" for part in joined[1]]
    held = {array.name: array for array in found if array.name in whole_of}
    for array in found:
        joined_name = whole_of.get(array.name)
        if joined_name is None:
            yield array
        elif joined_name in parts:  # where the first of them stood
            yield _one_behind_the_other(joined_name, [held[part] for part in parts.pop(joined_name) if part in held])


def _one_behind_the_other(name: str, found: Sequence[Array]) -> Array:
    """One array of the rows of others."""
    if len({(array.dtype, array.shape[1:]) for array in found}) > 1:
        held = ", ".join(f"{array.name} {type_of(array.dtype, array.shape) or array.dtype}" for array in found)
        raise PlanError(
            f"--format {NAME}: {held} become one array, {name}, and differ in number format: give them the same, or "
            "leave draft layers as they are (--draft keep)"
        )
    shares: list[Share] = []
    rows = 0
    for array in found:
        shares += (replace(share, origin=(rows + share.origin[0], *share.origin[1:])) for share in array.shares)
        rows += array.shape[0]
    return replace(found[0], name=name, shape=(rows, *found[0].shape[1:]), shares=tuple(shares))


def _check(
    rules: Sequence[TensorRule], stacks: Mapping[str, Sequence[tuple[TensorRule, Stored]]], target: _Target
) -> None:
    problems = []
    named = {rule.name for group in stacks.values() for rule, _ in group}
    unknown = [rule for rule in rules if rule.name not in named]
    if unknown:
        roles = ", ".join(dict.fromkeys(rule.role for rule in unknown))
        problems.append(f"{len(unknown)} tensors have no name in GGUF ({roles}), the first {unknown[0].name}")
    scaled = _scaled(rules)
    alien = [
        rule
        for rule in rules
        if rule.name in named
        and ((type_of(rule.dtype, rule.shape) is None and rule.dtype != "I64") or target.is_scale(rule))
        and not _is_block_scale(rule, scaled)
    ]
    if alien:
        problems.append(
            f"{len(alien)} tensors are of no type that GGUF has, the first {alien[0].name}, {alien[0].dtype} "
            f"{list(alien[0].shape)}; a quantised model must have been quantised with --format {NAME}"
        )
    for name, group in stacks.items():
        different = {(rule.dtype, rule.shape) for rule, _ in group}
        if len(different) > 1:
            problems.append(f"{name}: its experts differ in number format or shape, and llama.cpp stacks them")
        first, stored = group[0]
        turned = stored.transposed or stored.rows == "heads of kv_b"
        if turned and first.dtype == "U8":
            problems.append(f"{first.name} is quantised by rows, and llama.cpp wants its columns: keep it as it is")
        if _is_block_scale(first, scaled) and len(stored.names) > 1:
            problems.append(f"{first.name} is one scale of {' and '.join(stored.names)}, which have one each: {_OTHER}")
        if stored.columns != "in order" and _by_turns(target)[1] > 1 and first.shape[1] % _by_turns(target)[2]:
            problems.append(
                f"{first.name} is quantised in blocks that hold columns of several heads of values, whose order "
                "llama.cpp changes: keep it as it is, or in blocks of 32"
            )
        twice = first.expert is None and len(group) > 1
        if twice:
            problems.append(f"{name}: {first.name} and {group[1][0].name} both go there")
    problems += _draft_problems(rules, target)
    if problems:
        raise PlanError(f"--format {NAME}: " + "; ".join(problems[:8]))


_OTHER = "give the linear another number format, e.g. mxfp4-wo or q4_k"


def _scaled(rules: Iterable[TensorRule]) -> frozenset[str]:
    """The modules that are held in blocks with a scale beside them."""
    return frozenset(rule.module for rule in rules if type_of(rule.dtype, rule.shape) == SCALED_TYPE)


def _is_block_scale(rule: TensorRule, scaled: Collection[str]) -> bool:
    return rule.parameter == _SCALE and rule.module in scaled


def _check_scales(plan: ShardPlan, target: _Target) -> None:
    """Refuse scales that llama.cpp would not multiply by, or in the wrong place.

    Raises:
        PlanError: there are such; says which and what to do instead.
    """
    rules = plan.rules.values()
    scaled = _scaled(rules)
    unread: dict[str, str] = {}
    biased: dict[str, str] = {}
    biases = {rule.module for rule in rules if rule.parameter == "bias"}
    for rule in rules:
        stored = target.stored(rule) if _is_block_scale(rule, scaled) else None
        for name in () if stored is None else stored.names:
            stem = _stem(name.rpartition(".")[0])
            if stem not in target.scaled():
                unread.setdefault(rule.path, stem)
            elif stem in SCALED_BEFORE_BIAS and rule.module in biases:
                biased.setdefault(rule.path, stem)
    problems = []
    if unread:
        read = ", ".join(sorted(target.scaled())) or "none"
        problems.append(
            f"{', '.join(unread)} {_are(unread)} {SCALED_TYPE}, and llama.cpp's graph of '{target.architecture.name}' "
            f"multiplies by the scales of {read} only, not by those of {', '.join(dict.fromkeys(unread.values()))}"
        )
    if biased:
        problems.append(
            f"{', '.join(biased)} {_are(biased)} {SCALED_TYPE} with a bias, behind which llama.cpp would multiply "
            "by the scale"
        )
    if problems:
        ends = dict.fromkeys(path.rpartition(".")[2] for path in (*unread, *biased))
        instead = ",".join(f"*{end}=mxfp4-wo" for end in ends)
        raise PlanError(
            f"--format {NAME}: {'; '.join(problems)}: give them another number format, e.g. --quant "
            f"'{instead},*=nvfp4-wo'"
        )


def _are(found: Collection[str]) -> str:
    return "is" if len(found) == 1 else "are"


def _stem(module: str) -> str:
    """The name of an array's module without its block."""
    return module.rpartition("blk.")[2].partition(".")[2] if module.startswith("blk.") else module


def _draft_problems(rules: Sequence[TensorRule], target: _Target) -> Iterator[str]:
    """Draft layers that llama.cpp would not load: it wants a decoder layer like the model's own, and what joins it."""
    firsts = {rule.draft: rule.name for rule in reversed(rules) if rule.draft is not None}
    if not firsts:
        return
    if target.architecture.drafts is None:
        yield f"{draft_refusal(target.config.content)}, the first {firsts[min(firsts)]}: {_DROP}"
        return
    blocks = _blocks(rules, target)
    layers = [block for number, block in blocks.items() if number < target.layers]
    for number, first in sorted(firsts.items()):
        own = dict(blocks.get(target.layers + number, {}))
        around = own.pop("", frozenset())
        missing = [name for name in DRAFT_PARTS if name not in around]
        if missing:
            yield f"draft layer {number} ({first}, ...) has nothing that becomes {', '.join(missing)}: {_DROP}"
        elif not any(own.keys() == layer.keys() for layer in layers) or any(
            all(layer.get(part) != names for layer in layers) for part, names in own.items()
        ):
            yield f"draft layer {number} ({first}, ...) has other tensors than every decoder layer: {_DROP}"


def _blocks(rules: Iterable[TensorRule], target: _Target) -> dict[int, dict[str, frozenset[str]]]:
    """Number of each block -> first part of the paths within its decoder layer, ``""`` for what stands around a draft's
    -> names of the arrays that its tensors go to; scales of blocks have none here."""
    rules = list(rules)
    usual = {} if target.architecture.drafts is None else target.architecture.drafts.names.usual
    scaled = _scaled(rules)
    found: dict[int, dict[str, set[str]]] = {}
    for rule in rules:
        block, stored = target.block(rule), target.stored(rule)
        if block is not None and stored is not None and not _is_block_scale(rule, scaled):
            is_around = rule.draft is not None and rule.path == rule.module
            part = "" if is_around else usual.get(rule.path, rule.path).partition(".")[0]
            names = {name.removeprefix(_LAYER.format(layer=block)) for name in stored.names}
            found.setdefault(block, {}).setdefault(part, set()).update(names)
    return {block: {part: frozenset(names) for part, names in parts.items()} for block, parts in found.items()}


def draft_refusal(config: Mapping[str, Any]) -> str:
    """The reason why a file holds no draft layers of a model; ``""`` where it does."""
    kind = config.get("model_type")
    if draft_kinds(str(kind)):
        return ""
    why = why_no_drafts(str(kind))
    return f"draft layers of a '{shown(kind)}' are not written to a GGUF file{': ' if why else ''}{why}"


def _is_float32(name: str, shape: Sequence[int]) -> bool:
    """Returns whether llama.cpp wants an array in float32.

    Args:
        shape: of the array, or of one of those that are stacked in it.
    """
    module, _, parameter = name.rpartition(".")
    stem = _stem(module)
    return parameter != "weight" or len(shape) == 1 or stem.endswith("_norm") or stem in FLOAT32


def _array(name: str, group: Sequence[tuple[TensorRule, Stored]], target: _Target) -> Array:
    stacked = group[0][0].expert is not None
    shares: list[Share] = []
    shape: tuple[int, ...] = ()
    for number, (rule, stored) in enumerate(group):
        for part in _parts(rule, stored, target):
            if part.name == name:
                shape, share = part.shape, part.share
                if stacked:
                    dims = None if share.dims is None else tuple(dim + 1 for dim in share.dims)
                    share = replace(share, origin=(number, *share.origin), dims=dims)
                shares.append(share)
    first, stored = group[0]
    form = _form(stored, first, shape, target)
    if not stacked and not form:
        form = (1,)  # ggml has no numbers without a dim
    whole_shape = ((len(group),) if stacked else ()) + shape
    stored_shape = None if form == shape else form
    if first.dtype == "I64":
        conversion = Conversion(first.dtype)
        return Array(FILE, name, "I32", whole_shape, tuple(shares), conversion=conversion, stored_shape=stored_shape)
    if _is_float32(name, form) and (first.dtype != "F32" or stored.function != "value"):
        conversion = Conversion(first.dtype, stored.function)
        return Array(FILE, name, "F32", whole_shape, tuple(shares), conversion=conversion, stored_shape=stored_shape)
    assert stored.function == "value", name
    return Array(FILE, name, first.dtype, whole_shape, tuple(shares), stored_shape=stored_shape)


def _form(stored: Stored, rule: TensorRule, shape: tuple[int, ...], target: _Target) -> tuple[int, ...]:
    """An array's shape by the file's header."""
    if not stored.shape:
        return shape
    sizes = {"rows": shape[0]}
    found = [size if isinstance(size, int) else sizes.get(size) or target.config.whole(size) for size in stored.shape]
    rest, left = divmod(math.prod(shape), math.prod(size for size in found if size))
    if left:
        raise PlanError(f"--format {NAME}: {rule.name} is {list(shape)}, which is no multiple of {found}")
    return tuple(size or rest for size in found)


def _parts(rule: TensorRule, stored: Stored, target: _Target) -> Iterator[_Part]:
    """The places of a tensor's rows."""
    if stored.rows == "heads of kv_b":
        yield from _latent_parts(rule, stored, target)
        return
    shape, box = rule.shape, whole(rule.shape)
    if not shape:
        yield from (_Part(name, (), Share(rule.name, (), ())) for name in stored.names)
        return
    if stored.columns == "values by turns":
        for start, stop, at, _ in _value_spans(target, shape[1], heads_of=shape[1]):
            columns = (box[0], (start, stop), *box[2:])
            yield _Part(stored.names[0], shape, Share(rule.name, columns, (0, at, *(0 for _ in box[2:]))))
        return
    transposed = stored.transposed and len(shape) > 1  # and not a bias
    dim = len(shape) - 1 if transposed else 0
    rows = shape[dim]
    spans = list(_spans(rule, stored, target, rows))
    heights = {name: sum(stop - start for each, start, stop, _, _ in spans if each == name) for name in stored.names}
    for name, start, stop, at, step in spans:
        part = (*box[:dim], (start, stop), *box[dim + 1 :])
        if transposed:
            yield _Part(name, (heights[name], shape[0]), Share(rule.name, part, (at, 0), (1, step), (1, 0)))
            continue
        rest = (0,) * (len(shape) - 1)
        steps = None if step == 1 else (step, *(1 for _ in rest))
        yield _Part(name, (heights[name], *shape[1:]), Share(rule.name, part, (at, *rest), steps))


def _spans(rule: TensorRule, stored: Stored, target: _Target, rows: int) -> Iterator[tuple[str, int, int, int, int]]:
    """(array, rows [start, stop) of the tensor, the array's row of the first, by how many rows they are apart)."""
    if stored.rows in ("pairs", "halves"):
        each, rotated = rows // target.heads(rule), target.rotated
        half = rotated // 2
        for start in range(0, rows, each):
            if stored.rows == "pairs":
                for which in (0, 1):
                    yield stored.names[0], start + which * half, start + (which + 1) * half, start + which, 2
            else:
                for pair in range(half):
                    yield stored.names[0], start + 2 * pair, start + 2 * pair + 2, start + pair, half
            if rotated < each:
                yield stored.names[0], start + rotated, start + each, start + rotated, 1
    elif stored.rows == "grouped":
        groups, queries = target.kv_groups()
        each = rows // (groups * (queries + 2))
        for group in range(groups):
            start = group * (queries + 2) * each
            sizes = ((queries, 0), (1, groups * queries), (1, groups * (queries + 1)))
            for count, first in sizes:
                yield stored.names[0], start, start + count * each, (first + group * count) * each, 1
                start += count * each
    elif stored.rows == "groups of qkvz":
        yield from _linear_attention_spans(stored, target)
    elif stored.rows == "values by turns":
        heads = _by_turns(target)[2]
        width = 1 if rows == heads else target.config.whole("linear_value_head_dim")
        for span in _value_spans(target, rows, heads_of=heads * width):
            yield (stored.names[0], *span)
    else:
        each, rest = divmod(rows, len(stored.names))
        if rest:
            raise PlanError(f"--format {NAME}: {rule.name} has {rows} rows, for {len(stored.names)} arrays")
        for number, name in enumerate(stored.names):
            yield name, number * each, (number + 1) * each, 0, 1


def _linear_attention_spans(stored: Stored, target: _Target) -> Iterator[tuple[str, int, int, int, int]]:
    """Of a head of keys its query, its key, and the values and the gates of all heads of values that it is for."""
    groups, values = (target.config.whole(f"linear_num_{which}_heads") for which in ("key", "value"))
    key, value = (target.config.whole(f"linear_{which}_head_dim") for which in ("key", "value"))
    values = values // groups * value
    fused, gates = stored.names
    places = ((fused, key, 0), (fused, key, groups * key), (fused, values, 2 * groups * key), (gates, values, 0))
    start = 0
    for group in range(groups):
        for name, count, first in places:
            yield name, start, start + count, first + group * count, 1
            start += count


def _by_turns(target: _Target) -> tuple[int, int, int]:
    """Linear attention's heads of keys, the heads of values for each of them, and all heads of values."""
    keys, values = (target.config.whole(f"linear_num_{which}_heads") for which in ("key", "value"))
    if values % keys:
        raise PlanError(f"--format {NAME}: {values} linear_num_value_heads are no multiple of {keys} of keys")
    return keys, values // keys, values


def _value_spans(target: _Target, size: int, *, heads_of: int) -> Iterator[tuple[int, int, int, int]]:
    """(rows or columns [start, stop), the array's of the first, by how many they are apart), of ``size``, whose last
    ``heads_of`` are the heads of values."""
    keys, each, heads = _by_turns(target)
    first, width = size - heads_of, heads_of // heads
    if first or each == 1:
        yield 0, size if each == 1 else first, 0, 1
    if each == 1:
        return
    for head in range(heads):
        key, turn = divmod(head, each)
        start = first + head * width
        yield start, start + width, first + (turn * keys + key) * width, 1


def _latent_parts(rule: TensorRule, stored: Stored, target: _Target) -> Iterator[_Part]:
    """Latent attention's keys, ``[heads, rank, features]``, and its values, ``[heads, features, rank]``."""
    heads, rank = HEADS.read(target.config), rule.shape[1]
    keys, values = (target.config.whole(key) for key in ("qk_nope_head_dim", "v_head_dim"))
    box = whole(rule.shape)
    for head in range(heads):
        start = head * (keys + values)
        rows = ((start, start + keys), *box[1:])
        share = Share(rule.name, rows, (head, 0, 0), None, (2, 1))
        yield _Part(stored.names[0], (heads, rank, keys), share)
        rows = ((start + keys, start + keys + values), *box[1:])
        yield _Part(stored.names[1], (heads, values, *rule.shape[1:]), Share(rule.name, rows, (head, *(0,) * len(box))))


# ------------------------------------------------------------------ writing


def lay_out(
    plan: ShardPlan,
    config: dict[str, Any],
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    source: Path | None = None,
) -> Layout:
    """Returns the layout of the file, or of its parts.

    Args:
        max_shard_bytes: a part is closed before the tensor that would make its data exceed this.
        source: the directory of the model's tokenizer; None: the file gets none.

    Raises:
        PlanError: as :func:`arrays`; or llama.cpp's values have no place for what config.json says; or there would be
            more parts than it counts.
        CheckpointError: a file of the tokenizer is damaged.
    """
    kind = str(config.get("model_type"))
    if not is_written(kind):
        raise PlanError(refusal(kind, _unnamed(plan)))
    _check_scales(plan, _Target.of(config))
    found = divide(arrays(plan, config), max_bytes=max_shard_bytes, name=part_name)
    parts: dict[str, list[Array]] = {}
    for array in found:
        parts.setdefault(array.file, []).append(array)
    if len(parts) > MOST_PARTS:
        raise PlanError(
            f"--format {NAME}: --max-shard-bytes {max_shard_bytes} makes {len(parts):,} parts, and llama.cpp counts to "
            f"{MOST_PARTS:,}: give a larger number"
        )
    values = {**_values(plan, config, source), **_extra_values(found)}
    files = []
    places: dict[int, tuple[Path, int]] = {}
    for number, (name, held) in enumerate(parts.items()):
        entries = [Entry(array.name, *stored_form(array)) for array in held]
        header, offsets, size = encode_header(part_values(values, number, len(parts), len(found)), entries)
        placed = list(zip(held, offsets, strict=True))
        inserts = tuple((at, array.content) for array, at in placed if isinstance(array, Constant))
        files.append(LayoutFile(name, header, (), size, inserts))
        places |= {id(array): (Path(name), at) for array, at in placed}
    infos = {rule.name: tensor_info(rule.name, rule.dtype, rule.shape, Path()) for rule in plan.rules.values()}
    return Layout(tuple(files), infos, placements(found, lambda array: places[id(array)]))


def _unnamed(plan: ShardPlan) -> list[str]:
    """The tensors that have none of the names of most architectures, each pattern once."""
    unknown = [
        rule.name
        for rule in plan.rules.values()
        if not any({f"{rule.path}.{rule.parameter}", rule.path, rule.role} & names.keys() for names in (TENSORS, ROLES))
    ]
    return list(dict.fromkeys(_NUMBERS.sub(".*", name) for name in unknown))


def matrices(plan: ShardPlan, config: dict[str, Any]) -> dict[str, list[TensorRule]]:
    """The weights of two dims whose rows each tensor of the file holds, by its name: of a stack, those of all experts.

    Weights of which anything is turned into columns, or into float32, are not among them; nor is a second copy of the
    embedding, which is of its type.

    Raises:
        PlanError: as :func:`arrays`.
    """
    found: dict[str, list[TensorRule]] = {}
    others: set[str] = set()
    everything = arrays(plan, config)
    embedding = next((array.shares for array in everything if array.name == "token_embd.weight"), None)
    for array in everything:
        if isinstance(array, Constant) or (array.name == "output.weight" and array.shares == embedding):
            continue
        held = [plan.rules[name] for name in dict.fromkeys(share.tensor for share in array.shares)]
        turned = any(
            share.dims is not None or (len(share.box) > 1 and share.box[1] != (0, plan.rules[share.tensor].shape[1]))
            for share in array.shares
        )
        by_rows = all(r.parameter == "weight" and len(r.shape) == 2 and r.shape[1] == array.shape[-1] for r in held)
        if by_rows and not turned and not _is_float32(array.name, held[0].shape):
            found[array.name] = held
        else:
            others.update(rule.name for rule in held)
    return {name: held for name, held in found.items() if others.isdisjoint(rule.name for rule in held)}


def header_values(plan: ShardPlan, config: dict[str, Any]) -> dict[str, Value]:
    """The values of the file's header that describe the model: its architecture, its sizes.

    Raises:
        PlanError: llama.cpp's values have no place for what config.json says.
        CheckpointError: a value is missing or of the wrong kind.
    """
    drafts = 1 + max((rule.draft for rule in plan.rules.values() if rule.draft is not None), default=-1)
    return model_values(config, vocab=_vocabulary(plan), rope=read_rope(config), drafts=drafts)


def _values(plan: ShardPlan, config: dict[str, Any], source: Path | None) -> dict[str, Value]:
    target = _Target.of(config)
    kinds: Counter[str] = Counter()
    for rule in plan.rules.values():
        stored = target.stored(rule)
        plain = stored is not None and not _is_float32(stored.names[0], rule.shape) and rule.dtype != "I64"
        if plain and rule.role.rpartition(".")[2] not in ("embedding", "head"):
            kind = type_of(rule.dtype, rule.shape)
            assert kind is not None
            kinds[kind] += tensor_info(rule.name, rule.dtype, rule.shape, Path()).nbytes
    scaled = _scaled(plan.rules.values())
    wide = [
        rule.name
        for rule in plan.rules.values()
        if rule.dtype == "F32" and _is_narrow(plan) and not _is_block_scale(rule, scaled)
    ]
    said = (config.get("quantization_config") or {}).get("file_type")
    return {
        **header_values(plan, config),
        **file_values(kinds, mixture=said if isinstance(said, int) else None),
        **({_WIDE: "\n".join(wide)} if wide else {}),
        **read_tokenizer(source, config, _vocabulary(plan)).values,
    }


def _extra_values(found: Sequence[Array]) -> dict[str, Value]:
    """Values that keep llama.cpp from rounding the inputs of 4-bit weights to 4 bits, as it does on some GPUs."""
    names = [array.name for array in found if type_of(*stored_form(array)) == SCALED_TYPE]
    return {f"{_EXTRA}.name": names, f"{_EXTRA}.prec_a4": [False] * len(names)} if names else {}


def _vocabulary(plan: ShardPlan) -> int:
    return next(rule.shape[0] for rule in plan.rules.values() if rule.role == "embedding")


def _is_narrow(plan: ShardPlan) -> bool:
    """Returns whether the model has tensors of 16 bits."""
    return any(rule.dtype in ("BF16", "F16") for rule in plan.rules.values())


def side_files(plan: ShardPlan, config: dict[str, Any], layout: Layout) -> Mapping[str, bytes]:
    """None: everything is in the file."""
    return {}


def notes(plan: ShardPlan, config: dict[str, Any], source: Path | None) -> list[str]:
    """Warnings to give before the file is written."""
    window = untold_window(config)
    return [*describe(read_tokenizer(source, config, _vocabulary(plan))), *([] if window is None else [window])]


def restored_files(checkpoint: Checkpoint) -> tuple[Mapping[str, bytes], Mapping[str, str]]:
    """The tokenizer's files, where the directory has none and the GGUF file says what is in them.

    Returns:
        (name -> content, name -> why it could not be made).

    Raises:
        CheckpointError: what the file says is damaged.
    """
    if any(has_file(checkpoint.directory, name) for name in ("tokenizer.json", "tokenizer.model")):
        return {}, {}
    found = restore_tokenizer(_the_file(checkpoint.directory)[0])
    return found.files, {} if found.missing is None else {"tokenizer.json": f"not made: {found.missing}"}


# ------------------------------------------------------------------ reading


def recognises(directory: Path) -> bool:
    """Returns whether a directory's weights are one or several GGUF files."""
    names = os.listdir(directory)
    return any(name.endswith(_SUFFIX) for name in names) and not any(name.endswith(".safetensors") for name in names)


def open(directory: Path, config: dict[str, Any] | None, rules: Rules) -> Checkpoint:  # as in every format module
    """Open what :func:`lay_out`, or llama.cpp's own conversion of such a model, wrote.

    Args:
        config: the model's config.json in Hugging Face's keys; None: the one in the directory, or, where there is
            none, one that is made from the file's values.
        rules: as :func:`modelexport.models.rules.expected_rules`.

    Raises:
        CheckpointError: there are several files; there is no config.json and none can be made; the file is damaged,
            holds types that are not read (each by name), or not the model that config.json describes; everything that
            is wrong.
    """
    rules = partial(rules, apart=True)
    found = read_gguf(*_the_file(directory))
    unread = dict.fromkeys(_input_scales(found), "a scale of activations that llama.cpp does not multiply by")
    found = replace(found, infos={name: info for name, info in found.infos.items() if name not in unread})
    checkpoint = _open_model(directory, found, config, rules)
    return replace(checkpoint, left_out={**checkpoint.left_out, **unread})


def _input_scales(found: GgufFile) -> list[str]:
    """The scales of activations of 4 bits beside a file's blocks: llama.cpp reads them and computes without them."""
    scaled = {name for name, info in found.infos.items() if type_of(info.dtype, info.shape) == SCALED_TYPE}
    ends = [name for name in found.infos if name.endswith(_INPUT_SCALE)]
    return [name for name in ends if f"{name.removesuffix(_INPUT_SCALE)}.weight" in scaled]


def _open_model(directory: Path, found: GgufFile, config: dict[str, Any] | None, rules: Rules) -> Checkpoint:
    if config is not None or has_file(directory, "config.json"):
        return _open(directory, found, config or read_json(directory / "config.json", largest=LARGEST_CONFIG), rules)
    failed: CheckpointError | None = None
    for config in restored_configs(found):
        made = f"{NOTE}, as of model type {config['model_type']}"
        try:
            checkpoint = _open(directory, found, config, rules)
        except CheckpointError as error:  # it has other tensors; a type that computes the same values may have them
            own = CheckpointError(
                f"{error}. {made}; give --config DIR, the directory or file of the config.json that the model had"
            )
            own.__cause__ = error
            failed = failed or own
        else:
            return replace(checkpoint, notes=(f"{made}; --config DIR gives another",))
    assert failed is not None
    raise failed


def _open(directory: Path, found: GgufFile, config: dict[str, Any], rules: Rules) -> Checkpoint:
    try:
        # A PlanError is about a config.json that is not this file's, or of a model that is not read from GGUF.
        model = str(found.values.get("general.architecture"))
        target = _Target.of(config)
        if model != target.architecture.name:
            raise CheckpointError(f"{found.path}: holds a '{model}', config.json is of a '{config.get('model_type')}'")
        numbers = constants(config)
    except PlanError as error:
        raise CheckpointError(f"{directory}: config.json: {error}") from error
    raise_problems(directory, _check_constants(found, numbers))
    rules = _with_drafts(rules, found, config, target)
    config = _with_types(config, found, rules)
    embedding = found.infos.get("token_embd.weight")
    narrow = "F32" if embedding is None else _model_dtype(config, embedding)
    wide = frozenset(str(found.values.get(_WIDE, "")).split("\n"))
    scales = {
        f"{name.removesuffix('weight')}{_SCALE}"
        for name, info in found.infos.items()
        if type_of(info.dtype, info.shape) == SCALED_TYPE
    }

    def dtype_of(rule: TensorRule, info: TensorInfo) -> str:
        """Norms and biases are small: they are read, to see whether they are a model's of 16 bits."""
        stored = target.stored(rule)
        if info.dtype == "I32":
            return "I64"  # as all models here have them
        if (
            info.name in scales
            or stored is None
            or info.dtype != "F32"
            or narrow == "F32"
            or not _is_float32(stored.names[0], info.shape)
        ):
            return info.dtype
        if rule.name in wide:
            return "F32"
        return narrow if holds(info, Conversion(narrow, stored.function)) else "F32"

    checkpoint = open_arrays(
        directory,
        config,
        rules,
        {FILE: {name: info for name, info in found.infos.items() if name not in numbers}},
        parallelism=Parallelism(),
        arrays=lambda plan, own: [array for array in arrays(plan, own, found.infos) if not isinstance(array, Constant)],
        dtype_of=dtype_of,
        format_name=NAME,
        headers={},
    )
    return replace(checkpoint, left_out={name: what for name, (_, what) in numbers.items()})


def _with_drafts(rules: Rules, found: GgufFile, config: dict[str, Any], target: _Target) -> Rules:
    """The rules of the model with the draft layers that a file has behind its decoder layers."""
    kind, layers, drafts = target.architecture.drafts, target.layers, 0
    # A draft of every layer would be strange enough: what is more is unknown arrays.
    while kind is not None and drafts < layers and f"blk.{layers + drafts}.{DRAFT_PARTS[0]}" in found.infos:
        drafts += 1
    if kind is None or not drafts:
        return rules
    known: set[tuple[str, tuple[str, ...]]] = set()  # paths within decoder layers, and arrays of their tensors
    for rule in rules(_unquantised(config), "BF16", has=lambda name: True):
        stored = target.stored(rule)
        if rule.layer is not None and stored is not None:
            prefix = _LAYER.format(layer=rule.layer)
            path = rule.path if rule.expert is None else rule.path.format(e=rule.expert)
            known.add((path, tuple(name.removeprefix(prefix) for name in stored.names)))
    paths = [
        {path for path, names in known if all(_has(found, target, block, name) for name in names)}
        for block in range(layers, layers + drafts)
    ]  # arrays that are missing or unknown are named later
    return partial(rules, drafts=paths, draft_names=kind.names)


def _has(found: GgufFile, target: _Target, block: int, name: str) -> bool:
    """Returns whether a file has an array in a block, by itself or joined with others."""
    module, _, parameter = name.rpartition(".")
    joined = target.joined(block, module)
    names = [name] if joined is None else [name, f"{joined[0]}.{parameter}"]
    return any(f"{_LAYER.format(layer=block)}{each}" in found.infos for each in names)


def _unquantised(config: dict[str, Any]) -> dict[str, Any]:
    """config.json without the number formats of its linears."""
    return {key: value for key, value in config.items() if key not in ("quantization_config", "compression_config")}


def _model_dtype(config: dict[str, Any], embedding: TensorInfo) -> str:
    """The dtype of the model's unquantised numbers: the embedding's, or, where that is quantised, config.json's."""
    if embedding.dtype != "U8":
        return embedding.dtype
    said = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    return find_dtype(said) or "F32"


def _the_file(directory: Path) -> list[Path]:
    """The one GGUF file of a directory, or all of its parts, in order."""
    names = sorted(name for name in os.listdir(directory) if name.endswith(_SUFFIX))
    parts = parts_of(names)
    if parts is not None:
        missing = [name for name in parts if name not in names]
        if missing:
            raise CheckpointError(f"{directory}: {len(missing)} of {len(parts)} parts are missing: {missing[0]}")
        return [directory / name for name in parts]
    if len(names) != 1:
        listed = ", ".join(names[:4])
        raise CheckpointError(f"{directory}: has {len(names)} GGUF files ({listed}); keep the one that is meant there")
    return [directory / names[0]]


def _check_constants(found: GgufFile, numbers: Mapping[str, tuple[tuple[float, ...], str]]) -> list[str]:
    """Checks the tensors whose numbers config.json says, and that the rotary embedding has no other factors."""
    problems = []
    for name in dict.fromkeys((*ROPE_FACTORS, *numbers)):
        info, (wanted, what) = found.infos.get(name), numbers.get(name, (None, "factors of the rotary embedding"))
        if info is None and wanted is None:
            continue
        if info is None or wanted is None:
            state = "missing" if info is None else f"there, but config.json has no {what}"
            problems.append(f"{name} is {state}")
        elif info.dtype != "F32" or info.shape != (len(wanted),):
            problems.append(f"{name} is {info.dtype} {list(info.shape)}, config.json makes it {len(wanted)} F32")
        else:
            with open_regular(info.path) as stream:
                stream.seek(info.offset)
                theirs = struct.unpack(f"<{len(wanted)}f", stream.read(info.nbytes))
            if any(abs(a - b) > FACTOR_TOLERANCE * abs(b) for a, b in zip(theirs, wanted, strict=True)):
                problems.append(f"{name} holds other numbers than config.json makes ({what})")
    return problems


def _with_types(config: dict[str, Any], found: GgufFile, rules: Rules) -> dict[str, Any]:
    """config.json with the block types of the file's linears, where it does not have them."""
    own = config.get("quantization_config")
    if isinstance(own, dict) and own.get("quant_method") == NAME:
        return config
    plain = _unquantised(config)
    kinds = {name: type_of(info.dtype, info.shape) for name, info in found.infos.items()}
    blocks = {name: kind for name, kind in kinds.items() if kind is not None and TYPES[kind].block > 1}
    for name, kind in blocks.items():
        if kind == SCALED_TYPE and f"{name.removesuffix('weight')}{_SCALE}" not in found.infos:
            blocks[name] = _UNSCALED
    if not blocks:
        return plain
    types: dict[str, list[str]] = {}
    everything = rules(plain, "BF16", has=lambda name: True)
    modules = {rule.name: rule.module for rule in everything}
    plan = build_shard_plan(everything, Parallelism(), layers=1 + max((r.layer or 0 for r in everything), default=0))
    for array in arrays(plan, plain, found.infos):
        if array.name in blocks:
            held = dict.fromkeys(modules[share.tensor] for share in array.shares)
            types.setdefault(blocks[array.name], []).extend(held)
    number = found.values.get("general.file_type")
    mixture = {"file_type": number} if isinstance(number, int) else {}
    return {**plain, "quantization_config": {"quant_method": NAME, "types": types, "ignore": [], **mixture}}
