"""SentencePiece's tokenizers in llama.cpp's terms, of both files that they come in."""

from __future__ import annotations

import base64
import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest

from modelexport.checkpoints.gguf.tokenizer import Tokenizer, read_tokenizer
from modelexport.checkpoints.gguf.tokenizer.model_file import BPE, UNIGRAM, read_model
from modelexport.checkpoints.gguf.tokenizer.sentencepiece import merge_scores
from modelexport.errors import CheckpointError
from tests.helpers.small_tokenizers import SPECIAL, added, sentencepiece

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def translated(tmp_path: Path, main: dict[str, Any], rows: int = 1200) -> Tokenizer:
    (tmp_path / "tokenizer.json").write_text(json.dumps(main))
    return read_tokenizer(tmp_path, {"bos_token_id": 1, "eos_token_id": 2}, rows)


def test_llama_s(tmp_path: Path) -> None:
    main = sentencepiece()
    found = translated(tmp_path, main)
    values, vocab = found.values, main["model"]["vocab"]
    assert (found.missing, found.notes) == (None, ())
    assert values["tokenizer.ggml.model"] == "llama"
    assert values["tokenizer.ggml.add_space_prefix"] is True
    assert values["tokenizer.ggml.add_bos_token"] is True
    tokens, types = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.token_type"]
    assert isinstance(tokens, list)
    assert isinstance(types, list)
    assert tokens[: len(vocab)] == sorted(vocab, key=lambda text: vocab[text])
    kinds = dict(zip(tokens, types, strict=True))
    assert [kinds[text] for text in (*SPECIAL, "<0x00>", "e", "<tool>", "[PAD1199]")] == [2, 3, 3, 6, 1, 4, 5]


def test_a_model_without_an_unknown_token_has_none(tmp_path: Path) -> None:
    """And no token by the name of None is one."""
    main = sentencepiece()
    model = main["model"]
    vocab = {**model["vocab"], "None": len(model["vocab"]) + 1}
    pairs = [["None"[:at], "None"[at:]] for at in range(1, 4) if "None"[:at] in vocab and "None"[at:] in vocab]
    main["model"] = {**model, "unk_token": None, "vocab": vocab, "merges": [*model["merges"], *pairs]}
    values = translated(tmp_path, main).values
    types, tokens = values["tokenizer.ggml.token_type"], values["tokenizer.ggml.tokens"]
    assert isinstance(types, list)
    assert isinstance(tokens, list)
    assert types[tokens.index("None")] == 1
    assert 2 not in types


def test_scores_say_what_merges_say() -> None:
    vocab = {text: number for number, text in enumerate(("a", "b", "ab", "aba"))}
    assert merge_scores(vocab, [("a", "b"), ("ab", "a")], set()) == ({"ab": 0.0, "aba": -1.0}, None)
    apart = merge_scores({**vocab, "ba": 4}, [("ab", "a"), ("b", "a"), ("a", "ba"), ("a", "b")], set())[1]
    assert apart is not None
    assert "for 'aba' do not stand together" in apart
    lacking = merge_scores({**vocab, "ba": 4}, [("a", "b"), ("b", "a"), ("ab", "a")], set())[1]
    assert lacking is not None
    assert "lack 'a ba'" in lacking


def test_runs_of_one_character_may_stand_apart_where_they_come_out_alike() -> None:
    """As Gemma's: the longest first, and those of several characters by turns."""
    sizes = range(2, 6)
    vocab = {letter * size: 10 * ord(letter) + size for letter in "\n_" for size in (1, *sizes)} | {"_a": 1, "a": 2}
    lengths = [(left, size - left) for left in range(4, 0, -1) for size in sizes if left < size]
    runs = [(letter * left, letter * right) for left, right in lengths for letter in "\n_"]
    scores, why = merge_scores(vocab, [*runs, ("_", "a")], set())
    assert why is None
    assert min(scores, key=lambda text: scores[text]) == "_a"
    assert merge_scores(vocab, [*runs[:-1], ("_", "a"), runs[-1]], set())[1] is not None
    worse = merge_scores(vocab, [*runs[::-1], ("_", "a")], set())[1]
    assert worse is not None
    assert "do not stand together" in worse


def test_merges_that_scores_cannot_say_are_told_as_merges(tmp_path: Path) -> None:
    values = translated(tmp_path, sentencepiece(prefix="never", every_pair=False)).values
    assert (values["tokenizer.ggml.model"], values["tokenizer.ggml.pre"]) == ("gpt2", "sarvam-moe")
    assert "tokenizer.ggml.merges" in values
    why = translated(tmp_path, sentencepiece(prefix="always", every_pair=False)).missing
    assert "its merges lack" in str(why)


def test_added_tokens_that_are_written_with_spaces(tmp_path: Path) -> None:
    """One that is looked for in the text as it came holds no space there: it comes of merges alone."""
    main = sentencepiece(prefix="never")
    text = next(text for text in main["model"]["vocab"] if text.startswith("\u2581") and len(text) > 2)
    number = main["model"]["vocab"][text]
    for normalized, expected in ((False, (text, 1)), (True, (text.replace("\u2581", " "), 4))):
        main["added_tokens"][-1] = added(number, text, special=False, normalized=normalized)
        values = translated(tmp_path, main).values
        tokens, types = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.token_type"]
        assert isinstance(tokens, list)
        assert isinstance(types, list)
        assert (tokens[number], types[number]) == expected


def test_phi_3_s_rstrip_goes_by_the_model_s_name(tmp_path: Path) -> None:
    main = sentencepiece()
    end = len(main["model"]["vocab"]) + 1
    main["added_tokens"][2]["rstrip"] = True
    main["added_tokens"][3] = added(end - 1, "<|user|>", special=True, rstrip=True)
    found = translated(
        tmp_path, {**main, "added_tokens": [*main["added_tokens"], added(end, "<|endoftext|>", special=True)]}
    )
    assert (found.values["general.name"], found.notes) == ("Phi-3", ())
    found = translated(tmp_path, main)
    assert "general.name" not in found.values
    assert "2 added tokens have rstrip, which llama.cpp does not heed" in found.notes[0]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"normalizer": {"type": "Lowercase"}}, "a step Lowercase"),
        ({"normalizer": None, "pre_tokenizer": None}, "its spaces do not become"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "a step Whitespace"),
        ({"post_processor": {"type": "Other"}}, "its post-processor is Other"),
    ],
)
def test_what_llama_cpp_has_not_is_said(tmp_path: Path, change: dict[str, Any], why: str) -> None:
    assert why in str(translated(tmp_path, sentencepiece() | change).missing)


def test_a_space_only_where_there_is_none(tmp_path: Path) -> None:
    (note,) = translated(tmp_path, sentencepiece(prefix="first")).notes
    assert note.endswith("before the first text, where there is none")


def test_tokens_without_a_row(tmp_path: Path) -> None:
    main = sentencepiece()
    size = len(main["model"]["vocab"])
    found = translated(tmp_path, main, rows=size)
    assert found.notes == (
        f"1 added tokens have no row in the embedding of {size} and are left out, the first is {size} (<tool>)",
    )
    assert "1 tokens have no row in the embedding" in str(translated(tmp_path, main, rows=size - 1).missing)


def unigram(**changes: Any) -> dict[str, Any]:
    pieces = [["<pad>", 0.0], ["<unk>", 0.0], ["\u2581", -2.0], ["\u2581a", -3.5], ["b", -4.0]]
    charsmap = base64.b64encode(b"\4\0\0\0\0\1\2\3a\0").decode()
    return {
        "added_tokens": [added(0, "<pad>", special=True), added(1, "<unk>", special=True)],
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap},
        "pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True},
        "model": {"type": "Unigram", "unk_id": 1, "vocab": pieces, "byte_fallback": False},
        **changes,
    }


def test_unigram(tmp_path: Path) -> None:
    values = translated(tmp_path, unigram(), rows=6).values
    assert values["tokenizer.ggml.model"] == "t5"
    assert values["tokenizer.ggml.scores"] == [0.0, 0.0, -2.0, -3.5, -4.0, -1000.0]
    assert values["tokenizer.ggml.token_type"] == [3, 2, 1, 1, 1, 5]
    assert values["tokenizer.ggml.unknown_token_id"] == 1
    assert values["tokenizer.ggml.precompiled_charsmap"] == b"\4\0\0\0\0\1\2\3a\0"
    normalizer = {"type": "Strip", "strip_left": False, "strip_right": True}
    assert "at the end of a text alone" in str(translated(tmp_path, unigram(normalizer=normalizer)).missing)
    normalizer = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
    assert translated(tmp_path, unigram(normalizer=normalizer)).notes[0].startswith("llama.cpp drops spaces at the end")
    model = {**unigram()["model"], "byte_fallback": True}
    assert "Unigram with byte fallback" in str(translated(tmp_path, unigram(model=model)).missing)


# ------------------------------------------------------------------ tokenizer.model


def field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def piece(text: str, score: float, kind: int = 1) -> bytes:
    return field(1, field(1, text.encode()) + varint(2 << 3 | 5) + struct.pack("<f", score) + field(3, kind))


def model_file(algorithm: int = BPE, *, merges_spaces: int = 0, charsmap: bytes = b"") -> bytes:
    special = [piece(text, 0.0, kind) for text, kind in zip(SPECIAL, (2, 3, 3), strict=True)]
    pieces = [*special, *(piece(text, 0.0, 6) for text in BYTES), piece("\u2581a", -0.5), piece("a", -1.0)]
    trainer = field(3, algorithm) + field(43, (1 << 64) - 1)
    normalizer = field(2, charsmap) + field(3, 0) + field(4, merges_spaces)
    return b"".join(pieces) + field(2, trainer) + field(3, normalizer)


def of_model(tmp_path: Path, content: bytes, **config: Any) -> Tokenizer:
    (tmp_path / "tokenizer.model").write_bytes(content)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return read_tokenizer(tmp_path, {}, 264)


def test_a_model_file(tmp_path: Path) -> None:
    decoder = {"261": {"content": "<tool>", "special": False}, "262": {"content": "<|end|>", "special": True}}
    found = of_model(tmp_path, model_file(), added_tokens_decoder=decoder, add_bos_token=False)
    values = found.values
    assert found.missing is None
    assert values["tokenizer.ggml.model"] == "llama"
    assert values["tokenizer.ggml.add_space_prefix"] is False
    tokens, types, scores = (values[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type", "scores"))
    assert isinstance(tokens, list)
    assert isinstance(types, list)
    assert isinstance(scores, list)
    assert tokens[258:] == ["<0xFF>", "\u2581a", "a", "<tool>", "<|end|>", "[PAD263]"]
    assert types[258:] == [6, 1, 1, 4, 3, 5]
    assert scores[259:261] == [-0.5, -1.0]
    assert [values[f"tokenizer.ggml.{name}_token_id"] for name in ("unknown", "bos", "eos")] == [0, 1, 2]
    assert "tokenizer.ggml.padding_token_id" not in values
    assert values["tokenizer.ggml.add_bos_token"] is False


def test_model_files_that_llama_cpp_has_none_like(tmp_path: Path) -> None:
    assert "changes more than spaces" in str(of_model(tmp_path, model_file(merges_spaces=1)).missing)
    assert "Unigram with byte fallback" in str(of_model(tmp_path, model_file(UNIGRAM)).missing)
    assert "SentencePiece's type 4" in str(of_model(tmp_path, model_file(4)).missing)
    without = model_file().replace(piece("<0x41>", 0.0, 6), b"")
    assert "no token for the byte <0x41>" in str(of_model(tmp_path, without).missing)


def test_a_damaged_model_file_is_an_error_and_nothing_else(tmp_path: Path) -> None:
    good, chance = model_file(charsmap=b"abc"), random.Random(0)
    path = tmp_path / "tokenizer.model"
    refused = 0
    for _ in range(200):
        text = bytearray(good)
        text[chance.randrange(len(good))] ^= 1 << chance.randrange(8)
        path.write_bytes(text[: chance.choice((len(text), chance.randrange(len(text))))])
        try:
            read_model(path)
        except CheckpointError:
            refused += 1
    assert 50 < refused < 200
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="it has no pieces"):
        read_model(path)
