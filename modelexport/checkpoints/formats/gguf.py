"""GGUF: one file ``model.gguf`` that llama.cpp loads, with config.json and the tokenizer's files beside it.

Names and forms are those of llama.cpp's own conversion:

- ``token_embd``, ``blk.N.attn_q``, ..., ``output_norm``, ``output``; a layer's experts are stacked;
- norms, biases and routers are float32: bfloat16 ones are widened on their way, float16 ones are refused;
- Llama, Mistral and Mixtral rotate neighbouring elements of a head where Hugging Face's rotate halves: the rows of q
  and k (and of their biases) are put in that order, which changes no number since blocks lie within rows;
- linears are F16, BF16 or F32 as the model is, or blocks (see :mod:`modelexport.quantization.methods.gguf`); the
  embedding and the head as the model is; tied embeddings are stored once;
- the factors of Llama 3.1's and Phi-3's rotary embeddings are tensors, computed from config.json.

llama.cpp looks at nothing but the file. Its tokenizer is translated where that can be done
(:mod:`modelexport.checkpoints.gguf.tokenizer`); :func:`notes` says where it cannot.
"""

from __future__ import annotations

import os
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from modelexport.checkpoints.engine_reading import Rules, open_arrays
from modelexport.checkpoints.gguf.file import TYPES, Entry, GgufFile, Value, encode_header, read_gguf, type_of
from modelexport.checkpoints.gguf.metadata import architecture, file_values, model_values, read_rope
from modelexport.checkpoints.gguf.tokenizer import describe, read_tokenizer
from modelexport.checkpoints.gguf.tokenizer.restored import restore_tokenizer
from modelexport.checkpoints.safetensors.arrays import Array, Share, placements
from modelexport.checkpoints.safetensors.header import TensorInfo
from modelexport.checkpoints.safetensors.layout import DEFAULT_MAX_SHARD_BYTES, Layout, LayoutFile
from modelexport.checkpoints.safetensors.reader import Checkpoint
from modelexport.checkpoints.safetensors.sharded import (
    Constant,
    Widened,
    only_widened,
    raise_problems,
    stored_form,
    tensor_info,
)
from modelexport.errors import CheckpointError, PlanError
from modelexport.sharding.boxes import whole
from modelexport.sharding.plan import Parallelism
from modelexport.sharding.rules import TensorRule
from modelexport.sharding.shard_plan import ShardPlan, build_shard_plan
from modelexport.system.json_values import JsonValues
from modelexport.system.small_files import LARGEST_CONFIG, has_file, open_regular, read_json

NAME = "gguf"
DESCRIPTION = "one file for llama.cpp"
HUB_LIBRARY = "gguf"
LOADS_TENSOR_PARALLEL = False
SIDE_FILES = ()
READS_SOURCE = True  # its tokenizer is part of the file: lay_out wants the source's directory
FILE = "model.gguf"
_SUFFIX = ".gguf"
_LAYER = "blk.{layer}."
_NAMES = {
    "embedding": "token_embd",
    "attention.norm": _LAYER + "attn_norm",
    "attention.q": _LAYER + "attn_q",
    "attention.k": _LAYER + "attn_k",
    "attention.v": _LAYER + "attn_v",
    "attention.qkv": _LAYER + "attn_qkv",
    "attention.o": _LAYER + "attn_output",
    "mlp.norm": _LAYER + "ffn_norm",
    "mlp.gate": _LAYER + "ffn_gate",
    "mlp.up": _LAYER + "ffn_up",
    "mlp.gate_up": _LAYER + "ffn_up",
    "mlp.down": _LAYER + "ffn_down",
    "router": _LAYER + "ffn_gate_inp",
    "expert.gate": _LAYER + "ffn_gate_exps",
    "expert.up": _LAYER + "ffn_up_exps",
    "expert.down": _LAYER + "ffn_down_exps",
    "final_norm": "output_norm",
    "head": "output",
}
_FLOAT32 = {"attention.norm", "mlp.norm", "final_norm", "router"}
_ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_CLOSE = 1e-5  # relative: others compute the factors in float32


@dataclass(frozen=True)
class _Target:
    """The facts of llama.cpp's architecture that decide the form of the tensors."""

    interleaved: bool
    heads: Mapping[str, int]

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> _Target:
        interleaved = architecture(config) == "llama"
        read = JsonValues(config)
        heads = read.whole("num_attention_heads")
        kv_heads = read.whole("num_key_value_heads", heads)
        return cls(interleaved, {"attention.q": heads, "attention.k": kv_heads})


def arrays(plan: ShardPlan, config: dict[str, Any]) -> list[Array]:
    """The file's tensors, in the model's order.

    Raises:
        PlanError: llama.cpp cannot hold the model, or the parallelism is not 1; everything that stands in the way.
    """
    if plan.parallelism.size > 1:
        raise PlanError(
            f"--format {NAME}: {plan.parallelism} was asked for, but a GGUF file is always the whole model: leave "
            "--target-tp, --target-pp and --target-ep out"
        )
    target = _Target.of(config)
    stacks: dict[str, list[TensorRule]] = {}
    for rule in plan.rules.values():
        if rule.role in _NAMES:
            stacks.setdefault(f"{_NAMES[rule.role].format(layer=rule.layer)}.{rule.parameter}", []).append(rule)
    _check(list(plan.rules.values()), stacks)
    found = [_array(name, rules, target) for name, rules in stacks.items()]
    for name, content in read_rope(config).arrays().items():
        number = len(content) // 4
        found.append(
            Constant(FILE, name, "F32", (number,), (), content=content, what="factors of the rotary embedding")
        )
    return found


def _check(rules: Sequence[TensorRule], stacks: Mapping[str, Sequence[TensorRule]]) -> None:
    problems = []
    unknown = [rule for rule in rules if rule.role not in _NAMES]
    if unknown:
        roles = ", ".join(dict.fromkeys(rule.role for rule in unknown))
        problems.append(f"{len(unknown)} tensors have no name in GGUF ({roles}), the first {unknown[0].name}")
    alien = [r for r in rules if r.parameter not in ("weight", "bias") or type_of(r.dtype, r.shape) is None]
    if alien:
        problems.append(
            f"{len(alien)} tensors are of no type that GGUF has, the first {alien[0].name}, {alien[0].dtype} "
            f"{list(alien[0].shape)}; a quantised model must have been quantised with --format {NAME}"
        )
    narrow = [rule for rule in rules if _is_float32(rule) and rule.dtype == "F16"]
    if narrow:
        problems.append(
            f"{len(narrow)} norms, biases and routers are float16, the first {narrow[0].name}: llama.cpp wants them in "
            "float32, which can be written from bfloat16 or float32 only; convert the model to bfloat16 first, or "
            "choose --format hf"
        )
    for name, group in stacks.items():
        different = {(rule.dtype, rule.shape) for rule in group}
        if len(different) > 1:
            problems.append(f"{name}: its experts differ in number format or shape, and llama.cpp stacks them")
    if problems:
        raise PlanError(f"--format {NAME}: " + "; ".join(problems[:8]))


def _is_float32(rule: TensorRule) -> bool:
    return rule.role in _FLOAT32 or rule.parameter == "bias"


def _array(name: str, rules: Sequence[TensorRule], target: _Target) -> Array:
    first = rules[0]
    stacked = first.expert is not None
    widened = _is_float32(first) and first.dtype == "BF16"
    shares = []
    for number, rule in enumerate(rules):
        for share in _shares(rule, target):
            if widened:  # bfloat16 is the upper half of float32: every second element of an array twice as wide
                steps = share.steps or (1,) * len(share.box)
                origin = (*share.origin[:-1], 2 * share.origin[-1] + 1)
                share = replace(share, origin=origin, steps=(*steps[:-1], 2 * steps[-1]))
            shares.append(replace(share, origin=(number, *share.origin)) if stacked else share)
    shape = (*((len(rules),) if stacked else ()), *first.shape)
    if widened:
        return Widened(FILE, name, "BF16", (*shape[:-1], 2 * shape[-1]), tuple(shares))
    return Array(FILE, name, first.dtype, shape, tuple(shares))


def _shares(rule: TensorRule, target: _Target) -> list[Share]:
    """The places of a tensor's rows: in their order, or the two halves of each head by turns."""
    box, rest = whole(rule.shape), (0,) * (len(rule.shape) - 1)
    if not (target.interleaved and rule.role in target.heads):
        return [Share(rule.name, box, (0, *rest))]
    heads = target.heads[rule.role]
    half = rule.shape[0] // heads // 2
    found = []
    for start in range(0, heads * 2 * half, 2 * half):
        for which in (0, 1):
            rows = (start + which * half, start + (which + 1) * half)
            found.append(Share(rule.name, (rows, *box[1:]), (start + which, *rest), (2, *(1 for _ in rest))))
    return found


# ------------------------------------------------------------------ writing


def lay_out(
    plan: ShardPlan,
    config: dict[str, Any],
    *,
    max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES,
    source: Path | None = None,
) -> Layout:
    """Returns the layout of the one file, however large.

    Args:
        source: the directory of the model's tokenizer; None: the file gets none.

    Raises:
        PlanError: as :func:`arrays`; or llama.cpp's values have no place for what config.json says.
        CheckpointError: a file of the tokenizer is damaged.
    """
    found = arrays(plan, config)
    rules = list(plan.rules.values())
    entries = [Entry(array.name, *stored_form(array)) for array in found]
    header, offsets, size = encode_header(_values(plan, config, source), entries)
    inserts = tuple(
        (at, array.content) for array, at in zip(found, offsets, strict=True) if isinstance(array, Constant)
    )
    path = Path(FILE)
    places = {id(array): (path, at) for array, at in zip(found, offsets, strict=True)}
    infos = {rule.name: tensor_info(rule.name, rule.dtype, rule.shape, Path()) for rule in rules}
    return Layout(
        (LayoutFile(FILE, header, (), size, inserts),), infos, placements(found, lambda array: places[id(array)])
    )


def _values(plan: ShardPlan, config: dict[str, Any], source: Path | None) -> dict[str, Value]:
    vocab = _vocabulary(plan)
    kinds: Counter[str] = Counter()
    for rule in plan.rules.values():
        if rule.parameter == "weight" and not _is_float32(rule) and rule.role not in ("embedding", "head"):
            kind = type_of(rule.dtype, rule.shape)
            assert kind is not None
            kinds[kind] += tensor_info(rule.name, rule.dtype, rule.shape, Path()).nbytes
    return {
        **model_values(config, vocab=vocab, rope=read_rope(config)),
        **file_values(kinds),
        **read_tokenizer(source, config, vocab).values,
    }


def _vocabulary(plan: ShardPlan) -> int:
    return next(rule.shape[0] for rule in plan.rules.values() if rule.role == "embedding")


def side_files(plan: ShardPlan, config: dict[str, Any], layout: Layout) -> Mapping[str, bytes]:
    """None: everything is in the file."""
    return {}


def notes(plan: ShardPlan, config: dict[str, Any], source: Path | None) -> list[str]:
    """Warnings to give before the file is written."""
    return describe(read_tokenizer(source, config, _vocabulary(plan)))


def restored_files(checkpoint: Checkpoint) -> tuple[Mapping[str, bytes], Mapping[str, str]]:
    """The tokenizer's files, where the directory has none and the GGUF file says what is in them.

    Returns:
        (name -> content, name -> why it could not be made).

    Raises:
        CheckpointError: what the file says is damaged.
    """
    if any(has_file(checkpoint.directory, name) for name in ("tokenizer.json", "tokenizer.model")):
        return {}, {}
    found = restore_tokenizer(checkpoint.files[0])
    return found.files, {} if found.missing is None else {"tokenizer.json": f"not made: {found.missing}"}


# ------------------------------------------------------------------ reading


def recognises(directory: Path) -> bool:
    """Returns whether a directory's weights are one or several GGUF files."""
    names = os.listdir(directory)
    return any(name.endswith(_SUFFIX) for name in names) and not any(name.endswith(".safetensors") for name in names)


def open(directory: Path, config: dict[str, Any] | None, rules: Rules) -> Checkpoint:  # as in every format module
    """Open what :func:`lay_out`, or llama.cpp's own conversion of such a model, wrote.

    Args:
        config: the model's config.json in Hugging Face's keys; None: the one in the directory.
        rules: as :func:`modelexport.models.rules.expected_rules`.

    Raises:
        CheckpointError: there are several files, or no config.json; the file is damaged, holds types that are not read
            (each by name), or not the model that config.json describes; everything that is wrong.
    """
    found = read_gguf(_the_file(directory))
    if config is None:
        if not has_file(directory, "config.json"):
            raise CheckpointError(
                f"{directory}: a GGUF file without a config.json; give --config DIR, the directory or file of the "
                "config.json that the model had"
            )
        config = read_json(directory / "config.json", largest=LARGEST_CONFIG)
    try:
        # A PlanError is about a config.json that is not this file's, or of a model that is not read from GGUF.
        model = str(found.values.get("general.architecture"))
        if model != architecture(config):
            raise CheckpointError(f"{found.path}: holds a '{model}', config.json is of a '{config.get('model_type')}'")
        factors = read_rope(config).arrays()
    except PlanError as error:
        raise CheckpointError(f"{directory}: config.json: {error}") from error
    problems = _check_factors(found, factors)
    embedding = found.infos.get("token_embd.weight")
    if embedding is not None and embedding.dtype == "U8":
        problems.append(
            f"token_embd.weight is {type_of(embedding.dtype, embedding.shape)}, and quantised embeddings are not read; "
            "convert the model with an unquantised one (llama-quantize --token-embedding-type f16)"
        )
    raise_problems(directory, problems)
    config = _with_types(config, found, rules)
    narrow = embedding is not None and embedding.dtype == "BF16"

    def dtype_of(rule: TensorRule, info: TensorInfo) -> str:
        """Norms and biases are small: they are read, to see whether they are a bfloat16 model's."""
        return "BF16" if narrow and _is_float32(rule) and info.dtype == "F32" and only_widened(info) else info.dtype

    checkpoint = open_arrays(
        directory,
        config,
        rules,
        {FILE: {name: info for name, info in found.infos.items() if name not in _ROPE_FACTORS}},
        parallelism=Parallelism(),
        arrays=lambda plan, own: [array for array in arrays(plan, own) if not isinstance(array, Constant)],
        dtype_of=dtype_of,
        format_name=NAME,
        headers={},
    )
    return replace(checkpoint, left_out=dict.fromkeys(factors, "factors of the rotary embedding"))


def _the_file(directory: Path) -> Path:
    names = sorted(name for name in os.listdir(directory) if name.endswith(_SUFFIX))
    if len(names) != 1:
        listed = ", ".join(names[:4])
        raise CheckpointError(f"{directory}: has {len(names)} GGUF files ({listed}); keep the one that is meant there")
    return directory / names[0]


def _check_factors(found: GgufFile, factors: Mapping[str, bytes]) -> list[str]:
    """Checks the factors of the rotary embedding against config.json."""
    problems = []
    for name in _ROPE_FACTORS:
        info, wanted = found.infos.get(name), factors.get(name)
        if info is None and wanted is None:
            continue
        if info is None or wanted is None:
            problems.append(f"{name} is {'missing' if info is None else 'there, but config.json has no such factors'}")
        elif info.dtype != "F32" or info.nbytes != len(wanted):
            problems.append(f"{name} is {info.dtype} {list(info.shape)}, config.json makes it {len(wanted) // 4} F32")
        else:
            with open_regular(info.path) as stream:
                stream.seek(info.offset)
                theirs = stream.read(info.nbytes)
            pairs = zip(struct.iter_unpack("<f", theirs), struct.iter_unpack("<f", wanted), strict=True)
            if any(abs(a - b) > _CLOSE * abs(b) for (a,), (b,) in pairs):
                problems.append(f"{name} holds other factors than config.json makes")
    return problems


def _with_types(config: dict[str, Any], found: GgufFile, rules: Rules) -> dict[str, Any]:
    """config.json with the block types of the file's linears, where it does not have them."""
    own = config.get("quantization_config")
    if isinstance(own, dict) and own.get("quant_method") == NAME:
        return config
    plain = {key: value for key, value in config.items() if key not in ("quantization_config", "compression_config")}
    kinds = {name: type_of(info.dtype, info.shape) for name, info in found.infos.items()}
    blocks = {name: kind for name, kind in kinds.items() if kind is not None and TYPES[kind].block > 1}
    if not blocks:
        return plain
    types: dict[str, list[str]] = {}
    everything = rules(plain, "BF16", has=lambda name: True)
    modules = {rule.name: rule.module for rule in everything}
    plan = build_shard_plan(everything, Parallelism(), layers=1 + max((r.layer or 0 for r in everything), default=0))
    for array in arrays(plan, plain):
        if array.name in blocks:
            held = dict.fromkeys(modules[share.tensor] for share in array.shares)
            types.setdefault(blocks[array.name], []).extend(held)
    return {**plain, "quantization_config": {"quant_method": NAME, "types": types, "ignore": []}}
