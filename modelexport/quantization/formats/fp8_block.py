"""fp8-block: float8_e4m3fn weights with a scale per block of 128 x 128, activations per 128 at run time.

compressed-tensors "float-quantized" (the FP8_BLOCK preset; read by vLLM, SGLang, transformers), the numbers of
DeepSeek-V3's checkpoints ("DeepSeek-V3 Technical Report", 2024).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from modelexport.quantization import kernels
from modelexport.quantization.formats import _activations
from modelexport.quantization.formats._bytes import ByteFormat
from modelexport.quantization.kernels import searching
from modelexport.quantization.kernels.scales import highest_binade

SIDE = 128


@dataclass(frozen=True)
class Fp8BlockFormat(ByteFormat):
    """``weight`` e4m3fn ``[out, in]``; ``weight_scale`` ``[ceil(out / 128), ceil(in / 128)]``: a block's amax / 448.

    The last blocks of rows and of columns may be smaller. With observer "exact", powers of two as of a row of fp8.
    """

    name: ClassVar[str] = "fp8-block"
    description: ClassVar[str] = "FP8: e4m3 weights, a scale per 128 x 128; e4m3 activations, dynamic per 128"
    checkpoint_format: ClassVar[str] = "float-quantized"
    storage: ClassVar[torch.dtype] = torch.float8_e4m3fn

    @property
    def kernels(self) -> tuple[str, ...]:
        """See the base."""
        return ("compiled_blocks", *super().kernels)

    def _fill(self, weight: Tensor, amax: Tensor | None, out: Mapping[str, Tensor]) -> int:
        scale, found = out["weight_scale"], None
        if self.observer == "mse" and weight.numel():
            found = searching.search_blocks(weight, SIDE, self.storage, scale.dtype, self.limit)
        return kernels.quantise_blocks(weight, SIDE, found, out["weight"], scale, self.limit)

    def _fill_powers(self, weight: Tensor, amax: Tensor | None, out: Mapping[str, Tensor]) -> int:
        scale = out["weight_scale"]
        largest = torch.empty(scale.shape, dtype=torch.float32, device=weight.device)
        for number, start in enumerate(range(0, weight.shape[0], SIDE)):
            columns = weight[start : start + SIDE].abs().amax(dim=0).float()
            largest[number] = torch.nn.functional.pad(columns, (0, -weight.shape[1] % SIDE)).view(-1, SIDE).amax(dim=1)
        found = highest_binade(largest, scale.dtype)
        return kernels.quantise_blocks(weight, SIDE, found, out["weight"], scale, self.limit)

    def _steps(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return tensors["weight_scale"].repeat_interleave(SIDE, dim=0)[: tensors["weight"].shape[0]]

    def _columns(self, cols: int) -> int:
        return SIDE

    def _dequantise(self, tensors: Mapping[str, Tensor], out: Tensor) -> None:
        kernels.dequantise(tensors["weight"], self._steps(tensors), out, group=SIDE)

    def _squared_error(self, weight: Tensor, tensors: Mapping[str, Tensor], out: Tensor) -> None:
        scales = self._steps(tensors)
        kernels.squared_error(weight, tensors["weight"], scales, out, group=SIDE)

    def weight_arguments(self) -> dict[str, Any]:
        return {**self._arguments(), "strategy": "block", "block_structure": [SIDE, SIDE], "dynamic": False}

    def input_arguments(self) -> dict[str, Any] | None:
        return {**self._arguments(), "strategy": "group", "group_size": SIDE, "dynamic": True}

    def fake_quantise_activations(self, x: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        return _activations.dynamic(x, self.storage, SIDE)


FORMAT = Fp8BlockFormat
