"""nvfp4-wo: W4A16, NVFP4 weights; compressed-tensors' NVFP4A16 preset."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from modelexport.quantization.formats._microscaling import NvFormat


@dataclass(frozen=True)
class NvFp4WeightOnlyFormat(NvFormat):
    """NVFP4 weights, see :class:`NvFormat`; activations as they are."""

    name: ClassVar[str] = "nvfp4-wo"
    description: ClassVar[str] = "W4A16: NVFP4 weights (e2m1, e4m3 scales per 16); activations as they are"


FORMAT = NvFp4WeightOnlyFormat
