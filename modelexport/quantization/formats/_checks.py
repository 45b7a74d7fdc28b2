"""Checks that number formats share, with their messages: of weights, of tensors to be filled, of widths."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from modelexport.errors import PlanError
from modelexport.quantization.methods.base import Axes

_ROWS_AT_A_TIME = 256


@dataclass(frozen=True)
class TensorSpec:
    """One tensor that a quantised linear stores in its native form.

    Attributes:
        suffix: its name after the module's, e.g. ``"weight_scale"``.
        dtype: as stored.
        shape: of the whole linear, or of the shard that was asked for, as stored.
        axes: how it goes with the weight, see :data:`~modelexport.quantization.methods.base.Axes`.
    """

    suffix: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    axes: Axes

    @property
    def nbytes(self) -> int:
        """Bytes as stored."""
        return math.prod(self.shape) * self.dtype.itemsize


def describe_non_finite(weight: Tensor, amax: Tensor | None, row: int, name: str) -> str:
    """Counts what is wrong with a weight of which ``row`` is the first bad one."""
    nans = infs = 0
    first: tuple[int, int] | None = None
    for start in range(row, weight.shape[0], _ROWS_AT_A_TIME):
        values = weight[start : start + _ROWS_AT_A_TIME]
        bad = (~torch.isfinite(values)).nonzero()
        if bad.numel():
            first = first or (start + int(bad[0, 0]), int(bad[0, 1]))
            nans += int(values.isnan().sum())
            infs += int(values.isinf().sum())
    if first is None:
        assert amax is not None
        largest = float(amax[row if amax.shape[0] > 1 else 0].max())
        return (
            f"{name}: the largest magnitude of row {row} is {largest}, though this shard's part of it is finite: "
            f"another shard holds NaN or Inf. Repair the source checkpoint"
        )
    return (
        f"{name}: {nans} NaN and {infs} Inf among {weight.numel()} values, the first at row {first[0]}, "
        f"column {first[1]}: such a model cannot be exported. Repair the source checkpoint"
    )


def allocate(specs: Sequence[TensorSpec], weight: Tensor) -> dict[str, Tensor]:
    """New tensors for what a weight's rows become."""
    return {spec.suffix: torch.empty(spec.shape, dtype=spec.dtype, device=weight.device) for spec in specs}


def checked(specs: Sequence[TensorSpec], out: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """The given tensors in the specs' order, once they are seen to fit."""
    wanted = {spec.suffix: spec for spec in specs}
    if set(wanted) != set(out):
        raise ValueError(f"{name}: out holds {sorted(out)}, but the format stores {sorted(wanted)}")
    for suffix, spec in wanted.items():
        shape, dtype = tuple(out[suffix].shape), out[suffix].dtype
        if (shape, dtype) != (spec.shape, spec.dtype):
            raise ValueError(f"{name}: out[{suffix!r}] is {dtype} {shape}, but {spec.dtype} {spec.shape} is stored")
    return {suffix: out[suffix] for suffix in wanted}


def refuse_indivisible(name: str, group: int, group_sizes: Sequence[int], module: str, in_features: int) -> None:
    """Refuses an input width that the groups do not divide, with the choices there are.

    Raises:
        PlanError: with the width, the group size, the sizes that would do and the formats without groups.
    """
    if in_features % group == 0:
        return
    choices = [f"--group-size {size}" for size in group_sizes if in_features % size == 0]
    known = ", ".join(map(str, group_sizes))
    why = "" if choices else f" (nor by any other that it has: {known})"
    choices.append("a format without groups (--quant fp8, --quant int8)")
    raise PlanError(
        f"{module}: in_features {in_features} is not divisible by the group size {group} of number format "
        f"{name}{why}: {', or '.join(choices)}"
    )
