"""Rounding with feedback: columns one after the other, each with regard to the errors of those before it.

What GPTQ does within a block of columns. Fused for CPU tensors where numba imports, else plain torch; the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from modelexport.quantization import kernels
from modelexport.quantization.kernels import feedback_reference as reference

__all__ = ["numbers", "round_back"]

numbers = reference.numbers


def _fused() -> Any:
    from modelexport.quantization.kernels import feedback_fused

    return feedback_fused


def round_back(
    weight: Tensor,
    carried: Tensor,
    factor: Tensor,
    block_of: Tensor,
    step: Tensor,
    zero: Tensor | None,
    storage: torch.dtype,
    low: float,
    high: float,
    rounded: Tensor,
) -> None:
    """See :func:`.feedback_reference.round_back`; on one thread."""
    on_cpu = weight.device.type == "cpu" and weight.numel() > 0
    module: Any = _fused() if on_cpu and kernels.backend().name == "fused" else reference
    module.round_back(weight, carried, factor, block_of, step, zero, storage, low, high, rounded)
