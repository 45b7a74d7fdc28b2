"""The loop that rounds weights to the values that would be stored, compiled by numba when it is first needed; see
:mod:`.compiled`."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
from __future__ import annotations

import numpy as np
from numba import types

from modelexport.quantization.kernels.compiled import (
    _F32,
    _ROUND,
    _U64,
    BF16,
    FP16,
    FP32,
    INT4,
    _affine,
    _amax,
    _bounds,
    _bytes,
    _clamped,
    _floats,
    _inline,
    _int,
    _jit,
    _scale_of,
    _views,
    _widen,
)
from modelexport.quantization.kernels.compiled_affine import _row_extremes


@_inline
def _steps(extremes, each, limit, cap, caps, half, kind, steps, zeros):
    """Each group's scale, and its zero point where there are two extremes."""
    if each == 2:
        for g in range(steps.size):
            steps[g], zeros[g] = _affine(extremes[2 * g], extremes[2 * g + 1], half, caps, kind)
    else:
        for g in range(steps.size):
            steps[g] = _scale_of(extremes[g], limit, cap, kind)


@_inline
def _round(wide, groups, group, steps, zeros, each, low, high, out, to):
    """Values to the nearest integer's."""
    for g in range(groups):
        scale, zero, at = steps[g], zeros[g], g * group
        if each == 2:
            for j in range(group):
                ratio = _clamped(_F32(_F32(wide[_U64(at + j)] / scale) + zero), low, high)
                out[_U64(to + at + j)] = _F32(_F32(_F32(_F32(ratio + _ROUND) - _ROUND) - zero) * scale)
        else:
            for j in range(group):
                ratio = _clamped(_F32(wide[_U64(at + j)] / scale), low, high)
                out[_U64(to + at + j)] = _F32(_F32(_F32(ratio + _ROUND) - _ROUND) * scale)


@_jit(_int(_bytes, *[_int] * 6, *[types.float32] * 2, _floats, _int, _int, _floats, _int))
def nearest_groups(src, stride, kind, rows, cols, group, code, limit, cap, caps, each, scale_kind, out, out_stride):
    """Fills float32 ``out``; the first row that holds NaN or Inf, or -1. With zero points where ``each`` is 2."""
    shorts, words, floats = _views(src)
    groups, half = cols // group, _F32(8.0) if code == INT4 else _F32(128.0)
    extremes = np.empty(each * groups, np.float32)
    steps, zeros = np.empty(groups, np.float32), np.zeros(groups, np.float32)
    wide = np.empty(cols, np.float32)
    low, high, _, _ = _bounds(code)
    for i in range(rows):
        begin = i * stride
        if each == 2:
            finite = _row_extremes(shorts, words, kind, begin, groups, group, extremes)
        else:
            finite = _amax(shorts, words, kind, begin, groups, group, extremes)
        if not finite:
            return i
        if scale_kind == BF16:  # the same for each kind: see compiled_search
            _steps(extremes, each, limit, cap, caps, half, BF16, steps, zeros)
        elif scale_kind == FP16:
            _steps(extremes, each, limit, cap, caps, half, FP16, steps, zeros)
        else:
            _steps(extremes, each, limit, cap, caps, half, FP32, steps, zeros)
        _widen(shorts, floats, kind, begin, cols, wide)
        _round(wide, groups, group, steps, zeros, each, low, high, out, i * out_stride)
    return -1
