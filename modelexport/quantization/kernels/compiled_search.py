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

SEARCH_LANES = 32  # partial sums, the same as the reference's


@_inline
def _integer_error(values, steps, scale, low, high, lanes):
    """Adds the squares of w - nearest integer * scale to the lanes."""
    for step in range(steps):
        for lane in range(SEARCH_LANES):
            value = values[step, lane]
            ratio = _clamped(_F32(value / scale), low, high)
            nearest = _F32(_F32(ratio + _ROUND) - _ROUND)
            error = _F64(_F32(value - _F32(nearest * scale)))
            lanes[lane] += error * error


@_inline
def _affine_error(values, steps, scale, zero, low, high, lanes):
    """The same of integers with a zero point."""
    for step in range(steps):
        for lane in range(SEARCH_LANES):
            value = values[step, lane]
            ratio = _clamped(_F32(_F32(value / scale) + zero), low, high)
            nearest = _F32(_F32(_F32(ratio + _ROUND) - _ROUND) - zero)
            error = _F64(_F32(value - _F32(nearest * scale)))
            lanes[lane] += error * error


@_inline
def _fp8_error(values, steps, scale, lanes):
    """The same of e4m3."""
    for step in range(steps):
        for lane in range(SEARCH_LANES):
            value = values[step, lane]
            bits = _F32(value / scale).view(np.uint32)
            size = min(_U32(bits & _MAGNITUDE), _FP8_MAX_BITS)
            small = _F32(_F32(_U32(size).view(np.float32) + _FP8_UNIT_SHIFT) - _FP8_UNIT_SHIFT).view(np.uint32)
            nearest = _U32(_rounded(size, 20)) if size >= _FP8_NORMAL_BITS else small
            nearest = _U32(nearest | _U32(bits & _U32(0x80000000)))
            error = _F64(_F32(value - _F32(nearest.view(np.float32) * scale)))
            lanes[lane] += error * error


@_inline
def _halved(lanes):
    """The sum of the lanes: the upper half is added to the lower until one is left."""
    half = SEARCH_LANES // 2
    while half:
        for lane in range(half):
            lanes[lane] += lanes[lane + half]
        half //= 2
    return lanes[0]


@_jit(types.void(_bytes, *[_int] * 5, *[types.float32] * 2, _floats, _floats, _int, _floats, _int, _doubles))
def search_errors(src, stride, kind, rows, cols, code, limit, cap, caps, amax, each, shrinks, scale_kind, out):
    """Each row's squared error for each of the scales tried; 0 where ``amax`` is not finite.

    ``amax`` has ``each`` values for a row: 1, the largest magnitude, or 2, how far it goes below and above zero.
    """
    shorts, _, floats = _views(src)
    tried = shrinks.size
    steps = (cols + SEARCH_LANES - 1) // SEARCH_LANES
    wide = np.zeros(steps * SEARCH_LANES, np.float32)
    values = wide.reshape(steps, SEARCH_LANES)
    lanes = np.empty(SEARCH_LANES, np.float64)
    low, high, _, _ = _bounds(code)
    half = _F32(8.0) if code == INT4 else _F32(128.0)
    for i in range(rows):
        first = amax[i * each]
        second = amax[i * each + each - 1]
        if not (first < np.inf and second < np.inf):
            for k in range(tried):
                out[i * tried + k] = 0.0
            continue
        _widen(shorts, floats, kind, i * stride, cols, wide)
        for k in range(tried):
            for lane in range(SEARCH_LANES):
                lanes[lane] = 0.0
            if each == 2:
                scale, zero = _affine(_F32(first * shrinks[k]), _F32(second * shrinks[k]), half, caps, scale_kind)
                _affine_error(values, steps, scale, zero, low, high, lanes)
            else:
                scale = _scale_of(_F32(first * shrinks[k]), limit, cap, scale_kind)
                if code == FP8:
                    _fp8_error(values, steps, scale, lanes)
                else:
                    _integer_error(values, steps, scale, low, high, lanes)
            out[i * tried + k] = _halved(lanes)
