"""Small safetensors files and exports that the tests of this directory start from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from modelexport.checkpoints.safetensors.file import Layout, Writer, dtype_name, plan_layout
from modelexport.checkpoints.staging import Staging

RECIPE: dict[str, Any] = {"quant": "fp8", "model": {"sha256": "ab", "layers": 4}, "shards": [1, 2]}
TWO = {"a": torch.arange(6, dtype=torch.float32).reshape(2, 3), "b": torch.arange(4, dtype=torch.int64)}


def save(directory: Path, tensors: dict[str, torch.Tensor], **options: int) -> Layout:
    layout = plan_layout([(n, dtype_name(t.dtype), tuple(t.shape)) for n, t in tensors.items()], **options)
    layout.create(directory)
    with Writer(layout, directory) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    if len(layout.files) > 1:
        (directory / "model.safetensors.index.json").write_text(layout.index_json())
    return layout


def fill(stage: Staging, text: str = "new") -> None:
    (stage.directory / "config.json").write_text(text)
    (stage.directory / "deeper").mkdir(exist_ok=True)
    (stage.directory / "deeper" / "notes.txt").write_text(text)


def export(out: Path, text: str = "new", recipe: dict[str, Any] = RECIPE, *, overwrite: bool = False) -> None:
    with Staging.open(out, recipe, overwrite=overwrite) as stage:
        fill(stage, text)
        stage.publish()


def interrupt(out: Path, *steps: str, recipe: dict[str, Any] = RECIPE) -> None:
    """Leave what a killed export leaves."""
    with Staging.open(out, recipe) as stage:
        (stage.directory / "config.json").write_text("half")
        for step in steps:
            stage.record(step, {"bytes": len(step)})


def listing(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))
