"""Loops over bytes, compiled by numba: what :mod:`.fused` calls. One pass over rows that stay in the cache.

Each gives the same bits as its twin in :mod:`.reference`. What makes the loops fast:

- a bfloat16 is widened by a shift into the upper half of a float32; a float16 by rebuilding its exponent;
- magnitudes are compared as integers, so NaN and Inf are found by the search for the maximum;
- adding 1.5 * 2^23 to a float32 rounds it to an integer (half to even) that then stands in its low bits;
- e4m3 is rounded on the float32's bits where it is normal, by adding 2^14 (of unit 2^-9) below;
- the inner loops index flat arrays by an unsigned sum (a signed index would be tested for wrapping round),
  and make no array views (each costs two atomic operations): LLVM turns them into vector instructions;
- no fastmath: divisions are true divisions, denormals stay, sums keep their order.

A tensor arrives as its bytes (first element to last), the distance of its rows in elements, and a kind.

What every format needs to be written is here, what it needs to be read in :mod:`.compiled_reading`. The others of that
name are compiled when a format first needs them. numba's cache watches only the file of the
kernel itself for changes: :data:`STAMP` makes it watch all of them.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numba import config, njit, types
from numba.extending import overload

_F32, _F64 = np.float32, np.float64
_U64, _U32, _U16, _U8 = np.uint64, np.uint32, np.uint16, np.uint8
_I32, _I16, _I8 = np.int32, np.int16, np.int8

BF16, FP16, FP32 = 0, 1, 2  # kinds of floating-point values
# Codes of stored weights: PLAIN is not quantised, BYTES are int8 values + 128 in words of four.
INT8, FP8, INT4, PLAIN, BYTES = 0, 1, 2, 3, 4
LANES = 128  # partial sums per row in squared_error, the same as the reference's
_BLOCK = 2048  # columns decoded at a time, 8 KB of float32; a multiple of LANES and of every group size

_ONE, _ZERO, _ROUND, _SMALLEST_NORMAL = _F32(1.0), _F32(0.0), _F32(1.5 * 2**23), _F32(2.0**-126)
_FLOAT32_MAX = _F32(np.finfo(np.float32).max)
_EXPONENT, _MAGNITUDE = _U32(0x7F800000), _U32(0x7FFFFFFF)
_FP8_MAX_BITS, _FP8_NORMAL_BITS = _U32(0x43E00000), _U32(0x3C800000)  # 448 and 2^-6, the smallest normal
_FP8_UNIT_SHIFT, _FP8_UNIT_BITS = _F32(2.0**14), _U32(0x46800000)


def stamp_of(directory: Path) -> str:
    """A word for what the files of kernels in a directory hold; "" where they cannot be read (an archive)."""
    digest = hashlib.sha256()
    try:
        for path in sorted(directory.glob("*compiled*.py")):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    except OSError:
        return ""
    return digest.hexdigest()[:12]


STAMP = stamp_of(Path(__file__).parent)
"""Part of the kernels' names, and so of their files in numba's cache: what another version cached is not found."""


def private_directory() -> str:
    """Returns a directory among those for temporary files that only this user can write to; "" where there is none.

    What numba caches is unpickled: whoever can write it runs code here.
    """
    path = Path(tempfile.gettempdir(), f"modelexport-kernels-{os.geteuid()}")
    try:
        with contextlib.suppress(FileExistsError):
            path.mkdir(0o700)
        own = path.lstat()
        above = [parent.stat() for parent in path.resolve().parents]
    except OSError:
        return ""
    ours = stat.S_ISDIR(own.st_mode) and own.st_uid == os.geteuid() and not own.st_mode & 0o077
    # Others may write above it only where they cannot rename what is not theirs.
    fixed = all(
        status.st_uid in (0, os.geteuid()) and (status.st_mode & stat.S_ISVTX or not status.st_mode & 0o022)
        for status in above
    )
    return str(path) if ours and fixed else ""


def _jit(signature: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile now, for this one signature, or load what was: from where numba caches (beside the module, in the user's
    cache directory), else from a private temporary directory, else without a cache."""

    def compiled(function: Callable[..., Any]) -> Any:
        function.__qualname__ = f"{function.__name__}_{STAMP}"
        options = {"nogil": True, "error_model": "numpy"}
        former = config.CACHE_DIR
        for directory in (lambda: former, private_directory):
            try:
                config.CACHE_DIR = directory()
                return njit(signature, cache=True, **options)(function)
            except Exception:  # no directory, a full disk, a torn file; a fault of the function is raised again below
                continue
            finally:
                config.CACHE_DIR = former
        return njit(signature, **options)(function)

    return compiled


_inline = njit(nogil=True, error_model="numpy")
_bytes, _floats, _doubles, _int = types.uint8[::1], types.float32[::1], types.float64[::1], types.intp


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
    """A bfloat16's bits, or a float32 itself, as float32 (its overload, below, is what runs)."""
    raise NotImplementedError("only for compiled code")


@overload(_float)
def _float_of(value):
    if value == types.uint16:
        return lambda value: _U32(_U32(value) << _U32(16)).view(np.float32)
    return lambda value: value


@_inline
def _views(raw):
    """Bytes as 16-bit integers, 32-bit integers and float32."""
    whole = raw[: raw.size // 4 * 4]
    return raw[: raw.size // 2 * 2].view(np.uint16), whole.view(np.uint32), whole.view(np.float32)


@_inline
def _widen(shorts, floats, kind, begin, count, wide):
    """``count`` values from ``begin`` on as float32, in ``wide``."""
    if kind == BF16:
        for j in range(count):
            wide[j] = _float(shorts[_U64(begin + j)])
    elif kind == FP16:
        for j in range(count):
            wide[j] = _half(shorts[_U64(begin + j)])
    else:
        for j in range(count):
            wide[j] = floats[_U64(begin + j)]


@_inline
def _amax(shorts, words, kind, begin, groups, group, amax):
    """Largest magnitude of each of the groups from ``begin`` on, as float32; whether all are finite."""
    largest = _U32(0)
    if kind == FP32:
        for g in range(groups):
            top, at = _U32(0), begin + g * group
            for j in range(group):
                top = max(top, _U32(words[_U64(at + j)] & _MAGNITUDE))
            amax[g] = _U32(top).view(np.float32)
            largest = max(largest, top)
        return largest < _EXPONENT
    for g in range(groups):
        short, at = _U16(0), begin + g * group
        for j in range(group):
            short = max(short, _U16(shorts[_U64(at + j)] & _U16(0x7FFF)))
        amax[g] = _float(_U16(short)) if kind == BF16 else _half(_U16(short))
        largest = max(largest, _U32(short))
    return largest < (_U32(0x7F80) if kind == BF16 else _U32(0x7C00))


@_inline
def _rounded(bits, drop):
    """float32 bits rounded (half to even) to a multiple of ``2**drop``."""
    bits = _U32(bits)
    unit = _U32(_U32(1) << _U32(drop))
    odd = _U32(_U32(bits >> _U32(drop)) & _U32(1))
    return _U32(_U32(bits + _U32(_U32(unit >> _U32(1)) - _U32(1))) + odd) & _U32(~_U32(unit - _U32(1)))


@_inline
def _scale_of(amax, limit, cap, kind):
    """amax / limit as it will be stored (bf16, fp16 or float32), at most ``cap``, back in float32."""
    if amax == _ZERO:
        return _ONE
    scale = _F32(amax / limit)
    if kind == FP16:
        if scale < _F32(2.0**-14):  # a float16 denormal: units of 2^-24, those of float32 in [0.5, 1)
            scale = _F32(_F32(scale + _F32(0.5)) - _F32(0.5))
            return max(scale, _F32(2.0**-24))
        return min(_U32(_rounded(scale.view(np.uint32), 13)).view(np.float32), cap)
    if kind == BF16:
        scale = _U32(_rounded(scale.view(np.uint32), 16)).view(np.float32)
    return max(min(scale, cap), _SMALLEST_NORMAL)


@_inline
def _store_scale(shorts, words, at, scale, kind):
    """Writes a scale that :func:`_scale_of` gave as element ``at``."""
    bits = _F32(scale).view(np.uint32)
    if kind == FP32:
        words[at] = bits
    elif kind == BF16:
        shorts[at] = _U16(bits >> _U32(16))
    elif scale < _F32(2.0**-14):
        shorts[at] = _U16(_F32(scale) * _F32(2.0**24))
    else:
        shorts[at] = _U16(_U32(bits >> _U32(13)) - _U32(112 << 10))


@_inline
def _clamped(ratio, low, high):
    ratio = ratio if ratio > low else low
    return ratio if ratio < high else high


@_inline
def _bounds(code):
    """Of integers: the lowest and the highest, the bits to flip in their last byte, and the bits of it to keep."""
    if code == INT4:
        return _F32(-8.0), _F32(7.0), _U32(8), _U32(15)
    return _F32(-128.0), _F32(127.0), _U32(0x80) if code == BYTES else _U32(0), _U32(0xFF)


@_inline
def _fp8(ratio):
    """The nearest e4m3 as its byte, ties to even, at most 448 in magnitude; the sign of zero is kept."""
    bits = _F32(ratio).view(np.uint32)
    size = min(_U32(bits & _MAGNITUDE), _FP8_MAX_BITS)
    odd = _U32(_U32(size >> _U32(20)) & _U32(1))
    normal = _U32(_U32(_U32(_U32(size + _U32(0x7FFFF)) + odd) >> _U32(20)) - _U32(120 << 3))
    small = _U32(_F32(_U32(size).view(np.float32) + _FP8_UNIT_SHIFT).view(np.uint32) - _FP8_UNIT_BITS)
    magnitude = normal if size >= _FP8_NORMAL_BITS else small
    return _U32(magnitude | _U32(_U32(bits >> _U32(24)) & _U32(0x80)))


@_inline
def _nearest_float(ratio, most, normal, drop, shift):
    """The nearest of small floats, ties to even: ``drop`` bits fewer from ``normal`` on, multiples of a unit below."""
    bits = _F32(ratio).view(np.uint32)
    size = min(_U32(bits & _MAGNITUDE), most)
    small = _F32(_F32(_U32(size).view(np.float32) + shift) - shift).view(np.uint32)
    nearest = _U32(_rounded(size, drop)) if size >= normal else small
    return _U32(nearest | _U32(bits & _U32(0x80000000))).view(np.float32)


@_inline
def _encode(values, begin, groups, group, scales, out, to, code):
    """Values (bfloat16 bits or float32) / their scale, a byte each: int8, e4m3, int8 + 128 or int4 + 8."""
    if code != FP8:
        low, high, flip, mask = _bounds(code)
        for g in range(groups):
            scale, first, at = scales[g], begin + g * group, to + g * group
            for j in range(group):
                ratio = _clamped(_F32(_float(values[_U64(first + j)]) / scale), low, high)
                out[_U64(at + j)] = _U8(_U32(_F32(ratio + _ROUND).view(np.uint32) ^ flip) & mask)
    else:
        for g in range(groups):
            scale, first, at = scales[g], begin + g * group, to + g * group
            for j in range(group):
                out[_U64(at + j)] = _U8(_fp8(_F32(_float(values[_U64(first + j)]) / scale)))


@_inline
def _pack(pairs, packed, at, count):
    """``count`` little-endian pairs of nibble bytes, each 0x0B0A, become bytes 0xBA."""
    for j in range(count):
        packed[_U64(at + j)] = _U8(_U16(pairs[j] & _U16(15)) | _U16(pairs[j] >> _U16(4)))


@_inline
def _scales(amax, limit, cap, kind, steps, shorts, words, at):
    """Each group's scale, into ``steps`` and, as stored, from element ``at`` on."""
    if kind == BF16:  # the same loop for each kind: with a kind that it knows, LLVM makes vectors of it
        for g in range(steps.size):
            steps[g] = _scale_of(amax[g], limit, cap, BF16)
            _store_scale(shorts, words, _U64(at + g), steps[g], BF16)
    elif kind == FP16:
        for g in range(steps.size):
            steps[g] = _scale_of(amax[g], limit, cap, FP16)
            _store_scale(shorts, words, _U64(at + g), steps[g], FP16)
    else:
        for g in range(steps.size):
            steps[g] = _scale_of(amax[g], limit, cap, FP32)
            _store_scale(shorts, words, _U64(at + g), steps[g], FP32)


@_inline
def _affine(below, above, half, caps, kind):
    """The scale and the zero point for a group that goes so far below and above zero."""
    span = min(_F32(below + above), _FLOAT32_MAX)
    scale = _scale_of(span, _F32(_F32(half + half) - _ONE), caps[0], kind)
    ratio = _clamped(_F32(_F32(below / scale) - half), -half, _F32(half - _ONE))
    zero = _F32(_F32(ratio + _ROUND) - _ROUND)
    furthest = max(_F32(half + zero), _F32(_F32(half - _ONE) - zero))
    return min(scale, caps[_I32(furthest)]), zero


@_jit(types.void(_bytes, _int, _int, _int, _int, _floats))
def row_amax(src, stride, kind, rows, cols, out):
    """Each row's largest magnitude into float32 ``out``; NaN and Inf are the largest."""
    shorts, words, _ = _views(src)
    amax = np.empty(1, np.float32)
    for i in range(rows):
        _amax(shorts, words, kind, i * stride, 1, cols, amax)
        out[i] = amax[0]


@_inline
def _finish(nibbles, pairs, q, at, cols, code):
    """Packs a row of int4, or fills up the last word of a row of BYTES."""
    if code == INT4:
        _pack(pairs, q, at, nibbles.size // 2)
    elif code == BYTES:
        for j in range(cols, (cols + 3) // 4 * 4):
            q[_U64(at + j)] = _U8(0)


@_inline
def _nibbles(cols, code):
    """Room for a row of int4, one a byte, up to the end of its last word."""
    return np.zeros((cols + 7) // 8 * 8 if code == INT4 else 0, np.uint8)


@_inline
def _given(amax, begin, own):
    """Replaces a row's largest magnitudes by given ones; whether these are finite."""
    finite = True
    for g in range(own.size):
        own[g] = amax[begin + g]
        finite &= own[g] < np.inf
    return finite


@_jit(_int(_bytes, *[_int] * 6, *[types.float32] * 2, _floats, _int, _bytes, _int, _bytes, _int, _int))
def quantise(
    src,
    stride,
    kind,
    rows,
    cols,
    group,
    code,
    limit,
    cap,
    amax,
    amax_stride,
    q,
    q_stride,
    scales,
    scale_stride,
    scale_kind,
):
    """Fills ``q`` and ``scales``; the first row that holds NaN or Inf, or -1.

    ``amax`` is empty, or the largest magnitude of each group of each row.
    """
    shorts, words, floats = _views(src)
    scale_shorts, scale_words, _ = _views(scales)
    groups = cols // group
    own = np.empty(groups, np.float32)
    steps = np.empty(groups, np.float32)
    wide = np.empty(cols if kind == FP16 else 0, np.float32)
    nibbles = _nibbles(cols, code)
    pairs = nibbles.view(np.uint16)
    out = nibbles if code == INT4 else q
    for i in range(rows):
        begin, to = i * stride, 0 if code == INT4 else i * q_stride
        finite = _amax(shorts, words, kind, begin, groups, group, own)
        if amax.size:
            finite &= _given(amax, i * amax_stride, own)
        if not finite:
            return i
        _scales(own, limit, cap, scale_kind, steps, scale_shorts, scale_words, i * scale_stride)
        if kind == BF16:
            _encode(shorts, begin, groups, group, steps, out, to, code)
        elif kind == FP32:
            _encode(floats, begin, groups, group, steps, out, to, code)
        else:
            _widen(shorts, floats, kind, begin, cols, wide)
            _encode(wide, 0, groups, group, steps, out, to, code)
        _finish(nibbles, pairs, q, i * q_stride, cols, code)
    return -1


@_jit(_int(_bytes, _int, _int, _int, _int, _bytes, _int))
def copy_finite(src, stride, kind, rows, cols, out, out_stride):
    """Copies rows; the first that holds NaN or Inf, or -1."""
    shorts, words, _ = _views(src)
    size = 4 if kind == FP32 else 2
    amax = np.empty(1, np.float32)
    for i in range(rows):
        if not _amax(shorts, words, kind, i * stride, 1, cols, amax):
            return i
        begin, at = i * stride * size, i * out_stride * size
        for j in range(cols * size):
            out[_U64(at + j)] = src[_U64(begin + j)]
    return -1


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
