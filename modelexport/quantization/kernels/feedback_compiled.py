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
    _U64,
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


@_inline
def _add_four(sums, at, first, second, third, fourth, errors, last, rows):
    """Adds four columns' errors, times a number each, to a column's sums, one after the other; ``last`` is where those
    of the first begin, and the others lie before it."""
    one, two, three, four = last, last - rows, last - 2 * rows, last - 3 * rows
    for r in range(rows):
        value = _F32(sums[_U64(at + r)] + _F32(first * errors[_U64(one + r)]))
        value = _F32(value + _F32(second * errors[_U64(two + r)]))
        value = _F32(value + _F32(third * errors[_U64(three + r)]))
        sums[_U64(at + r)] = _F32(value + _F32(fourth * errors[_U64(four + r)]))


@_jit(types.void(_matrix, _matrix, _matrix, _indices, _matrix, _matrix, types.intp, *[types.float32] * 2, _matrix))
def round_back(weight, carried, factor, block_of, step, zero, code, low, high, rounded):
    """See the reference; ``zero`` is empty where there is none."""
    columns, rows = weight.shape
    errors, target = np.empty(columns * rows, np.float32), np.empty(rows, np.float32)
    sums = carried.reshape(columns * rows)
    for c in range(columns - 1, -1, -1):
        at, p = c * rows, columns - 1
        while p - c >= 4:  # four at a time: the sums are read and written a quarter as often
            by = (factor[p, c], factor[p - 1, c], factor[p - 2, c], factor[p - 3, c])
            _add_four(sums, at, *by, errors, p * rows, rows)
            p -= 4
        while p > c:
            by_one, error = factor[p, c], p * rows
            for r in range(rows):
                sums[_U64(at + r)] = _F32(sums[_U64(at + r)] + _F32(by_one * errors[_U64(error + r)]))
            p -= 1
        values = weight[c]
        for r in range(rows):
            target[r] = _F32(values[r] + sums[_U64(at + r)])
        block = block_of[c]
        if code == E2M1:
            _e2m1(target, step[block], rounded[c], rows)
        elif code == E4M3:
            _e4m3(target, step[block], rounded[c], rows)
        elif zero.size:
            _integers(target, step[block], zero[block], low, high, rounded[c], rows)
        else:
            _plain_integers(target, step[block], low, high, rounded[c], rows)
        done = rounded[c]
        for r in range(rows):
            errors[_U64(at + r)] = _F32(values[r] - done[r])
