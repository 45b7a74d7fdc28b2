"""Base of the number formats of llama.cpp: blocks of ggml, whose bytes are the native tensor.

What stands where in a block is :mod:`modelexport.quantization.ggml_layouts`'s; how scales, minima and codes are found,
:mod:`modelexport.quantization.kernels.ggml_reference`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from modelexport.errors import PlanError
from modelexport.quantization.formats.base import Grid, NumberFormat, TensorSpec
from modelexport.quantization.ggml_layouts import LAYOUTS, BlockLayout
from modelexport.quantization.kernels import ggml, ggml_reference

__all__ = ["BlockFormat", "IntegerBlockFormat"]

# What is tried first: levels beyond the ends, as many in the range as there are and some more or fewer.
_BEYOND, _OF_TABLE = (0.9, 0.3, -0.3, -0.9), (1.1, 1.0, 0.9, 0.8, 0.7)
_REFITS, _ROUNDS = 1, 3
_NO_STEP = 2.0**-100  # of a sub-block whose scale is 0: its codes say nothing


@dataclass(frozen=True)
class BlockFormat(NumberFormat):
    """``weight`` uint8 ``[out, in / block, bytes of a block]``: what a GGUF file holds, byte by byte.

    With observer "amax" a sub-block's scale lays its range onto the codes, or where it has no minimum its extreme
    weight onto the least level. With observer "mse" scales, minima and codes are fitted to each other by least squares,
    and again once the scales are as they are stored: of the weights, or where the products of the inputs are given, of
    the outputs.

    Attributes:
        block_type: ggml's name of it.
    """

    block_type: ClassVar[str]
    fits_products: ClassVar[bool] = True

    @property
    def layout(self) -> BlockLayout:
        """The layout of its blocks."""
        return LAYOUTS[self.block_type]

    @property
    def kernels(self) -> tuple[str, ...]:
        """See the base; they search for scales as well."""
        return ("ggml_fused",)

    def specs(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[TensorSpec, ...]:
        """See the base."""
        block = self.layout.block
        stored = (shape[0], shape[1] // block, self.layout.nbytes)
        return (TensorSpec("weight", torch.uint8, stored, ((0, 1), (1, block), None)),)

    def check_shape(self, module: str, shape: Sequence[int]) -> None:
        """See the base; blocks must divide a row.

        Raises:
            PlanError: with the width, the block and the formats that would do.
        """
        super().check_shape(module, shape)
        block = self.layout.block
        if shape[1] % block:
            small = [each.number_format for each in LAYOUTS.values() if each.block == 32]
            choices = f"choose one with blocks of 32 ({', '.join(small)})" if shape[1] % 32 == 0 else "keep it (none)"
            raise PlanError(
                f"{module}: in_features {shape[1]} is not divisible by {block}, the block of number format "
                f"{self.name}: {choices}"
            )

    def weight_arguments(self) -> dict[str, Any]:
        return self.layout.arguments()

    def stored_shape(self, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
        rows, blocks, _ = tensors["weight"].shape
        return (rows, blocks * self.layout.block)

    def blocks(self, columns: int) -> int:
        """See the base."""
        return columns // self.layout.sub

    def _fill(self, weight: Tensor, amax: Tensor | None, out: Mapping[str, Tensor]) -> int:
        return ggml.quantise(weight, None, out["weight"], self.layout, _search(self.block_type, self.observer))

    def _fill_fitted(self, weight: Tensor, products: Tensor, out: Mapping[str, Tensor]) -> int:
        factor = torch.linalg.cholesky(products.double(), upper=True).float()
        return ggml.quantise(weight, factor, out["weight"], self.layout, _search(self.block_type, self.observer))

    def _dequantise(self, tensors: Mapping[str, Tensor], out: Tensor) -> None:
        ggml.dequantise(tensors["weight"], out, self.layout)

    def _squared_error(self, weight: Tensor, tensors: Mapping[str, Tensor], out: Tensor) -> None:
        ggml.squared_error(weight, tensors["weight"], out, self.layout)


@dataclass(frozen=True)
class IntegerBlockFormat(BlockFormat):
    """Blocks whose levels are whole numbers in a row: algorithms with a rounding of their own may choose them."""

    def grid(self, tensors: Mapping[str, Tensor]) -> Grid:
        """See the base; zero points are minima in steps, any numbers.

        Where a scale is below 0 the levels are counted from the other end: steps are positive.
        """
        low, high = map(float, self.layout.level_range)
        step, zero = self._steps(tensors["weight"])
        return Grid(step.abs(), torch.where(step < 0, low + high - zero, zero), self.layout.sub, torch.int8, low, high)

    def _steps(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Scales as they are, but for those of 0, and minima in units of these: float32 ``[rows, sub-blocks]``."""
        _, step, minimum = ggml_reference.numbers(blocks, self.layout)
        step = torch.where(step == 0, _NO_STEP, step).flatten(1)
        return step, torch.zeros_like(step) if minimum is None else minimum.flatten(1) / step

    def _put(self, numbers: Tensor, rows: slice, tensors: Mapping[str, Tensor]) -> None:
        layout, stored = self.layout, tensors["weight"][rows]
        step, _ = self._steps(stored)
        by_step = numbers.unflatten(1, (-1, layout.sub))
        levels = torch.where(step.unsqueeze(2) < 0, sum(layout.level_range) - by_step, by_step)
        codes = (levels - layout.lowest).to(torch.int32).view(-1, layout.block)
        packed = torch.zeros(len(codes), layout.nbytes, dtype=torch.int32, device=stored.device)
        ggml_reference.pack(codes, layout.codes, packed)
        stored &= ~_code_bits(self.block_type).to(stored.device)
        stored |= packed.to(torch.uint8).view(stored.shape)


@cache
def _code_bits(block_type: str) -> Tensor:
    """The bits of a block that are codes, uint8 ``[bytes]``."""
    layout = LAYOUTS[block_type]
    ones = torch.full((1, layout.block), layout.codes.highest ^ layout.codes.flipped, dtype=torch.int32)
    found = torch.zeros(1, layout.nbytes, dtype=torch.int32)
    ggml_reference.pack(ones, layout.codes, found)
    return found[0].to(torch.uint8)


@cache
def _search(block_type: str, observer: str) -> ggml.Search:
    layout = LAYOUTS[block_type]
    low, high = layout.level_range
    if layout.affine:
        plain, more = 1 / layout.codes.highest, [1 / (layout.codes.highest + by) for by in _BEYOND]
    elif layout.levels:
        plain, more = 1 / low, [1 / (end * factor) for end in (low, high) for factor in _OF_TABLE]
    else:
        plain, more = 1 / low, [1 / end for by in _BEYOND for end in (low - by, high + by)]
    return ggml.Search((plain,), 0, 0) if observer == "amax" else ggml.Search((plain, *more), _REFITS, _ROUNDS)
