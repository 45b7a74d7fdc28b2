"""nvfp4: W4A4, NVFP4 weights and activations; compressed-tensors' NVFP4 preset."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from modelexport.quantization.formats._microscaling import NvFormat, global_scale
from modelexport.quantization.kernels import microscaling


@dataclass(frozen=True)
class NvFp4Format(NvFormat):
    """NVFP4 weights, see :class:`NvFormat`; activations too, by a stored ``input_global_scale`` (float32 ``[1]``)."""

    name: ClassVar[str] = "nvfp4"
    description: ClassVar[str] = "W4A4: NVFP4 weights and activations (e2m1, e4m3 scales per 16); needs calibration"

    def input_arguments(self) -> dict[str, Any] | None:
        return {**self._arguments(), "dynamic": "local", "observer": "static_minmax"}

    def input_scale(self, amax: float) -> float:
        """``input_global_scale``, 448 * 6 / ``amax``; 1 where no input was other than 0."""
        return float(global_scale(torch.tensor([amax], dtype=torch.float32)))

    def fake_quantise_activations(self, x: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """Rounds each 16 of the last dim, with a scale of their own below ``input_global_scale``.

        That is what vLLM's kernels compute, but for the order of multiplications and divisions.
        """
        return microscaling.fake_quantise(x, self.group, tensors["input_global_scale"].to(x.device), self.storage)


FORMAT = NvFp4Format
