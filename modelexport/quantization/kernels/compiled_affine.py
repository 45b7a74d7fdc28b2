"""Loops for integers with zero points, compiled by numba when a format first needs them; see :mod:`.compiled`."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
from __future__ import annotations

import numpy as np
from numba import types

from modelexport.quantization.kernels.compiled import (
    _EXPONENT,
    _F32,
    _I16,
    _I32,
    _ROUND,
    _U8,
    _U16,
    _U32,
    _U64,
    BF16,
    FP16,
    FP32,
    INT4,
    _affine,
    _bounds,
    _bytes,
    _clamped,
    _finish,
    _float,
    _floats,
    _given,
    _half,
    _inline,
    _int,
    _jit,
    _nibbles,
    _store_scale,
    _views,
    _widen,
)


@_inline
def _row_extremes(shorts, words, kind, begin, groups, group, extremes):
    """The extremes of each group from ``begin`` on, below and above zero; and whether all are finite.

    As signed integers the bits of positive numbers are the largest, as unsigned ones those of negative numbers.
    """
    largest = _U32(0)
    if kind == FP32:
        for g in range(groups):
            above, below, at = _I32(0), _U32(0), begin + g * group
            for j in range(group):
                bits = words[_U64(at + j)]
                above, below = max(above, _I32(bits)), max(below, _U32(bits))
            below = _U32(below & _U32(0x7FFFFFFF)) if below >= _U32(0x80000000) else _U32(0)
            extremes[2 * g] = _U32(below).view(np.float32)
            extremes[2 * g + 1] = _U32(above).view(np.float32)
            largest = max(largest, max(below, _U32(above)))
        return largest < _EXPONENT
    for g in range(groups):
        high, low, at = _I16(0), _U16(0), begin + g * group
        for j in range(group):
            short = shorts[_U64(at + j)]
            high, low = max(high, _I16(short)), max(low, _U16(short))
        low = _U16(low & _U16(0x7FFF)) if low >= _U16(0x8000) else _U16(0)
        extremes[2 * g] = _float(_U16(low)) if kind == BF16 else _half(_U16(low))
        extremes[2 * g + 1] = _float(_U16(high)) if kind == BF16 else _half(_U16(high))
        largest = max(largest, max(_U32(low), _U32(_U16(high))))
    return largest < (_U32(0x7F80) if kind == BF16 else _U32(0x7C00))


@_inline
def _affines(extremes, half, caps, kind, steps, shifts, shorts, words, at):
    """Each group's scale and zero point, the scales also as stored, from element ``at`` on."""
    for g in range(steps.size):
        steps[g], shifts[g] = _affine(extremes[2 * g], extremes[2 * g + 1], half, caps, kind)
    for g in range(steps.size):
        _store_scale(shorts, words, _U64(at + g), steps[g], kind)


@_inline
def _encode_affine(values, begin, groups, group, scales, zeros, out, to, code):
    """Values / their scale + their zero point, a byte each: int4 or int8, stored plus 8 or 128."""
    low, high, flip, mask = _bounds(code)
    for g in range(groups):
        scale, zero, first, at = scales[g], zeros[g], begin + g * group, to + g * group
        for j in range(group):
            ratio = _clamped(_F32(_F32(_float(values[_U64(first + j)]) / scale) + zero), low, high)
            out[_U64(at + j)] = _U8(_U32(_F32(ratio + _ROUND).view(np.uint32) ^ flip) & mask)


@_jit(types.void(_bytes, _int, _int, _int, _int, _floats))
def row_extremes(src, stride, kind, rows, cols, out):
    """Writes the extremes of each row, below and above zero, into float32 ``out``; NaN and Inf are the furthest."""
    shorts, words, _ = _views(src)
    extremes = np.empty(2, np.float32)
    for i in range(rows):
        _row_extremes(shorts, words, kind, i * stride, 1, cols, extremes)
        out[2 * i], out[2 * i + 1] = extremes[0], extremes[1]


@_jit(_int(_bytes, *[_int] * 6, _floats, _floats, _int, _bytes, _int, _bytes, _int, _int, _bytes, _int))
def quantise_affine(
    src,
    stride,
    kind,
    rows,
    cols,
    group,
    code,
    caps,
    given,
    given_stride,
    q,
    q_stride,
    scales,
    scale_stride,
    scale_kind,
    zeros,
    zero_stride,
):
    """Fills ``q``, ``scales`` and ``zeros``; the first row that holds NaN or Inf, or -1.

    ``given`` is empty, or how far each group of each row goes below and above zero. ``caps`` is
    :func:`.scales.affine_caps`.
    """
    shorts, words, floats = _views(src)
    scale_shorts, scale_words, _ = _views(scales)
    groups, half = cols // group, _F32(8.0) if code == INT4 else _F32(128.0)
    extremes = np.empty(2 * groups, np.float32)
    steps, shifts = np.empty(groups, np.float32), np.empty(groups, np.float32)
    wide = np.empty(cols if kind == FP16 else 0, np.float32)
    nibbles = _nibbles(cols, code)
    pairs = nibbles.view(np.uint16)
    out = nibbles if code == INT4 else q
    for i in range(rows):
        begin, to = i * stride, 0 if code == INT4 else i * q_stride
        finite = _row_extremes(shorts, words, kind, begin, groups, group, extremes)
        if given.size:
            finite &= _given(given, i * given_stride, extremes)
        if not finite:
            return i
        at = i * scale_stride
        if scale_kind == BF16:  # the same for each kind: see _scales
            _affines(extremes, half, caps, BF16, steps, shifts, scale_shorts, scale_words, at)
        elif scale_kind == FP16:
            _affines(extremes, half, caps, FP16, steps, shifts, scale_shorts, scale_words, at)
        else:
            _affines(extremes, half, caps, FP32, steps, shifts, scale_shorts, scale_words, at)
        for g in range(groups):
            zeros[i * zero_stride + g] = _U8(_I32(shifts[g]))
        if kind == BF16:
            _encode_affine(shorts, begin, groups, group, steps, shifts, out, to, code)
        elif kind == FP32:
            _encode_affine(floats, begin, groups, group, steps, shifts, out, to, code)
        else:
            _widen(shorts, floats, kind, begin, cols, wide)
            _encode_affine(wide, 0, groups, group, steps, shifts, out, to, code)
        _finish(nibbles, pairs, q, i * q_stride, cols, code)
    return -1
