"""The loops that fit, write and read ggml's blocks, compiled by numba: what :mod:`.ggml_fused` calls.

The same bits as :mod:`.ggml_reference`, which says what is computed; :mod:`.compiled` says what makes such loops fast.
Here the same block of :data:`WIDTH` rows is turned first, so that the innermost loops run over rows, which know nothing
of each other and share the metric. What belongs to a sub-block's rows stands in one array, number by number: LLVM then
sees that the loops' stores do not overlap their loads.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
from __future__ import annotations

import numpy as np
from numba import types

from modelexport.quantization.kernels.compiled import (
    _F32,
    _I32,
    _ROUND,
    _U8,
    _U16,
    _U32,
    _U64,
    _ZERO,
    _bytes,
    _clamped,
    _floats,
    _half,
    _inline,
    _int,
    _jit,
    _rounded,
)

WIDTH = 64
"""Rows of a tile."""

_MOST, _TINY, _LARGEST = _F32(2.0**32), _F32(2.0**-120), _F32(65504.0)
_INFINITY = _F32(np.inf)
_STEP, _INVERSE, _MINIMUM = 0, WIDTH, 2 * WIDTH  # of what is tried
_L, _LL, _R, _LR, _RR = 0, WIDTH, 2 * WIDTH, 3 * WIDTH, 4 * WIDTH  # moments


@_inline
def _inverse_of(step):
    return _F32(_F32(1.0) / step) if abs(step) >= _TINY else _ZERO


@_inline
def _divided(a, b):
    return _F32(a / b) if b > _ZERO else _ZERO


@_inline
def _whole(value, low, high):
    return _F32(_F32(_clamped(value, low, high) + _ROUND) - _ROUND)


@_inline
def _rounded_half(value):
    """To float16 and back."""
    size = min(abs(value), _LARGEST)
    small = _F32(_F32(size + _F32(0.5)) - _F32(0.5))  # denormals: units of 2^-24, those of float32 in [0.5, 1)
    size = small if size < _F32(2.0**-14) else _U32(_rounded(_F32(size).view(np.uint32), 13)).view(np.float32)
    return _F32(-size) if value < _ZERO and size > _ZERO else _F32(size)


@_inline
def _half_bits(value):
    """The float16 bits of what :func:`_rounded_half` gave."""
    size = abs(value)
    bits = _U32(_U32(_F32(size).view(np.uint32) >> _U32(13)) - _U32(112 << 10))
    if size < _F32(2.0**-14):
        bits = _U32(_F32(size) * _F32(2.0**24))
    return _U32(bits | (_U32(0x8000) if value < _ZERO else _U32(0)))


@_inline
def _level(ratio, low, high):
    return _F32(_F32(_clamped(ratio, low, high) + _ROUND) - _ROUND)


@_inline
def _levels(x, begin, par, sub, bounds, level):
    """The level of each weight of a sub-block."""
    low, high, table, middles, jumps = bounds
    for row in range(WIDTH):
        par[_U64(_INVERSE + row)] = _inverse_of(par[_U64(row)])
    for j in range(sub):
        at = j * WIDTH
        for row in range(WIDTH):
            moved = _F32(x[_U64(begin + at + row)] + par[_U64(_MINIMUM + row)])
            level[_U64(at + row)] = _F32(moved * par[_U64(_INVERSE + row)])
        if table.size:
            _nearest_of_table(level, at, table, middles, jumps)
        else:
            for row in range(WIDTH):
                level[_U64(at + row)] = _level(level[_U64(at + row)], low, high)


@_inline
def _nearest_of_table(level, at, table, middles, jumps):
    ratio = level[at : at + WIDTH].copy()
    for row in range(WIDTH):
        level[_U64(at + row)] = table[0]
    for k in range(15):
        middle, jump = middles[k], jumps[k]
        for row in range(WIDTH):
            more = jump if ratio[_U64(row)] > middle else _ZERO
            level[_U64(at + row)] = _F32(level[_U64(at + row)] + more)


@_inline
def _add_four(factor, entry, values, at, found, to):
    """Adds four columns of the factor's row, times their values."""
    first, second, third, fourth = factor[entry], factor[entry + 1], factor[entry + 2], factor[entry + 3]
    for row in range(WIDTH):
        value = _F32(found[_U64(to + row)] + _F32(first * values[_U64(at + row)]))
        value = _F32(value + _F32(second * values[_U64(at + WIDTH + row)]))
        value = _F32(value + _F32(third * values[_U64(at + 2 * WIDTH + row)]))
        found[_U64(to + row)] = _F32(value + _F32(fourth * values[_U64(at + 3 * WIDTH + row)]))


@_inline
def _apply(factor, begin, sub, i, values, at, found, to):
    """Row i of the factor times a sub-block's values, which begin at ``at``."""
    for row in range(WIDTH):
        found[_U64(to + row)] = _ZERO
    j = i
    while j + 4 <= sub:
        _add_four(factor, begin + i * sub + j, values, at + j * WIDTH, found, to)
        j += 4
    while j < sub:
        by, from_ = factor[begin + i * sub + j], at + j * WIDTH
        for row in range(WIDTH):
            found[_U64(to + row)] = _F32(found[_U64(to + row)] + _F32(by * values[_U64(from_ + row)]))
        j += 1


@_inline
def _add_products(applied, to, level, at, one, par, sums):
    for row in range(WIDTH):
        a = level[_U64(at + row)]
        b = _F32(applied[_U64(to + row)] + _F32(par[_U64(_MINIMUM + row)] * one))
        b = _F32(b - _F32(par[_U64(row)] * a))
        sums[_U64(_L + row)] = _F32(sums[_U64(_L + row)] + _F32(a * one))
        sums[_U64(_LL + row)] = _F32(sums[_U64(_LL + row)] + _F32(a * a))
        sums[_U64(_R + row)] = _F32(sums[_U64(_R + row)] + _F32(b * one))
        sums[_U64(_LR + row)] = _F32(sums[_U64(_LR + row)] + _F32(a * b))
        sums[_U64(_RR + row)] = _F32(sums[_U64(_RR + row)] + _F32(b * b))


@_inline
def _moments(tile, s, par, sums, metric, block, sub, bounds):
    """The sums of a sub-block's rows with what ``par`` says."""
    x, applied, level, applied_level = tile
    factor, ones, _ = metric
    begin = s * sub * WIDTH
    _levels(x, begin, par, sub, bounds, level)
    for k in range(5 * WIDTH):
        sums[k] = _ZERO
    for i in range(sub):
        one, at = ones[block * sub + i], begin + i * WIDTH
        if factor.size:
            _apply(factor, block * sub * sub, sub, i, level, 0, applied_level, 0)
            _add_products(applied, at, applied_level, 0, one, par, sums)
        else:
            _add_products(x, at, level, i * WIDTH, one, par, sums)


@_inline
def _refit(sums, total, par, row, affine, signed):
    """See the reference."""
    step, minimum = par[_U64(row)], par[_U64(_MINIMUM + row)]
    l, ll = sums[_U64(_L + row)], sums[_U64(_LL + row)]  # noqa: E741
    r, lr, rr = sums[_U64(_R + row)], sums[_U64(_LR + row)], sums[_U64(_RR + row)]
    if not affine:
        more = _divided(lr, ll)
        return _F32(step + more), minimum, _F32(rr - _F32(more * lr))
    spread = _F32(_F32(total * ll) - _F32(l * l))
    more = _divided(_F32(_F32(total * lr) - _F32(l * r)), spread)
    shift = _divided(_F32(r - _F32(more * l)), total)
    error = _F32(_F32(rr - _F32(more * lr)) - _F32(shift * r))
    if not signed:
        rest = _F32(lr - _F32(minimum * l))
        along = _divided(rest, ll)
        left = _F32(_F32(rr - _F32(minimum * r)) - _F32(minimum * _F32(r - _F32(minimum * total))))
        held = shift > minimum
        error = _F32(left - _F32(along * rest)) if held else error
        more, shift = (along if held else more), (minimum if held else shift)
    return _F32(step + more), _F32(minimum - shift), error


@_inline
def _keep_fit(sums, total, par, best, fit, at, affine, signed):
    """Takes what is better; ``fit`` has, from ``at`` on, the steps, then the minima."""
    for row in range(WIDTH):
        own, shift, error = _refit(sums, total, par, row, affine, signed)
        better = error < best[_U64(row)] and (own > _ZERO or not affine)
        best[_U64(row)] = error if better else best[_U64(row)]
        fit[_U64(at + row)] = own if better else fit[_U64(at + row)]
        fit[_U64(at + WIDTH + row)] = shift if better else fit[_U64(at + WIDTH + row)]


@_inline
def _extremes(x, begin, sub, affine, signed, first, extent):
    """The minimum to begin with, and the range or the extreme weight."""
    for row in range(WIDTH):
        first[row] = extent[row] = x[begin + row]
    for j in range(1, sub):
        at = begin + j * WIDTH
        if affine:
            for row in range(WIDTH):
                value, low, high = x[_U64(at + row)], first[_U64(row)], extent[_U64(row)]
                first[_U64(row)] = value if value < low else low
                extent[_U64(row)] = value if value > high else high
        else:
            for row in range(WIDTH):
                value, top = x[_U64(at + row)], extent[_U64(row)]
                extent[_U64(row)] = value if abs(value) > abs(top) else top
    for row in range(WIDTH):
        low = first[row] if affine else _ZERO
        low = _ZERO if low > _ZERO and not signed else low
        first[row] = _F32(-low)
        extent[row] = _F32(extent[row] - low) if affine else extent[row]


@_inline
def _first_fit(
    tile, s, par, sums, best, fit, metric, block, sub, bounds, affine, signed, steps, refits, rounds, scratch
):
    """A sub-block's steps and minima, any numbers."""
    first, extent = scratch
    at = 2 * s * WIDTH
    _extremes(tile[0], s * sub * WIDTH, sub, affine, signed, first, extent)
    for row in range(WIDTH):
        best[row] = _INFINITY
        fit[at + row], fit[at + WIDTH + row] = _F32(extent[row] * steps[0]), first[row]
    if not rounds:
        return
    for k in range(steps.size + refits):
        for row in range(WIDTH):
            given = k < steps.size
            par[row] = _F32(extent[row] * steps[k]) if given else fit[at + row]
            par[_MINIMUM + row] = first[row] if given else fit[at + WIDTH + row]
        _moments(tile, s, par, sums, metric, block, sub, bounds)
        _keep_fit(sums, metric[2][block], par, best, fit, at, affine, signed)


@_inline
def _round_single(tile, par, sums, best, fit, metric, block, sub, bounds, affine, rounds, kept):
    """Scales and minima of blocks that have one each; ``kept`` has d, dmin, and 1 twice."""
    for row in range(2 * WIDTH):
        fit[row] = _rounded_half(fit[row])
        kept[row], kept[2 * WIDTH + row] = fit[row], _F32(1.0)
    for row in range(WIDTH):
        best[row] = _INFINITY
        par[row], par[_MINIMUM + row] = fit[row], fit[WIDTH + row]
    for number in range(rounds):
        _moments(tile, 0, par, sums, metric, block, sub, bounds)
        for row in range(WIDTH):
            error, step, minimum = sums[_RR + row], par[row], par[_MINIMUM + row]
            better = error < best[row]
            best[row] = error if better else best[row]
            kept[row] = step if better else kept[row]
            kept[WIDTH + row] = minimum if better else kept[WIDTH + row]
            if number + 1 < rounds:
                own, shift, _ = _refit(sums, metric[2][block], par, row, affine, True)
                par[row], par[_MINIMUM + row] = _rounded_half(own), _rounded_half(shift)


@_inline
def _block_steps(fit, count, scale_most, minimum_most, now):
    """d and dmin: of the extreme scales and minima."""
    for row in range(WIDTH):
        top, largest = fit[row], fit[WIDTH + row]
        for s in range(1, count):
            step, minimum = fit[2 * s * WIDTH + row], fit[(2 * s + 1) * WIDTH + row]
            top = step if abs(step) > abs(top) else top
            largest = minimum if minimum > largest else largest
        now[row] = _rounded_half(_F32(top * scale_most))
        now[WIDTH + row] = _rounded_half(_F32(largest * minimum_most))


@_inline
def _refit_blocks(moments, metric, first_block, now, count, affine):
    """See the reference; ``moments`` are of what ``now`` holds."""
    for row in range(WIDTH):
        a11, a12, a22, b1, b2 = _ZERO, _ZERO, _ZERO, _ZERO, _ZERO
        for s in range(count):
            at, total = 5 * s * WIDTH + row, metric[2][first_block + s]
            scale, lowest = now[2 * (s + 1) * WIDTH + row], now[(2 * s + 3) * WIDTH + row]
            a11 = _F32(a11 + _F32(_F32(scale * scale) * moments[_LL + at]))
            b1 = _F32(b1 + _F32(scale * moments[_LR + at]))
            a12 = _F32(a12 + _F32(_F32(scale * lowest) * moments[_L + at]))
            a22 = _F32(a22 + _F32(_F32(lowest * lowest) * total))
            b2 = _F32(b2 + _F32(lowest * moments[_R + at]))
        d, dmin = now[row], now[WIDTH + row]
        if not affine:
            now[row] = _rounded_half(_F32(d + _divided(b1, a11)))
        else:
            both = _F32(_F32(a11 * a22) - _F32(a12 * a12))
            more = _divided(b1, a11)
            if both > _ZERO:
                more = _divided(_F32(_F32(b1 * a22) - _F32(b2 * a12)), both)
            shift = _F32(dmin + _divided(_F32(_F32(more * a12) - b2), a22))
            now[row] = _rounded_half(_F32(d + more))
            now[WIDTH + row] = _rounded_half(shift if shift > _ZERO else _ZERO)


@_inline
def _try_scales(tile, s, par, sums, fit, metric, block, sub, bounds, affine, whole, now, base, errors, moments):
    """The best of three scales of a sub-block, with its minimum, for d and dmin as they are."""
    scale_low, scale_high, minimum_high = whole
    at, scales = 2 * (s + 1) * WIDTH, 2 * s * WIDTH
    for row in range(WIDTH):
        errors[s * WIDTH + row] = _INFINITY
        now[at + row], now[at + WIDTH + row] = base[s * WIDTH + row], _ZERO
    for trial in range(3):
        change = _F32(0.0) if trial == 0 else _F32(-1.0) if trial == 1 else _F32(1.0)
        for row in range(WIDTH):
            scale = _whole(_F32(base[s * WIDTH + row] + change), scale_low, scale_high)
            par[row] = _F32(now[row] * scale)
            par[_MINIMUM + row] = fit[scales + WIDTH + row] if affine else _ZERO
            par[3 * WIDTH + row], par[4 * WIDTH + row] = scale, _ZERO
        for turn in range(2 if affine else 1):
            _moments(tile, s, par, sums, metric, block, sub, bounds)
            if turn == 0 and affine:  # the minimum that serves these codes best, as it would be stored
                for row in range(WIDTH):
                    shift = _F32(fit[scales + WIDTH + row] - _divided(sums[_R + row], metric[2][block]))
                    shift = _whole(_F32(shift * _inverse_of(now[WIDTH + row])), _ZERO, minimum_high)
                    par[4 * WIDTH + row], par[_MINIMUM + row] = shift, _F32(now[WIDTH + row] * shift)
        for row in range(WIDTH):
            error = sums[_RR + row]
            better = error < errors[s * WIDTH + row]
            errors[s * WIDTH + row] = error if better else errors[s * WIDTH + row]
            now[at + row] = par[3 * WIDTH + row] if better else now[at + row]
            now[at + WIDTH + row] = par[4 * WIDTH + row] if better else now[at + WIDTH + row]
            for k in range(5):
                entry = 5 * s * WIDTH + k * WIDTH + row
                moments[entry] = sums[k * WIDTH + row] if better or trial == 0 else moments[entry]


@_inline
def _keep_blocks(errors, count, best, now, kept):
    """Takes the numbers of the rows whose error is less than what it was before."""
    for row in range(WIDTH):
        error = _ZERO
        for s in range(count):
            error = _F32(error + errors[s * WIDTH + row])
        if error < best[row]:
            best[row] = error
            for k in range(2 * count + 2):
                kept[k * WIDTH + row] = now[k * WIDTH + row]


@_inline
def _round_blocks(
    tile, par, sums, best, fit, metric, first_block, count, sub, bounds, affine, rounds, whole, most, now, kept, trials
):
    """Fills ``kept``: d, dmin, and each sub-block's scale and minimum, of the rows."""
    base, errors, moments = trials
    scale_low, scale_high, minimum_high = whole
    _block_steps(fit, count, most[0], most[1], now)
    for s in range(count):
        for row in range(WIDTH):
            at = 2 * s * WIDTH + row
            scale = _whole(_F32(fit[at] * _inverse_of(now[row])), scale_low, scale_high)
            lowest = _whole(_F32(fit[at + WIDTH] * _inverse_of(now[WIDTH + row])), _ZERO, minimum_high)
            base[s * WIDTH + row], now[2 * WIDTH + at], now[3 * WIDTH + at] = scale, scale, lowest
    for k in range((2 * count + 2) * WIDTH):
        kept[k] = now[k]
    for row in range(WIDTH):
        best[row] = _INFINITY
    for number in range(rounds):
        for s in range(count):
            _try_scales(
                tile, s, par, sums, fit, metric, first_block + s, sub, bounds, affine, whole, now, base, errors, moments
            )
        _keep_blocks(errors, count, best, now, kept)
        if number + 1 < rounds:
            for s in range(count):
                for row in range(WIDTH):
                    at = 2 * s * WIDTH + row
                    shift = _divided(moments[5 * s * WIDTH + _R + row], metric[2][first_block + s])
                    fit[at + WIDTH] = _F32(_F32(now[WIDTH + row] * now[3 * WIDTH + at]) - shift)
                    base[s * WIDTH + row] = now[2 * WIDTH + at]
            _refit_blocks(moments, metric, first_block, now, count, affine)


@_inline
def _encode(tile, s, par, kept, sub, bounds, codes):
    """The code of each weight of a sub-block."""
    x, _, level, _ = tile
    low, _, table, middles, _ = bounds
    at = 2 * (s + 1) * WIDTH
    for row in range(WIDTH):
        par[row] = _F32(kept[row] * kept[at + row])
        par[_MINIMUM + row] = _F32(kept[WIDTH + row] * kept[at + WIDTH + row])
    _levels(x, s * sub * WIDTH, par, sub, bounds, level)
    begin = s * sub * WIDTH
    if not table.size:
        for k in range(sub * WIDTH):
            codes[_U64(begin + k)] = _U8(_I32(_F32(level[_U64(k)] - low)))
        return
    for k in range(sub * WIDTH):
        codes[_U64(begin + k)] = _U8(0)
    for step in range(15):
        for k in range(sub * WIDTH):
            codes[_U64(begin + k)] += _U8(1) if level[_U64(k)] > middles[step] else _U8(0)


@_inline
def _put(numbers, field, flipped, turned):
    """Adds the numbers of a tile's rows, ``[numbers, WIDTH]``, to the bytes of their blocks, ``[bytes, WIDTH]``.

    ``field`` has the runs of a :class:`BitField`: the first number, how many there are, the byte of the first, the
    shift there, the shift within the number, and the mask.
    """
    for run in range(field.shape[0]):
        by, within, mask = _U8(field[run, 3]), _U8(field[run, 4]), _U8(field[run, 5])
        for k in range(field[run, 1]):
            at, to = (field[run, 0] + k) * WIDTH, (field[run, 2] + k) * WIDTH
            for row in range(WIDTH):
                number = _U8(_U8(_U8(numbers[_U64(at + row)] ^ flipped) >> within) & mask)
                turned[_U64(to + row)] = _U8(turned[_U64(to + row)] | _U8(number << by))


@_inline
def _get(src, begin, field, flipped, count, numbers):
    """The numbers of one block's field."""
    for k in range(count):
        numbers[k] = _U8(0)
    for run in range(field.shape[0]):
        by, within, mask = _U8(field[run, 3]), _U8(field[run, 4]), _U8(field[run, 5])
        at, to = begin + field[run, 2], field[run, 0]
        for k in range(field[run, 1]):
            part = _U8(_U8(_U8(src[_U64(at + k)]) >> by) & mask)
            numbers[_U64(to + k)] = _U8(numbers[_U64(to + k)] | _U8(part << within))
    for k in range(count):
        numbers[k] = _U8(numbers[k] ^ flipped)


@_inline
def _get_half(src, at):
    return _half(_U16(_U32(src[at]) | _U32(_U32(src[at + 1]) << _U32(8))))


@_inline
def _put_halves(kept, begin, negative, turned, at):
    for row in range(WIDTH):
        value = kept[begin + row]
        bits = _half_bits(_F32(_ZERO - value) if negative else value)
        turned[at * WIDTH + row] = _U8(bits & _U32(0xFF))
        turned[(at + 1) * WIDTH + row] = _U8(bits >> _U32(8))


@_inline
def _write(codes, kept, held, out, begin, distance, count, nbytes, places, fields, flips, numbers, turned):
    """One block of each row, the first at byte ``begin``; ``places`` as :func:`quantise` has it."""
    for k in range(nbytes * WIDTH):
        turned[k] = _U8(0)
    _put(codes, fields[0], _U8(flips[0]), turned)
    for kind in range(2):  # scales, minima
        field = fields[1] if kind == 0 else fields[2]
        if field.shape[0]:
            for s in range(count):
                for row in range(WIDTH):
                    number = _I32(kept[(2 * s + 2 + kind) * WIDTH + row]) - _I32(places[3] if kind == 0 else 0)
                    numbers[s * WIDTH + row] = _U8(number)
            _put(numbers, field, _U8(flips[1 + kind]), turned)
    _put_halves(kept, 0, False, turned, places[0])
    if places[1] >= 0:
        _put_halves(kept, WIDTH, places[2] != 0, turned, places[1])
    for row in range(held):
        at = begin + row * distance
        for k in range(nbytes):
            out[_U64(at + k)] = turned[_U64(k * WIDTH + row)]


_field, _integers = types.int64[:, ::1], types.int64[::1]


@_jit(
    types.void(
        _floats, *[_int] * 2, *[_floats] * 3, *[_int] * 3, *[types.float32] * 2, *[_floats] * 3, _int, _int, _floats,
        _int, _int, *[types.float32] * 5, _integers, *[_field] * 3, _integers, _bytes,
    )
)  # fmt: skip
def quantise(
    values, rows, cols, factor, ones, total, sub, count, nbytes, low, high, table, middles, jumps, affine, signed,
    steps, refits, rounds, scale_low, scale_high, scale_most, minimum_high, minimum_most, places, code_field,
    scale_field, minimum_field, flips, out,
):  # fmt: skip
    """Fills the blocks of rows, one after the other, from finite weights; see the reference.

    Args:
        factor, ones, total: the metric, ``[cols / sub, sub, sub]``, or empty; ``[cols / sub, sub]``; ``[cols / sub]``.
        signed: whether minima may be below 0.
        places: of d and of dmin (-1: none), whether that is stored with the other sign, and the least scale.
    """
    block = sub * count
    x, applied = np.zeros(block * WIDTH, np.float32), np.empty(block * WIDTH, np.float32)
    tile = (x, applied, np.empty(sub * WIDTH, np.float32), np.empty(WIDTH, np.float32))
    codes, numbers = np.empty(block * WIDTH, np.uint8), np.empty(count * WIDTH, np.uint8)
    turned = np.empty(nbytes * WIDTH, np.uint8)
    par, sums, best = np.zeros(5 * WIDTH, np.float32), np.empty(5 * WIDTH, np.float32), np.empty(WIDTH, np.float32)
    fit, scratch = np.zeros(2 * count * WIDTH, np.float32), (np.empty(WIDTH, np.float32), np.empty(WIDTH, np.float32))
    now, kept = np.empty((2 * count + 2) * WIDTH, np.float32), np.empty((2 * count + 2) * WIDTH, np.float32)
    base, errors = np.empty(count * WIDTH, np.float32), np.empty(count * WIDTH, np.float32)
    trials = (base, errors, np.empty(5 * count * WIDTH, np.float32))
    metric, bounds = (factor, ones, total), (low, high, table, middles, jumps)
    whole, most = (scale_low, scale_high, minimum_high), (scale_most, minimum_most)
    for start in range(0, rows, WIDTH):
        held = min(WIDTH, rows - start)
        for number in range(cols // block):
            for row in range(held):
                at = (start + row) * cols + number * block
                for j in range(block):
                    x[j * WIDTH + row] = _clamped(values[at + j], _F32(-_MOST), _MOST)
            if factor.size and rounds:
                for s in range(count):
                    for i in range(sub):
                        at = s * sub * WIDTH
                        _apply(factor, (number * count + s) * sub * sub, sub, i, x, at, applied, at + i * WIDTH)
            for s in range(count):
                _first_fit(
                    tile, s, par, sums, best, fit, metric, number * count + s, sub, bounds, affine, signed, steps,
                    refits, rounds, scratch,
                )  # fmt: skip
            if scale_field.shape[0]:
                _round_blocks(
                    tile, par, sums, best, fit, metric, number * count, count, sub, bounds, affine, rounds, whole, most,
                    now, kept, trials,
                )  # fmt: skip
            else:
                _round_single(tile, par, sums, best, fit, metric, number, sub, bounds, affine, rounds, kept)
            for s in range(count):
                _encode(tile, s, par, kept, sub, bounds, codes)
            begin, fields = (start * (cols // block) + number) * nbytes, (code_field, scale_field, minimum_field)
            distance = cols // block * nbytes
            _write(codes, kept, held, out, begin, distance, count, nbytes, places, fields, flips, numbers, turned)


@_jit(types.void(_bytes, *[_int] * 4, types.float32, _floats, _integers, *[_field] * 3, _integers, _floats))
def dequantise(
    src, blocks, sub, count, nbytes, low, table, places, code_field, scale_field, minimum_field, flips, out
):  # fmt: skip
    """Fills ``out`` with the weights of blocks, one after the other."""
    codes, scales, minima = np.empty(sub * count, np.uint8), np.empty(16, np.uint8), np.empty(16, np.uint8)
    levels = np.empty(sub * count, np.float32)
    for block in range(blocks):
        begin, to = block * nbytes, block * count * sub
        d = _get_half(src, begin + places[0])
        dmin = _get_half(src, begin + places[1]) if places[1] >= 0 else _ZERO
        _get(src, begin, code_field, _U8(flips[0]), sub * count, codes)
        _get(src, begin, scale_field, _U8(flips[1]), count, scales)
        _get(src, begin, minimum_field, _U8(flips[2]), count, minima)
        if table.size:
            for k in range(sub * count):
                levels[k] = table[codes[k]]
        else:
            for k in range(sub * count):
                levels[_U64(k)] = _F32(_F32(codes[_U64(k)]) + low)
        for s in range(count):
            step, minimum, at = d, dmin, s * sub
            if scale_field.shape[0]:
                step = _F32(d * _F32(_I32(scales[s]) + _I32(places[3])))
            if minimum_field.shape[0]:
                minimum = _F32(dmin * _F32(minima[s]))
            if places[2]:
                minimum = _F32(-minimum)
            if places[1] >= 0:
                for j in range(sub):
                    out[_U64(to + at + j)] = _F32(_F32(step * levels[_U64(at + j)]) - minimum)
            else:
                for j in range(sub):
                    out[_U64(to + at + j)] = _F32(step * levels[_U64(at + j)])
