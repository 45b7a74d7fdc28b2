"""rtn: every weight goes to the nearest number of its format, whose scale follows from the largest magnitude."""

from __future__ import annotations

from typing import ClassVar

from modelexport.quantization.algorithms.base import Rounding


class RoundToNearest(Rounding):
    """See the file."""

    name: ClassVar[str] = "rtn"
    description: ClassVar[str] = "round to nearest; scales from the largest magnitudes"
    needs_samples: ClassVar[bool] = False
    in_words: ClassVar[str] = "rounded to nearest"


ALGORITHM = RoundToNearest
