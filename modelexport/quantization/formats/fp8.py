"""fp8: float8_e4m3fn weights, one scale per output channel, activations rounded per token at run time.

compressed-tensors "float-quantized" (the FP8_DYNAMIC preset; read by vLLM, SGLang, transformers). e4m3fn is
that of "FP8 Formats for Deep Learning" (Micikevicius et al., 2022): no infinity, 448 the largest value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from modelexport.quantization.formats._bytes import RowScaledFormat
from modelexport.quantization.kernels.scales import highest_binade


@dataclass(frozen=True)
class Fp8Format(RowScaledFormat):
    """``weight`` e4m3fn ``[out, in]``: w / scale to nearest, ties to even; ``weight_scale``: amax / 448.

    With observer "exact" it is the largest power of two of which amax is at least 256 times (512 above 448).
    """

    name: ClassVar[str] = "fp8"
    description: ClassVar[str] = "FP8: e4m3 weights, a scale per channel; e4m3 activations, dynamic per token"
    checkpoint_format: ClassVar[str] = "float-quantized"
    storage: ClassVar[torch.dtype] = torch.float8_e4m3fn

    def _fill_powers(self, weight: Tensor, amax: Tensor | None, out: Mapping[str, Tensor]) -> int:
        rows = self.amax(weight) if amax is None else amax
        return self._fill(weight, highest_binade(rows, out["weight_scale"].dtype), out)


FORMAT = Fp8Format
