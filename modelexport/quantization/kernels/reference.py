"""The integer and FP8 formats' arithmetic in plain torch: any device, no compiler; what the fused kernels must match.

Every function here has a twin of the same name and signature in :mod:`.fused` that gives the same bits. Three
things make that possible on every device: magnitudes are compared as integers (so NaN and Inf surface as
the largest magnitudes instead of vanishing in a maximum), division is always by a *tensor* (torch multiplies
by the reciprocal when a GPU tensor is divided by a Python number, which rounds differently), and squares are
added lane by lane in a fixed order.

Weights are ``[rows, cols]`` in bfloat16, float16 or float32; rows may be further apart than ``cols``. Large
weights are worked through in blocks of rows, so that temporaries stay a few megabytes. What the formats' scales
are is in :mod:`.scales`.

Stored numbers are int8, float8_e4m3fn, or int32 words of 4 or 8 ``bits`` each: value + 2^(bits - 1), the first in the
lowest bits, what is left of a row's last word 0. Their zero points are int8, one for each scale, not packed.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from modelexport.quantization.kernels.scales import (
    _SAME_SIZE_INT,
    FP8_MAX,
    affine_of,
    largest_scale,
    numbers,
    scale_of,
)

__all__ = ["FP8_MAX", "LANES", "largest_scale", "scale_of"]

LANES = 128
"""Partial sums per row in :func:`squared_error`: column c is added to lane ``c % LANES``."""

SEARCH_LANES = 32
"""The same in :func:`search_errors`."""

_MAGNITUDE_MASK = {torch.bfloat16: 0x7FFF, torch.float16: 0x7FFF, torch.float32: 0x7FFFFFFF}
_BLOCK_ELEMENTS = 1 << 20


def _row_blocks(rows: int, cols: int, *, elements: int = _BLOCK_ELEMENTS) -> Iterator[slice]:
    step = max(1, elements // max(1, cols))
    return (slice(start, min(rows, start + step)) for start in range(0, rows, step))


def _amax(values: Tensor) -> Tensor:
    """Largest magnitude along the last dim as float32; NaN or Inf where there is one."""
    if values.shape[-1] == 0:
        return torch.zeros(values.shape[:-1], dtype=torch.float32, device=values.device)
    bits = values.view(_SAME_SIZE_INT[values.dtype]) & _MAGNITUDE_MASK[values.dtype]
    return bits.amax(dim=-1).view(values.dtype).float()


def _extremes(values: Tensor) -> Tensor:
    """The extremes below and above zero along the last dim: float32 ``[..., 2]``; NaN or Inf as in _amax."""
    if values.shape[-1] == 0:
        return torch.zeros(*values.shape[:-1], 2, dtype=torch.float32, device=values.device)
    bits = values.view(_SAME_SIZE_INT[values.dtype])
    none, mask = bits.new_zeros(()), _MAGNITUDE_MASK[values.dtype]
    sides = [torch.where(bits < 0, bits & mask, none), torch.where(bits < 0, none, bits)]
    return torch.stack([side.amax(dim=-1).view(values.dtype).float() for side in sides], dim=-1)


def row_amax(weight: Tensor) -> Tensor:
    """Largest magnitude of each row: float32 ``[rows]``, non-finite where the row holds NaN or Inf."""
    rows, cols = weight.shape
    out = torch.empty(rows, dtype=torch.float32, device=weight.device)
    for block in _row_blocks(rows, cols):
        out[block] = _amax(weight[block])
    return out


def row_extremes(weight: Tensor) -> Tensor:
    """Returns each row's extremes below and above zero: float32 ``[rows, 2]``, neither negative.

    One of them is non-finite where the row holds NaN or Inf.
    """
    rows, cols = weight.shape
    out = torch.empty(rows, 2, dtype=torch.float32, device=weight.device)
    for block in _row_blocks(rows, cols):
        out[block] = _extremes(weight[block])
    return out


def _first_bad(amax: Tensor, start: int) -> int:
    bad = (~torch.isfinite(amax)).nonzero()
    return start + int(bad[0, 0]) if bad.numel() else -1


def _rounded(ratio: Tensor, storage: torch.dtype, bits: int) -> Tensor:
    """Ratios to the nearest number that is stored, as float32."""
    if storage == torch.float8_e4m3fn:
        return ratio.clamp(-FP8_MAX, FP8_MAX).to(storage).float()
    half = 2.0 ** (bits - 1)
    return ratio.clamp(-half, half - 1.0).round()


def _store(q: Tensor, codes: Tensor, bits: int) -> None:
    """Writes numbers (float32 ``[rows, cols]``) as they are stored."""
    q.copy_(pack(codes, bits) if q.dtype == torch.int32 else codes.to(q.dtype))


def pack(codes: Tensor, bits: int) -> Tensor:
    """Integers of so many bits, along the last dim, in int32 words; the last one is filled up with zero bits."""
    per_word = 32 // bits
    unsigned = codes.to(torch.int32) + (1 << (bits - 1))
    unsigned = torch.nn.functional.pad(unsigned, (0, -codes.shape[-1] % per_word))
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=codes.device)
    words = unsigned.unflatten(-1, (-1, per_word)) if unsigned.shape[-1] else unsigned.unsqueeze(-1)
    return (words << shifts).sum(dim=-1).to(torch.int32)  # disjoint bits: the sum is their union


def unpack(words: Tensor, bits: int, count: int) -> Tensor:
    """The first ``count`` integers in each row of int32 words, as int32."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    unsigned = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return unsigned.flatten(-2)[..., :count] - (1 << (bits - 1))


def quantise_rows(weight: Tensor, amax: Tensor | None, q: Tensor, scale: Tensor, limit: float) -> int:
    """One scale per row, amax / ``limit``.

    Fills ``q`` (int8 or float8_e4m3fn, ``[rows, cols]``) and ``scale`` (``[rows, 1]``).
    ``amax`` (float32 ``[rows]``) replaces the rows' own.

    Returns the first row that holds NaN or Inf (or whose ``amax`` is non-finite), else -1.
    """
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
    """One scale for every ``group`` columns of a row, which divide the columns.

    Fills ``q`` (see the module), ``scale`` (``[rows, cols / group]``, any of the three dtypes) and ``zero`` (int8, as
    ``scale``), where there are zero points. A scale is amax / ``limit``, or what :func:`.scales.affine_of` makes of a
    group's extremes where there are zero points (then ``limit`` does not count). ``amax``, float32
    ``[rows, cols / group]`` (with zero points ``[rows, cols / group, 2]``), replaces the groups' own.

    Returns the first row with NaN or Inf (of its own, or given), else -1.
    """
    rows, cols = weight.shape
    groups = scale.shape[1]
    if groups == 0:
        return -1
    storage = numbers(q.dtype, bits)
    for block in _row_blocks(rows, cols):
        values = weight[block].unflatten(1, (groups, cols // groups))
        own = _amax(values) if zero is None else _extremes(values)
        used = own if amax is None else amax[block]
        bad = _first_bad(torch.where(torch.isfinite(own), used, own), block.start)
        if bad >= 0:
            return bad
        if zero is None:
            step = scale_of(used, limit, storage, scale.dtype, weight.dtype)
            ratio = values.float() / step.float().unsqueeze(-1)
        else:
            step, shift = affine_of(used, bits, scale.dtype, weight.dtype)
            ratio = values.float() / step.float().unsqueeze(-1) + shift.unsqueeze(-1)
            zero[block] = shift.to(torch.int8)
        _store(q[block], _rounded(ratio, q.dtype, bits).flatten(1), bits)
        scale[block] = step
    return -1


def nearest_groups(
    weight: Tensor, group: int, out: Tensor, scale_dtype: torch.dtype, limit: float, *, bits: int, affine: bool = False
) -> int:
    """Fills ``out``, float32 as ``weight``, with the values that :func:`quantise_groups` makes of integers of so many
    bits stored with scales in ``scale_dtype``, with zero points where ``affine``.

    Returns the first row with NaN or Inf, else -1.
    """
    storage = torch.int32 if bits == 4 else torch.int8
    for block in _row_blocks(*weight.shape):
        values = weight[block].unflatten(1, (-1, group))
        own = _extremes(values) if affine else _amax(values)
        bad = _first_bad(own.flatten(1).amax(dim=1), block.start)
        if bad >= 0:
            return bad
        step, zero = tried_scales(own, affine, storage, scale_dtype, limit, bits, weight.dtype)
        wide, ratio = step.unsqueeze(-1), values.float() / step.unsqueeze(-1)
        if zero is None:
            number = _rounded(ratio, torch.int8, bits)
        else:
            number = _rounded(ratio + zero.unsqueeze(-1), torch.int8, bits) - zero.unsqueeze(-1)
        out[block] = (number * wide).flatten(1)
    return -1


def quantise_blocks(weight: Tensor, side: int, amax: Tensor | None, q: Tensor, scale: Tensor, limit: float) -> int:
    """One scale, amax / ``limit``, for every ``side`` rows and columns; the last ones of each may be fewer.

    Fills ``q`` (float8_e4m3fn, ``[rows, cols]``) and ``scale`` (``[ceil(rows / side), ceil(cols / side)]``).
    ``amax``, float32 as ``scale``, replaces the blocks' own. Returns the first row with NaN or Inf, else -1.
    """
    rows, cols = weight.shape
    for number, start in enumerate(range(0, rows, side)):
        values = weight[start : start + side]
        padded = torch.nn.functional.pad(values, (0, -cols % side)).unflatten(1, (-1, side)) if cols else values
        own = _amax(padded)
        bad = _first_bad(own, start)
        used = own.amax(dim=0) if amax is None else amax[number]
        if bad >= 0 or not bool(torch.isfinite(used).all()):
            return max(bad, start)
        step = scale_of(used, limit, numbers(q.dtype, 8), scale.dtype, weight.dtype)
        ratio = padded.float() / step.float().unsqueeze(-1)
        _store(q[start : start + side], _rounded(ratio, q.dtype, 8).flatten(1)[:, :cols], 8)
        scale[number] = step
    return -1


def copy_finite(weight: Tensor, out: Tensor) -> int:
    """Copies ``weight`` into ``out`` (same shape, dtype); returns the first row with NaN or Inf, else -1."""
    for block in _row_blocks(*weight.shape):
        bad = _first_bad(_amax(weight[block]), block.start)
        if bad >= 0:
            return bad
        out[block] = weight[block]
    return -1


def _decode(q: Tensor, scale: Tensor | None, cols: int, group: int, bits: int, zero: Tensor | None) -> Tensor:
    """float32 values of stored rows; plain where there is no scale."""
    if scale is None:
        return q.float()
    codes = unpack(q, bits, cols).float() if q.dtype == torch.int32 else q.float()
    if cols == 0 or scale.shape[1] == 0:
        return codes[:, :cols]
    padded = torch.nn.functional.pad(codes, (0, scale.shape[1] * group - cols)).unflatten(1, (-1, group))
    if zero is not None:
        padded = padded - zero.float().unsqueeze(-1)
    return (padded * scale.float().unsqueeze(-1)).flatten(1)[:, :cols]


def columns_per_scale(cols: int, scale: Tensor | None, group: int | None) -> int:
    """``group``, or what the number of scales in a row says where that is None."""
    if group is not None or scale is None:
        return group or 1
    return max(1, cols // max(1, scale.shape[1]))


def dequantise(
    q: Tensor, scale: Tensor, out: Tensor, *, group: int | None = None, bits: int = 4, zero: Tensor | None = None
) -> None:
    """Fills ``out`` (``[rows, cols]``, bf16, fp16 or float32) with ``(q - zero) * scale`` computed in float32.

    ``scale`` and ``zero`` are ``[rows, n]``: one for every ``group`` columns, the last of which may be fewer (None:
    ``cols / n``).
    """
    cols = out.shape[1]
    group = columns_per_scale(cols, scale, group)
    for block in _row_blocks(*out.shape):
        zeros = None if zero is None else zero[block]
        out[block] = _decode(q[block], scale[block], cols, group, bits, zeros).to(out.dtype)


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
    """Fills ``out`` (float64 ``[rows, 2]``) with each row's sum((w - deq)^2) and sum(w^2); see :func:`dequantise`.

    The difference is taken in float32, its square (exact) and the sums in float64: column c is added to lane
    ``c % LANES`` in ascending order; then lanes 16 apart are added, and the 16 sums. Nothing else decides.
    """
    rows, cols = weight.shape
    group = columns_per_scale(cols, scale, group)
    for block in _row_blocks(rows, cols):
        wide = weight[block].float()
        scales, zeros = (None if part is None else part[block] for part in (scale, zero))
        error = wide - _decode(q[block], scales, cols, group, bits, zeros)
        out[block, 0] = _lane_sum_of_squares(error)
        out[block, 1] = _lane_sum_of_squares(wide)


def _lanes_of_squares(values: Tensor, count: int) -> Tensor:
    """Squares in float64, column c added to lane ``c % count``, in ascending order."""
    wide = values.double()
    return _lanes(wide * wide, count)


def _lanes(values: Tensor, count: int) -> Tensor:
    """float64 values, column c added to lane ``c % count``, in ascending order."""
    rows, cols = values.shape
    padded = torch.nn.functional.pad(values, (0, -cols % count))
    parts = padded.unflatten(1, (-1, count)) if cols else padded.new_zeros(rows, 0, count)
    lanes = padded.new_zeros(rows, count)
    for step in range(parts.shape[1]):
        lanes += parts[:, step]
    return lanes


def sum_of_lanes(values: Tensor, count: int) -> Tensor:
    """Sum of each row of float64 ``[rows, cols]``: column c is added to lane ``c % count`` (a power of two), then the
    upper half of the lanes to the lower half, until one is left."""
    lanes = _lanes(values, count)
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]


def _lane_sum_of_squares(values: Tensor) -> Tensor:
    lanes = _lanes_of_squares(values, LANES)
    total = lanes[:, :16].clone()
    for step in range(16, LANES, 16):
        total += lanes[:, step : step + 16]
    for lane in range(1, 16):
        total[:, 0] += total[:, lane]
    return total[:, 0]


def finite_amax(amax: Tensor) -> tuple[Tensor, Tensor]:
    """Largest magnitudes (``[rows]``) or extremes (``[rows, 2]``), 0 for what is not finite, and which rows are."""
    return amax.nan_to_num(0.0, 0.0, 0.0), torch.isfinite(amax.unsqueeze(1).flatten(1)).all(dim=1)


def tried_scales(
    amax: Tensor,
    affine: bool,
    storage: torch.dtype,
    scale_dtype: torch.dtype,
    limit: float,
    bits: int,
    weight_dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None]:
    """The scales that a search tries, float32 ``[...]``, and zero points where ``affine`` (``amax``: ``[..., 2]``)."""
    if affine:
        stored, zero = affine_of(amax, bits, scale_dtype, weight_dtype)
        return stored.float(), zero
    largest = torch.int32 if bits == 4 else storage
    return scale_of(amax, limit, largest, scale_dtype, weight_dtype).float(), None


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
    """Fills ``out`` (float64 ``[rows, tried]``) with the squared error of each row for each scale that is tried.

    Args:
        amax: float32 ``[rows]``, from which :func:`.scales.scale_of` makes the scales; or ``[rows, 2]``, from which
            :func:`.scales.affine_of` makes scales and zero points. Rows of which it is not finite get 0.
        storage: int8 (integers of so many ``bits``) or float8_e4m3fn.
        shrinks: float32 ``[tried]``, by which ``amax`` is multiplied.

    Errors are those of :func:`squared_error`, but for the order of the sum: column c is added to lane
    ``c % SEARCH_LANES``, then the upper half of the lanes to the lower half, until one is left.
    """
    for block in _row_blocks(*weight.shape):
        wide = weight[block].float()
        used, finite = finite_amax(amax[block])
        for number in range(shrinks.numel()):
            tried = used * shrinks[number]
            step, shift = tried_scales(tried, used.dim() == 2, storage, scale_dtype, limit, bits, weight.dtype)
            ratio = wide / step.unsqueeze(1)
            ratio = ratio if shift is None else ratio + shift.unsqueeze(1)
            value = _rounded(ratio, storage, bits)
            value = value if shift is None else value - shift.unsqueeze(1)
            error = (wide - value * step.unsqueeze(1)).double()
            out[block, number] = torch.where(finite, sum_of_lanes(error * error, SEARCH_LANES), 0.0)
