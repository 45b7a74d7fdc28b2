"""The loop for e4m3 in blocks that share a scale, compiled by numba when a format first needs it.

See :mod:`.compiled`. The rows of a block are read twice, the second time from the cache.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
from __future__ import annotations

import numpy as np
from numba import types

from modelexport.quantization.kernels.compiled import (
    _EXPONENT,
    _MAGNITUDE,
    _U16,
    _U32,
    _U64,
    BF16,
    FP8,
    FP16,
    FP32,
    _amax,
    _bytes,
    _encode,
    _float,
    _floats,
    _half,
    _inline,
    _int,
    _jit,
    _scales,
    _views,
    _widen,
)


@_inline
def _column_tops(shorts, words, stride, kind, first, height, cols, tops):
    """The bits of each column's largest magnitude in so many rows."""
    for j in range(cols):
        tops[j] = _U32(0)
    for i in range(first, first + height):
        begin = i * stride
        if kind == FP32:
            for j in range(cols):
                tops[j] = max(tops[j], _U32(words[_U64(begin + j)] & _MAGNITUDE))
        else:
            for j in range(cols):
                tops[j] = max(tops[j], _U32(shorts[_U64(begin + j)] & _U16(0x7FFF)))


@_inline
def _block_tops(tops, kind, side, own):
    """The largest magnitude of each ``side`` columns, as float32; whether all are finite."""
    largest = _U32(0)
    for g in range(own.size):
        top = _U32(0)
        for j in range(g * side, min(tops.size, (g + 1) * side)):
            top = max(top, tops[j])
        largest = max(largest, top)
        if kind == FP32:
            own[g] = _U32(top).view(np.float32)
        else:
            own[g] = _float(_U16(top)) if kind == BF16 else _half(_U16(top))
    return largest < (_EXPONENT if kind == FP32 else _U32(0x7F80) if kind == BF16 else _U32(0x7C00))


@_inline
def _first_bad(shorts, words, stride, kind, first, height, cols, own):
    """The first row with NaN or Inf; ``first`` if there is none."""
    for i in range(first, first + height):
        if not _amax(shorts, words, kind, i * stride, 1, cols, own):
            return i
    return first


@_inline
def _encode_row(values, begin, cols, side, steps, last, out, to):
    """e4m3, with one scale for every ``side`` columns, ``last`` for what is left."""
    groups = cols // side
    _encode(values, begin, groups, side, steps, out, to, FP8)
    if groups < steps.size:
        last[0] = steps[groups]
        _encode(values, begin + groups * side, 1, cols - groups * side, last, out, to + groups * side, FP8)


@_jit(_int(_bytes, *[_int] * 5, *[types.float32] * 2, _floats, _bytes, _int, _bytes, _int, _int))
def quantise_blocks(
    src, stride, kind, rows, cols, side, limit, cap, given, q, q_stride, scales, scale_stride, scale_kind
):
    """Fills ``q`` and ``scales``; the first row that holds NaN or Inf, or -1.

    ``given`` is empty, or each block's largest magnitude.
    """
    shorts, words, floats = _views(src)
    scale_shorts, scale_words, _ = _views(scales)
    across = (cols + side - 1) // side
    tops, own, steps = np.empty(cols, np.uint32), np.empty(across, np.float32), np.empty(across, np.float32)
    last, wide = np.empty(1, np.float32), np.empty(cols if kind == FP16 else 0, np.float32)
    for number in range((rows + side - 1) // side):
        first = number * side
        height = min(side, rows - first)
        _column_tops(shorts, words, stride, kind, first, height, cols, tops)
        finite = _block_tops(tops, kind, side, own)
        if finite and given.size:
            for g in range(across):
                own[g] = given[number * across + g]
                finite &= own[g] < np.inf
        if not finite:
            return _first_bad(shorts, words, stride, kind, first, height, cols, last)
        _scales(own, limit, cap, scale_kind, steps, scale_shorts, scale_words, number * scale_stride)
        for i in range(first, first + height):
            begin, to = i * stride, i * q_stride
            if kind == BF16:
                _encode_row(shorts, begin, cols, side, steps, last, q, to)
            elif kind == FP32:
                _encode_row(floats, begin, cols, side, steps, last, q, to)
            else:
                _widen(shorts, floats, kind, begin, cols, wide)
                _encode_row(wide, 0, cols, side, steps, last, q, to)
    return -1
