"""The fused kernels against the reference, bit for bit, and both against torch's own conversions.

Formats with shared exponents have kernels of their own, and tests of them in test_microscaling.py.
"""

from __future__ import annotations

import itertools
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from modelexport.errors import CheckpointError
from modelexport.quantization import formats
from modelexport.quantization.formats.base import Grid
from modelexport.quantization.kernels import (
    feedback_fused,
    feedback_reference,
    fused,
    products_fused,
    products_reference,
    reference,
    scales,
    searching,
)
from tests.quantization._weights import DTYPES, PLAIN, as_view, quantise, random_weight, raw, same_bytes

E4M3 = torch.float8_e4m3fn
LIMITS = {torch.int8: 127.0, E4M3: 448.0}
SHAPES = [(1, 1), (1, 7), (3, 31), (8, 32), (9, 129), (17, 1000), (8, 2048), (5, 2049), (4, 4224)]


def _rows(module, weight: Tensor, storage: torch.dtype, amax: Tensor | None = None) -> tuple[Tensor, Tensor]:
    q = torch.empty(weight.shape, dtype=storage)
    scale = torch.empty(weight.shape[0], 1, dtype=weight.dtype)
    assert module.quantise_rows(weight, amax, q, scale, LIMITS[storage]) == -1
    return q, scale


def _groups(module, weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    rows, cols = weight.shape
    q = torch.empty(rows, cols // 8, dtype=torch.int32)
    scale = torch.empty(rows, cols // group, dtype=weight.dtype)
    assert module.quantise_groups(weight, group, q, scale, 7.5) == -1
    return q, scale


def _after(module, weight: Tensor, q: Tensor, scale: Tensor | None) -> list[Tensor]:
    """What is computed from stored tensors: the errors and the weights in every dtype."""
    errors = torch.empty(weight.shape[0], 2, dtype=torch.float64)
    module.squared_error(weight, q, scale, errors)
    if scale is None:
        return [errors]
    outputs = [torch.empty(weight.shape, dtype=dtype) for dtype in DTYPES]
    for output in outputs:
        module.dequantise(q, scale, output)
    return [errors, *outputs]


def _assert_same(left: list[Tensor], right: list[Tensor]) -> None:
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        assert torch.equal(raw(one), raw(other))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("storage", [torch.int8, E4M3])
def test_row_formats_agree(shape: tuple[int, int], storage: torch.dtype, dtype: torch.dtype) -> None:
    weight = random_weight(*shape, dtype)
    expected = _rows(reference, weight, storage)
    for source in (weight, as_view(weight), weight.t().contiguous().t()):
        _assert_same(list(_rows(fused, source, storage)), list(expected))
        _assert_same(_after(fused, source, *expected), _after(reference, weight, *expected))
    _assert_same([fused.row_amax(weight)], [reference.row_amax(weight)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "group"),
    [((1, 32), 32), ((9, 128), 32), ((9, 192), 64), ((17, 128), 128), ((4, 2176), 128), ((3, 4416), 64)],
)
def test_group_formats_agree(shape: tuple[int, int], group: int, dtype: torch.dtype) -> None:
    weight = random_weight(*shape, dtype)
    weight[0, :group] = 0.0
    expected = _groups(reference, weight, group)
    for source in (weight, as_view(weight), weight.t().contiguous().t()):
        _assert_same(list(_groups(fused, source, group)), list(expected))
        _assert_same(_after(fused, source, *expected), _after(reference, weight, *expected))


@pytest.mark.parametrize("observer", ["amax", "mse"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "group"), PLAIN)
def test_formats_agree(
    name: str, group: int | None, dtype: torch.dtype, observer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a format computes, for shapes with and without short ends, scales in the weight's dtype and others."""
    shapes = [(1, 128), (9, 384)] if group and group > 0 else [(1, 1), (9, 100), (130, 259)]
    for shape, scale_dtype in itertools.product(shapes, (None, torch.float32 if dtype != torch.float32 else DTYPES[1])):
        number_format = formats.get(name, group_size=group, observer=observer, scale_dtype=scale_dtype)
        weight, results = random_weight(*shape, dtype), []
        for kernels_name in ("reference", "fused"):
            monkeypatch.setenv("MODELEXPORT_KERNELS", kernels_name)
            source = as_view(weight) if kernels_name == "fused" else weight
            stored = quantise(number_format, source)
            values = {str(wide): number_format.dequantise(stored, dtype=wide) for wide in DTYPES}
            results.append({**stored, **values, "errors": number_format.squared_error(source, stored)})
        assert same_bytes(*results)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_plain_copies_agree(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = random_weight(*shape, dtype)
    for module in (reference, fused):
        copy = torch.empty_like(weight)
        assert module.copy_finite(as_view(weight), copy) == -1
        assert torch.equal(raw(copy), raw(weight))
    changed = (weight.float() * 0.75).to(dtype)
    _assert_same(_after(fused, weight, changed, None), _after(reference, weight, changed, None))


@given(data=st.data())
def test_any_float_agrees(data: st.DataObject) -> None:
    """Rows of arbitrary bits (no NaN, no Inf), an arbitrary amax where one is given."""
    dtype = data.draw(st.sampled_from(DTYPES))
    rows, cols = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([1, 8, 33, 64]))
    width = {torch.bfloat16: 32, torch.float16: 16, torch.float32: 32}[dtype]
    numbers = st.floats(allow_nan=False, allow_infinity=False, width=width)
    values = data.draw(st.lists(numbers, min_size=rows * cols, max_size=rows * cols))
    weight = torch.tensor(values, dtype=torch.float32).view(rows, cols).to(dtype)
    weight = torch.where(torch.isfinite(weight), weight, torch.ones_like(weight))
    positive = st.floats(0.0, 2.0**127, width=32)
    amax = None
    if data.draw(st.booleans()):
        amax = torch.tensor(data.draw(st.lists(positive, min_size=rows, max_size=rows)), dtype=torch.float32)
    for storage in (torch.int8, E4M3):
        stored = _rows(reference, weight, storage, amax)
        _assert_same(list(_rows(fused, weight, storage, amax)), list(stored))
        _assert_same(_after(fused, weight, *stored), _after(reference, weight, *stored))
    if cols % 32 == 0:
        stored = _groups(reference, weight, 32)
        _assert_same(list(_groups(fused, weight, 32)), list(stored))
        _assert_same(_after(fused, weight, *stored), _after(reference, weight, *stored))
    extremes = None if amax is None else torch.stack([amax, amax.flip(0)], dim=1)
    bits, scale_dtype = data.draw(st.sampled_from([4, 8])), data.draw(st.sampled_from(DTYPES))
    _assert_same(*(_affine(module, weight, bits, scale_dtype, extremes) for module in (reference, fused)))
    for storage, given_amax in ((torch.int8, amax), (E4M3, amax), (torch.int8, extremes)):
        limit = 7.5 if bits == 4 and storage == torch.int8 else LIMITS[storage]
        used = torch.ones(rows) if given_amax is None else given_amax
        width = bits if storage == torch.int8 else 8
        _assert_same(
            *([_searched(module, weight, used, storage, scale_dtype, limit, width)] for module in (reference, fused))
        )


def _affine(module, weight: Tensor, bits: int, scale_dtype: torch.dtype, extremes: Tensor | None) -> list[Tensor]:
    """A scale and a zero point per row; what is stored, how far rows go, and what is read back."""
    rows, cols = weight.shape
    q = torch.empty(rows, -(-cols * bits // 32), dtype=torch.int32)
    scale, zero = torch.empty(rows, 1, dtype=scale_dtype), torch.empty(rows, 1, dtype=torch.int8)
    given_amax = None if extremes is None else extremes.unsqueeze(1)
    assert module.quantise_groups(weight, cols, q, scale, 0.0, bits=bits, zero=zero, amax=given_amax) == -1
    errors, values = torch.empty(rows, 2, dtype=torch.float64), torch.empty(weight.shape)
    module.squared_error(weight, q, scale, errors, group=cols, bits=bits, zero=zero)
    module.dequantise(q, scale, values, group=cols, bits=bits, zero=zero)
    return [q, scale, zero, module.row_extremes(weight), errors, values]


def _searched(
    module,
    weight: Tensor,
    amax: Tensor,
    storage: torch.dtype,
    scale_dtype: torch.dtype,
    limit: float,
    bits: int,
) -> Tensor:
    out = torch.empty(len(weight), scales.TRIED, dtype=torch.float64)
    module.search_errors(weight, amax, storage, scale_dtype, limit, scales.shrinks(bits), out, bits=bits)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_search_takes_the_least_of_what_its_scales_would_cost(dtype: torch.dtype) -> None:
    """Each tried scale by hand: quantise with it, add up the squares in plain float64."""
    weight = random_weight(8, 64, dtype)
    weight[3] = torch.arange(64).to(dtype)  # exact for several scales: of equal errors the larger wins
    for bits, storage, limit in ((4, torch.int32, 7.5), (8, torch.int8, 127.0), (8, E4M3, 448.0)):
        amax = fused.row_amax(weight)
        costs = []
        for shrink in scales.shrinks(bits):
            q = torch.empty(8, 8 if bits == 4 else 64, dtype=storage)
            scale, values = torch.empty(8, 1, dtype=dtype), torch.empty(8, 64)
            given_amax = (amax * shrink).unsqueeze(1)
            assert reference.quantise_groups(weight, 64, q, scale, limit, bits=bits, amax=given_amax) == -1
            reference.dequantise(q, scale, values, bits=bits)
            costs.append((weight.float() - values).double().square().sum(1))
        table = torch.stack(costs, dim=1)
        numbers = torch.int8 if bits == 4 else storage
        errors = _searched(fused, weight, amax, numbers, dtype, limit, bits)
        assert torch.allclose(errors, table, rtol=1e-12, atol=0.0)
        chosen = searching.search(weight, 64, numbers, dtype, limit, bits=bits).squeeze(1)
        for row in range(8):
            least = min(range(scales.TRIED), key=lambda number: (float(errors[row, number]), number))
            assert float(chosen[row]) == float(amax[row] * scales.shrinks(bits)[least])
        assert bits == 8 or not torch.equal(chosen, amax)


def test_errors_of_rows_are_added_in_halves() -> None:
    errors = torch.tensor([[1.0], [1e16], [-1e16], [1.0], [3.0]], dtype=torch.float64)
    # filled up to eight: (1 + 3), 1e16, -1e16, 1; then (4 - 1e16), (1e16 + 1); then their sum
    assert searching.sum_in_halves(errors).tolist() == [(4.0 - 1e16) + (1e16 + 1.0)]
    assert searching.sum_in_halves(errors[:1]).tolist() == [1.0]
    assert searching.sum_in_halves(errors[:0]).tolist() == [0.0]


def _all_bfloat16() -> Tensor:
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    return values[torch.isfinite(values)]


def _e4m3_neighbourhoods() -> Tensor:
    """float32: every e4m3 value, every midpoint of two, and the four floats next to each; and random bits."""
    codes = torch.arange(256, dtype=torch.uint8).view(E4M3).float()
    values = codes[torch.isfinite(codes)].unique()
    middles = (values[1:] + values[:-1]) / 2
    exact = torch.cat([values, middles, torch.tensor([448.0, 464.0, 480.0, 1e9, -1e9, -0.0])])
    bits = exact.view(torch.int32)
    around = torch.cat([(bits + step).view(torch.float32) for step in (-2, -1, 0, 1, 2)])
    generator = torch.Generator().manual_seed(1)
    noise = torch.randint(-(2**31), 2**31 - 1, (1 << 20,), generator=generator, dtype=torch.int64)
    everything = torch.cat([around, noise.to(torch.int32).view(torch.float32)])
    return everything[torch.isfinite(everything)]


@pytest.mark.parametrize("scale", [1.0, 2.0**-9, 0.3125, 3.0, 1.7e-3, 2.0**-100])
def test_every_bfloat16_rounds_to_e4m3_and_int8_as_torch_does(scale: float) -> None:
    values = _all_bfloat16().unsqueeze(0)
    for storage, limit in LIMITS.items():
        amax = torch.tensor([scale * limit])
        q, stored = _rows(fused, values, storage, amax)
        ratio = (values.float() / stored.float()).clamp(-limit - (storage == torch.int8), limit)
        expected = ratio.round().to(torch.int8) if storage == torch.int8 else ratio.to(E4M3)
        assert torch.equal(raw(q), raw(expected))


def test_every_boundary_of_e4m3_rounds_as_torch_does() -> None:
    values = _e4m3_neighbourhoods().unsqueeze(0)
    q, scale = _rows(fused, values, E4M3, torch.tensor([448.0]))
    assert float(scale) == 1.0
    assert torch.equal(raw(q), raw(values.clamp(-448.0, 448.0).to(E4M3)))


def test_every_stored_byte_decodes_as_torch_does() -> None:
    for storage, dtype in itertools.product((torch.int8, E4M3), DTYPES):
        q = torch.arange(256, dtype=torch.uint8).view(storage).unsqueeze(0)
        scale = torch.tensor([[0.37]], dtype=dtype)
        out = torch.empty(1, 256)
        fused.dequantise(q, scale, out)
        expected = q.float() * scale.float()
        assert torch.equal(out.isnan(), expected.isnan())
        assert torch.equal(out.nan_to_num(0.0), expected.nan_to_num(0.0))


def test_every_float16_is_widened_exactly() -> None:
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    values = values[torch.isfinite(values)].unsqueeze(1)
    assert torch.equal(fused.row_amax(values), values.float().abs().squeeze(1))
    # With its sign, too: as a value (its squared error against zero) and as a scale (of a row of ones).
    errors = torch.empty(len(values), 2, dtype=torch.float64)
    fused.squared_error(values, torch.zeros_like(values), None, errors)
    assert torch.equal(errors[:, 0], values.double().square().squeeze(1))
    q, one = torch.zeros_like(values, dtype=torch.int8), torch.ones(len(values), 1, dtype=torch.float16)
    out = torch.empty(values.shape)
    fused.dequantise(q + 1, values, out)
    assert torch.equal(raw(out), raw(values.float()))
    fused.squared_error(values, q, one, errors)
    assert torch.equal(errors[:, 0], errors[:, 1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("storage", [torch.int8, E4M3])
def test_scales_agree_for_every_amax(storage: torch.dtype, dtype: torch.dtype) -> None:
    """All bfloat16 magnitudes and a sample of float32 ones, as amax."""
    generator = torch.Generator().manual_seed(2)
    noise = torch.randint(0, 0x7F800000, (1 << 16,), generator=generator).to(torch.int32).view(torch.float32)
    amax = torch.cat([_all_bfloat16().float().abs().unique(), noise])
    weight = torch.zeros(len(amax), 1, dtype=dtype)
    limit = LIMITS[storage]
    _, scale = _rows(fused, weight, storage, amax)
    assert torch.equal(raw(scale.squeeze(1)), raw(reference.scale_of(amax, limit, storage, dtype)))
    floor = 2.0**-24 if dtype == torch.float16 else 2.0**-126
    assert bool(torch.isfinite(scale).all())
    assert float(scale.min()) == floor
    assert float(scale[0]) == 1.0  # amax 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("storage", "top"), [(torch.int8, 128.0), (E4M3, 448.0), (torch.int32, 8.0)])
def test_the_largest_scale_is_the_largest_that_never_overflows(
    storage: torch.dtype, top: float, dtype: torch.dtype
) -> None:
    scale = torch.tensor(reference.largest_scale(storage, dtype), dtype=dtype)
    assert float(scale) * top <= torch.finfo(dtype).max < float(scale * (1 + torch.finfo(dtype).eps)) * top


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_the_first_bad_row_is_found(dtype: torch.dtype, bad: float) -> None:
    weight = random_weight(8, 256, dtype)
    weight[5, 255] = bad
    weight[7, 0] = bad
    for module in (reference, fused):
        assert not bool(torch.isfinite(module.row_amax(weight)[5]))
        scale = torch.empty(8, 1, dtype=dtype)
        for storage in (torch.int8, E4M3):
            q = torch.empty(8, 256, dtype=storage)
            assert module.quantise_rows(weight, None, q, scale, 127.0) == 5
            assert module.quantise_rows(weight, torch.ones(8), q, scale, 127.0) == 5
            given = torch.ones(8)
            given[3] = bad
            assert module.quantise_rows(weight, given.abs(), q, scale, 127.0) == 3
        packed, steps = torch.empty(8, 32, dtype=torch.int32), torch.empty(8, 2, dtype=dtype)
        assert module.quantise_groups(weight, 128, packed, steps, 7.5) == 5
        zero = torch.empty(8, 2, dtype=torch.int8)
        assert module.quantise_groups(weight, 128, packed, steps, 7.5, zero=zero) == 5
        wide = torch.empty(8, 64, dtype=torch.int32)
        assert module.quantise_groups(weight, 128, wide, steps, 7.5, bits=8, zero=zero, amax=torch.ones(8, 2, 2)) == 5
        assert not bool(torch.isfinite(module.row_extremes(weight)[5]).all())
        q, blocks = torch.empty(8, 256, dtype=E4M3), torch.empty(1, 2, dtype=dtype)
        assert module.quantise_blocks(weight, 128, None, q, blocks, 448.0) == 5
        assert module.quantise_blocks(weight, 128, torch.ones(1, 2), q, blocks, 448.0) == 5
        assert module.quantise_blocks(weight[:4], 128, torch.tensor([[1.0, abs(bad)]]), q[:4], blocks, 448.0) == 0
        errors = _searched(module, weight, module.row_amax(weight), torch.int8, dtype, 127.0, 8)
        assert bool((errors[5] == 0.0).all())
        assert module.copy_finite(weight, torch.empty_like(weight)) == 5


def test_squared_error_is_the_sum_in_the_order_that_is_promised() -> None:
    """Recomputed here in plain Python, lane by lane."""
    cols = 300
    weight = random_weight(1, cols, torch.float32, seed=3)
    other = weight + torch.randn(1, cols, generator=torch.Generator().manual_seed(4)) * 0.01
    lanes = [0.0] * reference.LANES
    for column in range(cols):
        difference = struct.unpack("f", struct.pack("f", float(weight[0, column]) - float(other[0, column])))[0]
        lanes[column % reference.LANES] += difference * difference
    sixteen = [0.0] * 16
    for lane, value in enumerate(lanes):
        sixteen[lane % 16] += value
    total = 0.0
    for value in sixteen:
        total += value
    for module in (reference, fused):
        errors = torch.empty(1, 2, dtype=torch.float64)
        module.squared_error(weight, other, None, errors)
        assert float(errors[0, 0]) == total
        assert float(errors[0, 1]) == pytest.approx(float(weight.double().square().sum()), rel=1e-14)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "quant", [("int4", 32), ("int4", 128), ("int4", -1), ("int4-asym", 64), ("int8-wo", 128), ("int8-wo-asym", -1)]
)
def test_nearest_values_are_those_that_are_stored(quant: tuple[str, int], dtype: torch.dtype) -> None:
    name, group = quant
    weight = random_weight(9, 384, dtype)
    weight[2] = 0
    number_format = formats.get(name, group_size=group, scale_dtype=torch.bfloat16)
    wanted = number_format.dequantise(number_format.quantise(weight))
    assert torch.equal(number_format.nearest(weight), wanted)
    width, affine = (384 if group == -1 else group), name.endswith("asym")
    limit, bits = getattr(number_format, "limit", 0.0), number_format.weight_bits
    for module in (reference, fused):
        out = torch.empty(9, 768)[:, 100:484]  # not dense
        assert module.nearest_groups(weight, width, out, torch.bfloat16, limit, bits=bits, affine=affine) == -1
        assert torch.equal(out, wanted)
        spoilt = weight.clone()
        spoilt[5, 7] = torch.nan
        assert module.nearest_groups(spoilt, width, out, torch.bfloat16, limit, bits=bits, affine=affine) == 5
    with pytest.raises(CheckpointError, match="NaN"):
        number_format.nearest(spoilt)


@pytest.mark.parametrize("scale_dtype", DTYPES)
@pytest.mark.parametrize("case", [(4, 128, False), (4, 40, True), (8, 32, False), (8, 96, True)], ids=str)
def test_products_choose_what_each_scale_tried_would_cost(
    case: tuple[int, int, bool], scale_dtype: torch.dtype
) -> None:
    """The kernel has the reference's bits, and both take the least of d G d^T as float64 has it."""
    bits, group, affine = case
    torch.manual_seed(5)
    blocks, rows, limit = 3, 7, 7.5 if bits == 4 else 127.5
    values = torch.randn(rows, blocks * group) ** 3
    values[4] = 0
    sample = torch.randn(50, blocks, group) * torch.rand(group)
    sample[:, :, ::7] += 3 * sample[:, :, :1]
    products = torch.einsum("tbi,tbj->bij", sample, sample)
    own = (reference.row_extremes if affine else reference.row_amax)(values.reshape(-1, group))
    amax = own.view(rows, blocks, *own.shape[1:])
    by_block = values.unflatten(1, (blocks, group))
    errors, integers = [], []
    for shrink in scales.shrinks(bits):
        tried = reference.tried_scales(amax * shrink, affine, torch.int8, scale_dtype, limit, bits, torch.float32)
        integers.append(products_reference.integers(by_block, *tried, bits))
        apart = (integers[-1] * tried[0].unsqueeze(-1) - by_block).double()
        errors.append(torch.einsum("rbi,bij,rbj->rb", apart, products.double(), apart))
    moved, aimed = (part.transpose(0, 1) @ products for part in (integers[0], by_block))
    given = (values, group, amax, products)
    found = [
        module.choose(*given, moved.clone(), aimed, scale_dtype, limit, bits)
        for module in (products_fused, products_reference)
    ]
    assert torch.equal(found[0], found[1])
    chosen = torch.stack(errors).gather(0, found[0].long().unsqueeze(0)).squeeze(0)
    assert torch.allclose(chosen, torch.stack(errors).amin(dim=0), rtol=1e-4)
    assert len(found[0].unique()) > 1
    assert torch.equal(searching.choose(values, products, scale_dtype, limit, bits, affine=affine), found[0])


@pytest.mark.parametrize(("cols", "columns"), [(256, 128), (100, 32), (60, 60)])
@pytest.mark.parametrize("numbers", ["int4", "int4-asym", "e2m1", "e4m3"])
def test_offsets_are_moved_alike(cols: int, columns: int, numbers: str) -> None:
    torch.manual_seed(6)
    weight, offset, gradient = torch.randn(11, cols), torch.rand(11, cols) - 0.5, torch.randn(11, cols)
    gradient[0], gradient[1] = 0.0, -0.0
    storage, low, high = {"e2m1": (torch.uint8, -6.0, 6.0), "e4m3": (torch.float8_e4m3fn, -448.0, 448.0)}.get(
        numbers, (torch.int8, -8.0, 7.0)
    )
    step = (torch.rand(11, -(-cols // columns)) + 1) * 0.8 / high  # some weights are beyond what can be stored
    weight[2, :8] = torch.tensor([0.0, -0.0, 1e-9, 2.0, 1.0, 0.5, 0.25, -1.5]) * step[2, 0]
    zero = torch.randint(-8, 8, step.shape).float() if numbers == "int4-asym" else None
    grid = (step, zero, columns, storage, low, high)
    kept, moved = [], []
    for module in (feedback_fused, feedback_reference):
        own, values = offset.clone(), torch.empty_like(weight)
        for rate in (0.005, 0.3):
            module.descend(weight, own, gradient, *grid, rate)
        module.nearest_moved(weight, own, *grid, values)
        kept.append(own)
        moved.append(values)
    assert torch.equal(kept[0], kept[1])
    assert torch.equal(moved[0], moved[1])
    assert not torch.equal(kept[0], offset)
    assert torch.equal(kept[0][:2], offset[:2])
    plain = Grid(*grid)
    assert torch.equal(moved[0], plain.nearest(weight + kept[0] * plain.spacing(weight)))
