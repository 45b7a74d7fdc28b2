"""The tokenizer of a GGUF file as another GGUF file takes it over: value by value."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from modelexport.checkpoints.gguf.file import Value, read_values
from modelexport.checkpoints.gguf.tokenizer.special_tokens import SPECIAL
from modelexport.checkpoints.gguf.tokenizer.vocabulary import Token, Unlike, Vocabulary
from modelexport.errors import CheckpointError

_PREFIX = "tokenizer.ggml."
_CHARSMAP = f"{_PREFIX}precompiled_charsmap"
_TOKENS, _TYPES, _SCORES = (f"{_PREFIX}{name}" for name in ("tokens", "token_type", "scores"))
ARRAYS = frozenset(
    {_TOKENS, _TYPES, _SCORES, _CHARSMAP, f"{_PREFIX}merges", f"{_PREFIX}suppress_tokens", "tokenizer.chat_templates"}
)
"""The arrays among a tokenizer's values."""
_FILLS = ("fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep")
_SCALARS: dict[str, type] = {
    **{f"{_PREFIX}{name}_token_id": int for name in (*SPECIAL, "eot", "eom", *_FILLS)},
    **{f"{_PREFIX}add_{name}": bool for name in ("bos_token", "eos_token", "sep_token", "space_prefix")},
    f"{_PREFIX}remove_extra_whitespaces": bool,
    f"{_PREFIX}model": str,
    f"{_PREFIX}pre": str,
    "tokenizer.chat_template": str,
}


def gguf_in(directory: Path) -> Path | None:
    """The GGUF file in a directory that says what a model's tokenizer is: the only one, or the first of its parts."""
    names = sorted(name for name in os.listdir(directory) if name.endswith(".gguf"))
    return directory / names[0] if names else None


def carry(path: Path, rows: int) -> Vocabulary:
    """The values of a GGUF file's tokenizer, for one whose embedding has ``rows``.

    Raises:
        Unlike: the file has none.
        CheckpointError: it cannot be read, or a value is of another kind than it has to be.
    """
    said = read_values(path, ARRAYS)
    values: dict[str, Value] = {}
    for name, kind in _SCALARS.items():
        if name in said:
            values[name] = _checked(path, name, said[name], kind)
    for name in ARRAYS & said.keys():
        values[name] = _array(path, name, said[name])
    named = values.get("tokenizer.chat_templates", [])
    assert isinstance(named, list)
    for name in (f"tokenizer.chat_template.{each}" for each in named):
        if name in said:
            values[name] = _checked(path, name, said[name], str)
    tokens = said.get(_TOKENS)
    if not tokens:
        raise Unlike("it has no tokens")
    types, scores = said.get(_TYPES) or [1] * len(tokens), said.get(_SCORES) or [0.0] * len(tokens)
    if not len(tokens) == len(types) == len(scores):
        raise CheckpointError(f"{path}: {len(tokens):,} tokens, {len(types):,} types and {len(scores):,} scores")
    found = Vocabulary(values)
    every = {number: Token(*each) for number, each in enumerate(zip(tokens, types, scores, strict=True))}
    found.put(every, rows, scored=_SCORES in said)
    return found


def _checked(path: Path, name: str, value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise CheckpointError(f"{path}: {name} is a {type(value).__name__}, not a {kind.__name__}")
    return value


def _array(path: Path, name: str, value: Any) -> Value:
    kinds = {type(each) for each in value} if isinstance(value, list) else set()
    if len(kinds) != 1:
        raise CheckpointError(f"{path}: {name} is no array of one kind")
    if name == _CHARSMAP:
        return bytes(_checked(path, name, each, int) & 0xFF for each in value)
    wanted = {_TYPES: int, _SCORES: float, f"{_PREFIX}suppress_tokens": int}.get(name, str)
    _checked(path, name, value[0], wanted)
    return list(value)
