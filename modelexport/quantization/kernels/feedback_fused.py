"""Rounding with feedback for CPU tensors: tensors in, :mod:`.feedback_compiled` loops.

Importing this module compiles the loop, or loads it from numba's cache; no thread is started, no torch operation run.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from modelexport.quantization.kernels import feedback_compiled as compiled

_CODE = {torch.int8: compiled.INTEGERS, torch.float8_e4m3fn: compiled.E4M3, torch.uint8: compiled.E2M1}
_NONE = np.empty((0, 0), np.float32)


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
    """See :func:`.feedback_reference.round_back`."""
    compiled.round_back(
        weight.numpy(),
        carried.numpy(),
        factor.contiguous().numpy(),
        block_of.numpy(),
        step.numpy(),
        _NONE if zero is None else zero.numpy(),
        _CODE[storage],
        low,
        high,
        rounded.numpy(),
    )
