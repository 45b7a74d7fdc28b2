"""The loops that move weights before they are rounded, compiled by numba when they are first needed; see
:mod:`.compiled`."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
from __future__ import annotations

from numba import types

from modelexport.quantization.kernels.compiled import (
    _F32,
    _ONE,
    _ROUND,
    _U64,
    _ZERO,
    _clamped,
    _floats,
    _inline,
    _int,
    _jit,
)

_HALF = _F32(0.5)


@_inline
def _moved(weight, offset, at, step):
    return _F32(weight[_U64(at)] + _F32(offset[_U64(at)] * step))


@_jit(types.void(*[_floats] * 4, *[_int] * 3, *[types.float32] * 2, _floats))
def nearest_moved(weight, offset, step, zero, rows, cols, columns, low, high, out):
    """See the reference; ``zero`` is empty where there is none."""
    blocks = (cols + columns - 1) // columns
    for i in range(rows):
        for b in range(blocks):
            scale, start = step[i * blocks + b], i * cols + b * columns
            stop = min(start + columns, (i + 1) * cols)
            if zero.size:
                shift = zero[i * blocks + b]
                for at in range(start, stop):
                    ratio = _clamped(_F32(_F32(_moved(weight, offset, at, scale) / scale) + shift), low, high)
                    out[_U64(at)] = _F32(_F32(_F32(_F32(ratio + _ROUND) - _ROUND) - shift) * scale)
            else:
                for at in range(start, stop):
                    ratio = _clamped(_F32(_moved(weight, offset, at, scale) / scale), low, high)
                    out[_U64(at)] = _F32(_F32(_F32(ratio + _ROUND) - _ROUND) * scale)


@_jit(types.void(*[_floats] * 5, *[_int] * 3, *[types.float32] * 3))
def descend(weight, offset, gradient, step, zero, rows, cols, columns, low, high, rate):
    """See the reference; ``zero`` is empty where there is none."""
    blocks = (cols + columns - 1) // columns
    for i in range(rows):
        for b in range(blocks):
            scale, start = step[i * blocks + b], i * cols + b * columns
            shift = zero[i * blocks + b] if zero.size else _ZERO
            stop = min(start + columns, (i + 1) * cols)
            for at in range(start, stop):
                number = _F32(_moved(weight, offset, at, scale) / scale)
                number = _F32(number + shift) if zero.size else number
                slope = gradient[_U64(at)]
                sign = _ONE if slope > _ZERO else _ZERO
                sign = -_ONE if slope < _ZERO else sign
                by = rate if (number >= low) & (number <= high) else _ZERO
                offset[_U64(at)] = _clamped(_F32(offset[_U64(at)] - _F32(sign * by)), -_HALF, _HALF)
