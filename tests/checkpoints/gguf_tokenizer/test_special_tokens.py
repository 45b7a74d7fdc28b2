"""Special tokens: numbers, what is put around a text, tokens that end an answer, and chat templates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from modelexport.checkpoints.gguf.tokenizer import Tokenizer, read_tokenizer
from modelexport.errors import CheckpointError

EXTRA = ("<a>", "<b>", "<c>", "<d>", "[PREFIX]", "</s>")
LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def translated(
    directory: Path, post: dict[str, Any] | None = None, model: dict[str, Any] | None = None, **config: Any
) -> Tokenizer:
    """A tokenizer of six special tokens, and letters behind them."""
    letters = {chr(97 + number): 6 + number for number in range(4)}
    main = {
        "added_tokens": [{"id": number, "content": text, "special": True} for number, text in enumerate(EXTRA)],
        "pre_tokenizer": LEVEL,
        "post_processor": post,
        "model": {"type": "BPE", "vocab": letters, "merges": []},
    }
    (directory / "tokenizer.json").write_text(json.dumps(main))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return read_tokenizer(directory, model or {}, 10)


def template(*texts: str) -> dict[str, Any]:
    single = [{"Sequence": {"id": "A"}} if text == "A" else {"SpecialToken": {"id": text}} for text in texts]
    numbers = {text: {"id": text, "ids": [EXTRA.index(text)]} for text in texts if text != "A"}
    return {"type": "TemplateProcessing", "single": single, "special_tokens": numbers}


def number(found: Tokenizer, name: str) -> Any:
    return found.values.get(f"tokenizer.ggml.{name}_token_id")


def test_numbers_by_text_and_by_config(tmp_path: Path) -> None:
    found = translated(tmp_path, model={"eos_token_id": [2, 3], "pad_token_id": 77}, bos_token={"content": "<b>"})
    assert [number(found, name) for name in ("bos", "eos", "padding", "fim_pre")] == [1, 2, None, 4]


@pytest.mark.parametrize(
    ("post", "bos", "adds", "note"),
    [
        (None, 0, (False, False), ""),
        (LEVEL, 0, (False, False), ""),
        (template("<a>", "A"), 0, (True, False), ""),
        (template("<b>", "A", "<c>"), 1, (True, True), ""),
        (template("<b>", "<a>", "A"), 1, (False, False), "puts <b> <a> before every text, where llama.cpp can put bos"),
        (template("A", "<d>"), 0, (False, False), "puts <d> behind every text, where llama.cpp can put eos"),
        ({"type": "RobertaProcessing", "cls": ["<a>", 0], "sep": ["<c>", 2]}, 0, (True, True), ""),
    ],
)
def test_what_is_put_around_a_text(tmp_path: Path, post: Any, bos: int, adds: tuple[bool, bool], note: str) -> None:
    found = translated(tmp_path, post, bos_token="<a>", eos_token="<c>")
    assert number(found, "bos") == bos
    assert tuple(found.values[f"tokenizer.ggml.add_{name}_token"] for name in ("bos", "eos")) == adds
    assert note in " ".join(found.notes)
    assert bool(found.notes) == bool(note)


def test_tokens_that_end_an_answer(tmp_path: Path) -> None:
    """llama.cpp knows </s> by its text, and has place for two others beside eos."""
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 5, 1, 2, 3]}))
    found = translated(tmp_path, eos_token="<a>")
    assert [number(found, name) for name in ("eos", "eot", "eom")] == [0, 1, 2]
    assert found.notes == ("llama.cpp does not end an answer at <d>, at which the model's generation ends",)


def test_chat_templates_of_files_and_of_the_config(tmp_path: Path) -> None:
    listed = [{"name": "default", "template": "one"}, {"name": "tool-use", "template": "two"}, {"name": 3}]
    values = translated(tmp_path, chat_template=listed).values
    assert values["tokenizer.chat_template"] == "one"
    assert values["tokenizer.chat_templates"] == ["tool_use"]
    assert values["tokenizer.chat_template.tool_use"] == "two"
    (tmp_path / "chat_template.jinja").write_text("three")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("four")
    values = translated(tmp_path, chat_template=listed).values
    assert values["tokenizer.chat_template"] == "three"
    assert values["tokenizer.chat_templates"] == ["rag"]
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja: is not UTF-8 text"):
        translated(tmp_path)


def test_a_template_of_a_processor_s_file(tmp_path: Path) -> None:
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "five"}))
    assert translated(tmp_path).values["tokenizer.chat_template"] == "five"
