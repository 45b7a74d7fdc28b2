"""Loops over bytes for NVFP4, MXFP4 and MXFP8, compiled by numba: what :mod:`.microscaling_fused` calls.

Each gives the same bits as its twin in :mod:`.microscaling_reference`. A row is taken in blocks that stay in the
first-level cache: widened to float32, then a pass each for the groups' maxima, their scales, the values, the packing.
What makes the passes fast is told in :mod:`.compiled`; besides:

- loops over values are flat: the scales are written out first, one for each value, and largest magnitudes are found by
  halving the block, pair by pair, so that nothing depends on how short a group is;
- e2m1 is rounded like e4m3, without a table: on the float32's bits from 1 on, by adding 2^22 (of unit 0.5) below;
- the search for a scale goes over a transposed block: a vector holds one value of each of several groups, and the
  squares of a group are added in the order of its columns.

Importing this module compiles every loop, or loads it from numba's cache: import it when it is needed.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
from __future__ import annotations

import numpy as np
from numba import types

from modelexport.quantization.kernels.compiled import (
    _BLOCK,
    _EXPONENT,
    _F32,
    _F64,
    _FP8_NORMAL_BITS,
    _I32,
    _MAGNITUDE,
    _U8,
    _U32,
    _U64,
    _ZERO,
    BF16,
    FP32,
    LANES,
    _add_squares,
    _bytes,
    _doubles,
    _fold,
    _fp8,
    _inline,
    _int,
    _jit,
    _pack,
    _views,
    _widen,
)
from modelexport.quantization.kernels.compiled_reading import _fp8_value, _narrow_bf16, _narrow_fp16, _unpack

NVFP4, MXFP4, MXFP8 = 0, 1, 2  # kinds of stored numbers
NV_GROUP, MX_GROUP = 16, 32  # values that share a scale
NV_ABOVE, NV_BELOW, MX_ABOVE, MX_BELOW = 6, 2, 1, 1  # scale bytes that a search tries around the largest magnitude's

_ONE_BIT, _QUIET = _U32(1), _U32(0x7FC00000)
_FP4_MAX_BITS, _FP4_SHIFT, _FP4_UNIT_BITS = _U32(0x40C00000), _F32(2.0**22), _U32(0x4A800000)  # 6
_FP4_NORMAL_BITS = _U32(0x3F800000)  # 1
_TO_NEXT = _U32(0x200000)  # added to a float32, carries mantissas from 1.75 on into the exponent
_EIGHTH = _U8(0x20)  # 0.125 as e4m3

_float = types.float32


@_inline
def _fp4(ratio):
    """The nearest e2m1 as its four bits, ties to even; the sign bit is set for what is below zero."""
    size = min(_U32(_F32(ratio).view(np.uint32) & _MAGNITUDE), _FP4_MAX_BITS)
    odd = _U32(_U32(size >> _U32(22)) & _ONE_BIT)
    normal = _U32(_U32(_U32(_U32(size + _U32(0x1FFFFF)) + odd) >> _U32(22)) - _U32(252))
    small = _U32(_F32(_U32(size).view(np.float32) + _FP4_SHIFT).view(np.uint32) - _FP4_UNIT_BITS)
    index = normal if size >= _FP4_NORMAL_BITS else small
    return _U32(index | (_U32(8) if ratio < _ZERO else _U32(0)))


@_inline
def _fp4_value(bits):
    """The float32 value of four bits; the sign of zero is kept."""
    index = _U32(bits & _U32(7))
    normal = _U32(_U32(index << _U32(22)) + _U32(0x3F000000))
    small = _U32(index * _U32(0x3F000000))  # 0 and 0.5
    sign = _U32(_U32(bits & _U32(8)) << _U32(28))
    return _U32((normal if index >= _U32(2) else small) | sign).view(np.float32)


@_inline
def _power(byte):
    """The value of an E8M0 byte: a power of two, or NaN."""
    bits = _U32(_U32(byte) << _U32(23))
    bits = _U32(0x400000) if byte == _U8(0) else bits
    return _U32(_QUIET if byte == _U8(255) else bits).view(np.float32)


@_inline
def _decode_scales(scales, begin, groups, code, factor, steps):
    """The factor of each group's values."""
    if code == NVFP4:
        for g in range(groups):
            steps[g] = _F32(_fp8_value(_U32(scales[_U64(begin + g)])) / factor)
    else:
        for g in range(groups):
            steps[g] = _power(scales[_U64(begin + g)])


@_inline
def _choose_scales(own, groups, code, factor, most, chosen):
    """Each group's scale byte by its largest magnitude; 0 too where an NVFP4 scale rounds to nothing."""
    if code == NVFP4:
        for g in range(groups):
            chosen[g] = _U8(_fp8(_F32(factor * _F32(own[g] / _F32(6.0)))))
    else:
        offset = _I32(2) if code == MXFP4 else _I32(8)
        for g in range(groups):
            above = _U32(_U32(_F32(own[g]).view(np.uint32) + _TO_NEXT) >> _U32(23))
            chosen[g] = _U8(min(max(_I32(_I32(above) - offset), _I32(0)), _I32(most)))


@_inline
def _halve(values, count, out):
    """The larger of each pair; ``out`` may be ``values``, since what is written has been read."""
    for j in range(count // 2):
        out[_U64(j)] = max(_U32(values[_U64(2 * j)]), _U32(values[_U64(2 * j + 1)]))


@_inline
def _amax(wide, count, group, one, other, own):
    """Largest magnitude of each group; whether all are finite. ``one`` and ``other`` are scratch."""
    for j in range(count):
        one[_U64(j)] = _U32(_F32(wide[_U64(j)]).view(np.uint32) & _MAGNITUDE)
    left = count
    for _ in range(2):
        _halve(one, left, other)
        _halve(other, left // 2, one)
        left = left // 4
    if group == MX_GROUP:
        _halve(one, left, other)
        left = left // 2
        for g in range(left):
            one[_U64(g)] = other[_U64(g)]
    largest = _U32(0)
    for g in range(left):
        own[_U64(g)] = _U32(one[_U64(g)]).view(np.float32)
        largest = max(largest, _U32(one[_U64(g)]))
    return largest < _EXPONENT


@_inline
def _spread(steps, groups, code, spread):
    """Writes each group's scale to each of its values: the loops over values then are flat."""
    if code == NVFP4:
        for g in range(groups):
            for j in range(NV_GROUP):
                spread[_U64(g * NV_GROUP + j)] = steps[_U64(g)]
        return
    for g in range(2 * groups):  # by halves of a group: so short a loop is unrolled and becomes one vector
        for j in range(NV_GROUP):
            spread[_U64(g * NV_GROUP + j)] = steps[_U64(g // 2)]


@_inline
def _transpose(wide, groups, group, turned):
    """Magnitudes, those of a column of every group beside each other."""
    for g in range(groups):
        for j in range(group):
            turned[_U64(j * groups + g)] = abs(wide[_U64(g * group + j)])


@_inline
def _rounded(size, least, shift):
    """A magnitude to a multiple of its exponent's unit, ties to even: by adding 2^22 or 2^20 times its exponent."""
    exponent = max(_U32(_F32(size).view(np.uint32) & _EXPONENT), least)
    much = _U32(exponent + shift).view(np.float32)
    return _F32(_F32(size + much) - much)


@_inline
def _errors(turned, groups, group, code, steps, errors):
    """Each group's squared error with that scale, in float64, added in the order of the columns."""
    for g in range(groups):
        errors[g] = 0.0
    for j in range(group):
        first = j * groups
        if code == MXFP8:
            for g in range(groups):
                value, step = turned[_U64(first + g)], steps[_U64(g)]
                rounded = _rounded(min(_F32(value / step), _F32(448.0)), _FP8_NORMAL_BITS, _U32(20 << 23))
                error = _F64(_F32(value - _F32(rounded * step)))
                errors[_U64(g)] += error * error
        else:
            for g in range(groups):
                value, step = turned[_U64(first + g)], steps[_U64(g)]
                rounded = _rounded(min(_F32(value / step), _F32(6.0)), _FP4_NORMAL_BITS, _U32(22 << 23))
                error = _F64(_F32(value - _F32(rounded * step)))
                errors[_U64(g)] += error * error


@_inline
def _search(wide, groups, group, code, factor, most, own, chosen, steps, turned, tried, errors, best):
    """The byte with the smallest squared error within reach of ``chosen``, into ``chosen``; of equals the largest."""
    above, below, least = (NV_ABOVE, NV_BELOW, 1) if code == NVFP4 else (MX_ABOVE, MX_BELOW, 0)
    _transpose(wide, groups, group, turned)
    start = chosen[:groups].copy()
    for g in range(groups):
        best[g] = np.inf
    for step in range(above, -below - 1, -1):
        for g in range(groups):
            tried[g] = _U8(min(max(_I32(_I32(start[g]) + _I32(step)), _I32(least)), _I32(most)))
        _decode_scales(tried, 0, groups, code, factor, steps)
        _errors(turned, groups, group, code, steps, errors)
        for g in range(groups):
            better = errors[g] < best[g]
            best[g] = errors[g] if better else best[g]
            chosen[g] = tried[g] if better else chosen[g]
    for g in range(groups):
        chosen[g] = chosen[g] if own[g] > _ZERO else start[g]


@_jit(_int(_bytes, *[_int] * 5, _float, _int, _int, _bytes, _int, _bytes, _int))
def quantise(src, stride, kind, rows, cols, code, factor, most, search, q, q_stride, scales, scale_stride):
    """Fills ``q`` and ``scales``; the first row that holds NaN or Inf, or -1.

    ``factor`` is NVFP4's global scale, ``most`` the largest scale byte that may be chosen.
    """
    shorts, _, floats = _views(src)
    group = NV_GROUP if code == NVFP4 else MX_GROUP
    wide, spread = np.empty(_BLOCK, np.float32), np.empty(_BLOCK, np.float32)
    one, other = np.empty(_BLOCK, np.uint32), np.empty(_BLOCK // 2, np.uint32)
    own, steps = np.empty(_BLOCK // NV_GROUP, np.float32), np.empty(_BLOCK // NV_GROUP, np.float32)
    chosen, tried = np.empty(_BLOCK // NV_GROUP, np.uint8), np.empty(_BLOCK // NV_GROUP, np.uint8)
    errors, best = np.empty(_BLOCK // NV_GROUP, np.float64), np.empty(_BLOCK // NV_GROUP, np.float64)
    nibbles = np.empty(_BLOCK, np.uint8)
    pairs = nibbles.view(np.uint16)
    for i in range(rows):
        for start in range(0, cols, _BLOCK):
            count = min(cols - start, _BLOCK)
            groups = count // group
            _widen(shorts, floats, kind, i * stride + start, count, wide)
            if not _amax(wide, count, group, one, other, own):
                return i
            _choose_scales(own, groups, code, factor, most, chosen)
            if search:
                _search(wide, groups, group, code, factor, most, own, chosen, steps, spread, tried, errors, best)
            at = i * scale_stride + start // group
            for g in range(groups):
                byte = _EIGHTH if code == NVFP4 and chosen[g] == _U8(0) else chosen[g]
                chosen[g] = byte
                scales[_U64(at + g)] = byte
            _decode_scales(chosen, 0, groups, code, factor, steps)
            _spread(steps, groups, code, spread)
            if code == MXFP8:
                to = i * q_stride + start
                for j in range(count):
                    q[_U64(to + j)] = _U8(_fp8(_F32(wide[_U64(j)] / spread[_U64(j)])))
                continue
            for j in range(count):
                nibbles[_U64(j)] = _U8(_fp4(_F32(wide[_U64(j)] / spread[_U64(j)])))
            to = i * q_stride + start // 2
            _pack(pairs, q, to, count // 2)
    return -1


@_inline
def _decode_block(q, begin, count, code, steps, spread, nibbles, pairs, out, to):
    """float32 values of ``count`` columns that are stored from byte ``begin`` on."""
    if code == MXFP8:
        _spread(steps, count // MX_GROUP, code, spread)
        for j in range(count):
            out[_U64(to + j)] = _F32(_fp8_value(_U32(q[_U64(begin + j)])) * spread[_U64(j)])
        return
    _spread(steps, count // (NV_GROUP if code == NVFP4 else MX_GROUP), code, spread)
    _unpack(q, begin, count // 2, pairs)
    for j in range(count):
        out[_U64(to + j)] = _F32(_fp4_value(_U32(nibbles[_U64(j)])) * spread[_U64(j)])


@_jit(types.void(_bytes, *[_int] * 4, _float, _bytes, _int, _bytes, _int, _int))
def dequantise(q, q_stride, rows, cols, code, factor, scales, scale_stride, out, out_stride, kind):
    """Stored rows times their scales into the bytes of ``out``."""
    shorts, _, floats = _views(out)
    group, per_byte = (NV_GROUP if code == NVFP4 else MX_GROUP), (1 if code == MXFP8 else 2)
    nibbles, wide = np.empty(_BLOCK, np.uint8), np.empty(_BLOCK, np.float32)
    pairs = nibbles.view(np.uint16)
    steps, spread = np.empty(_BLOCK // NV_GROUP, np.float32), np.empty(_BLOCK, np.float32)
    for i in range(rows):
        for start in range(0, cols, _BLOCK):
            count, to = min(cols - start, _BLOCK), i * out_stride + start
            _decode_scales(scales, i * scale_stride + start // group, count // group, code, factor, steps)
            begin = i * q_stride + start // per_byte
            if kind == FP32:
                _decode_block(q, begin, count, code, steps, spread, nibbles, pairs, floats, to)
                continue
            _decode_block(q, begin, count, code, steps, spread, nibbles, pairs, wide, 0)
            if kind == BF16:
                _narrow_bf16(wide, count, shorts, to)
            else:
                _narrow_fp16(wide, count, shorts, to)


@_jit(types.void(_bytes, *[_int] * 5, _float, _bytes, _int, _bytes, _int, _doubles))
def squared_error(src, stride, kind, rows, cols, code, factor, q, q_stride, scales, scale_stride, out):
    """Per row sum((w - decoded)^2) and sum(w^2)."""
    shorts, _, floats = _views(src)
    group, per_byte = (NV_GROUP if code == NVFP4 else MX_GROUP), (1 if code == MXFP8 else 2)
    wide, decoded = np.empty(_BLOCK, np.float32), np.empty(_BLOCK, np.float32)
    wide_lanes, decoded_lanes = wide.reshape(_BLOCK // LANES, LANES), decoded.reshape(_BLOCK // LANES, LANES)
    nibbles, steps = np.empty(_BLOCK, np.uint8), np.empty(_BLOCK // NV_GROUP, np.float32)
    pairs, spread = nibbles.view(np.uint16), np.empty(_BLOCK, np.float32)
    errors, squares = np.empty(LANES, np.float64), np.empty(LANES, np.float64)
    for i in range(rows):
        for lane in range(LANES):
            errors[lane] = squares[lane] = 0.0
        for start in range(0, cols, _BLOCK):
            count = min(cols - start, _BLOCK)
            blocks = (count + LANES - 1) // LANES
            _widen(shorts, floats, kind, i * stride + start, count, wide)
            _decode_scales(scales, i * scale_stride + start // group, count // group, code, factor, steps)
            _decode_block(q, i * q_stride + start // per_byte, count, code, steps, spread, nibbles, pairs, decoded, 0)
            for j in range(count, blocks * LANES):
                wide[j] = decoded[j] = _ZERO
            _add_squares(wide_lanes, decoded_lanes, blocks, errors, squares)
        out[2 * i] = _fold(errors)
        out[2 * i + 1] = _fold(squares)
