"""SentencePiece's tokenizers in llama.cpp's terms, from a tokenizer.json or a tokenizer.model.

- BPE with byte fallback (Llama 2, Mistral, Gemma, Phi-3): llama.cpp's ``llama`` merges whichever two neighbours make
  the token of the highest score, so scores have to say what the merges of a tokenizer.json say. They do where no pair
  that would make a token is missing, and all that make it stand together in the list, or are of one character and come
  out alike. Where they do not, and no space is put in front, llama.cpp's ``sarvam-moe`` goes by the merges themselves.
- Unigram (T5): llama.cpp's ``t5``, without byte fallback.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from modelexport.checkpoints.gguf.tokenizer.byte_level import Merge, note_strips, read_merges, vocabulary_of
from modelexport.checkpoints.gguf.tokenizer.model_file import BPE, UNIGRAM, SentencePieceModel
from modelexport.checkpoints.gguf.tokenizer.vocabulary import (
    BYTE,
    CONTROL,
    NORMAL,
    SPACE,
    UNKNOWN,
    USER_DEFINED,
    Token,
    Unlike,
    Vocabulary,
    added_tokens,
    check_lengths,
    kind_of_added,
    strips,
)
from modelexport.errors import quoted, shown

BYTE_TOKENS = {f"<0x{byte:02X}>": byte for byte in range(256)}
"""The tokens of single bytes."""
_LONGEST_RUN = 64
Lengths = tuple[int, int]
_PREFIXES = {"missing": "where there is none", "first": "before the first text, where there is none"}
_ADDED = -1000.0  # the score of tokens that are found in a text before anything is merged
PHI3_KEEPS = {"<unk>", "<s>", "<|endoftext|>"}
"""The special tokens behind which llama.cpp keeps whitespace in a model of the name Phi-3, where others take it."""
_PHI3 = (*PHI3_KEEPS, "</s>")  # which such a model has to have


@dataclass(frozen=True)
class Spaces:
    """The handling of spaces before tokens are looked for.

    Attributes:
        prefix: where a space is put in front: of "always" every text between special tokens, of "missing" those that
            begin with none, of "first" such a text at the very beginning, "never".
        cut: whether no token lies across the beginning of a word.
        merged: whether several spaces become one.
        ends: whether those at the end of a text are kept.
        charsmap: SentencePiece's map of characters to others; empty for none.
    """

    prefix: str
    cut: bool = False
    merged: bool = False
    ends: bool = True
    charsmap: bytes = b""


# ------------------------------------------------------------------ tokenizer.json


def translate(main: Mapping[str, Any], rows: int) -> Vocabulary:
    """The values of a tokenizer.json whose model is BPE with byte fallback, or Unigram.

    Args:
        rows: of the embedding.

    Raises:
        Unlike: llama.cpp has none like it.
    """
    spaces, added = _spaces(main), added_tokens(main)
    if main["model"].get("type") == "Unigram":
        found = _unigram(main["model"], spaces, added, rows)
    else:
        found = _merging(main["model"], spaces, added, rows)
    alike = spaces.prefix == "missing" and spaces.merged  # the space that llama.cpp adds is the one that there is
    if spaces.prefix in _PREFIXES and not alike:
        found.notes.append(
            f"llama.cpp puts a space before every text between special tokens, the model's {_PREFIXES[spaces.prefix]}"
        )
    if spaces.merged and spaces.ends:
        found.notes.append("llama.cpp drops spaces at the end of a text, which the model's tokenizer keeps")
    if not spaces.ends and not spaces.charsmap:  # which makes spaces of them
        found.notes.append(
            "llama.cpp keeps tabs and line breaks at the end of a text, which the model's tokenizer drops"
        )
    return found


def _spaces(main: Mapping[str, Any]) -> Spaces:
    """The handling of spaces by a tokenizer.json's normalizer and pre-tokenizer."""
    prefix, cut, merged, ends, charsmap, replaced = "never", False, False, True, b"", False
    for step in _steps(main.get("normalizer"), "normalizers"):
        kind = step.get("type")
        pattern = step.get("pattern") or {}
        if kind == "Prepend" and step.get("prepend") == SPACE:
            prefix = "always"
        elif kind == "Replace" and pattern.get("String") == " " and step.get("content") == SPACE:
            replaced = True
        elif kind == "Replace" and pattern.get("Regex") == " {2,}" and step.get("content") in (" ", SPACE):
            merged = True
        elif kind == "Strip" and step.get("strip_right") and not step.get("strip_left"):
            ends = False
        elif kind == "Precompiled":
            charsmap = _base64(step.get("precompiled_charsmap"))
        else:
            raise Unlike(f"its normalizer has a step {shown(str(kind))}, which llama.cpp has not")
    for step in _steps(main.get("pre_tokenizer"), "pretokenizers"):
        kind = step.get("type")
        if kind == "Metaspace" and step.get("replacement") == SPACE:
            scheme = step.get("prepend_scheme") or ("always" if step.get("add_prefix_space", True) else "never")
            prefix = "missing" if scheme == "always" else str(scheme)
            cut, replaced = step.get("split", True) is not False, True
        elif kind == "WhitespaceSplit" and charsmap:  # by which all whitespace is spaces
            merged, ends = True, False
        elif not (kind == "Split" and (step.get("pattern") or {}).get("String") == " " and replaced):
            raise Unlike(f"its pre-tokenizer has a step {shown(str(kind))}, which llama.cpp has not")
    if not replaced or prefix not in ("always", "never", *_PREFIXES):
        raise Unlike(f"its spaces do not become {SPACE!a} in a way that llama.cpp has")
    return Spaces(prefix, cut, merged, ends, charsmap)


def _steps(sequence: Mapping[str, Any] | None, key: str) -> Sequence[Mapping[str, Any]]:
    steps: Sequence[Mapping[str, Any]] = [] if sequence is None else sequence.get(key, [sequence])
    return steps


def _base64(text: Any) -> bytes:
    if text is None:
        return b""
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"precompiled_charsmap: {error}") from error


def _merging(model: Mapping[str, Any], spaces: Spaces, added: Mapping[int, Mapping[str, Any]], rows: int) -> Vocabulary:
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "ignore_merges"):
        if model.get(key):
            raise Unlike(f"its merges have {key} {quoted(model[key])}")
    if spaces.charsmap or spaces.merged or not spaces.ends:
        raise Unlike("its normalizer changes more than spaces, and llama.cpp's BPE of SentencePiece does not")
    vocab, merges = vocabulary_of(model), read_merges(model)
    missing = next((token for token in BYTE_TOKENS if token not in vocab), None)
    if missing is not None:
        raise Unlike(f"it has no token for the byte {missing}, which llama.cpp falls back to")
    _check_uncut(vocab, spaces)
    scores, why = merge_scores(vocab, merges, {token["content"] for token in added.values()})
    unknown = model.get("unk_token")
    kinds = dict.fromkeys(BYTE_TOKENS, BYTE) | ({} if unknown is None else {str(unknown): UNKNOWN})
    tokens = {n: Token(text, kinds.get(text, NORMAL), scores.get(text, 0.0)) for text, n in vocab.items()}
    tokens |= {n: _added(token, tokens.get(n), unknown) for n, token in added.items()}
    if why is None:
        values = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default"}
        found = Vocabulary({**values, "tokenizer.ggml.add_space_prefix": spaces.prefix != "never"})
    else:
        if spaces.prefix != "never":
            raise Unlike(f"{why}; and llama.cpp's BPE by merges puts no space before a text")
        keeps_lines_apart(vocab)
        found = Vocabulary({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "sarvam-moe"})
        found.values["tokenizer.ggml.merges"] = [" ".join(merge) for merge in merges]
    found.put(tokens, rows, scored=why is None)
    if not _strips_like_phi3(added, found):
        note_strips(added, found)
    return found


def _check_uncut(vocab: Mapping[str, int], spaces: Spaces) -> None:
    wrong = next((text for text in vocab if SPACE in text[1:]), None) if spaces.cut else None
    if wrong is not None:
        raise Unlike(
            f"its pre-tokenizer cuts words before {SPACE!a}, and llama.cpp would make its token {quoted(wrong)}"
        )


def keeps_lines_apart(vocab: Mapping[str, int]) -> None:
    """Checks that no token lies across the end of a line, where llama.cpp's BPE by merges cuts.

    Raises:
        Unlike: one does.
    """
    wrong = next((text for text in vocab if "\n" in text and text.strip("\n")), None)
    if wrong is not None:
        raise Unlike(f"its token {quoted(wrong)} has a line break within, where llama.cpp's BPE by merges cuts")


def _added(added: Mapping[str, Any], own: Token | None, unknown: Any) -> Token:
    """An added token. One that is written with SentencePiece's spaces is not found in a text, which has others: it
    comes of merges, and is a token like any other."""
    text = added["content"]
    if text == unknown:
        return Token(text, UNKNOWN, _ADDED)
    if added.get("special"):
        return Token(text, CONTROL, _ADDED)
    if SPACE not in text:
        return Token(text, kind_of_added(added), _ADDED)
    if added.get("normalized") is not False:
        return Token(text.replace(SPACE, " "), USER_DEFINED, _ADDED)
    return Token(text, NORMAL, own.score if own is not None else _ADDED)


def _strips_like_phi3(added: Mapping[int, Mapping[str, Any]], found: Vocabulary) -> bool:
    """Returns whether llama.cpp heeds ``rstrip``: for models that are named Phi-3, of all special tokens but three."""
    asked = strips(added)
    special = {number: token["content"] for number, token in added.items() if number in asked or token.get("special")}
    like = all((asked.get(number) == ("rstrip",)) == (text not in PHI3_KEEPS) for number, text in special.items())
    if not asked or not like or any(text not in found.numbers for text in _PHI3):
        return False
    found.values["general.name"] = "Phi-3"
    return True


def is_phi3(name: str) -> bool:
    """Returns whether llama.cpp takes a model of that name for a Phi-3."""
    return any(each in name.lower() for each in ("phi-3", "phi3"))


def merge_scores(
    vocab: Mapping[str, int], merges: Sequence[Merge], added: set[str]
) -> tuple[dict[str, float], str | None]:
    """Scores by which SentencePiece makes the tokens that a list of merges makes, in the same order.

    Args:
        added: texts of tokens that no merge makes.

    Returns:
        (the score of every token that a merge makes, why they do not say the same; None where they do).
    """
    scores: dict[str, float] = {}
    apart, last = set(), None
    for left, right in merges:
        text = left + right
        if text != last and text in scores:
            apart.add(text)
        scores.setdefault(text, -float(len(scores)))
        last = text
    if apart and not _runs_told(merges, scores, apart):
        text = min(apart, key=lambda text: (_is_run(text), text))
        return {}, f"its merges for {quoted(text)} do not stand together, as SentencePiece's scores would have them"
    check_lengths(vocab)
    known = set(merges)
    for text in vocab:
        if len(text) < 2 or text in added or text in BYTE_TOKENS:
            continue
        for at in range(1, len(text)):
            pair = (text[:at], text[at:])
            if pair not in known and all(len(part) == 1 or part in vocab for part in pair):
                return {}, f"its merges lack {quoted(' '.join(pair))}, which SentencePiece's scores would make"
    return scores, None


def _runs_told(merges: Sequence[Merge], scores: Mapping[str, float], apart: Collection[str]) -> bool:
    """Returns whether scores say what merges say that do not stand together, but make one character again and again.

    Gemma's lines, tabs and spaces are such. Nothing else may be made before the last of them.
    """
    places = [rank for rank, (left, right) in enumerate(merges) if left + right in apart]
    if any(not _is_run(left + right) for left, right in merges[min(places) : max(places) + 1]):
        return False
    by_merges: dict[str, dict[Lengths, float]] = {}
    by_scores: dict[str, dict[Lengths, float]] = {}
    for rank, (left, right) in enumerate(merges):
        text = left + right
        if _is_run(text):
            pair = (len(left), len(right))
            by_merges.setdefault(text[0], {})[pair] = rank
            by_scores.setdefault(text[0], {})[pair] = -scores[text]
    return all(runs_alike(by_merges[text[0]], by_scores[text[0]]) for text in {text[0] for text in apart})


def _is_run(text: str) -> bool:
    return text == text[0] * len(text)


def runs_alike(one: Mapping[Lengths, float], other: Mapping[Lengths, float]) -> bool:
    """Returns whether runs of a character come out alike, up to those that hold the longest token twice.

    Args:
        one, other: lengths of the two parts of a token -> the place in the order in which pairs are merged.
    """
    longest = max(map(sum, one))
    return longest <= _LONGEST_RUN and all(
        _merged_run(size, one) == _merged_run(size, other) for size in range(2, 2 * longest + 2)
    )


def _merged_run(size: int, places: Mapping[Lengths, float]) -> list[int]:
    """The lengths of the tokens of a run: of the pairs of the first place the leftmost is merged, again and again."""
    parts = [1] * size
    while True:
        pairs = [(places[pair], at) for at, pair in enumerate(pairwise(parts)) if pair in places]
        if not pairs:
            return parts
        _, at = min(pairs)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


# ------------------------------------------------------------------ Unigram


def _unigram(model: Mapping[str, Any], spaces: Spaces, added: Mapping[int, Mapping[str, Any]], rows: int) -> Vocabulary:
    if not spaces.merged and not spaces.ends:
        raise Unlike("its normalizer drops spaces at the end of a text alone, which llama.cpp does not")
    if model.get("byte_fallback"):
        raise Unlike("its model is Unigram with byte fallback, and llama.cpp's Unigram has none")
    pieces, unknown = model["vocab"], model.get("unk_id")
    tokens = {}
    for number, (text, score) in enumerate(pieces):
        if not isinstance(text, str) or not isinstance(score, (int, float)):
            raise TypeError("a piece without a text and a score")
        tokens[number] = Token(text, UNKNOWN if number == unknown else NORMAL, float(score))
    _check_uncut({token.text: number for number, token in tokens.items()}, spaces)
    for number, token in added.items():
        own = tokens.get(number)
        kind = UNKNOWN if number == unknown else kind_of_added(token)
        tokens[number] = Token(token["content"], kind, 0.0 if own is None else own.score)
    if type(unknown) is not int or unknown not in tokens:
        raise Unlike("its model has no unknown token, which llama.cpp's Unigram needs")
    found = _unigram_values(spaces)
    found.put(tokens, rows, scored=True)
    found.values["tokenizer.ggml.unknown_token_id"] = unknown
    note_strips(added, found)
    return found


def _unigram_values(spaces: Spaces) -> Vocabulary:
    found = Vocabulary(
        {
            "tokenizer.ggml.model": "t5",
            "tokenizer.ggml.pre": "default",
            "tokenizer.ggml.add_space_prefix": spaces.prefix != "never",
            "tokenizer.ggml.remove_extra_whitespaces": spaces.merged,
        }
    )
    if spaces.charsmap:
        found.values["tokenizer.ggml.precompiled_charsmap"] = spaces.charsmap
    return found


# ------------------------------------------------------------------ tokenizer.model


def translate_model(model: SentencePieceModel, added: Mapping[int, Mapping[str, Any]], rows: int) -> Vocabulary:
    """The values of a tokenizer.model: its pieces are tokens of a GGUF file, types and scores and all.

    Args:
        added: tokens beside it, by number: ``content`` and ``special``.
        rows: of the embedding.

    Raises:
        Unlike: llama.cpp has none like it.
    """
    if model.suffix or not model.escapes:
        raise Unlike("its spaces stand behind words, or are kept as they are, which llama.cpp has not")
    prefix = "always" if model.prefix else "never"
    kinds = {piece.kind for piece in model.pieces}
    if model.algorithm == UNIGRAM:
        if BYTE in kinds:
            raise Unlike("its model is Unigram with byte fallback, and llama.cpp's Unigram has none")
        found = _unigram_values(Spaces(prefix, merged=model.merges_spaces, charsmap=model.charsmap))
    elif model.algorithm == BPE:
        if model.charsmap or model.merges_spaces:
            raise Unlike("its normalizer changes more than spaces, and llama.cpp's BPE of SentencePiece does not")
        texts = {piece.text for piece in model.pieces}
        missing = next((token for token in BYTE_TOKENS if token not in texts), None)
        if missing is not None:
            raise Unlike(f"it has no token for the byte {missing}, which llama.cpp falls back to")
        values = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default"}
        found = Vocabulary({**values, "tokenizer.ggml.add_space_prefix": prefix == "always"})
    else:
        raise Unlike(f"its model is of SentencePiece's type {model.algorithm}, neither BPE nor Unigram")
    tokens = {n: Token(piece.text, piece.kind, piece.score) for n, piece in enumerate(model.pieces)}
    for number, token in added.items():
        tokens[number] = Token(token["content"], kind_of_added(token), _ADDED)
    found.put(tokens, rows, scored=True)
    for name, number in model.special.items():
        if 0 <= number < rows:
            found.values[f"tokenizer.ggml.{name}_token_id"] = number
    if not _strips_like_phi3(added, found):
        note_strips(added, found)
    return found
