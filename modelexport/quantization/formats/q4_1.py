"""q4-1: llama.cpp's Q4_1, 5 bits: 4-bit codes, a float16 scale and minimum per 32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from modelexport.quantization.formats._ggml import IntegerBlockFormat


@dataclass(frozen=True)
class Q41Format(IntegerBlockFormat):
    """See the file, and :class:`IntegerBlockFormat`."""

    name: ClassVar[str] = "q4-1"
    description: ClassVar[str] = "llama.cpp's Q4_1, 5 bits: 4-bit codes, a float16 scale and minimum per 32"
    weight_bits: ClassVar[int] = 4
    checkpoint_format: ClassVar[str] = "Q4_1"
    block_type: ClassVar[str] = "Q4_1"


FORMAT = Q41Format
