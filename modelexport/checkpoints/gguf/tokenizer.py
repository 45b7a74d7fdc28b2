"""A model's tokenizer in GGUF's terms, from its tokenizer.json: byte-level BPE (GPT-2, Llama 3, Qwen2, SmolLM).

llama.cpp knows pre-tokenizers by name, each a regular expression of its own; only those of :data:`_SPLITS` and
GPT-2's, which ``ByteLevel`` has within itself, are translated. Of anything else (SentencePiece with its Metaspace and
byte fallback) nothing is written, and the reason is told: the file then takes token ids, not text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modelexport.checkpoints.gguf.file import Value
from modelexport.errors import CheckpointError, error_text
from modelexport.system.small_files import LARGEST_CONFIG, has_file, read_json, read_small

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
_NO_VOCABULARY: Mapping[str, Value] = {"tokenizer.ggml.model": "no_vocab"}
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|"
_REST = "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
# A tokenizer.json's Split -> llama.cpp's name.
_SPLITS = {
    f"{_CONTRACTIONS}\\p{{N}}{{1,3}}{_REST}": "llama-bpe",
    f"{_CONTRACTIONS}\\p{{N}}{_REST}": "qwen2",
}
# What these names make llama.cpp do with a word that is a token itself: take it, or merge all the same.
_IGNORES_MERGES = {"llama-bpe"}


@dataclass(frozen=True)
class Tokenizer:
    """Values for the header; where there is no tokenizer in them, why."""

    values: Mapping[str, Value]
    missing: str | None = None


@dataclass
class _Unlike(Exception):
    """The tokenizer cannot be translated."""

    why: str


@dataclass
class _Json:
    """A tokenizer's files: tokenizer.json, tokenizer_config.json ({} where there is none)."""

    main: dict[str, Any]
    config: dict[str, Any] = field(default_factory=dict)


def read_tokenizer(directory: Path | None, config: Mapping[str, Any], vocab: int) -> Tokenizer:
    """Translate the tokenizer of the model in ``directory``.

    Args:
        config: the model's config.json, for the ids of its special tokens.
        vocab: rows of its embedding: so many tokens there must be.

    Raises:
        CheckpointError: a file of the tokenizer is damaged.
    """
    if directory is None or not has_file(directory, "tokenizer.json"):
        where = "no source directory is known" if directory is None else f"{directory} has no tokenizer.json"
        return Tokenizer(_NO_VOCABULARY, where)
    beside = "tokenizer_config.json"
    files = _Json(
        read_json(directory / "tokenizer.json"),
        read_json(directory / beside) if has_file(directory, beside) else {},
    )
    try:
        values = _translate(files, config, vocab)
        template = _template(directory, files.config)
    except _Unlike as unlike:
        return Tokenizer(_NO_VOCABULARY, f"tokenizer.json: {unlike.why}")
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        what = f"{type(error).__name__}: {error_text(error)}"
        raise CheckpointError(f"{directory / 'tokenizer.json'}: is not as tokenizers writes it: {what}") from error
    return Tokenizer({**values, **({"tokenizer.chat_template": template} if template else {})})


def _translate(files: _Json, config: Mapping[str, Any], vocab: int) -> dict[str, Value]:
    model = files.main["model"]
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        kind = "BPE with byte fallback (SentencePiece's)" if model.get("byte_fallback") else model.get("type")
        raise _Unlike(f"its model is {kind}; only byte-level BPE is translated")
    pre = _pre_tokenizer(files.main, bool(model.get("ignore_merges")))
    tokens, types = _tokens(files.main, vocab)
    values: dict[str, Value] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
    }
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    if not all(isinstance(text, str) for text in (*tokens, *merges)):
        raise TypeError("a token is no text")
    if any(merge.count(" ") != 1 for merge in merges):
        raise _Unlike("a merge has a space in one of its tokens")
    if merges:
        values["tokenizer.ggml.merges"] = merges
    numbers = {text: number for number, text in enumerate(tokens)}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad")):
        number = _special(key, files.config, config, numbers)
        if number is not None:
            values[f"tokenizer.ggml.{name}_token_id"] = number
    first = _prepended(files.main)
    if first is not None and first != values.get("tokenizer.ggml.bos_token_id"):
        raise _Unlike(f"it puts token {first} before every text, which is not its bos")
    values["tokenizer.ggml.add_bos_token"] = first is not None
    values["tokenizer.ggml.add_eos_token"] = False
    return values


def _pre_tokenizer(main: Mapping[str, Any], ignores_merges: bool) -> str:
    """llama.cpp's name of what cuts a text into words."""
    normalizer = main.get("normalizer")
    if normalizer is not None and normalizer.get("type") != "NFC":  # which llama.cpp leaves to the caller
        raise _Unlike(f"its normalizer is {normalizer.get('type')}")
    pre = main.get("pre_tokenizer") or {}
    steps = pre.get("pretokenizers", []) if pre.get("type") == "Sequence" else [pre]
    last = steps[-1] if steps else {}
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        raise _Unlike(f"its pre-tokenizer ends in {last.get('type')}, not in ByteLevel without a prefix space")
    if len(steps) == 1 and last.get("use_regex", True):
        name = "gpt-2"
    elif len(steps) == 2 and steps[0].get("type") == "Split" and not last.get("use_regex", True):
        pattern = (steps[0].get("pattern") or {}).get("Regex")
        isolated = steps[0].get("behavior") == "Isolated" and not steps[0].get("invert")
        if pattern not in _SPLITS or not isolated:
            raise _Unlike("its pre-tokenizer's regular expression is none that llama.cpp is known to have")
        name = _SPLITS[pattern]
    else:
        raise _Unlike(f"its pre-tokenizer is {', '.join(str(step.get('type')) for step in steps)}")
    if ignores_merges != (name in _IGNORES_MERGES):
        raise _Unlike(f"ignore_merges is {ignores_merges}, which llama.cpp's '{name}' is not")
    return name


def _tokens(main: Mapping[str, Any], vocab: int) -> tuple[list[str], list[int]]:
    """Every token by its number, and its type; rows of the embedding without a token are unused ones."""
    found: dict[int, tuple[str, int]] = {number: (text, _NORMAL) for text, number in main["model"]["vocab"].items()}
    for added in main.get("added_tokens") or []:
        found[added["id"]] = added["content"], _CONTROL if added.get("special") else _USER_DEFINED
    beyond = [number for number in found if not 0 <= number < vocab]
    if beyond:
        raise _Unlike(f"{len(beyond)} tokens have no row in the embedding of {vocab}, the first is {min(beyond)}")
    both = [found.get(number, (f"[PAD{number}]", _UNUSED)) for number in range(vocab)]
    return [text for text, _ in both], [kind for _, kind in both]


def _special(
    key: str, tokenizer: Mapping[str, Any], config: Mapping[str, Any], numbers: Mapping[str, int]
) -> int | None:
    """A special token's number: by tokenizer_config.json its text, else by config.json."""
    text = tokenizer.get(f"{key}_token")
    if isinstance(text, dict):
        text = text.get("content")
    if isinstance(text, str) and text in numbers:
        return numbers[text]
    number = config.get(f"{key}_token_id")
    if isinstance(number, list):
        number = number[0] if number else None
    return number if type(number) is int and 0 <= number < len(numbers) else None


def _prepended(main: Mapping[str, Any]) -> int | None:
    """The token that every text begins with, by the post-processor; None where there is none."""
    post = main.get("post_processor")
    steps: Sequence[Mapping[str, Any]] = [] if post is None else post.get("processors") or [post]
    for step in steps:
        if step.get("type") == "ByteLevel":
            continue
        if step.get("type") != "TemplateProcessing":
            raise _Unlike(f"its post-processor is {step.get('type')}")
        pieces = [list(piece.items())[0] for piece in step["single"]]  # noqa: RUF015 # an empty one: a LookupError
        specials = [piece["id"] for kind, piece in pieces if kind == "SpecialToken"]
        if not specials:
            continue
        if len(specials) > 1 or pieces[0][0] != "SpecialToken":
            raise _Unlike("its post-processor adds more than one token in front")
        ids = step["special_tokens"][specials[0]]["ids"]
        if len(ids) != 1:
            raise _Unlike("its post-processor adds more than one token in front")
        return int(ids[0])
    return None


def _template(directory: Path, config: Mapping[str, Any]) -> str | None:
    """The chat template: a file of its own, or in tokenizer_config.json (of several the default one)."""
    if has_file(directory, "chat_template.jinja"):
        path = directory / "chat_template.jinja"
        try:
            return read_small(path, largest=LARGEST_CONFIG).decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{path}: is not UTF-8 text: {error}") from error
    found = config.get("chat_template")
    if isinstance(found, list):
        found = next((each.get("template") for each in found if each.get("name") == "default"), None)
    return found if isinstance(found, str) else None


def describe(tokenizer: Tokenizer) -> str | None:
    """A warning that the file has no tokenizer, and why; None where it has one."""
    if tokenizer.missing is None:
        return None
    return f"the GGUF file has no tokenizer ({tokenizer.missing}): llama.cpp takes token ids, not text"
