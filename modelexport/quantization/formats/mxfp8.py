"""mxfp8: W8A8, MXFP8 weights and activations; compressed-tensors' MXFP8 preset."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from modelexport.quantization.formats._microscaling import MxActivationsFormat


@dataclass(frozen=True)
class MxFp8Format(MxActivationsFormat):
    """``weight`` float8_e4m3fn ``[out, in]`` and scales as :class:`MxFormat` has them; activations rounded the same way
    at run time, each 32 with a scale of their own.
    """

    name: ClassVar[str] = "mxfp8"
    description: ClassVar[str] = "W8A8: MXFP8 weights and activations (e4m3, power-of-two scales per 32)"
    checkpoint_format: ClassVar[str] = "mxfp8-quantized"
    weight_bits: ClassVar[int] = 8
    storage: ClassVar[torch.dtype] = torch.float8_e4m3fn
    values: ClassVar[str] = "weight"


FORMAT = MxFp8Format
