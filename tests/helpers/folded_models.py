"""Checkpoints with scales folded into their weights, and what transformers computes with them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelexport.models.architecture import Family, read_dimensions
from modelexport.models.folds import apply_fold, folds_of_layer
from modelexport.quantization import formats
from modelexport.quantization.algorithms.base import CalibratedLinear
from tests.helpers.models import copy_checkpoint
from tests.helpers.tiny_models import model_class

__all__ = ["folded", "in_float32", "linears_of", "logits", "powers_of_two"]


def in_float32(source: Path, target: Path) -> Path:
    """A copy, so that powers of two are all that changes its numbers."""
    return copy_checkpoint(source, target, tensors=lambda found: {name: x.float() for name, x in found.items()})


def linears_of(
    family: Family, config: dict[str, Any], layer: int, tensors: dict[str, Tensor]
) -> dict[str, CalibratedLinear]:
    """All linears of a layer on one rank; routers are not quantised."""
    found = {}
    for path, _, module in family.modules_of_layer(read_dimensions(config, family), layer):
        name = f"{family.layer_prefix.format(i=layer)}.{path}"
        if module.kind in ("linear", "router"):
            weight = tensors[f"{name}.weight"]
            number_format = formats.get("int8") if module.kind == "linear" else None
            found[name] = CalibratedLinear(
                name, module.role, number_format, weight, (0, len(weight)), (len(weight), weight.shape[1]), None
            )
    return found


def folded(family: Family, config: dict[str, Any], scale_of: Callable[[int], Tensor]) -> Callable[[Any], Any]:
    """Changes a checkpoint's tensors by scales through every pair of every layer; counts them in ``folds``."""
    dims = read_dimensions(config, family)

    def change(tensors: dict[str, Tensor]) -> None:
        for layer in range(dims.layers):
            linears = linears_of(family, config, layer, tensors)
            for fold in folds_of_layer(family, dims, layer, linears, tensors, lambda name: tensors[name].dtype):
                apply_fold(tensors, {}, fold, scale_of(fold.fold.features))

    return change


def logits(directory: Path) -> Tensor:
    """float32 ``[1, 48, vocabulary]``, as transformers computes them."""
    kind = json.loads((directory / "config.json").read_text())["model_type"]
    model = model_class(kind).from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        out: Tensor = model(torch.arange(1, 49)[None]).logits
    return out


def powers_of_two(features: int) -> Tensor:
    return 2.0 ** torch.randint(-4, 5, (features,))
