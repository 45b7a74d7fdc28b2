"""The tokenizer of a GGUF file as transformers' files, with the token ids that llama.cpp gives.

Restored are byte-level BPE with a pre-tokenizer that is known, and SentencePiece's BPE with byte fallback, whose merges
follow from its scores. Of any other nothing is restored, and the reason is told.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modelexport.checkpoints.gguf.file import read_values
from modelexport.checkpoints.gguf.tokenizer.byte_level import Merge, check_apart
from modelexport.checkpoints.gguf.tokenizer.pretokenizers import BY_NAME, PreTokenizer, as_json
from modelexport.checkpoints.gguf.tokenizer.sentencepiece import (
    BYTE_TOKENS,
    PHI3_KEEPS,
    is_phi3,
    keeps_lines_apart,
    runs_alike,
)
from modelexport.checkpoints.gguf.tokenizer.special_tokens import SPECIAL
from modelexport.checkpoints.gguf.tokenizer.vocabulary import (
    BYTE,
    CONTROL,
    NORMAL,
    SPACE,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Token,
    Unlike,
    check_lengths,
)
from modelexport.errors import CheckpointError, quoted, shown

_PREFIX = "tokenizer.ggml."
_ARRAYS = {f"{_PREFIX}{name}" for name in ("tokens", "token_type", "scores", "merges")} | {"tokenizer.chat_templates"}


@dataclass(frozen=True)
class RestoredTokenizer:
    """A tokenizer's files by name; where there are none, why."""

    files: Mapping[str, bytes] = field(default_factory=dict)
    missing: str | None = None


def restore_tokenizer(path: Path) -> RestoredTokenizer:
    """Make tokenizer.json and tokenizer_config.json of what a GGUF file says of its tokenizer.

    Raises:
        CheckpointError: the file cannot be read, or what it says is damaged.
    """
    header = _Header(path, read_values(path, _ARRAYS))
    try:
        main = _main(header)
    except Unlike as unlike:
        return RestoredTokenizer(missing=unlike.why)
    config = _config(header)
    files = {"tokenizer.json": main, "tokenizer_config.json": config}
    return RestoredTokenizer({name: _dumped(content) for name, content in files.items()})


def _dumped(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, ensure_ascii=False, indent=1) + "\n").encode("utf-8", "surrogatepass")


@dataclass(frozen=True)
class _Header:
    """The values of a GGUF file, each of the kind that it has to be."""

    path: Path
    values: Mapping[str, Any]

    def text(self, name: str, default: str = "") -> str:
        value = self.values.get(name, default)
        if not isinstance(value, str):
            raise self.wrong(name, "a text")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(_PREFIX + name, default)
        if not isinstance(value, bool):
            raise self.wrong(_PREFIX + name, "true or false")
        return value

    def array(self, name: str, kind: type, size: int | None = None) -> list[Any] | None:
        """An array's elements; None where there is none."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or any(type(each) is not kind for each in value):
            raise self.wrong(name, f"an array of {kind.__name__}")
        if size is not None and len(value) != size:
            raise CheckpointError(f"{self.path}: {name} has {len(value):,} elements for {size:,} tokens")
        return value

    def wrong(self, name: str, wanted: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {name} is {quoted(self.values.get(name))}, not {wanted}")

    def tokens(self) -> list[Token]:
        texts = self.array(f"{_PREFIX}tokens", str)
        if not texts:
            raise Unlike("the file has no tokens")
        kinds = self.array(f"{_PREFIX}token_type", int, len(texts)) or [NORMAL] * len(texts)
        scores = self.array(f"{_PREFIX}scores", float, len(texts)) or [0.0] * len(texts)
        return [Token(*each) for each in zip(texts, kinds, scores, strict=True)]

    def special(self, name: str, size: int) -> int | None:
        """A special token's number; None where there is none, or llama.cpp disregards it."""
        value = self.values.get(f"{_PREFIX}{name}_token_id")
        return value if type(value) is int and 0 <= value < size else None


# ------------------------------------------------------------------ tokenizer.json


def _main(header: _Header) -> dict[str, Any]:
    model = header.text(f"{_PREFIX}model")
    if model not in ("gpt2", "llama", "gemma4"):
        raise Unlike(f"its model is '{shown(model)}'; gpt2, llama and gemma4 are restored")
    tokens = header.tokens()
    if model == "llama":
        return _with_tokens(header, tokens, _sentencepiece(header, tokens), adds_bos=True)
    name = model if model == "gemma4" else header.text(f"{_PREFIX}pre", "default")
    if name in _BY_MERGES:
        return _with_tokens(header, tokens, _by_merges(header, tokens), adds_bos=_BY_MERGES[name])
    pre = BY_NAME.get(name)
    if pre is None:
        raise Unlike(f"its pre-tokenizer is '{shown(name)}', whose expressions are not known here")
    return _with_tokens(header, tokens, _byte_level(header, tokens, pre), adds_bos=pre.adds_bos)


_BY_MERGES = {"sarvam-moe": False, "gemma4": True, "granite-embed-multi-311m": True}
"""The pre-tokenizers of BPE over characters with U+2581 for spaces -> whether llama.cpp puts bos before a text."""


def _byte_level(header: _Header, tokens: Sequence[Token], pre: PreTokenizer) -> dict[str, Any]:
    vocab, merges = _vocab(tokens), _merges(header)
    check_apart(pre, merges)
    level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
    return {
        "normalizer": None,
        "pre_tokenizer": as_json(pre),
        "post_processor": level,
        "decoder": level,
        "model": _bpe(vocab, merges, ignore_merges=pre.ignores_merges),
    }


def _bpe(vocab: Mapping[str, int], merges: Sequence[Merge], **settings: Any) -> dict[str, Any]:
    """A model of tokens and merges, those that make no token left out."""
    kept = [list(merge) for merge in merges if "".join(merge) in vocab and merge[0] in vocab and merge[1] in vocab]
    usual: dict[str, Any] = {
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
    }
    usual |= {"fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    return {"type": "BPE", **usual, **settings, "vocab": dict(vocab), "merges": kept}


def _merges(header: _Header) -> list[Merge]:
    found = []
    for merge in header.array(f"{_PREFIX}merges", str) or []:
        at = merge.find(" ", 1)
        if at < 0:
            raise CheckpointError(f"{header.path}: a merge is {quoted(merge)}, without a space between two tokens")
        found.append((merge[:at], merge[at + 1 :]))
    return found


def _vocab(tokens: Sequence[Token]) -> dict[str, int]:
    """Texts -> numbers, without those that fill the embedding's rows.

    Raises:
        Unlike: two tokens have the same text.
    """
    vocab: dict[str, int] = {}
    for number, token in enumerate(tokens):
        if token.kind == UNUSED and token.text.strip("[]") == f"PAD{number}":
            continue
        if token.text in vocab:
            raise Unlike(f"tokens {vocab[token.text]} and {number} are both {quoted(token.text)}")
        vocab[token.text] = number
    return vocab


def _sentencepiece(header: _Header, tokens: Sequence[Token]) -> dict[str, Any]:
    """Merges by scores: as a list, which has them in the same order."""
    prefix = header.flag("add_space_prefix", True)
    before = [{"type": "Prepend", "prepend": SPACE}] if prefix else []
    vocab = _vocab(tokens)
    merges = _merges_of_scores(tokens, vocab)
    return _spaced(tokens, vocab, merges, before, strips=prefix)


def _by_merges(header: _Header, tokens: Sequence[Token]) -> dict[str, Any]:
    vocab = _vocab(tokens)
    keeps_lines_apart(vocab)
    return _spaced(tokens, vocab, _merges(header), [], strips=False)


def _spaced(
    tokens: Sequence[Token],
    vocab: Mapping[str, int],
    merges: Sequence[Merge],
    before: list[dict[str, Any]],
    *,
    strips: bool,
) -> dict[str, Any]:
    """BPE with byte fallback whose spaces are U+2581."""
    if any(text not in vocab for text in BYTE_TOKENS):
        raise Unlike("it has not a token for every byte, which byte fallback needs")
    replaced = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    decoders: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": SPACE}, "content": " "}]
    decoders += [{"type": "ByteFallback"}, {"type": "Fuse"}]
    if strips:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = next((token.text for token in tokens if token.kind == UNKNOWN), None)
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*before, replaced]},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True),
    }


def _merges_of_scores(tokens: Sequence[Token], vocab: Mapping[str, int]) -> list[Merge]:
    """All pairs of tokens that make a token, the highest score first.

    Raises:
        Unlike: two of the tokens that they make have the same score, so that their places in a text decide which comes
            first, and a list cannot say that.
    """
    check_lengths(vocab)
    made: dict[float, list[str]] = {}
    found: list[tuple[float, int, int, int, Merge]] = []
    for number, token in enumerate(tokens):
        text = token.text
        if token.kind not in (NORMAL, UNUSED, BYTE) or vocab.get(text) != number:
            continue
        pairs = [(text[:at], text[at:]) for at in range(1, len(text))]
        pairs = [pair for pair in pairs if pair[0] in vocab and pair[1] in vocab]
        if pairs:
            made.setdefault(token.score, []).append(text)
            found += [(-token.score, number, vocab[left], vocab[right], (left, right)) for left, right in pairs]
    merges = [merge for *_, merge in sorted(found)]
    for score, texts in made.items():
        if score != score or (len(texts) > 1 and not _runs_alike(texts, merges)):
            raise Unlike(f"{len(texts)} of its tokens have the score {score:g}, the first {quoted(texts[0])}")
    return merges


def _runs_alike(texts: Sequence[str], merges: Sequence[Merge]) -> bool:
    """Returns whether tokens of one score, all of them one character again and again, come of merges as of scores.

    Llama's spaces are such.
    """
    if len(set("".join(texts))) > 1:
        return False
    own = set(texts)
    ranks = {(len(merge[0]), len(merge[1])): rank for rank, merge in enumerate(merges) if "".join(merge) in own}
    return runs_alike(ranks, dict.fromkeys(ranks, 0.0))


def _with_tokens(header: _Header, tokens: Sequence[Token], main: dict[str, Any], *, adds_bos: bool) -> dict[str, Any]:
    """With added tokens, and what is put around a text."""
    strips = is_phi3(header.text("general.name"))
    added = [_added(number, token, strips) for number, token in enumerate(tokens) if token.kind in _ADDED]
    first = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added}
    around = _around(header, tokens, adds_bos=adds_bos)
    if around is not None:
        own = main["post_processor"]
        main["post_processor"] = around if own is None else {"type": "Sequence", "processors": [own, around]}
    return first | main


_ADDED = (CONTROL, USER_DEFINED, UNKNOWN)


def _added(number: int, token: Token, strips: bool) -> dict[str, Any]:
    rstrip = strips and token.text not in PHI3_KEEPS
    flags = {"single_word": False, "lstrip": False, "rstrip": rstrip, "normalized": False}
    return {"id": number, "content": token.text, **flags, "special": token.kind != USER_DEFINED}


def _around(header: _Header, tokens: Sequence[Token], *, adds_bos: bool) -> dict[str, Any] | None:
    """The template of a text between bos and eos; None where nothing is put around it."""
    usual = {"bos": adds_bos, "eos": False}
    places: dict[str, list[dict[str, Any]]] = {"bos": [], "eos": []}
    numbers: dict[str, Any] = {}
    for name, default in usual.items():
        number = header.special(name, len(tokens))
        if header.flag(f"add_{name}_token", default) and number is not None:
            text = tokens[number].text
            places[name] = [{"SpecialToken": {"id": text, "type_id": 0}}]
            numbers[text] = {"id": text, "ids": [number], "tokens": [text]}
    if not numbers:
        return None
    single = [*places["bos"], {"Sequence": {"id": "A", "type_id": 0}}, *places["eos"]]
    second = [{kind: {**piece, "type_id": 1} for kind, piece in each.items()} for each in single]
    second[len(places["bos"])]["Sequence"]["id"] = "B"
    return {"type": "TemplateProcessing", "single": single, "pair": [*single, *second], "special_tokens": numbers}


# ------------------------------------------------------------------ tokenizer_config.json


def _config(header: _Header) -> dict[str, Any]:
    tokens = header.tokens()
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, key in SPECIAL.items():
        number = header.special(name, len(tokens))
        if number is not None:
            config[f"{key}_token"] = tokens[number].text
    template = header.text("tokenizer.chat_template")
    names = header.array("tokenizer.chat_templates", str) or []
    named = {name: header.text(f"tokenizer.chat_template.{name}") for name in names}
    if named:
        every = {**({"default": template} if template else {}), **named}
        config["chat_template"] = [{"name": name, "template": text} for name, text in every.items()]
    elif template:
        config["chat_template"] = template
    return config
