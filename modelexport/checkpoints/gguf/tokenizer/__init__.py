"""A model's tokenizer in GGUF's terms.

Translated are byte-level BPE (:mod:`~modelexport.checkpoints.gguf.tokenizer.byte_level`) and SentencePiece's BPE and
Unigram (:mod:`~modelexport.checkpoints.gguf.tokenizer.sentencepiece`), from tokenizer.json, or where there is none from
Mistral's tekken.json or from tokenizer.model; that of a GGUF file is taken over. A tokenizer that llama.cpp has none
like is left out, and the reason is told: the file then takes token ids, not text. Where llama.cpp's differs from the
model's in details, that is told, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelexport.checkpoints.gguf.file import Value
from modelexport.checkpoints.gguf.tokenizer import byte_level, sentencepiece, tekken
from modelexport.checkpoints.gguf.tokenizer.carried import carry, gguf_in
from modelexport.checkpoints.gguf.tokenizer.model_file import read_model
from modelexport.checkpoints.gguf.tokenizer.special_tokens import (
    TokenizerSettings,
    chat_templates,
    put_around,
    put_special_tokens,
)
from modelexport.checkpoints.gguf.tokenizer.vocabulary import Unlike, Vocabulary, added_tokens
from modelexport.errors import CheckpointError, error_text, quoted, shown
from modelexport.system.small_files import LARGEST_CONFIG, has_file, read_json

_NO_VOCABULARY: Mapping[str, Value] = {"tokenizer.ggml.model": "no_vocab"}
_JSON, _MODEL = "tokenizer.json", "tokenizer.model"


@dataclass(frozen=True)
class Tokenizer:
    """Values for the header.

    Attributes:
        missing: why there is no tokenizer in them; None where there is one.
        notes: in what llama.cpp's differs from the model's own, a sentence each.
    """

    values: Mapping[str, Value]
    missing: str | None = None
    notes: tuple[str, ...] = ()


def read_tokenizer(directory: Path | None, config: Mapping[str, Any], vocab: int) -> Tokenizer:
    """Translate the tokenizer of the model in ``directory``.

    Args:
        config: the model's config.json, for the ids of its special tokens.
        vocab: rows of its embedding: so many tokens there must be.

    Raises:
        CheckpointError: a file of the tokenizer is damaged.
    """
    if directory is None:
        return Tokenizer(_NO_VOCABULARY, "no source directory is known")
    readers = {_JSON: _from_json, tekken.NAME: _from_tekken, _MODEL: _from_model}
    name = next((name for name in readers if has_file(directory, name)), None)
    source = gguf_in(directory) if name is None else None
    if name is None and source is None:
        return Tokenizer(_NO_VOCABULARY, f"{directory} has none of {', '.join(readers)}")
    try:
        if source is not None:
            name = source.name
            return Tokenizer(carry(source, vocab).values)
        assert name is not None
        settings = TokenizerSettings.read(directory, config)
        found = readers[name](settings, vocab)
        return Tokenizer({**found.values, **chat_templates(settings)}, notes=tuple(found.notes))
    except Unlike as unlike:
        return Tokenizer(_NO_VOCABULARY, f"{name}: {unlike.why}")
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        what = f"{type(error).__name__}: {error_text(error)}"
        raise CheckpointError(f"{directory / str(name)}: is not as tokenizers writes it: {what}") from error


def _from_json(settings: TokenizerSettings, rows: int) -> Vocabulary:
    main = read_json(settings.directory / _JSON)
    model = main["model"]
    kind = model.get("type")
    if kind == "BPE" and not model.get("byte_fallback"):
        found = byte_level.translate(main, rows)
    elif kind in ("BPE", "Unigram"):
        found = sentencepiece.translate(main, rows)
    else:
        raise Unlike(f"its model is {shown(str(kind))}; BPE and Unigram are translated")
    put_special_tokens(found, settings)
    put_around(found, main)
    return found


def _from_tekken(settings: TokenizerSettings, rows: int) -> Vocabulary:
    main = tekken.read_tekken(settings.directory / tekken.NAME)
    found = byte_level.translate(main, rows)
    for name, text in (("unknown", "<unk>"), ("eos", "</s>"), ("padding", "<pad>")):
        if text in found.numbers:
            found.values[f"tokenizer.ggml.{name}_token_id"] = found.numbers[text]
    put_special_tokens(found, settings)
    put_around(found, main)
    return found


def _from_model(settings: TokenizerSettings, rows: int) -> Vocabulary:
    added = dict(added_tokens({"added_tokens": _added_beside(settings)}))
    found = sentencepiece.translate_model(read_model(settings.directory / _MODEL), added, rows)
    put_special_tokens(found, settings)
    for name, usual in (("bos", True), ("eos", False)):
        said = settings.tokenizer.get(f"add_{name}_token")
        adds = said if isinstance(said, bool) else usual
        found.values[f"tokenizer.ggml.add_{name}_token"] = adds and f"tokenizer.ggml.{name}_token_id" in found.values
    return found


def _added_beside(settings: TokenizerSettings) -> list[dict[str, Any]]:
    """Tokens that were added to a tokenizer.model: added_tokens.json, and what tokenizer_config.json says of them."""
    found: list[dict[str, Any]] = []
    if has_file(settings.directory, "added_tokens.json"):
        texts = read_json(settings.directory / "added_tokens.json", largest=LARGEST_CONFIG)
        found += [{"id": number, "content": text} for text, number in texts.items()]
    said = settings.tokenizer.get("added_tokens_decoder") or {}
    for number, token in said.items():
        if not number.isdecimal():
            raise ValueError(f"added_tokens_decoder: {quoted(number)} is no number")
        found.append({**token, "id": int(number)})
    return found


def describe(tokenizer: Tokenizer) -> list[str]:
    """Warnings: that the file has no tokenizer, and why; or in what llama.cpp's differs from the model's."""
    if tokenizer.missing is not None:
        return [f"the GGUF file has no tokenizer ({tokenizer.missing}): llama.cpp takes token ids, not text"]
    return [f"the GGUF file's tokenizer: {note}" for note in tokenizer.notes]
