"""w4a8: int4 weights in groups, activations rounded to e4m3 per token at run time.

compressed-tensors "pack-quantized" (the W4AFP8 preset; vLLM reads it on Hopper GPUs).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from modelexport.quantization.formats import _activations
from modelexport.quantization.formats._packed import PackedFormat


@dataclass(frozen=True)
class W4A8Format(PackedFormat):
    """The weights of int4 in groups of 128, the only ones that vLLM's kernels take."""

    name: ClassVar[str] = "w4a8"
    description: ClassVar[str] = "W4A8: int4 weights, a scale per group; e4m3 activations, dynamic per token"
    weight_bits: ClassVar[int] = 4
    limit: ClassVar[float] = 7.5
    group_sizes: ClassVar[tuple[int, ...]] = (128,)

    def input_arguments(self) -> dict[str, Any] | None:
        return {
            "num_bits": 8,
            "type": "float",
            "symmetric": True,
            "strategy": "token",
            "group_size": None,
            "dynamic": True,
        }

    def fake_quantise_activations(self, x: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        return _activations.dynamic(x, torch.float8_e4m3fn)


FORMAT = W4A8Format
