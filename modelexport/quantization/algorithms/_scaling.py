"""The parts that smoothquant and awq share: magnitudes per feature of a fold, and scales that are fit to be folded."""

from __future__ import annotations

import torch
from torch import Tensor

from modelexport.quantization.algorithms.base import CalibratedLinear, Fold, RankGroup
from modelexport.quantization.calibration.statistics import InputStatistics

_FURTHEST = 20.0
"""No feature is scaled further than this power of two from the middle: beyond it there is only noise to move."""
_LEAST_OF_SHARED = -1.0
"""The same downwards, for linears as sources whose rows share a scale."""


def quantised(fold: Fold) -> list[CalibratedLinear]:
    """The readers whose weights are rounded."""
    return [linear for linear in fold.linears if linear.number_format is not None and linear.number_format.quantised]


def given(linears: list[CalibratedLinear]) -> list[InputStatistics]:
    """The linears' input statistics, each once; the same on all ranks."""
    found = {id(linear.inputs): linear.inputs for linear in linears if linear.inputs is not None}
    return [inputs for inputs in found.values() if inputs.tokens]


def column_amax(linears: list[CalibratedLinear], ranks: RankGroup) -> Tensor:
    """The largest magnitude in each column of each weight, over all ranks' rows: float32 ``[linears, in_features]``."""
    tables = []
    for linear in linears:
        low_high = torch.aminmax(linear.weight, dim=0) if linear.weight.shape[0] else None
        zero = linear.weight.new_zeros(linear.shape[1])
        tables.append(zero if low_high is None else torch.maximum(low_high.min.neg(), low_high.max))
    return ranks.largest(torch.stack([table.to(tables[0].device) for table in tables]))


def largest_per_feature(values: Tensor, fold: Fold) -> Tensor:
    """The maximum over the inputs that are the same feature: ``[in_features]`` to ``[features]``."""
    if fold.columns is None:
        return values
    return values.new_zeros(fold.features).scatter_reduce(0, fold.columns.to(values.device), values, "amax")


def mean_per_feature(values: Tensor, fold: Fold) -> Tensor:
    """The mean over the inputs that are the same feature: ``[in_features]`` to ``[features]``."""
    if fold.columns is None:
        return values
    columns = fold.columns.to(values.device)
    # Not scatter_reduce: what it adds up has no order on other devices.
    order = torch.argsort(columns, stable=True).view(fold.features, -1)
    return values[order].mean(dim=1)


def per_input(scale: Tensor, fold: Fold) -> Tensor:
    """``[..., features]`` to ``[..., in_features]``."""
    return scale if fold.columns is None else scale[..., fold.columns.to(scale.device)]


def settled(scale: Tensor, fold: Fold) -> Tensor:
    """Scales fit to be folded: float32 ``[..., features]``, 1 where what was computed is none.

    Their geometric mean is brought to about 1 (by a power of two, which no rounding notices), so that weights and
    activations keep their size; powers of two where ``fold.exact``.
    """
    usable = torch.isfinite(scale) & (scale > 0)
    exponents = torch.where(usable, scale, torch.ones_like(scale)).double().log2()
    count = usable.sum(dim=-1, keepdim=True).clamp(min=1)
    middle = (exponents.sum(dim=-1, keepdim=True) / count).round()
    exponents = torch.where(usable, exponents - middle, torch.zeros_like(exponents))
    # A linear's row grows by what it is divided by: where all rows share a scale, that would take from the others.
    shared = any(
        linear.number_format is not None and linear.number_format.scale_granularity == "tensor"
        for linear in fold.linears
    )
    least = _LEAST_OF_SHARED if shared and fold.weight is None else -_FURTHEST
    exponents = exponents.clamp(least, _FURTHEST)
    return (exponents.round() if fold.exact else exponents).exp2().float()
