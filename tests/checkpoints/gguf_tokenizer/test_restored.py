"""Tokenizers that go into a GGUF file and come back give the same ids; what a damaged file says is an error."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from modelexport.assets import demo_model_path
from modelexport.checkpoints.gguf.file import Value, encode_header
from modelexport.checkpoints.gguf.tokenizer import Tokenizer, read_tokenizer
from modelexport.checkpoints.gguf.tokenizer.pretokenizers import PRE_TOKENIZERS, PreTokenizer
from modelexport.checkpoints.gguf.tokenizer.restored import RestoredTokenizer, restore_tokenizer
from modelexport.errors import CheckpointError
from modelexport.exporting import export
from tests.helpers.small_tokenizers import ROWS, SCRIPTS, byte_level, ids, sentencepiece

TEXTS = (*SCRIPTS, "a <tool> b</s>c<|end|>  d<s>")


def translated(tmp_path: Path, main: dict[str, Any], **config: Any) -> dict[str, Value]:
    (tmp_path / "tokenizer.json").write_text(json.dumps(main))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    found = read_tokenizer(tmp_path, {}, ROWS)
    assert found.missing is None
    return dict(found.values)


def restored(tmp_path: Path, values: dict[str, Value]) -> RestoredTokenizer:
    path = tmp_path / "model.gguf"
    path.write_bytes(encode_header(values, [])[0])
    return restore_tokenizer(path)


@pytest.mark.parametrize("pre", PRE_TOKENIZERS, ids=lambda pre: pre.name)
def test_byte_level_tokenizers_come_back(tmp_path: Path, pre: PreTokenizer) -> None:
    main = byte_level(pre)
    found = restored(tmp_path, translated(tmp_path, main))
    assert ids(found.files["tokenizer.json"], TEXTS, around=True) == ids(main, TEXTS, around=True)


@pytest.mark.parametrize(("prefix", "every_pair"), [("always", True), ("never", True), ("never", False)])
def test_sentencepiece_comes_back(tmp_path: Path, prefix: str, every_pair: bool) -> None:
    main = sentencepiece(prefix=prefix, every_pair=every_pair)
    values = translated(tmp_path, main)
    assert ("tokenizer.ggml.merges" in values) != every_pair
    found = restored(tmp_path, values)
    assert ids(found.files["tokenizer.json"], TEXTS, around=True) == ids(main, TEXTS, around=True)


def test_special_tokens_and_templates_come_back(tmp_path: Path) -> None:
    templates = [{"name": "default", "template": "{{ a }}"}, {"name": "tool_use", "template": "{{ b }}"}]
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": templates}
    found = restored(tmp_path, translated(tmp_path, sentencepiece(), **config))
    said = json.loads(found.files["tokenizer_config.json"])
    assert {key: said[key] for key in config} == config


def test_tokens_of_one_score_are_told_apart_by_no_list(tmp_path: Path) -> None:
    values = translated(tmp_path, sentencepiece())
    scores = values["tokenizer.ggml.scores"]
    assert isinstance(scores, list)
    values["tokenizer.ggml.scores"] = [max(score, -3.0) for score in scores]
    assert "of its tokens have the score -3" in str(restored(tmp_path, values).missing)


def test_runs_of_spaces_of_one_score_are(tmp_path: Path) -> None:
    """As Llama's are, in the order of their numbers."""
    main = sentencepiece(size=420)
    vocab = main["model"]["vocab"]
    runs = ["\u2581" * size for size in (2, 4, 8, 3, 5, 6, 7)]
    made = dict.fromkeys("".join(merge) for merge in main["model"]["merges"] if "\u2581\u2581" not in "".join(merge))
    vocab |= {text: 3000 + number for number, text in enumerate(runs)}
    pairs = [[t[:at], t[at:]] for t in (*made, *runs) for at in range(1, len(t)) if t[:at] in vocab and t[at:] in vocab]
    main["model"]["merges"] = pairs
    numbers = {text: number for number, text in enumerate(sorted(vocab, key=lambda text: vocab[text]))}
    main["model"]["vocab"] = {
        text: number for text, number in numbers.items() if set(text) != {"\u2581"} or len(text) < 9
    }
    main["added_tokens"] = main["added_tokens"][:3]
    values = translated(tmp_path, main)
    tokens, scores = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.scores"]
    assert isinstance(tokens, list)
    assert isinstance(scores, list)
    values["tokenizer.ggml.scores"] = [-1e9 if t in runs else s for t, s in zip(tokens, scores, strict=True)]
    found = restored(tmp_path, values)
    assert found.missing is None
    spaces = [" " * size for size in range(40)]
    got = ids(found.files["tokenizer.json"], spaces)
    assert [len(each) for each in got] == [len(each) for each in ids(main, spaces)]


@pytest.mark.parametrize("main", [byte_level(PRE_TOKENIZERS[0]), sentencepiece()], ids=["gpt2", "llama"])
def test_another_gguf_file_takes_it_over(tmp_path: Path, main: dict[str, Any]) -> None:
    values = translated(tmp_path, main, chat_template="{{ a }}", eos_token="</s>")
    (tmp_path / "tokenizer.json").unlink()
    restored(tmp_path, values)
    assert read_tokenizer(tmp_path, {}, ROWS) == Tokenizer(values)
    tokens = read_tokenizer(tmp_path, {}, ROWS + 1).values["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    assert tokens[-2:] == [f"[PAD{ROWS - 1}]", f"[PAD{ROWS}]"]


def test_a_gguf_file_without_tokens_is_taken_over_without(tmp_path: Path) -> None:
    restored(tmp_path, {"tokenizer.ggml.model": "no_vocab"})
    assert read_tokenizer(tmp_path, {}, 10).missing == "model.gguf: it has no tokens"


def test_a_gguf_file_alone_becomes_a_directory_with_a_tokenizer(tmp_path: Path) -> None:
    source, alone, target = tmp_path / "source", tmp_path / "alone", tmp_path / "target"
    settings: dict[str, Any] = {"quant": "none", "quiet": True, "evaluate": False}
    export(out=str(source), format="gguf", **settings)
    alone.mkdir()
    for name in ("model.gguf", "config.json"):
        (source / name).rename(alone / name)
    export(model=str(alone), out=str(target), **settings)
    own = json.loads((demo_model_path() / "tokenizer.json").read_text())
    assert ids((target / "tokenizer.json").read_bytes(), TEXTS) == ids(own, TEXTS)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"tokenizer.ggml.model": "bert"}, "its model is 'bert'; gpt2, llama and gemma4 are restored"),
        ({"tokenizer.ggml.pre": "new"}, "its pre-tokenizer is 'new'"),
        ({"tokenizer.ggml.tokens": ["a", "a"], "tokenizer.ggml.token_type": [1, 1]}, "tokens 0 and 1 are both 'a'"),
    ],
)
def test_what_is_not_restored_is_said(tmp_path: Path, change: dict[str, Value], why: str) -> None:
    found = restored(tmp_path, translated(tmp_path, byte_level(PRE_TOKENIZERS[0])) | change)
    assert not found.files
    assert why in str(found.missing)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"tokenizer.ggml.tokens": 3}, "tokens is 3, not an array of str"),
        ({"tokenizer.ggml.token_type": [1]}, "token_type has 1 elements for 2,048 tokens"),
        ({"tokenizer.ggml.merges": ["ab"]}, "a merge is 'ab', without a space"),
        ({"tokenizer.ggml.pre": 1}, "pre is 1, not a text"),
        ({"tokenizer.ggml.add_bos_token": "x"}, "add_bos_token is 'x', not true or false"),
    ],
)
def test_values_of_another_kind_are_refused(tmp_path: Path, change: dict[str, Value], why: str) -> None:
    values = translated(tmp_path, byte_level(PRE_TOKENIZERS[0])) | change
    with pytest.raises(CheckpointError, match=why):
        restored(tmp_path, values)


def test_a_damaged_header_is_an_error_and_nothing_else(tmp_path: Path) -> None:
    values = translated(tmp_path, sentencepiece(size=400))
    good = encode_header(values, [])[0]
    chance, path = random.Random(0), tmp_path / "model.gguf"
    refused = 0
    for _ in range(100):
        text = bytearray(good)
        for _ in range(3):
            text[chance.randrange(len(good))] ^= 1 << chance.randrange(8)
        path.write_bytes(text[: chance.choice((len(text), chance.randrange(len(text))))])
        try:
            restore_tokenizer(path)
        except CheckpointError:
            refused += 1
    assert 20 < refused < 100
