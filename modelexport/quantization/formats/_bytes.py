"""Base of the formats that store a weight in bytes: int8 or float8_e4m3fn ``weight`` and its ``weight_scale``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from modelexport.quantization import kernels
from modelexport.quantization.formats import _activations
from modelexport.quantization.formats.base import Grid, NumberFormat, ScaleGranularity
from modelexport.quantization.kernels import searching
from modelexport.quantization.kernels.scales import TRIED


@dataclass(frozen=True)
class ByteFormat(NumberFormat):
    """``weight`` is ``[out, in]``; subclasses give the shape of ``weight_scale``, amax / limit.

    Attributes:
        storage: dtype of the stored weight: int8, of -128..127, or float8_e4m3fn.
    """

    weight_bits: ClassVar[int] = 8
    storage: ClassVar[torch.dtype]

    @property
    def limit(self) -> float:
        """The magnitude in ``storage`` onto which the largest of a weight is laid: 127 or 448."""
        return _activations.LIMITS[self.storage]

    def stored_shape(self, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
        rows, cols = tensors["weight"].shape
        return (rows, cols)

    def _steps(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The scales of each row, ``[rows, n]``."""
        return tensors["weight_scale"]

    def _columns(self, cols: int) -> int:
        """Columns that share a scale."""
        return max(1, cols)

    def grid(self, tensors: Mapping[str, Tensor]) -> Grid:
        """See the base."""
        low, high = (-128.0, 127.0) if self.storage == torch.int8 else (-self.limit, self.limit)
        columns = self._columns(tensors["weight"].shape[1])
        return Grid(self._steps(tensors).float(), None, columns, self.storage, low, high)

    def _put(self, numbers: Tensor, rows: slice, tensors: Mapping[str, Tensor]) -> None:
        tensors["weight"][rows] = numbers.to(self.storage)

    def _arguments(self) -> dict[str, Any]:
        kind = "int" if self.storage == torch.int8 else "float"
        return {"num_bits": 8, "type": kind, "symmetric": True, "group_size": None}


@dataclass(frozen=True)
class RowScaledFormat(ByteFormat):
    """One scale per output channel, ``weight_scale`` ``[out, 1]``; inputs are rounded per token, at run time."""

    @property
    def scale_granularity(self) -> ScaleGranularity:
        return "row"

    def _fill(self, weight: Tensor, amax: Tensor | None, out: Mapping[str, Tensor]) -> int:
        scale = out["weight_scale"]
        if self.observer == "mse" and weight.numel():
            given = None if amax is None else amax.unsqueeze(1)
            cols = weight.shape[1]
            amax = searching.search(weight, cols, self.storage, scale.dtype, self.limit, amax=given).squeeze(1)
        return kernels.quantise_rows(weight, amax, out["weight"], scale, self.limit)

    @property
    def choices(self) -> int:
        """See the base."""
        return TRIED

    def _fill_chosen(self, weight: Tensor, amax: Tensor | None, choice: Tensor, out: Mapping[str, Tensor]) -> int:
        own = None if amax is None else amax.unsqueeze(1)
        chosen = searching.chosen(weight, max(1, weight.shape[1]), choice, self.weight_bits, amax=own).squeeze(1)
        return kernels.quantise_rows(weight, chosen, out["weight"], out["weight_scale"], self.limit)

    def _dequantise(self, tensors: Mapping[str, Tensor], out: Tensor) -> None:
        kernels.dequantise(tensors["weight"], tensors["weight_scale"], out)

    def _squared_error(self, weight: Tensor, tensors: Mapping[str, Tensor], out: Tensor) -> None:
        kernels.squared_error(weight, tensors["weight"], tensors["weight_scale"], out)

    def weight_arguments(self) -> dict[str, Any]:
        return {**self._arguments(), "strategy": "channel", "dynamic": False}

    def input_arguments(self) -> dict[str, Any] | None:
        return {**self._arguments(), "strategy": "token", "dynamic": True}

    def fake_quantise_activations(self, x: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        return _activations.dynamic(x, self.storage)
