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
    _ROUND,
    _U64,
    BF16,
    FP8,
    FP16,
    FP32,
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
    _nearest_float,
    _scale_of,
    _views,
    _widen,
)

TRIED = 16  # scales, the same as in scales.py
SEARCH_LANES = 32  # partial sums, the same as the reference's


@_inline
def _integer_error(wide, begin, scale, low, high, lanes):
    """Adds the squares of w - nearest integer * scale to the lanes."""
    for lane in range(SEARCH_LANES):
        value = wide[_U64(begin + lane)]
        ratio = _clamped(_F32(value / scale), low, high)
        nearest = _F32(_F32(ratio + _ROUND) - _ROUND)
        error = _F64(_F32(value - _F32(nearest * scale)))
        lanes[lane] += error * error


@_inline
def _affine_error(wide, begin, scale, zero, low, high, lanes):
    """The same of integers with a zero point."""
    for lane in range(SEARCH_LANES):
        value = wide[_U64(begin + lane)]
        ratio = _clamped(_F32(_F32(value / scale) + zero), low, high)
        nearest = _F32(_F32(_F32(ratio + _ROUND) - _ROUND) - zero)
        error = _F64(_F32(value - _F32(nearest * scale)))
        lanes[lane] += error * error


@_inline
def _fp8_error(wide, begin, scale, lanes):
    """The same of e4m3."""
    for lane in range(SEARCH_LANES):
        value = wide[_U64(begin + lane)]
        nearest = _nearest_float(_F32(value / scale), _FP8_MAX_BITS, _FP8_NORMAL_BITS, 20, _FP8_UNIT_SHIFT)
        error = _F64(_F32(value - _F32(nearest * scale)))
        lanes[lane] += error * error


@_inline
def _halved(lanes):
    """The sum of the lanes: the upper half is added to the lower until one is left."""
    for lane in range(16):
        lanes[lane] += lanes[lane + 16]
    for lane in range(8):
        lanes[lane] += lanes[lane + 8]
    for lane in range(4):
        lanes[lane] += lanes[lane + 4]
    return (lanes[0] + lanes[2]) + (lanes[1] + lanes[3])


@_inline
def _candidates(first, second, shrinks, each, half, limit, cap, caps, kind, steps, zeros):
    """The scales that are tried, and their zero points."""
    if each == 2:
        for k in range(TRIED):
            below, above = _F32(first * shrinks[k]), _F32(second * shrinks[k])
            steps[k], zeros[k] = _affine(below, above, half, caps, kind)
    else:
        for k in range(TRIED):
            steps[k] = _scale_of(_F32(first * shrinks[k]), limit, cap, kind)


@_jit(types.void(_bytes, *[_int] * 5, *[types.float32] * 2, _floats, _floats, _int, _floats, _int, _doubles))
def search_errors(src, stride, kind, rows, cols, code, limit, cap, caps, amax, each, shrinks, scale_kind, out):
    """Each row's squared error for each of the scales tried; 0 where ``amax`` is not finite.

    ``amax`` has ``each`` values for a row: 1, the largest magnitude, or 2, how far it goes below and above zero.
    """
    shorts, _, floats = _views(src)
    length = (cols + SEARCH_LANES - 1) // SEARCH_LANES * SEARCH_LANES
    wide = np.zeros(length, np.float32)
    steps, zeros = np.empty(TRIED, np.float32), np.empty(TRIED, np.float32)
    lanes = np.empty(SEARCH_LANES, np.float64)
    low, high, _, _ = _bounds(code)
    half = _F32(8.0) if code == INT4 else _F32(128.0)
    for i in range(rows):
        first, second = amax[i * each], amax[i * each + each - 1]
        if not (first < np.inf and second < np.inf):
            for k in range(TRIED):
                out[i * TRIED + k] = 0.0
            continue
        _widen(shorts, floats, kind, i * stride, cols, wide)
        if scale_kind == BF16:  # the same for each kind: with a kind that it knows, LLVM makes vectors of it
            _candidates(first, second, shrinks, each, half, limit, cap, caps, BF16, steps, zeros)
        elif scale_kind == FP16:
            _candidates(first, second, shrinks, each, half, limit, cap, caps, FP16, steps, zeros)
        else:
            _candidates(first, second, shrinks, each, half, limit, cap, caps, FP32, steps, zeros)
        for k in range(TRIED):
            for lane in range(SEARCH_LANES):
                lanes[lane] = 0.0
            if each == 2:
                for begin in range(0, length, SEARCH_LANES):
                    _affine_error(wide, begin, steps[k], zeros[k], low, high, lanes)
            elif code == FP8:
                for begin in range(0, length, SEARCH_LANES):
                    _fp8_error(wide, begin, steps[k], lanes)
            else:
                for begin in range(0, length, SEARCH_LANES):
                    _integer_error(wide, begin, steps[k], low, high, lanes)
            out[i * TRIED + k] = _halved(lanes)
