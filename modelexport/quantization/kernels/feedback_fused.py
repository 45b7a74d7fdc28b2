"""Rounding with feedback for CPU tensors: tensors in, :mod:`.feedback_compiled` loops.

Importing this module compiles the loop, or loads it from numba's cache; no thread is started, no torch operation run.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from modelexport.quantization.kernels import feedback_compiled as compiled

_CODE = {torch.int8: compiled.INTEGERS, torch.float8_e4m3fn: compiled.E4M3, torch.uint8: compiled.E2M1}
_NONE, _NOTHING = np.empty((0, 0), np.float32), np.empty(0, np.float32)


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


def nearest_moved(
    weight: Tensor,
    offset: Tensor,
    step: Tensor,
    zero: Tensor | None,
    columns: int,
    storage: torch.dtype,
    low: float,
    high: float,
    out: Tensor,
) -> None:
    """See :func:`.feedback_reference.nearest_moved`."""
    from modelexport.quantization.kernels import compiled_offsets

    given = (_flat(weight), _flat(offset), _flat(step), _flat(zero))
    compiled_offsets.nearest_moved(*given, *weight.shape, columns, _CODE[storage], low, high, _flat(out))


def descend(
    weight: Tensor,
    offset: Tensor,
    gradient: Tensor,
    step: Tensor,
    zero: Tensor | None,
    columns: int,
    storage: torch.dtype,
    low: float,
    high: float,
    rate: float,
) -> None:
    """See :func:`.feedback_reference.descend`."""
    from modelexport.quantization.kernels import compiled_offsets

    given = (_flat(weight), _flat(offset), _flat(gradient.contiguous()), _flat(step), _flat(zero))
    compiled_offsets.descend(*given, *weight.shape, columns, _CODE[storage], low, high, rate)


def _flat(tensor: Tensor | None) -> np.ndarray:
    """The numbers of a contiguous tensor, in its own memory."""
    return _NOTHING if tensor is None else tensor.view(-1).numpy()
