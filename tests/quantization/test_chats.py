"""Chats to calibrate on: what models think is among the tokens, whatever their templates leave out."""

from __future__ import annotations

from typing import Any

import jinja2
import pytest

from modelexport.quantization.calibration.text import rendered

# As Qwen3's: thoughts only behind the last question. As DeepSeek-R1's: of no answer, and a prompt that begins to think.
LAST = (
    "{% set last = messages|map(attribute='role')|list|length - 1 %}{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.role == 'assistant' and loop.index0 < last %}{{ m.content.split('</think>')[-1].strip() }}"
    "{% elif m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{{ m.content }}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
NONE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content.split('</think>')[-1].strip() }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)


class Tokenizer:
    """Of a tokenizer, its template."""

    def __init__(self, template: str) -> None:
        self.template = jinja2.Environment().from_string(template)

    def apply_chat_template(self, messages: Any, tokenize: bool, add_generation_prompt: bool = False) -> str:
        assert not tokenize
        return self.template.render(messages=messages, add_generation_prompt=add_generation_prompt)


CHAT = [
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "<think>\ntwo twos\n</think>\n\n4"},
    {"role": "user", "content": "3 + 3?"},
    {"role": "assistant", "content": "<think>\ntwo threes\n</think>\n\n6"},
]


def test_thoughts_of_earlier_answers() -> None:
    assert list(rendered(Tokenizer(LAST), CHAT)) == [
        "<|user|>2 + 2?<|assistant|>4<|user|>3 + 3?<|assistant|><think>\ntwo threes\n</think>\n\n6",
        "<|user|>2 + 2?<|assistant|><think>\ntwo twos\n</think>\n\n4",
    ]


def test_thoughts_that_the_template_never_has() -> None:
    assert list(rendered(Tokenizer(NONE), CHAT)) == [
        "<|user|>2 + 2?<|assistant|>4<|user|>3 + 3?<|assistant|>6",
        "<|user|>2 + 2?<|assistant|><think>\ntwo twos\n</think>\n\n4",
        "<|user|>2 + 2?<|assistant|>4<|user|>3 + 3?<|assistant|><think>\ntwo threes\n</think>\n\n6",
    ]


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_in_a_field_of_their_own(key: str) -> None:
    chat = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", key: "two twos", "content": "4"}]
    assert list(rendered(Tokenizer(NONE), chat))[-1].endswith("<think>\ntwo twos\n</think>\n\n4")


def test_a_chat_without_thoughts_is_one_text() -> None:
    chat = [{"role": "user", "content": "What is </think>?"}, {"role": "assistant", "content": "A tag."}]
    assert len(list(rendered(Tokenizer(NONE), chat))) == 1
