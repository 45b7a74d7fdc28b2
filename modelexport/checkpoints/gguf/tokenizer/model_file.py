"""SentencePiece's tokenizer.model: a protocol buffer, of which the few fields that matter are read.

Follows sentencepiece_model.proto. Nothing is taken on trust: lengths are checked against what is left.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from modelexport.errors import CheckpointError
from modelexport.system.small_files import read_small

UNIGRAM, BPE = 1, 2
"""The algorithms, by SentencePiece's numbers."""
_LARGEST = 64 << 20
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_DEFAULT_SPECIAL = {"unknown": (40, 0), "bos": (41, 1), "eos": (42, 2), "padding": (43, -1)}


@dataclass(frozen=True)
class SentencePiece:
    """A token: its text, its score, and its type by the number that GGUF has for it, too."""

    text: str
    score: float
    kind: int


@dataclass(frozen=True)
class SentencePieceModel:
    """The content of a tokenizer.model, as far as it matters.

    Attributes:
        algorithm: :data:`UNIGRAM`, :data:`BPE`, or another's number.
        special: numbers of special tokens by llama.cpp's names; -1: there is none.
        prefix: whether a space is put in front of a text.
        merges_spaces: whether several spaces become one.
        escapes: whether spaces become U+2581.
        suffix: whether they stand behind words.
        charsmap: the map of characters to others; empty for none.
    """

    pieces: tuple[SentencePiece, ...]
    algorithm: int
    special: Mapping[str, int]
    prefix: bool
    merges_spaces: bool
    escapes: bool
    suffix: bool
    charsmap: bytes


def read_model(path: Path) -> SentencePieceModel:
    """Read a tokenizer.model.

    Raises:
        CheckpointError: it cannot be read, is larger than any, or is damaged.
    """
    content = read_small(path, largest=_LARGEST)
    try:
        return _model(content)
    except (ValueError, struct.error) as error:
        raise CheckpointError(f"{path}: is no SentencePiece model, or is damaged: {error}") from error


def _model(content: bytes) -> SentencePieceModel:
    pieces = []
    trainer: dict[int, int | bytes] = {}
    normalizer: dict[int, int | bytes] = {}
    for field, value in _fields(content):
        if field == _PIECES:
            pieces.append(_piece(_message(value)))
        elif field == _TRAINER:
            trainer |= dict(_fields(_message(value)))
        elif field == _NORMALIZER:
            normalizer |= dict(_fields(_message(value)))
    if not pieces:
        raise ValueError("it has no pieces")
    charsmap = normalizer.get(2, b"")
    return SentencePieceModel(
        tuple(pieces),
        algorithm=_number(trainer.get(3, UNIGRAM)),
        special={name: _number(trainer.get(field, default)) for name, (field, default) in _DEFAULT_SPECIAL.items()},
        prefix=bool(normalizer.get(3, 1)),
        merges_spaces=bool(normalizer.get(4, 1)),
        escapes=bool(normalizer.get(5, 1)),
        suffix=bool(trainer.get(24, 0)),
        charsmap=_message(charsmap),
    )


def _piece(content: bytes) -> SentencePiece:
    fields = dict(_fields(content))
    (score,) = struct.unpack("<f", _message(fields.get(2, b"\0\0\0\0")))
    return SentencePiece(_message(fields.get(1, b"")).decode(), score, _number(fields.get(3, 1)))


def _message(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("a number where a message is expected")
    return value


def _number(value: int | bytes) -> int:
    if isinstance(value, bytes):
        raise ValueError("a message where a number is expected")
    return value - (1 << 64) if value >= 1 << 63 else value  # int32 in the ten bytes of an int64


def _fields(content: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a message: their numbers, and a number or the bytes of each."""
    at = 0
    while at < len(content):
        tag, at = _varint(content, at)
        kind = tag & 7
        if kind == 0:
            value, at = _varint(content, at)
            yield tag >> 3, value
            continue
        if kind == 2:
            size, at = _varint(content, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError(f"a field of the unknown type {kind} at byte {at:,}")
        if size > len(content) - at:
            raise ValueError(f"a field of {size:,} bytes, {len(content) - at:,} are left")
        yield tag >> 3, content[at : at + size]
        at += size


def _varint(content: bytes, at: int) -> tuple[int, int]:
    found = 0
    for place in range(10):
        if at >= len(content):
            raise ValueError("it ends within a number")
        found |= (content[at] & 0x7F) << (7 * place)
        at += 1
        if not content[at - 1] & 0x80:
            return found, at
    raise ValueError(f"a number of more than ten bytes at byte {at:,}")
