"""What an export puts beside the weights that it writes, and by what an interrupted one is known again."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelexport import __version__
from modelexport.checkpoints.hf import SideFiles, config_bytes, quantization_config
from modelexport.checkpoints.safetensors_file import Checkpoint, Layout
from modelexport.checkpoints.source import Source
from modelexport.contents.opening import config_path
from modelexport.contents.targets import TargetPlan
from modelexport.export_plan import ExportPlan
from modelexport.export_record import make_record
from modelexport.recipe import ExportRecipe
from modelexport.target import Target, TargetFiles


@dataclass(frozen=True)
class Prepared:
    """An export before its first weight is read."""

    recipe: ExportRecipe
    source: Source
    checkpoint: Checkpoint
    plan: ExportPlan
    target: TargetPlan

    @property
    def layout(self) -> Layout:
        """Where every byte goes."""
        return self.target.layout


def export_target(prepared: Prepared) -> Target:
    """The target of an export, not yet begun."""
    recipe = prepared.recipe
    assert recipe.out is not None

    def record(side: SideFiles, beside: Mapping[str, Path], outcome: dict[str, Any]) -> dict[str, Any]:
        return make_record(prepared.plan, recipe, prepared.source.label, side, beside, outcome)

    files = TargetFiles(
        source=prepared.checkpoint,
        target=prepared.target,
        fingerprint=_fingerprint(prepared),
        config=source_config(prepared.checkpoint, recipe.config, quantisation(prepared.plan)),
        record=record,
    )
    return Target(recipe.out, files, overwrite=recipe.overwrite, quiet=recipe.quiet)


def quantisation(plan: ExportPlan) -> dict[str, Any] | None:
    """config.json's ``quantization_config`` for a plan; None where nothing is quantised."""
    return quantization_config(plan.number_format, ignore=plan.ignored())


def source_config(checkpoint: Checkpoint, given: str | None, quantization: dict[str, Any] | None) -> bytes:
    """The target's config.json: the bytes that the model came with wherever there are such."""
    content = None
    if given is not None:
        content = config_path(given).read_bytes()
    elif checkpoint.config is not None:
        own = checkpoint.directory / "config.json"
        if own.is_file():
            content = own.read_bytes()
            if json.loads(content) != checkpoint.config:  # a format with a config.json of its own kind
                content = None
        if content is None:
            content = (json.dumps(checkpoint.config, indent=2) + "\n").encode()
    assert content is not None
    return config_bytes(content, quantization)


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
        "group_size": prepared.plan.number_format.group_size,
        "format": recipe.format,
        "target": {"tp": recipe.target_tp, "pp": recipe.target_pp, "ep": recipe.target_ep},
        "max_shard_bytes": recipe.max_shard_bytes,
        "modelexport": __version__,
    }
