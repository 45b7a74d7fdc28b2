"""Loops over bytes, compiled by numba: what :mod:`.fused` calls. One pass over rows that stay in the cache.

Each gives the same bits as its twin in :mod:`.reference`. What makes the loops fast:

- a bfloat16 is widened by a shift into the upper half of a float32; a float16 by rebuilding its exponent;
- magnitudes are compared as integers, so NaN and Inf are found by the search for the maximum;
- adding 1.5 * 2^23 to a float32 rounds it to an integer (half to even) that then stands in its low bits;
- e4m3 is rounded on the float32's bits where it is normal, by adding 2^14 (of unit 2^-9) below;
- the inner loops run over a dim of known size with plain indices, which LLVM turns into vector instructions;
- no fastmath: divisions are true divisions, denormals stay, sums keep their order.

A tensor arrives as its bytes (from the first element to the last), the distance of its rows in bytes, and a kind.
All of it is in this one file, because numba's cache watches only the file of the kernel itself for changes.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import overload

_F32, _F64, _U32, _I32, _U16, _I8, _U8 = (
    np.float32,
    np.float64,
    np.uint32,
    np.int32,
    np.uint16,
    np.int8,
    np.uint8,
)

BF16, FP16, FP32 = 0, 1, 2
"""Kinds of floating-point values."""

INT8, FP8, INT4, PLAIN = 0, 1, 2, 3
"""Codes of stored weights: int8, e4m3, eight nibbles an int32, and not quantised."""

LANES = 128
"""Partial sums per row in :func:`squared_error`, the same as the reference's."""

_BLOCK = 2048
"""Columns decoded at a time, 8 KB of float32 (a multiple of LANES and of every group size)."""

_ROUND = _F32(1.5 * 2**23)
_ONE, _ZERO = _F32(1.0), _F32(0.0)
_SMALLEST_NORMAL = _F32(2.0**-126)
_EXPONENT = _U32(0x7F800000)
_MAGNITUDE = _U32(0x7FFFFFFF)
_FP8_MAX_BITS = _U32(0x43E00000)  # 448.0
_FP8_NORMAL_BITS = _U32(0x3C800000)  # 2^-6, the smallest normal e4m3
_FP8_UNIT_SHIFT = _F32(2.0**14)
_FP8_UNIT_BITS = _U32(0x46800000)  # 2^14


def _jit(signature: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile now, for this one signature; without the disk cache where none can be written."""

    def compiled(function: Callable[..., Any]) -> Any:
        options = {"nogil": True, "error_model": "numpy"}
        try:
            return njit(signature, cache=True, **options)(function)
        except (OSError, RuntimeError, EOFError):  # no directory for a cache, a full disk, a torn cache file
            return njit(signature, **options)(function)

    return compiled


_inline = njit(nogil=True, error_model="numpy")
_bytes = types.uint8[::1]
_floats = types.float32[::1]
_int = types.intp


@_inline
def _half(bits):
    """float16 bits to float32; denormals are made from their integer: no float32 denormal is touched."""
    magnitude = _U32(bits) & _U32(0x7FFF)
    sign = _U32(_U32(bits) & _U32(0x8000)) << _U32(16)
    wide = _U32(magnitude << _U32(13)) + _U32(0x38000000)
    if magnitude >= _U32(0x7C00):
        wide = _U32(magnitude << _U32(13)) | _EXPONENT
    small = _F32(_F32(_I32(magnitude)) * _F32(2.0**-24))
    if magnitude < _U32(0x400):
        wide = small.view(np.uint32)
    return _U32(_U32(wide) | _U32(sign)).view(np.float32)


def _float(value):
    """A bfloat16's bits, or a float32 itself, as float32 (what it does is said by its overload, below)."""
    raise NotImplementedError("only for compiled code")


@overload(_float)
def _float_of(value):
    if value == types.uint16:
        return lambda value: _U32(_U32(value) << _U32(16)).view(np.float32)
    return lambda value: value


@_inline
def _widen(raw, kind, wide):
    """The values in ``raw`` bytes as float32 in ``wide``."""
    if kind == BF16:
        shorts = raw.view(np.uint16)
        for j in range(shorts.size):
            wide[j] = _U32(_U32(shorts[j]) << _U32(16)).view(np.float32)
    elif kind == FP16:
        shorts = raw.view(np.uint16)
        for j in range(shorts.size):
            wide[j] = _half(shorts[j])
    else:
        words = raw.view(np.float32)
        for j in range(words.size):
            wide[j] = words[j]


@_inline
def _top_short(shorts):
    top = _U16(0)
    for j in range(shorts.size):
        top = max(top, _U16(shorts[j] & _U16(0x7FFF)))
    return top


@_inline
def _largest(raw, kind):
    """Largest magnitude among the values in ``raw`` bytes, as float32."""
    if kind == BF16:
        return _U32(_U32(_top_short(raw.view(np.uint16))) << _U32(16)).view(np.float32)
    if kind == FP16:
        return _half(_top_short(raw.view(np.uint16)))
    top = _U32(0)
    words = raw.view(np.uint32)
    for j in range(words.size):
        top = max(top, _U32(words[j] & _MAGNITUDE))
    return _U32(top).view(np.float32)


@_inline
def _group_amax(shorts, amax):
    """Largest bfloat16 magnitude of each group (``[groups, group]``), as float32."""
    for g in range(shorts.shape[0]):
        top = _U16(0)
        for j in range(shorts.shape[1]):
            top = max(top, _U16(shorts[g, j] & _U16(0x7FFF)))
        amax[g] = _U32(_U32(top) << _U32(16)).view(np.float32)


@_inline
def _group_amax_wide(words, amax):
    """Largest float32 magnitude of each group (``[groups, group]`` as bits)."""
    for g in range(words.shape[0]):
        top = _U32(0)
        for j in range(words.shape[1]):
            top = max(top, _U32(words[g, j] & _MAGNITUDE))
        amax[g] = _U32(top).view(np.float32)


@_inline
def _rounded(bits, drop):
    """float32 bits rounded (half to even) to a multiple of ``2**drop``."""
    bits = _U32(bits)
    unit = _U32(_U32(1) << _U32(drop))
    odd = _U32(_U32(bits >> _U32(drop)) & _U32(1))
    return _U32(_U32(bits + _U32(_U32(unit >> _U32(1)) - _U32(1))) + odd) & _U32(~_U32(unit - _U32(1)))


@_inline
def _scale_of(amax, limit, kind):
    """amax / limit as it will be stored (bf16, fp16 or float32), back in float32."""
    if amax == _ZERO:
        return _ONE
    scale = _F32(amax / limit)
    if kind == FP16:
        if scale < _F32(2.0**-14):  # a float16 denormal: units of 2^-24, those of float32 in [0.5, 1)
            scale = _F32(_F32(scale + _F32(0.5)) - _F32(0.5))
            return max(scale, _F32(2.0**-24))
        scale = _U32(_rounded(scale.view(np.uint32), 13)).view(np.float32)
        return min(scale, _F32(65504.0))
    if kind == BF16:
        scale = _U32(_rounded(scale.view(np.uint32), 16)).view(np.float32)
        scale = min(scale, _U32(0x7F7F0000).view(np.float32))
    return max(scale, _SMALLEST_NORMAL)


@_inline
def _store_scale(raw, at, scale, kind):
    """Writes a scale that :func:`_scale_of` gave as element ``at`` of ``raw`` bytes."""
    bits = _F32(scale).view(np.uint32)
    if kind == FP32:
        raw.view(np.uint32)[at] = bits
    elif kind == BF16:
        raw.view(np.uint16)[at] = _U16(bits >> _U32(16))
    elif scale < _F32(2.0**-14):
        raw.view(np.uint16)[at] = _U16(_F32(scale) * _F32(2.0**24))
    else:
        raw.view(np.uint16)[at] = _U16(_U32(bits >> _U32(13)) - _U32(112 << 10))


@_inline
def _clamped(ratio, low, high):
    ratio = ratio if ratio > low else low
    return ratio if ratio < high else high


@_inline
def _encode(values, scales, out, code):
    """``values / scales`` as one byte each: int8, e4m3, or the nibble (value + 8) of an int4.

    ``values`` (bfloat16 bits or float32) and ``out`` are ``[groups, group]``, ``scales`` is ``[groups]``.
    """
    groups, group = values.shape
    if code == INT8:
        for g in range(groups):
            scale = scales[g]
            for j in range(group):
                ratio = _clamped(_F32(_float(values[g, j]) / scale), _F32(-128.0), _F32(127.0))
                out[g, j] = _U8(_F32(ratio + _ROUND).view(np.uint32))
    elif code == INT4:
        for g in range(groups):
            scale = scales[g]
            for j in range(group):
                ratio = _clamped(_F32(_float(values[g, j]) / scale), _F32(-8.0), _F32(7.0))
                out[g, j] = _U8(_U32(_F32(ratio + _ROUND).view(np.uint32) ^ _U32(8)) & _U32(15))
    else:
        for g in range(groups):
            scale = scales[g]
            for j in range(group):
                bits = _F32(_float(values[g, j]) / scale).view(np.uint32)
                size = min(_U32(bits & _MAGNITUDE), _FP8_MAX_BITS)
                odd = _U32(_U32(size >> _U32(20)) & _U32(1))
                normal = _U32(_U32(_U32(_U32(size + _U32(0x7FFFF)) + odd) >> _U32(20)) - _U32(120 << 3))
                units = _F32(_U32(size).view(np.float32) + _FP8_UNIT_SHIFT)
                small = _U32(units.view(np.uint32) - _FP8_UNIT_BITS)
                magnitude = normal if size >= _FP8_NORMAL_BITS else small
                out[g, j] = _U8(magnitude | _U32(_U32(bits >> _U32(24)) & _U32(0x80)))


@_jit(types.void(_bytes, _int, _int, _int, _int, _floats))
def row_amax(src, stride, kind, rows, cols, out):
    width = cols * 4 if kind == FP32 else cols * 2
    for i in range(rows):
        out[i] = _largest(src[i * stride : i * stride + width], kind)


@_inline
def _pack(pairs, packed):
    """A little-endian pair of nibble bytes, 0x0B0A, becomes the byte 0xBA."""
    for j in range(packed.size):
        packed[j] = _U8(_U16(pairs[j] & _U16(15)) | _U16(pairs[j] >> _U16(4)))


@_inline
def _scales_of(own, given, limit, kind, steps, raw):
    """Each group's scale into ``steps`` and, as stored, ``raw``; False where an amax is NaN or Inf.

    ``given`` is empty, or holds one amax to take instead of the group's own.
    """
    for g in range(own.size):
        if not own[g] < np.inf:
            return False
        amax = given[0] if given.size else own[g]
        if not amax < np.inf:
            return False
        steps[g] = _scale_of(amax, limit, kind)
        _store_scale(raw, g, steps[g], kind)
    return True


@_jit(
    _int(
        *(_bytes, _int, _int, _int, _int, _int, _int, _int),
        *(types.float32, _floats, _bytes, _int, _bytes, _int),
    )
)
def quantise(
    src, stride, kind, rows, cols, segment, group, code, limit, amax, q, q_stride, scales, scale_stride
):
    """``segment`` columns at a time: ``cols``, or a multiple of ``group`` that divides it.

    ``amax`` is empty, or the largest magnitude of each row (then ``segment`` and ``group`` are ``cols``).
    """
    size = 4 if kind == FP32 else 2
    q_width = segment // 2 if code == INT4 else segment
    groups = segment // group
    wide = np.empty(segment if kind == FP16 else 0, np.float32)
    nibbles = np.empty(segment if code == INT4 else 0, np.uint8)
    own = np.empty(groups, np.float32)
    steps = np.empty(groups, np.float32)
    for i in range(rows):
        for start in range(0, cols, segment):
            raw = src[i * stride + start * size :][: segment * size]
            row_scales = scales[i * scale_stride + start // group * size :][: groups * size]
            stored = q[i * q_stride + (start // 2 if code == INT4 else start) :][:q_width]
            out = (nibbles if code == INT4 else stored).reshape(groups, group)
            if kind == BF16:
                shorts = raw.view(np.uint16).reshape(groups, group)
                _group_amax(shorts, own)
                if not _scales_of(own, amax[i : i + 1], limit, kind, steps, row_scales):
                    return i
                _encode(shorts, steps, out, code)
            else:
                if kind == FP16:
                    _widen(raw, kind, wide)
                values = wide if kind == FP16 else raw.view(np.float32)
                _group_amax_wide(values.view(np.uint32).reshape(groups, group), own)
                if not _scales_of(own, amax[i : i + 1], limit, kind, steps, row_scales):
                    return i
                _encode(values.reshape(groups, group), steps, out, code)
            if code == INT4:
                _pack(nibbles.view(np.uint16), stored)
    return -1


@_jit(_int(_bytes, _int, _int, _int, _int, _bytes, _int))
def copy_finite(src, stride, kind, rows, cols, out, out_stride):
    width = cols * 4 if kind == FP32 else cols * 2
    for i in range(rows):
        raw = src[i * stride : i * stride + width]
        if not _largest(raw, kind) < np.inf:
            return i
        row = out[i * out_stride : i * out_stride + width]
        for j in range(width):
            row[j] = raw[j]
    return -1


@_inline
def _decode(codes, scales, code, out):
    """float32 values of int8, e4m3 or nibble bytes: ``[groups, group]``, with ``scales`` ``[groups]``."""
    groups, group = out.shape
    if code == INT8:
        for g in range(groups):
            scale = scales[g]
            for j in range(group):
                out[g, j] = _F32(_F32(_I8(codes[g, j])) * scale)
    elif code == INT4:
        for g in range(groups):
            scale = scales[g]
            for j in range(group):
                out[g, j] = _F32(_F32(_I32(codes[g, j]) - _I32(8)) * scale)
    else:
        for g in range(groups):
            scale = scales[g]
            for j in range(group):
                size = _U32(_U32(codes[g, j]) & _U32(0x7F))
                normal = _U32(_U32(size << _U32(20)) + _U32(120 << 23))
                small = _F32(_F32(_I32(size)) * _F32(2.0**-9)).view(np.uint32)
                bits = normal if size >= _U32(8) else small
                bits = _U32(0x7FC00000) if size == _U32(0x7F) else bits
                sign = _U32(_U32(_U32(codes[g, j]) & _U32(0x80)) << _U32(24))
                out[g, j] = _F32(_U32(bits | sign).view(np.float32) * scale)


@_inline
def _decode_part(raw, steps, code, nibbles, out):
    """float32 values of a part of a quantised row (``raw`` bytes) in ``out``, ``[groups, group]``."""
    if code == INT4:
        pairs = nibbles.view(np.uint16)
        for j in range(raw.size):
            pairs[j] = _U16(_U16(raw[j] & _U8(15)) | _U16(_U16(raw[j] & _U8(0xF0)) << _U16(4)))
        _decode(nibbles[: out.size].reshape(out.shape), steps, code, out)
    else:
        _decode(raw.reshape(out.shape), steps, code, out)


@_inline
def _store(values, raw, kind):
    """float32 values rounded (half to even) to ``kind`` into ``raw`` bytes; a NaN becomes the quiet one."""
    if kind == FP32:
        words = raw.view(np.float32)
        for j in range(words.size):
            words[j] = values[j]
        return
    shorts = raw.view(np.uint16)
    if kind == BF16:
        for j in range(shorts.size):
            bits = _F32(values[j]).view(np.uint32)
            size = _U32(bits & _MAGNITUDE)
            short = _U32(_rounded(bits, 16) >> _U32(16))
            quiet = _U32(_U32(bits >> _U32(16)) | _U32(0x40))
            shorts[j] = _U16(quiet if size > _EXPONENT else short)
        return
    for j in range(shorts.size):
        bits = _F32(values[j]).view(np.uint32)
        size = _U32(bits & _MAGNITUDE)
        short = _U32(_U32(_rounded(size, 13) >> _U32(13)) - _U32(112 << 10))
        units = _F32(_U32(size).view(np.float32) + _F32(0.5))
        small = _U32(units.view(np.uint32) - _U32(0x3F000000))
        short = small if size < _U32(0x38800000) else short  # under 2^-14: a denormal, in units of 2^-24
        short = _U32(0x7C00) if size >= _U32(0x477FF000) else short  # 65520 and more round to infinity
        short = _U32(0x7E00) if size > _EXPONENT else short
        shorts[j] = _U16(short | _U32(_U32(bits >> _U32(16)) & _U32(0x8000)))


@_inline
def _decode_columns(q, begin, start, count, group, code, steps, nibbles, decoded):
    """float32 values of ``count`` columns from ``start`` of the quantised row that begins at byte ``begin``."""
    groups, width = (count // group, group) if code == INT4 else (1, count)
    first = start // group if code == INT4 else 0
    out = decoded[:count].reshape(groups, width)
    if code == INT4:
        _decode_part(q[begin + start // 2 :][: count // 2], steps[first:], code, nibbles, out)
    else:
        _decode_part(q[begin + start :][:count], steps, code, nibbles, out)


@_inline
def _add_squares(values, decoded, blocks, errors, squares):
    """Adds the squares of column c (of ``[blocks, LANES]``) to lane c % LANES, in float64."""
    for block in range(blocks):
        for lane in range(LANES):
            value = _F64(values[block, lane])
            error = _F64(_F32(values[block, lane] - decoded[block, lane]))
            errors[lane] += error * error
            squares[lane] += value * value


@_inline
def _fold(lanes):
    """Sum of the lanes: first those 16 apart, in ascending order, then the 16 sums."""
    for step in range(16, LANES, 16):
        for lane in range(16):
            lanes[lane] += lanes[step + lane]
    total = lanes[0]
    for lane in range(1, 16):
        total += lanes[lane]
    return total


@_jit(
    types.void(
        *(_bytes, _int, _int, _int, _int, _int, _int),
        *(_bytes, _int, _bytes, _int, _int, types.float64[::1]),
    )
)
def squared_error(
    src, stride, kind, rows, cols, group, code, q, q_stride, scales, scale_stride, scale_kind, out
):
    size = 4 if kind == FP32 else 2
    scale_size = 4 if scale_kind == FP32 else 2
    wide = np.empty(_BLOCK, np.float32)
    decoded = np.empty(_BLOCK, np.float32)
    wide_lanes = wide.reshape(_BLOCK // LANES, LANES)
    decoded_lanes = decoded.reshape(_BLOCK // LANES, LANES)
    nibbles = np.empty(_BLOCK, np.uint8)
    steps = np.empty(cols // group, np.float32)
    errors = np.empty(LANES, np.float64)
    squares = np.empty(LANES, np.float64)
    for i in range(rows):
        errors[:] = 0.0
        squares[:] = 0.0
        if code != PLAIN:
            _widen(scales[i * scale_stride :][: steps.size * scale_size], scale_kind, steps)
        for start in range(0, cols, _BLOCK):
            count = min(cols - start, _BLOCK)
            wide[count:] = _ZERO
            decoded[count:] = _ZERO
            _widen(src[i * stride + start * size :][: count * size], kind, wide)
            if code == PLAIN:
                _widen(q[i * q_stride + start * size :][: count * size], kind, decoded)
            else:
                _decode_columns(q, i * q_stride, start, count, group, code, steps, nibbles, decoded)
            _add_squares(wide_lanes, decoded_lanes, (count + LANES - 1) // LANES, errors, squares)
        out[2 * i] = _fold(errors)
        out[2 * i + 1] = _fold(squares)


@_jit(
    types.void(
        *(_bytes, _int, _int, _int, _int, _int),
        *(_bytes, _int, _int, _int, _bytes, _int),
    )
)
def dequantise(
    q, q_stride, rows, cols, group, code, scales, scale_stride, scale_kind, out_kind, out, out_stride
):
    scale_size = 4 if scale_kind == FP32 else 2
    out_size = 4 if out_kind == FP32 else 2
    decoded = np.empty(_BLOCK, np.float32)
    nibbles = np.empty(_BLOCK, np.uint8)
    steps = np.empty(cols // group, np.float32)
    for i in range(rows):
        _widen(scales[i * scale_stride :][: steps.size * scale_size], scale_kind, steps)
        for start in range(0, cols, _BLOCK):
            count = min(cols - start, _BLOCK)
            _decode_columns(q, i * q_stride, start, count, group, code, steps, nibbles, decoded)
            _store(decoded[:count], out[i * out_stride + start * out_size :][: count * out_size], out_kind)
