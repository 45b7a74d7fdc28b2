"""NVFP4's second scale: compressed-tensors divides by it, modelopt and ggml multiply; from one to the other and back.

Both are made of one magnitude: the divisor is 2688 / amax, the multiplier amax / 2688 (2688 = 6 * 448, the largest
FP4 times the largest E4M3). In float32 the reciprocal of a reciprocal is not always the number itself, and no rounding
rule can make it so: next below a power of two there are up to twice as many divisors as multipliers to stand for them.
But weights are bfloat16 or float16, and so then is the amax: it is the one number of few bits next to 2688 / divisor.
Through it both directions are exact, and each gives what the other's tool computes from the weight. Tools on other
devices round the last bit otherwise; by how many units is carried over (in the opposite direction).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from modelexport.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

TOP = 2688.0
_BITS = 14  # of an amax: bfloat16 has 8, float16 11; modelopt's 4/6 variant has amax / 1536, which is 1.75 of them
_STEPS = 3  # two roundings, and one for a multiplication by a rounded reciprocal
_LARGEST = 3.4028234663852886e38
_NORMAL = 2.0**-126


def multiplier_of(divisor: float) -> float:
    """The float32 that modelopt stores, ``weight_scale_2`` or ``input_scale``; 0 for infinity.

    Args:
        divisor: float32 > 0, compressed-tensors' ``weight_global_scale`` or ``input_global_scale``.
    """
    if divisor == math.inf:
        return 0.0
    amax = _short(TOP / divisor)
    return _carried(divisor, _float32(TOP / amax), _float32(amax / TOP))


def divisor_of(multiplier: float) -> float:
    """The float32 that compressed-tensors stores; the inverse of :func:`multiplier_of`.

    It is that in both directions for magnitudes of up to 14 bits (all of bfloat16's and float16's down to 4e-35), and
    for numbers up to 3 units in the last place from theirs; otherwise a round trip may be up to 3 such units off.

    Args:
        multiplier: float32 >= 0; 0 gives infinity.
    """
    if multiplier == 0.0:
        return math.inf
    amax = _short(TOP * multiplier)
    return _carried(multiplier, _float32(amax / TOP), _float32(TOP / amax))


def inverted_scale(
    tensors: Mapping[str, Tensor], suffix: str, rule: Callable[[float], float], shape: tuple[int, ...]
) -> Tensor:
    """A tensor's one scale by either rule, float32; a multiplier of 0 is a divisor of infinity: all values are 0.

    Raises:
        CheckpointError: the scale is negative or NaN.
    """
    import torch

    scale = tensors[suffix]
    number = float(scale.float())
    inverse = rule(number) if number > 0 or (number == 0 and rule is divisor_of) else math.nan
    if math.isnan(inverse) or (math.isinf(inverse) and number != 0):
        raise CheckpointError(f"{suffix} is {number:g}: it has no reciprocal among the float32 above zero")
    return torch.full(shape, inverse, dtype=torch.float32, device=scale.device)


def _carried(number: float, nearest: float, other: float) -> float:
    """``other``, as many units in the last place off as ``number`` is from ``nearest``, the other way."""
    if min(nearest, other) >= _NORMAL and max(nearest, other) < math.inf:
        steps = _as_int(number) - _as_int(nearest)
        if abs(steps) <= _STEPS:
            return _as_float(_as_int(other) - steps)
    return _float32(1.0 / number)


def _short(magnitude: float) -> float:
    mantissa, exponent = math.frexp(magnitude)
    return math.ldexp(round(math.ldexp(mantissa, _BITS)), exponent - _BITS)


def _float32(number: float) -> float:
    """To nearest. (A quotient of two float32 may be rounded to double first: it has more than twice the bits.)"""
    if number > _LARGEST:
        return math.inf
    rounded: float = struct.unpack("<f", struct.pack("<f", number))[0]
    return rounded


def _as_int(number: float) -> int:
    pattern: int = struct.unpack("<i", struct.pack("<f", number))[0]
    return pattern


def _as_float(pattern: int) -> float:
    number: float = struct.unpack("<f", struct.pack("<i", pattern))[0]
    return number
