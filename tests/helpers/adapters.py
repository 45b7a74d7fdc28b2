"""Tiny LoRA adapters as PEFT saves them, and the weights that merging them gives, by PEFT's documented arithmetic."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

PREFIX = "base_model.model."


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Multiples of 1/64 of at most 1/8: sums of their products are exact in float32, in any order."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)) / 64


def lora(shapes: Mapping[str, tuple[int, ...]], rank: int = 4, seed: int = 1) -> dict[str, Tensor]:
    """A and B of modules by the shapes of their weights, as an adapter's file has them."""
    tensors = {}
    for number, (name, (rows, cols)) in enumerate(shapes.items()):
        tensors[f"{PREFIX}{name}.lora_A.weight"] = numbers(rank, cols, seed=seed + 2 * number)
        tensors[f"{PREFIX}{name}.lora_B.weight"] = numbers(rows, rank, seed=seed + 2 * number + 1)
    return tensors


def save_adapter(directory: Path, tensors: Mapping[str, Tensor], **config: Any) -> Path:
    """Save an adapter of rank 4 and alpha 8, unless ``config`` says otherwise."""
    directory.mkdir(parents=True)
    save_file(dict(tensors), directory / "adapter_model.safetensors")
    own = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "base_model_name_or_path": "me/base", **config}
    (directory / "adapter_config.json").write_text(json.dumps(own))
    return directory


def difference(tensors: Mapping[str, Tensor], name: str, *, alpha: float = 8, root: bool = False) -> Tensor:
    """``scaling * B @ A`` of a module, in float32."""
    a, b = (tensors[f"{PREFIX}{name}.lora_{part}.weight"].float() for part in "AB")
    return b @ a * (alpha / (math.sqrt(a.shape[0]) if root else a.shape[0]))


def merged(model: Path, out: Path, changed: Mapping[str, Tensor]) -> Path:
    """A copy of a checkpoint in one file, with some of its tensors in place of the model's; the dtypes stay."""
    out.mkdir(parents=True)
    for path in model.iterdir():
        if path.suffix == ".json":
            (out / path.name).write_bytes(path.read_bytes())
    tensors = load_file(model / "model.safetensors")
    tensors |= {name: value.to(tensors[name].dtype) for name, value in changed.items()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out
