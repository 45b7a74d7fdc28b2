"""NVFP4, MXFP4 and MXFP8 in plain torch: any device, no compiler; what the fused kernels must match to the bit.

Numbers are those of the OCP Microscaling Formats specification (e2m1, e4m3, E8M0 scales per 32) and of NVIDIA's NVFP4
(e2m1, e4m3 scales per 16, relative to one float32 number for the whole tensor). As in :mod:`.reference`, magnitudes are
compared as integers, divisions are by tensors, sums have a fixed order. Rules are compressed-tensors':

- a group's scale is e4m3(global * (amax / 6)), 0.125 where that is 0; a value is e2m1(w / (scale / global));
- or the exponent 127 + floor(log2(amax)) - 2 (e2m1) or - 8 (e4m3), where a mantissa of 1.75 or more counts as the next
  power of two; 0 for a group of zeros;
- e2m1 and e4m3 are rounded to nearest, ties to even; the sign bit of an e2m1 is set for every w below zero, also where
  it rounds to zero, but not for a w of -0.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from modelexport.quantization.kernels import reference

E2M1_MAX = 6.0
NV_ABOVE, NV_BELOW, MX_ABOVE, MX_BELOW = 6, 2, 1, 1
NV_TRIED, MX_TRIED = NV_ABOVE + 1 + NV_BELOW, MX_ABOVE + 1 + MX_BELOW
"""A search tries so many scale bytes above and below the one that the largest magnitude asks for.

For NVFP4: of normal, Laplace and Student-t values, none has its best scale further away than that (8 below, 10 above
were tried), bar one in ten thousand. Most gain comes from +4 and +5: the largest value becomes 4, not 6.
"""

LARGEST_LOCAL = 126
"""The byte of 448, the largest e4m3."""

_EIGHTH = 0x20
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BLOCK_ELEMENTS = 1 << 18


@cache
def largest_exponent(storage: torch.dtype, dtype: torch.dtype) -> int:
    """The largest scale byte of which no multiple that ``storage`` holds (uint8: e2m1) overflows ``dtype``."""
    top = E2M1_MAX if storage == torch.uint8 else reference.FP8_MAX
    byte = 254
    while top * 2.0 ** (byte - 127) > torch.finfo(dtype).max:
        byte -= 1
    return byte


def decode_scales(stored: Tensor, factor: Tensor | None) -> Tensor:
    """Returns the factor of each group's values, float32: e4m3 / ``factor``, or 2^(byte - 127) (NaN for 255)."""
    if factor is not None:
        return stored.float() / factor
    bits = stored.view(torch.uint8).to(torch.int32) << 23
    bits = torch.where(bits == 0, 0x400000, bits)
    return torch.where(bits == 255 << 23, 0x7FC00000, bits).view(torch.float32)


def encode(values: Tensor, step: Tensor, storage: torch.dtype) -> Tensor:
    """float32 values / their step, rounded: e4m3, or an e2m1's four bits in a uint8."""
    ratio = values / step
    if storage != torch.uint8:
        return ratio.clamp(-reference.FP8_MAX, reference.FP8_MAX).to(storage)
    size = ratio.abs().clamp(max=E2M1_MAX)
    # half to even in units of 0.5 up to 2, of 1 up to 4, of 2 above: indices 0..4, 4..6, 6..7
    fine, middle, coarse = (size * 2.0).round(), size.round() + 2.0, (size * 0.5).round() + 4.0
    index = torch.where(size < 2.0, fine, torch.where(size < 4.0, middle, coarse))
    return index.to(torch.uint8) | ((ratio < 0).to(torch.uint8) << 3)


def decode(codes: Tensor) -> Tensor:
    """float32 values of e4m3 numbers, or of e2m1's four bits in uint8; the sign of zero is kept."""
    if codes.dtype != torch.uint8:
        return codes.float()
    values = torch.tensor((*_VALUES, *(-value for value in _VALUES)), device=codes.device)
    return values[codes.long()]


def pack(codes: Tensor) -> Tensor:
    """Four-bit codes ``[..., n]`` to bytes ``[..., n / 2]``, the even column in the low half."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """Bytes ``[..., n]`` to four-bit codes ``[..., 2 n]``."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def _chosen(amax: Tensor, factor: Tensor | None, storage: torch.dtype, most: int) -> Tensor:
    """Each group's scale byte by its largest magnitude, int32; 0 too where an e4m3 rounds to nothing."""
    if factor is not None:
        local = (factor * (amax / amax.new_full((1,), E2M1_MAX))).clamp(max=reference.FP8_MAX)
        return local.to(torch.float8_e4m3fn).view(torch.uint8).to(torch.int32)
    exponent = (amax.view(torch.int32) + 0x200000) >> 23
    return (exponent - (2 if storage == torch.uint8 else 8)).clamp(0, most)


def exponents(amax: Tensor) -> Tensor:
    """The E8M0, uint8, of MXFP4 for groups of these largest magnitudes (float32)."""
    return _chosen(amax, None, torch.uint8, 254).to(torch.uint8)


def _stored(byte: Tensor, factor: Tensor | None) -> Tensor:
    """Bytes, int32, as the dtype of the scales."""
    byte = byte.to(torch.uint8)
    return byte if factor is None else byte.view(torch.float8_e4m3fn)


def _group_errors(groups: Tensor, byte: Tensor, factor: Tensor | None, storage: torch.dtype) -> Tensor:
    """Each group's squared error with that scale, in float64, added in the order of the columns."""
    step = decode_scales(_stored(byte, factor), factor).unsqueeze(-1)
    difference = (groups - decode(encode(groups, step, storage)) * step).double()
    squares = difference * difference
    total = torch.zeros_like(squares[..., 0])
    for column in range(groups.shape[-1]):
        total += squares[..., column]
    return total


def range_of_search(factor: Tensor | None) -> tuple[int, int, int]:
    """The number of scale bytes above and below that a search tries, and the least of all."""
    return (MX_ABOVE, MX_BELOW, 0) if factor is None else (NV_ABOVE, NV_BELOW, 1)


def _searched(groups: Tensor, start: Tensor, factor: Tensor | None, storage: torch.dtype, most: int) -> Tensor:
    """The byte near ``start`` with the smallest squared error; of equal ones the largest."""
    above, below, least = range_of_search(factor)
    best, chosen = torch.full(start.shape, torch.inf, dtype=torch.float64, device=start.device), start
    for step in range(above, -below - 1, -1):
        tried = (start + step).clamp(least, most)
        errors = _group_errors(groups, tried, factor, storage)
        better = errors < best
        best, chosen = torch.where(better, errors, best), torch.where(better, tried, chosen)
    return chosen


def _numbered(start: Tensor, number: Tensor, factor: Tensor | None, most: int) -> Tensor:
    """The byte near ``start`` with that number among those that a search tries."""
    above, _, least = range_of_search(factor)
    return (start + above - number.to(start.dtype)).clamp(least, most)


def scales_of(
    amax: Tensor,
    factor: Tensor | None,
    storage: torch.dtype,
    most: int,
    searched: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """The scale of each group as stored, given its largest magnitude.

    ``searched``, where there is one, takes the byte that this asks for (int32) to the one that a search finds near it.
    """
    byte = _chosen(amax, factor, storage, most)
    if searched is not None:
        byte = torch.where(amax == 0, byte, searched(byte))
    if factor is not None:
        byte = torch.where(byte == 0, _EIGHTH, byte)
    return _stored(byte, factor)


def quantise(weight: Tensor, q: Tensor, scale: Tensor, factor: Tensor | None, most: int, search: bool | Tensor) -> int:
    """Groups along a row, each with its scale.

    Fills ``q`` (uint8 ``[rows, cols / 2]``, e2m1, the even column in the low half; or float8_e4m3fn ``[rows, cols]``)
    and ``scale`` (``[rows, cols / group]``: float8_e4m3fn where ``factor``, the float32 ``[1]`` that scales are divided
    by, is given; else uint8, E8M0). ``most`` is the largest scale byte that may be chosen. ``search`` may be the number
    of each group's scale among those tried, integers ``[rows, cols / group]``. Returns the first row that
    holds NaN or Inf, else -1.
    """
    rows, cols = weight.shape
    if cols == 0:
        return -1
    for block in reference._row_blocks(rows, cols, elements=_BLOCK_ELEMENTS):
        groups = weight[block].unflatten(1, (scale.shape[1], -1))
        amax = reference._amax(groups)
        bad = reference._first_bad(amax, block.start)
        if bad >= 0:
            return bad
        groups = groups.float()
        near: Callable[[Tensor], Tensor] | None = None
        if isinstance(search, Tensor):
            near = partial(_numbered, number=search[block], factor=factor, most=most)
        elif search:
            near = partial(_searched, groups, factor=factor, storage=q.dtype, most=most)
        stored = scales_of(amax, factor, q.dtype, most, near)
        codes = encode(groups, decode_scales(stored, factor).unsqueeze(-1), q.dtype).flatten(1)
        q[block] = pack(codes) if q.dtype == torch.uint8 else codes
        scale[block] = stored
    return -1


def _decoded(q: Tensor, scale: Tensor, factor: Tensor | None) -> Tensor:
    values = decode(unpack(q) if q.dtype == torch.uint8 else q)
    if values.numel() == 0:
        return values
    groups = values.unflatten(1, (scale.shape[1], -1))
    return (groups * decode_scales(scale, factor).unsqueeze(-1)).flatten(1)


def dequantise(q: Tensor, scale: Tensor, factor: Tensor | None, out: Tensor) -> None:
    """Fills ``out`` (``[rows, cols]``, bf16, fp16 or float32) with value * step computed in float32."""
    for block in reference._row_blocks(*out.shape, elements=_BLOCK_ELEMENTS):
        out[block] = _decoded(q[block], scale[block], factor).to(out.dtype)


def squared_error(weight: Tensor, q: Tensor, scale: Tensor, factor: Tensor | None, out: Tensor) -> None:
    """Fills ``out`` (float64 ``[rows, 2]``) as :func:`.reference.squared_error` does, in the same order."""
    for block in reference._row_blocks(*weight.shape, elements=_BLOCK_ELEMENTS):
        wide = weight[block].float()
        out[block, 0] = reference._lane_sum_of_squares(wide - _decoded(q[block], scale[block], factor))
        out[block, 1] = reference._lane_sum_of_squares(wide)


def fake_quantise(x: Tensor, group: int, factor: Tensor | None, storage: torch.dtype) -> Tensor:
    """``x`` (any shape, groups along the last dim) rounded as weights are, in its dtype; NaN stays NaN."""
    if x.numel() == 0:
        return x
    groups = x.float().unflatten(-1, (-1, group))
    amax = groups.nan_to_num(nan=0.0).abs().amax(dim=-1)
    most = LARGEST_LOCAL if factor is not None else largest_exponent(storage, x.dtype)
    step = decode_scales(scales_of(amax, factor, storage, most), factor).unsqueeze(-1)
    rounded = decode(encode(groups.nan_to_num(nan=0.0), step, storage)) * step
    return torch.where(groups.isnan(), groups, rounded).flatten(-2).to(x.dtype)
