"""config.json of a GGUF file that has none beside it, from the file's values and tensors.

The table of :mod:`modelexport.checkpoints.gguf.architectures` read the other way: each value's source tells the keys
that make it. A config.json is taken only if the table makes of it every value that the file has, and no other: else the
error says which one differs, and the next model type that llama.cpp has the architecture of is tried.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelexport.checkpoints.gguf.architectures import ARCHITECTURES, ROPE_FACTORS, VALUES, GgufArchitecture
from modelexport.checkpoints.gguf.defaults import DEFAULTS
from modelexport.checkpoints.gguf.file import GgufFile, read_values
from modelexport.checkpoints.gguf.metadata import (
    ACTIVATIONS,
    FACTOR_TOLERANCE,
    NEXTN,
    architecture,
    model_values,
    read_config,
    read_rope,
    restore_rope,
)
from modelexport.checkpoints.gguf.values import by_period
from modelexport.checkpoints.safetensors.header import TensorInfo
from modelexport.errors import CheckpointError, ModelExportError, error_text, shown
from modelexport.system.small_files import open_regular

NOTE = "config.json was made from the GGUF file's values"
_FLAGS = {
    "attention_bias": ("attn_q.bias", "attn_qkv.bias"),
    "use_qkv_bias": ("attn_q.bias",),
    "qkv_bias": ("attn_q.bias",),
    "attention_out_bias": ("attn_output.bias",),
    "mlp_bias": ("ffn_up.bias",),
    "mamba_conv_bias": ("ssm_conv1d.bias",),
    "mamba_rms_norm": ("ssm_norm.weight",),
    "use_qk_norm": ("attn_q_norm.weight",),
    "qk_layernorm": ("attn_q_norm.weight",),
}
"""Keys of config.json, of the models that have them, and the arrays of a layer by whose presence they are true."""
_TOKENS = {
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "padding_token_id": "pad_token_id",
}
_DTYPES = {"BF16": "bfloat16", "F16": "float16"}
_FOLLOWING = ("attention.head_count_kv", "attention.key_length", "attention.value_length", "vocab_size")
"""Values that llama.cpp derives from others where a file lacks them, of whatever architecture."""
_FOLLOWING_ROPE = ("rope.freq_base", "rope.dimension_count", "rope.scaling.type")
_MOST_FACTORS = 1 << 16


class _Unlike(Exception):
    """No config.json of a model type makes the file's values."""


@dataclass(frozen=True)
class _Contents:
    """The part of a file that describes its model.

    Attributes:
        values: by name, without the architecture's.
        arrays: names of its tensors.
        factors: of the rotary embedding, by name.
        filled: the first number of arrays of the first layer that hold one of config.json, by their names in it.
        vocab: rows of the embedding.
    """

    values: Mapping[str, Any]
    arrays: frozenset[str]
    factors: Mapping[str, tuple[float, ...]]
    filled: Mapping[str, float]
    vocab: int

    def in_a_layer(self, names: Iterable[str]) -> bool:
        """Returns whether a layer has one of some arrays."""
        return any(name.partition(".")[2].partition(".")[2] in names for name in self.arrays)


def restored_configs(found: GgufFile) -> Iterator[dict[str, Any]]:
    """Make the content of config.json: of one model type after the other whose config.json makes the file's values.

    Raises:
        CheckpointError: the file is damaged; or no config.json is known that makes its values, with the reason for
            each model type.
    """
    name = found.values.get("general.architecture")
    targets = [(each, kind) for each in ARCHITECTURES if each.name == name for kind in each.model_types]
    if not targets:
        raise _refused(found.path, f"no config.json is known for its architecture '{shown(name)}'")
    contents = _contents(found, str(name))
    reasons: dict[str, str] = {}
    for target, kind in targets:
        try:
            made = _made(target, kind, contents)
        except (_Unlike, ModelExportError) as error:
            reasons[kind] = error_text(error)
        else:
            yield {**made, **_beside(found, kind)}
    if len(reasons) == len(targets):
        raise _refused(found.path, "; ".join(f"as {kind}: {reason}" for kind, reason in reasons.items()))


def _refused(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: there is no config.json beside it, and none can be made from its values: {why}. Give --config DIR, "
        "the directory or file of the config.json that the model had"
    )


def _contents(found: GgufFile, name: str) -> _Contents:
    prefix = f"{name}."
    own = {key for key in found.values if key.startswith(prefix)}
    values = read_values(found.path, own)
    embedding = found.infos.get("token_embd.weight")
    if embedding is None:
        raise _refused(found.path, "token_embd.weight is missing")
    factors = {each: _factors(found.infos[each]) for each in ROPE_FACTORS if each in found.infos}
    told = {array: f"blk.0.{array}" for each in ARCHITECTURES if each.name == name for array in each.filled}
    filled = {array: _factors(found.infos[own])[0] for array, own in told.items() if own in found.infos}
    own_values = {key.removeprefix(prefix): values[key] for key in own}
    return _Contents(own_values, frozenset(found.infos), factors, filled, embedding.shape[0])


def _factors(info: TensorInfo) -> tuple[float, ...]:
    if info.dtype != "F32" or len(info.shape) != 1 or not 0 < info.shape[0] <= _MOST_FACTORS:
        raise CheckpointError(f"{info.path}: {info.name} is {info.dtype} {list(info.shape)}, a row of F32 is needed")
    with open_regular(info.path) as stream:
        stream.seek(info.offset)
        return struct.unpack(f"<{info.shape[0]}f", stream.read(info.nbytes))


def _beside(found: GgufFile, kind: str) -> dict[str, Any]:
    """The dtype of the numbers that are not in blocks, and the special tokens."""
    tokens = {key: found.values.get(f"tokenizer.ggml.{own}") for own, key in _TOKENS.items()}
    dtype = _DTYPES.get(found.infos["token_embd.weight"].dtype, "float32")
    said = {key: value for key, value in tokens.items() if isinstance(value, int)}
    padding = {"pad_token_id": None}  # some classes assume one that is in their own vocabulary, and some want any
    return {"dtype": dtype, **({} if "pad_token_id" in DEFAULTS.get(kind, {}) else padding), **said}


def _made(target: GgufArchitecture, kind: str, contents: _Contents) -> dict[str, Any]:
    values, drafts = _without_drafts({**target.assumed, **contents.values}, target)
    config: dict[str, Any] = {"model_type": kind, "vocab_size": contents.vocab}
    if drafts and target.drafts is not None and target.drafts.count:
        config[target.drafts.count] = drafts
    sources = {key: source for key, source in {**VALUES, **target.values}.items() if source and key != "vocab_size"}
    before = -1
    while before != len(config):  # a value may need what another tells
        before = len(config)
        for key, source in sources.items():
            _add(config, source.write(values.get(key), read_config(config)))
    for array, source in target.filled.items():
        _add(config, source.write(contents.filled.get(array), read_config(config)))
    config["tie_word_embeddings"] = "output.weight" not in contents.arrays
    for key in filter(DEFAULTS.get(kind, {}).__contains__, _FLAGS.keys() - {rule.key for rule in target.rules}):
        _add(config, {key: contents.in_a_layer(_FLAGS[key])})
    activation = next(filter(read_config(config).has, ACTIVATIONS), None)
    if activation is not None and read_config(config).content[activation] not in target.activations:
        config[activation] = target.activations[0]
    for rule in target.rules:
        _add(config, rule.write(read_config(config)))
    for key, source in target.implied.items():
        value = source.read(read_config(config))
        _add(config, {key: list(value) if isinstance(value, tuple) else value})
    told = config.get("rope_parameters", {})
    config |= restore_rope(target, read_config(config), values, contents.factors)
    if told:
        config["rope_parameters"] = {**told, **config["rope_parameters"]}
    _check(target, config, values, contents)
    return config


def _without_drafts(values: dict[str, Any], target: GgufArchitecture) -> tuple[dict[str, Any], int]:
    """The values of the model without its draft layers, and the number of these."""
    drafts, blocks = values.get(NEXTN, 0), values.get("block_count")
    if drafts == 0:  # some conversions count none, of whatever architecture
        return {key: value for key, value in values.items() if key != NEXTN}, 0
    if target.drafts is None:
        return values, 0
    if not all(isinstance(each, int) and not isinstance(each, bool) for each in (drafts, blocks)):
        raise _Unlike(f"{target.name}.{NEXTN} is {shown(drafts)} and block_count {shown(blocks)}, no whole numbers")
    if not 0 < drafts < blocks:
        raise _Unlike(f"{target.name}.{NEXTN} is {drafts}, and block_count, which has them in it, {blocks}")
    told = {key: value for key, value in values.items() if key != NEXTN} | {"block_count": blocks - drafts}
    for key in target.drafts.listed:
        if isinstance(told.get(key), (list, tuple)):
            told[key] = told[key][: blocks - drafts]
    return told, drafts


def _add(config: dict[str, Any], told: Mapping[str, Any]) -> None:
    """Adds keys that are not there yet; a dot leads into a part."""
    for key, value in told.items():
        part, _, name = key.rpartition(".")
        (config.setdefault(part, {}) if part else config).setdefault(name, value)


def _check(target: GgufArchitecture, config: dict[str, Any], values: Mapping[str, Any], contents: _Contents) -> None:
    """Checks that the config.json makes what the file says."""
    if architecture(config) is not target:
        raise _Unlike("its values are those of a model that llama.cpp computes otherwise")
    rope = read_rope(config)
    made = {key.removeprefix(f"{target.name}."): value for key, value in _values(config, contents.vocab).items()}
    following = {*_FOLLOWING, *(_FOLLOWING_ROPE if target.rotated is not None else ())}
    for key in dict.fromkeys((*values, *made)):
        own = values.get(key)
        if key not in made:
            if (key, own) not in (("rope.scaling.type", "none"), ("rope.scaling.type", "linear")):
                raise _Unlike(f"{target.name}.{key} is {shown(own)}, of which nothing is known for such a model")
        elif key not in values:
            if key not in following and made[key] is not False:
                raise _Unlike(f"{target.name}.{key} is missing in the file")
        elif not _same(own, made[key]):
            raise _Unlike(f"{target.name}.{key} is {shown(own)}, and would be {shown(made[key])}")
    for name in dict.fromkeys((*contents.factors, *rope.factors)):
        if not _near(contents.factors.get(name, ()), rope.factors.get(name, ())):
            raise _Unlike(f"{name} holds other factors than any settings of the rotary embedding make")


def _values(config: dict[str, Any], vocab: int) -> dict[str, Any]:
    found: dict[str, Any] = dict(model_values(config, vocab=vocab, rope=read_rope(config)))
    del found["general.architecture"]
    return found


def _same(own: Any, made: Any) -> bool:
    """Returns whether a value of the file is one that was made, as far as float32 tells."""
    if isinstance(made, Sequence) and not isinstance(made, str):
        if isinstance(own, int) and not isinstance(own, bool):
            return by_period(own, len(made)) == tuple(made)
        if not isinstance(own, (list, tuple)):
            return False
        return _near(own, made) if any(isinstance(each, float) for each in made) else list(own) == list(made)
    if isinstance(made, float) and isinstance(own, (int, float)) and not isinstance(own, bool):
        return _near((own,), (made,))
    return type(own) is type(made) and bool(own == made)


def _near(own: Sequence[float], made: Sequence[float]) -> bool:
    return len(own) == len(made) and all(
        abs(a - b) <= FACTOR_TOLERANCE * abs(b) for a, b in zip(own, made, strict=True)
    )
