"""The part of a model card that says how the checkpoint was made: a recipe that makes the same bytes again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from modelexport.inspection.card.markdown import code, plain
from modelexport.recipe import ALGORITHM_SETTINGS, ExportRecipe

__all__ = ["recipe_lines", "recipe_of"]

_DECIDING = ("quant", "group_size", "algorithm", "kv_cache", "format", "max_shard_bytes")
_TARGET = ("target_tp", "target_pp", "target_ep")
_CALIBRATION = ("samples", "length", "seed", "range", "experts")
_ALWAYS = ("quant", "algorithm", "format")
_OWN_TEXT = "modelexport's own text"


def recipe_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that decide the bytes, as a recipe has them; those that are at their defaults are left out.

    What autoquant chose stands in the place of autoquant.
    """
    recipe, model = _mapping(record.get("recipe")), _mapping(record.get("model"))
    found: dict[str, Any] = {}
    if model.get("hub_id"):
        found["model"] = model["hub_id"]
        if model.get("revision"):
            found["revision"] = model["revision"]
    algorithms = [name for name in str(recipe.get("algorithm", "rtn")).split("+") if name != "autoquant"] or ["rtn"]
    settings = [name for algorithm in algorithms for name in ALGORITHM_SETTINGS.get(algorithm, ())]
    wanted = {**recipe, "algorithm": "+".join(algorithms)}
    for name in (*_DECIDING, *settings, *_TARGET):
        if name in wanted and (name in _ALWAYS or wanted[name] != _default(name)):
            found[name] = wanted[name]
    calibration = _mapping(record.get("calibration"))
    if calibration and calibration.get("text") != _OWN_TEXT:
        found["calib"] = calibration.get("text")
    for name in _CALIBRATION:
        if name in calibration and calibration[name] != _default(f"calib_{name}"):
            found[f"calib_{name}"] = calibration[name]
    return found


def recipe_lines(record: Mapping[str, Any]) -> Iterator[str]:
    """Lines of Markdown."""
    import yaml

    recipe = _mapping(record.get("recipe"))
    yield "## How it was made"
    yield ""
    if recipe.get("quant") == "keep":
        yield from ("```", f"modelexport convert SOURCE {_flags(recipe)} --out CKPT", "```")
    else:
        text = yaml.safe_dump(recipe_of(record), sort_keys=False, allow_unicode=False, width=10**6)
        yield "`modelexport --recipe FILE" + ("" if _has_model(record) else " --model SOURCE") + " --out CKPT`, with:"
        yield from ("", "```yaml", *text.rstrip("\n").split("\n"), "```")
    yield ""
    yield from _remarks(record)
    versions = ", ".join(f"{plain(name)} {plain(v)}" for name, v in _mapping(record.get("versions")).items() if v)
    if versions:
        yield f"With {versions}. The bytes do not depend on the number of ranks."


def _remarks(record: Mapping[str, Any]) -> Iterator[str]:
    recipe, calibration = _mapping(record.get("recipe")), _mapping(record.get("calibration"))
    if "autoquant" in str(recipe.get("algorithm", "")).split("+"):
        yield (
            f"The number formats were chosen by autoquant, within {plain(recipe.get('bits', '?'))} bits a weight among "
            f"{code(recipe.get('candidates', '?'))}."
        )
    if calibration:
        samples, length, text = (plain(calibration.get(key, "?")) for key in ("samples", "length", "text"))
        yield f"Calibrated on {samples} samples of {length} tokens of {text}."


def _flags(recipe: Mapping[str, Any]) -> str:
    named = [name for name in ("format", *_TARGET) if name in recipe and recipe[name] != _default(name)]
    return " ".join(f"--{name.replace('_', '-')} {plain(recipe[name])}" for name in named or ["format"])


def _has_model(record: Mapping[str, Any]) -> bool:
    model = _mapping(record.get("model"))
    return bool(model.get("hub_id") or model.get("is_demo"))


def _default(name: str) -> Any:
    return ExportRecipe.__dataclass_fields__[name].default


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
