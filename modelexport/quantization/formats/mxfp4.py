"""mxfp4: W4A4, MXFP4 weights and activations; compressed-tensors' MXFP4 preset."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from modelexport.quantization.formats._microscaling import MxActivationsFormat


@dataclass(frozen=True)
class MxFp4Format(MxActivationsFormat):
    """``weight_packed`` uint8 ``[out, in / 2]`` (e2m1, the low half is the even column) and scales as
    :class:`MxFormat` has them; activations rounded the same way at run time, each 32 with a scale of their own.
    """

    name: ClassVar[str] = "mxfp4"
    description: ClassVar[str] = "W4A4: MXFP4 weights and activations (e2m1, power-of-two scales per 32)"
    checkpoint_format: ClassVar[str] = "mxfp4-pack-quantized"


FORMAT = MxFp4Format
