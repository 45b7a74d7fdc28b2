"""The places at which a config.json describes a language model, if it is that of a model which also sees or hears.

By its makers' own type, which transformers may not know: the language model in it is one of a type that is known. Types
that are another one as a whole are the ``aliases`` of that one's family.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["LANGUAGE_TYPES", "language_type", "parts"]

_KEYS = ("thinker_config", "text_config", "llm_config", "language_config")
"""Keys by which models that also see or hear have the config of their language model."""

LANGUAGE_TYPES: Mapping[str, str | Mapping[str, str]] = {
    "deepseek_vl_v2": "deepseek_v2",
    "dots_ocr": "qwen2",
    "isaac": "qwen3",
    "Keye": "qwen3",
    "KeyeVL1_5": "qwen3",
    "minicpmo": {"2.6": "qwen2"},
    "minicpmv": {"2.5": "llama", "2.6": "qwen2", "4.0": "llama", "4.5": "qwen3"},
    "phi3_v": "phi3",
}
"""Model type -> that of its language model, where its config.json does not say it: one for all, or by ``version``. So
engines build them (vLLM's classes of the models)."""


def language_type(config: Mapping[str, Any]) -> str | None:
    """The type of a model's language model where its config.json does not say it; None where nothing is known of it."""
    kind = config.get("model_type")
    found = LANGUAGE_TYPES.get(kind) if isinstance(kind, str) else None
    return found.get(str(config.get("version"))) if isinstance(found, Mapping) else found


def parts(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The configs within a config.json that may be of its language model: those of its parts; or the whole, where that
    has the keys of its language model beside those of the others."""
    kind = language_type(config)
    inside = [dict(config[key]) for key in _KEYS if isinstance(config.get(key), Mapping)]
    if inside or kind is None:
        return [part if part.get("model_type") or kind is None else {**part, "model_type": kind} for part in inside]
    return [{**config, "model_type": kind}]
