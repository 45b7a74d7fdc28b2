"""The integer and FP8 formats' kernels on a GPU, in Triton: the bits of :mod:`.reference`.

A weight is rounded and packed, read back, compared or tried with a scale in one launch each, where the reference has
ten or more for every few rows, with temporaries of their size. What is computed for each row, group or block (scales,
zero points) is left to the functions of torch that the reference calls; so are largest magnitudes, of which torch is
quick. What is not here is the reference's. What makes the bits the same is in :mod:`.triton_numbers`.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from modelexport.quantization.kernels import reference
from modelexport.quantization.kernels.scales import affine_of, numbers, scale_of
from modelexport.quantization.kernels.triton_numbers import (
    E2M1,
    E4M3,
    EXACT,
    INTEGERS,
    e2m1_code,
    e2m1_value,
    e4m3_byte,
    e4m3_value,
    narrowed,
    nearest_number,
    on,
    widened,
)

PLAIN = tl.constexpr(3)  # a kind of stored numbers: floats as they are
BLOCK = 256
"""Columns, or words of packed numbers, that a program has at a time."""
SEARCHED = 8
"""Rows that a program of a search has at a time."""
_AMAX_ELEMENTS = 1 << 24


def __getattr__(name: str) -> Any:
    """Returns the reference's, for what is not here."""
    return getattr(reference, name)


def bits_alike(tensor: Tensor) -> Tensor:
    """The tensor as Triton is given it: bfloat16 as int16, e4m3 as uint8."""
    same = {torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8}
    return tensor.view(same.get(tensor.dtype, tensor.dtype))


def packing(q: Tensor, bits: int = 8) -> dict[str, Any]:
    """Returns how numbers are stored in ``q``: their kind, how many are in an element, and the bits of each."""
    if q.dtype == torch.uint8:
        return {"KIND": E2M1, "PER": 2, "BITS": 4}
    if q.dtype == torch.int32:
        return {"KIND": INTEGERS, "PER": 32 // bits, "BITS": bits}
    kind = {torch.int8: INTEGERS, torch.float8_e4m3fn: E4M3}.get(q.dtype, PLAIN)
    return {"KIND": kind, "PER": 1, "BITS": bits}


def group_amax(weight: Tensor, groups: int, of: Callable[[Tensor], Tensor]) -> Tensor:
    """The largest magnitudes, or the extremes, of each row's groups."""
    parts = reference._row_blocks(*weight.shape, elements=_AMAX_ELEMENTS)
    found = [of(weight[part].unflatten(1, (groups, -1))) for part in parts]
    return found[0] if len(found) == 1 else torch.cat(found)


@triton.jit
def encode_kernel(
    weight,
    steps,
    shifts,
    q,
    columns,
    group,
    scales,
    side,
    weight_row,
    weight_column,
    q_row,
    q_column,
    KIND: tl.constexpr,
    PER: tl.constexpr,
    BITS: tl.constexpr,
    SHIFTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: ``BLOCK`` elements of ``q`` in one row."""
    row = tl.program_id(0).to(tl.int64)
    unit = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    element = tl.zeros([BLOCK], tl.int32)
    for place in tl.static_range(PER):
        column = unit * PER + place
        inside = column < columns
        value = widened(tl.load(weight + row * weight_row + column.to(tl.int64) * weight_column, mask=inside, other=0))
        at = (row // side) * scales + column // group
        step = tl.load(steps + at, mask=inside, other=1.0)
        ratio = tl.div_rn(value, step)
        if KIND == E4M3:
            code = e4m3_byte(ratio)
        elif KIND == E2M1:
            code = e2m1_code(ratio)
        else:
            if SHIFTED:
                number = nearest_number(ratio, tl.load(shifts + at, mask=inside, other=0.0), KIND, BITS)
            else:
                number = nearest_number(ratio, 0.0, KIND, BITS)
            code = number.to(tl.int32)
            if PER > 1:
                code += 1 << (BITS - 1)
        element |= tl.where(inside, code, 0) << (place * BITS)
    there = q + row * q_row + unit.to(tl.int64) * q_column
    tl.store(there, element.to(q.dtype.element_ty), mask=unit * PER < columns)


def encode(
    weight: Tensor, steps: Tensor, shifts: Tensor | None, q: Tensor, group: int, *, bits: int = 8, side: int = 1
) -> None:
    """Rounds ``weight / step (+ shift)`` and stores it.

    Args:
        steps, shifts: float32 ``[ceil(rows / side), n]``, contiguous, one for each ``group`` columns.
        q: int8, float8_e4m3fn, int32 words of so many ``bits`` a number, or uint8, two e2m1 in each.
    """
    rows, columns = weight.shape
    how = packing(q, bits)
    source, target = bits_alike(weight), bits_alike(q)
    given = (source, steps, steps if shifts is None else shifts, target, columns, group, steps.shape[1], side)
    grid = (rows, triton.cdiv(triton.cdiv(columns, how["PER"]), BLOCK))
    with on(weight.device):
        encode_kernel[grid](
            *given, *source.stride(), *target.stride(), **how, SHIFTED=shifts is not None, BLOCK=BLOCK, **EXACT
        )


@triton.jit
def _stored_values(
    q, steps, shifts, column, inside, q_column, group, KIND: tl.constexpr, PER: tl.constexpr, BITS: tl.constexpr
):
    """The stored numbers of some columns of a row, to whose first elements the others point; no steps: it is plain."""
    element = tl.load(q + (column // PER).to(tl.int64) * q_column, mask=inside, other=0)
    if KIND == PLAIN:
        number = widened(element)
    else:
        code = element.to(tl.int32)
        if PER > 1:
            code = (code >> ((column % PER) * BITS)) & ((1 << BITS) - 1)
        if KIND == E4M3:
            number = e4m3_value(code)
        elif KIND == E2M1:
            number = e2m1_value(code)
        elif PER > 1:
            number = (code - (1 << (BITS - 1))).to(tl.float32)
        else:
            number = code.to(tl.float32)
    if shifts is not None:
        number = number - tl.load(shifts + column // group, mask=inside, other=0.0)
    if steps is not None:
        number = number * tl.load(steps + column // group, mask=inside, other=0.0)
    return number


@triton.jit
def decode_kernel(
    q,
    steps,
    shifts,
    out,
    columns,
    group,
    scales,
    q_row,
    q_column,
    out_row,
    out_column,
    KIND: tl.constexpr,
    PER: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: ``BLOCK`` columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    if shifts is not None:
        shifts += row * scales
    value = _stored_values(
        q + row * q_row, steps + row * scales, shifts, column, inside, q_column, group, KIND, PER, BITS
    )
    there = out + row * out_row + column.to(tl.int64) * out_column
    tl.store(there, narrowed(value, out.dtype.element_ty), mask=inside)


def decode(q: Tensor, steps: Tensor, shifts: Tensor | None, out: Tensor, group: int, *, bits: int = 8) -> None:
    """Fills ``out`` (bf16, fp16 or float32) with ``(number - shift) * step``; see :func:`encode`."""
    rows, columns = out.shape
    source, target = bits_alike(q), bits_alike(out)
    given = (source, steps.contiguous(), None if shifts is None else shifts.contiguous(), target)
    with on(out.device):
        decode_kernel[(rows, triton.cdiv(columns, BLOCK))](
            *(*given, columns, group, steps.shape[1], *source.stride(), *target.stride()),
            **packing(q, bits),
            BLOCK=BLOCK,
            **EXACT,
        )


@triton.jit
def _in_order(tile, COUNT: tl.constexpr):
    """Sum over the first dim of squares, one after the other; among zeros, an element is its own sum in any order."""
    place = tl.arange(0, COUNT)[:, None]
    total = tl.sum(tl.where(place == 0, tile, 0.0), axis=0)
    for number in tl.static_range(1, COUNT):
        total += tl.sum(tl.where(place == number, tile, 0.0), axis=0)
    return total


@triton.jit
def _sum_of_lanes(lanes):
    """The sum of 128 lanes: those 16 apart first."""
    return _in_order(tl.reshape(_in_order(tl.reshape(lanes, [8, 16]), 8), [16, 1]), 16)


@triton.jit
def error_kernel(
    weight,
    q,
    steps,
    shifts,
    out,
    columns,
    group,
    scales,
    weight_row,
    weight_column,
    q_row,
    q_column,
    KIND: tl.constexpr,
    PER: tl.constexpr,
    BITS: tl.constexpr,
):
    """One program: one row. A fused multiply-add would change nothing here: squares of float32 are exact in float64."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, 128)
    errors, squares = tl.zeros([128], tl.float64), tl.zeros([128], tl.float64)
    if steps is not None:
        steps += row * scales
    if shifts is not None:
        shifts += row * scales
    for step in range(tl.cdiv(columns, 128)):
        column = step * 128 + lane
        inside = column < columns
        there = weight + row * weight_row + column.to(tl.int64) * weight_column
        wide = widened(tl.load(there, mask=inside, other=0))
        value = _stored_values(q + row * q_row, steps, shifts, column, inside, q_column, group, KIND, PER, BITS)
        error, square = (wide - value).to(tl.float64), wide.to(tl.float64)
        errors += error * error
        squares += square * square
    first = out + row * 2 + tl.arange(0, 1)
    tl.store(first, _sum_of_lanes(errors))
    tl.store(first + 1, _sum_of_lanes(squares))


def errors_of(
    weight: Tensor, q: Tensor, steps: Tensor | None, shifts: Tensor | None, out: Tensor, group: int, *, bits: int = 8
) -> None:
    """Fills ``out`` (float64 ``[rows, 2]``) as :func:`.reference.squared_error` does; see :func:`encode`."""
    rows, columns = weight.shape
    found = torch.empty(rows, 2, dtype=torch.float64, device=weight.device)
    source, stored = bits_alike(weight), bits_alike(q)
    parts = (None if part is None else part.contiguous() for part in (steps, shifts))
    scales = 0 if steps is None else steps.shape[1]
    how = packing(q, bits) if steps is not None or q.dtype == torch.float8_e4m3fn else {**packing(q), "KIND": PLAIN}
    with on(weight.device):
        error_kernel[(rows,)](
            *(source, stored, *parts, found, columns, group, scales, *source.stride(), *stored.stride()), **how, **EXACT
        )
    out.copy_(found)


def quantise_rows(weight: Tensor, amax: Tensor | None, q: Tensor, scale: Tensor, limit: float) -> int:
    """See :func:`.reference.quantise_rows`."""
    given = None if amax is None else amax.unsqueeze(1)
    return quantise_groups(weight, weight.shape[1], q, scale, limit, bits=8, amax=given)


def quantise_groups(
    weight: Tensor,
    group: int,
    q: Tensor,
    scale: Tensor,
    limit: float,
    *,
    bits: int = 4,
    zero: Tensor | None = None,
    amax: Tensor | None = None,
) -> int:
    """See :func:`.reference.quantise_groups`; nothing is written where a row is bad."""
    groups = scale.shape[1]
    if groups == 0:
        return -1
    own = group_amax(weight, groups, reference._amax if zero is None else reference._extremes)
    used = own if amax is None else amax
    bad = reference._first_bad(torch.where(torch.isfinite(own), used, own), 0)
    if bad >= 0:
        return bad
    if zero is None:
        step, shift = scale_of(used, limit, numbers(q.dtype, bits), scale.dtype, weight.dtype), None
    else:
        step, shift = affine_of(used, bits, scale.dtype, weight.dtype)
        zero.copy_(shift)
    scale.copy_(step)
    encode(weight, step.float(), shift, q, weight.shape[1] // groups, bits=bits)
    return -1


def quantise_blocks(weight: Tensor, side: int, amax: Tensor | None, q: Tensor, scale: Tensor, limit: float) -> int:
    """See :func:`.reference.quantise_blocks`; nothing is written where a row is bad."""
    rows, cols = weight.shape
    whole = cols // side * side
    parts = [group_amax(weight[:, :whole], whole // side, reference._amax)] if whole else []
    own = torch.cat([*parts, *([reference._amax(weight[:, whole:]).unsqueeze(1)] if whole < cols else [])], dim=1)
    bad = reference._first_bad(own, 0)
    padded = torch.nn.functional.pad(own, (0, 0, 0, -rows % side))
    used = padded.unflatten(0, (-1, side)).amax(dim=1) if amax is None else amax
    given = reference._first_bad(used, 0)
    if bad >= 0 and (given < 0 or bad // side <= given):
        return bad
    if given >= 0:
        return given * side
    step = scale_of(used, limit, numbers(q.dtype, 8), scale.dtype, weight.dtype)
    scale.copy_(step)
    encode(weight, step.float(), None, q, side, side=side)
    return -1


def dequantise(
    q: Tensor, scale: Tensor, out: Tensor, *, group: int | None = None, bits: int = 4, zero: Tensor | None = None
) -> None:
    """See :func:`.reference.dequantise`."""
    columns = reference.columns_per_scale(out.shape[1], scale, group)
    decode(q, scale.float(), None if zero is None else zero.float(), out, columns, bits=bits)


def squared_error(
    weight: Tensor,
    q: Tensor,
    scale: Tensor | None,
    out: Tensor,
    *,
    group: int | None = None,
    bits: int = 4,
    zero: Tensor | None = None,
) -> None:
    """See :func:`.reference.squared_error`."""
    columns = reference.columns_per_scale(weight.shape[1], scale, group)
    steps, shifts = (None if part is None else part.float() for part in (scale, zero))
    errors_of(weight, q, steps, shifts, out, columns, bits=bits)


@triton.jit
def search_kernel(
    weight,
    steps,
    shifts,
    finite,
    out,
    rows,
    columns,
    tried,
    weight_row,
    weight_column,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    SEARCHED: tl.constexpr,
):
    """One program: one of the scales that are tried, for ``SEARCHED`` rows."""
    row = tl.program_id(0).to(tl.int64) * SEARCHED + tl.arange(0, SEARCHED)
    here = row < rows
    at = row * tried + tl.program_id(1)
    step = tl.load(steps + at, mask=here, other=1.0)[:, None]
    shift = tl.zeros([SEARCHED, 1], tl.float32)
    if shifts is not None:
        shift = tl.load(shifts + at, mask=here, other=0.0)[:, None]
    lanes = tl.zeros([SEARCHED, 32], tl.float64)
    for begin in range(0, columns, 32):
        column = (begin + tl.arange(0, 32))[None, :]
        inside = here[:, None] & (column < columns)
        there = weight + row[:, None] * weight_row + column.to(tl.int64) * weight_column
        wide = widened(tl.load(there, mask=inside, other=0))
        value = nearest_number(tl.div_rn(wide, step), shift, KIND, BITS) - shift
        error = tl.where(inside, wide - value * step, 0.0).to(tl.float64)
        lanes += error * error
    half = tl.sum(tl.reshape(lanes, [SEARCHED, 2, 16]), axis=1)  # of two numbers: there is one order
    half = tl.sum(tl.reshape(half, [SEARCHED, 2, 8]), axis=1)
    half = tl.sum(tl.reshape(half, [SEARCHED, 2, 4]), axis=1)
    half = tl.sum(tl.reshape(half, [SEARCHED, 2, 2]), axis=1)
    total = tl.sum(half, axis=1)
    known = tl.load(finite + row, mask=here, other=0) != 0
    tl.store(out + at, tl.where(known, total, 0.0), mask=here)


def search_errors(
    weight: Tensor,
    amax: Tensor,
    storage: torch.dtype,
    scale_dtype: torch.dtype,
    limit: float,
    shrinks: Tensor,
    out: Tensor,
    *,
    bits: int = 8,
) -> None:
    """See :func:`.reference.search_errors`."""
    used, finite = reference.finite_amax(amax)
    tried = used.unsqueeze(1) * (shrinks if amax.dim() == 1 else shrinks.unsqueeze(1))
    steps, shifts = reference.tried_scales(tried, amax.dim() == 2, storage, scale_dtype, limit, bits, weight.dtype)
    found = torch.empty(out.shape, dtype=torch.float64, device=weight.device)
    source, kind = bits_alike(weight), E4M3 if storage == torch.float8_e4m3fn else INTEGERS
    parts = (steps.contiguous(), None if shifts is None else shifts.contiguous(), finite.to(torch.uint8))
    with on(weight.device):
        search_kernel[(triton.cdiv(len(weight), SEARCHED), shrinks.numel())](
            *(source, *parts, found, *weight.shape, shrinks.numel(), *source.stride()),
            KIND=kind,
            BITS=bits,
            SEARCHED=SEARCHED,
            **EXACT,
        )
    out.copy_(found)
