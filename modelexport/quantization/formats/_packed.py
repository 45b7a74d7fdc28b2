"""Base of the formats that pack integers of 4 or 8 bits into int32 words: compressed-tensors "pack-quantized"."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from modelexport.errors import ValuesError
from modelexport.quantization import kernels
from modelexport.quantization.formats._checks import describe_non_finite
from modelexport.quantization.formats.base import Grid, NumberFormat, ScaleGranularity
from modelexport.quantization.kernels import reference, searching
from modelexport.quantization.kernels.scales import TRIED


@dataclass(frozen=True)
class PackedFormat(NumberFormat):
    """Integers of 4 or 8 bits in int32 words.

    ``weight_packed`` is int32 ``[out, ceil(in * bits / 32)]``, ``weight_scale`` ``[out, in / group]``.

    A value is w / scale rounded half to even, -2^(bits - 1) .. 2^(bits - 1) - 1, stored plus 2^(bits - 1), the first of
    a word in its lowest bits; what is left of a row's last word is 0. ``weight_shape`` is int64 ``[2]``, the whole
    weight's shape. With group size -1 there is one scale for each row (``[out, 1]``), of any number of columns.

    With zero points (``symmetric`` False) it is w / scale + zero that is rounded, and ``weight_zero_point`` is int32
    ``[ceil(out * bits / 32), in / group]``: the same integers, packed along the rows. See
    :func:`~modelexport.quantization.kernels.scales.affine_of`.
    """

    checkpoint_format: ClassVar[str] = "pack-quantized"
    group_sizes: ClassVar[tuple[int, ...]] = (32, 64, 128, -1)
    default_group_size: ClassVar[int | None] = 128
    limit: ClassVar[float]
    symmetric: ClassVar[bool] = True

    @property
    def kernels(self) -> tuple[str, ...]:
        """See the base."""
        return super().kernels if self.symmetric else ("compiled_affine", *super().kernels)

    @property
    def scale_granularity(self) -> ScaleGranularity:
        return "row" if self.group_size == -1 else "block"

    @property
    def whole_rows(self) -> bool:
        """Also where rows have zero points: what ranks exchange are largest magnitudes, not extremes."""
        return self.scale_granularity == "row" and (self.observer != "amax" or not self.symmetric)

    def amax(self, weight: Tensor) -> Tensor:
        """As the base has it; with zero points float32 ``[rows, 2]``, how far rows go below and above zero."""
        if self.symmetric or self.scale_granularity == "block":
            return super().amax(weight)
        self._check_weight(weight, "weight")
        return kernels.row_extremes(weight)

    def _check_amax(self, amax: Tensor, rows: int, name: str) -> None:
        if self.symmetric or self.scale_granularity == "block":
            super()._check_amax(amax, rows, name)
        elif tuple(amax.shape) != (rows, 2) or amax.dtype != torch.float32:
            raise ValueError(f"{name}: amax is {amax.dtype} {tuple(amax.shape)}, not torch.float32 {(rows, 2)}")

    def _fill(self, weight: Tensor, amax: Tensor | None, out: Mapping[str, Tensor]) -> int:
        given = None if amax is None else amax.unsqueeze(1)
        if self.observer == "mse" and weight.numel():
            given = searching.search(
                weight,
                self._group(weight.shape[1]),
                torch.int8,
                out["weight_scale"].dtype,
                self.limit,
                bits=self.weight_bits,
                affine=not self.symmetric,
                amax=given,
            )
        return self._rounded(weight, given, out)

    def nearest(
        self, weight: Tensor, *, amax: Tensor | None = None, inputs: float | None = None, name: str = "weight"
    ) -> Tensor:
        """As the base has it; on the CPU nothing is packed for it."""
        if self.observer != "amax" or amax is not None or not _on_cpu(weight):
            return super().nearest(weight, amax=amax, inputs=inputs, name=name)
        self._check_weight(weight, name)
        self.check_shape(name, weight.shape)
        out = torch.empty(weight.shape, dtype=torch.float32)
        dtype, group, bits = self.scale_dtype or weight.dtype, self._group(weight.shape[1]), self.weight_bits
        bad = kernels.nearest_groups(weight, group, out, dtype, self.limit, bits=bits, affine=not self.symmetric)
        if bad >= 0:
            raise ValuesError(describe_non_finite(weight, None, bad, name))
        return out

    @property
    def choices(self) -> int:
        """See the base."""
        return TRIED

    def choose(self, values: Tensor, products: Tensor) -> Tensor | None:
        """See the base; on the CPU. Elsewhere a product for each scale is quicker."""
        if not _on_cpu(values):
            return None
        dtype, bits = self.scale_dtype or values.dtype, self.weight_bits
        return searching.choose(values, products, dtype, self.limit, bits, affine=not self.symmetric)

    def _fill_chosen(self, weight: Tensor, amax: Tensor | None, choice: Tensor, out: Mapping[str, Tensor]) -> int:
        own = None if amax is None else amax.unsqueeze(1)
        group = self._group(weight.shape[1])
        chosen = searching.chosen(weight, group, choice, self.weight_bits, affine=not self.symmetric, amax=own)
        return self._rounded(weight, chosen, out)

    def _rounded(self, weight: Tensor, given: Tensor | None, out: Mapping[str, Tensor]) -> int:
        """Rounds with scales that follow from these largest magnitudes; None: the groups' own."""
        q, scale, bits = out["weight_packed"], out["weight_scale"], self.weight_bits
        group = self._group(weight.shape[1])
        if self.symmetric:
            return kernels.quantise_groups(weight, group, q, scale, self.limit, bits=bits, amax=given)
        zero = torch.empty(scale.shape, dtype=torch.int8, device=scale.device)
        bad = kernels.quantise_groups(weight, group, q, scale, self.limit, bits=bits, zero=zero, amax=given)
        if bad < 0:
            out["weight_zero_point"].copy_(reference.pack(zero.t(), bits).t())
        return bad

    def _group(self, cols: int) -> int:
        """Columns that share a scale."""
        assert self.group_size is not None
        return max(1, cols) if self.group_size == -1 else self.group_size

    def _zero(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        if self.symmetric:
            return None
        packed, rows = tensors["weight_zero_point"], tensors["weight_packed"].shape[0]
        return reference.unpack(packed.t(), self.weight_bits, rows).t().to(torch.int8).contiguous()

    def grid(self, tensors: Mapping[str, Tensor]) -> Grid:
        """See the base."""
        zero, half = self._zero(tensors), 2.0 ** (self.weight_bits - 1)
        columns = self._group(self.stored_shape(tensors)[1])
        shift = None if zero is None else zero.float()
        return Grid(tensors["weight_scale"].float(), shift, columns, torch.int8, -half, half - 1)

    def _put(self, numbers: Tensor, rows: slice, tensors: Mapping[str, Tensor]) -> None:
        tensors["weight_packed"][rows] = reference.pack(numbers, self.weight_bits)

    def _dequantise(self, tensors: Mapping[str, Tensor], out: Tensor) -> None:
        stored, group = (tensors["weight_packed"], tensors["weight_scale"]), self._group(out.shape[1])
        kernels.dequantise(*stored, out, group=group, bits=self.weight_bits, zero=self._zero(tensors))

    def _squared_error(self, weight: Tensor, tensors: Mapping[str, Tensor], out: Tensor) -> None:
        stored, group = (tensors["weight_packed"], tensors["weight_scale"]), self._group(weight.shape[1])
        kernels.squared_error(weight, *stored, out, group=group, bits=self.weight_bits, zero=self._zero(tensors))

    def squared_error(self, weight: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """As the base has it; how many columns of a last word count is taken from ``weight``."""
        if weight.dim() == 2 and self._words(weight.shape[1]) == tensors["weight_packed"].shape[1]:
            tensors = {**tensors, "weight_shape": torch.tensor(weight.shape)}
        return super().squared_error(weight, tensors)

    def stored_shape(self, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
        """The shape that is stored where all columns are, else as many columns as the words hold."""
        rows, words = tensors["weight_packed"].shape
        cols = int(tensors["weight_shape"][1])
        return (rows, cols if self._words(cols) == words else words * 32 // self.weight_bits)

    def _words(self, cols: int) -> int:
        return -(-cols * self.weight_bits // 32)

    def weight_arguments(self) -> dict[str, Any]:
        whole = self.group_size == -1
        return {
            "num_bits": self.weight_bits,
            "type": "int",
            "symmetric": self.symmetric,
            "strategy": "channel" if whole else "group",
            "group_size": None if whole else self.group_size,
            "dynamic": False,
        }


def _on_cpu(tensor: Tensor) -> bool:
    """True where the CPU's own kernels take a tensor, and not Triton's interpreter."""
    return tensor.numel() > 0 and tensor.device.type == "cpu" and kernels.backend().name != "triton"
