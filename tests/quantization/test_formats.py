"""Number formats: hand-computed cases, cuts, views, edge cases, and what they say when they refuse."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from modelexport.errors import CheckpointError, PlanError, UsageError
from modelexport.quantization import formats
from modelexport.quantization.formats.base import NumberFormat
from tests.quantization._weights import (
    DTYPES,
    FORMATS,
    PLAIN,
    as_view,
    quantise,
    random_weight,
    same_bytes,
)

ALL = pytest.mark.parametrize(("name", "group"), FORMATS)
OURS = pytest.mark.parametrize(("name", "group"), PLAIN)


@ALL
@pytest.mark.parametrize("dtype", DTYPES)
def test_stored_tensors_are_what_specs_say(name: str, group: int | None, dtype: torch.dtype) -> None:
    number_format = formats.get(name, group_size=group)
    for rows, cols in ((5, 256), (1, 128), (0, 128), (3, 0)):
        weight = random_weight(rows, cols, dtype)
        stored = quantise(number_format, weight)
        specs = number_format.specs((rows, cols), dtype)
        assert [spec.suffix for spec in specs] == list(stored)
        for spec in specs:
            tensor = stored[spec.suffix]
            assert (tuple(tensor.shape), tensor.dtype) == (spec.shape, spec.dtype)
            assert len(spec.axes) <= len(spec.shape)
            assert spec.nbytes == tensor.numel() * tensor.element_size()
        values = number_format.dequantise(stored)
        assert (tuple(values.shape), values.dtype) == ((rows, cols), torch.float32)
        assert tuple(number_format.squared_error(weight, stored).shape) == (rows, 2)
        if number_format.scale_granularity != "block":
            amax = number_format.amax(weight)
            assert amax.shape[0] == (rows if number_format.scale_granularity == "row" else 1)
            assert same_bytes(quantise(number_format, weight, amax=amax), stored) or number_format.observer != "amax"
        total = 8 * sum(spec.nbytes for spec in specs)
        bits = number_format.bits_per_weight((rows, cols), dtype)
        assert bits == pytest.approx(total / (rows * cols) if rows * cols else 0.0)


@ALL
@pytest.mark.parametrize("dtype", DTYPES)
def test_views_in_and_out(name: str, group: int | None, dtype: torch.dtype) -> None:
    number_format = formats.get(name, group_size=group)
    weight = random_weight(9, 384, dtype)
    expected = quantise(number_format, weight)
    for source in (as_view(weight), weight.t().contiguous().t(), weight.clone().requires_grad_(True)):
        assert same_bytes(quantise(number_format, source), expected)
    for spread in (lambda tensor: as_view(tensor) if tensor.dim() == 2 else tensor, _every_other):
        out = {key: spread(torch.zeros_like(tensor)) for key, tensor in expected.items()}
        assert same_bytes(quantise(number_format, weight, out=out), expected)
        assert torch.equal(number_format.dequantise(out), number_format.dequantise(expected))
        error = number_format.squared_error(as_view(weight), out)
        assert torch.equal(error, number_format.squared_error(weight, expected))


@ALL
@pytest.mark.parametrize("rows", [128, 24, 3])
def test_stacked_weights_are_quantised_as_each_alone(name: str, group: int | None, rows: int) -> None:
    number_format = formats.get(name, group_size=group)
    if not number_format.stacks((rows, 256)):
        assert number_format.has_static_inputs or rows % number_format.alignment[0]
        return
    weights = random_weight(3 * rows, 256, torch.bfloat16)
    amax = number_format.amax(weights) if number_format.scale_granularity == "tensor" else None
    stacked = quantise(number_format, weights, amax=amax)
    alone = [quantise(number_format, weight, amax=amax) for weight in weights.split(rows)]
    for spec in number_format.specs((rows, 256), torch.bfloat16):
        if spec.axes and spec.axes[0] is not None:
            joined = torch.cat([stored[spec.suffix].view(torch.uint8) for stored in alone])
            assert torch.equal(stacked[spec.suffix].view(torch.uint8), joined)
    sums = [number_format.error_sums(*each) for each in zip(weights.split(rows), alone, strict=True)]
    assert number_format.error_sums_of(weights, stacked, 3) == sums


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


def test_int4_asym_by_hand() -> None:
    number_format = formats.get("int4-asym", group_size=32)
    first = [-3.0, 12.0, 0.0, 0.5, 1.5, 11.6, -0.4, 5.0]
    weight = torch.tensor([first + [0.0] * 24 + [2.0, 30.0] + [1.0] * 30] + [[0.0] * 64] * 8)
    stored = number_format.quantise(weight)
    # from -3 to 12 in steps of 1, -3 stored as -8 + 8, so that 0 is -5; then from 0 (not from 1) to 30 in steps of 2
    assert stored["weight_scale"].tolist() == [[1.0, 2.0]] + [[1.0, 1.0]] * 8
    # round half to even of value / scale - 5: -8 7 -5 -4 (from -4.5) -4 (from -3.5) 7 -5 0, stored + 8
    assert stored["weight_packed"].tolist()[0][0] == 0x83F443F0 - 2**32
    # second group: 2 / 2 - 8 = -7, 30 / 2 - 8 = 7, 1 / 2 - 8 = -7.5 -> -8
    assert stored["weight_packed"].tolist()[0][4:] == [0x000000F1, 0, 0, 0]
    # zero points -5 and -8 of row 0, -8 of eight empty rows, stored + 8: a second word for the ninth row
    assert stored["weight_zero_point"].tolist() == [[3, 0], [0, 0]]
    values = number_format.dequantise(stored)
    assert values[0, :8].tolist() == [-3.0, 12.0, 0.0, 1.0, 1.0, 12.0, 0.0, 5.0]
    assert values[0, 32:35].tolist() == [2.0, 30.0, 0.0]
    assert bool((values[1:] == 0.0).all())


def test_int8_wo_by_hand() -> None:
    """A row of seven: two words, the last byte of the second is 0."""
    number_format = formats.get("int8-wo", group_size=-1)
    weight = torch.tensor([[127.0, -127.0, 0.5, 1.5, -1.0, 3.0, -126.6]])
    stored = number_format.quantise(weight)
    assert stored["weight_scale"].tolist() == [[1.0]]
    assert stored["weight_shape"].tolist() == [1, 7]
    # 127 -127 0 2 -1 3 -127, stored + 128, the first in the lowest byte
    assert stored["weight_packed"].tolist() == [[0x828001FF - 2**32, 0x0001837F]]
    assert number_format.dequantise(stored).tolist() == [[127.0, -127.0, 0.0, 2.0, -1.0, 3.0, -127.0]]


def test_fp8_static_by_hand() -> None:
    number_format = formats.get("fp8-static")
    weight = torch.tensor([[448.0, 1.0625, 0.0], [-17.0, 2.0**-9, 0.0]])
    stored = number_format.quantise(weight, inputs=224.0)
    assert {key: tensor.tolist() for key, tensor in stored.items() if key != "weight"} == {
        "weight_scale": [1.0],
        "input_scale": [0.5],
    }
    assert stored["weight"].float().tolist() == [[448.0, 1.0, 0.0], [-16.0, 2.0**-9, 0.0]]
    shared = number_format.quantise(weight, inputs=0.0, amax=torch.tensor([896.0]))
    assert (shared["weight_scale"].item(), shared["input_scale"].item()) == (2.0, 1.0)
    assert shared["weight"].float()[0, 0].item() == 224.0
    for inputs in (None, float("nan"), -1.0):
        with pytest.raises(ValueError, match="fp8-static needs the inputs' largest magnitude"):
            number_format.quantise(weight, inputs=inputs)


def test_fp8_block_by_hand() -> None:
    """Four blocks, of 128, 1 and 2 rows and columns: each has a scale of its own, 1 where all is zero."""
    number_format = formats.get("fp8-block")
    weight = torch.zeros(129, 130)
    weight[3, 5], weight[127, 127], weight[7, 129], weight[128, 0] = 448.0, 1.0, -224.0, 896.0
    stored = number_format.quantise(weight)
    assert stored["weight_scale"].tolist() == [[1.0, 0.5], [2.0, 1.0]]
    codes = stored["weight"].float()
    found = {(3, 5): 448.0, (127, 127): 1.0, (7, 129): -448.0, (128, 0): 448.0}
    assert {place: codes[place].item() for place in found} == found
    assert int((codes != 0).sum()) == 4
    assert torch.equal(number_format.dequantise(stored), weight)


def test_a_row_without_its_last_word_full_in_parts() -> None:
    """The last part of a row that does not fill its words is known by the weight that it is compared with."""
    number_format = formats.get("int4", group_size=-1)
    weight = random_weight(3, 20, torch.bfloat16)
    whole = number_format.quantise(weight)
    amax = number_format.amax(weight)
    parts = [number_format.quantise(part, amax=amax, global_shape=(3, 20)) for part in (weight[:, :16], weight[:, 16:])]
    assert torch.equal(torch.cat([part["weight_packed"] for part in parts], dim=1), whole["weight_packed"])
    assert number_format.stored_shape(parts[0]) == (3, 16)
    assert number_format.squared_error(weight[:, 16:], parts[1]).shape == (3, 2)


@ALL
def test_errors_are_within_half_a_step(name: str, group: int | None) -> None:
    """Sums of squares against plain float64 arithmetic, and every value within its format's rounding."""
    number_format = formats.get(name, group_size=group)
    weight = torch.randn(16, 512, generator=torch.Generator().manual_seed(5)).bfloat16()
    stored = quantise(number_format, weight)
    values = number_format.dequantise(stored)
    difference = weight.double() - values.double()
    expected = torch.stack([difference.square().sum(1), weight.double().square().sum(1)], dim=1)
    assert torch.allclose(number_format.squared_error(weight, stored), expected, rtol=1e-12, atol=0.0)
    sqnr = 10 * math.log10(float(expected[:, 1].sum() / max(expected[:, 0].sum(), 1e-300)))
    least = {
        "none": 300.0,
        "mxfp8": 31.0,
        "nvfp4": 20.0,
        "nvfp4-wo": 20.0,
        "int4": 17.0,
        "int4-asym": 18.0,
        "w4a8": 19.0,
    }
    assert sqnr >= least.get(name, 31.0 if name.startswith("fp8") else 40.0 if name.startswith("int8") else 17.5)
    for dtype in DTYPES:
        assert torch.equal(number_format.dequantise(stored, dtype=dtype), values.to(dtype))


@OURS
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_scale_is_zero_denormal_or_infinite(name: str, group: int | None, dtype: torch.dtype) -> None:
    number_format = formats.get(name, group_size=group)
    info = torch.finfo(dtype)
    smallest = 2.0**-24 if dtype == torch.float16 else float(info.smallest_normal) * info.eps
    for value in (0.0, smallest, info.tiny, info.max, -info.max):
        weight = torch.full((2, 128), value, dtype=dtype)
        stored = quantise(number_format, weight)
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
    for observer in ("mse", "amax"):
        searching = formats.get(name, group_size=group, observer=observer)
        with pytest.raises(CheckpointError) as caught:
            quantise(searching, weight, name="model.layers.0.mlp.up_proj.weight")
        text = str(caught.value)
        assert text.startswith("model.layers.0.mlp.up_proj.weight: 2 NaN and 1 Inf among 76800 values, ")
        assert "first at row 300, column 7" in text
    if number_format.scale_granularity == "row":
        amax = number_format.amax(torch.ones(4, 128, dtype=torch.bfloat16))
        amax[2] = float("nan")
        with pytest.raises(CheckpointError, match=r"w: .* row 2 is nan.*another shard holds NaN or Inf"):
            quantise(number_format, torch.ones(4, 128), amax=amax, name="w")
    elif number_format.scale_granularity == "tensor":
        with pytest.raises(CheckpointError, match=r"w: .* row 0 is inf.*another shard holds NaN or Inf"):
            quantise(number_format, torch.ones(4, 128), amax=torch.tensor([float("inf")]), name="w")


def test_an_indivisible_width_is_refused_with_the_choices() -> None:
    int4 = formats.get("int4")
    int4.check_shape("model.layers.0.self_attn.o_proj", (256, 512))
    with pytest.raises(PlanError) as caught:
        int4.check_shape("model.layers.0.mlp.down_proj", (256, 1120))
    text = str(caught.value)
    assert "model.layers.0.mlp.down_proj: in_features 1120 is not divisible by the group size 128" in text
    assert "--group-size 32, or --group-size -1, or a format without groups (--quant fp8, --quant int8)" in text
    assert "--group-size 64" not in text
    with pytest.raises(PlanError, match=r"nor by any other that it has: 128\): a format without groups"):
        formats.get("w4a8").check_shape("m", (4, 100))
    formats.get("int4", group_size=-1).check_shape("m", (4, 101))
    with pytest.raises(PlanError, match="in_features 100"):
        int4.quantise(torch.zeros(2, 100), name="w")
    for name in ("none", "int8", "int8-static", "fp8", "fp8-static", "fp8-block"):
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


EVERY = """none int8 int8-static int8-wo int8-wo-asym int4 int4-asym fp8 fp8-static fp8-block nvfp4 nvfp4-wo mxfp4
mxfp4-wo mxfp8 w4a8 q2-k q3-k q4-0 q4-1 q4-k q5-0 q5-1 q5-k q6-k q8-0 iq4-nl iq4-xs"""


def test_names_and_choice() -> None:
    assert formats.names() == sorted(EVERY.split())
    for name in formats.names():
        number_format = formats.get(name)
        assert isinstance(number_format, NumberFormat)
        assert number_format.name == name
        assert number_format == formats.get(name)
        assert number_format.quantised == (name != "none")
        assert number_format.description
    assert formats.get("int4").group_size == 128
    assert formats.get("int4", group_size=32).alignment == (1, 32)
    assert formats.get("int4", group_size=-1).alignment == (1, 8)
    assert formats.get("int4-asym", group_size=32).alignment == (8, 32)
    assert formats.get("int8-wo-asym", group_size=64).alignment == (4, 64)
    assert formats.get("fp8-block").alignment == (128, 128)
    assert formats.get("fp8-static").alignment == (1, 1)
    assert formats.get("q4-0").alignment == (1, 32)
    assert formats.get("Q4_K").alignment == (1, 256)
    assert formats.get("q4_k") == formats.get("q4-k")
    assert formats.get("int4", group_size=-1, observer="mse").whole_rows
    assert formats.get("int4-asym", group_size=-1).whole_rows
    assert not formats.get("int4-asym").whole_rows
    with pytest.raises(UsageError, match=r"unknown number format 'int5'; did you mean 'int[48]'.*modelexport formats"):
        formats.get("int5")
    with pytest.raises(UsageError, match="int4 has no group size 48; choose from 32, 64, 128, -1"):
        formats.get("int4", group_size=48)
    with pytest.raises(UsageError, match="fp8 has no groups, but group size 128 was given"):
        formats.get("fp8", group_size=128)


@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_are_rounded_per_token(dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(6)).to(dtype)
    x[1, 2] = 0.0
    for name in ("none", "int4", "int4-asym", "int8-wo", "int8-wo-asym"):
        assert formats.get(name).fake_quantise_activations(x, {}) is x
    for name, steps in (("int8", 127), ("fp8", 448), ("w4a8", 448)):
        number_format = formats.get(name)
        rounded = number_format.fake_quantise_activations(x, {})
        assert rounded.dtype == dtype
        assert bool((rounded[1, 2] == 0).all())
        alone = number_format.fake_quantise_activations(x[0, 1], {})
        assert torch.equal(rounded[0, 1], alone)
        amax = x[0, 1].float().abs().amax()
        bound = amax / steps / 2 if name == "int8" else x[0, 1].float().abs() / 16 + amax / 448 * 2.0**-9
        assert bool(((rounded[0, 1].float() - x[0, 1].float()).abs() <= bound * 1.01 + amax * 2.0**-8).all())
        assert number_format.fake_quantise_activations(x[:, :, :0], {}).shape == (2, 3, 0)


def test_activations_are_rounded_per_128() -> None:
    """fp8-block: each 128 of a token as a token of its own, the last ones fewer."""
    x = torch.randn(3, 300, generator=torch.Generator().manual_seed(6)) * torch.logspace(-2, 2, 300)
    rounded = formats.get("fp8-block").fake_quantise_activations(x, {})
    for part in (slice(0, 128), slice(128, 256), slice(256, 300)):
        alone = formats.get("fp8").fake_quantise_activations(x[:, part], {})
        assert torch.equal(rounded[:, part], alone)
    assert not torch.equal(rounded, formats.get("fp8").fake_quantise_activations(x, {}))


def test_activations_are_rounded_by_a_stored_scale() -> None:
    x = torch.tensor([[0.3, -0.25, 63.6, -70.0, 1e9]])
    scale = {"input_scale": torch.tensor([0.5])}
    assert formats.get("int8-static").fake_quantise_activations(x, scale).tolist() == [[0.5, 0.0, 63.5, -64.0, 63.5]]
    stored = quantise(formats.get("int8-static"), torch.ones(2, 2))
    assert stored["input_scale"].item() == float(torch.tensor(3.0) / torch.tensor(127.0))
    rounded = formats.get("fp8-static").fake_quantise_activations(x, scale)
    assert rounded.tolist() == [[0.3125, -0.25, 64.0, -72.0, 224.0]]
    tiny = formats.get("fp8-static").quantise(torch.ones(2, 2, dtype=torch.float16), inputs=1e-9)
    assert tiny["input_scale"].item() == 2.0**-24


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gpu_gives_the_same_bytes(dtype: torch.dtype) -> None:
    weight = random_weight(64, 1152, dtype)
    for name, group in FORMATS:
        number_format = formats.get(name, group_size=group)
        expected = quantise(number_format, weight)
        stored = quantise(number_format, weight.cuda())
        assert same_bytes({key: tensor.cpu() for key, tensor in stored.items()}, expected)
        assert torch.equal(number_format.dequantise(stored).cpu(), number_format.dequantise(expected))
        errors = number_format.squared_error(weight.cuda(), stored)
        assert torch.equal(errors.cpu(), number_format.squared_error(weight, expected))
        searching = formats.get(name, group_size=group, observer="mse")
        searched = {key: tensor.cpu() for key, tensor in quantise(searching, weight.cuda()).items()}
        assert same_bytes(searched, quantise(searching, weight))


def test_the_kinds_told_without_torch_are_those_of_the_packages_own_formats() -> None:
    told = [name for name in formats.names() if formats._own_kind(formats.get(name).scheme()) == name]
    assert sorted(formats._OWN_KINDS) == told
