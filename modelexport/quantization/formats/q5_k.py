"""q5-k: llama.cpp's Q5_K, 5.5 bits: 5-bit codes, 6-bit scales and minima per 32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from modelexport.quantization.formats._ggml import IntegerBlockFormat


@dataclass(frozen=True)
class Q5KFormat(IntegerBlockFormat):
    """See the file, and :class:`IntegerBlockFormat`."""

    name: ClassVar[str] = "q5-k"
    description: ClassVar[str] = "llama.cpp's Q5_K, 5.5 bits: 5-bit codes, 6-bit scales and minima per 32"
    weight_bits: ClassVar[int] = 5
    checkpoint_format: ClassVar[str] = "Q5_K"
    block_type: ClassVar[str] = "Q5_K"


FORMAT = Q5KFormat
