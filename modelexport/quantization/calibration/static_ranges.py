"""The magnitude that a stored scale of activations, or of a KV cache, is to cover.

What lies beyond is clamped, and what lies within is rounded the more finely the less is covered:

``max``
    all that calibration has seen.
``percentile``
    all but a given part of the magnitudes.
``mse``
    what gives the least expected squared error, see :func:`squared_error`.

A single outlier makes int8's steps coarse for everything else; e4m3 is as precise for small numbers as for large ones,
and gains nothing from covering less. Mean KL of the demo model's linears (32 windows of held-out text, 64 x 256 tokens
of calibration; the standard errors are about 2 %):

===========  =======  ====================  =====================  =======
format       max      percentile (0.9999)   percentile (0.99999)   mse
===========  =======  ====================  =====================  =======
int8-static  0.0104   0.0041                0.0053                 0.0042
fp8-static   0.0065   0.0079                0.0066                 0.0064
nvfp4        0.0813   0.0838                0.0819                 as max
===========  =======  ====================  =====================  =======

All follow from whole-number counts and a maximum, so neither the order of the samples nor the number of ranks shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from modelexport.quantization.calibration.statistics import BINS, InputStatistics
from modelexport.quantization.kernels.searching import sum_in_halves
from modelexport.quantization.kv_caches import CACHES, CacheFormat

if TYPE_CHECKING:
    from modelexport.quantization.formats.base import NumberFormat

__all__ = ["FRACTION", "METHODS", "Ranges", "choose", "choose_cache", "squared_error", "together", "wants"]

METHODS = ("max", "percentile", "mse")
FRACTION = 0.9999
"""Of the magnitudes, those that ``percentile`` covers."""

_STEPS_AN_OCTAVE = 16
_OCTAVES = 8


@dataclass(frozen=True)
class Ranges:
    """The ranges of a model's activations: magnitudes that scales are to cover, finite and not negative.

    Attributes:
        inputs: linear, by its module's name in the checkpoint -> of its inputs. All experts of a layer have the same.
        keys, values: layer -> of what goes into its KV cache: keys after the rotary embedding, values as projected;
            one for all heads, or one for each. With latent attention (DeepSeek) both are of the latent and of the
            rotary part, which share one cache.
        unseen: linears of experts that no token was routed to; their ``inputs`` are those of their siblings.
        samples, length: how much text it was.
    """

    inputs: dict[str, float]
    keys: dict[int, tuple[float, ...]]
    values: dict[int, tuple[float, ...]]
    unseen: tuple[str, ...] = ()
    samples: int = 0
    length: int = 0


def wants(method: str) -> frozenset[str]:
    """Returns the statistics that :func:`choose` needs."""
    return frozenset({"amax"} if _known(method) == "max" else {"amax", "histogram"})


def choose(
    statistics: InputStatistics,
    method: str = "max",
    number_format: NumberFormat | CacheFormat | None = None,
    *,
    fraction: float = FRACTION,
) -> float:
    """The largest magnitude that a static scale should cover, in the unit of the inputs; 0.0 where all of them are 0.

    Args:
        statistics: with ``amax`` and, but for ``max``, ``histogram``; of a linear's inputs, or of keys or values.
        method: one of :data:`METHODS`.
        number_format: with static inputs, or a KV cache's; None: an FP8 (e4m3) KV cache.
        fraction: of the magnitudes that ``percentile`` covers, above 0, at most 1.

    For NVFP4, whose groups of 16 have scales of their own below the stored one, that one hardly matters: covering less
    clamps the largest groups and makes none finer (it would have to be 2^15 times smaller before scales of other groups
    lost digits). So ``mse`` is ``max`` there; ``percentile`` does what it is told.

    Raises:
        ValueError: an unknown method; a statistic is missing or not finite; the format stores no scale of inputs.
    """
    _known(method)
    if statistics.amax is None:
        raise ValueError("static ranges need the statistic 'amax'")
    amax = float(statistics.amax.max()) if statistics.amax.numel() else 0.0
    if not 0 <= amax < float("inf"):
        raise ValueError(f"the largest magnitude is {amax}, which no scale covers")
    arguments = _arguments(number_format)
    if method == "max" or amax == 0.0:
        return amax
    if statistics.histogram is None:
        raise ValueError(f"static ranges by {method!r} need the statistic 'histogram'")
    counts = statistics.histogram.cpu()
    if method == "percentile":
        return _percentile(counts, amax, fraction)
    if arguments["num_bits"] < 8:
        return amax
    levels = _levels(arguments["type"])
    tried = [amax * 2.0 ** (-step / _STEPS_AN_OCTAVE) for step in range(_OCTAVES * _STEPS_AN_OCTAVE + 1)]
    errors = [squared_error(counts, reach, levels) for reach in tried]
    return tried[errors.index(min(errors))]


def choose_cache(
    statistics: Sequence[InputStatistics], method: str = "max", cache: CacheFormat | None = None
) -> tuple[float, ...]:
    """The largest magnitudes that the scales of cached keys, or values, should cover; see :func:`choose`.

    Args:
        statistics: of all heads together, or of each.
        method: one of :data:`METHODS`.
        cache: None: FP8.
    """
    return tuple(choose(each, method, cache) for each in statistics)


def together(parts: Sequence[InputStatistics]) -> InputStatistics:
    """The ``amax`` and the ``histogram`` of several inputs that are to have one range (those of all experts).

    None where one of them lacks it. Maxima of inputs of different sizes are brought down to one each.
    """
    amax, counts = [part.amax for part in parts], [part.histogram for part in parts]
    found = InputStatistics(parts[0].features, sum(part.tokens for part in parts))
    if all(value is not None for value in amax):
        found.amax = torch.stack([value.max() for value in amax if value is not None]).amax(dim=0, keepdim=True)
    if all(value is not None for value in counts):
        found.histogram = torch.stack([value for value in counts if value is not None]).sum(dim=0)
    return found


def squared_error(counts: Tensor, reach: float, levels: Tensor) -> float:
    """The sum of the squared errors of rounding all magnitudes of a histogram to the nearest of scaled levels.

    The scale is ``reach`` over the largest level; what is larger is clamped. Magnitudes are taken to be spread evenly
    over their bin, whose integral is taken exactly: bins are about as wide as the largest steps of an 8-bit number, so
    that one point of each would be on a level by chance.

    Args:
        counts: int64 ``[BINS]``.
        reach: above 0.
        levels: float64 ``[n]``, ascending from 0: magnitudes that the format holds, symmetric around 0.
    """
    used = counts.nonzero().flatten()
    edges = _edges()
    scale = reach / float(levels[-1])
    low, high = edges[used] / scale, edges[used + 1] / scale
    error = (_integral(high, levels) - _integral(low, levels)) / (high - low)
    return float(sum_in_halves(error * counts[used].double())) * scale * scale


def _integral(x: Tensor, levels: Tensor) -> Tensor:
    """From 0 to ``x``: of (t - the level nearest to t)^2 dt, float64."""
    between = (levels[1:] + levels[:-1]) / 2
    # Of each level's cell: from its level to its left edge, negative, and to its right edge; thirds of cubes.
    left = torch.cat([between.new_zeros(1), (between - levels[1:]) ** 3 / 3])
    right = (between - levels[:-1]) ** 3 / 3
    before = torch.cat([between.new_zeros(1), (right - left[:-1]).cumsum(0)])
    cell = torch.searchsorted(between, x)
    return before[cell] + (x - levels[cell]) ** 3 / 3 - left[cell]


def _percentile(counts: Tensor, amax: float, fraction: float) -> float:
    """The upper edge of the bin in which so many of the magnitudes are reached."""
    if not 0 < fraction <= 1:
        raise ValueError(f"a fraction of {fraction} is to be covered; it must be above 0, and at most 1")
    reached = counts.cumsum(0)
    wanted = fraction * int(reached[-1])
    bin_number = int(torch.searchsorted(reached.double(), wanted))
    return min(amax, float(_edges()[bin_number + 1]))


@cache
def _edges() -> Tensor:
    """The edges of the bins: float64 ``[BINS + 1]``, infinite from that of infinity on."""
    words = torch.arange(BINS, dtype=torch.int32) << 16
    edges = words.view(torch.float32).double().nan_to_num(torch.inf, posinf=torch.inf)
    return torch.cat([edges, edges.new_full((1,), torch.inf)])


@cache
def _levels(kind: str) -> Tensor:
    """The magnitudes of int8 or e4m3, float64."""
    if kind == "int":
        return torch.arange(128, dtype=torch.float64)
    return torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float().double()  # 0x7f is NaN


def _arguments(number_format: NumberFormat | CacheFormat | None) -> Mapping[str, Any]:
    if number_format is None:
        number_format = CACHES["fp8"]
    if isinstance(number_format, CacheFormat):
        return {"num_bits": number_format.num_bits, "type": number_format.numbers}
    arguments = number_format.input_arguments()
    if arguments is None or not number_format.has_static_inputs:
        raise ValueError(f"number format {number_format.name} stores no scale of inputs")
    return arguments


def _known(method: str) -> str:
    if method not in METHODS:
        raise ValueError(f"no method {method!r} of choosing ranges; there are {', '.join(METHODS)}")
    return method
