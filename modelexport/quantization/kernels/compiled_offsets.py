"""The loops that move weights before they are rounded, compiled by numba when they are first needed; see
:mod:`.compiled`."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
from __future__ import annotations

import numpy as np
from numba import types

from modelexport.quantization.kernels.compiled import (
    _F32,
    _FP8_MAX_BITS,
    _FP8_NORMAL_BITS,
    _FP8_UNIT_SHIFT,
    _ONE,
    _ROUND,
    _U32,
    _U64,
    _ZERO,
    _clamped,
    _floats,
    _inline,
    _int,
    _jit,
    _nearest_float,
)
from modelexport.quantization.kernels.feedback_compiled import (
    _FP4_MAX_BITS,
    _FP4_NORMAL_BITS,
    _FP4_UNIT_SHIFT,
    E2M1,
    E4M3,
    INTEGERS,
)

_HALF = _F32(0.5)
_NO_MANTISSA = _U32(0xFF800000)


@_inline
def _spacing(weight, step, code, high):
    """The distance between the floats on both sides of a weight."""
    least = _ONE if code == E2M1 else _F32(2.0**-6)
    part = _HALF if code == E2M1 else _F32(0.125)
    size = _clamped(abs(_F32(weight / step)), least, high)
    return _F32(step * _F32(_U32(_F32(size).view(np.uint32) & _NO_MANTISSA).view(np.float32) * part))


@_inline
def _moved(weight, offset, at, step):
    return _F32(weight[_U64(at)] + _F32(offset[_U64(at)] * step))


@_inline
def _moved_float(weight, offset, at, step, code, high):
    return _moved(weight, offset, at, _spacing(weight[_U64(at)], step, code, high))


@_inline
def _floats_of(weight, offset, out, start, stop, step, code, high):
    for at in range(start, stop):
        ratio = _F32(_moved_float(weight, offset, at, step, code, high) / step)
        if code == E2M1:
            number = _nearest_float(ratio, _FP4_MAX_BITS, _FP4_NORMAL_BITS, 22, _FP4_UNIT_SHIFT)
        else:
            number = _nearest_float(ratio, _FP8_MAX_BITS, _FP8_NORMAL_BITS, 20, _FP8_UNIT_SHIFT)
        out[_U64(at)] = _F32(number * step)


@_jit(types.void(*[_floats] * 4, *[_int] * 4, *[types.float32] * 2, _floats))
def nearest_moved(weight, offset, step, zero, rows, cols, columns, code, low, high, out):
    """See the reference; ``zero`` is empty where there is none."""
    blocks = (cols + columns - 1) // columns
    for i in range(rows):
        for b in range(blocks):
            scale, start = step[i * blocks + b], i * cols + b * columns
            stop = min(start + columns, (i + 1) * cols)
            if code == E2M1:
                _floats_of(weight, offset, out, start, stop, scale, E2M1, high)
            elif code == E4M3:
                _floats_of(weight, offset, out, start, stop, scale, E4M3, high)
            elif zero.size:
                shift = zero[i * blocks + b]
                for at in range(start, stop):
                    ratio = _clamped(_F32(_F32(_moved(weight, offset, at, scale) / scale) + shift), low, high)
                    out[_U64(at)] = _F32(_F32(_F32(_F32(ratio + _ROUND) - _ROUND) - shift) * scale)
            else:
                for at in range(start, stop):
                    ratio = _clamped(_F32(_moved(weight, offset, at, scale) / scale), low, high)
                    out[_U64(at)] = _F32(_F32(_F32(ratio + _ROUND) - _ROUND) * scale)


@_inline
def _step_down(offset, gradient, at, number, low, high, rate):
    """Moves one offset."""
    slope = gradient[_U64(at)]
    sign = _ONE if slope > _ZERO else _ZERO
    sign = -_ONE if slope < _ZERO else sign
    by = rate if (number >= low) & (number <= high) else _ZERO
    offset[_U64(at)] = _clamped(_F32(offset[_U64(at)] - _F32(sign * by)), -_HALF, _HALF)


@_jit(types.void(*[_floats] * 5, *[_int] * 4, *[types.float32] * 3))
def descend(weight, offset, gradient, step, zero, rows, cols, columns, code, low, high, rate):
    """See the reference; ``zero`` is empty where there is none."""
    blocks = (cols + columns - 1) // columns
    for i in range(rows):
        for b in range(blocks):
            scale, start = step[i * blocks + b], i * cols + b * columns
            shift = zero[i * blocks + b] if zero.size else _ZERO
            stop = min(start + columns, (i + 1) * cols)
            if code == INTEGERS:
                for at in range(start, stop):
                    number = _F32(_moved(weight, offset, at, scale) / scale)
                    number = _F32(number + shift) if zero.size else number
                    _step_down(offset, gradient, at, number, low, high, rate)
            else:
                for at in range(start, stop):
                    number = _F32(_moved_float(weight, offset, at, scale, code, high) / scale)
                    _step_down(offset, gradient, at, number, low, high, rate)
