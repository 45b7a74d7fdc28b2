"""q6-k: llama.cpp's Q6_K, 6.6 bits: 6-bit codes, 8-bit scales per 16."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from modelexport.quantization.formats._ggml import IntegerBlockFormat


@dataclass(frozen=True)
class Q6KFormat(IntegerBlockFormat):
    """See the file, and :class:`IntegerBlockFormat`."""

    name: ClassVar[str] = "q6-k"
    description: ClassVar[str] = "llama.cpp's Q6_K, 6.6 bits: 6-bit codes, 8-bit scales per 16"
    weight_bits: ClassVar[int] = 6
    checkpoint_format: ClassVar[str] = "Q6_K"
    block_type: ClassVar[str] = "Q6_K"


FORMAT = Q6KFormat
