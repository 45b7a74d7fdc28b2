"""Checks of a checkpoint against its modelexport.json, in everything but the tensors' bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from modelexport import __version__
from modelexport.checkpoints.formats.hf import RECORD
from modelexport.checkpoints.safetensors.file import Checkpoint
from modelexport.errors import UsageError, quoted, shown
from modelexport.inspection.record.reading import ExportRecord, RecordedModule
from modelexport.models.modules import StoredModule
from modelexport.quantization import algorithms
from modelexport.quantization.methods import QuantizationConfig
from modelexport.recipe import ExportRecipe, recorded_names
from modelexport.system.small_files import file_sha256

_KEYS = {
    *("record_version", "producer", "versions", "source", "recipe", "calibration", "model", "warnings", "evaluation"),
    *("changed", "output_error", "tensor_parallel_sizes", "notes", "unquantised", "left_out"),
    *("file_sha256", "layers", "sqnr_db", "sha256", "adapters", "assignment", "rounded_before"),
}
"""All that a record has: what an export, or a later evaluation, puts into it."""


def check_record(
    record: ExportRecord,
    checkpoint: Checkpoint,
    modules: Sequence[StoredModule],
    quantization: QuantizationConfig | None,
) -> list[str]:
    """Tensors missing or added, dtypes and shapes, side files, and the config groups of the recorded formats."""
    return [
        *_key_problems(record),
        *_name_problems(record.sha256, checkpoint),
        *_module_problems(record.modules, checkpoint, modules, quantization),
        *_file_problems(record, checkpoint),
    ]


def _key_problems(record: ExportRecord) -> Iterator[str]:
    """Keys that this version writes into no record; another version may have others."""
    if record.producer.get("version") != __version__:
        return
    named = str(record.recipe.get("algorithm")).split("+")
    if not set(named) <= set(algorithms.names()):  # a plugin's, with settings that are not known here
        return
    recipe = {field.name for field in fields(ExportRecipe)} | recorded_names(named).keys()
    added = [key for key in record.content if key not in _KEYS]
    added += [f"recipe.{key}" for key in record.recipe if key not in recipe]
    yield from (f"{RECORD} has the key {shown(key)}, which no export writes: it has been edited" for key in added)


def _name_problems(hashes: Mapping[str, Any], checkpoint: Checkpoint) -> Iterator[str]:
    found = checkpoint.infos
    yield from (f"{name} is missing, though it was exported" for name in hashes if name not in found)
    yield from (f"{name} was not exported: {RECORD} does not know it" for name in found if name not in hashes)


def _file_problems(record: ExportRecord, checkpoint: Checkpoint) -> Iterator[str]:
    for name, recorded in record.file_sha256.items():
        path = checkpoint.directory / name
        if not path.is_file():
            yield f"{name} is missing, though it was exported"
        elif file_sha256(path) != recorded:
            yield f"{name} is not the file that was exported: it has been edited or replaced"


def _module_problems(
    recorded: Sequence[RecordedModule],
    checkpoint: Checkpoint,
    modules: Sequence[StoredModule],
    quantization: QuantizationConfig | None,
) -> Iterator[str]:
    present = {module.name: module for module in modules}
    formats: dict[str | None, RecordedFormat | UsageError] = {}
    for module in recorded:
        for suffix, tensor in module.tensors.items():
            info = checkpoint.infos.get(f"{module.name}.{suffix}")
            if info is not None and (info.dtype, info.shape) != (tensor.dtype, tensor.shape):
                yield (
                    f"{info.name} is {info.dtype} {list(info.shape)}, {tensor.dtype} {list(tensor.shape)} was exported"
                )
        if module.name in present and module.kind in ("linear", "head", "embedding"):
            if module.label not in formats:
                try:
                    formats[module.label] = RecordedFormat.of(module)
                except UsageError as error:  # a plugin's that is not installed, or a damaged name: said once
                    formats[module.label] = error
                    yield f"{RECORD}: {module.name}: {error}"
            wanted = formats[module.label]
            if isinstance(wanted, RecordedFormat):
                yield from _scheme_problems(module.name, module.kind, wanted, quantization)


@dataclass(frozen=True)
class RecordedFormat:
    """A number format as the record has it; ``group`` is what compressed-tensors says of it, None if unquantised."""

    shown: str
    group: dict[str, Any] | None

    @classmethod
    def of(cls, module: RecordedModule) -> RecordedFormat:
        """The number format of a module.

        Raises:
            UsageError: there is none of that name, or not with groups of that size.
        """
        from modelexport.quantization import formats

        if module.number_format is None:
            return cls("none", None)
        shown = module.number_format + (f" in groups of {module.group_size}" if module.group_size else "")
        size = module.group_size if formats.has_groups(module.number_format) else None
        return cls(shown, formats.get(module.number_format, group_size=size).config_group())


def _scheme_problems(
    name: str, kind: str, recorded: RecordedFormat, quantization: QuantizationConfig | None
) -> Iterator[str]:
    """The config must say of a linear what it was exported as, or engines compute something else."""
    shown, group = recorded.shown, recorded.group
    scheme = quantization.scheme_of_kind(name, kind) if quantization is not None else None
    if scheme is None:
        if group is not None:
            yield f"{name} was exported as {shown}, but config.json does not quantise it"
        return
    if group is None:
        yield f"{name} was exported unquantised, but {scheme.name} of config.json quantises it"
        return
    said = {
        "format": scheme.format,
        "weights": scheme.weights,
        "input_activations": scheme.inputs,
        "output_activations": scheme.outputs,
    }
    if scheme.method != "compressed-tensors":  # other methods say less of it, and in words of their own
        from modelexport.quantization.formats import meaning

        said = {"weights": meaning(scheme.weights), "input_activations": meaning(scheme.inputs)}
        group = {key: meaning(group[key]) for key in said}
    for field, value in said.items():
        if value != group.get(field):
            yield (f"config.json: {scheme.name}.{field} is {_shown(value, group.get(field))}; {shown} was exported")


def _shown(value: Any, wanted: Any) -> str:
    """Both sides, of mappings only where they differ."""
    if isinstance(value, Mapping) and isinstance(wanted, Mapping):
        keys = [key for key in {**wanted, **value} if value.get(key) != wanted.get(key)]
        return ", ".join(f"{key} {value.get(key)!r} instead of {wanted.get(key)!r}" for key in keys)
    return f"{quoted(value)} instead of {quoted(wanted)}"
