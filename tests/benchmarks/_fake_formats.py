"""Number formats that no engine reads: what calibrated algorithms are also compared by."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from modelexport.quantization import kernels
from modelexport.quantization.formats.base import Grid, NumberFormat, ScaleGranularity, TensorSpec
from modelexport.quantization.kernels.scales import scale_of

_TRIED, _STEP = 16, 0.04


@dataclass(frozen=True)
class Int3Format(NumberFormat):
    """Integers of -4..3 in groups, each in a byte of its own: ``weight`` int8 ``[out, in]``.

    ``weight_scale`` is ``[out, in / group]``, amax / 3.5; with observer "mse" that with the least squared error of 16,
    down to 0.4 of it.
    """

    name: ClassVar[str] = "int3"
    description: ClassVar[str] = "W3A16: int3 weights, a scale per group of input channels; for comparison only"
    weight_bits: ClassVar[int] = 3
    checkpoint_format: ClassVar[str] = "none"
    group_sizes: ClassVar[tuple[int, ...]] = (32, 64, 128, -1)
    default_group_size: ClassVar[int | None] = 128

    @property
    def scale_granularity(self) -> ScaleGranularity:
        return "row" if self.group_size == -1 else "block"

    @property
    def has_static_inputs(self) -> bool:
        return False

    def _group(self, cols: int) -> int:
        assert self.group_size is not None
        return max(1, cols) if self.group_size == -1 else self.group_size

    def specs(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[TensorSpec, ...]:
        group = self._group(shape[1])
        scale = TensorSpec(
            "weight_scale", self.scale_dtype or dtype, (shape[0], shape[1] // group), ((0, 1), (1, group))
        )
        return (TensorSpec("weight", torch.int8, (shape[0], shape[1]), ((0, 1), (1, 1))), scale)

    def weight_arguments(self) -> dict[str, Any]:
        return {"num_bits": 3, "type": "int", "symmetric": True, "strategy": "group", "group_size": self.group_size}

    def bits_per_weight(self, shape: Sequence[int], dtype: torch.dtype) -> float:
        """As if three bits were stored in three."""
        return super().bits_per_weight(shape, dtype) - 5.0 if math.prod(shape) else 0.0

    def _fill(self, weight: Tensor, amax: Tensor | None, out: Mapping[str, Tensor]) -> int:
        bad = (~torch.isfinite(weight).all(dim=1)).nonzero()
        if bad.numel():
            return int(bad[0, 0])
        scale, group = out["weight_scale"], self._group(weight.shape[1])
        wide = weight.float()
        largest = wide.unflatten(1, (-1, group)).abs().amax(dim=-1) if amax is None else amax.unsqueeze(1)
        least = torch.full(largest.shape, torch.inf)
        for number in range(_TRIED if self.observer == "mse" else 1):
            step = scale_of(largest * (1 - number * _STEP), 3.5, torch.int8, scale.dtype)
            found = Grid(step.float(), None, group, torch.int8, -4.0, 3.0).nearest(wide)
            error = (wide - found).square().unflatten(1, (-1, group)).sum(dim=-1)
            scale.copy_(torch.where(error < least, step, scale))
            least = torch.minimum(least, error)
        self.store(wide, out)
        return -1

    def grid(self, tensors: Mapping[str, Tensor]) -> Grid:
        columns = self._group(tensors["weight"].shape[1])
        return Grid(tensors["weight_scale"].float(), None, columns, torch.int8, -4.0, 3.0)

    def _put(self, numbers: Tensor, rows: slice, tensors: Mapping[str, Tensor]) -> None:
        tensors["weight"][rows] = numbers.to(torch.int8)

    def _dequantise(self, tensors: Mapping[str, Tensor], out: Tensor) -> None:
        group = self._group(out.shape[1])
        kernels.dequantise(tensors["weight"], tensors["weight_scale"], out, group=group, bits=8)

    def _squared_error(self, weight: Tensor, tensors: Mapping[str, Tensor], out: Tensor) -> None:
        group = self._group(weight.shape[1])
        kernels.squared_error(weight, tensors["weight"], tensors["weight_scale"], out, group=group, bits=8)

    def stored_shape(self, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
        rows, cols = tensors["weight"].shape
        return (rows, cols)
