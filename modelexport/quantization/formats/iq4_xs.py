"""iq4-xs: llama.cpp's IQ4_XS, 4.3 bits: 16 levels of a table, 6-bit scales per 32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from modelexport.quantization.formats._ggml import BlockFormat


@dataclass(frozen=True)
class Iq4XsFormat(BlockFormat):
    """See the file, and :class:`BlockFormat`."""

    name: ClassVar[str] = "iq4-xs"
    description: ClassVar[str] = "llama.cpp's IQ4_XS, 4.3 bits: 16 levels of a table, 6-bit scales per 32"
    weight_bits: ClassVar[int] = 4
    checkpoint_format: ClassVar[str] = "IQ4_XS"
    block_type: ClassVar[str] = "IQ4_XS"


FORMAT = Iq4XsFormat
