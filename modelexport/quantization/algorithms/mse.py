"""mse: round to nearest, with the scale of a grid that has the least squared error (the number formats search it)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from modelexport.quantization.algorithms.base import CalibratedLinear, Rounding

if TYPE_CHECKING:
    from torch import Tensor


class LeastSquares(Rounding):
    """See the file; the search is the number format's own, with observer "mse"."""

    name: ClassVar[str] = "mse"
    description: ClassVar[str] = "round to nearest; of a grid of scales the one with the least squared error"
    needs_samples: ClassVar[bool] = False
    observer: ClassVar[str] = "mse"

    def quantise(self, linears: Sequence[CalibratedLinear]) -> Mapping[str, dict[str, Tensor]]:
        """See the base."""
        return {linear.name: linear.rounded() for linear in linears}


ALGORITHM = LeastSquares
