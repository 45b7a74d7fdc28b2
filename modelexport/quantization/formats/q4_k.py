"""q4-k: llama.cpp's Q4_K, 4.5 bits: 4-bit codes, 6-bit scales and minima per 32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from modelexport.quantization.formats._ggml import IntegerBlockFormat


@dataclass(frozen=True)
class Q4KFormat(IntegerBlockFormat):
    """See the file, and :class:`IntegerBlockFormat`."""

    name: ClassVar[str] = "q4-k"
    description: ClassVar[str] = "llama.cpp's Q4_K, 4.5 bits: 4-bit codes, 6-bit scales and minima per 32"
    weight_bits: ClassVar[int] = 4
    checkpoint_format: ClassVar[str] = "Q4_K"
    block_type: ClassVar[str] = "Q4_K"


FORMAT = Q4KFormat
