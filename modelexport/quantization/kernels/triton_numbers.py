"""Rounding to the numbers of a format in Triton, bit for bit as torch does it: what all Triton kernels share.

What makes the bits of a GPU those of :mod:`.reference`, and those of Triton's interpreter, which computes in numpy:

- products and sums are float32 operations of their own: kernels are launched with :data:`EXACT`, so that none becomes
  a fused multiply-add, and Triton sets no flag that lets LLVM reorder them;
- a division is ``tl.div_rn``, which is IEEE's: ``/`` may be an approximation, good to two units in the last place;
- denormals stay: Triton flushes none, neither here nor there;
- to a whole number, ties to even: adding and subtracting 1.5 * 2^23, exact for magnitudes below 2^22. To e4m3 and e2m1:
  on the bits of a float32. No cast to a small float is asked of the hardware or of the interpreter, but for float16;
- the sign of zero is kept where the reference keeps it.

tests/quantization/test_triton_code.py compiles all kernels for several GPUs, without one, and looks for what would
break this. ``kernel[grid]`` runs on the current device: see :func:`on`.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

from contextlib import AbstractContextManager

import numpy as np
import torch
import triton
import triton.language as tl

EXACT = {"enable_fp_fusion": False}
"""Launch options. Without this one, ``a * b + c`` is rounded once where the GPU has an instruction for it."""

INTEGERS, E4M3, E2M1 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # kinds of numbers

_ROUND = tl.constexpr(1.5 * 2**23)
_MAGNITUDE, _SIGN, _INFINITY = tl.constexpr(0x7FFFFFFF), tl.constexpr(-(2**31)), tl.constexpr(0x7F800000)


def on(device: torch.device) -> AbstractContextManager[object]:
    """Makes a device the one that kernels are launched on. For the CPU, where the interpreter runs them, nothing but
    that numpy says no more than torch of what overflows."""
    return torch.cuda.device(device) if device.type == "cuda" else np.errstate(all="ignore")


@triton.jit
def bits_of(value):
    """A float32's bits, int32."""
    return value.to(tl.int32, bitcast=True)


@triton.jit
def float_of(bits):
    """The float32 of these bits."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def nearest_whole(value):
    """The nearest whole number of a float32 below 2^22, ties to even; zero has the sign of the value."""
    nearest = (value + _ROUND) - _ROUND
    return float_of(bits_of(nearest) | (bits_of(value) & _SIGN))


@triton.jit
def clamped(value, low, high):
    """The value, at least ``low`` and at most ``high``; NaN stays NaN."""
    value = tl.where(value < low, low, value)
    return tl.where(value > high, high, value)


@triton.jit
def _nearest_float(ratio, MOST: tl.constexpr, NORMAL: tl.constexpr, DROP: tl.constexpr, SHIFT: tl.constexpr):
    """The nearest of small floats, ties to even: ``DROP`` bits fewer from ``NORMAL`` on, multiples of a unit below."""
    bits = bits_of(ratio)
    magnitude = bits & _MAGNITUDE
    size = tl.minimum(magnitude, MOST)
    small = bits_of((float_of(size) + SHIFT) - SHIFT)
    odd = (size >> DROP) & 1
    normal = (size + ((1 << (DROP - 1)) - 1) + odd) & -(1 << DROP)
    nearest = float_of(tl.where(size >= NORMAL, normal, small) | (bits & _SIGN))
    return tl.where(magnitude > _INFINITY, ratio, nearest)


@triton.jit
def nearest_e4m3(ratio):
    """The nearest e4m3 as float32, ties to even, at most 448 in magnitude; the sign of zero is kept."""
    return _nearest_float(ratio, 0x43E00000, 0x3C800000, 20, 2.0**14)  # 448; 2^-6, the smallest normal; 2^-9 below


@triton.jit
def nearest_e2m1(ratio):
    """The nearest e2m1 as float32, ties to even, at most 6; -0 for what is below zero, but 0 for -0."""
    nearest = _nearest_float(ratio, 0x40C00000, 0x3F800000, 22, 2.0**22)  # 6; 1, the smallest normal; 0.5 below
    return tl.where(ratio == 0.0, 0.0, nearest)


@triton.jit
def widened(values):
    """float32 of what was loaded: float32, float16, or the bits of bfloat16, whose denormals the interpreter loses."""
    if values.dtype == tl.int16:
        return float_of(values.to(tl.int32) << 16)
    else:
        return values.to(tl.float32)


@triton.jit
def narrowed(value, like: tl.constexpr):
    """A float32 as an element of that dtype: float32, float16, or int16, the bits of the nearest bfloat16."""
    if like == tl.int16:
        bits = bits_of(value)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where((bits & _MAGNITUDE) > _INFINITY, 0x7FC0, nearest).to(tl.int16)
    else:
        return value.to(like)


@triton.jit
def e4m3_byte(ratio):
    """The byte of the nearest e4m3, int32."""
    bits = bits_of(nearest_e4m3(ratio))
    size = bits & _MAGNITUDE
    small = bits_of(float_of(size) + 2.0**14) - 0x46800000  # the bits of 2^14, of which 2^-9 is the last place
    return tl.where(size >= 0x3C800000, (size >> 20) - (120 << 3), small) | ((bits >> 24) & 0x80)


@triton.jit
def e4m3_value(byte):
    """The float32 of an e4m3's byte, int32."""
    size = byte & 0x7F
    small = size.to(tl.float32) * 2.0**-9
    value = tl.where(size < 8, small, float_of((size << 20) + (120 << 23)))
    return float_of(tl.where(size == 0x7F, 0x7FC00000, bits_of(value)) | ((byte & 0x80) << 24))


@triton.jit
def e2m1_code(ratio):
    """The four bits of the nearest e2m1, int32: the sign is set for what is below zero, not for -0."""
    size = tl.abs(nearest_e2m1(ratio))
    code = tl.where(size < 1.0, (size * 2.0).to(tl.int32), (bits_of(size) >> 22) - (126 << 1))
    return tl.where(ratio < 0.0, code | 8, code)


@triton.jit
def e2m1_value(code):
    """The float32 of an e2m1's four bits, int32."""
    size = code & 7
    value = tl.where(size < 2, size.to(tl.float32) * 0.5, float_of((size + (126 << 1)) << 22))
    return float_of(bits_of(value) | ((code & 8) << 28))


@triton.jit
def nearest_number(ratio, shift, KIND: tl.constexpr, BITS: tl.constexpr):
    """The nearest number of a kind, as float32; ``shift`` is the zero point that integers are moved by."""
    if KIND == E4M3:
        return nearest_e4m3(ratio)
    elif KIND == E2M1:
        return nearest_e2m1(ratio)
    else:
        return nearest_whole(clamped(ratio + shift, -(2.0 ** (BITS - 1)), 2.0 ** (BITS - 1) - 1.0))
