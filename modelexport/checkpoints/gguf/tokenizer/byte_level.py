"""Byte-level BPE (GPT-2, Llama 3, Qwen, DeepSeek-V3, Tekken and many more) in llama.cpp's terms: its ``gpt2``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any
from unicodedata import category

from modelexport.checkpoints.gguf.tokenizer.pretokenizers import PreTokenizer, find_pre_tokenizers
from modelexport.checkpoints.gguf.tokenizer.vocabulary import (
    Token,
    Unlike,
    Vocabulary,
    added_tokens,
    check_lengths,
    kind_of_added,
    strips,
)
from modelexport.errors import quoted, shown

Merge = tuple[str, str]


def _alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes: printable ones of Latin-1 stand for themselves, the others follow behind it."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + at): byte for at, byte in enumerate(others)}


BYTES = _alphabet()
"""A token's characters -> the bytes that they stand for."""


def translate(main: Mapping[str, Any], rows: int) -> Vocabulary:
    """The values of a tokenizer.json whose model is BPE over bytes.

    Args:
        rows: of the embedding.

    Raises:
        Unlike: llama.cpp has none like it.
    """
    model = main["model"]
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise Unlike(f"its merges have {key} {quoted(model[key])}")
    vocab, merges = vocabulary_of(model), read_merges(model)
    notes = _normalizer(main.get("normalizer"))
    pre = _choose(find_pre_tokenizers(main), bool(model.get("ignore_merges")), vocab, merges)
    if pre.differs:
        notes.append(f"llama.cpp's pre-tokenizer '{pre.name}' is not quite the model's: {pre.differs}")
    found = Vocabulary({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre.name}, notes)
    added = added_tokens(main)
    tokens = {number: Token(text) for text, number in vocab.items()}
    tokens |= {number: Token(token["content"], kind_of_added(token)) for number, token in added.items()}
    found.put(tokens, rows)
    if merges:
        found.values["tokenizer.ggml.merges"] = [" ".join(merge) for merge in merges]
    note_strips(added, found)
    return found


def vocabulary_of(model: Mapping[str, Any]) -> dict[str, int]:
    """A BPE model's tokens, checked."""
    vocab: dict[str, int] = model["vocab"]
    if any(type(number) is not int for number in vocab.values()):
        raise TypeError("a token whose number is none")
    return vocab


def read_merges(model: Mapping[str, Any]) -> list[Merge]:
    """A BPE model's merges, of either spelling.

    Raises:
        Unlike: one has a space in one of its tokens, which llama.cpp takes for the end of the first.
    """
    merges = [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in model["merges"]]
    for merge in merges:
        if any(not isinstance(part, str) for part in merge):
            raise TypeError("a merge of something else than texts")
        if len(merge) != 2 or not all(merge) or any(" " in part for part in merge):
            raise Unlike("a merge has a space in one of its tokens")
    return merges


def note_strips(added: Mapping[int, Mapping[str, Any]], found: Vocabulary) -> None:
    """Notes that added tokens take whitespace beside them, which llama.cpp does not see in the file."""
    asked = strips(added)
    if asked:
        number, flags = next(iter(asked.items()))
        found.notes.append(
            f"{len(asked)} added tokens have {' and '.join(flags)}, which llama.cpp does not heed, the first is "
            f"{shown(added[number]['content'])}"
        )


def _normalizer(normalizer: Mapping[str, Any] | None) -> list[str]:
    """Notes on what is done to a text before anything else; llama.cpp does nothing."""
    steps = [] if normalizer is None else normalizer.get("normalizers", [normalizer])
    kinds = [step.get("type") for step in steps]
    other = [kind for kind in kinds if kind != "NFC"]
    if other:
        raise Unlike(f"its normalizer is {shown(str(other[0]))}, and llama.cpp has none")
    return ["llama.cpp does not bring a text into NFC, which the model's tokenizer does first"] if kinds else []


def _choose(
    known: Sequence[PreTokenizer], ignores_merges: bool, vocab: Mapping[str, int], merges: Sequence[Merge]
) -> PreTokenizer:
    """The pre-tokenizer that handles merges as the tokenizer does, or with the same outcome for its vocabulary."""
    check_apart(known[0], merges)
    alike = next((pre for pre in known if pre.ignores_merges == ignores_merges), None)
    if alike is not None and (alike is known[0] or not alike.differs):
        return alike
    wrong = unmerged(vocab, merges)
    if not wrong:
        return known[0]
    if alike is None:
        raise Unlike(
            f"ignore_merges is {ignores_merges}, which llama.cpp's '{known[0].name}' is not, and merges do not lead to "
            f"{len(wrong)} of its tokens, the first is {quoted(wrong[0])}"
        )
    return alike


def check_apart(pre: PreTokenizer, merges: Iterable[Merge]) -> None:
    """Checks that no merge makes a token across words that llama.cpp cuts elsewhere, or does not cut.

    Raises:
        Unlike: one does.
    """
    if pre.apart is None:
        return
    apart = re.compile(pre.apart)
    for merge in merges:
        token = "".join(merge)
        text = token if pre.numbers_are_bytes else _as_text(token)
        if apart.search("".join("N" if category(each)[0] == "N" else "-" for each in text)):
            raise Unlike(f"its token {quoted(token)} lies across two words of llama.cpp's pre-tokenizer '{pre.name}'")


def _as_text(token: str) -> str:
    """A token's text, as far as its bytes are whole characters."""
    return bytes(BYTES[each] for each in token if each in BYTES).decode(errors="replace")


def unmerged(vocab: Mapping[str, int], merges: Sequence[Merge]) -> list[str]:
    """Tokens of several characters that merging these characters does not lead to.

    Raises:
        Unlike: tokens are so long that this is not tried.
    """
    check_lengths(vocab)
    ranks = {merge: rank for rank, merge in enumerate(merges)}
    return [text for text in vocab if len(text) > 1 and all(each in BYTES for each in text) and not _whole(text, ranks)]


def _whole(text: str, ranks: Mapping[Merge, int]) -> bool:
    """Returns whether merges, the first ones first, make one token of a text."""
    parts = list(text)
    never = len(ranks)
    while len(parts) > 1:
        pairs = [ranks.get((left, right), never) for left, right in pairwise(parts)]
        best = min(pairs)
        if best == never:
            return False
        at = pairs.index(best)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return True
