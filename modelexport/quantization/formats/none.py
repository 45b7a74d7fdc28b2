"""none: the weight as it is, in its own dtype."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

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
        return (TensorSpec("weight", dtype, tuple(shape), (1,) * len(shape)),)

    def _fill(self, weight: Tensor, amax: Tensor | None, out: Mapping[str, Tensor]) -> int:
        return kernels.copy_finite(weight, out["weight"])

    def _parts(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        return tensors["weight"], None

    def config_group(self) -> None:
        return None


FORMAT = NoneFormat
