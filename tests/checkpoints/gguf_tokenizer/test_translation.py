"""Which tokenizers are put into a GGUF file, how, and that it is said where one is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from modelexport.assets import demo_model_path
from modelexport.checkpoints.formats import gguf
from modelexport.checkpoints.gguf.tokenizer import Tokenizer, read_tokenizer
from modelexport.errors import CheckpointError
from tests.helpers.format_models import make_model


def demo_tokenizer(
    tmp_path: Path, change: Any = None, config: dict[str, Any] | None = None, vocab: int = 2048
) -> Tokenizer:
    parsed = json.loads((demo_model_path() / "tokenizer.json").read_text())
    if change is not None:
        change(parsed)
    (tmp_path / "tokenizer.json").write_text(json.dumps(parsed))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config or {}))
    return read_tokenizer(tmp_path, {"bos_token_id": 0, "eos_token_id": [0, 1]}, vocab)


LLAMA3 = (
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}|"
    " ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
)


def as_llama3(parsed: dict[str, Any], pattern: str = LLAMA3, ignore_merges: bool = True) -> None:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    parsed["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, level]}
    parsed["model"]["ignore_merges"] = ignore_merges
    first = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    template = {
        "type": "TemplateProcessing",
        "single": [first, {"Sequence": {"id": "A", "type_id": 0}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
    }
    parsed["post_processor"] = {"type": "Sequence", "processors": [parsed["post_processor"], template]}


def test_llama_3_s_and_qwen2_s_tokenizers(tmp_path: Path) -> None:
    found = demo_tokenizer(tmp_path, as_llama3, {"chat_template": "{{ x }}", "eos_token": {"content": "!"}}, vocab=2050)
    assert found.missing is None
    assert found.values["tokenizer.ggml.pre"] == "llama-bpe"
    assert found.values["tokenizer.ggml.add_bos_token"] is True
    assert found.values["tokenizer.ggml.eos_token_id"] == 1
    assert found.values["tokenizer.chat_template"] == "{{ x }}"
    tokens, types = found.values["tokenizer.ggml.tokens"], found.values["tokenizer.ggml.token_type"]
    assert isinstance(tokens, list)
    assert isinstance(types, list)
    assert (tokens[2047:], types[2047:]) == ([tokens[2047], "[PAD2048]", "[PAD2049]"], [1, 5, 5])
    qwen = demo_tokenizer(tmp_path, lambda parsed: as_llama3(parsed, LLAMA3.replace("{1,3}", ""), ignore_merges=False))
    assert qwen.values["tokenizer.ggml.pre"] == "qwen2"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda parsed: parsed["model"].update(byte_fallback=True), "a step ByteLevel, which llama.cpp has not"),
        (lambda parsed: parsed["model"].update(type="Unigram"), "a step ByteLevel, which llama.cpp has not"),
        (lambda parsed: parsed.update(normalizer={"type": "Lowercase"}), "its normalizer is Lowercase"),
        (lambda parsed: parsed.update(pre_tokenizer={"type": "Metaspace"}), "Metaspace, without one ByteLevel"),
        (lambda parsed: as_llama3(parsed, "\\w+"), "none that llama.cpp is known to have: it splits by"),
        (lambda parsed: parsed["model"].update(type="WordPiece"), "its model is WordPiece"),
        (lambda parsed: parsed["model"]["vocab"].update(extra=2048), "1 tokens have no row in the embedding of 2048"),
    ],
)
def test_other_tokenizers_are_left_out_and_that_is_said(tmp_path: Path, change: Any, why: str) -> None:
    found = demo_tokenizer(tmp_path, change)
    assert found.values == {"tokenizer.ggml.model": "no_vocab"}
    assert why in str(found.missing)
    model = make_model(vocab=2048)
    (note,) = gguf.notes(model.plan(), model.config, tmp_path)
    assert why in note
    assert "takes token ids, not text" in note


def test_no_tokenizer_and_a_damaged_one(tmp_path: Path) -> None:
    assert "has none of tokenizer.json, tekken.json, tokenizer.model" in str(read_tokenizer(tmp_path, {}, 10).missing)
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "BPE"}, "pre_tokenizer": 3}')
    with pytest.raises(CheckpointError, match="is not as tokenizers writes it"):
        read_tokenizer(tmp_path, {}, 10)
