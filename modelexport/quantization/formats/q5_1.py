"""q5-1: llama.cpp's Q5_1, 6 bits: 5-bit codes, a float16 scale and minimum per 32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from modelexport.quantization.formats._ggml import IntegerBlockFormat


@dataclass(frozen=True)
class Q51Format(IntegerBlockFormat):
    """See the file, and :class:`IntegerBlockFormat`."""

    name: ClassVar[str] = "q5-1"
    description: ClassVar[str] = "llama.cpp's Q5_1, 6 bits: 5-bit codes, a float16 scale and minimum per 32"
    weight_bits: ClassVar[int] = 5
    checkpoint_format: ClassVar[str] = "Q5_1"
    block_type: ClassVar[str] = "Q5_1"


FORMAT = Q51Format
