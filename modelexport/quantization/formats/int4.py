"""int4: W4A16, symmetric groups along the input, eight values packed into an int32.

compressed-tensors "pack-quantized" (the W4A16 preset; read by vLLM, SGLang, transformers).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from modelexport.quantization.formats._packed import PackedFormat


@dataclass(frozen=True)
class Int4Format(PackedFormat):
    """Integers of -8..7; see :class:`PackedFormat`. The scale is amax / 7.5.

    That is the middle between the ranges of the two signs, and what compressed-tensors' own observers compute. SQNR on
    the demo model's linears with bf16 scales, in dB (amax / 8 clamps the largest by a whole step, where it is positive;
    the observer "mse" tries it, among others):

    ==========  ========  ==========  ========  =====
    groups of   amax / 7  amax / 7.5  amax / 8  "mse"
    ==========  ========  ==========  ========  =====
    32          20.22     20.43       20.52     21.08
    64          19.31     19.71       20.01
    128         18.54     19.04       19.46     19.84
    whole rows  17.60     18.15       18.65     19.40
    ==========  ========  ==========  ========  =====
    """

    name: ClassVar[str] = "int4"
    description: ClassVar[str] = "W4A16: int4 weights, a scale per group of input channels; activations as they are"
    weight_bits: ClassVar[int] = 4
    limit: ClassVar[float] = 7.5


FORMAT = Int4Format
