"""What every number format promises of any weight: errors within its rounding, fixed points, parts, threads, search."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from modelexport.quantization import formats, kernels
from modelexport.quantization.formats.base import NumberFormat
from tests.quantization._weights import (
    DTYPES,
    FORMATS,
    MICROSCALING,
    NAMES,
    bound,
    cuts,
    piece,
    quantise,
    random_weight,
    same_bytes,
    steps,
    widths,
    zeros,
)

OBSERVERS = ("amax", "mse")


@pytest.fixture
def restored_threads():
    yield
    kernels.set_threads(1)


def _format(data: st.DataObject, observers: tuple[str, ...] = OBSERVERS) -> NumberFormat:
    name, group = data.draw(st.sampled_from(FORMATS))
    return formats.get(name, group_size=group, observer=data.draw(st.sampled_from(observers)))


def _weight(data: st.DataObject, number_format: NumberFormat, dtype: torch.dtype, most: int = 9) -> Tensor:
    """Any size that the format holds: rows of all kinds, or arbitrary finite numbers in one of them."""
    unit = widths(number_format)
    cols = unit * data.draw(st.integers(1, 300 if unit == 1 else 4))
    weight = random_weight(data.draw(st.integers(1, most)), cols, dtype, data.draw(st.integers(0, 5)))
    if data.draw(st.booleans()):
        width = 16 if dtype == torch.float16 else 32
        numbers = st.floats(allow_nan=False, allow_infinity=False, width=width)
        row = torch.tensor(data.draw(st.lists(numbers, min_size=1, max_size=cols)), dtype=torch.float32).to(dtype)
        row = torch.where(torch.isfinite(row), row, torch.ones_like(row))
        weight[0, : len(row)] = row
    return weight


@given(data=st.data())
def test_errors_are_within_the_bound(data: st.DataObject) -> None:
    """|dequantise(quantise(w)) - w| is at most half the distance of two numbers, or to the range's end, everywhere.

    And with observer "amax" the range covers the weight up to a rounding of its scale, which in bf16 may be 2^-8 of
    it: integers by a step, with zero points (255 of such a scale, and the zero point is rounded) by one and a half.
    A range that is wider than float32's largest number (3.39e38 beside -2e36) has a scale that was cut to it.
    """
    number_format = _format(data)
    weight = _weight(data, number_format, data.draw(st.sampled_from(DTYPES)))
    stored = quantise(number_format, weight)
    error = (number_format.dequantise(stored).double() - weight.double()).abs()
    assert bool((error <= bound(number_format, stored, weight)).all())
    if number_format.quantised and number_format.observer == "amax":
        if number_format.weight_arguments()["type"] == "int":
            most = 1.51 if "weight_zero_point" in stored else 1.01
            held = (weight.float().amax(dim=1) - weight.float().amin(dim=1)).isfinite()
            assert bool((error <= most * steps(number_format, stored))[held].all())
        else:
            reach = {8: 448.0, 4: 6.0}[number_format.weight_bits] * steps(number_format, stored)
            assert bool((weight.double().abs() <= reach * 1.34).all())  # MX scales are powers of two: up to 8 / 6


@given(data=st.data())
def test_what_was_dequantised_is_quantised_to_itself(data: st.DataObject) -> None:
    """With the scales that it had: the same scales and zero points, the same bytes.

    Not with scales found anew: the largest of a group may be stored as 7 or -8 where 7.5 is the limit, and its largest
    magnitude then asks for another scale. Scales here are bf16 or fp16, of which the limit's multiple is exact in
    float32. The formats of MXFP and NVFP4 do find the same scales again, given the same amax of the whole weight.
    """
    number_format = _format(data)
    if not number_format.quantised:
        return
    weight = _weight(data, number_format, data.draw(st.sampled_from(DTYPES[:2])))
    stored = quantise(number_format, weight)
    values = number_format.dequantise(stored)
    again = {key: torch.zeros_like(tensor) for key, tensor in stored.items()}
    if number_format.name in MICROSCALING:
        same = formats.get(number_format.name)
        again = quantise(same, values, amax=same.amax(weight) if same.scale_granularity == "tensor" else None)
        if number_format.observer == "amax":
            assert torch.equal(same.dequantise(again), values)
        return
    scale = stored["weight_scale"].float()
    if number_format.name == "fp8-block":
        assert kernels.quantise_blocks(values, 128, scale * 448.0, again["weight"], again["weight_scale"], 448.0) == -1
    elif "weight_packed" in stored:
        cols, bits, zero = values.shape[1], number_format.weight_bits, None
        given_amax = scale * number_format.limit
        if "weight_zero_point" in stored:
            zero, half = torch.zeros(scale.shape, dtype=torch.int8), 2 ** (bits - 1)
            own = zeros(number_format, stored)[:, :: cols // scale.shape[1]][:, : scale.shape[1]].float()
            given_amax = torch.stack([(half + own) * scale, (half - 1 - own) * scale], dim=-1)
        packed = (again["weight_packed"], again["weight_scale"], number_format.limit)
        group = cols // scale.shape[1]
        assert kernels.quantise_groups(values, group, *packed, bits=bits, zero=zero, amax=given_amax) == -1
        assert zero is None or torch.equal(zero.float(), own)
    else:
        same = formats.get(number_format.name, scale_dtype=stored["weight_scale"].dtype)
        quantise(same, values, amax=scale.flatten() * same.limit, out=again)
    for suffix in ("weight", "weight_packed", "weight_scale"):
        if suffix in stored:
            assert same_bytes({suffix: again[suffix]}, {suffix: stored[suffix]})


@given(data=st.data())
def test_parts_of_a_weight_give_the_parts_of_the_whole(data: st.DataObject) -> None:
    """Any blocks of rows and columns, what scales depend on reduced first, into views of the whole's tensors."""
    number_format = _format(data)
    dtype = data.draw(st.sampled_from(DTYPES))
    most = 300 if number_format.name == "fp8-block" else 20
    weight = _weight(data, number_format, dtype, most)
    rows, cols = weight.shape
    whole = quantise(number_format, weight)
    specs = number_format.specs((rows, cols), dtype)
    parts = {key: torch.zeros_like(tensor) for key, tensor in whole.items()}
    down, across = number_format.alignment
    columns = [slice(0, cols)] if number_format.whole_rows else cuts(data, cols, across)
    blocks = cuts(data, rows, down)
    shared = None
    if number_format.scale_granularity == "tensor":
        shared = torch.stack([number_format.amax(weight[b, c]) for b in blocks for c in columns]).amax(dim=0)
        if number_format.searches_whole:
            errors = torch.cat([number_format.search_errors(weight[block], shared) for block in blocks])
            shared = number_format.search(shared, errors)
    for block in blocks:
        shards = [weight[block, part] for part in columns]
        amax = shared
        if number_format.scale_granularity == "row":
            amax = torch.stack([number_format.amax(shard) for shard in shards]).amax(dim=0)
        for part, shard in zip(columns, shards, strict=True):
            out = {spec.suffix: piece(spec, parts[spec.suffix], block, part) for spec in specs}
            quantise(number_format, shard, amax=amax, global_shape=(rows, cols), out=out)
    assert same_bytes(parts, whole)


@given(data=st.data())
def test_the_search_never_does_worse(data: st.DataObject) -> None:
    """The weight's squared error with observer "mse" is at most that with "amax", and mostly less."""
    found = _format(data, ("mse",))
    weight = _weight(data, found, data.draw(st.sampled_from(DTYPES)))
    plain = formats.get(found.name, group_size=found.group_size)
    errors = [
        math.fsum(number_format.squared_error(weight, quantise(number_format, weight))[:, 0].tolist())
        for number_format in (found, plain)
    ]
    assert errors[0] <= errors[1] * (1 + 1e-12)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("none", "mxfp8")])
def test_the_search_does_better(name: str) -> None:
    """For MXFP8 there is mostly nothing better: values below the largest lie in the same binades at half the scale."""
    weight = torch.randn(256, 512, generator=torch.Generator().manual_seed(1)).bfloat16()
    errors = []
    for observer in OBSERVERS:
        number_format = formats.get(name, observer=observer)
        errors.append(float(number_format.squared_error(weight, quantise(number_format, weight))[:, 0].sum()))
    assert errors[1] < errors[0]


@pytest.mark.parametrize("observer", OBSERVERS)
@pytest.mark.parametrize("threads", [2, 7])
def test_threads_change_no_byte(threads: int, observer: str, restored_threads: None) -> None:
    weight = random_weight(1030, 1024 if observer == "amax" else 384, torch.bfloat16)
    for name, group in FORMATS:
        number_format = formats.get(name, group_size=group, observer=observer)
        kernels.set_threads(1)
        alone = quantise(number_format, weight)
        errors = number_format.squared_error(weight, alone)
        values = number_format.dequantise(alone)
        kernels.set_threads(threads)
        assert same_bytes(quantise(number_format, weight), alone)
        assert torch.equal(number_format.squared_error(weight, alone), errors)
        assert torch.equal(number_format.dequantise(alone), values)
        if number_format.scale_granularity != "block":
            amax = number_format.amax(weight)
            kernels.set_threads(1)
            assert torch.equal(number_format.amax(weight), amax)
