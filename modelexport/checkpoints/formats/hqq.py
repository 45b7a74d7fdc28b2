"""``hqq``: Hugging Face's names in HQQ's own pickle, ``qmodel.pt``: a dict of the state dicts of modules.

What HQQ's ``save_quantized`` writes, beside a config.json that says nothing of it. It is read, and not written: the
pickle is parsed without being run. Numbers, scales and zero points are those of HQQ's linears in safetensors; settings
are plain values here, in the state dict itself or, from before 0.2, in its ``meta``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from modelexport.checkpoints.safetensors.file import Checkpoint
from modelexport.checkpoints.torch_archive.state_dict import read_module_states
from modelexport.sharding.rules import TensorRule
from modelexport.system.small_files import LARGEST_CONFIG, has_file, read_json

READS = "hqq"
DESCRIPTION = "HQQ's own pickle: qmodel.pt"
SIDE_FILES: tuple[str, ...] = ()

_WEIGHTS = "qmodel.pt"
_NUMBERS, _META = ".W_q", ".meta."


def recognises(directory: Path) -> bool:
    """Returns whether there is such a file, and no safetensors but those of an adapter."""
    names = os.listdir(directory)
    weights = [name for name in names if name.endswith(".safetensors") and not name.startswith("adapter_model")]
    return not weights and _WEIGHTS in names


def open(directory: Path, config: dict[str, Any] | None, rules: Callable[..., list[TensorRule]]) -> Checkpoint:
    """Find the tensors of a checkpoint; their elements are not read.

    Raises:
        CheckpointError: the file is damaged, or holds something else than state dicts by the names of modules.
    """
    if config is None and has_file(directory, "config.json"):
        config = read_json(directory / "config.json", largest=LARGEST_CONFIG)
    (infos, placements), settings = read_module_states(directory / _WEIGHTS)
    modules = {name.removesuffix(_NUMBERS) for name in infos if name.endswith(_NUMBERS)}
    new = {name: _without_meta(name, modules) for name in infos}
    infos = {new[name]: replace(info, name=new[name]) for name, info in infos.items()}
    placements = {new[name]: place for name, place in placements.items()}
    linears = {module: _numbers(settings.get(module, {})) for module in sorted(modules)}
    if config is not None and linears:
        config = {**config, "quantization_config": {"quant_method": "hqq", "linears": linears}}
    note = f"the weights are read from 1 pickled file ({_WEIGHTS}), parsed without running anything in it"
    return Checkpoint(directory, infos, config, {}, placements, READS, notes=(note,))


def _without_meta(name: str, modules: Collection[str]) -> str:
    """The name of a linear's tensor as newer versions have it: not in ``meta``."""
    module, found, suffix = name.partition(_META)
    return f"{module}.{suffix}" if found and module in modules else name


def _numbers(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a linear's settings that are numbers, or nothing."""
    found = {name.removeprefix(_META[1:]): value for name, value in settings.items()}
    return {name: value for name, value in found.items() if value is None or isinstance(value, (int, float))}
