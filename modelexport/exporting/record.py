"""modelexport.json, and what an export returns.

The record holds what the bytes depend on and nothing else (no times, no number of ranks), so that the whole
directory is the same to the byte whatever the parallelism.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from modelexport import __version__
from modelexport.checkpoints.adapters import CONFIG
from modelexport.checkpoints.card_metadata import read_card_metadata
from modelexport.checkpoints.formats.hf import RECORD, SideFiles
from modelexport.exporting.plan import ExportPlan
from modelexport.exporting.prepare import PreparedExport, quantization_files
from modelexport.inspection.card import model_card
from modelexport.inspection.record.reading import ExportRecord, read_record
from modelexport.jobs.side_files import cards, files_digest, inputs_of, source_config
from modelexport.jobs.target_directory import TargetDirectory, TargetDirectorySpec
from modelexport.quantization.assignment import KEEP
from modelexport.quantization.calibration.images import image_files
from modelexport.quantization.calibration.text import file_of, shares
from modelexport.quantization.methods import methods
from modelexport.recipe import ExportRecipe, is_calibration
from modelexport.system.small_files import file_sha256
from modelexport.system.startup import without_collector

RECORD_VERSION = 1
_NUMERICAL_PACKAGES = ("torch", "numpy", "numba", "safetensors")


def make_record(
    plan: ExportPlan,
    recipe: ExportRecipe,
    source: str,
    side: SideFiles,
    files: Mapping[str, Path],
    outcome: dict[str, Any],
) -> dict[str, Any]:
    """The content of modelexport.json.

    Args:
        files: name -> path of every file written beside the weights.
        outcome: the first rank's result: ``checks`` (per module: SHA-256 of its tensors as read back, SQNR in dB
            against the source).
    """
    checks = {check["name"]: check for check in outcome["checks"]}
    seen = outcome.get("calibration")
    changed, errors = ([], {}) if seen is None else (seen.pop("changed", []), seen.pop("output_error", {}))
    return {
        "record_version": RECORD_VERSION,
        "producer": {"name": "modelexport", "version": __version__},
        "versions": {name: _version(name) for name in _NUMERICAL_PACKAGES},
        "source": source,
        "recipe": recipe.recorded(),
        "calibration": _calibration(recipe, seen),
        "changed": changed,
        "output_error": errors,
        "tensor_parallel_sizes": plan.admissible_tp(),
        "notes": list(plan.notes),
        "unquantised": plan.unquantised,
        "left_out": {**plan.left_out, **side.left_out},
        "file_sha256": {n: file_sha256(path) for n, path in sorted(files.items())},
        "layers": _layers(plan),
        "sqnr_db": {n: c["sqnr_db"] for n, c in sorted(checks.items()) if c["sqnr_db"] is not None},
        "sha256": {t: h for _, check in sorted(checks.items()) for t, h in check["sha256"].items()},
    }


def _calibration(recipe: ExportRecipe, seen: dict[str, Any] | None) -> dict[str, Any] | None:
    """The texts that the model was calibrated on; None where it was on none."""
    if seen is None:
        return None
    texts = shares(recipe.calib, recipe.calib_samples)
    found = {**recipe.recorded_calibration(), "text": texts[0].name, **seen}
    if len(texts) > 1:
        found["text"] = ", ".join(f"{share.name} ({share.samples})" for share in texts)
        found["sources"] = [{"text": share.name, "weight": share.weight, "samples": share.samples} for share in texts]
    return found


def _calibration_files(prepared: PreparedExport) -> list[Path]:
    if not prepared.is_calibrated:
        return []
    texts = shares(prepared.recipe.calib, prepared.recipe.calib_samples)
    return [path for share in texts if (path := file_of(share.text)) is not None]


def _layers(plan: ExportPlan) -> list[dict[str, Any]]:
    """The merged :class:`~modelexport.layers.LayerConfig` of every layer, as JSON: it follows from the plan."""
    from modelexport.layers import LayerConfig, ModuleConfig, TensorShard, to_json

    layers: dict[str, LayerConfig] = {}
    for step in plan.steps:
        layer = layers.setdefault(step.layer, LayerConfig(step.layer, step.index))
        for task in step.tasks:
            if task.path not in layer.modules:
                number_format, shape = task.number_format, task.info.shape
                layer.modules[task.path] = ModuleConfig(
                    kind=task.module.kind,
                    role=task.module.role,
                    partition=task.module.partition,
                    global_shape=shape,
                    local_shape=shape,
                    number_format="none" if number_format is None else number_format.name,
                    group_size=None if number_format is None else number_format.group_size,
                )
            tensors = layer.modules[task.path].tensors
            for out in task.outputs:
                tensors[out.name] = TensorShard(out.dtype, out.shape, (0,) * len(out.shape), out.shape)
    return [to_json(layer) for layer in layers.values()]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def target_of_export(prepared: PreparedExport) -> TargetDirectory:
    """The target of an export, not yet begun."""
    recipe = prepared.recipe
    assert recipe.out is not None
    before = read_record(prepared.checkpoint.directory) if recipe.quant == KEEP else None

    def record(side: SideFiles, beside: Mapping[str, Path], outcome: dict[str, Any]) -> dict[str, Any]:
        with without_collector():
            made = make_record(prepared.plan, recipe, prepared.source.label, side, beside, outcome)
        facts = {"model": _model_facts(prepared), "warnings": list(prepared.warnings)}
        told = [*prepared.rounded_before, *_exact(outcome["checks"])]
        if prepared.assignment is not None:
            facts |= {"assignment": prepared.assignment}
        if told:
            facts |= {"notes": [*made["notes"], *_exact(outcome["checks"])], "rounded_before": told}
        return {**made, **facts, **_adapter_facts(prepared), **_inherited(before, made)}

    announced = quantization_files(prepared.plan)
    beside = {} if announced is None else announced.files
    stale, renamed = cards(prepared.checkpoint.directory)
    files = TargetDirectorySpec(
        source=prepared.checkpoint,
        target=replace(prepared.target, side_files={**prepared.target.side_files, **beside}),
        fingerprint=_fingerprint(prepared),
        inputs=inputs_of(prepared.checkpoint, recipe.config, _calibration_files(prepared)),
        config=source_config(
            prepared.checkpoint, recipe.config, None if announced is None else announced.config, replaced=True
        ),
        record=record,
        # With adapter_config.json beside a model, transformers would look for the adapter and add it again.
        stale=stale | {CONFIG} | {name for method in methods().values() for name in method.SIDE_FILES},
        card=model_card,
        renamed=renamed,
    )
    return TargetDirectory(recipe.out, files, overwrite=recipe.overwrite, quiet=recipe.quiet)


def _exact(checks: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Says how many linears that are quantised in the source have kept their values, as they were read back."""
    exact = [check["exact"] for check in checks if "exact" in check]
    if any(exact):
        yield f"exact: {sum(exact)} of {len(exact)} linears that are quantised in the source have the same values"


def _model_facts(prepared: PreparedExport) -> dict[str, Any]:
    """The facts of the model beside its numbers: its type, its origin and its licence."""
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


def _adapter_facts(prepared: PreparedExport) -> dict[str, Any]:
    """The adapters that were merged, and the SHA-256 of their files; nothing where there are none."""
    found = [{**adapter.facts(), "sha256": file_sha256(adapter.file)} for adapter in prepared.adapters]
    return {"adapters": found} if found else {}


def _inherited(before: ExportRecord | None, made: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of the source's record that hold for re-encoded numbers: their rounding, and what was merged, folded or
    rotated."""
    if before is None:
        return {}
    keys = ("adapters", "assignment", "calibration", "changed", "output_error")
    algorithm = before.recipe.get("algorithm", made["recipe"]["algorithm"])
    kept = {key: before.content[key] for key in keys if before.content.get(key) is not None}
    return {"recipe": {**made["recipe"], "algorithm": algorithm}, **kept}


def _fingerprint(prepared: PreparedExport) -> dict[str, Any]:
    """The facts that must be equal for an interrupted export to be resumed: the source's files and the settings."""
    recipe = prepared.recipe
    texts = _calibration_files(prepared)
    return {
        "model": str(prepared.source.directory) if prepared.source.fetcher is None else prepared.source.label,
        "source_files": files_digest(prepared.checkpoint.config, prepared.checkpoint.files),
        **{key: value for key, value in recipe.deciding().items() if prepared.is_calibrated or not is_calibration(key)},
        "calibration_files": files_digest(None, [path for text in texts for path in (text, *image_files(text))]),
        "adapters": [adapter.facts() for adapter in prepared.adapters],
        "modelexport": __version__,
    }
