"""Number formats: hand-computed cases, cuts, views, edge cases, and what they say when they refuse."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from modelexport.errors import CheckpointError, PlanError, UsageError
from modelexport.quantization import formats
from modelexport.quantization.formats.base import NumberFormat, TensorSpec
from tests.quantization._weights import DTYPES, FORMATS, as_view, random_weight, raw, same_bytes

ALL = pytest.mark.parametrize(("name", "group"), FORMATS)


def _piece(spec: TensorSpec, whole: Tensor, rows: slice, cols: slice) -> Tensor:
    """The part of a stored tensor that covers these rows and columns of the weight."""
    index = []
    for unit, cut in zip(spec.units, (rows, cols), strict=False):
        index.append(slice(None) if unit is None else slice(cut.start // unit, cut.stop // unit))
    return whole[tuple(index)]


def _cuts(data: st.DataObject, size: int, unit: int) -> list[slice]:
    """The dim of that size in up to four uneven parts, cut on multiples of ``unit``; parts may be empty."""
    marks = data.draw(st.lists(st.integers(0, size // unit), max_size=3))
    edges = [0, *sorted(mark * unit for mark in marks), size]
    return [slice(start, stop) for start, stop in pairwise(edges)]


@given(data=st.data())
def test_parts_of_a_weight_give_the_parts_of_the_whole(data: st.DataObject) -> None:
    """Any blocks of rows and columns, the rows' amax reduced first, into views of the whole's tensors."""
    name, group = data.draw(st.sampled_from(FORMATS))
    number_format = formats.get(name, group_size=group)
    dtype = data.draw(st.sampled_from(DTYPES))
    unit = number_format.alignment[1]
    rows, cols = data.draw(st.integers(1, 12)), unit * data.draw(st.integers(1, 400 if unit == 1 else 6))
    weight = random_weight(rows, cols, dtype, data.draw(st.integers(0, 5)))
    whole = number_format.quantise(weight)
    specs = number_format.specs((rows, cols), dtype)
    parts = {key: torch.zeros_like(tensor) for key, tensor in whole.items()}
    columns = _cuts(data, cols, unit)
    for block in _cuts(data, rows, number_format.alignment[0]):
        shards = [weight[block, part] for part in columns]
        amax = torch.stack([number_format.row_amax(shard) for shard in shards]).amax(dim=0)
        for part, shard in zip(columns, shards, strict=True):
            out = {spec.suffix: _piece(spec, parts[spec.suffix], block, part) for spec in specs}
            given_amax = amax if number_format.needs_row_amax else None
            number_format.quantise(shard, amax=given_amax, global_shape=(rows, cols), out=out)
    assert same_bytes(parts, whole)


@ALL
@pytest.mark.parametrize("dtype", DTYPES)
def test_stored_tensors_are_what_specs_say(name: str, group: int | None, dtype: torch.dtype) -> None:
    number_format = formats.get(name, group_size=group)
    for rows, cols in ((5, 256), (1, 128), (0, 128), (3, 0)):
        weight = random_weight(rows, cols, dtype)
        stored = number_format.quantise(weight)
        specs = number_format.specs((rows, cols), dtype)
        assert [spec.suffix for spec in specs] == list(stored)
        for spec in specs:
            tensor = stored[spec.suffix]
            assert (tuple(tensor.shape), tensor.dtype) == (spec.shape, spec.dtype)
            assert len(spec.units) == len(spec.shape)
            assert spec.nbytes == tensor.numel() * tensor.element_size()
        values = number_format.dequantise(stored)
        assert (tuple(values.shape), values.dtype) == ((rows, cols), torch.float32)
        assert tuple(number_format.squared_error(weight, stored).shape) == (rows, 2)
        assert number_format.row_amax(weight).shape == (rows,)
        total = 8 * sum(spec.nbytes for spec in specs)
        bits = number_format.bits_per_weight((rows, cols), dtype)
        assert bits == pytest.approx(total / (rows * cols) if rows * cols else 0.0)


@ALL
@pytest.mark.parametrize("dtype", DTYPES)
def test_views_in_and_out(name: str, group: int | None, dtype: torch.dtype) -> None:
    number_format = formats.get(name, group_size=group)
    weight = random_weight(9, 384, dtype)
    expected = number_format.quantise(weight)
    for source in (as_view(weight), weight.t().contiguous().t(), weight.clone().requires_grad_(True)):
        assert same_bytes(number_format.quantise(source), expected)
    for spread in (lambda tensor: as_view(tensor) if tensor.dim() == 2 else tensor, _every_other):
        out = {key: spread(torch.zeros_like(tensor)) for key, tensor in expected.items()}
        assert same_bytes(number_format.quantise(weight, out=out), expected)
        assert torch.equal(number_format.dequantise(out), number_format.dequantise(expected))
        error = number_format.squared_error(as_view(weight), out)
        assert torch.equal(error, number_format.squared_error(weight, expected))


def _every_other(tensor: Tensor) -> Tensor:
    """The same shape with a gap after every element."""
    return torch.zeros(*tensor.shape, 2, dtype=tensor.dtype)[..., 0].copy_(tensor)


def test_int8_by_hand() -> None:
    number_format = formats.get("int8")
    weight = torch.tensor([[127.0, -63.5, 0.5, 1.5, -127.0], [0.0] * 5, [-2.54, 2.53, 1.27, 0.0, 0.01]])
    stored = number_format.quantise(weight)
    assert stored["weight_scale"].flatten().tolist() == pytest.approx([1.0, 1.0, 0.02])
    assert stored["weight"].tolist() == [[127, -64, 0, 2, -127], [0] * 5, [-127, 126, 64, 0, 0]]


def test_int8_divides_by_the_scale_as_stored() -> None:
    """amax 1 in bfloat16: 1 / 127 is stored as 129 * 2^-14, and 1 / that is 127.007..."""
    stored = formats.get("int8").quantise(torch.tensor([[1.0, 0.5]], dtype=torch.bfloat16))
    assert stored["weight_scale"].item() == 129 * 2.0**-14
    assert stored["weight"].tolist() == [[127, round(0.5 / (129 * 2.0**-14))]]


def test_int8_clamps_where_the_stored_scale_came_out_smaller() -> None:
    """An amax that another rank or a search chose may be smaller than the row's own, too."""
    weight = torch.tensor([[3.0, -3.0, 0.5]])
    stored = formats.get("int8").quantise(weight, amax=torch.tensor([1.27]))
    assert stored["weight"].tolist() == [[127, -128, 50]]
    assert formats.get("fp8").quantise(weight, amax=torch.tensor([1.0]))["weight"][0, 0].item() == 448.0


def test_fp8_by_hand() -> None:
    number_format = formats.get("fp8")
    weight = torch.tensor([[448.0, 1.0625, -17.0, 0.0009765625, 2.0**-9 * 1.5, -0.0]])
    stored = number_format.quantise(weight)
    assert stored["weight_scale"].item() == 1.0
    # 1.0625 and 17 are midway between neighbours 1/8 (2) apart: to even; 2^-10 is half the smallest denormal.
    assert stored["weight"].float().tolist() == [[448.0, 1.0, -16.0, 0.0, 2.0**-8, -0.0]]
    assert math.copysign(1.0, float(stored["weight"].float()[0, 5])) == -1.0


def test_int4_by_hand() -> None:
    number_format = formats.get("int4", group_size=32)
    first = [7.5, -7.5, 1.0, -1.0, 0.5, 1.5, -2.5, 6.4]
    weight = torch.tensor([first + [0.0] * 24 + [0.0] * 32])
    stored = number_format.quantise(weight, global_shape=(8, 64))
    assert stored["weight_scale"].tolist() == [[1.0, 1.0]]
    assert stored["weight_shape"].tolist() == [8, 64]
    # to even: 8 -> clamped to 7, -8, 1, -1, 0, 2, -2, 6; stored + 8 = f 0 9 7 8 a 6 e, the first one lowest
    assert stored["weight_packed"].tolist()[0] == [0xE6A8790F - 2**32] + [0x88888888 - 2**32] * 7
    assert number_format.dequantise(stored)[0, :8].tolist() == [7.0, -8.0, 1.0, -1.0, 0.0, 2.0, -2.0, 6.0]


@ALL
def test_errors_are_within_half_a_step(name: str, group: int | None) -> None:
    """Sums of squares against plain float64 arithmetic, and every value within its format's rounding."""
    number_format = formats.get(name, group_size=group)
    weight = torch.randn(16, 512, generator=torch.Generator().manual_seed(5)).bfloat16()
    stored = number_format.quantise(weight)
    values = number_format.dequantise(stored)
    difference = weight.double() - values.double()
    expected = torch.stack([difference.square().sum(1), weight.double().square().sum(1)], dim=1)
    assert torch.allclose(number_format.squared_error(weight, stored), expected, rtol=1e-12, atol=0.0)
    sqnr = 10 * math.log10(float(expected[:, 1].sum() / max(expected[:, 0].sum(), 1e-300)))
    assert sqnr >= {"none": 300.0, "int8": 40.0, "fp8": 31.0, "int4": 18.5}[name]
    for dtype in DTYPES:
        assert torch.equal(number_format.dequantise(stored, dtype=dtype), values.to(dtype))


@ALL
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_scale_is_zero_denormal_or_infinite(name: str, group: int | None, dtype: torch.dtype) -> None:
    number_format = formats.get(name, group_size=group)
    info = torch.finfo(dtype)
    smallest = 2.0**-24 if dtype == torch.float16 else float(info.smallest_normal) * info.eps
    for value in (0.0, smallest, info.tiny, info.max, -info.max):
        weight = torch.full((2, 128), value, dtype=dtype)
        stored = number_format.quantise(weight)
        for suffix, tensor in stored.items():
            if suffix == "weight_scale":
                floor = 2.0**-24 if dtype == torch.float16 else 2.0**-126
                assert bool(torch.isfinite(tensor).all())
                assert float(tensor.min()) >= floor
                assert value != 0.0 or bool((tensor == 1.0).all())
        values = number_format.dequantise(stored)
        assert bool(torch.isfinite(values).all())
        assert bool(torch.isfinite(number_format.dequantise(stored, dtype=dtype)).all())
        # An eighth: int4 near the dtype's largest (the scale stays where -8 times it is finite), and fp8 with
        # a float16 scale of two of its smallest steps.
        assert torch.allclose(values, weight.float(), rtol=0.1251, atol=2.0**-24)


@ALL
def test_bad_values_are_refused_by_place(name: str, group: int | None) -> None:
    number_format = formats.get(name, group_size=group)
    weight = random_weight(600, 128, torch.bfloat16)
    weight[300, 7] = float("nan")
    weight[599, 1] = float("-inf")
    weight[599, 2] = float("nan")
    with pytest.raises(CheckpointError) as caught:
        number_format.quantise(weight, name="model.layers.0.mlp.up_proj.weight")
    text = str(caught.value)
    assert text.startswith("model.layers.0.mlp.up_proj.weight: 2 NaN and 1 Inf among 76800 values, ")
    assert "first at row 300, column 7" in text
    if number_format.needs_row_amax:
        amax = torch.ones(4)
        amax[2] = float("nan")
        with pytest.raises(CheckpointError, match=r"w: .* row 2 is nan.*another shard holds NaN or Inf"):
            number_format.quantise(torch.ones(4, 128), amax=amax, name="w")


def test_an_indivisible_width_is_refused_with_the_choices() -> None:
    int4 = formats.get("int4")
    int4.check_shape("model.layers.0.self_attn.o_proj", (256, 512))
    with pytest.raises(PlanError) as caught:
        int4.check_shape("model.layers.0.mlp.down_proj", (256, 1120))
    text = str(caught.value)
    assert "model.layers.0.mlp.down_proj: in_features 1120 is not divisible by the group size 128" in text
    assert "--group-size 32, or a format without groups (--quant fp8, --quant int8)" in text
    assert "--group-size 64" not in text
    with pytest.raises(PlanError, match=r"nor by any other that it has: 32, 64, 128"):
        int4.check_shape("m", (4, 100))
    with pytest.raises(PlanError, match="in_features 100"):
        int4.quantise(torch.zeros(2, 100), name="w")
    for name in ("none", "int8", "fp8"):
        formats.get(name).check_shape("m", (3, 101))
        with pytest.raises(PlanError, match=r"m: a weight of shape \(2, 3, 4\) is not a matrix"):
            formats.get(name).check_shape("m", (2, 3, 4))


@ALL
def test_what_is_no_weight_is_refused(name: str, group: int | None) -> None:
    number_format = formats.get(name, group_size=group)
    with pytest.raises(CheckpointError, match="w: its dtype is int8, but number format"):
        number_format.quantise(torch.zeros(2, 128, dtype=torch.int8), name="w")
    with pytest.raises(CheckpointError, match=r"w: its shape is \(128,\)"):
        number_format.quantise(torch.zeros(128), name="w")


def test_what_does_not_fit_is_refused() -> None:
    weight = torch.zeros(2, 128)
    int8, int4 = formats.get("int8"), formats.get("int4")
    with pytest.raises(ValueError, match=r"amax is torch.float32 \(3,\), not torch.float32 \(2,\)"):
        int8.quantise(weight, amax=torch.zeros(3))
    with pytest.raises(ValueError, match="no scale of number format int4 spans a row"):
        int4.quantise(weight, amax=torch.zeros(2))
    with pytest.raises(ValueError, match=r"out holds \['weight'\], but the format stores"):
        int8.quantise(weight, out={"weight": torch.zeros(2, 128, dtype=torch.int8)})
    out = int8.quantise(weight)
    with pytest.raises(ValueError, match=r"out\['weight_scale'\] is torch.float32 \(2,\), but"):
        int8.quantise(weight, out={**out, "weight_scale": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"the weight is \(2, 64\), but \(2, 128\) is stored"):
        int8.squared_error(weight[:, :64], out)


def test_names_and_choice() -> None:
    assert formats.names() == ["fp8", "int4", "int8", "none"]
    for name in formats.names():
        number_format = formats.get(name)
        assert isinstance(number_format, NumberFormat)
        assert number_format.name == name
        assert number_format == formats.get(name)
        assert number_format.quantised == (name != "none")
        assert number_format.description
    assert formats.get("int4").group_size == 128
    assert formats.get("int4", group_size=32).alignment == (1, 32)
    with pytest.raises(UsageError, match=r"unknown number format 'int5'; did you mean 'int[48]'\? \(known: fp8"):
        formats.get("int5")
    with pytest.raises(UsageError, match="int4 has no group size 48; choose from 32, 64, 128"):
        formats.get("int4", group_size=48)
    with pytest.raises(UsageError, match="fp8 has no groups, but group size 128 was given"):
        formats.get("fp8", group_size=128)


@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_are_rounded_per_token(dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(6)).to(dtype)
    x[1, 2] = 0.0
    for name in ("none", "int4"):
        assert formats.get(name).fake_quantise_activations(x) is x
    for name, steps in (("int8", 127), ("fp8", 448)):
        rounded = formats.get(name).fake_quantise_activations(x)
        assert rounded.dtype == dtype
        assert bool((rounded[1, 2] == 0).all())
        alone = formats.get(name).fake_quantise_activations(x[0, 1])
        assert torch.equal(rounded[0, 1], alone)
        amax = x[0, 1].float().abs().amax()
        bound = amax / steps / 2 if name == "int8" else x[0, 1].float().abs() / 16 + amax / 448 * 2.0**-9
        assert bool(((rounded[0, 1].float() - x[0, 1].float()).abs() <= bound * 1.01 + amax * 2.0**-8).all())
        assert formats.get(name).fake_quantise_activations(x[:, :, :0]).shape == (2, 3, 0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@ALL
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gpu_gives_the_same_bytes(name: str, group: int | None, dtype: torch.dtype) -> None:
    number_format = formats.get(name, group_size=group)
    weight = random_weight(64, 1152, dtype)
    expected = number_format.quantise(weight)
    stored = number_format.quantise(weight.cuda())
    assert same_bytes({key: tensor.cpu() for key, tensor in stored.items()}, expected)
    assert torch.equal(number_format.dequantise(stored).cpu(), number_format.dequantise(expected))
    errors = number_format.squared_error(weight.cuda(), stored)
    assert torch.equal(errors.cpu(), number_format.squared_error(weight, expected))
    assert torch.equal(raw(number_format.row_amax(weight.cuda()).cpu()), raw(number_format.row_amax(weight)))
