"""The loop that tries scales, compiled by numba when a search first needs it; see :mod:`.compiled`."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
from __future__ import annotations

import numpy as np
from numba import types

from modelexport.quantization.kernels.compiled import (
    _F32,
    _F64,
    _FP8_MAX_BITS,
    _FP8_NORMAL_BITS,
    _FP8_UNIT_SHIFT,
    _MAGNITUDE,
    _ROUND,
    _U32,
    FP8,
    INT4,
    _affine,
    _bounds,
    _bytes,
    _clamped,
    _doubles,
    _floats,
    _inline,
    _int,
    _jit,
    _rounded,
    _scale_of,
    _views,
    _widen,
)

TRIED = 16  # scales, the same as in scales.py
SEARCH_LANES = 8  # partial sums for each, the same as the reference's
_WIDTH = TRIED * SEARCH_LANES


@_inline
def _spread(wide, begin, values):
    """SEARCH_LANES values, each as often as there are scales: what follows goes over values and scales in one loop."""
    for lane in range(SEARCH_LANES):
        value = wide[begin + lane]
        for k in range(TRIED):
            values[lane * TRIED + k] = value


@_inline
def _integer_errors(values, steps, low, high, sums):
    """Adds the squares of w - nearest integer * scale."""
    for j in range(_WIDTH):
        ratio = _clamped(_F32(values[j] / steps[j]), low, high)
        nearest = _F32(_F32(ratio + _ROUND) - _ROUND)
        error = _F64(_F32(values[j] - _F32(nearest * steps[j])))
        sums[j] += error * error


@_inline
def _affine_errors(values, steps, zeros, low, high, sums):
    """The same of integers with a zero point."""
    for j in range(_WIDTH):
        ratio = _clamped(_F32(_F32(values[j] / steps[j]) + zeros[j]), low, high)
        nearest = _F32(_F32(_F32(ratio + _ROUND) - _ROUND) - zeros[j])
        error = _F64(_F32(values[j] - _F32(nearest * steps[j])))
        sums[j] += error * error


@_inline
def _fp8_errors(values, steps, sums):
    """The same of e4m3."""
    for j in range(_WIDTH):
        bits = _F32(values[j] / steps[j]).view(np.uint32)
        size = min(_U32(bits & _MAGNITUDE), _FP8_MAX_BITS)
        small = _F32(_F32(_U32(size).view(np.float32) + _FP8_UNIT_SHIFT) - _FP8_UNIT_SHIFT).view(np.uint32)
        nearest = _U32(_rounded(size, 20)) if size >= _FP8_NORMAL_BITS else small
        nearest = _U32(nearest | _U32(bits & _U32(0x80000000)))
        error = _F64(_F32(values[j] - _F32(nearest.view(np.float32) * steps[j])))
        sums[j] += error * error


@_inline
def _halve(sums):
    """Adds the upper half of the lanes to the lower until one is left."""
    half = SEARCH_LANES // 2
    while half:
        for j in range(half * TRIED):
            sums[j] += sums[half * TRIED + j]
        half //= 2


@_jit(types.void(_bytes, *[_int] * 5, *[types.float32] * 2, _floats, _floats, _int, _floats, _int, _doubles))
def search_errors(src, stride, kind, rows, cols, code, limit, cap, caps, amax, each, shrinks, scale_kind, out):
    """Each row's squared error for each of the scales tried; 0 where ``amax`` is not finite.

    ``amax`` has ``each`` values for a row: 1, the largest magnitude, or 2, how far it goes below and above zero.
    """
    shorts, _, floats = _views(src)
    length = (cols + SEARCH_LANES - 1) // SEARCH_LANES * SEARCH_LANES
    wide = np.zeros(length, np.float32)
    values, steps, zeros = np.empty(_WIDTH, np.float32), np.empty(_WIDTH, np.float32), np.empty(_WIDTH, np.float32)
    sums = np.empty(_WIDTH, np.float64)
    low, high, _, _ = _bounds(code)
    half = _F32(8.0) if code == INT4 else _F32(128.0)
    for i in range(rows):
        first, second = amax[i * each], amax[i * each + each - 1]
        for j in range(_WIDTH):
            sums[j] = 0.0
        if first < np.inf and second < np.inf:
            _widen(shorts, floats, kind, i * stride, cols, wide)
            for k in range(TRIED):
                if each == 2:
                    below, above = _F32(first * shrinks[k]), _F32(second * shrinks[k])
                    steps[k], zeros[k] = _affine(below, above, half, caps, scale_kind)
                else:
                    steps[k] = _scale_of(_F32(first * shrinks[k]), limit, cap, scale_kind)
            for j in range(TRIED, _WIDTH):
                steps[j], zeros[j] = steps[j - TRIED], zeros[j - TRIED]
            for begin in range(0, length, SEARCH_LANES):
                _spread(wide, begin, values)
                if each == 2:
                    _affine_errors(values, steps, zeros, low, high, sums)
                elif code == FP8:
                    _fp8_errors(values, steps, sums)
                else:
                    _integer_errors(values, steps, low, high, sums)
            _halve(sums)
        for k in range(TRIED):
            out[i * TRIED + k] = sums[k]
