"""mxfp4-wo: W4A16, MXFP4 weights; compressed-tensors' MXFP4A16 preset."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from modelexport.quantization.formats._microscaling import MxFormat


@dataclass(frozen=True)
class MxFp4WeightOnlyFormat(MxFormat):
    """``weight_packed`` uint8 ``[out, in / 2]`` (e2m1, the low half is the even column) and scales as
    :class:`MxFormat` has them; activations as they are.
    """

    name: ClassVar[str] = "mxfp4-wo"
    description: ClassVar[str] = "W4A16: MXFP4 weights (e2m1, power-of-two scales per 32); activations as they are"
    checkpoint_format: ClassVar[str] = "mxfp4-pack-quantized"


FORMAT = MxFp4WeightOnlyFormat
