"""The part of a model card about the making of the checkpoint: a recipe that makes the same bytes again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from modelexport.inspection.card.markdown import code, plain
from modelexport.inspection.record.reading import ExportRecord
from modelexport.recipe import ALGORITHM_SETTINGS, ExportRecipe

__all__ = ["recipe_lines", "recipe_of"]

_DECIDING = ("quant", "group_size", "algorithm", "kv_cache", "format", "max_shard_bytes")
_TARGET = ("target_tp", "target_pp", "target_ep")
_CALIBRATION = ("samples", "length", "seed", "range", "experts")
_ALWAYS = ("quant", "algorithm", "format")
_OWN_TEXT = "modelexport's own text"


def recipe_of(record: ExportRecord) -> dict[str, Any]:
    """Returns the settings that decide the bytes, as a recipe has them, without those at their defaults.

    What autoquant chose stands in the place of autoquant.
    """
    recipe, model = record.recipe, record.model
    found: dict[str, Any] = {}
    if model.hub_id:
        found["model"] = model.hub_id
        if model.revision:
            found["revision"] = model.revision
    algorithms = [name for name in record.algorithms if name != "autoquant"] or ["rtn"]
    settings = [name for algorithm in algorithms for name in ALGORITHM_SETTINGS.get(algorithm, ())]
    wanted = {**recipe, "algorithm": "+".join(algorithms)}
    for name in (*_DECIDING, *settings, *_TARGET):
        if name in wanted and (name in _ALWAYS or wanted[name] != _default(name)):
            found[name] = wanted[name]
    calibration = record.calibration
    if calibration and calibration.get("text") != _OWN_TEXT:
        found["calib"] = calibration.get("text")
    for name in _CALIBRATION:
        if name in calibration and calibration[name] != _default(f"calib_{name}"):
            found[f"calib_{name}"] = calibration[name]
    return found


def recipe_lines(record: ExportRecord) -> Iterator[str]:
    """Yields lines of Markdown."""
    import yaml

    recipe = record.recipe
    yield "## How it was made"
    yield ""
    if recipe.get("quant") == "keep":
        yield from ("```", f"modelexport convert SOURCE {_flags(recipe)} --out CKPT", "```")
    else:
        text = yaml.safe_dump(recipe_of(record), sort_keys=False, allow_unicode=False, width=10**6)
        yield (
            "`modelexport --recipe FILE"
            + ("" if record.model.hub_id or record.model.is_demo else " --model SOURCE")
            + " --out CKPT`, with:"
        )
        yield from ("", "```yaml", *text.rstrip("\n").split("\n"), "```")
    yield ""
    yield from _remarks(record)
    versions = ", ".join(f"{plain(name)} {plain(v)}" for name, v in record.versions.items() if v)
    if versions:
        yield f"With {versions}. The bytes do not depend on the number of ranks."


def _remarks(record: ExportRecord) -> Iterator[str]:
    recipe, calibration = record.recipe, record.calibration
    if "autoquant" in record.algorithms:
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


def _default(name: str) -> Any:
    return ExportRecipe.__dataclass_fields__[name].default
