"""llama.cpp's pre-tokenizers are recognised by what they do, however that is written, and nothing else is."""

from __future__ import annotations

import re
from typing import Any

import pytest

from modelexport.checkpoints.gguf.tokenizer.pretokenizers import (
    BY_NAME,
    LOOK_ALIKES,
    PRE_TOKENIZERS,
    PreTokenizer,
    alternatives,
    as_json,
    find_pre_tokenizers,
)
from modelexport.checkpoints.gguf.tokenizer.vocabulary import Unlike

LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}


def found(*parts: dict[str, Any]) -> str:
    return find_pre_tokenizers({"pre_tokenizer": {"type": "Sequence", "pretokenizers": list(parts)}})[0].name


def split(pattern: str, behavior: str = "Isolated", invert: bool = False) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": invert}


@pytest.mark.parametrize("pre", PRE_TOKENIZERS, ids=lambda pre: pre.name)
def test_each_is_found_as_it_is_written(pre: PreTokenizer) -> None:
    assert pre in find_pre_tokenizers({"pre_tokenizer": as_json(pre)})
    assert BY_NAME[pre.name] is pre


def test_no_name_stands_for_two() -> None:
    names = [pre.name for pre in PRE_TOKENIZERS] + [name for names in LOOK_ALIKES.values() for name in names]
    assert len(names) == len(set(names)) == len(BY_NAME)


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        (
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
            "qwen2",
        ),
        (
            "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1}| ?[^\\s\\p{L}\\p{N}\r\n]+|\\s*[\r\n]+|"
            "\\s+(?!\\S)|\\s+",
            "seed-coder",
        ),
    ],
)
def test_other_spellings_of_the_same(pattern: str, name: str) -> None:
    assert found(split(pattern), LEVEL) == name


def test_what_lies_between_matches_is_nothing_where_all_is_matched() -> None:
    pattern = "|".join(BY_NAME["tekken"].steps[0])
    assert found(split(pattern, "Removed", invert=True), LEVEL) == "tekken"
    with pytest.raises(Unlike, match="with behavior Removed"):
        found(split(r"\p{N}", "Removed", invert=True), LEVEL)


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ([split(r"\w+|\s+"), LEVEL], r"it splits by \\w\+\|\\s\+"),
        ([split(r"\w+")], "Split, without one ByteLevel"),
        ([{**LEVEL, "add_prefix_space": True}], "puts a space before a text"),
        ([{"type": "BertPreTokenizer"}, LEVEL], "a step BertPreTokenizer"),
        ([{**split(""), "pattern": {"String": " "}}, LEVEL], "splits at {'String': ' '}"),
        ([{"type": "Punctuation", "behavior": "Isolated"}, LEVEL], "a step Punctuation"),
    ],
)
def test_what_llama_cpp_has_not_is_said(parts: list[dict[str, Any]], why: str) -> None:
    with pytest.raises(Unlike) as error:
        found(*parts)
    assert re.search(why, error.value.why)


def test_alternatives_are_cut_at_the_outermost_bars() -> None:
    assert alternatives(r"a(b|c)|[|\]]|\||[x[|]]|d") == ["a(b|c)", r"[|\]]", r"\|", "[x[|]]", "d"]
