"""rtn: every weight goes to the nearest number of its format, whose scale follows from the largest magnitude."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from modelexport.quantization.algorithms.base import CalibratedLinear, Rounding

if TYPE_CHECKING:
    from torch import Tensor


class RoundToNearest(Rounding):
    """See the file."""

    name: ClassVar[str] = "rtn"
    description: ClassVar[str] = "round to nearest; scales from the largest magnitudes"
    needs_samples: ClassVar[bool] = False

    def quantise(self, linears: Sequence[CalibratedLinear]) -> Mapping[str, dict[str, Tensor]]:
        """See the base."""
        return {linear.name: linear.rounded() for linear in linears}


ALGORITHM = RoundToNearest
