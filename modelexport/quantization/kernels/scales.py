"""The scales of integer and FP8 formats, from largest magnitudes: shared by both kinds of kernels."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

FP8_MAX = 448.0
"""Largest finite value of float8_e4m3fn."""

_SAME_SIZE_INT = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
_SCALE_FLOOR = {torch.bfloat16: 2.0**-126, torch.float16: 2.0**-24, torch.float32: 2.0**-126}
_LARGEST_VALUE = {torch.int8: 128.0, torch.float8_e4m3fn: FP8_MAX, torch.int32: 8.0}
_FLOAT32_MAX = torch.finfo(torch.float32).max


def numbers(storage: torch.dtype, bits: int) -> torch.dtype:
    """Returns the key of :func:`largest_scale`'s table: int8 also for bytes in int32 words, int32 for int4."""
    return torch.int8 if storage == torch.int32 and bits == 8 else storage


@cache
def largest_scale(storage: torch.dtype, dtype: torch.dtype, weight_dtype: torch.dtype | None = None) -> float:
    """The largest scale in ``dtype`` of which no multiple that ``storage`` holds overflows it or the weight's dtype."""
    return _largest(_LARGEST_VALUE[storage], dtype, weight_dtype or dtype)


def _largest(multiple: float, dtype: torch.dtype, weight_dtype: torch.dtype) -> float:
    """The largest scale in ``dtype`` that can be taken so many times."""
    top = min(torch.finfo(dtype).max, torch.finfo(weight_dtype).max)
    scale = torch.tensor(min(top, top / multiple), dtype=torch.float64).to(dtype)
    if float(scale) * multiple > top:
        scale = (scale.view(_SAME_SIZE_INT[dtype]) - 1).view(dtype)  # the next one below
    return float(scale)


def scale_of(
    amax: Tensor, limit: float, storage: torch.dtype, dtype: torch.dtype, weight_dtype: torch.dtype | None = None
) -> Tensor:
    """``amax / limit`` in float32, rounded to ``dtype``; 1 for amax 0.

    It is never zero, nor a denormal of bf16 or float32, and at most :func:`largest_scale`.
    """
    scale = (amax / amax.new_full((1,), limit)).clamp(max=torch.finfo(dtype).max).to(dtype)
    scale = scale.clamp(min=_SCALE_FLOOR[dtype], max=largest_scale(storage, dtype, weight_dtype))
    return torch.where(amax == 0, torch.ones_like(scale), scale)


def highest_binade(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """The magnitude, at least ``amax``, whose e4m3 scale in ``dtype`` is a power of two that lays amax onto 256 to 448.

    Values of MXFP4 with exponents within 14 of the largest are exact with it: e4m3 has 18 binades, in the lowest of
    which there is one number only, and e2m1 two numbers in each. Not finite where amax is not.
    """
    mantissa, exponent = torch.frexp(amax)
    power = exponent - torch.where(mantissa > FP8_MAX / 512, 8, 9)
    bits = (power.clamp(min=-126) + 127).to(torch.int32) << 23  # the same on every device, which pow is not
    scale = bits.view(torch.float32).clamp(min=_SCALE_FLOOR[dtype])
    return torch.where((amax == 0) | ~torch.isfinite(amax), amax, scale * FP8_MAX)


@cache
def affine_caps(bits: int, dtype: torch.dtype, weight_dtype: torch.dtype) -> Tensor:
    """float32 ``[2^bits]``: the largest scale where a number is at most so far (the index) from its zero point."""
    return torch.tensor([_largest(max(1.0, n), dtype, weight_dtype) for n in range(2**bits)], dtype=torch.float32)


def affine_of(extremes: Tensor, bits: int, dtype: torch.dtype, weight_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scales in ``dtype`` and zero points (whole numbers in float32) for integers of so many bits.

    ``extremes`` (float32 ``[..., 2]``) is how far values go below and above zero, neither negative, so that zero is
    always a number. scale = (below + above) / (2^bits - 1), rounded to ``dtype``; 1 where both are 0, and kept from
    being zero, denormal or so large that a value overflows, as in :func:`scale_of`.
    zero = below / scale (as stored) - 2^(bits - 1), rounded half to even.
    """
    below, above = extremes.unbind(-1)
    half = 2.0 ** (bits - 1)
    span = (below + above).clamp(max=_FLOAT32_MAX)
    caps = affine_caps(bits, dtype, weight_dtype)
    scale = (span / span.new_full((1,), 2 * half - 1)).clamp(max=torch.finfo(dtype).max).to(dtype)
    scale = scale.clamp(min=_SCALE_FLOOR[dtype], max=float(caps[0]))
    scale = torch.where(span == 0, torch.ones_like(scale), scale)
    zero = (below / scale.float() - half).clamp(-half, half - 1).round()
    furthest = torch.maximum(half + zero, half - 1 - zero).long()
    return torch.minimum(scale, caps.to(scale)[furthest]), zero


TRIED = 16
"""Scales that a search tries for each group, row, block or tensor."""

_STEPS = {4: 0.025, 8: 0.005}


@cache
def shrinks(bits: int) -> Tensor:
    """Returns the factors of largest magnitudes that a search tries: float32 ``[TRIED]``, from 1 down in equal steps.

    Down to 0.625 for 4 bits, 0.925 for 8 bits, by what it gains on the demo model's linears (SQNR in dB, bf16 scales):

    ===================  =====  ===========  ===========  ============  ===========
    formats              amax   16 x 0.025   20 x 0.02    16 x 0.0125   16 x 0.005
    ===================  =====  ===========  ===========  ============  ===========
    int4, groups of 128  19.04  19.84        19.84
    int4 asymmetric      19.89  20.38        20.38
    int4, whole rows     18.15  19.40        19.40
    int8, groups of 128  43.71                            43.78         43.88
    int8, whole rows     42.77                            42.84         42.91
    fp8, whole rows      31.65                            31.92         31.94
    ===================  =====  ===========  ===========  ============  ===========
    """
    return torch.tensor([1.0 - number * _STEPS[bits] for number in range(TRIED)], dtype=torch.float32)
