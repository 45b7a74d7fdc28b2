"""q3-k: llama.cpp's Q3_K, 3.4 bits: 3-bit codes, 6-bit scales per 16."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from modelexport.quantization.formats._ggml import IntegerBlockFormat


@dataclass(frozen=True)
class Q3KFormat(IntegerBlockFormat):
    """See the file, and :class:`IntegerBlockFormat`."""

    name: ClassVar[str] = "q3-k"
    description: ClassVar[str] = "llama.cpp's Q3_K, 3.4 bits: 3-bit codes, 6-bit scales per 16"
    weight_bits: ClassVar[int] = 3
    checkpoint_format: ClassVar[str] = "Q3_K"
    block_type: ClassVar[str] = "Q3_K"


FORMAT = Q3KFormat
