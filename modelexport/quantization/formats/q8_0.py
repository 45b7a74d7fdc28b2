"""q8-0: llama.cpp's Q8_0, 8.5 bits: 8-bit codes, a float16 scale per 32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from modelexport.quantization.formats._ggml import IntegerBlockFormat


@dataclass(frozen=True)
class Q80Format(IntegerBlockFormat):
    """See the file, and :class:`IntegerBlockFormat`."""

    name: ClassVar[str] = "q8-0"
    description: ClassVar[str] = "llama.cpp's Q8_0, 8.5 bits: 8-bit codes, a float16 scale per 32"
    weight_bits: ClassVar[int] = 8
    checkpoint_format: ClassVar[str] = "Q8_0"
    block_type: ClassVar[str] = "Q8_0"


FORMAT = Q80Format
