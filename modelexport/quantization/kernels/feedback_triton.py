"""Rounding with feedback on a GPU, in Triton: the bits of :mod:`.feedback_reference`, in one launch for all columns.

The reference launches several operations of torch for each column. Here one program has some rows, which know nothing
of each other, and goes through the columns from the last to the first, a panel of them in registers at a time. What
makes the bits the same is in :mod:`.triton_numbers`; sums are added in the reference's order, one after the other.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from modelexport.quantization.kernels import feedback_reference
from modelexport.quantization.kernels.triton_numbers import (
    E2M1,
    E4M3,
    EXACT,
    INTEGERS,
    bits_of,
    clamped,
    float_of,
    nearest_e2m1,
    nearest_e4m3,
    nearest_whole,
    on,
)

_KIND = {torch.int8: INTEGERS, torch.float8_e4m3fn: E4M3, torch.uint8: E2M1}
PANEL, ROWS = 32, 32
"""Columns and rows that a program holds at a time. No choice changes a bit."""


def __getattr__(name: str) -> Any:
    """Returns the reference's, for what is not here."""
    return getattr(feedback_reference, name)


@triton.jit
def _picked(tile, own):
    """The row of a float32 ``[PANEL, ROWS]`` of which ``own`` is true: its bits, among zeros, so that -0 stays -0."""
    return float_of(tl.sum(tl.where(own, bits_of(tile), 0), axis=0))


@triton.jit
def round_back_kernel(
    weight,
    carried,
    factor,
    block_of,
    step,
    zero,
    rounded,
    rows,
    columns,
    factor_row,
    factor_column,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    KIND: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    PANEL: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One program: ``ROWS`` rows, all columns. Offsets are 64 bits wide: a block of columns may be the whole weight."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = row < rows
    lane = tl.arange(0, PANEL)
    panels = tl.cdiv(columns, PANEL)
    for done in range(panels):
        begin = (panels - 1 - done) * PANEL
        column = begin + lane.to(tl.int64)
        inside = column < columns
        at = column[:, None] * rows + row[None, :]
        mask = inside[:, None] & here[None, :]
        total = tl.load(carried + at, mask=mask, other=0.0)
        for back in range(columns - begin - PANEL):  # the columns after this panel, from the last on
            after = (columns - 1 - back).to(tl.int64)
            there = after * rows + row
            error = tl.load(weight + there, mask=here, other=0.0) - tl.load(rounded + there, mask=here, other=0.0)
            by = tl.load(factor + after * factor_row + column * factor_column, mask=inside, other=0.0)
            total = total + by[:, None] * error[None, :]
        values = tl.load(weight + at, mask=mask, other=0.0)
        scale = tl.load(block_of + column, mask=inside, other=0)[:, None] * rows + row[None, :]
        steps = tl.load(step + scale, mask=mask, other=1.0)
        if HAS_ZERO:
            zeros = tl.load(zero + scale, mask=mask, other=0.0)
        own_columns = tl.minimum(columns - begin, PANEL)
        for back in range(own_columns):
            current = own_columns - 1 - back
            own = (lane == current)[:, None]
            value, by_step = _picked(values, own), _picked(steps, own)
            ratio = tl.div_rn(value + _picked(total, own), by_step)
            if KIND == E2M1:
                number = nearest_e2m1(ratio)
            elif KIND == E4M3:
                number = nearest_e4m3(ratio)
            elif HAS_ZERO:
                shift = _picked(zeros, own)
                number = nearest_whole(clamped(ratio + shift, LOW, HIGH)) - shift
            else:
                number = nearest_whole(clamped(ratio, LOW, HIGH))
            stored = number * by_step
            at_current = (begin + current).to(tl.int64)
            tl.store(rounded + at_current * rows + row, stored, mask=here)
            error = value - stored
            before = lane < current
            by = tl.load(factor + at_current * factor_row + column * factor_column, mask=before, other=0.0)
            total = tl.where(before[:, None], total + by[:, None] * error[None, :], total)
        tl.debug_barrier()  # what this panel stored is read for the next one, by other threads of the program


def round_back(
    weight: Tensor,
    carried: Tensor,
    factor: Tensor,
    block_of: Tensor,
    step: Tensor,
    zero: Tensor | None,
    storage: torch.dtype,
    low: float,
    high: float,
    rounded: Tensor,
) -> None:
    """See :func:`.feedback_reference.round_back`; ``carried`` is left as it is."""
    columns, rows = weight.shape
    given = (weight, carried, factor, block_of, step, step if zero is None else zero, rounded, rows, columns)
    options = {"LOW": low, "HIGH": high, "KIND": _KIND[storage], "HAS_ZERO": zero is not None}
    with on(weight.device):
        round_back_kernel[(triton.cdiv(rows, ROWS),)](
            *given, *factor.stride(), **options, PANEL=PANEL, ROWS=ROWS, num_warps=1, **EXACT
        )
