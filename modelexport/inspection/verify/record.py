"""Checks of a checkpoint against its modelexport.json, in everything but the tensors' bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from modelexport import __version__
from modelexport.checkpoints.formats.hf import RECORD
from modelexport.checkpoints.safetensors.file import Checkpoint
from modelexport.errors import error_text, quoted, shown
from modelexport.models.modules import StoredModule
from modelexport.quantization import algorithms
from modelexport.quantization.methods import QuantizationConfig
from modelexport.recipe import ExportRecipe, recorded_names
from modelexport.system.small_files import file_sha256

_KEYS = {
    *("record_version", "producer", "versions", "source", "recipe", "calibration", "model", "warnings", "evaluation"),
    *("changed", "output_error", "tensor_parallel_sizes", "notes", "unquantised", "left_out"),
    *("file_sha256", "layers", "sqnr_db", "sha256"),
}
"""All that a record has: what an export, or a later evaluation, puts into it."""


def check_record(
    record: Mapping[str, Any],
    checkpoint: Checkpoint,
    modules: Sequence[StoredModule],
    quantization: QuantizationConfig | None,
) -> list[str]:
    """Tensors missing or added, dtypes and shapes, side files, and the config groups of the recorded formats."""
    problems = list(_key_problems(record))
    problems += _name_problems(record["sha256"], checkpoint)
    try:
        problems += _layer_problems(record["layers"], checkpoint, modules, quantization)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        problems.append(f"{RECORD}: its layers are damaged ({type(error).__name__}: {error_text(error)})")
    problems += _file_problems(record, checkpoint)
    return problems


def _key_problems(record: Mapping[str, Any]) -> Iterator[str]:
    """Keys that this version writes into no record; another version may have others."""
    if record["producer"].get("version") != __version__:
        return
    named = str(record["recipe"].get("algorithm")).split("+")
    if not set(named) <= set(algorithms.names()):  # a plugin's, with settings that are not known here
        return
    recipe = {field.name for field in fields(ExportRecipe)} | recorded_names(named).keys()
    added = [key for key in record if key not in _KEYS]
    added += [f"recipe.{key}" for key in record["recipe"] if key not in recipe]
    yield from (f"{RECORD} has the key {shown(key)}, which no export writes: it has been edited" for key in added)


def _name_problems(hashes: Mapping[str, Any], checkpoint: Checkpoint) -> Iterator[str]:
    found = checkpoint.infos
    yield from (f"{name} is missing, though it was exported" for name in hashes if name not in found)
    yield from (f"{name} was not exported: {RECORD} does not know it" for name in found if name not in hashes)


def _file_problems(record: Mapping[str, Any], checkpoint: Checkpoint) -> Iterator[str]:
    for name, recorded in (record.get("file_sha256") or {}).items():
        path = checkpoint.directory / name
        if not path.is_file():
            yield f"{name} is missing, though it was exported"
        elif file_sha256(path) != recorded:
            yield f"{name} is not the file that was exported: it has been edited or replaced"


def _layer_problems(
    layers: Sequence[Mapping[str, Any]],
    checkpoint: Checkpoint,
    modules: Sequence[StoredModule],
    quantization: QuantizationConfig | None,
) -> Iterator[str]:
    present = {module.name: module for module in modules}
    groups: dict[tuple[str, int | None], Recorded] = {}
    for layer in layers:
        for path, recorded in layer["modules"].items():
            name = ".".join(part for part in (layer["name"], path) if part)
            for suffix, tensor in recorded["tensors"].items():
                info = checkpoint.infos.get(f"{name}.{suffix}")
                if info is not None and (info.dtype, list(info.shape)) != (tensor["dtype"], list(tensor["shape"])):
                    yield (
                        f"{info.name} is {info.dtype} {list(info.shape)}, "
                        f"{tensor['dtype']} {tensor['shape']} was exported"
                    )
            if name in present and recorded["kind"] in ("linear", "head"):
                key = recorded["number_format"], recorded["group_size"]
                if key not in groups:
                    groups[key] = Recorded.of(*key)
                yield from _scheme_problems(name, groups[key], quantization)


@dataclass(frozen=True)
class Recorded:
    """A number format as the record has it; ``group`` is what compressed-tensors says of it."""

    spelled: str
    group: dict[str, Any] | None

    @classmethod
    def of(cls, number_format: str, group_size: int | None) -> Recorded:
        """By name and group size."""
        from modelexport.quantization import formats

        spelled = number_format + (f" in groups of {group_size}" if group_size else "")
        size = group_size if formats.has_groups(number_format) else None
        return cls(spelled, formats.get(number_format, group_size=size).config_group())


def _scheme_problems(name: str, recorded: Recorded, quantization: QuantizationConfig | None) -> Iterator[str]:
    """The config must say of a linear what it was exported as, or engines compute something else."""
    spelled, group = recorded.spelled, recorded.group
    scheme = quantization.scheme_of(name) if quantization is not None else None
    if scheme is None:
        if group is not None:
            yield f"{name} was exported as {spelled}, but config.json does not quantise it"
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
    if scheme.method != "compressed-tensors":  # other methods spell less of it, and in words of their own
        from modelexport.quantization.formats import meaning

        said = {"weights": meaning(scheme.weights), "input_activations": meaning(scheme.inputs)}
        group = {key: meaning(group[key]) for key in said}
    for field, value in said.items():
        if value != group.get(field):
            yield (f"config.json: {scheme.name}.{field} is {_shown(value, group.get(field))}; {spelled} was exported")


def _shown(value: Any, wanted: Any) -> str:
    """Both sides, of mappings only where they differ."""
    if isinstance(value, Mapping) and isinstance(wanted, Mapping):
        keys = [key for key in {**wanted, **value} if value.get(key) != wanted.get(key)]
        return ", ".join(f"{key} {value.get(key)!r} instead of {wanted.get(key)!r}" for key in keys)
    return f"{quoted(value)} instead of {quoted(wanted)}"
