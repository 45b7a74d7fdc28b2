"""int8: W8A8, symmetric, one scale per output channel, activations rounded per token at run time.

compressed-tensors "int-quantized" (the W8A8 preset; read by vLLM, SGLang, transformers).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from modelexport.quantization.formats._bytes import RowScaledFormat


@dataclass(frozen=True)
class Int8Format(RowScaledFormat):
    """``weight`` int8 ``[out, in]``: w / scale, half to even, in -128..127; ``weight_scale``: amax / 127."""

    name: ClassVar[str] = "int8"
    description: ClassVar[str] = "W8A8: int8 weights, a scale per channel; int8 activations, dynamic per token"
    checkpoint_format: ClassVar[str] = "int-quantized"
    storage: ClassVar[torch.dtype] = torch.int8


FORMAT = Int8Format
