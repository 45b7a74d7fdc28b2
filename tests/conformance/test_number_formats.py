"""Our stored tensors against compressed-tensors, the reference implementation of the checkpoint formats.

Theirs reads ours to exactly our values, ours reads theirs, and the same scales give the same stored bytes,
where theirs is given float32 (it divides in the weight's own dtype, which rounds bfloat16 ratios once more).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from modelexport.quantization import formats
from modelexport.quantization.formats.base import NumberFormat

pytest.importorskip("compressed_tensors", minversion="0.15")
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
from compressed_tensors.quantization.lifecycle.forward import dequantize, fake_quantize, quantize
from compressed_tensors.quantization.utils import (
    calculate_qparams,
    compute_dynamic_scales_and_zp,
)

PRESETS = {"int8": "W8A8", "fp8": "FP8_DYNAMIC", "int4": "W4A16"}
QUANTISED = pytest.mark.parametrize(
    ("name", "group"), [("int8", None), ("fp8", None), ("int4", 32), ("int4", 64), ("int4", 128)]
)
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])


def _scheme(number_format: NumberFormat) -> QuantizationScheme:
    return QuantizationScheme.model_validate(number_format.config_group())


def _compressor(number_format: NumberFormat) -> Any:
    return BaseCompressor.get_value_from_registry(number_format.checkpoint_format)


def _weight(dtype: torch.dtype, rows: int = 48, cols: int = 512) -> Tensor:
    generator = torch.Generator().manual_seed(11)
    weight = torch.randn(rows, cols, generator=generator) * torch.logspace(-3, 1, rows).unsqueeze(1)
    weight[7] = 0.0
    weight[9, :128] = 0.0
    return weight.to(dtype)


def _stored_values(number_format: NumberFormat, stored: dict[str, Tensor]) -> Tensor:
    """One byte a value, however it is stored."""
    if number_format.name == "int4":
        return unpack_from_int32(stored["weight_packed"], 4, tuple(stored["weight_shape"].tolist()))
    return stored["weight"]


@QUANTISED
@DTYPES
def test_theirs_reads_ours(name: str, group: int | None, dtype: torch.dtype) -> None:
    number_format = formats.get(name, group_size=group)
    stored = number_format.quantise(_weight(dtype))
    read = _compressor(number_format).decompress(dict(stored), _scheme(number_format))["weight"]
    assert read.dtype == dtype
    assert torch.equal(read, number_format.dequantise(stored, dtype=dtype))


@QUANTISED
@DTYPES
def test_ours_reads_theirs(name: str, group: int | None, dtype: torch.dtype) -> None:
    """Their compressor, with the scales that their observer would take."""
    number_format, scheme = formats.get(name, group_size=group), _scheme(formats.get(name, group_size=group))
    weight = _weight(dtype)
    grouped = weight.unflatten(1, (-1, group or weight.shape[1]))
    scale, _ = calculate_qparams(grouped.amin(-1), grouped.amax(-1), scheme.weights)
    compressor = _compressor(number_format)
    theirs = compressor.compress({"weight": weight, "weight_scale": scale}, scheme)
    assert set(theirs) == {spec.suffix for spec in number_format.specs(tuple(weight.shape), dtype)}
    for spec in number_format.specs(tuple(weight.shape), dtype):
        assert (tuple(theirs[spec.suffix].shape), theirs[spec.suffix].dtype) == (spec.shape, spec.dtype)
    read = number_format.dequantise(theirs, dtype=dtype)
    assert torch.equal(read, compressor.decompress(theirs, scheme)["weight"])


@QUANTISED
@DTYPES
def test_the_same_scales_give_the_same_stored_bytes(name: str, group: int | None, dtype: torch.dtype) -> None:
    number_format, scheme = formats.get(name, group_size=group), _scheme(formats.get(name, group_size=group))
    weight = _weight(dtype)
    stored = number_format.quantise(weight)
    wide = {"weight": weight.float(), "weight_scale": stored["weight_scale"].float()}
    theirs = _compressor(number_format).compress(wide, scheme)
    for suffix in set(stored) - {"weight_scale"}:
        assert torch.equal(theirs[suffix].view(torch.uint8), stored[suffix].view(torch.uint8))
    q = quantize(
        wide["weight"],
        wide["weight_scale"],
        None,
        scheme.weights,
        dtype=_stored_values(number_format, stored).dtype,
    )
    assert torch.equal(q.view(torch.uint8), _stored_values(number_format, stored).view(torch.uint8))
    assert torch.equal(dequantize(q, wide["weight_scale"], None, scheme.weights), number_format.dequantise(stored))


@pytest.mark.parametrize("group", [32, 64, 128])
def test_int4_and_fp8_scales_are_theirs(group: int) -> None:
    """amax / 7.5 and amax / 448. (int8 is amax / 127 with us, / 127.5 with them: +amax is not clamped.)"""
    weight = _weight(torch.float32)
    for number_format, width in ((formats.get("int4", group_size=group), group), (formats.get("fp8"), 512)):
        grouped = weight.unflatten(1, (-1, width))
        lowest, highest = grouped.amin(-1), grouped.amax(-1)
        theirs, _ = calculate_qparams(lowest, highest, _scheme(number_format).weights)
        ours = number_format.quantise(weight)["weight_scale"]
        empty = (lowest == 0) & (highest == 0)
        assert torch.equal(ours[~empty], theirs[~empty])
        assert bool((ours[empty] == 1.0).all())


@given(data=st.data())
def test_packing_is_theirs(data: st.DataObject) -> None:
    """Any int4 values: a weight that is those values, with a group that makes the scale one."""
    rows, groups = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    values = data.draw(st.lists(st.integers(-8, 7), min_size=rows * groups * 32, max_size=rows * groups * 32))
    q = torch.tensor(values, dtype=torch.int8).view(rows, groups * 32)
    weight = q.float()
    weight[:, ::32] = 7.5  # amax / 7.5 = 1; it is clamped to 7
    weight = weight.clamp(min=-7.5)  # -7.5 rounds to even: -8
    q[:, ::32] = 7
    number_format = formats.get("int4", group_size=32)
    stored = number_format.quantise(weight)
    assert bool((stored["weight_scale"] == 1.0).all())
    assert torch.equal(stored["weight_packed"], pack_to_int32(q, 4))
    assert torch.equal(unpack_from_int32(stored["weight_packed"], 4, tuple(q.shape)), q)


@QUANTISED
def test_their_models_accept_our_entry(name: str, group: int | None) -> None:
    """The entry is their preset's scheme; what is left to their defaults does not differ from it."""
    number_format = formats.get(name, group_size=group)
    entry = number_format.config_group()
    assert entry is not None
    scheme = _scheme(number_format)
    preset = preset_name_to_scheme(PRESETS[name], ["Linear"])
    assert preset.weights is not None
    if group is not None:
        preset.weights.group_size = group
    assert scheme.targets == ["Linear"]
    assert scheme.format == number_format.checkpoint_format
    assert scheme.weights == preset.weights
    assert scheme.input_activations == preset.input_activations
    assert scheme.output_activations is None
    assert infer_module_format(torch.nn.Linear, scheme).value == number_format.checkpoint_format
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


def test_what_is_not_quantised_has_no_entry() -> None:
    assert formats.get("none").config_group() is None
    assert BaseCompressor.get_value_from_registry(formats.get("none").checkpoint_format) is not None


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_activations_are_rounded_as_theirs(name: str) -> None:
    """float32 tokens; for int8 with our scale, since theirs is amax / 127.5 where engines take amax / 127."""
    number_format = formats.get(name)
    args = _scheme(number_format).input_activations
    assert args is not None
    x = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(12)) * torch.logspace(-2, 2, 5).view(1, 5, 1)
    scale, _ = compute_dynamic_scales_and_zp(x, args, torch.nn.Identity())
    if name == "int8":
        scale = x.abs().amax(-1, keepdim=True) / torch.tensor([127.0])
    assert torch.equal(number_format.fake_quantise_activations(x), fake_quantize(x, scale, None, args))
