"""What the ranks of test_sensitivity run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from _forward_ranks import opened

from modelexport.checkpoints.safetensors.file import open_checkpoint
from modelexport.quantization import formats
from modelexport.quantization.sensitivity import measure


def sensitivities(directory: str, groups: list[list[list[str]]], names: list[str]) -> list[Any]:
    """By both measures, as hexadecimal numbers: to the bit."""
    candidates = {name: formats.get(name) for name in names}
    infos = open_checkpoint(Path(directory)).infos
    linears = [name for layer in groups for group in layer for name in group]
    shapes = {name: (infos[f"{name}.weight"].shape[0], infos[f"{name}.weight"].shape[1]) for name in linears}
    found = []
    for by in ("output", "kl"):
        with opened(directory) as runner, runner:
            errors = measure(runner, groups, shapes, candidates, by=by).errors
        found.append({group: {name: value.hex() for name, value in table.items()} for group, table in errors.items()})
    return found
