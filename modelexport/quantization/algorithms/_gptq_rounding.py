"""The rounding of rows by gptq, once it is planned; see :mod:`.gptq`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from modelexport.quantization import kernels
from modelexport.quantization.algorithms.base import CalibratedLinear
from modelexport.quantization.calibration.cut import ROWS
from modelexport.quantization.formats.base import Grid


@dataclass(frozen=True)
class ColumnPlan:
    """The order in which columns are rounded, and the factor by which errors are handed on.

    Attributes:
        order: int64 ``[features]``: the columns; the last one is rounded first.
        squares: float32 ``[features]``: the Hessian's diagonal, in the features' own order.
        factor: float32 ``[features, features]``, whose lower triangle is L, in that order.
        block: columns whose errors are handed on together.
    """

    order: Tensor
    squares: Tensor
    factor: Tensor
    block: int

    @cached_property
    def blocks(self) -> list[tuple[slice, Tensor, Tensor]]:
        """The blocks of columns in the order in which they are rounded: what each of their errors is divided by
        ``[columns, 1]``, and the factor within the block, divided by it."""
        pivots, found = self.factor.diagonal(), []
        for stop in range(len(self.order), 0, -self.block):
            part = slice(max(0, stop - self.block), stop)
            found.append((part, pivots[part].unsqueeze(1), self.factor[part, part] / pivots[part]))
        return found


def made_up(weight: Tensor, first: int, plan: ColumnPlan, cross: Tensor, share: float) -> Tensor:
    """Rows of a weight, changed such that their outputs come closer to the unrounded model's.

    With x what a linear is given, and r what it is given where nothing was rounded, W r - W' x is least in squares for
    W' = W + W C H^-1, C being the sum of (r - x) x^T and H, damped, that of x x^T ("GPTAQ: Efficient Finetuning-Free
    Quantization for Asymmetric Calibration", Li et al., 2025; here ahead of the rounding, and by a share).

    Args:
        weight: float32 ``[rows, features]``.
        first: the number of its first row in the whole weight.
        cross: C.
        share: of what is added.
    """
    assert first % ROWS == 0
    order, factor = plan.order, plan.factor
    changed = torch.empty_like(weight)
    for start in range(0, len(weight), ROWS):
        rows = weight[start : start + ROWS]
        aim = (rows @ cross)[:, order].t().contiguous()
        half = torch.linalg.solve_triangular(factor, aim, upper=False)
        found = torch.linalg.solve_triangular(factor.t(), half, upper=True)
        changed[start : start + ROWS, order] = rows[:, order] + share * found.t()
    return changed


def round_rows(
    linear: CalibratedLinear, plan: ColumnPlan, tensors: dict[str, Tensor], rows_at_once: int | None = None
) -> None:
    """Replaces the values of native tensors whose scales stay.

    Args:
        rows_at_once: on other devices than the CPU, a multiple of :data:`ROWS`; None for all.
    """
    assert linear.number_format is not None
    assert linear.rows[0] % ROWS == 0, f"{linear.name}: rows from {linear.rows[0]} on"
    weight, grid = linear.weight, linear.number_format.grid(tensors)
    values = torch.empty_like(weight)
    # What is done column by column costs a GPU as much for a few rows as for all.
    together = ROWS if weight.device.type == "cpu" else rows_at_once or max(ROWS, len(weight))

    def work(part: slice) -> None:
        for start in range(part.start, part.stop, together):
            rows = slice(start, min(part.stop, start + together))
            values[rows] = _rounded(weight[rows], grid.part(rows), plan)

    kernels.split_rows(weight, work, ROWS)
    linear.number_format.store(values, tensors)


def _rounded(weight: Tensor, grid: Grid, plan: ColumnPlan) -> Tensor:
    """Some rows, rounded. Products are of :data:`ROWS` of them: of the same shape wherever the weight was cut."""
    factor, order = plan.factor, plan.order
    columns = weight.t().contiguous().index_select(0, order.to(weight.device))
    step, zero = grid.step.t().contiguous(), None if grid.zero is None else grid.zero.t().contiguous()
    scale_of = order // grid.columns
    round_back = kernels.of(weight, "feedback_", at_once=True).round_back
    rounded, errors = torch.empty_like(columns), torch.empty_like(columns)
    for part, divisor, within in plan.blocks:
        behind = factor[part.stop :, part].t()
        products = [behind @ some.contiguous() for some in errors[part.stop :].split(ROWS, dim=1)]
        carried = (products[0] if len(products) == 1 else torch.cat(products, dim=1)).div_(divisor)
        given = (columns[part], carried, within, scale_of[part], step, zero)
        round_back(*given, grid.storage, grid.low, grid.high, rounded[part])
        torch.sub(columns[part], rounded[part], out=errors[part])
    columns[order] = rounded
    return columns.t()
