"""The loop that rounds columns one after the other, compiled by numba: what :mod:`.feedback_fused` calls.

The same bits as :mod:`.feedback_reference`: see :mod:`.compiled` for what makes such loops fast. Here the innermost
loops run over the rows of a weight, which know nothing of each other.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
from __future__ import annotations

import numpy as np
from numba import types

from modelexport.quantization.kernels.compiled import (
    _F32,
    _FP8_MAX_BITS,
    _FP8_NORMAL_BITS,
    _FP8_UNIT_SHIFT,
    _ROUND,
    _U32,
    _clamped,
    _inline,
    _jit,
    _nearest_float,
)

INTEGERS, E4M3, E2M1 = 0, 1, 2  # kinds of numbers
_FP4_MAX_BITS, _FP4_NORMAL_BITS, _FP4_UNIT_SHIFT = _U32(0x40C00000), _U32(0x3F800000), _F32(2.0**22)  # 6 and 1

_matrix, _indices = types.float32[:, ::1], types.int64[::1]


@_inline
def _integers(target, step, zero, low, high, rounded, rows):
    for r in range(rows):
        ratio = _clamped(_F32(_F32(target[r] / step[r]) + zero[r]), low, high)
        nearest = _F32(_F32(ratio + _ROUND) - _ROUND)
        rounded[r] = _F32(_F32(nearest - zero[r]) * step[r])


@_inline
def _plain_integers(target, step, low, high, rounded, rows):
    for r in range(rows):
        ratio = _clamped(_F32(target[r] / step[r]), low, high)
        rounded[r] = _F32(_F32(_F32(ratio + _ROUND) - _ROUND) * step[r])


@_inline
def _e4m3(target, step, rounded, rows):
    for r in range(rows):
        ratio = _F32(target[r] / step[r])
        rounded[r] = _F32(_nearest_float(ratio, _FP8_MAX_BITS, _FP8_NORMAL_BITS, 20, _FP8_UNIT_SHIFT) * step[r])


@_inline
def _e2m1(target, step, rounded, rows):
    for r in range(rows):
        ratio = _F32(target[r] / step[r])
        rounded[r] = _F32(_nearest_float(ratio, _FP4_MAX_BITS, _FP4_NORMAL_BITS, 22, _FP4_UNIT_SHIFT) * step[r])


@_jit(types.void(_matrix, _matrix, _matrix, _indices, _matrix, _matrix, types.intp, *[types.float32] * 2, _matrix))
def round_back(weight, carried, factor, block_of, step, zero, code, low, high, rounded):
    """See the reference; ``zero`` is empty where there is none."""
    columns, rows = weight.shape
    errors, target = np.empty((columns, rows), np.float32), np.empty(rows, np.float32)
    for c in range(columns - 1, -1, -1):
        total, values = carried[c], weight[c]
        for p in range(columns - 1, c, -1):
            by, error = factor[p, c], errors[p]
            for r in range(rows):
                total[r] = _F32(total[r] + _F32(by * error[r]))
        for r in range(rows):
            target[r] = _F32(values[r] + total[r])
        block = block_of[c]
        if code == E2M1:
            _e2m1(target, step[block], rounded[c], rows)
        elif code == E4M3:
            _e4m3(target, step[block], rounded[c], rows)
        elif zero.size:
            _integers(target, step[block], zero[block], low, high, rounded[c], rows)
        else:
            _plain_integers(target, step[block], low, high, rounded[c], rows)
        done, error = rounded[c], errors[c]
        for r in range(rows):
            error[r] = _F32(values[r] - done[r])
