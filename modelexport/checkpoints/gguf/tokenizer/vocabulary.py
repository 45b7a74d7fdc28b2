"""The tokens of a GGUF file: texts by number, types, and scores where merges go by them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from modelexport.checkpoints.gguf.file import Value
from modelexport.errors import quoted, shown

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""The types of tokens, by their numbers in the file (SentencePiece's own)."""

SPACE = "\u2581"
"""The character that SentencePiece writes for a space."""


_MOST_WORK = 1 << 28  # 200,000 tokens of 7 characters take a twentieth of it


@dataclass
class Unlike(Exception):
    """llama.cpp has no tokenizer like this one; why."""

    why: str


@dataclass(frozen=True)
class Token:
    """A token's text and type; its score where merges go by scores (the highest first)."""

    text: str
    kind: int = NORMAL
    score: float = 0.0


@dataclass
class Vocabulary:
    """The tokenizer's part of the header, as it is gathered.

    Attributes:
        values: the keys and values.
        notes: in what the tokens of llama.cpp differ from the model's own, a sentence each.
        numbers: texts -> numbers.
    """

    values: dict[str, Value]
    notes: list[str] = field(default_factory=list)
    numbers: Mapping[str, int] = field(default_factory=dict)

    def put(self, found: Mapping[int, Token], rows: int, *, scored: bool = False) -> None:
        """Sets the tokens.

        Args:
            found: tokens by number.
            rows: of the embedding. Those without a token become unused ones.
            scored: whether scores are written.

        Raises:
            Unlike: a token without a row; two tokens of one text, with which llama.cpp ends the process.
        """
        tokens = self._within(found, rows)
        texts = {token.text for token in tokens.values()}
        every = [tokens[number] if number in tokens else _unused(number, texts) for number in range(rows)]
        numbers: dict[str, int] = {}
        for number, token in enumerate(every):
            text = token.text.partition("\0")[0] or f"[EMPTY_{number}]"  # as llama.cpp reads it
            if text in numbers:
                raise Unlike(f"tokens {numbers[text]} and {number} are both {quoted(text)} to llama.cpp")
            numbers[text] = number
        self.numbers = numbers
        self.values["tokenizer.ggml.tokens"] = [token.text for token in every]
        self.values["tokenizer.ggml.token_type"] = [token.kind for token in every]
        if scored:
            self.values["tokenizer.ggml.scores"] = [float(token.score) for token in every]

    def _within(self, found: Mapping[int, Token], rows: int) -> Mapping[int, Token]:
        beyond = sorted(number for number in found if not 0 <= number < rows)
        needed = [number for number in beyond if found[number].kind not in (CONTROL, USER_DEFINED, UNUSED)]
        if needed:
            raise Unlike(
                f"{len(needed)} tokens have no row in the embedding of {rows}, the first is {needed[0]} "
                f"({quoted(found[needed[0]].text)})"
            )
        if beyond:
            self.notes.append(
                f"{len(beyond)} added tokens have no row in the embedding of {rows} and are left out, the first is "
                f"{beyond[0]} ({shown(found[beyond[0]].text)})"
            )
        return {number: token for number, token in found.items() if 0 <= number < rows}


def _unused(number: int, texts: set[str]) -> Token:
    text = f"[PAD{number}]"
    while text in texts:
        text = f"[{text}]"
    return Token(text, UNUSED, -1000.0)


def check_lengths(texts: Iterable[str]) -> None:
    """Checks that every token can be looked at cut by cut.

    Raises:
        Unlike: they are longer than any tokenizer's.
    """
    if sum(len(text) ** 2 for text in texts) > _MOST_WORK:
        raise Unlike("its tokens are so long that its merges are not compared with them")


def added_tokens(main: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    """A tokenizer.json's added tokens by number."""
    found: dict[int, Mapping[str, Any]] = {}
    for added in main.get("added_tokens") or []:
        number, text = added["id"], added["content"]
        if type(number) is not int or not isinstance(text, str):
            raise TypeError("an added token without a number and a text")
        found[number] = added
    return found


def kind_of_added(added: Mapping[str, Any]) -> int:
    """The type of an added token: one that llama.cpp finds in a text only where asked to, or always."""
    return CONTROL if added.get("special") else USER_DEFINED


def strips(added: Mapping[int, Mapping[str, Any]]) -> dict[int, tuple[str, ...]]:
    """The flags by which added tokens take in the text beside them, by number."""
    asked = {
        number: tuple(flag for flag in ("lstrip", "rstrip", "single_word") if token.get(flag))
        for number, token in added.items()
    }
    return {number: flags for number, flags in asked.items() if flags}
