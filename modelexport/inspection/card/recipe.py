"""The part of a model card about the making of the checkpoint: a recipe that makes the same bytes again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from modelexport.inspection.card.markdown import code, plain
from modelexport.inspection.record.reading import ExportRecord
from modelexport.quantization import algorithms
from modelexport.quantization.calibration.text import OWN_TEXT
from modelexport.recipe import ExportRecipe, calibration_key, is_calibration, recorded_names
from modelexport.settings import decides_bytes

__all__ = ["recipe_lines", "recipe_of"]

_TARGET = ("target_tp", "target_pp", "target_ep")
_ALWAYS = ("quant", "algorithm", "format")
_OF_ADAPTER = ("name", "kind", "rank", "alpha", "weight")


def recipe_of(record: ExportRecord) -> dict[str, Any]:
    """Returns the settings that decide the bytes, as a recipe has them, without those at their defaults.

    An algorithm that chose the number formats is left out: they stand there themselves.
    """
    recipe, model = record.recipe, record.model
    found: dict[str, Any] = {}
    if model.hub_id:
        found["model"] = model.hub_id
        if model.revision:
            found["revision"] = model.revision
    default = ExportRecipe.algorithm
    chosen = [algorithm.name for algorithm in algorithms.used(recipe.get("algorithm")) if algorithm.kind == "assign"]
    used = [name for name in str(recipe.get("algorithm", default)).split("+") if name not in chosen] or [default]
    calibration = dict(record.calibration)
    if calibration.get("text") == OWN_TEXT:
        del calibration["text"]
    elif calibration.get("sources"):
        calibration["text"] = [f"{source['text']}={source['weight']:g}" for source in calibration["sources"]]
    own_keys = {field: key for key, field in recorded_names(used).items()}
    wanted = {**recipe, "algorithm": "+".join(used)}
    for spec in filter(decides_bytes, fields(ExportRecipe)):
        held, key = wanted, spec.name
        if is_calibration(spec.name):
            held, key = calibration, calibration_key(spec.name)
        elif "algorithm" in spec.metadata:
            key = own_keys.get(spec.name, "")
        if key in held and (spec.name in _ALWAYS or held[key] != spec.default):
            found[spec.name] = held[key]
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
    for adapter in record.adapters:
        name, kind, rank, alpha, weight = (plain(adapter.get(key, "?")) for key in _OF_ADAPTER)
        yield (
            f"The adapter {name} was merged into the weights first: {kind} of rank {rank}, alpha {alpha}, times "
            f"{weight}; SHA-256 of its file {code(adapter.get('sha256', '?'))}."
        )
    for algorithm in algorithms.used(recipe.get("algorithm")):
        if algorithm.kind != "assign":
            continue
        yield (
            f"The number formats were chosen by {algorithm.name}, within {plain(recipe.get('bits', '?'))} bits a "
            f"weight among {code(recipe.get('candidates', '?'))}."
        )
    if calibration:
        samples, length, text = (plain(calibration.get(key, "?")) for key in ("samples", "length", "text"))
        yield f"Calibrated on {samples} samples of {length} tokens of {text}."


def _flags(recipe: Mapping[str, Any]) -> str:
    named = [name for name in ("format", *_TARGET) if name in recipe and recipe[name] != _default(name)]
    return " ".join(f"--{name.replace('_', '-')} {plain(recipe[name])}" for name in named or ["format"])


def _default(name: str) -> Any:
    return ExportRecipe.__dataclass_fields__[name].default
