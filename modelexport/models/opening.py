"""Open a checkpoint of any format that there is, as one: tensors by their Hugging Face names, nothing read yet."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from modelexport.checkpoints.safetensors.file import Checkpoint, Reader, open_checkpoint
from modelexport.checkpoints.source import directory_of
from modelexport.errors import CheckpointError, ModelExportError
from modelexport.models.architecture import Family, declared_family, family_of
from modelexport.models.checkpoint_formats import recognised
from modelexport.models.rules import expected_rules
from modelexport.quantization.methods import QUANTIZATION_KEYS, methods
from modelexport.system.small_files import LARGEST_CONFIG, has_file, read_json

_INTEGERS = ("BOOL", "U8", "I8", "I16", "I32", "I64")
_UNPREFIXED = re.compile(r"(decoder\.)?\w+\.\d+\.")  # a list of layers that is part of nothing


def open_model(directory: str | os.PathLike[str], config: str | os.PathLike[str] | None = None) -> Checkpoint:
    """Open a checkpoint, whatever its format and parallelism.

    Args:
        directory: of the checkpoint, or a GGUF file that is alone in it.
        config: the model's config.json, or the directory that holds it, where the checkpoint's own lacks one; it
            wins where both have one.

    Raises:
        CheckpointError: no checkpoint that is known, one that is damaged or not whole, or one that needs a
            ``config`` and has none.
    """
    directory = directory_of(directory)
    given = None if config is None else read_config(config)
    if directory.is_dir():
        try:
            module = recognised(directory)
        except OSError as error:
            raise CheckpointError(f"{directory}: cannot be read: {error.strerror or error}") from error
        if module is not None:
            return _with_architecture(module.open(directory, given, expected_rules))
    found = open_checkpoint(directory)
    return _with_prefix(_with_side_config(found) if given is None else replace(found, config=given))


def _with_architecture(found: Checkpoint) -> Checkpoint:
    """Names the class of a model whose config.json was made of the values of its files: engines ask for it."""
    if found.config is None or found.config.get("architectures") or has_file(found.directory, "config.json"):
        return found
    with suppress(ModelExportError):  # whoever needs the family says what is wrong with it
        return replace(found, config={**found.config, "architectures": [family_of(found.config).architecture]})
    return found


def _with_prefix(found: Checkpoint) -> Checkpoint:
    """The tensors of an old checkpoint by the names that newer ones of its family have."""
    family = _family_of_old(found)
    if family is None or not family.old_prefix or any(name.startswith(family.old_prefix) for name in found.infos):
        return found
    own = {f"{module.path}." for module in family.after if module.kind == "head"}
    new = {name: name if name.startswith(tuple(own)) else family.old_prefix + name for name in found.infos}
    infos = {new[name]: replace(info, name=new[name]) for name, info in found.infos.items()}
    placements = {new[name]: place for name, place in found.placements.items()}
    return replace(found, infos=infos, placements=placements)


def _family_of_old(found: Checkpoint) -> Family | None:
    """The family, where names may lack its prefix; a derived one, which takes a while, only where they look like it."""
    config = found.config or {}
    declared = declared_family(config.get("model_type"))
    if declared is not None or not any(_UNPREFIXED.match(name) for name in found.infos):
        return declared
    with suppress(ModelExportError):  # whoever needs the family says what is wrong with it
        return family_of(config)
    return None


def _with_side_config(found: Checkpoint) -> Checkpoint:
    """Adds the quantization config of a part of the model, of a file beside config.json, or of the tensors, where
    config.json has none of its own."""
    if found.config is None or any(found.config.get(key) for key in QUANTIZATION_KEYS):
        return found
    for name, part in found.config.items():
        said = {key: part[key] for key in QUANTIZATION_KEYS if part.get(key)} if isinstance(part, dict) else {}
        if said:
            rest = {key: value for key, value in part.items() if key not in said}
            return replace(found, config={**found.config, name: rest, **said})
    for method in methods().values():
        for name in method.SIDE_FILES:
            if has_file(found.directory, name):
                said = {**read_json(found.directory / name, largest=LARGEST_CONFIG), "quant_method": method.METHOD}
                return replace(found, config={**found.config, "quantization_config": said})
        linears = _settings_in_tensors(found, *getattr(method, "SETTINGS", ("", ())))
        if linears:
            said = {"quant_method": method.METHOD, "linears": linears}
            return replace(found, config={**found.config, "quantization_config": said})
    return found


def _settings_in_tensors(found: Checkpoint, mark: str, names: Sequence[str]) -> dict[str, dict[str, int]]:
    """The numbers of these names beside each tensor that is called ``mark``: module -> name -> number.

    Raises:
        CheckpointError: one is no whole number, or cannot be read.
    """
    modules = [name.removesuffix(f".{mark}") for name in found.infos if mark and name.endswith(f".{mark}")]
    if not modules:
        return {}
    linears: dict[str, dict[str, int]] = {}
    with Reader(found) as reader:
        for module in modules:
            infos = {name: found.infos[own] for name in names if (own := f"{module}.{name}") in found.infos}
            for info in infos.values():
                if info.dtype not in _INTEGERS or info.shape not in ((), (1,)):
                    raise CheckpointError(
                        f"{info.path}: {info.name} is {info.dtype} {list(info.shape)}; a setting is one whole number"
                    )
            linears[module] = {name: int(reader.read(info)) for name, info in infos.items()}
    return linears


def config_path(config: str | os.PathLike[str]) -> Path:
    """The file that ``--config`` names: itself, or config.json in it."""
    path = Path(os.path.expanduser(config))
    return path / "config.json" if path.is_dir() else path


def read_config(config: str | os.PathLike[str]) -> dict[str, Any]:
    """The content of the config.json that ``--config`` names.

    Raises:
        CheckpointError: it is not there, or is no JSON object.
    """
    path = config_path(config)
    if not path.exists():
        raise CheckpointError(f"--config {os.fspath(config)}: {path} does not exist; give the model's config.json")
    return read_json(path, largest=LARGEST_CONFIG)
