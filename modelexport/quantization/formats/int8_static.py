"""int8-static: W8A8, symmetric, one scale per output channel, activations by one calibrated scale.

compressed-tensors "int-quantized" (W8A8 with static activations; read by vLLM, SGLang, transformers).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from modelexport.quantization.formats import _activations
from modelexport.quantization.formats._bytes import RowScaledFormat


@dataclass(frozen=True)
class Int8StaticFormat(RowScaledFormat):
    """The weights of int8; ``input_scale`` ``[1]``: the inputs' amax / 127."""

    name: ClassVar[str] = "int8-static"
    description: ClassVar[str] = "W8A8: int8 weights, a scale per channel; int8 activations, one calibrated scale"
    checkpoint_format: ClassVar[str] = "int-quantized"
    storage: ClassVar[torch.dtype] = torch.int8

    def input_arguments(self) -> dict[str, Any] | None:
        return {**self._arguments(), "strategy": "tensor", "dynamic": False}

    def input_scale(self, amax: float) -> float:
        return _activations.static_scale(amax, self.storage)

    def fake_quantise_activations(self, x: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        return _activations.static(x, tensors["input_scale"], self.storage)


FORMAT = Int8StaticFormat
