"""What an export puts beside the weights that it writes, and by what an interrupted one is known again."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from modelexport import __version__
from modelexport.checkpoints.card_metadata import read_card_metadata
from modelexport.checkpoints.formats.hf import CARD, RECORD, SOURCE_CARD, SideFiles, config_bytes
from modelexport.checkpoints.safetensors.file import Checkpoint, Layout
from modelexport.checkpoints.source import Source
from modelexport.errors import CheckpointError
from modelexport.exporting.plan import ExportPlan
from modelexport.exporting.record import make_record
from modelexport.inspection.card import model_card
from modelexport.inspection.record.reading import read_record
from modelexport.jobs.target_directory import Target, TargetFiles
from modelexport.models.opening import config_path
from modelexport.models.target_plan import TargetPlan
from modelexport.quantization.assignment import KEEP
from modelexport.quantization.calibration.text import file_of
from modelexport.quantization.methods import methods, of_method
from modelexport.quantization.methods.base import Announced, Announcement
from modelexport.recipe import ExportRecipe
from modelexport.system.small_files import LARGEST_CONFIG, has_file, read_small


@dataclass(frozen=True)
class Prepared:
    """An export before its first weight is read."""

    recipe: ExportRecipe
    source: Source
    checkpoint: Checkpoint
    plan: ExportPlan
    target: TargetPlan
    warnings: tuple[str, ...] = ()

    @property
    def layout(self) -> Layout:
        """Where every byte goes."""
        return self.target.layout


def export_target(prepared: Prepared) -> Target:
    """The target of an export, not yet begun."""
    recipe = prepared.recipe
    assert recipe.out is not None
    before = read_record(prepared.checkpoint.directory) if recipe.quant == KEEP else None

    def record(side: SideFiles, beside: Mapping[str, Path], outcome: dict[str, Any]) -> dict[str, Any]:
        made = make_record(prepared.plan, recipe, prepared.source.label, side, beside, outcome)
        facts = {"model": _model_facts(prepared), "warnings": list(prepared.warnings)}
        return {**made, **facts, **_inherited(before, made)}

    announced = announcement(prepared.plan)
    beside = {} if announced is None else announced.files
    stale, renamed = cards(prepared.checkpoint.directory)
    files = TargetFiles(
        source=prepared.checkpoint,
        target=replace(prepared.target, side_files={**prepared.target.side_files, **beside}),
        fingerprint=_fingerprint(prepared),
        inputs=inputs_of(prepared.checkpoint, recipe.config, recipe.calib if _is_calibrated(prepared) else None),
        config=source_config(
            prepared.checkpoint, recipe.config, None if announced is None else announced.config, replaced=True
        ),
        record=record,
        stale=stale | {name for method in methods().values() for name in method.SIDE_FILES},
        card=model_card,
        renamed=renamed,
    )
    return Target(recipe.out, files, overwrite=recipe.overwrite, quiet=recipe.quiet)


def cards(source: Path) -> tuple[frozenset[str], dict[str, str]]:
    """What becomes of a source's README.md where ours takes its place.

    Returns:
        Files that stay behind, and those that come along under another name: a card that was made of the source's
        record is made anew, any other one is kept beside ours.
    """
    try:
        record = read_record(source)
        own = record is not None and read_small(source / CARD) == model_card(record).encode()
    except CheckpointError:  # damaged, or gone: nobody can tell, so it is kept
        own = False
    return (frozenset({CARD}), {}) if own else (frozenset(), {CARD: SOURCE_CARD})


def _model_facts(prepared: Prepared) -> dict[str, Any]:
    """What is known of the model beside its numbers: what it is, where it came from, and under which licence."""
    source, config = prepared.source, prepared.checkpoint.config or {}
    said = read_card_metadata(source.directory)
    declared = next(iter(said.pop("base_model", [])), None)
    is_quantised_base = said.pop("base_model_relation", None) == "quantized" and prepared.recipe.quant == KEEP
    base = source.hub_id
    if declared is not None and (is_quantised_base or (base is None and (source.directory / RECORD).is_file())):
        base = declared
    architectures = config.get("architectures")
    return {
        "model_type": config.get("model_type"),
        "architecture": architectures[0] if isinstance(architectures, list) and architectures else None,
        "is_demo": source.is_demo,
        "hub_id": source.hub_id,
        "revision": prepared.recipe.revision,
        "base_model": base,
        "source_bytes": prepared.plan.source_bytes,
        **said,
    }


def _inherited(before: Mapping[str, Any] | None, made: Mapping[str, Any]) -> dict[str, Any]:
    """What stays true of numbers that are only spelled anew: how they were rounded, and what was folded or rotated."""
    if before is None:
        return {}
    keys = ("calibration", "changed", "output_error")
    algorithm = before["recipe"].get("algorithm", made["recipe"]["algorithm"])
    kept = {key: before[key] for key in keys if before.get(key) is not None}
    return {"recipe": {**made["recipe"], "algorithm": algorithm}, **kept}


def announcement(plan: ExportPlan) -> Announcement | None:
    """What config.json, and files beside it, say of a plan's quantisation; None where nothing is quantised."""
    formats = plan.formats()
    if not formats and not plan.kv_cache:
        return None
    announced = Announced(formats, plan.ignored(), plan.kv_cache, __version__, plan.kept_subtrees())
    return of_method(plan.method).announce(announced)


def source_config(
    checkpoint: Checkpoint, given: str | None, quantization: dict[str, Any] | None, *, replaced: bool = False
) -> bytes:
    """The target's config.json: the bytes that the model came with wherever there are such.

    Args:
        quantization: its new ``quantization_config``; None: there is none.
        replaced: whether what the model came with says of quantisation no longer holds.
    """
    content = None
    if given is not None:
        content = read_small(config_path(given), largest=LARGEST_CONFIG)
        if json.loads(content) != checkpoint.config:  # changed since, as where a head was untied
            content = (json.dumps(checkpoint.config, indent=2) + "\n").encode()
    elif checkpoint.config is not None:
        if has_file(checkpoint.directory, "config.json"):
            content = read_small(checkpoint.directory / "config.json", largest=LARGEST_CONFIG)
            if json.loads(content) != checkpoint.config:  # a format with a config.json of its own kind
                content = None
        if content is None:
            content = (json.dumps(checkpoint.config, indent=2) + "\n").encode()
    assert content is not None
    return config_bytes(content, quantization, replace=replaced)


def inputs_of(checkpoint: Checkpoint, config: str | None, text: str | None = None) -> list[Path]:
    """The files that a target is made from: weights, config.json, and the text that a model is calibrated on."""
    own = checkpoint.directory / "config.json" if config is None else config_path(config)
    return [path for path in (*checkpoint.files, own, file_of(text)) if path is not None]


def files_digest(config: dict[str, Any] | None, files: Iterable[Path]) -> str:
    """A digest of a config and of the names, sizes and times of files: equal as long as nobody touched them."""
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for path in files:
        stat = os.stat(path)
        digest.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _fingerprint(prepared: Prepared) -> dict[str, Any]:
    """What must be equal for an interrupted export to be resumed: the source's files and the settings."""
    recipe = prepared.recipe
    return {
        "model": str(prepared.source.directory),
        "source_files": files_digest(prepared.checkpoint.config, prepared.checkpoint.files),
        "quant": recipe.quant,
        "group_size": recipe.group_size,
        "algorithm": recipe.algorithm,
        "kv_cache": recipe.kv_cache,
        "calibration": _calibration(prepared),
        "format": recipe.format,
        "target": {"tp": recipe.target_tp, "pp": recipe.target_pp, "ep": recipe.target_ep},
        "max_shard_bytes": recipe.max_shard_bytes,
        "modelexport": __version__,
    }


def _calibration(prepared: Prepared) -> dict[str, Any] | None:
    """What calibration depends on, beside the model; None where there is none."""
    recipe = prepared.recipe
    if not _is_calibrated(prepared):
        return None
    file = file_of(recipe.calib)
    return {
        "text": recipe.calib,
        "file": None if file is None else files_digest(None, [file]),
        "samples": recipe.calib_samples,
        "length": recipe.calib_length,
        "seed": recipe.calib_seed,
        "range": recipe.calib_range,
        "experts": recipe.calib_experts,
        **recipe.algorithm_settings,
    }


def _is_calibrated(prepared: Prepared) -> bool:
    return bool(prepared.plan.needs_ranges or prepared.plan.calibrated)
