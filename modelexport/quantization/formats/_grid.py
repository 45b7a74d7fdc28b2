"""The values that a weight can have once its scales are fixed, for algorithms with a rounding of their own."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from modelexport.quantization.kernels import feedback_reference

__all__ = ["Grid"]


@dataclass(frozen=True)
class Grid:
    """A value in row r and column c is ``(number - zero[r, c // columns]) * step[r, c // columns]``, in float32.

    Attributes:
        step: float32 ``[rows, blocks]``, positive.
        zero: float32 ``[rows, blocks]``, whole numbers, but for the blocks of llama.cpp, whose minima are no
            multiples of their steps; None where there are no zero points.
        columns: of a block; the last may have fewer.
        storage: which numbers there are: int8, the integers ``low .. high``; float8_e4m3fn; uint8, e2m1.
        low, high: the least and the greatest number.
    """

    step: Tensor
    zero: Tensor | None
    columns: int
    storage: torch.dtype
    low: float
    high: float

    def part(self, rows: slice) -> Grid:
        """The same of some rows."""
        return replace(self, step=self.step[rows], zero=None if self.zero is None else self.zero[rows])

    def numbers(self, values: Tensor) -> Tensor:
        """The numbers nearest to values (float32 ``[rows, cols]``), ties to even, as float32; zero points included."""
        step, zero = self._spread(values.shape[1])
        return feedback_reference.numbers(values, step, zero, self.storage, self.low, self.high)

    def values(self, numbers: Tensor) -> Tensor:
        """Returns the values of numbers (float32 ``[rows, cols]``): float32."""
        step, zero = self._spread(numbers.shape[1])
        return (numbers if zero is None else numbers - zero) * step

    def nearest(self, values: Tensor) -> Tensor:
        """The values that can be stored which are nearest to those given: float32 ``[rows, cols]``."""
        return self.values(self.numbers(values))

    def spacing(self, values: Tensor) -> Tensor:
        """The distances between the values that can be stored on both sides of those given.

        float32 ``[rows, cols]``, or what can be broadcast to that.
        """
        step, _ = self._spread(values.shape[1])
        return feedback_reference.spacing(values, step, self.storage, self.high)

    def within(self, values: Tensor) -> Tensor:
        """Returns where values are not beyond the greatest and the least that can be stored: bool ``[rows, cols]``."""
        step, zero = self._spread(values.shape[1])
        numbers = values / step if zero is None else values / step + zero
        return (numbers >= self.low) & (numbers <= self.high)

    def _spread(self, cols: int) -> tuple[Tensor, Tensor | None]:
        """Steps and zero points, one for each column (or one for all)."""
        if self.step.shape[1] == 1:
            return self.step, self.zero
        wide = [
            None if part is None else part.repeat_interleave(self.columns, dim=1)[:, :cols]
            for part in (self.step, self.zero)
        ]
        assert wide[0] is not None
        return wide[0], wide[1]
