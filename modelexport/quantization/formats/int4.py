"""int4: W4A16, symmetric groups along the input, eight values packed into an int32.

compressed-tensors "pack-quantized" (the W4A16 preset; read by vLLM, SGLang, transformers).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from modelexport.quantization import kernels
from modelexport.quantization.formats.base import NumberFormat, TensorSpec, refuse_indivisible

_PER_WORD = 8


@dataclass(frozen=True)
class Int4Format(NumberFormat):
    """``weight_packed`` int32 ``[out, in / 8]``, ``weight_scale`` ``[out, in / group]``, ``weight_shape``.

    A value is w / scale rounded half to even, -8..7, stored + 8, the first of eight in the lowest bits.
    ``weight_shape`` is int64 ``[2]``, the whole weight's shape.

    The scale is amax / 7.5, the middle between the ranges of the two signs (compressed-tensors' own observers
    compute the same). Measured on the demo model's linears with bf16 scales, amax / 7 against amax / 7.5: in
    groups of 128 a relative mean squared error of 0.01399 against 0.01247 (SQNR 18.54 against 19.04 dB), in
    groups of 64 19.31 against 19.71 dB, of 32 20.22 against 20.43 dB.
    """

    name: ClassVar[str] = "int4"
    description: ClassVar[str] = "W4A16: int4 weights, a scale per group of input channels; activations as they are"
    weight_bits: ClassVar[int] = 4
    checkpoint_format: ClassVar[str] = "pack-quantized"
    group_sizes: ClassVar[tuple[int, ...]] = (32, 64, 128)
    default_group_size: ClassVar[int | None] = 128
    limit: ClassVar[float] = 7.5

    group_size: int = 128

    @property
    def alignment(self) -> tuple[int, int]:
        return (1, math.lcm(self.group_size, _PER_WORD))

    def check_shape(self, module: str, shape: Sequence[int]) -> None:
        super().check_shape(module, shape)
        refuse_indivisible(self, module, shape[1])

    def specs(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[TensorSpec, ...]:
        rows, cols = shape
        return (
            TensorSpec("weight_packed", torch.int32, (rows, cols // _PER_WORD), (1, _PER_WORD)),
            TensorSpec("weight_scale", dtype, (rows, cols // self.group_size), (1, self.group_size)),
            TensorSpec("weight_shape", torch.int64, (2,), (None,)),
        )

    def _fill(self, weight: Tensor, amax: Tensor | None, out: Mapping[str, Tensor]) -> int:
        return kernels.quantise_groups(weight, self.group_size, out["weight_packed"], out["weight_scale"], self.limit)

    def _fill_constants(self, global_shape: tuple[int, ...], out: Mapping[str, Tensor]) -> None:
        out["weight_shape"].copy_(torch.tensor(global_shape, dtype=torch.int64))

    def _parts(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        return tensors["weight_packed"], tensors["weight_scale"]

    def _stored_shape(self, q: Tensor) -> tuple[int, int]:
        return (q.shape[0], q.shape[1] * _PER_WORD)

    def config_group(self) -> dict[str, Any]:
        return {
            "targets": ["Linear"],
            "format": self.checkpoint_format,
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": self.group_size,
                "dynamic": False,
            },
            "input_activations": None,
            "output_activations": None,
        }


FORMAT = Int4Format
