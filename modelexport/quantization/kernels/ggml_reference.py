"""ggml's blocks in plain torch, on any device; :mod:`.ggml_compiled` gives the same bits.

Sub-blocks, the weights that share a scale, know nothing of each other but for the two numbers of their block: tensors
here are ``[weights of a sub-block, sub-blocks]``, and sums over the first dim are added in its order.

A sub-block's scale s and minimum m make of a code's level l the value s * l - m. With r = x - (s * l - m), what is left
of a weight x, the least squares of r in l and 1 say how s and m are to be moved, without the loss of digits that sums
of x would have. They are least squares of what the sub-block does to the outputs where the products G of its inputs are
known: with the Cholesky factor U of these, r^T G r is the square of U r, and l and 1 become U l and U 1.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from modelexport.quantization.ggml_layouts import BitField, BlockLayout

__all__ = ["Metric", "Search", "dequantise", "numbers", "pack", "quantise", "unpack"]

TINY = 2.0**-120  # steps below it count as 0: their reciprocals may be infinite
LARGEST = 65504.0  # of float16
MOST = 2.0**32  # larger than what any block holds; sums of its squares are float32 numbers
AT_ONCE = 1 << 18  # weights


class Search(NamedTuple):
    """The extent of the search.

    Attributes:
        steps: first scales of a sub-block, each times its range, or its extreme weight with its sign where there are
            no minima. The first is the plain rule's.
        refits: rounds of codes and least squares from the best of these on.
        rounds: of scales and minima as they are stored; 0: what the first of ``steps`` makes is taken as it is.
    """

    steps: tuple[float, ...]
    refits: int
    rounds: int


# ------------------------------------------------------------------ bits


def unpack(blocks: Tensor, field: BitField) -> Tensor:
    """Returns a field's numbers: int32 ``[..., numbers]`` of uint8 ``[..., bytes of a block]``."""
    found: Tensor | None = None
    shift = 0
    wide = blocks.to(torch.int32) ^ field.flipped
    for bits, places in zip(field.bits, field.places, strict=True):
        at, by = torch.tensor(places, device=blocks.device).unbind(1)
        part = (wide[..., at] >> by.to(torch.int32)) & (2**bits - 1)
        found = part if found is None else found | (part << shift)
        shift += bits
    assert found is not None
    return found


def pack(numbers: Tensor, field: BitField, blocks: Tensor) -> None:
    """Adds a field's numbers, int32 ``[n, numbers]``, to blocks whose bits there are 0: int32 ``[n, bytes]``."""
    shift = 0
    flipped = numbers ^ field.flipped
    for bits, places in zip(field.bits, field.places, strict=True):
        at, by = torch.tensor(places, device=blocks.device).unbind(1)
        part = ((flipped >> shift) & (2**bits - 1)) << by.to(torch.int32)
        blocks.index_add_(1, at, part.to(torch.int32))
        shift += bits


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 numbers at a byte of each block, as float32."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).squeeze(-1).float()


def numbers(blocks: Tensor, layout: BlockLayout) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns what blocks hold, uint8 ``[..., bytes]``.

    Returns:
        (codes, int32 ``[..., block]``; the sub-blocks' scales, float32 ``[..., sub-blocks]``; their minima, what is
        taken off, or None).
    """
    codes = unpack(blocks, layout.codes)
    step = _half(blocks, layout.d).unsqueeze(-1)
    minimum = None if layout.dmin is None else _half(blocks, layout.dmin).unsqueeze(-1)
    if layout.scales is not None:
        step = step * (unpack(blocks, layout.scales) + layout.lowest_scale).float()
    if layout.minima is not None and minimum is not None:
        minimum = minimum * unpack(blocks, layout.minima).float()
    if layout.adds_minimum and minimum is not None:
        minimum = -minimum
    return codes, step, minimum


def _levels(codes: Tensor, layout: BlockLayout) -> Tensor:
    """The codes' levels, as float32."""
    if not layout.levels:
        return codes.float() + layout.lowest
    return torch.tensor(layout.levels, dtype=torch.float32, device=codes.device)[codes.long()]


def dequantise(blocks: Tensor, out: Tensor, layout: BlockLayout) -> None:
    """Fills ``out``, ``[rows, cols]``, from uint8 ``[rows, cols / block, bytes]``: scale * level - minimum, computed in
    float32."""
    rows, count, _ = blocks.shape
    chunk = max(1, AT_ONCE // max(1, count * layout.block))
    for start in range(0, rows, chunk):
        part = slice(start, start + chunk)
        codes, step, minimum = numbers(blocks[part], layout)
        values = _levels(codes, layout).unflatten(-1, (-1, layout.sub)) * step.unsqueeze(-1)
        if minimum is not None:
            values -= minimum.unsqueeze(-1)
        out[part] = values.reshape(out[part].shape)


# ------------------------------------------------------------------ fitting


class _Levels(NamedTuple):
    """The levels there are: whole numbers, or those of a table."""

    low: float
    high: float
    table: tuple[int, ...]

    @classmethod
    def of(cls, layout: BlockLayout) -> _Levels:
        low, high = layout.level_range
        return cls(float(low), float(high), layout.levels)

    def nearest(self, ratio: Tensor) -> Tensor:
        """The level that is nearest to each; of two that are as near, the even one, or the lower one of a table."""
        if not self.table:
            return ratio.clamp(self.low, self.high).round()
        found = torch.full_like(ratio, self.table[0])
        for below, above in pairwise(self.table):
            found += torch.where(ratio > (below + above) / 2, float(above - below), 0.0)
        return found


def _sum(values: Tensor) -> Tensor:
    """The sum over the first dim, in its order."""
    total = torch.zeros_like(values[0])
    for row in values:
        total += row
    return total


class Metric(NamedTuple):
    """The yardstick of a sub-block's errors e: \\|U e\\|^2, by the columns of a row.

    Attributes:
        factor: U, float32 ``[cols / sub, sub, sub]``, upper triangles; None: the identity.
        ones: U 1, float32 ``[sub, cols / sub]``.
        total: \\|U 1\\|^2, float32 ``[cols / sub]``.
    """

    factor: Tensor | None
    ones: Tensor
    total: Tensor

    @classmethod
    def of(cls, factor: Tensor | None, cols: int, sub: int, device: torch.device) -> Metric:
        ones = torch.ones(sub, 1, cols // sub, device=device)
        if factor is not None:
            ones = _applied(factor, ones)
        return cls(factor, ones.squeeze(1), _sum(ones * ones).squeeze(0))

    def apply(self, values: Tensor) -> Tensor:
        """U times each sub-block of whole rows, ``[sub, sub-blocks]``."""
        if self.factor is None:
            return values
        return _applied(self.factor, values.view(len(values), -1, len(self.factor))).view(values.shape)


def _applied(factor: Tensor, values: Tensor) -> Tensor:
    """U times ``[sub, rows, sub-blocks of a row]``, added in the order of the columns."""
    found, by_column = torch.zeros_like(values), factor.permute(2, 1, 0).unsqueeze(2)
    for column, value in enumerate(values):
        found[: column + 1] += by_column[column, : column + 1] * value
    return found


def _inverse(step: Tensor) -> Tensor:
    """1 / step, or 0 where that may be infinite."""
    used = step.abs() >= TINY
    return torch.where(used, 1.0 / torch.where(used, step, 1.0), 0.0)


class _Moments(NamedTuple):
    """Sums over a sub-block, of its levels l, of what is left of the weights, r, and of 1, by the metric."""

    l: Tensor  # noqa: E741
    ll: Tensor
    r: Tensor
    lr: Tensor
    rr: Tensor


class _Fit(NamedTuple):
    """Some rows, and what they are fitted by.

    Attributes:
        x: ``[sub, sub-blocks]``.
        applied: U x.
        one: of the metric, for each of these.
        total: likewise.
    """

    x: Tensor
    applied: Tensor
    metric: Metric
    one: Tensor
    total: Tensor
    levels: _Levels
    layout: BlockLayout

    @classmethod
    def of(cls, values: Tensor, metric: Metric, layout: BlockLayout) -> _Fit:
        x = values.reshape(-1, layout.sub).t().contiguous().clamp_(-MOST, MOST)
        rows = len(values)
        ones, total = metric.ones.repeat(1, rows), metric.total.repeat(rows)
        return cls(x, metric.apply(x), metric, ones, total, _Levels.of(layout), layout)

    def moments(self, step: Tensor, minimum: Tensor) -> _Moments:
        """The sums with the codes that these make."""
        level = self.metric.apply(self.levels.nearest((self.x + minimum) * _inverse(step)))
        left = (self.applied + minimum * self.one) - step * level
        products = (level * self.one, level * level, left * self.one, level * left, left * left)
        return _Moments(*map(_sum, products))

    def refit(self, found: _Moments, step: Tensor, minimum: Tensor, negative: bool) -> tuple[Tensor, Tensor, Tensor]:
        """See :func:`_refit`."""
        return _refit(found, self.total, step, minimum, self.layout.affine, negative)


def _divided(a: Tensor, b: Tensor) -> Tensor:
    """a / b, or 0 where b is not above 0."""
    return torch.where(b > 0, a / torch.where(b > 0, b, 1.0), 0.0)


def _refit(
    found: _Moments, total: Tensor, step: Tensor, minimum: Tensor, affine: bool, negative: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The scale and the minimum with the least squared error for the codes at hand, and that error."""
    if not affine:
        more = _divided(found.lr, found.ll)
        return step + more, minimum, found.rr - more * found.lr
    spread = total * found.ll - found.l * found.l
    more = _divided(total * found.lr - found.l * found.r, spread)
    shift = _divided(found.r - more * found.l, total)
    error = (found.rr - more * found.lr) - shift * found.r
    if not negative:  # no minimum is below 0, where only positive ones can be stored
        most = minimum
        held = shift > most
        along = _divided(found.lr - most * found.l, found.ll)
        left = (found.rr - most * found.r) - most * (found.r - most * total)
        more, shift = torch.where(held, along, more), torch.where(held, most, shift)
        error = torch.where(held, left - along * (found.lr - most * found.l), error)
    return step + more, minimum - shift, error


def _rounded_half(values: Tensor) -> Tensor:
    """To float16 and back; what is beyond its range becomes its largest, and -0 becomes 0."""
    return (values.clamp(-LARGEST, LARGEST).to(torch.float16)).float() + 0.0


def _first_fit(fit: _Fit, search: Search) -> tuple[Tensor, Tensor]:
    """Each sub-block's scale and minimum, any numbers."""
    x, layout = fit.x, fit.layout
    negative = layout.minima is None
    if layout.affine:
        low, high = x[0].clone(), x[0].clone()
        for row in x[1:]:
            low, high = torch.where(row < low, row, low), torch.where(row > high, row, high)
        if not negative:
            low = torch.where(low > 0, 0.0, low)
        first, extent = -low, high - low
    else:
        extent = x[0].clone()
        for row in x[1:]:
            extent = torch.where(row.abs() > extent.abs(), row, extent)
        first = torch.zeros_like(extent)
    step, minimum = extent * search.steps[0], first
    if not search.rounds:
        return step, minimum
    best = torch.full_like(step, torch.inf)
    for factor in search.steps:
        tried = extent * factor
        own, shift, error = fit.refit(fit.moments(tried, first), tried, first, negative)
        better = (error < best) & ((own > 0) | (not layout.affine))
        best, step = torch.where(better, error, best), torch.where(better, own, step)
        minimum = torch.where(better, shift, minimum)
    for _ in range(search.refits):
        own, shift, error = fit.refit(fit.moments(step, minimum), step, minimum, negative)
        better = (error < best) & ((own > 0) | (not layout.affine))
        best, step = torch.where(better, error, best), torch.where(better, own, step)
        minimum = torch.where(better, shift, minimum)
    return step, minimum


def _round_single(fit: _Fit, step: Tensor, minimum: Tensor, search: Search) -> tuple[Tensor, Tensor]:
    """Scales and minima of blocks that have one each, as float16 numbers."""
    step, minimum = _rounded_half(step), _rounded_half(minimum)
    kept, kept_minimum = step, minimum
    best = torch.full_like(step, torch.inf)
    for number in range(search.rounds):
        found = fit.moments(step, minimum)
        better = found.rr < best
        best, kept = torch.where(better, found.rr, best), torch.where(better, step, kept)
        kept_minimum = torch.where(better, minimum, kept_minimum)
        if number + 1 < search.rounds:
            step, minimum, _ = fit.refit(found, step, minimum, True)
            step, minimum = _rounded_half(step), _rounded_half(minimum)
    return kept, kept_minimum


def _by_block(values: Tensor, count: int) -> Tensor:
    """``[blocks, sub-blocks of each]``."""
    return values.view(-1, count)


def _block_sum(values: Tensor, count: int) -> Tensor:
    """The sum over the sub-blocks of each block, in their order."""
    return _sum(_by_block(values, count).t())


def _block_steps(step: Tensor, minimum: Tensor, layout: BlockLayout) -> tuple[Tensor, Tensor]:
    """d and dmin of each block: what lays its extreme scale onto the one that is largest in magnitude."""
    assert layout.scales is not None
    count = layout.block // layout.sub
    by_block = _by_block(step, count)
    extreme = by_block[:, 0].clone()
    for column in by_block.t()[1:]:
        extreme = torch.where(column.abs() > extreme.abs(), column, extreme)
    most = layout.lowest_scale or layout.scales.highest
    d = _rounded_half(extreme * (1.0 / most))
    if layout.minima is None:
        return d, torch.zeros_like(d)
    largest = _by_block(minimum, count)[:, 0].clone()
    for column in _by_block(minimum, count).t()[1:]:
        largest = torch.where(column > largest, column, largest)
    return d, _rounded_half(largest * (1.0 / layout.minima.highest))


def _whole(values: Tensor, low: float, high: float) -> Tensor:
    return values.clamp(low, high).round()


class _Stored(NamedTuple):
    """A block's numbers as they are stored: d, dmin, for each sub-block the same, and its scale and minimum."""

    d: Tensor
    dmin: Tensor
    scale: Tensor
    minimum: Tensor


def _round_blocks(fit: _Fit, step: Tensor, minimum: Tensor, search: Search) -> _Stored:
    """Scales and minima as whole numbers, with d and dmin: by turns the best of either."""
    layout, total = fit.layout, fit.total
    assert layout.scales is not None
    count = layout.block // layout.sub
    low, high = float(layout.lowest_scale), float(layout.lowest_scale + layout.scales.highest)
    most = 0.0 if layout.minima is None else float(layout.minima.highest)
    d, dmin = (part.repeat_interleave(count) for part in _block_steps(step, minimum, layout))
    base = _whole(step * _inverse(d), low, high)
    kept = _Stored(d, dmin, base, _whole(minimum * _inverse(dmin), 0.0, most))
    best = torch.full_like(step[::count], torch.inf)
    for number in range(search.rounds):
        error, found = torch.full_like(step, torch.inf), None
        scale, lowest = base, torch.zeros_like(base)
        for change in (0.0, -1.0, 1.0):
            tried = _whole(base + change, low, high)
            own = d * tried
            shift = torch.zeros_like(own)
            if layout.minima is not None:
                moments = fit.moments(own, minimum)
                shift = _whole((minimum - _divided(moments.r, total)) * _inverse(dmin), 0.0, most)
            moments = fit.moments(own, dmin * shift)
            better = moments.rr < error
            error, scale = torch.where(better, moments.rr, error), torch.where(better, tried, scale)
            lowest = torch.where(better, shift, lowest)
            found = moments if found is None else _Moments(*map(torch.where, [better] * 5, moments, found))
        assert found is not None
        whole = _block_sum(error, count)
        better_block = whole < best
        best = torch.where(better_block, whole, best)
        wide = better_block.repeat_interleave(count)
        kept = _Stored(*(torch.where(wide, a, b) for a, b in zip((d, dmin, scale, lowest), kept, strict=True)))
        if number + 1 == search.rounds:
            break
        minimum = dmin * lowest - _divided(found.r, total)
        base = scale
        d, dmin = _refit_block(found, total, d, dmin, scale, lowest, count, layout.minima is not None)
    return kept


def _refit_block(
    found: _Moments, total: Tensor, d: Tensor, dmin: Tensor, scale: Tensor, lowest: Tensor, count: int, affine: bool
) -> tuple[Tensor, Tensor]:
    """d and dmin with the least squared error of each block, for the codes, scales and minima at hand."""
    a11 = _block_sum((scale * scale) * found.ll, count)
    b1 = _block_sum(scale * found.lr, count)
    if not affine:
        return _rounded_half(d + _divided(b1, a11).repeat_interleave(count)), dmin
    a12 = _block_sum((scale * lowest) * found.l, count)
    a22 = _block_sum((lowest * lowest) * total, count)
    b2 = _block_sum(lowest * found.r, count)
    both = a11 * a22 - a12 * a12
    more = torch.where(both > 0, _divided(b1 * a22 - b2 * a12, both), _divided(b1, a11))
    shift = _divided(more * a12 - b2, a22)
    moved = (d + more.repeat_interleave(count), dmin + shift.repeat_interleave(count))
    return _rounded_half(moved[0]), _rounded_half(torch.where(moved[1] > 0, moved[1], 0.0))


def _half_bytes(values: Tensor) -> Tensor:
    return values.to(torch.float16).unsqueeze(-1).view(torch.uint8).to(torch.int32)


def _codes(level: Tensor, layout: BlockLayout) -> Tensor:
    if not layout.levels:
        return (level - layout.lowest).to(torch.int32)
    table = torch.tensor(layout.levels, dtype=torch.float32, device=level.device)
    return torch.searchsorted(table, level.contiguous()).to(torch.int32)


def _write(fit: _Fit, kept: _Stored, out: Tensor) -> None:
    """Fills blocks, uint8 ``[blocks, bytes]``."""
    layout = fit.layout
    count = layout.block // layout.sub
    step, minimum = kept.d * kept.scale, kept.dmin * kept.minimum
    codes = _codes(fit.levels.nearest((fit.x + minimum) * _inverse(step)), layout)
    blocks = torch.zeros(out.shape, dtype=torch.int32, device=out.device)
    pack(codes.t().reshape(-1, layout.block), layout.codes, blocks)
    if layout.scales is not None:
        scales = (kept.scale - layout.lowest_scale).to(torch.int32)
        pack(_by_block(scales, count), layout.scales, blocks)
    if layout.minima is not None:
        pack(_by_block(kept.minimum.to(torch.int32), count), layout.minima, blocks)
    blocks[:, layout.d : layout.d + 2] = _half_bytes(kept.d[::count])
    if layout.dmin is not None:
        stored = kept.dmin[::count]
        blocks[:, layout.dmin : layout.dmin + 2] = _half_bytes((-stored if layout.adds_minimum else stored) + 0.0)
    out.copy_(blocks)


def quantise(weight: Tensor, metric: Metric, blocks: Tensor, layout: BlockLayout, search: Search) -> int:
    """Fills blocks; the first row of the weight that holds NaN or Inf, or -1.

    Args:
        weight: ``[rows, cols]`` bf16, fp16 or float32, any strides; cols a multiple of the block.
        metric: of the columns.
        blocks: uint8 ``[rows, cols / block, bytes]``.
    """
    rows, cols = weight.shape
    chunk = max(1, AT_ONCE // max(1, cols))
    for start in range(0, rows, chunk):
        values = weight[start : start + chunk].float()
        finite = torch.isfinite(values).all(dim=1)
        if not bool(finite.all()):
            return start + int((~finite).nonzero()[0, 0])
        fit = _Fit.of(values, metric, layout)
        step, minimum = _first_fit(fit, search)
        if layout.scales is None:
            step, minimum = _round_single(fit, step, minimum, search)
            kept = _Stored(step, minimum, torch.ones_like(step), torch.ones_like(minimum))
        else:
            kept = _round_blocks(fit, step, minimum, search)
        out = torch.empty(values.numel() // layout.block, layout.nbytes, dtype=torch.uint8, device=weight.device)
        _write(fit, kept, out)
        blocks[start : start + chunk] = out.view(len(values), -1, layout.nbytes)
    return -1
