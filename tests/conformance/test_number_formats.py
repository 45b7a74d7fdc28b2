"""Our stored tensors against compressed-tensors, the reference implementation of the checkpoint formats.

Theirs reads ours to exactly our values, ours reads theirs, and the same scales give the same stored bytes,
where theirs is given float32 (it divides in the weight's own dtype, which rounds bfloat16 ratios once more).
The formats with shared exponents are in test_microscaling_formats.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor

from modelexport.assets import demo_model_path
from modelexport.quantization import formats
from modelexport.quantization.formats.base import NumberFormat
from modelexport.quantization.ggml_layouts import LAYOUTS
from tests.quantization._weights import PLAIN, quantise, raw

pytest.importorskip("compressed_tensors", minversion="0.15")
import compressed_tensors
from compressed_tensors.compressors import (
    BaseCompressor,
    pack_to_int32,
    unpack_from_int32,
)
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.quantization import (
    QuantizationConfig,
    QuantizationScheme,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.lifecycle.forward import dequantize, fake_quantize
from compressed_tensors.quantization.lifecycle.forward import quantize as their_quantize
from compressed_tensors.quantization.utils import (
    calculate_qparams,
    compute_dynamic_scales_and_zp,
)

PRESETS = {
    "int8": "W8A8",
    "int8-wo": "W8A16",
    "int4": "W4A16",
    "int4-asym": "W4A16_ASYM",
    "fp8": "FP8_DYNAMIC",
    "fp8-static": "FP8",
    "fp8-block": "FP8_BLOCK",
    "w4a8": "W4AFP8",
}
NAMES = tuple((name, group) for name, group in PLAIN if name != "none")
QUANTISED = pytest.mark.parametrize(("name", "group"), NAMES)
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
ROWS, COLS = 53, 512  # no multiple of the zero points in a word
VERSION = tuple(int(part) for part in compressed_tensors.__version__.split(".")[:2])
BLOCKS = (300, 450) if VERSION >= (0, 20) else (384, 512)  # theirs of 0.15 read whole blocks only


def _scheme(number_format: NumberFormat) -> QuantizationScheme:
    return QuantizationScheme.model_validate(number_format.config_group())


def _compressor(number_format: NumberFormat) -> Any:
    return BaseCompressor.get_value_from_registry(number_format.checkpoint_format)


def _weight(number_format: NumberFormat, dtype: torch.dtype) -> Tensor:
    """Rows of all sizes; more and ragged ones for blocks, and rows that end within a word where rows are groups."""
    rows, cols = BLOCKS if number_format.name == "fp8-block" else (ROWS, COLS - 3 * (number_format.group_size == -1))
    generator = torch.Generator().manual_seed(11)
    weight = torch.randn(rows, cols, generator=generator) * torch.logspace(-3, 1, rows).unsqueeze(1)
    weight[7] = 0.0
    weight[9, :128] = 0.0
    weight[11] = weight[11].abs()
    return weight.to(dtype)


def _theirs(number_format: NumberFormat, stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """What their functions take: scales (float32) and zero points, not packed."""
    tensors = {"weight_scale": stored["weight_scale"].float()}
    if "weight_zero_point" in stored:
        shape = (stored["weight_packed"].shape[0], stored["weight_scale"].shape[1])
        packed = stored["weight_zero_point"]
        tensors["weight_zero_point"] = unpack_from_int32(packed, number_format.weight_bits, shape, packed_dim=0)
    return tensors


def _stored_values(number_format: NumberFormat, stored: dict[str, Tensor]) -> Tensor:
    """One byte a value, however it is stored."""
    if "weight_packed" in stored:
        shape = tuple(stored["weight_shape"].tolist())
        return unpack_from_int32(stored["weight_packed"], number_format.weight_bits, shape)
    return stored["weight"]


def _extremes(number_format: NumberFormat, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest and the largest of all that share a scale, in the scales' shape."""
    rows, cols = weight.shape
    strategy = number_format.weight_arguments()["strategy"]
    if strategy == "tensor":
        return weight.min().reshape(1), weight.max().reshape(1)
    if strategy == "block":
        padded = torch.nn.functional.pad(weight, (0, -cols % 128, 0, -rows % 128))
        blocks = padded.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
        return blocks.amin(dim=(1, 3)), blocks.amax(dim=(1, 3))
    grouped = weight.unflatten(1, (-1, cols if strategy == "channel" else number_format.group_size))
    return grouped.amin(-1), grouped.amax(-1)


@QUANTISED
@DTYPES
@pytest.mark.parametrize("observer", ["amax", "mse"])
def test_theirs_reads_ours(name: str, group: int | None, dtype: torch.dtype, observer: str) -> None:
    number_format = formats.get(name, group_size=group, observer=observer)
    weight = _weight(number_format, dtype)
    stored = quantise(number_format, weight)
    read = _compressor(number_format).decompress(dict(stored), _scheme(number_format))["weight"]
    assert read.dtype == dtype
    assert torch.equal(read, number_format.dequantise(stored, dtype=dtype))
    wide = {**stored, "weight_scale": stored["weight_scale"].float()}
    read = _compressor(number_format).decompress(wide, _scheme(number_format))["weight"]
    assert torch.equal(read, number_format.dequantise(stored))


@QUANTISED
@DTYPES
def test_ours_reads_theirs(name: str, group: int | None, dtype: torch.dtype) -> None:
    """Their compressor, with the scales and zero points that their observer would take."""
    number_format, scheme = formats.get(name, group_size=group), _scheme(formats.get(name, group_size=group))
    weight = _weight(number_format, dtype)
    scale, zero = calculate_qparams(*_extremes(number_format, weight), scheme.weights)
    tensors = {"weight": weight, "weight_scale": scale}
    if not scheme.weights.symmetric:
        tensors["weight_zero_point"] = zero
    compressor = _compressor(number_format)
    theirs = compressor.compress(tensors, scheme)
    specs = number_format.specs(tuple(weight.shape), dtype)
    assert {*theirs, "input_scale"} == {*(spec.suffix for spec in specs), "input_scale"}
    for spec in specs:
        if spec.suffix != "input_scale":
            assert (tuple(theirs[spec.suffix].shape), theirs[spec.suffix].dtype) == (spec.shape, spec.dtype)
    read = number_format.dequantise(theirs, dtype=dtype)
    assert torch.equal(read, compressor.decompress(theirs, scheme)["weight"])


@QUANTISED
@DTYPES
@pytest.mark.parametrize("observer", ["amax", "mse"])
def test_the_same_scales_give_the_same_stored_bytes(
    name: str, group: int | None, dtype: torch.dtype, observer: str
) -> None:
    number_format = formats.get(name, group_size=group, observer=observer)
    scheme, weight = _scheme(number_format), _weight(number_format, dtype)
    stored = quantise(number_format, weight)
    scales = _theirs(number_format, stored)
    theirs = _compressor(number_format).compress({"weight": weight.float(), **scales}, scheme)
    for suffix in set(stored) - {"weight_scale", "input_scale"}:
        assert torch.equal(raw(theirs[suffix]), raw(stored[suffix]))
    values, zero = _stored_values(number_format, stored), scales.get("weight_zero_point")
    if name != "fp8-block":  # their function, unlike their compressor, leaves what it padded
        q = their_quantize(weight.float(), scales["weight_scale"], zero, scheme.weights, dtype=values.dtype)
        assert torch.equal(raw(q), raw(values))
    read = dequantize(values, scales["weight_scale"], zero, scheme.weights)
    assert torch.equal(read, number_format.dequantise(stored))


@QUANTISED
def test_scales_and_zero_points_are_theirs(name: str, group: int | None) -> None:
    """amax / 448, amax / 7.5, (max - min) / 15 or 255 in float32.

    int8 without zero points is amax / 127 with us, / 127.5 with them, where +amax is clamped; see int8-wo for what
    that makes. Where all is zero ours is 1; their zero point is found with the scale before it is rounded, which is the
    same for float32.
    """
    number_format, scheme = formats.get(name, group_size=group), _scheme(formats.get(name, group_size=group))
    weight = _weight(number_format, torch.float32)
    lowest, highest = _extremes(number_format, weight)
    theirs, zero = calculate_qparams(lowest, highest, scheme.weights)
    stored = quantise(number_format, weight)
    ours = _theirs(number_format, stored)
    empty = (lowest == 0) & (highest == 0)
    assert bool((ours["weight_scale"][empty] == 1.0).all())
    if name.startswith("int8") and "weight_zero_point" not in stored:
        theirs = torch.maximum(-lowest, highest) / torch.tensor(127.0)
    assert torch.equal(ours["weight_scale"][~empty], theirs[~empty])
    if "weight_zero_point" in stored:
        assert torch.equal(ours["weight_zero_point"][~empty], zero[~empty])


@given(data=st.data())
def test_packing_is_theirs(data: st.DataObject) -> None:
    """Any integers: a weight that is those values, given amax such that the scale is one."""
    bits = data.draw(st.sampled_from([4, 8]))
    rows, cols, half = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 40)), 2 ** (bits - 1)
    integers = st.integers(-half, half - 1)
    values = data.draw(st.lists(integers, min_size=rows * cols, max_size=rows * cols))
    q = torch.tensor(values, dtype=torch.int8).view(rows, cols)
    number_format = formats.get({4: "int4", 8: "int8-wo"}[bits], group_size=-1)
    stored = number_format.quantise(q.float(), amax=torch.full((rows,), number_format.limit))
    assert bool((stored["weight_scale"] == 1.0).all())
    assert torch.equal(stored["weight_packed"], pack_to_int32(q, bits))
    assert torch.equal(unpack_from_int32(stored["weight_packed"], bits, tuple(q.shape)), q)
    zero = torch.tensor(data.draw(st.lists(integers, min_size=rows, max_size=rows)), dtype=torch.int8).view(rows, 1)
    extremes = torch.cat([half + zero.int(), half - 1 - zero.int()], dim=1).float()
    shifted = formats.get({4: "int4-asym", 8: "int8-wo-asym"}[bits], group_size=-1)
    stored = shifted.quantise(q.float() - zero.float(), amax=extremes)
    assert bool((stored["weight_scale"] == 1.0).all())
    assert torch.equal(stored["weight_packed"], pack_to_int32(q, bits))
    assert torch.equal(stored["weight_zero_point"], pack_to_int32(zero, bits, packed_dim=0))


@QUANTISED
def test_their_models_accept_our_entry(name: str, group: int | None) -> None:
    """The entry is their preset's scheme, if there is one; what is left to their defaults does not differ from it."""
    number_format = formats.get(name, group_size=group)
    entry = number_format.config_group()
    assert entry is not None
    scheme = _scheme(number_format)
    assert scheme.targets == ["Linear"]
    assert scheme.format == number_format.checkpoint_format
    assert scheme.output_activations is None
    if name in PRESETS:
        preset = preset_name_to_scheme(PRESETS[name], ["Linear"])
        assert preset.weights is not None
        if group is not None:  # 128 is theirs (of 0.15: whole rows in W8A16)
            preset.weights.strategy, preset.weights.group_size = scheme.weights.strategy, scheme.weights.group_size
        assert _same_arguments(scheme.weights, preset.weights)
        assert _same_arguments(scheme.input_activations, preset.input_activations)
    inferred = infer_module_format(torch.nn.Linear, scheme).value
    # They take any int weights with activations for "int-quantized", vLLM takes W4AFP8 packed only.
    assert inferred == ("int-quantized" if name == "w4a8" else number_format.checkpoint_format)
    whole = {
        "quant_method": "compressed-tensors",
        "format": number_format.checkpoint_format,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "config_groups": {"group_0": entry},
    }
    config = QuantizationConfig.model_validate(whole)
    assert config.config_groups["group_0"] == scheme
    assert config.quantization_status.value == "compressed"


def _same_arguments(ours: Any, theirs: Any) -> bool:
    """But for the observer, which is of no meaning to who reads."""
    if ours is None or theirs is None:
        return ours is theirs
    return ours.model_copy(update={"observer": None}) == theirs.model_copy(update={"observer": None})


def test_what_is_not_quantised_has_no_entry() -> None:
    assert formats.get("none").config_group() is None
    assert BaseCompressor.get_value_from_registry(formats.get("none").checkpoint_format) is not None


@pytest.mark.parametrize("name", ["int8", "fp8", "w4a8", "fp8-block", "int8-static", "fp8-static"])
def test_activations_are_rounded_as_theirs(name: str) -> None:
    """float32 tokens; for int8 with our scale, since theirs is amax / 127.5 where engines take amax / 127."""
    number_format = formats.get(name)
    args = _scheme(number_format).input_activations
    assert args is not None
    x = torch.randn(3, 5, 256, generator=torch.Generator().manual_seed(12)) * torch.logspace(-2, 2, 5).view(1, 5, 1)
    stored = quantise(number_format, torch.ones(2, 256))
    if "input_scale" in stored:
        scale = stored["input_scale"]
    elif name == "int8":
        scale = x.abs().amax(-1, keepdim=True) / torch.tensor([127.0])
    else:
        scale, _ = compute_dynamic_scales_and_zp(x, args, torch.nn.Identity())
    assert torch.equal(number_format.fake_quantise_activations(x, stored), fake_quantize(x, scale, None, args))


FITTED = {layout.number_format for layout in LAYOUTS.values()}  # llama.cpp's blocks: whatever the observer


def _demo_linears() -> list[Tensor]:
    with safe_open(str(demo_model_path() / "model.safetensors"), "pt") as file:
        return [file.get_tensor(name) for name in file.keys() if ".layers.1." in name and "proj" in name]  # noqa: SIM118


@pytest.mark.parametrize("name", sorted(set(formats.names()) - {"none", *FITTED}))
def test_the_search_does_better_on_real_weights(name: str) -> None:
    """The demo model's: no linear is worse than with amax, all together are better (MXFP8: are not worse)."""
    totals = []
    for weight in _demo_linears():
        errors = []
        for observer in ("amax", "mse"):
            number_format = formats.get(name, observer=observer)
            error = number_format.squared_error(weight, quantise(number_format, weight))[:, 0].sum()
            errors.append(float(error))
        assert errors[1] <= errors[0] * (1 + 1e-12)
        totals.append(errors)
    amax, mse = (sum(error[column] for error in totals) for column in (0, 1))
    assert mse < amax or name == "mxfp8"
