"""The loop for e4m3 in blocks that share a scale, compiled by numba when a format first needs it.

See :mod:`.compiled`. A block is read twice, the second time from the first-level cache.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
from __future__ import annotations

import numpy as np
from numba import types

from modelexport.quantization.kernels.compiled import (
    _ZERO,
    BF16,
    FP8,
    FP32,
    _amax,
    _bytes,
    _encode,
    _floats,
    _int,
    _jit,
    _scales,
    _views,
    _widen,
)


@_jit(_int(_bytes, *[_int] * 5, *[types.float32] * 2, _floats, _bytes, _int, _bytes, _int, _int))
def quantise_blocks(
    src, stride, kind, rows, cols, side, limit, cap, given, q, q_stride, scales, scale_stride, scale_kind
):
    """Fills ``q`` and ``scales``; the first row that holds NaN or Inf, or -1.

    ``given`` is empty, or each block's largest magnitude.
    """
    shorts, words, floats = _views(src)
    scale_shorts, scale_words, _ = _views(scales)
    own, top, step = np.empty(1, np.float32), np.empty(1, np.float32), np.empty(1, np.float32)
    wide = np.empty(side, np.float32)
    across = (cols + side - 1) // side
    for number in range((rows + side - 1) // side):
        first, bad = number * side, rows
        height = min(side, rows - first)
        for block in range(across):
            left = block * side
            width = min(side, cols - left)
            top[0] = _ZERO
            for i in range(first, first + height):
                if not _amax(shorts, words, kind, i * stride + left, 1, width, own):
                    bad = min(bad, i)
                top[0] = max(top[0], own[0])
            if given.size:
                top[0] = given[number * across + block]
                if not top[0] < np.inf:
                    bad = min(bad, first)
            if bad < rows:
                continue
            _scales(top, limit, cap, scale_kind, step, scale_shorts, scale_words, number * scale_stride + block)
            for i in range(first, first + height):
                begin, to = i * stride + left, i * q_stride + left
                if kind == BF16:
                    _encode(shorts, begin, 1, width, step, q, to, FP8)
                elif kind == FP32:
                    _encode(floats, begin, 1, width, step, q, to, FP8)
                else:
                    _widen(shorts, floats, kind, begin, width, wide)
                    _encode(wide, 0, 1, width, step, q, to, FP8)
        if bad < rows:
            return bad
    return -1
