"""mse: round to nearest, with the scale of a grid that has the least squared error (the number formats search it)."""

from __future__ import annotations

from typing import ClassVar

from modelexport.quantization.algorithms.base import Rounding


class LeastSquares(Rounding):
    """See the file; the search is the number format's own, with observer "mse"."""

    name: ClassVar[str] = "mse"
    description: ClassVar[str] = "round to nearest; of a grid of scales the one with the least squared error"
    needs_samples: ClassVar[bool] = False
    observer: ClassVar[str] = "mse"


ALGORITHM = LeastSquares
