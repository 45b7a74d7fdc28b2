"""The kernels of NVFP4, MXFP4 and MXFP8 on a GPU, in Triton: the bits of :mod:`.microscaling_reference`.

Rounding and packing, reading and errors are the kernels of :mod:`.triton`, given float32 steps; the scales are the
reference's. A search goes through all bytes that are tried in one launch. What is not here is the reference's.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from modelexport.quantization.kernels import microscaling_reference, reference
from modelexport.quantization.kernels import triton as plain
from modelexport.quantization.kernels.triton_numbers import (
    E2M1,
    E4M3,
    EXACT,
    e4m3_value,
    float_of,
    nearest_number,
    on,
    widened,
)

SEARCHED = 128
"""Groups that a program of a search has."""


def __getattr__(name: str) -> Any:
    """Returns the reference's, for what is not here."""
    return getattr(microscaling_reference, name)


@triton.jit
def search_kernel(
    weight,
    start,
    factor,
    chosen,
    groups,
    in_row,
    most,
    weight_row,
    weight_column,
    ABOVE: tl.constexpr,
    BELOW: tl.constexpr,
    LEAST: tl.constexpr,
    GROUP: tl.constexpr,
    KIND: tl.constexpr,
    SEARCHED: tl.constexpr,
):
    """One program: ``SEARCHED`` groups, each added up by itself in the order of its columns."""
    group = tl.program_id(0).to(tl.int64) * SEARCHED + tl.arange(0, SEARCHED)
    here = group < groups
    values = weight + (group // in_row) * weight_row + (group % in_row) * GROUP * weight_column
    asked = tl.load(start + group, mask=here, other=0)
    best, found = tl.full([SEARCHED], float("inf"), tl.float64), asked
    for number in range(ABOVE + BELOW + 1):
        tried = tl.minimum(tl.maximum(asked + (ABOVE - number), LEAST), most)
        if factor is not None:
            step = tl.div_rn(e4m3_value(tried), tl.load(factor) + tl.zeros([SEARCHED], tl.float32))
        else:
            step = float_of(tl.where(tried == 0, 0x400000, tried << 23))
        total = tl.zeros([SEARCHED], tl.float64)
        for column in range(GROUP):
            wide = widened(tl.load(values + column * weight_column, mask=here, other=0))
            nearest = nearest_number(tl.div_rn(wide, step), 0.0, KIND, 8)
            error = (wide - nearest * step).to(tl.float64)
            total += error * error
        better = total < best
        best, found = tl.where(better, total, best), tl.where(better, tried, found)
    tl.store(chosen + group, found, mask=here)


def _searched(weight: Tensor, start: Tensor, factor: Tensor | None, storage: torch.dtype, most: int) -> Tensor:
    """See :func:`.microscaling_reference._searched`; ``start``: int32 ``[rows, groups]``."""
    start, chosen, source = start.contiguous(), torch.empty_like(start), plain.bits_alike(weight)
    above, below, least = microscaling_reference.range_of_search(factor)
    grid = (triton.cdiv(start.numel(), SEARCHED),)
    with on(weight.device):
        search_kernel[grid](
            *(source, start, factor, chosen, start.numel(), start.shape[1], most, *source.stride()),
            ABOVE=above,
            BELOW=below,
            LEAST=least,
            GROUP=weight.shape[1] // start.shape[1],
            KIND=E2M1 if storage == torch.uint8 else E4M3,
            SEARCHED=SEARCHED,
            **EXACT,
        )
    return chosen


def quantise(weight: Tensor, q: Tensor, scale: Tensor, factor: Tensor | None, most: int, search: bool) -> int:
    """See :func:`.microscaling_reference.quantise`; nothing is written where a row is bad."""
    amax = plain.group_amax(weight, scale.shape[1], reference._amax)
    bad = reference._first_bad(amax, 0)
    if bad >= 0:
        return bad
    near = partial(_searched, weight, factor=factor, storage=q.dtype, most=most)
    stored = microscaling_reference.scales_of(amax, factor, q.dtype, most, near if search else None)
    scale.copy_(stored)
    steps = microscaling_reference.decode_scales(stored, factor)
    plain.encode(weight, steps, None, q, weight.shape[1] // scale.shape[1])
    return -1


def dequantise(q: Tensor, scale: Tensor, factor: Tensor | None, out: Tensor) -> None:
    """See :func:`.microscaling_reference.dequantise`."""
    steps = microscaling_reference.decode_scales(scale, factor)
    plain.decode(q, steps, None, out, out.shape[1] // scale.shape[1])


def squared_error(weight: Tensor, q: Tensor, scale: Tensor, factor: Tensor | None, out: Tensor) -> None:
    """See :func:`.microscaling_reference.squared_error`."""
    steps = microscaling_reference.decode_scales(scale, factor)
    plain.errors_of(weight, q, steps, None, out, weight.shape[1] // scale.shape[1])
