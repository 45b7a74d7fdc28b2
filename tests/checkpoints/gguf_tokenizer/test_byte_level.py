"""How merges are handled where llama.cpp's pre-tokenizer of the same words handles them otherwise."""

from __future__ import annotations

from typing import Any

import pytest

from modelexport.checkpoints.gguf.tokenizer.byte_level import translate, unmerged
from modelexport.checkpoints.gguf.tokenizer.pretokenizers import BY_NAME
from modelexport.checkpoints.gguf.tokenizer.vocabulary import Unlike
from tests.helpers.small_tokenizers import ROWS, byte_level


def main_of(name: str, *, ignore_merges: bool, unreached: bool = False) -> dict[str, Any]:
    """With ``unreached``, a token that no merge leads to."""
    main = byte_level(BY_NAME[name], size=700)
    main["model"]["ignore_merges"] = ignore_merges
    if unreached:
        main["model"]["vocab"]["zzzz"] = ROWS - 1
    return main


@pytest.mark.parametrize(
    ("name", "ignore_merges", "unreached", "expected"),
    [
        ("llama-bpe", True, True, "llama-bpe"),
        ("llama-bpe", False, True, "dbrx"),
        ("qwen2", True, False, "qwen2"),
        ("tekken", False, False, "tekken"),
        ("gpt-4o", True, True, "granite-embed-multi-97m"),
        ("gpt-4o", False, False, "granite-embed-multi-97m"),
        ("gpt-4o", False, True, "gpt-4o"),
    ],
)
def test_the_name_goes_by_merges_too(name: str, ignore_merges: bool, unreached: bool, expected: str) -> None:
    found = translate(main_of(name, ignore_merges=ignore_merges, unreached=unreached), ROWS)
    assert found.values["tokenizer.ggml.pre"] == expected


def test_a_token_that_merges_do_not_lead_to_needs_a_name_that_takes_it_whole() -> None:
    with pytest.raises(Unlike) as error:
        translate(main_of("qwen2", ignore_merges=True, unreached=True), ROWS)
    assert error.value.why == (
        "ignore_merges is True, which llama.cpp's 'qwen2' is not, and merges do not lead to 1 of its tokens, the first "
        "is 'zzzz'"
    )


def test_merges_lead_to_a_token_or_not() -> None:
    merges = [("b", "c"), ("a", "b"), ("ab", "c"), ("bc", "d")]
    vocab = {text: number for number, text in enumerate(("a", "ab", "bc", "abc", "bcd", "<|x|>\u2581"))}
    assert unmerged(vocab, merges) == ["abc"]


def test_digits_that_a_token_joins_are_words_of_their_own_to_the_model() -> None:
    main = byte_level(BY_NAME["deepseek-llm"])
    main["model"]["merges"].append(["1", "2"])
    with pytest.raises(Unlike) as error:
        translate(main, ROWS)
    assert error.value.why == "its token '12' lies across two words of llama.cpp's pre-tokenizer 'deepseek-llm'"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"dropout": 0.1}, "its merges have dropout 0.1"),
        ({"end_of_word_suffix": "</w>"}, "have end_of_word_suffix '</w>'"),
        ({"merges": ["a b c"]}, "a merge has a space"),
        ({"merges": [["a ", "b"]]}, "a merge has a space"),
    ],
)
def test_merges_that_llama_cpp_has_not(change: dict[str, Any], why: str) -> None:
    main = byte_level(BY_NAME["gpt-2"])
    main["model"] |= change
    with pytest.raises(Unlike) as error:
        translate(main, ROWS)
    assert why in error.value.why


def test_two_tokens_of_one_text_would_end_llama_cpp() -> None:
    main = byte_level(BY_NAME["gpt-2"])
    main["added_tokens"][1]["content"] = "<|end|>"
    with pytest.raises(Unlike) as error:
        translate(main, ROWS)
    assert error.value.why.endswith("are both '<|end|>' to llama.cpp")


def test_nfc_is_left_to_the_caller() -> None:
    main = byte_level(BY_NAME["qwen2"], normalizer={"type": "NFC"})
    assert translate(main, ROWS).notes == [
        "llama.cpp does not bring a text into NFC, which the model's tokenizer does first"
    ]
