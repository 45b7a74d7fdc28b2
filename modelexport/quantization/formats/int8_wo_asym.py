"""int8-wo-asym: W8A16 with zero points, groups along the input, four values packed into an int32.

compressed-tensors "pack-quantized" (the W8A16 preset, asymmetric; read by vLLM, SGLang, transformers).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from modelexport.quantization.formats._packed import PackedFormat


@dataclass(frozen=True)
class Int8WoAsymFormat(PackedFormat):
    """Integers of -128..127 with zero points; see :class:`PackedFormat`. The scale is (max - min) / 255."""

    name: ClassVar[str] = "int8-wo-asym"
    description: ClassVar[str] = "W8A16: int8 weights, a scale and a zero point per group; activations as they are"
    weight_bits: ClassVar[int] = 8
    limit: ClassVar[float] = 127.0
    symmetric: ClassVar[bool] = False


FORMAT = Int8WoAsymFormat
