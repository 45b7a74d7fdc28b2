"""The number formats' arithmetic in plain torch: any device, no compiler; what the fused kernels must match.

Every function here has a twin of the same name and signature in :mod:`.fused` that gives the same bits. Three
things make that possible on every device: magnitudes are compared as integers (so NaN and Inf surface as
the largest magnitudes instead of vanishing in a maximum), division is always by a *tensor* (torch multiplies
by the reciprocal when a GPU tensor is divided by a Python number, which rounds differently), and squares are
added lane by lane in a fixed order.

Weights are ``[rows, cols]`` in bfloat16, float16 or float32; rows may be further apart than ``cols``. Large
weights are worked through in blocks of rows, so that temporaries stay a few megabytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

SUPPORTED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of weights (and of the scales stored for them)."""

FP8_MAX = 448.0
"""Largest finite value of float8_e4m3fn."""

LANES = 128
"""Partial sums per row in :func:`squared_error`: column c is added to lane ``c % LANES``."""

_SAME_SIZE_INT = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
_MAGNITUDE_MASK = {torch.bfloat16: 0x7FFF, torch.float16: 0x7FFF, torch.float32: 0x7FFFFFFF}
_SCALE_FLOOR = {torch.bfloat16: 2.0**-126, torch.float16: 2.0**-24, torch.float32: 2.0**-126}
_LARGEST_VALUE = {torch.int8: 128.0, torch.float8_e4m3fn: FP8_MAX, torch.int32: 8.0}
_BLOCK_ELEMENTS = 1 << 20


def _row_blocks(rows: int, cols: int) -> Iterator[slice]:
    step = max(1, _BLOCK_ELEMENTS // max(1, cols))
    return (slice(start, min(rows, start + step)) for start in range(0, rows, step))


def _amax(values: Tensor) -> Tensor:
    """Largest magnitude along the last dim as float32; NaN or Inf where there is one."""
    if values.shape[-1] == 0:
        return torch.zeros(values.shape[:-1], dtype=torch.float32, device=values.device)
    bits = values.view(_SAME_SIZE_INT[values.dtype]) & _MAGNITUDE_MASK[values.dtype]
    return bits.amax(dim=-1).view(values.dtype).float()


def row_amax(weight: Tensor) -> Tensor:
    """Largest magnitude of each row: float32 ``[rows]``, non-finite where the row holds NaN or Inf."""
    rows, cols = weight.shape
    out = torch.empty(rows, dtype=torch.float32, device=weight.device)
    for block in _row_blocks(rows, cols):
        out[block] = _amax(weight[block])
    return out


@cache
def largest_scale(storage: torch.dtype, dtype: torch.dtype) -> float:
    """The largest scale in ``dtype`` of which no multiple that ``storage`` holds overflows ``dtype``."""
    top = torch.finfo(dtype).max
    scale = torch.tensor(top / _LARGEST_VALUE[storage], dtype=torch.float64).to(dtype)
    if float(scale) * _LARGEST_VALUE[storage] > top:
        scale = (scale.view(_SAME_SIZE_INT[dtype]) - 1).view(dtype)  # the next one below
    return float(scale)


def scale_of(amax: Tensor, limit: float, storage: torch.dtype, dtype: torch.dtype) -> Tensor:
    """``amax / limit`` in float32, rounded to ``dtype``; 1 for amax 0.

    It is never zero, nor a denormal of bf16 or float32, and at most :func:`largest_scale`.
    """
    scale = (amax / amax.new_full((1,), limit)).clamp(max=torch.finfo(dtype).max).to(dtype)
    scale = scale.clamp(min=_SCALE_FLOOR[dtype], max=largest_scale(storage, dtype))
    return torch.where(amax == 0, torch.ones_like(scale), scale)


def _first_bad(amax: Tensor, start: int) -> int:
    bad = (~torch.isfinite(amax)).nonzero()
    return start + int(bad[0, 0]) if bad.numel() else -1


def quantise_rows(weight: Tensor, amax: Tensor | None, q: Tensor, scale: Tensor, limit: float) -> int:
    """One scale per row, amax / ``limit``.

    Fills ``q`` (int8 or float8_e4m3fn, ``[rows, cols]``) and ``scale`` (``[rows, 1]``, the weight's dtype).
    ``amax`` (float32 ``[rows]``) replaces the rows' own.

    Returns the first row that holds NaN or Inf (or whose ``amax`` is non-finite), else -1.
    """
    for block in _row_blocks(*weight.shape):
        values = weight[block]
        own = _amax(values)
        used = own if amax is None else amax[block]
        bad = _first_bad(torch.where(torch.isfinite(own), used, own), block.start)
        if bad >= 0:
            return bad
        step = scale_of(used, limit, q.dtype, weight.dtype).unsqueeze(1)
        ratio = values.float() / step.float()
        if q.dtype == torch.int8:
            q[block] = ratio.clamp(-128.0, 127.0).round().to(torch.int8)
        else:
            q[block] = ratio.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
        scale[block] = step
    return -1


def quantise_groups(weight: Tensor, group: int, q: Tensor, scale: Tensor, limit: float) -> int:
    """4-bit groups along a row: ``q`` int32 ``[rows, cols / 8]`` (value + 8, low bits first), ``scale``
    ``[rows, cols / group]`` in the weight's dtype. Returns the first row with NaN or Inf, else -1.
    """
    rows, cols = weight.shape
    if cols == 0:
        return -1
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=weight.device)
    for block in _row_blocks(rows, cols):
        values = weight[block].unflatten(1, (cols // group, group))
        amax = _amax(values)
        bad = _first_bad(amax, block.start)
        if bad >= 0:
            return bad
        step = scale_of(amax, limit, torch.int32, weight.dtype)
        ratio = values.float() / step.float().unsqueeze(-1)
        codes = ratio.clamp(-8.0, 7.0).round().to(torch.int32) + 8
        words = codes.reshape(-1, cols // 8, 8) << shifts
        q[block] = words.sum(dim=-1).to(torch.int32)  # disjoint bits: the sum is their union
        scale[block] = step
    return -1


def copy_finite(weight: Tensor, out: Tensor) -> int:
    """Copies ``weight`` into ``out`` (same shape, dtype); returns the first row with NaN or Inf, else -1."""
    for block in _row_blocks(*weight.shape):
        bad = _first_bad(_amax(weight[block]), block.start)
        if bad >= 0:
            return bad
        out[block] = weight[block]
    return -1


def _decode(q: Tensor, scale: Tensor | None) -> Tensor:
    """float32 values of stored rows: packed int4 where ``q`` is int32, plain where there is no scale."""
    if scale is None:
        return q.float()
    if q.dtype == torch.int32:
        shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=q.device)
        codes = ((q.unsqueeze(-1) >> shifts) & 15).flatten(1) - 8
        groups = codes.unflatten(1, (scale.shape[1], -1)) if scale.shape[1] else codes.unsqueeze(1)
        return (groups.float() * scale.float().unsqueeze(-1)).flatten(1)
    return q.float() * scale.float()


def dequantise(q: Tensor, scale: Tensor, out: Tensor) -> None:
    """Fills ``out`` (``[rows, cols]``, bf16, fp16 or float32) with ``q * scale`` computed in float32."""
    for block in _row_blocks(*out.shape):
        out[block] = _decode(q[block], scale[block]).to(out.dtype)


def squared_error(weight: Tensor, q: Tensor, scale: Tensor | None, out: Tensor) -> None:
    """Fills ``out`` (float64 ``[rows, 2]``) with each row's sum((w - deq)^2) and sum(w^2).

    The difference is taken in float32, its square (exact) and the sums in float64: column c is added to lane
    ``c % LANES`` in ascending order; then lanes 16 apart are added, and the 16 sums. Nothing else decides.
    """
    rows, cols = weight.shape
    for block in _row_blocks(rows, cols):
        wide = weight[block].float()
        error = wide - _decode(q[block], None if scale is None else scale[block])
        out[block, 0] = _lane_sum_of_squares(error)
        out[block, 1] = _lane_sum_of_squares(wide)


def _lane_sum_of_squares(values: Tensor) -> Tensor:
    rows, cols = values.shape
    padded = torch.nn.functional.pad(values, (0, -cols % LANES)).double()
    squares = (padded * padded).unflatten(1, (-1, LANES)) if cols else padded.new_zeros(rows, 0, LANES)
    lanes = padded.new_zeros(rows, LANES)
    for step in range(squares.shape[1]):
        lanes += squares[:, step]
    total = lanes[:, :16].clone()
    for step in range(16, LANES, 16):
        total += lanes[:, step : step + 16]
    for lane in range(1, 16):
        total[:, 0] += total[:, lane]
    return total[:, 0]
