"""iq4-nl: llama.cpp's IQ4_NL, 4.5 bits: 16 levels of a table, a float16 scale per 32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from modelexport.quantization.formats._ggml import BlockFormat


@dataclass(frozen=True)
class Iq4NlFormat(BlockFormat):
    """See the file, and :class:`BlockFormat`."""

    name: ClassVar[str] = "iq4-nl"
    description: ClassVar[str] = "llama.cpp's IQ4_NL, 4.5 bits: 16 levels of a table, a float16 scale per 32"
    weight_bits: ClassVar[int] = 4
    checkpoint_format: ClassVar[str] = "IQ4_NL"
    block_type: ClassVar[str] = "IQ4_NL"


FORMAT = Iq4NlFormat
