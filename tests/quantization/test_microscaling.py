"""NVFP4, MXFP4, MXFP8: what they promise of any weight, and the fused kernels against the reference, bit for bit."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from modelexport.errors import CheckpointError, PlanError
from modelexport.quantization import formats, kernels
from modelexport.quantization.formats.base import NumberFormat
from modelexport.quantization.kernels import microscaling_reference as reference
from tests.helpers.warm import run_warm
from tests.quantization._weights import DTYPES, as_view, random_weight, raw, same_bytes

pytest.importorskip("numba")
from modelexport.quantization.kernels import microscaling_fused

NAMES = ("nvfp4", "nvfp4-wo", "mxfp4", "mxfp4-wo", "mxfp8")
KINDS = ("nvfp4-wo", "mxfp4-wo", "mxfp8")  # one of each kind of weights
GROUP = {"nvfp4": 16, "nvfp4-wo": 16, "mxfp4": 32, "mxfp4-wo": 32, "mxfp8": 32}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
every_kind = pytest.mark.parametrize("name", KINDS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
every_observer = pytest.mark.parametrize("observer", ["amax", "mse"])


def _quantise(name: str, weight: Tensor, observer: str = "amax", amax: Tensor | None = None) -> dict[str, Tensor]:
    number_format = formats.get(name, observer=observer)
    return number_format.quantise(weight, amax=amax, inputs=3.0 if number_format.has_static_inputs else None)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    yield monkeypatch
    kernels.set_threads(1)


def _all(number_format: NumberFormat, source: Tensor) -> dict[str, Tensor]:
    """Everything that the kernels compute of a weight, stored tensors first."""
    stored = number_format.quantise(source)
    found = {**stored, "errors": number_format.squared_error(source, stored)}
    for dtype in DTYPES:
        found[str(dtype)] = number_format.dequantise(stored, dtype=dtype)
    return found


@every_kind
@every_dtype
@every_observer
def test_fused_is_the_reference(name: str, dtype: torch.dtype, observer: str, backend: pytest.MonkeyPatch) -> None:
    number_format = formats.get(name, observer=observer)
    for shape in ((1, 32), (9, 96), (17, 160), (8, 2048), (3, 2080), (4, 4256)):
        weight = random_weight(*shape, dtype)
        weight[0, :32] = 0.0
        backend.setenv("MODELEXPORT_KERNELS", "reference")
        expected = _all(number_format, weight)
        backend.setenv("MODELEXPORT_KERNELS", "fused")
        for source in (weight, as_view(weight), weight.t().contiguous().t()):
            assert same_bytes(_all(number_format, source), expected)


@given(data=st.data())
def test_fused_is_the_reference_for_any_bits(data: st.DataObject) -> None:
    """Rows of arbitrary finite bits, an arbitrary global scale, both observers."""
    dtype, name = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from(KINDS))
    rows, groups = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    cols = groups * GROUP[name]
    numbers = st.floats(allow_nan=False, allow_infinity=False, width=16 if dtype == torch.float16 else 32)
    values = data.draw(st.lists(numbers, min_size=rows * cols, max_size=rows * cols))
    weight = torch.tensor(values, dtype=torch.float32).view(rows, cols).to(dtype)
    weight = torch.where(torch.isfinite(weight), weight, torch.ones_like(weight))
    factor, storage = None, torch.float8_e4m3fn if name == "mxfp8" else torch.uint8
    if name == "nvfp4-wo":
        factor = torch.tensor([data.draw(st.floats(2.0**-120, 2.0**126, width=32))])
    most = reference.LARGEST_LOCAL if factor is not None else reference.largest_exponent(storage, dtype)
    for search in (False, True):
        found = []
        for function in (reference.quantise, microscaling_fused.quantise):
            q = torch.zeros(rows, cols // (2 if storage == torch.uint8 else 1), dtype=torch.uint8).view(storage)
            scale = torch.zeros(rows, groups, dtype=torch.uint8)
            scale = scale if factor is None else scale.view(torch.float8_e4m3fn)
            assert function(weight, q, scale, factor, most, search) == -1
            found.append({"q": q, "scale": scale})
        assert same_bytes(*found)
    for reader in (reference.dequantise, microscaling_fused.dequantise):
        out = torch.empty(weight.shape, dtype=dtype)
        reader(found[0]["q"], found[0]["scale"], factor, out)
        found.append({"out": out})
    assert same_bytes(*found[2:])


def test_every_ratio_rounds_as_the_reference_rounds_it() -> None:
    """All 65536 bfloat16 as one row of many groups: each kind of tie, both signs, denormals."""
    values = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    values = values[torch.isfinite(values)]
    weight = torch.cat([values, values.new_zeros(-len(values) % 128)]).view(-1, 128)
    for storage, factor in itertools.product((torch.uint8, torch.float8_e4m3fn), (None, torch.tensor([3.0]))):
        if storage != torch.uint8 and factor is not None:
            continue
        group = 32 if factor is None else 16
        found = []
        for function in (reference.quantise, microscaling_fused.quantise):
            q = torch.zeros(len(weight), 64 if storage == torch.uint8 else 128, dtype=torch.uint8).view(storage)
            scale = torch.zeros(len(weight), 128 // group, dtype=torch.uint8)
            scale = scale if factor is None else scale.view(torch.float8_e4m3fn)
            assert function(weight, q, scale, factor, 126, False) == -1
            found.append({"q": q, "scale": scale})
        assert same_bytes(*found)


@every_kind
@every_dtype
def test_threads_change_nothing(name: str, dtype: torch.dtype, backend: pytest.MonkeyPatch) -> None:
    number_format = formats.get(name, observer="mse")
    weight = random_weight(67, 4096, dtype)
    expected = _all(number_format, weight)
    for threads in (2, 3):
        kernels.set_threads(threads)
        assert same_bytes(_all(number_format, weight), expected)


def _values(number_format: NumberFormat, stored: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """What is stored, by another way than the kernels': elements and each one's scale, in float64."""
    scale = stored["weight_scale"]
    if "weight_packed" in stored:
        packed = stored["weight_packed"]
        nibbles = torch.stack((packed % 16, packed // 16), dim=2).flatten(1).long()
        table = torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=torch.float64)
        elements = table[nibbles]
    else:
        elements = stored["weight"].double()
    if "weight_global_scale" in stored:
        steps = (scale.float() / stored["weight_global_scale"]).double()
    else:
        steps = torch.pow(2.0, scale.double() - 127)
    return elements, steps.repeat_interleave(GROUP[number_format.name], dim=1)


@every_kind
@every_dtype
@every_observer
def test_what_is_stored_is_nearest(name: str, dtype: torch.dtype, observer: str) -> None:
    """Of all elements none, times the stored scale, is nearer to the weight."""
    number_format = formats.get(name, observer=observer)
    weight = random_weight(16, 256, dtype)
    stored = number_format.quantise(weight)
    elements, steps = _values(number_format, stored)
    assert torch.equal(number_format.dequantise(stored), (elements * steps).float())
    if name == "mxfp8":
        every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
        every = every[~every.isnan()]
    else:
        every = torch.tensor(E2M1, dtype=torch.float64)
        every = torch.cat([every, -every])
    error = (weight.double() - elements * steps).abs()
    nearest = (weight.double().unsqueeze(-1) - every * steps.unsqueeze(-1)).abs().amin(-1)
    assert bool((error <= nearest * (1 + 2.0**-22)).all())  # the ratio is rounded to float32 before it is rounded


@given(data=st.data())
def test_the_error_is_within_the_bound(data: st.DataObject) -> None:
    """Wherever the weight lies in its dtype, and whatever the groups' sizes are beside each other."""
    name, dtype = data.draw(st.sampled_from(KINDS)), data.draw(st.sampled_from(DTYPES))
    size = data.draw(st.integers(-30, 14) if dtype == torch.float16 else st.integers(-150, 127))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    weight = torch.randn(4, 64, generator=generator).clamp(-1.99, 1.99) * torch.logspace(-3, 0, 4).unsqueeze(1)
    weight = (weight.double() * 2.0**size).to(dtype)
    number_format = formats.get(name)
    stored = number_format.quantise(weight)
    read = number_format.dequantise(stored)
    assert bool(torch.isfinite(read).all())
    assert bool(torch.isfinite(number_format.dequantise(stored, dtype=dtype)).all())
    size_of = weight.double().abs()
    amax = size_of.unflatten(1, (-1, GROUP[name])).amax(-1).repeat_interleave(GROUP[name], dim=1)
    error = (weight.double() - read.double()).abs()
    _, steps = _values(number_format, stored)
    if name == "mxfp8":  # 3 bits of mantissa, or half of the smallest number; at the end of the dtype it is clipped
        bound = torch.maximum(size_of / 16, steps * 2.0**-10)
        bound = torch.where(size_of > 448 * steps, size_of / 8, bound)
    elif name == "mxfp4-wo":  # half of e2m1's widest gap, or what lies between 6 and 7 and is clipped; more at the end
        bound = torch.where(amax >= 7 * steps, amax / 4, steps)
    else:  # half of the widest gap, or what a scale rounded down clips; or all of it, where no scale is so small
        bound = torch.maximum(amax / 6 * 17 / 16, 0.0625 / stored["weight_global_scale"].double())
    assert bool((error <= bound * (1 + 2.0**-20) + 2.0**-149).all())


def _without_negative_zero(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    if "weight_packed" not in stored:
        return stored
    codes = reference.unpack(stored["weight_packed"])
    return {**stored, "weight_packed": reference.pack(torch.where(codes == 8, 0, codes))}


@every_kind
@every_dtype
def test_quantising_again_changes_nothing(name: str, dtype: torch.dtype) -> None:
    """Values; and elements and scales too, in all but a few groups.

    Those are groups whose largest e2m1 is less than 4 (NVFP4: scales at the end of e4m3's range), or whose largest e4m3
    is 448 (a mantissa of 1.75, which asks for the next exponent). And an e2m1 that is a negative rounded to zero reads
    as -0, which is stored without its sign.
    """
    number_format = formats.get(name)
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(24, 512, generator=generator).to(dtype)
    amax = number_format.amax(weight) if number_format.scale_granularity == "tensor" else None
    stored = number_format.quantise(weight, amax=amax)
    read = number_format.dequantise(stored)  # float32 holds it exactly
    again = number_format.quantise(read, amax=amax)
    assert torch.equal(number_format.dequantise(again), read)
    elements, _ = _values(number_format, stored)
    top = elements.abs().unflatten(1, (-1, GROUP[name])).amax(-1)
    full = top >= 4.0 if "weight_packed" in stored else (top >= 224) & (top < 448)
    assert float(full.double().mean()) > 0.9
    left, right = _without_negative_zero(stored), _without_negative_zero(again)
    assert torch.equal(raw(left["weight_scale"])[full], raw(right["weight_scale"])[full])
    values = next(key for key in stored if key in ("weight", "weight_packed"))
    unpacked = [raw(one[values]).unflatten(1, (full.shape[1], -1))[full] for one in (left, right)]
    assert torch.equal(*unpacked)


@pytest.mark.parametrize("name", NAMES)
@every_observer
@given(data=st.data())
def test_parts_give_parts_of_the_whole(name: str, observer: str, data: st.DataObject) -> None:
    weight = random_weight(data.draw(st.integers(1, 9)), 32 * data.draw(st.integers(1, 6)), torch.bfloat16)
    number_format = formats.get(name, observer=observer)
    amax = number_format.amax(weight) if number_format.scale_granularity == "tensor" else None
    whole = _quantise(name, weight, observer, amax)
    rows = sorted(data.draw(st.lists(st.integers(0, weight.shape[0]), min_size=2, max_size=2)))
    cols = sorted(32 * at for at in data.draw(st.lists(st.integers(0, weight.shape[1] // 32), min_size=2, max_size=2)))
    part = _quantise(name, weight[slice(*rows), slice(*cols)], observer, amax)
    for spec in number_format.specs(tuple(weight.shape), weight.dtype):
        cut = whole[spec.suffix]
        for dim, axis in enumerate(spec.axes):
            if axis is not None:
                along, per = axis
                begin, end = (rows, cols)[along]
                cut = cut.narrow(dim, begin // per, (end - begin) // per)
        assert torch.equal(raw(cut), raw(part[spec.suffix]))
    if amax is not None:
        pieces = [number_format.amax(weight[:1]), number_format.amax(weight[1:])]
        assert torch.equal(torch.stack(pieces).amax(0), amax)


@pytest.mark.parametrize("name", NAMES)
@every_dtype
@every_observer
def test_zeros_are_zeros(name: str, dtype: torch.dtype, observer: str) -> None:
    number_format = formats.get(name, observer=observer)
    stored = _quantise(name, torch.zeros(3, 64, dtype=dtype), observer)
    read = number_format.dequantise(stored, dtype=dtype)
    assert torch.equal(raw(read), raw(torch.zeros(3, 64, dtype=dtype)))
    assert bool((raw(stored["weight_scale"]) == (0x20 if name.startswith("nv") else 0)).all())
    if name.startswith("nv"):
        assert stored["weight_global_scale"].tolist() == [1.0]
    weight = torch.ones(3, 64, dtype=dtype)
    weight[1, :32] = 0.0
    weight[2, 0] = -0.0
    stored = _quantise(name, weight, observer)
    assert bool((raw(stored["weight_scale"])[1, : 32 // GROUP[name]] == (0x20 if name.startswith("nv") else 0)).all())
    assert torch.equal(number_format.dequantise(stored, dtype=dtype), weight)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(0, 64), (4, 0), (0, 0), (1, 32)])
def test_empty_and_single(name: str, shape: tuple[int, int]) -> None:
    number_format = formats.get(name)
    weight = torch.ones(shape, dtype=torch.bfloat16)
    stored = _quantise(name, weight)
    assert number_format.stored_shape(stored) == shape
    assert torch.equal(number_format.dequantise(stored, dtype=torch.bfloat16), weight)
    assert number_format.squared_error(weight, stored).shape == (shape[0], 2)


@every_kind
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("backend_name", ["reference", "fused"])
def test_what_is_not_finite_is_refused(name: str, value: float, backend_name: str, backend: pytest.MonkeyPatch) -> None:
    backend.setenv("MODELEXPORT_KERNELS", backend_name)
    weight = torch.randn(9, 64).bfloat16()
    weight[5, 33] = value
    weight[7, 0] = value
    number_format = formats.get(name)
    with pytest.raises(CheckpointError, match=r"blocks\.1\.w: .*the first at row 5, column 33"):
        number_format.quantise(weight, name="blocks.1.w")
    if number_format.scale_granularity == "tensor":
        with pytest.raises(CheckpointError, match="the first at row 5, column 33"):
            number_format.quantise(weight, amax=torch.tensor([4.0]), name="w")
        with pytest.raises(CheckpointError, match="another shard holds NaN or Inf"):
            number_format.quantise(weight[:5], amax=torch.tensor([value]).abs(), name="w")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("width", [8, 24, 48, 100])
def test_widths_that_groups_do_not_divide(name: str, width: int) -> None:
    number_format = formats.get(name)
    if width % GROUP[name] == 0:
        number_format.check_shape("mlp.up_proj", (8, width))
        return
    with pytest.raises(
        PlanError, match=rf"mlp\.up_proj: in_features {width} is not divisible by {GROUP[name]}.*--quant"
    ):
        number_format.check_shape("mlp.up_proj", (8, width))
    with pytest.raises(PlanError, match="not divisible"):
        _quantise(name, torch.ones(8, width))


@every_dtype
def test_the_largest_and_smallest_numbers_stay_finite(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    for name, value in itertools.product(KINDS, (info.max, info.max * 0.9, info.tiny, info.tiny / 16)):
        number_format = formats.get(name)
        weight = torch.full((1, 64), value, dtype=torch.float64).to(dtype)
        weight[0, 1] = -weight[0, 0]
        stored = number_format.quantise(weight)
        read = number_format.dequantise(stored, dtype=dtype)
        assert bool(torch.isfinite(read).all())
        if weight[0, 0] != 0 and value >= info.tiny:
            assert bool(((read.double() - weight.double()).abs() <= weight.double().abs() * 0.26).all())
        if "weight_global_scale" in stored:
            factor = stored["weight_global_scale"]
            assert bool(torch.isfinite(factor))
            assert float(1.0 / factor) >= 2.0**-126


@every_kind
@every_dtype
def test_the_search_never_makes_it_worse(name: str, dtype: torch.dtype) -> None:
    weight = torch.randn(32, 512, generator=torch.Generator().manual_seed(3)).to(dtype)
    errors = []
    for observer in ("amax", "mse"):
        number_format = formats.get(name, observer=observer)
        error = (weight.double() - number_format.dequantise(number_format.quantise(weight)).double()) ** 2
        errors.append(error.unflatten(1, (-1, GROUP[name])).sum(-1))
    assert bool((errors[1] <= errors[0] * (1 + 1e-12)).all())
    gain = float(errors[1].sum()) / float(errors[0].sum())  # MXFP8: more bits of mantissa, nothing is clipped
    assert gain < {"nvfp4-wo": 0.8, "mxfp4-wo": 0.999, "mxfp8": 1.000001}[name]


def test_the_search_takes_the_larger_of_equal_scales() -> None:
    """A row of 2: elements of 4, 2 and 1 say it exactly, with scales that grow."""
    stored = formats.get("mxfp4-wo", observer="mse").quantise(torch.full((1, 32), 2.0))
    assert int(stored["weight_scale"]) == 127 + 1 - 2 + 1
    assert formats.get("mxfp4-wo").quantise(torch.full((1, 32), 2.0))["weight_scale"].tolist() == [[126]]


def test_a_row_by_hand() -> None:
    """Ties to even, signs, the low half first."""
    row = [6.0, -6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -0.1, -0.0, 0.26, 5.1, -2.0, 0.5]
    codes = [7, 15, 0, 2, 2, 4, 4, 6, 6, 8, 8, 0, 1, 7, 12, 1]
    packed = [low | high << 4 for low, high in zip(codes[0::2], codes[1::2], strict=True)]
    nv = formats.get("nvfp4-wo").quantise(torch.tensor([row]))
    assert nv["weight_packed"].tolist() == [packed]
    assert nv["weight_scale"].tolist() == [[448.0]]
    assert nv["weight_global_scale"].tolist() == [448.0]
    mx = formats.get("mxfp4-wo").quantise(torch.tensor([row + [6.9] * 16]))  # 6.9 < 1.75 * 4: clipped
    assert mx["weight_packed"].tolist() == [packed + [0x77] * 8]
    assert mx["weight_scale"].tolist() == [[127]]
    mx = formats.get("mxfp4-wo").quantise(torch.tensor([[7.0] * 32]))
    assert mx["weight_scale"].tolist() == [[128]]
    assert mx["weight_packed"].tolist() == [[0x66] * 16]
    mx8 = formats.get("mxfp8").quantise(torch.tensor([[448.0, 1.0, -0.0, 2.0**-10] + [0.0] * 28]))
    assert mx8["weight_scale"].tolist() == [[128]]  # a mantissa of 1.75
    assert raw(mx8["weight"])[0, :4].tolist() == [0x76, 0x30, 0x80, 0x00]


@pytest.mark.skipif(not hasattr(torch, "float8_e8m0fnu"), reason="this torch has no float8_e8m0fnu")
@pytest.mark.parametrize("name", ["mxfp4-wo", "mxfp8"])
@pytest.mark.parametrize("backend_name", ["reference", "fused"])
def test_scales_may_be_read_as_e8m0(name: str, backend_name: str, backend: pytest.MonkeyPatch) -> None:
    backend.setenv("MODELEXPORT_KERNELS", backend_name)
    number_format, weight = formats.get(name), torch.randn(4, 64)
    stored = number_format.quantise(weight)
    expected = number_format.dequantise(stored)
    stored["weight_scale"] = stored["weight_scale"].view(torch.float8_e8m0fnu)
    assert torch.equal(number_format.dequantise(stored), expected)
    stored["weight_scale"].view(torch.uint8)[1, 0] = 255
    read = number_format.dequantise(stored)
    assert bool(read[1, :32].isnan().all())
    assert torch.equal(read[2:], expected[2:])


@pytest.mark.parametrize("name", NAMES)
def test_activations(name: str) -> None:
    """Each group is rounded as a weight's would be; weight-only formats leave them as they are."""
    number_format = formats.get(name)
    x = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(9)).bfloat16()
    x[0, 1, :32] = 0.0
    stored = _quantise(name, torch.ones(4, 64))
    rounded = number_format.fake_quantise_activations(x, stored)
    assert (rounded.shape, rounded.dtype) == (x.shape, x.dtype)
    if name.endswith("-wo"):
        assert rounded is x
        return
    amax = None
    if name == "nvfp4":
        assert stored["input_global_scale"].tolist() == [448 * 6 / 3.0]
        amax = torch.tensor([3.0])
    expected = _quantise(name, x.flatten(0, 1), amax=amax)
    expected_values = number_format.dequantise(expected, dtype=x.dtype).view_as(x)
    assert torch.equal(rounded, expected_values)


@every_dtype
def test_activations_keep_nan(dtype: torch.dtype) -> None:
    x = torch.ones(2, 32, dtype=dtype)
    x[1, 3] = float("nan")
    for name in ("nvfp4", "mxfp4", "mxfp8"):
        rounded = formats.get(name).fake_quantise_activations(x, {"input_global_scale": torch.tensor([900.0])})
        assert rounded.isnan().nonzero().tolist() == [[1, 3]]


def test_input_scales() -> None:
    number_format = formats.get("nvfp4")
    assert number_format.input_scale(2.0) == 1344.0
    assert number_format.input_scale(0.0) == 1.0
    assert number_format.input_scale(1e-44) == 2.0**126


def test_what_is_compiled_is_imported_when_it_is_wanted() -> None:
    """By a kernel of these formats, where CPU tensors take the fused ones."""
    code = """
import sys
import torch
from modelexport.quantization import formats
name = "modelexport.quantization.kernels.microscaling_compiled"
number_format = formats.get("nvfp4-wo")
number_format.check_shape("x", (8, 64))
assert name not in sys.modules
number_format.quantise(torch.ones(8, 64))
print(name in sys.modules)
"""
    for wanted, expected in (("reference", "False"), ("fused", "True")):
        environment = {**os.environ, "MODELEXPORT_KERNELS": wanted}
        done = run_warm("-c", code, env=environment)
        assert (done.returncode, done.stdout.strip()) == (0, expected), done.stderr
