"""The loop that weighs a block's scales by the products of its inputs, compiled by numba: what :mod:`.products_fused`
calls.

The same bits as :mod:`.products_reference`: see :mod:`.compiled` for what makes such loops fast. From one scale to the
next, few of a block's integers change: what these are multiplied to is brought up to date by the rows of the products
that belong to them, a tenth of the work of a matrix product for every scale.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
from __future__ import annotations

import numpy as np
from numba import types

from modelexport.quantization.kernels.compiled import (
    _F32,
    _F64,
    _ROUND,
    _U8,
    _U64,
    BF16,
    FP16,
    FP32,
    INT4,
    _bounds,
    _clamped,
    _floats,
    _inline,
    _int,
    _jit,
)
from modelexport.quantization.kernels.compiled_search import SEARCH_LANES, TRIED, _candidates, _halved


@_inline
def _integers(wide, begin, group, scale, zero, shifted, low, high, out):
    """The integers nearest to w / scale, less their zero point where they are ``shifted`` by one."""
    if shifted:
        for j in range(group):
            ratio = _clamped(_F32(_F32(wide[_U64(begin + j)] / scale) + zero), low, high)
            out[j] = _F32(_F32(_F32(ratio + _ROUND) - _ROUND) - zero)
    else:
        for j in range(group):
            ratio = _clamped(_F32(wide[_U64(begin + j)] / scale), low, high)
            out[j] = _F32(_F32(ratio + _ROUND) - _ROUND)


@_inline
def _update(products, at, group, before, now, changed, moved):
    """Adds to ``moved`` what the integers that have changed since ``before`` add to the products."""
    count = 0
    for i in range(group):
        changed[count] = i
        count += 1 if now[i] != before[i] else 0
    for c in range(count):
        i = changed[c]
        by, row = _F32(now[i] - before[i]), at + i * group
        before[i] = now[i]
        for j in range(group):
            moved[j] = _F32(moved[j] + _F32(by * products[_U64(row + j)]))


@_inline
def _error(wide, begin, aimed, place, group, scale, now, moved, lanes):
    """(s n - w) G (s n - w)^T of a block, given n G (``moved``) and w G (``aimed``)."""
    for lane in range(SEARCH_LANES):
        lanes[lane] = 0.0
    whole = group // SEARCH_LANES * SEARCH_LANES
    for start in range(0, whole, SEARCH_LANES):
        for lane in range(SEARCH_LANES):
            j = start + lane
            apart = _F32(_F32(now[j] * scale) - wide[_U64(begin + j)])
            other = _F32(_F32(moved[j] * scale) - aimed[_U64(place + j)])
            lanes[lane] += _F64(apart) * _F64(other)
    for j in range(whole, group):
        apart = _F32(_F32(now[j] * scale) - wide[_U64(begin + j)])
        other = _F32(_F32(moved[j] * scale) - aimed[_U64(place + j)])
        lanes[j - whole] += _F64(apart) * _F64(other)
    return _halved(lanes)


_arguments = (_floats, *[_int] * 4, *[types.float32] * 2, _floats, _floats, _int, _floats, _int, *[_floats] * 3)


@_jit(types.void(*_arguments, types.uint8[::1]))
def choose(
    wide, rows, cols, group, code, limit, cap, caps, amax, each, shrinks, scale_kind, products, moved, aimed, out
):
    """See the reference; ``amax`` has ``each`` values for a block: 1, or 2 with zero points."""
    blocks = cols // group
    steps, zeros = np.empty(TRIED, np.float32), np.zeros(TRIED, np.float32)
    before, now, own = np.empty(group, np.float32), np.empty(group, np.float32), np.empty(group, np.float32)
    changed = np.empty(group + 1, np.int64)
    lanes = np.empty(SEARCH_LANES, np.float64)
    low, high, _, _ = _bounds(code)
    half = _F32(8.0) if code == INT4 else _F32(128.0)
    for g in range(blocks):  # one after the other, so that a block's products stay in the cache
        for i in range(rows):
            at = (i * blocks + g) * each
            first, second = amax[at], amax[at + each - 1]
            if scale_kind == BF16:  # the same for each kind: see compiled_search
                _candidates(first, second, shrinks, each, half, limit, cap, caps, BF16, steps, zeros)
            elif scale_kind == FP16:
                _candidates(first, second, shrinks, each, half, limit, cap, caps, FP16, steps, zeros)
            else:
                _candidates(first, second, shrinks, each, half, limit, cap, caps, FP32, steps, zeros)
            begin, place = i * cols + g * group, (g * rows + i) * group
            for j in range(group):
                own[j] = moved[_U64(place + j)]
            _integers(wide, begin, group, steps[0], zeros[0], each == 2, low, high, before)
            for j in range(group):
                now[j] = before[j]
            best, least = 0, _error(wide, begin, aimed, place, group, steps[0], now, own, lanes)
            for k in range(1, TRIED):
                _integers(wide, begin, group, steps[k], zeros[k], each == 2, low, high, now)
                _update(products, g * group * group, group, before, now, changed, own)
                error = _error(wide, begin, aimed, place, group, steps[k], now, own, lanes)
                if error < least:
                    best, least = k, error
            out[i * blocks + g] = _U8(best)
