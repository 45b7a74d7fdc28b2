"""q4-0: llama.cpp's Q4_0, 4.5 bits: 4-bit codes, a float16 scale per 32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from modelexport.quantization.formats._ggml import IntegerBlockFormat


@dataclass(frozen=True)
class Q40Format(IntegerBlockFormat):
    """See the file, and :class:`IntegerBlockFormat`."""

    name: ClassVar[str] = "q4-0"
    description: ClassVar[str] = "llama.cpp's Q4_0, 4.5 bits: 4-bit codes, a float16 scale per 32"
    weight_bits: ClassVar[int] = 4
    checkpoint_format: ClassVar[str] = "Q4_0"
    block_type: ClassVar[str] = "Q4_0"


FORMAT = Q40Format
