"""none: the weight as it is, in its own dtype."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from modelexport.quantization import kernels
from modelexport.quantization.formats.base import NumberFormat, TensorSpec


@dataclass(frozen=True)
class NoneFormat(NumberFormat):
    """Passes the weight through, byte for byte; NaN and Inf are refused as everywhere."""

    name: ClassVar[str] = "none"
    description: ClassVar[str] = "not quantised: the source's dtype, byte for byte"
    weight_bits: ClassVar[int] = 16
    checkpoint_format: ClassVar[str] = "dense"
    quantised: ClassVar[bool] = False

    def specs(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[TensorSpec, ...]:
        return (TensorSpec("weight", dtype, tuple(shape), tuple((d, 1) for d in range(len(shape)))),)

    def _fill(self, weight: Tensor, amax: Tensor | None, out: Mapping[str, Tensor]) -> int:
        return kernels.copy_finite(weight, out["weight"])

    def _dequantise(self, tensors: Mapping[str, Tensor], out: Tensor) -> None:
        out.copy_(tensors["weight"])

    def _squared_error(self, weight: Tensor, tensors: Mapping[str, Tensor], out: Tensor) -> None:
        kernels.squared_error(weight, tensors["weight"], None, out)

    def stored_shape(self, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
        rows, cols = tensors["weight"].shape
        return (rows, cols)

    def weight_arguments(self) -> dict[str, Any]:
        return {}

    def config_group(self) -> None:
        return None


FORMAT = NoneFormat
