"""The loops that fit, write and read ggml's blocks, compiled by numba: what :mod:`.ggml_fused` calls.

The same bits as :mod:`.ggml_reference`, which says what is computed; :mod:`.compiled` says what makes such loops fast.
Here a tile of :data:`WIDTH` sub-blocks is turned first, so that the innermost loops run over sub-blocks, which know
nothing of each other. What belongs to sub-blocks stands in one array, number by number: LLVM then sees that the loops'
stores do not overlap their loads.
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
"""Sub-blocks of a tile."""

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
def _table_level(ratio, table, middles, jumps):
    found = table[0]
    for k in range(15):
        found = _F32(found + (jumps[k] if ratio > middles[k] else _ZERO))
    return found


@_inline
def _clear(sums):
    for k in range(5 * WIDTH):
        sums[k] = _ZERO


@_inline
def _integer_moments(x, w, par, sums, sub, low, high):
    _clear(sums)
    for j in range(0, sub, 2):
        at, after = j * WIDTH, (j + 1) * WIDTH
        for lane in range(WIDTH):
            step, inverse, minimum = par[_U64(lane)], par[_U64(_INVERSE + lane)], par[_U64(_MINIMUM + lane)]
            moved, weight = _F32(x[_U64(at + lane)] + minimum), w[_U64(at + lane)]
            level = _level(_F32(moved * inverse), low, high)
            left = _F32(moved - _F32(step * level))
            wl, wr = _F32(weight * level), _F32(weight * left)
            other, more = _F32(x[_U64(after + lane)] + minimum), w[_U64(after + lane)]
            second = _level(_F32(other * inverse), low, high)
            rest = _F32(other - _F32(step * second))
            wl2, wr2 = _F32(more * second), _F32(more * rest)
            sums[_U64(_L + lane)] = _F32(_F32(sums[_U64(_L + lane)] + wl) + wl2)
            sums[_U64(_LL + lane)] = _F32(_F32(sums[_U64(_LL + lane)] + _F32(wl * level)) + _F32(wl2 * second))
            sums[_U64(_R + lane)] = _F32(_F32(sums[_U64(_R + lane)] + wr) + wr2)
            sums[_U64(_LR + lane)] = _F32(_F32(sums[_U64(_LR + lane)] + _F32(wl * left)) + _F32(wl2 * rest))
            sums[_U64(_RR + lane)] = _F32(_F32(sums[_U64(_RR + lane)] + _F32(wr * left)) + _F32(wr2 * rest))


@_inline
def _table_moments(x, w, par, sums, sub, table, middles, jumps):
    _clear(sums)
    for j in range(sub):
        at = j * WIDTH
        for lane in range(WIDTH):
            step, moved = par[_U64(lane)], x[_U64(at + lane)]
            level = _table_level(_F32(moved * par[_U64(_INVERSE + lane)]), table, middles, jumps)
            left = _F32(moved - _F32(step * level))
            wl, wr = _F32(w[_U64(at + lane)] * level), _F32(w[_U64(at + lane)] * left)
            sums[_U64(_LL + lane)] = _F32(sums[_U64(_LL + lane)] + _F32(wl * level))
            sums[_U64(_LR + lane)] = _F32(sums[_U64(_LR + lane)] + _F32(wl * left))
            sums[_U64(_RR + lane)] = _F32(sums[_U64(_RR + lane)] + _F32(wr * left))


@_inline
def _moments(x, w, par, sums, sub, low, high, table, middles, jumps):
    for lane in range(WIDTH):
        par[_U64(_INVERSE + lane)] = _inverse_of(par[_U64(lane)])
    if table.size:
        _table_moments(x, w, par, sums, sub, table, middles, jumps)
    else:
        _integer_moments(x, w, par, sums, sub, low, high)


@_inline
def _refit(sums, total, par, lane, affine, negative):
    """See the reference."""
    step, minimum = par[_U64(lane)], par[_U64(_MINIMUM + lane)]
    l, ll = sums[_U64(_L + lane)], sums[_U64(_LL + lane)]  # noqa: E741
    r, lr, rr = sums[_U64(_R + lane)], sums[_U64(_LR + lane)], sums[_U64(_RR + lane)]
    if not affine:
        more = _divided(lr, ll)
        return _F32(step + more), minimum, _F32(rr - _F32(more * lr))
    spread = _F32(_F32(total * ll) - _F32(l * l))
    more = _divided(_F32(_F32(total * lr) - _F32(l * r)), spread)
    shift = _divided(_F32(r - _F32(more * l)), total)
    error = _F32(_F32(rr - _F32(more * lr)) - _F32(shift * r))
    if not negative:
        rest = _F32(lr - _F32(minimum * l))
        along = _divided(rest, ll)
        left = _F32(_F32(rr - _F32(minimum * r)) - _F32(minimum * _F32(r - _F32(minimum * total))))
        held = shift > minimum
        error = _F32(left - _F32(along * rest)) if held else error
        more, shift = (along if held else more), (minimum if held else shift)
    return _F32(step + more), _F32(minimum - shift), error


@_inline
def _keep_fit(sums, total, par, best, fit, affine, negative):
    """Takes what is better; ``fit`` has the steps, then the minima."""
    for lane in range(WIDTH):
        own, shift, error = _refit(sums, total[_U64(lane)], par, lane, affine, negative)
        better = error < best[_U64(lane)] and (own > _ZERO or not affine)
        best[_U64(lane)] = error if better else best[_U64(lane)]
        fit[_U64(lane)] = own if better else fit[_U64(lane)]
        fit[_U64(WIDTH + lane)] = shift if better else fit[_U64(WIDTH + lane)]


@_inline
def _extremes(x, sub, affine, negative, first, extent):
    """What is taken off at first, and the range or the extreme weight."""
    if affine:
        for lane in range(WIDTH):
            first[lane] = extent[lane] = x[lane]
        for j in range(1, sub):
            for lane in range(WIDTH):
                value = x[_U64(j * WIDTH + lane)]
                low, high = first[_U64(lane)], extent[_U64(lane)]
                first[_U64(lane)] = value if value < low else low
                extent[_U64(lane)] = value if value > high else high
        for lane in range(WIDTH):
            low = first[lane]
            low = _ZERO if low > _ZERO and not negative else low
            first[lane], extent[lane] = _F32(-low), _F32(extent[lane] - low)
        return
    for lane in range(WIDTH):
        first[lane], extent[lane] = _ZERO, x[lane]
    for j in range(1, sub):
        for lane in range(WIDTH):
            value, top = x[_U64(j * WIDTH + lane)], extent[_U64(lane)]
            extent[_U64(lane)] = value if abs(value) > abs(top) else top


@_inline
def _round_single(x, w, total, par, sums, best, fit, sub, low, high, table, middles, jumps, affine, rounds):
    for lane in range(2 * WIDTH):
        fit[lane] = _rounded_half(fit[lane])
    for lane in range(WIDTH):
        best[lane] = _INFINITY
        par[lane], par[_MINIMUM + lane] = fit[lane], fit[WIDTH + lane]
    for number in range(rounds):
        _moments(x, w, par, sums, sub, low, high, table, middles, jumps)
        for lane in range(WIDTH):
            error, step, minimum = sums[_RR + lane], par[lane], par[_MINIMUM + lane]
            better = error < best[lane]
            best[lane] = error if better else best[lane]
            fit[lane] = step if better else fit[lane]
            fit[WIDTH + lane] = minimum if better else fit[WIDTH + lane]
            if number + 1 < rounds:
                own, shift, _ = _refit(sums, total[lane], par, lane, affine, True)
                par[lane], par[_MINIMUM + lane] = _rounded_half(own), _rounded_half(shift)


@_inline
def _block_steps(fit, count, scale_most, minimum_most, now):
    """d and dmin for the sub-blocks of each block; ``now`` has d, dmin, scales, minima."""
    for begin in range(0, WIDTH, count):
        top, largest = fit[begin], fit[WIDTH + begin]
        for lane in range(begin + 1, begin + count):
            top = fit[lane] if abs(fit[lane]) > abs(top) else top
            largest = fit[WIDTH + lane] if fit[WIDTH + lane] > largest else largest
        d, dmin = _rounded_half(_F32(top * scale_most)), _rounded_half(_F32(largest * minimum_most))
        for lane in range(begin, begin + count):
            now[lane], now[WIDTH + lane] = d, dmin


@_inline
def _refit_blocks(kept, total, now, count, affine):
    """See the reference; ``kept`` has the moments of what ``now`` holds."""
    for begin in range(0, WIDTH, count):
        a11, a12, a22, b1, b2 = _ZERO, _ZERO, _ZERO, _ZERO, _ZERO
        for lane in range(begin, begin + count):
            scale, lowest = now[2 * WIDTH + lane], now[3 * WIDTH + lane]
            a11 = _F32(a11 + _F32(_F32(scale * scale) * kept[_LL + lane]))
            b1 = _F32(b1 + _F32(scale * kept[_LR + lane]))
            a12 = _F32(a12 + _F32(_F32(scale * lowest) * kept[_L + lane]))
            a22 = _F32(a22 + _F32(_F32(lowest * lowest) * total[lane]))
            b2 = _F32(b2 + _F32(lowest * kept[_R + lane]))
        d, dmin = now[begin], now[WIDTH + begin]
        if not affine:
            d = _rounded_half(_F32(d + _divided(b1, a11)))
        else:
            both = _F32(_F32(a11 * a22) - _F32(a12 * a12))
            more = _divided(b1, a11)
            if both > _ZERO:
                more = _divided(_F32(_F32(b1 * a22) - _F32(b2 * a12)), both)
            shift = _F32(dmin + _divided(_F32(_F32(more * a12) - b2), a22))
            d, dmin = _rounded_half(_F32(d + more)), _rounded_half(shift if shift > _ZERO else _ZERO)
        for lane in range(begin, begin + count):
            now[lane], now[WIDTH + lane] = d, dmin


@_inline
def _tried_minima(sums, total, fit, now, minimum_high, shifts, par):
    """The minimum of each sub-block that serves the codes at hand best, as it would be stored."""
    for lane in range(WIDTH):
        shift = _F32(fit[_U64(WIDTH + lane)] - _divided(sums[_U64(_R + lane)], total[_U64(lane)]))
        dmin = now[_U64(WIDTH + lane)]
        shift = _whole(_F32(shift * _inverse_of(dmin)), _ZERO, minimum_high)
        shifts[_U64(lane)] = shift
        par[_U64(_MINIMUM + lane)] = _F32(dmin * shift)


@_inline
def _keep_trial(sums, scales, shifts, first, errors, now, moments):
    """Takes the scale and minimum of the sub-blocks that they serve better than what was tried before."""
    for lane in range(WIDTH):
        error = sums[_U64(_RR + lane)]
        better = error < errors[_U64(lane)]
        errors[_U64(lane)] = error if better else errors[_U64(lane)]
        now[_U64(2 * WIDTH + lane)] = scales[_U64(lane)] if better else now[_U64(2 * WIDTH + lane)]
        now[_U64(3 * WIDTH + lane)] = shifts[_U64(lane)] if better else now[_U64(3 * WIDTH + lane)]
        for k in range(5):
            at = k * WIDTH + lane
            moments[_U64(at)] = sums[_U64(at)] if better or first else moments[_U64(at)]


@_inline
def _keep_blocks(errors, count, best, now, kept):
    """Takes the numbers of the blocks whose error is less than what it was before."""
    for begin in range(0, WIDTH, count):
        whole = _ZERO
        for lane in range(begin, begin + count):
            whole = _F32(whole + errors[lane])
        if whole < best[begin]:
            best[begin] = whole
            for k in range(4):
                for lane in range(begin, begin + count):
                    kept[k * WIDTH + lane] = now[k * WIDTH + lane]


@_inline
def _round_blocks(
    x, w, total, par, sums, best, fit, sub, low, high, table, middles, jumps, affine, rounds, count, scale_low,
    scale_high, scale_most, minimum_high, minimum_most, now, kept, trial, moments,
):  # fmt: skip
    """Fills ``kept``: d, dmin, scales and minima of each sub-block; ``trial`` has base, scales, minima and errors."""
    base, scales, shifts, errors = trial[0], trial[1], trial[2], trial[3]
    _block_steps(fit, count, scale_most, minimum_most, now)
    for lane in range(WIDTH):
        base[lane] = _whole(_F32(fit[lane] * _inverse_of(now[lane])), scale_low, scale_high)
        lowest = _whole(_F32(fit[WIDTH + lane] * _inverse_of(now[WIDTH + lane])), _ZERO, minimum_high)
        kept[lane], kept[WIDTH + lane], best[lane] = now[lane], now[WIDTH + lane], _INFINITY
        kept[2 * WIDTH + lane], kept[3 * WIDTH + lane] = base[lane], lowest
    for number in range(rounds):
        for lane in range(WIDTH):
            errors[lane], shifts[lane] = _INFINITY, _ZERO
            now[2 * WIDTH + lane], now[3 * WIDTH + lane] = base[lane], _ZERO
        for step in range(3):
            change = _F32(0.0) if step == 0 else _F32(-1.0) if step == 1 else _F32(1.0)
            for lane in range(WIDTH):
                scales[lane] = _whole(_F32(base[lane] + change), scale_low, scale_high)
                par[lane] = _F32(now[lane] * scales[lane])
                par[_MINIMUM + lane] = fit[WIDTH + lane] if affine else _ZERO
            if affine:
                _moments(x, w, par, sums, sub, low, high, table, middles, jumps)
                _tried_minima(sums, total, fit, now, minimum_high, shifts, par)
            _moments(x, w, par, sums, sub, low, high, table, middles, jumps)
            _keep_trial(sums, scales, shifts, step == 0, errors, now, moments)
        _keep_blocks(errors, count, best, now, kept)
        if number + 1 < rounds:
            for lane in range(WIDTH):
                shift = _divided(moments[_R + lane], total[lane])
                fit[WIDTH + lane] = _F32(_F32(now[WIDTH + lane] * now[3 * WIDTH + lane]) - shift)
                base[lane] = now[2 * WIDTH + lane]
            _refit_blocks(moments, total, now, count, affine)


@_inline
def _encode(x, par, kept, sub, low, high, table, middles, jumps, codes):
    """The code of each weight of a tile."""
    for lane in range(WIDTH):
        step = _F32(kept[lane] * kept[2 * WIDTH + lane])
        par[_INVERSE + lane] = _inverse_of(step)
        par[_MINIMUM + lane] = _F32(kept[WIDTH + lane] * kept[3 * WIDTH + lane])
    for j in range(sub):
        at = j * WIDTH
        for lane in range(WIDTH):
            ratio = _F32(_F32(x[_U64(at + lane)] + par[_U64(_MINIMUM + lane)]) * par[_U64(_INVERSE + lane)])
            if table.size:
                code = _I32(0)
                for k in range(15):
                    code += _I32(1) if ratio > middles[k] else _I32(0)
                codes[_U64(at + lane)] = code
            else:
                codes[_U64(at + lane)] = _I32(_F32(_level(ratio, low, high) - low))


@_inline
def _put(out, begin, field, flipped, number, value):
    """Adds a number's bits to a block. ``field`` has for each number, and each piece of it: the byte, the shift there,
    the shift within the number, and the mask."""
    value = value ^ flipped
    for piece in range(field.shape[1]):
        at = begin + field[number, piece, 0]
        part = ((value >> field[number, piece, 2]) & field[number, piece, 3]) << field[number, piece, 1]
        out[at] = _U8(out[at] | _U8(part))


@_inline
def _get(src, begin, field, flipped, number):
    value = np.int64(0)
    for piece in range(field.shape[1]):
        part = np.int64(src[begin + field[number, piece, 0]]) >> field[number, piece, 1]
        value |= (part & field[number, piece, 3]) << field[number, piece, 2]
    return value ^ flipped


@_inline
def _put_half(out, at, value):
    bits = _half_bits(value)
    out[at], out[at + 1] = _U8(bits & _U32(0xFF)), _U8(bits >> _U32(8))


@_inline
def _get_half(src, at):
    return _half(_U16(_U32(src[at]) | _U32(_U32(src[at + 1]) << _U32(8))))


@_inline
def _write(codes, kept, lane, out, begin, sub, count, nbytes, places, code_field, scale_field, minimum_field, flips):
    """One block, whose first sub-block is that lane; ``places`` as :func:`quantise` has it."""
    for k in range(nbytes):
        out[begin + k] = _U8(0)
    for s in range(count):
        for j in range(sub):
            _put(out, begin, code_field, flips[0], s * sub + j, np.int64(codes[j * WIDTH + lane + s]))
    for s in range(scale_field.shape[0]):
        scale = np.int64(kept[2 * WIDTH + lane + s]) - places[3]
        _put(out, begin, scale_field, flips[1], s, scale)
    for s in range(minimum_field.shape[0]):
        _put(out, begin, minimum_field, flips[2], s, np.int64(kept[3 * WIDTH + lane + s]))
    _put_half(out, begin + places[0], kept[lane])
    if places[1] >= 0:
        dmin = kept[WIDTH + lane]
        _put_half(out, begin + places[1], _F32(_ZERO - dmin) if places[2] else dmin)


_field, _integers = types.int64[:, :, ::1], types.int64[::1]


@_jit(
    types.void(
        _floats, _floats, *[_int] * 4, *[types.float32] * 2, _floats, _floats, _floats, _int, _int, _floats, _int, _int,
        *[types.float32] * 5, _integers, *[_field] * 3, _integers, _bytes,
    )
)  # fmt: skip
def quantise(
    values, importance, sub, count, nbytes, total_subs, low, high, table, middles, jumps, affine, signed, steps, refits,
    rounds, scale_low, scale_high, scale_most, minimum_high, minimum_most, places, code_field, scale_field,
    minimum_field, flips, out,
):  # fmt: skip
    """Fills blocks, one after the other, from finite weights; see the reference.

    Args:
        values: ``total_subs`` sub-blocks, of whole rows.
        importance: of the columns of a row.
        signed: whether minima may be below 0.
        places: of d and of dmin (-1: none), whether that is stored with the other sign, and the least scale.
    """
    x, w = np.zeros(sub * WIDTH, np.float32), np.ones(sub * WIDTH, np.float32)
    par, sums, total = np.zeros(3 * WIDTH, np.float32), np.empty(5 * WIDTH, np.float32), np.empty(WIDTH, np.float32)
    best, fit, kept = np.empty(WIDTH, np.float32), np.zeros(2 * WIDTH, np.float32), np.ones(4 * WIDTH, np.float32)
    first, extent, codes = np.empty(WIDTH, np.float32), np.empty(WIDTH, np.float32), np.empty(sub * WIDTH, np.int32)
    now, trial, moments = (
        np.empty(4 * WIDTH, np.float32),
        np.empty((4, WIDTH), np.float32),
        np.empty(5 * WIDTH, np.float32),
    )
    cols = importance.size
    for start in range(0, total_subs, WIDTH):
        lanes = min(WIDTH, total_subs - start)
        for lane in range(lanes):
            at = (start + lane) * sub
            column = at % cols
            for j in range(sub):
                x[j * WIDTH + lane] = _clamped(values[at + j], _F32(-_MOST), _MOST)
                w[j * WIDTH + lane] = importance[column + j]
        for lane in range(WIDTH):
            total[lane] = _ZERO
        for j in range(sub):
            for lane in range(WIDTH):
                total[_U64(lane)] = _F32(total[_U64(lane)] + w[_U64(j * WIDTH + lane)])
        _extremes(x, sub, affine, signed, first, extent)
        for lane in range(WIDTH):
            best[lane] = _INFINITY
            fit[lane], fit[WIDTH + lane] = _F32(extent[lane] * steps[0]), first[lane]
        if rounds:
            for k in range(steps.size):
                for lane in range(WIDTH):
                    par[lane], par[_MINIMUM + lane] = _F32(extent[lane] * steps[k]), first[lane]
                _moments(x, w, par, sums, sub, low, high, table, middles, jumps)
                _keep_fit(sums, total, par, best, fit, affine, signed)
            for _ in range(refits):
                for lane in range(WIDTH):
                    par[lane], par[_MINIMUM + lane] = fit[lane], fit[WIDTH + lane]
                _moments(x, w, par, sums, sub, low, high, table, middles, jumps)
                _keep_fit(sums, total, par, best, fit, affine, signed)
        if scale_field.shape[0]:
            _round_blocks(
                x, w, total, par, sums, best, fit, sub, low, high, table, middles, jumps, affine, rounds, count,
                scale_low, scale_high, scale_most, minimum_high, minimum_most, now, kept, trial, moments,
            )  # fmt: skip
        else:
            _round_single(x, w, total, par, sums, best, fit, sub, low, high, table, middles, jumps, affine, rounds)
            for lane in range(2 * WIDTH):
                kept[lane] = fit[lane]
        _encode(x, par, kept, sub, low, high, table, middles, jumps, codes)
        for lane in range(0, lanes, count):
            begin = (start + lane) // count * nbytes
            _write(
                codes, kept, lane, out, begin, sub, count, nbytes, places, code_field, scale_field, minimum_field, flips
            )  # fmt: skip


@_jit(types.void(_bytes, *[_int] * 4, types.float32, _floats, _integers, *[_field] * 3, _integers, _floats))
def dequantise(
    src, blocks, sub, count, nbytes, low, table, places, code_field, scale_field, minimum_field, flips, out
):  # fmt: skip
    """Fills ``out`` with the weights of blocks, one after the other."""
    for block in range(blocks):
        begin, to = block * nbytes, block * count * sub
        d = _get_half(src, begin + places[0])
        dmin = _get_half(src, begin + places[1]) if places[1] >= 0 else _ZERO
        for s in range(count):
            step, minimum = d, dmin
            if scale_field.shape[0]:
                step = _F32(d * _F32(_get(src, begin, scale_field, flips[1], s) + places[3]))
            if minimum_field.shape[0]:
                minimum = _F32(dmin * _F32(_get(src, begin, minimum_field, flips[2], s)))
            if places[2]:
                minimum = _F32(-minimum)
            for j in range(s * sub, s * sub + sub):
                code = _get(src, begin, code_field, flips[0], j)
                level = table[code] if table.size else _F32(_F32(code) + low)
                value = _F32(step * level)
                out[to + j] = _F32(value - minimum) if places[1] >= 0 else value
