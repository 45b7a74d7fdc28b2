"""q2-k: llama.cpp's Q2_K, 2.6 bits: 2-bit codes, 4-bit scales and minima per 16."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from modelexport.quantization.formats._ggml import IntegerBlockFormat


@dataclass(frozen=True)
class Q2KFormat(IntegerBlockFormat):
    """See the file, and :class:`IntegerBlockFormat`."""

    name: ClassVar[str] = "q2-k"
    description: ClassVar[str] = "llama.cpp's Q2_K, 2.6 bits: 2-bit codes, 4-bit scales and minima per 16"
    weight_bits: ClassVar[int] = 2
    checkpoint_format: ClassVar[str] = "Q2_K"
    block_type: ClassVar[str] = "Q2_K"


FORMAT = Q2KFormat
