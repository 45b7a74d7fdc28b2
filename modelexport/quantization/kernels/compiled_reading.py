"""Loops that read stored weights back, compiled by numba; see :mod:`.compiled`."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
from __future__ import annotations

import numpy as np
from numba import types

from modelexport.quantization.kernels.compiled import (
    _BLOCK,
    _EXPONENT,
    _F32,
    _I8,
    _I32,
    _MAGNITUDE,
    _U8,
    _U16,
    _U32,
    _U64,
    _ZERO,
    BF16,
    FP8,
    FP16,
    INT4,
    INT8,
    LANES,
    PLAIN,
    _add_squares,
    _bytes,
    _doubles,
    _fold,
    _inline,
    _int,
    _jit,
    _views,
    _widen,
)


@_inline
def _fp8_value(bits):
    """The float32 value of an e4m3's byte."""
    size = _U32(bits & _U32(0x7F))
    normal = _U32(_U32(size << _U32(20)) + _U32(120 << 23))
    small = _F32(_F32(_I32(size)) * _F32(2.0**-9)).view(np.uint32)
    wide = normal if size >= _U32(8) else small
    wide = _U32(0x7FC00000) if size == _U32(0x7F) else wide
    return _U32(wide | _U32(_U32(bits & _U32(0x80)) << _U32(24))).view(np.float32)


@_inline
def _unpack(packed, at, count, pairs):
    """``count`` bytes 0xBA become little-endian pairs of nibble bytes, each 0x0B0A."""
    for j in range(count):
        byte = _U16(packed[_U64(at + j)])
        pairs[j] = _U16(_U16(byte & _U16(15)) | _U16(_U16(byte & _U16(0xF0)) << _U16(4)))


@_inline
def _decode(codes, begin, count, group, scales, offsets, first, out, to, code):
    """Bytes times the scales from ``first`` on, as float32; of integers the offsets are subtracted before."""
    flip = _U8(0x80) if code == INT8 else _U8(0)
    for g in range((count + group - 1) // group):
        scale, offset = scales[first + g], offsets[first + g]
        source, at = begin + g * group, to + g * group
        length = min(group, count - g * group)
        if code == FP8:
            for j in range(length):
                out[_U64(at + j)] = _F32(_fp8_value(_U32(codes[_U64(source + j)])) * scale)
        else:
            for j in range(length):
                value = _I32(_I32(_U8(codes[_U64(source + j)] ^ flip)) - offset)
                out[_U64(at + j)] = _F32(_F32(value) * scale)


@_inline
def _decode_block(q, begin, start, count, group, code, steps, offsets, nibbles, pairs, out, to):
    """float32 values of ``count`` columns from ``start`` on, of the row stored from byte ``begin`` on."""
    if code == INT4:
        _unpack(q, begin + start // 2, (count + 1) // 2, pairs)
        _decode(nibbles, 0, count, min(group, _BLOCK), steps, offsets, start // group, out, to, code)
    else:
        _decode(q, begin + start, count, min(group, _BLOCK), steps, offsets, start // group, out, to, code)


@_inline
def _offsets(zeros, begin, code, offsets):
    """The numbers to subtract from each group's codes: the zero point, and the offset by which they are stored."""
    bias = _I32(8) if code == INT4 else _I32(128)
    for g in range(offsets.size):
        offsets[g] = bias
    if zeros.size:
        for g in range(offsets.size):
            offsets[g] += _I32(_I8(zeros[begin + g]))


@_jit(types.void(_bytes, *[_int] * 6, _bytes, _int, _bytes, _int, _int, _bytes, _int, _doubles))
def squared_error(
    src, stride, kind, rows, cols, group, code, q, q_stride, scales, scale_stride, scale_kind, zeros, zero_stride, out
):
    """Per row sum((w - decoded)^2) and sum(w^2); ``q_stride`` is in values where ``code`` is PLAIN."""
    shorts, _, floats = _views(src)
    stored_shorts, _, stored_floats = _views(q)
    scale_shorts, _, scale_floats = _views(scales)
    wide = np.empty(_BLOCK, np.float32)
    decoded = np.empty(_BLOCK, np.float32)
    wide_lanes = wide.reshape(_BLOCK // LANES, LANES)
    decoded_lanes = decoded.reshape(_BLOCK // LANES, LANES)
    nibbles = np.empty(_BLOCK, np.uint8)
    pairs = nibbles.view(np.uint16)
    steps = np.empty(0 if code == PLAIN else (cols + group - 1) // group, np.float32)
    offsets = np.empty(steps.size, np.int32)
    errors = np.empty(LANES, np.float64)
    squares = np.empty(LANES, np.float64)
    for i in range(rows):
        for lane in range(LANES):
            errors[lane] = squares[lane] = 0.0
        if code != PLAIN:
            _widen(scale_shorts, scale_floats, scale_kind, i * scale_stride, steps.size, steps)
            _offsets(zeros, i * zero_stride, code, offsets)
        for start in range(0, cols, _BLOCK):
            count = min(cols - start, _BLOCK)
            _widen(shorts, floats, kind, i * stride + start, count, wide)
            if code == PLAIN:
                _widen(stored_shorts, stored_floats, kind, i * q_stride + start, count, decoded)
            else:
                _decode_block(q, i * q_stride, start, count, group, code, steps, offsets, nibbles, pairs, decoded, 0)
            blocks = (count + LANES - 1) // LANES
            for j in range(count, blocks * LANES):
                wide[j] = _ZERO
                decoded[j] = _ZERO
            _add_squares(wide_lanes, decoded_lanes, blocks, errors, squares)
        out[2 * i] = _fold(errors)
        out[2 * i + 1] = _fold(squares)


@_inline
def _narrow_bf16(wide, count, shorts, at):
    """float32 to bfloat16, half to even."""
    for j in range(count):
        bits = _F32(wide[j]).view(np.uint32)
        odd = _U32(_U32(bits >> _U32(16)) & _U32(1))
        short = _U32(_U32(_U32(bits + _U32(0x7FFF)) + odd) >> _U32(16))
        shorts[_U64(at + j)] = _U16(0x7FC0) if _U32(bits & _MAGNITUDE) > _EXPONENT else _U16(short)


@_inline
def _narrow_fp16(wide, count, shorts, at):
    """float32 to float16, half to even; below 2^-14 in units of 2^-24, those of float32 from 0.5 on."""
    for j in range(count):
        bits = _F32(wide[j]).view(np.uint32)
        size = _U32(bits & _MAGNITUDE)
        odd = _U32(_U32(size >> _U32(13)) & _U32(1))
        short = _U32(_U32(_U32(_U32(size + _U32(0xFFF)) + odd) >> _U32(13)) - _U32(112 << 10))
        short = min(short, _U32(0x7C00)) if size < _EXPONENT else _U32(0x7C00)
        small = _U32(_F32(_U32(size).view(np.float32) + _F32(0.5)).view(np.uint32) - _U32(0x3F000000))
        short = small if size < _U32(0x38800000) else short
        short = _U32(0x7E00) if size > _EXPONENT else short
        shorts[_U64(at + j)] = _U16(short | _U32(_U32(bits >> _U32(16)) & _U32(0x8000)))


@_jit(types.void(_bytes, *[_int] * 5, _bytes, _int, _int, _bytes, _int, _bytes, _int, _int))
def dequantise(
    q, q_stride, rows, cols, group, code, scales, scale_stride, scale_kind, zeros, zero_stride, out, out_stride, kind
):
    """Stored rows, less their zero points, times their scales (as float32), into the bytes of ``out``."""
    scale_shorts, _, scale_floats = _views(scales)
    shorts, _, floats = _views(out)
    nibbles = np.empty(_BLOCK, np.uint8)
    pairs = nibbles.view(np.uint16)
    wide = np.empty(_BLOCK, np.float32)
    steps = np.empty((cols + group - 1) // group, np.float32)
    offsets = np.empty(steps.size, np.int32)
    for i in range(rows):
        _widen(scale_shorts, scale_floats, scale_kind, i * scale_stride, steps.size, steps)
        _offsets(zeros, i * zero_stride, code, offsets)
        for start in range(0, cols, _BLOCK):
            count, to = min(cols - start, _BLOCK), i * out_stride + start
            _decode_block(q, i * q_stride, start, count, group, code, steps, offsets, nibbles, pairs, wide, 0)
            if kind == BF16:
                _narrow_bf16(wide, count, shorts, to)
            elif kind == FP16:
                _narrow_fp16(wide, count, shorts, to)
            else:
                for j in range(count):
                    floats[_U64(to + j)] = wide[j]
