"""``pytorch``: Hugging Face's names in pickled state dicts, ``pytorch_model.bin`` or its parts and their index.

What models were published as before safetensors. It is read, and not written: the pickles are parsed without being run,
and where safetensors lie beside them, these are read instead.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from modelexport.checkpoints.safetensors.file import Checkpoint, TensorInfo
from modelexport.checkpoints.safetensors.placement import Placement
from modelexport.checkpoints.safetensors.reader import check_parts, read_index
from modelexport.checkpoints.torch_archive.state_dict import read_state_dict
from modelexport.errors import CheckpointError, quoted
from modelexport.sharding.rules import TensorRule
from modelexport.system.small_files import LARGEST_CONFIG, has_file, read_json

READS = "pytorch"
DESCRIPTION = "state dicts that torch.save wrote: pytorch_model.bin"
SIDE_FILES = ("pytorch_model.bin.index.json",)

_INDEX = "pytorch_model.bin.index.json"
_WEIGHTS = re.compile(r"pytorch_model(-\d+-of-\d+)?\.bin")


def recognises(directory: Path) -> bool:
    """Returns whether there are such files, and no safetensors but those of an adapter."""
    names = os.listdir(directory)
    weights = [name for name in names if name.endswith(".safetensors") and not name.startswith("adapter_model")]
    return not weights and (_INDEX in names or any(map(_WEIGHTS.fullmatch, names)))


def open(directory: Path, config: dict[str, Any] | None, rules: Callable[..., list[TensorRule]]) -> Checkpoint:
    """Find the tensors of a checkpoint; their elements are not read.

    Raises:
        CheckpointError: a part is missing or damaged, holds something else than plain tensors, or is not what the
            index says.
    """
    if config is None and has_file(directory, "config.json"):
        config = read_json(directory / "config.json", largest=LARGEST_CONFIG)
    weight_map = read_index(directory / _INDEX) if has_file(directory, _INDEX) else None
    if weight_map is not None:
        names = sorted(set(weight_map.values()))
    elif has_file(directory, "pytorch_model.bin"):
        names = ["pytorch_model.bin"]
    else:
        names = sorted(name for name in os.listdir(directory) if _WEIGHTS.fullmatch(name))
        check_parts(directory, names)
    infos: dict[str, TensorInfo] = {}
    placements: dict[str, tuple[Placement, ...]] = {}
    for name in names:
        if not os.path.lexists(directory / name):
            raise CheckpointError(f"{directory / name}: missing; {_INDEX} keeps tensors in it")
        own, places = read_state_dict(directory / name)
        for tensor in own:
            if tensor in infos:
                raise CheckpointError(f"tensor {quoted(tensor)} is in two files: {infos[tensor].path.name} and {name}")
        infos |= own
        placements |= places
    for tensor, name in (weight_map or {}).items():
        if tensor not in infos or infos[tensor].path.name != name:
            raise CheckpointError(
                f"{directory / _INDEX}: tensor {quoted(tensor)} should be in {name}, and is not there"
            )
    files = f"{len(names)} pickled file{'s' if len(names) > 1 else ''}"
    note = f"the weights are read from {files} ({names[0]}), parsed without running anything in them"
    return Checkpoint(directory, infos, config, {}, placements, READS, notes=(note,))
