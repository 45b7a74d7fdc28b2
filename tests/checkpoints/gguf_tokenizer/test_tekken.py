"""Mistral's tekken.json: the tokens and merges that transformers makes of it."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from modelexport.checkpoints.gguf.tokenizer import read_tokenizer
from modelexport.checkpoints.gguf.tokenizer.pretokenizers import BY_NAME
from modelexport.checkpoints.gguf.tokenizer.tekken import read_tekken
from modelexport.errors import CheckpointError
from tests.helpers.small_tokenizers import SCRIPTS, ids

SPECIAL = ("<unk>", "<s>", "</s>", "[INST]")


def tekken(**config: Any) -> dict[str, Any]:
    """All bytes, and words of a few of them; the last lies beyond the vocabulary."""
    words = ("th", "the", " the", " t", "an", "and", " and", "\u00e9", "\u0438\u0440", "12", "zz")
    tokens = [*(bytes([byte]) for byte in range(256)), *(word.encode() for word in words)]
    return {
        "config": {
            "pattern": "|".join(BY_NAME["tekken"].steps[0]),
            "default_vocab_size": 16 + len(tokens) - 1,
            "default_num_special_tokens": 16,
            **config,
        },
        "vocab": [{"rank": n, "token_bytes": base64.b64encode(token).decode()} for n, token in enumerate(tokens)],
        "special_tokens": [{"rank": n, "token_str": text, "is_control": True} for n, text in enumerate(SPECIAL)],
    }


def test_a_tekken_file(tmp_path: Path) -> None:
    (tmp_path / "tekken.json").write_text(json.dumps(tekken()))
    found = read_tokenizer(tmp_path, {}, 283)
    values = found.values
    assert values["tokenizer.ggml.pre"] == "tekken"
    tokens = values["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    assert [*tokens[:5], *tokens[-3:]] == [*SPECIAL, "<SPECIAL_4>", "\u00d0\u00b8\u00d1\u0122", "12", "[PAD282]"]
    assert [values[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos", "unknown")] == [1, 2, 0]
    assert values["tokenizer.ggml.add_bos_token"] is True


def test_the_ids_are_those_of_transformers(tmp_path: Path) -> None:
    converter = pytest.importorskip("transformers.integrations.mistral.tokenizer").MistralConverter
    path = tmp_path / "tekken.json"
    path.write_text(json.dumps(tekken()))
    theirs = converter(str(path)).converted()
    parts = dict.fromkeys(("truncation", "padding", "normalizer", "decoder"))
    main = {"version": "1.0", **parts, **read_tekken(path), "post_processor": None}
    for added in main["added_tokens"]:
        main["model"]["vocab"][added["content"]] = added["id"]  # or the library numbers it anew
        added |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    texts = [*SCRIPTS, "the and then <s>[INST] the</s>"]
    assert ids(main, texts) == [theirs.encode(text, add_special_tokens=False).ids for text in texts]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"vocab": [{"token_bytes": "%"}]}, "is not as mistral-common writes it: Error"),
        ({"vocab": 3}, "is not as mistral-common writes it: TypeError"),
        ({"special_tokens": [{"rank": 99, "token_str": "x"}]}, "1 special tokens, 16 are said to be there"),
    ],
)
def test_a_damaged_one(tmp_path: Path, change: dict[str, Any], why: str) -> None:
    (tmp_path / "tekken.json").write_text(json.dumps(tekken() | change))
    with pytest.raises(CheckpointError, match=why):
        read_tokenizer(tmp_path, {}, 283)
