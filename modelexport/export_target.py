"""The checkpoint in the making, as the one process sees it that publishes it: staging, side files, record, rename."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelexport import __version__
from modelexport.checkpoints.hf import RECORD, SideFiles, copy_side_files, quantization_config, write_config
from modelexport.checkpoints.safetensors_file import INDEX_NAME, Checkpoint, Layout
from modelexport.checkpoints.source import Source
from modelexport.checkpoints.staging import Staging
from modelexport.export_plan import ExportPlan
from modelexport.export_record import make_record
from modelexport.recipe import ExportRecipe


@dataclass(frozen=True)
class Prepared:
    """An export before its first weight is read."""

    recipe: ExportRecipe
    source: Source
    checkpoint: Checkpoint
    plan: ExportPlan
    layout: Layout


class Target:
    """``begin``, then the ranks write, then ``finish``; to be closed in any case."""

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        self._staging: Staging | None = None
        self._side: SideFiles | None = None

    def begin(self) -> dict[str, Any]:
        """Open the staging directory and put everything into it but the weights.

        Returns:
            The steps that an interrupted run has finished, with their records: none if a weight file had to be made.

        Raises:
            UsageError: the target exists, or another export is in its place.
        """
        prepared = self._prepared
        recipe, plan, source = prepared.recipe, prepared.plan, prepared.source.directory
        assert recipe.out is not None
        self._staging = Staging.open(Path(recipe.out), _fingerprint(prepared), overwrite=recipe.overwrite)
        if self._staging.restarted and not recipe.quiet:
            print("the machine has restarted since an export here was cut off: it begins anew", file=sys.stderr)
        payload = self._staging.directory
        self._side = copy_side_files(source, payload, set(prepared.checkpoint.files))
        heads = [module.path for module in plan.family.after if module.kind == "head"]
        write_config(source, payload, quantization_config(plan.number_format, ignore=heads))
        made = prepared.layout.create(payload)
        return {} if made else dict(self._staging.done)

    def finish(self, outcome: dict[str, Any]) -> dict[str, Any]:
        """Write index and record, and publish; returns the record.

        Args:
            outcome: the first rank's result: the checks and the layers' descriptions.
        """
        prepared, staging, side = self._prepared, self._staging, self._side
        assert staging is not None
        assert side is not None
        layout, payload = prepared.layout, staging.directory
        if len(layout.files) > 1:  # last: without it nobody takes the files for a checkpoint
            (payload / INDEX_NAME).write_text(layout.index_json())
        beside = _files_beside_weights(layout, payload)
        record = make_record(prepared.plan, prepared.recipe, prepared.source.label, side, beside, outcome)
        (payload / RECORD).write_text(json.dumps(record, indent=1) + "\n")
        staging.publish()
        return record

    def __enter__(self) -> Target:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._staging is not None:
            self._staging.close()


def _fingerprint(prepared: Prepared) -> dict[str, Any]:
    """What must be equal for an interrupted export to be resumed: the source's files and the settings."""
    digest = hashlib.sha256((prepared.source.directory / "config.json").read_bytes())
    for path in prepared.checkpoint.files:
        stat = os.stat(path)
        digest.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    recipe = prepared.recipe
    return {
        "model": str(prepared.source.directory),
        "source_files": digest.hexdigest(),
        "quant": recipe.quant,
        "group_size": prepared.plan.number_format.group_size,
        "format": recipe.format,
        "max_shard_bytes": recipe.max_shard_bytes,
        "modelexport": __version__,
    }


def _files_beside_weights(layout: Layout, directory: Path) -> dict[str, Path]:
    """Name -> path of every file of a checkpoint but its weights and the record that is yet to be written."""
    other = {file.name for file in layout.files} | {RECORD}
    paths = {str(path.relative_to(directory)): path for path in directory.rglob("*") if path.is_file()}
    return {name: path for name, path in paths.items() if name not in other}
