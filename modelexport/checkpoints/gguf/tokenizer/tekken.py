"""Mistral's tekken.json as a tokenizer.json: tokens by rank, from which merges follow, behind the special ones.

As mistral-common and transformers read it: a vocabulary larger than ``default_vocab_size`` is cut, numbers without a
special token are fillers, and a file of before these were written in it has :data:`_SPECIAL`.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from modelexport.checkpoints.gguf.tokenizer.byte_level import BYTES
from modelexport.checkpoints.gguf.tokenizer.vocabulary import Unlike, check_lengths
from modelexport.errors import CheckpointError, error_text
from modelexport.system.small_files import read_json

NAME = "tekken.json"
_SPECIAL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
_CHARACTERS = {byte: character for character, byte in BYTES.items()}
_MOST_SPECIAL = 1 << 16


def read_tekken(path: Path) -> dict[str, Any]:
    """Read a tekken.json.

    Returns:
        what a tokenizer.json has: added tokens, model, pre-tokenizer and post-processor.

    Raises:
        CheckpointError: it cannot be read, or is damaged.
        Unlike: its tokens are longer than any tokenizer's.
    """
    said = read_json(path)
    try:
        return _main(said)
    except Unlike:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, binascii.Error) as error:
        what = f"{type(error).__name__}: {error_text(error)}"
        raise CheckpointError(f"{path}: is not as mistral-common writes it: {what}") from error


def _main(said: Mapping[str, Any]) -> dict[str, Any]:
    config = said["config"]
    special = _special_tokens(said, config)
    size = config.get("default_vocab_size")
    entries = said["vocab"] if size is None else said["vocab"][: max(0, int(size) - len(special))]
    tokens = [base64.b64decode(entry["token_bytes"], validate=True) for entry in entries]
    texts = ["".join(_CHARACTERS[byte] for byte in token) for token in tokens]
    vocab = {text: len(special) + rank for rank, text in enumerate(texts)}
    split = {"type": "Split", "pattern": {"Regex": config["pattern"]}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    bos = special[1]
    single = [{"SpecialToken": {"id": bos}}, {"Sequence": {"id": "A"}}]
    return {
        "added_tokens": [{"id": rank, "content": text, "special": True} for rank, text in enumerate(special)],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
        "post_processor": {"type": "TemplateProcessing", "single": single, "special_tokens": {bos: {"ids": [1]}}},
        "model": {"type": "BPE", "vocab": vocab, "merges": _merges(texts, vocab), "ignore_merges": True},
    }


def _special_tokens(said: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    listed = said.get("special_tokens")
    named = dict(enumerate(_SPECIAL)) if listed is None else {each["rank"]: each["token_str"] for each in listed}
    count = config.get("default_num_special_tokens", len(named))
    if type(count) is not int or not 2 <= count <= _MOST_SPECIAL or any(rank not in range(count) for rank in named):
        raise ValueError(f"{len(named)} special tokens, {count!r} are said to be there")
    return [named.get(rank, f"<SPECIAL_{rank}>") for rank in range(count)]


def _merges(texts: Sequence[str], vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    """All pairs of tokens that make a token, in the order of what they make."""
    check_lengths(texts)
    found: list[tuple[str, str]] = []
    for text in texts:
        pairs = [(text[:at], text[at:]) for at in range(1, len(text))]
        known = [pair for pair in pairs if pair[0] in vocab and pair[1] in vocab]
        found += sorted(known, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
    return found
