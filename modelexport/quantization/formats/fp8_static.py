"""fp8-static: float8_e4m3fn weights and activations, one scale per tensor, that of the activations calibrated.

compressed-tensors "float-quantized" (the FP8 preset; read by vLLM, SGLang, transformers).
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
from modelexport.quantization.formats.base import ScaleGranularity
from modelexport.quantization.kernels import reference, searching


@dataclass(frozen=True)
class Fp8StaticFormat(ByteFormat):
    """``weight`` e4m3fn ``[out, in]``; ``weight_scale`` ``[1]``: amax / 448; ``input_scale`` ``[1]``: likewise.

    Both maxima are divided in float32. Modules that engines fuse share their ``weight_scale``.
    """

    name: ClassVar[str] = "fp8-static"
    description: ClassVar[str] = "FP8: e4m3 weights, one scale; e4m3 activations, one calibrated scale"
    checkpoint_format: ClassVar[str] = "float-quantized"
    storage: ClassVar[torch.dtype] = torch.float8_e4m3fn

    @property
    def scale_granularity(self) -> ScaleGranularity:
        return "tensor"

    @property
    def searches_whole(self) -> bool:
        return self.observer == "mse"

    def search_errors(self, weight: Tensor, amax: Tensor) -> Tensor:
        self._check_weight(weight, "weight")
        return searching.search_rows(weight, amax, self.storage, self.scale_dtype or weight.dtype, self.limit)

    def search(self, amax: Tensor, errors: Tensor) -> Tensor:
        return searching.best(amax, searching.sum_in_halves(errors).unsqueeze(0), bits=8)

    def _fill(self, weight: Tensor, amax: Tensor | None, out: Mapping[str, Tensor]) -> int:
        q, scale = out["weight"], out["weight_scale"]
        if amax is None:
            amax = self.amax(weight)
            if self.searches_whole and bool(torch.isfinite(amax).all()):
                amax = self.search(amax, searching.search_rows(weight, amax, self.storage, scale.dtype, self.limit))
        rows = weight.shape[0]
        scales = torch.empty(rows, 1, dtype=scale.dtype, device=scale.device)
        bad = kernels.quantise_rows(weight, amax.expand(rows), q, scales, self.limit)
        if bad < 0:
            scale.copy_(reference.scale_of(amax, self.limit, self.storage, scale.dtype, weight.dtype))
        return bad

    def _steps(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return tensors["weight_scale"].reshape(1, 1).expand(tensors["weight"].shape[0], 1)

    def _dequantise(self, tensors: Mapping[str, Tensor], out: Tensor) -> None:
        kernels.dequantise(tensors["weight"], self._steps(tensors), out)

    def _squared_error(self, weight: Tensor, tensors: Mapping[str, Tensor], out: Tensor) -> None:
        kernels.squared_error(weight, tensors["weight"], self._steps(tensors), out)

    def weight_arguments(self) -> dict[str, Any]:
        return {**self._arguments(), "strategy": "tensor", "dynamic": False}

    def input_arguments(self) -> dict[str, Any] | None:
        return {**self._arguments(), "strategy": "tensor", "dynamic": False}

    def input_scale(self, amax: float) -> float:
        return _activations.static_scale(amax, self.storage)

    def fake_quantise_activations(self, x: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        return _activations.static(x, tensors["input_scale"], self.storage)


FORMAT = Fp8StaticFormat
