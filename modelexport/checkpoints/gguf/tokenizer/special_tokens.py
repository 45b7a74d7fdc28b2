"""Special tokens in a GGUF file: their numbers, what is put around every text, and the chat templates."""

from __future__ import annotations

import os
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modelexport.checkpoints.gguf.file import Value
from modelexport.checkpoints.gguf.tokenizer.vocabulary import Unlike, Vocabulary
from modelexport.errors import CheckpointError, shown
from modelexport.system.small_files import LARGEST_CONFIG, has_file, read_json, read_small

SPECIAL = {
    "bos": "bos",
    "eos": "eos",
    "unknown": "unk",
    "padding": "pad",
    "seperator": "sep",  # ggml's spelling
    "mask": "mask",
}
"""llama.cpp's names of special tokens -> transformers'."""

_ENDS = {
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
    *("<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>"),
    *("<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "[e~["),
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
}
"""Texts of tokens that llama.cpp takes for the end of an answer without being told."""
_FILLS = {"[PREFIX]": "fim_pre", "[SUFFIX]": "fim_suf", "[MIDDLE]": "fim_mid"}
"""Texts of tokens around a gap to be filled that llama.cpp does not know by itself."""
_MOST_TEMPLATES = 64


@dataclass(frozen=True)
class TokenizerSettings:
    """The settings beside a tokenizer: tokenizer_config.json, config.json, generation_config.json; {} for none."""

    directory: Path
    tokenizer: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    generation: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, directory: Path, model: Mapping[str, Any]) -> TokenizerSettings:
        """Read them.

        Raises:
            CheckpointError: one cannot be read, or is damaged.
        """
        tokenizer, generation = (
            read_json(directory / name, largest=LARGEST_CONFIG) if has_file(directory, name) else {}
            for name in ("tokenizer_config.json", "generation_config.json")
        )
        return cls(directory, tokenizer, model, generation)


def put_special_tokens(found: Vocabulary, settings: TokenizerSettings) -> None:
    """Adds the numbers of special tokens, those that end an answer among them."""
    for name, key in SPECIAL.items():
        number = _number(key, settings, found.numbers)
        if number is not None:
            found.values[f"tokenizer.ggml.{name}_token_id"] = number
    for text, name in _FILLS.items():
        if text in found.numbers:
            found.values[f"tokenizer.ggml.{name}_token_id"] = found.numbers[text]
    _put_ends(found, settings)


def _number(key: str, settings: TokenizerSettings, numbers: Mapping[str, int]) -> int | None:
    """A special token's number: by tokenizer_config.json its text, else by config.json."""
    text = settings.tokenizer.get(f"{key}_token")
    if isinstance(text, dict):
        text = text.get("content")
    if isinstance(text, str) and text in numbers:
        return numbers[text]
    said = _numbers(settings.model.get(f"{key}_token_id"), len(numbers))
    return said[0] if said else None


def _numbers(said: Any, most: int) -> list[int]:
    every = said if isinstance(said, list) else [said]
    return [number for number in every if type(number) is int and 0 <= number < most]


def _put_ends(found: Vocabulary, settings: TokenizerSettings) -> None:
    """Adds further tokens that end an answer: llama.cpp has place for two, and knows many by their text."""
    said = [settings.generation.get("eos_token_id"), settings.model.get("eos_token_id")]
    texts = {number: text for text, number in found.numbers.items()}
    ends = dict.fromkeys(number for each in said for number in _numbers(each, len(found.numbers)))
    main = found.values.get("tokenizer.ggml.eos_token_id")
    more = [number for number in ends if number != main and texts[number] not in _ENDS]
    for name, number in zip(("eot", "eom"), more, strict=False):
        found.values[f"tokenizer.ggml.{name}_token_id"] = number
    if len(more) > 2:
        listed = ", ".join(shown(texts[number]) for number in more[2:6])
        found.notes.append(f"llama.cpp does not end an answer at {listed}, at which the model's generation ends")


# ------------------------------------------------------------------ around a text


def put_around(found: Vocabulary, main: Mapping[str, Any]) -> None:
    """Adds whether bos and eos are put around every text, by a tokenizer.json's post-processor.

    Raises:
        Unlike: the post-processor is none that this can be said of.
    """
    before, after = _around(main)
    bos, eos = "tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id"
    if before:  # whatever config.json calls bos: llama.cpp's is what it begins texts with
        found.values[bos] = before[0]
    if len(after) == 1:
        found.values.setdefault(eos, after[0])
    adds = {"bos": len(before) == 1, "eos": after == [found.values.get(eos)]}
    for name, added, place in (("bos", before, "before"), ("eos", after, "behind")):
        found.values[f"tokenizer.ggml.add_{name}_token"] = adds[name]
        if added and not adds[name]:
            texts = {number: text for text, number in found.numbers.items()}
            listed = " ".join(shown(texts.get(number, str(number))) for number in added[:6])
            found.notes.append(
                f"the model's tokenizer puts {listed} {place} every text, where llama.cpp can put {name} alone: it "
                "puts nothing there, and a prompt has to hold it"
            )


def _around(main: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    """The tokens that are put before and behind a text."""
    post = main.get("post_processor")
    steps: Sequence[Mapping[str, Any]] = [] if post is None else post.get("processors") or [post]
    before: list[int] = []
    after: list[int] = []
    for step in steps:
        kind = step.get("type")
        if kind == "ByteLevel":
            continue
        if kind in ("RobertaProcessing", "BertProcessing"):
            before.append(int(step["cls"][1]))
            after.append(int(step["sep"][1]))
            continue
        if kind != "TemplateProcessing":
            raise Unlike(f"its post-processor is {shown(str(kind))}")
        place = before
        for piece in step["single"]:
            if "Sequence" in piece:
                place = after
                continue
            place.extend(int(number) for number in step["special_tokens"][piece["SpecialToken"]["id"]]["ids"])
    return before, after


# ------------------------------------------------------------------ chat templates


def chat_templates(settings: TokenizerSettings) -> dict[str, Value]:
    """The values of the chat templates: the default one, and others by name.

    Raises:
        CheckpointError: a file of them cannot be read, or is no text.
    """
    found = _named(settings)
    others = {name: text for name, text in found.items() if name != "default"}
    values: dict[str, Value] = {}
    if "default" in found:
        values["tokenizer.chat_template"] = found["default"]
    if others:
        values["tokenizer.chat_templates"] = list(others)
        values |= {f"tokenizer.chat_template.{name}": text for name, text in others.items()}
    return values


def _named(settings: TokenizerSettings) -> dict[str, str]:
    """Templates by name: of files, which have the say in transformers, too, or of tokenizer_config.json."""
    directory, found = settings.directory, {}
    more = directory / "additional_chat_templates"
    if more.is_dir():
        names = sorted(name for name in os.listdir(more) if name.endswith(".jinja"))[:_MOST_TEMPLATES]
        found = {_plain(name.removesuffix(".jinja")): _text(more / name) for name in names}
    if has_file(directory, "chat_template.jinja"):
        return found | {"default": _text(directory / "chat_template.jinja")}
    said = settings.tokenizer.get("chat_template")
    if said is None and has_file(directory, "chat_template.json"):
        said = read_json(directory / "chat_template.json", largest=LARGEST_CONFIG).get("chat_template")
    if isinstance(said, str):
        return found | {"default": said}
    named = said if isinstance(said, list) else []
    pairs = [(each.get("name"), each.get("template")) for each in named[:_MOST_TEMPLATES] if isinstance(each, dict)]
    return found | {_plain(name): text for name, text in pairs if isinstance(name, str) and isinstance(text, str)}


def _plain(name: str) -> str:
    """A template's name as llama.cpp's keys have it."""
    allowed = string.ascii_letters + string.digits
    return "".join(each if each in allowed else "_" for each in name)


def _text(path: Path) -> str:
    try:
        return read_small(path, largest=LARGEST_CONFIG).decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: is not UTF-8 text: {error}") from error
