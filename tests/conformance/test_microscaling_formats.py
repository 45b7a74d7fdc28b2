"""NVFP4, MXFP4 and MXFP8 against compressed-tensors (here) and nvidia-modelopt (in an environment of its own).

Theirs reads ours to exactly our values, ours reads theirs, their rules choose our scales, and the same scales give the
same stored bytes. Theirs are given float32: for bfloat16 they divide amax by 6 in bfloat16, which we do in float32.
"""

from __future__ import annotations

import itertools
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from modelexport.quantization import formats
from modelexport.quantization.formats.base import NumberFormat

pytest.importorskip("compressed_tensors", minversion="0.20")
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams, compute_dynamic_scales_and_zp, generate_gparam

PRESETS = {"nvfp4": "NVFP4", "nvfp4-wo": "NVFP4A16", "mxfp4": "MXFP4", "mxfp4-wo": "MXFP4A16", "mxfp8": "MXFP8"}
KINDS = ("nvfp4-wo", "mxfp4-wo", "mxfp8")
GROUP = {"nvfp4": 16, "nvfp4-wo": 16, "mxfp4": 32, "mxfp4-wo": 32, "mxfp8": 32}
every_kind = pytest.mark.parametrize("name", KINDS)
every_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
every_observer = pytest.mark.parametrize("observer", ["amax", "mse"])
MODELOPT = os.environ.get("MODELEXPORT_MODELOPT_PYTHON", "")
WITH_MODELOPT = Path(__file__).with_name("_modelopt_microscaling.py")


def _scheme(number_format: NumberFormat) -> QuantizationScheme:
    return QuantizationScheme.model_validate(number_format.config_group())


def _compressor(number_format: NumberFormat) -> Any:
    return BaseCompressor.get_value_from_registry(number_format.checkpoint_format)


def _weight(dtype: torch.dtype, rows: int = 48, cols: int = 512) -> Tensor:
    generator = torch.Generator().manual_seed(11)
    weight = torch.randn(rows, cols, generator=generator) * torch.logspace(-3, 1, rows).unsqueeze(1)
    weight[7] = 0.0
    weight[9, :128] = 0.0
    weight[10, ::5] = -0.0
    return weight.to(dtype)


def _their_scales(name: str, weight: Tensor) -> tuple[Tensor, Tensor | None]:
    """The scales (as numbers) and the global scale that their rules give."""
    grouped = weight.unflatten(1, (-1, GROUP[name]))
    factor = generate_gparam(weight.amin(), weight.amax()) if name.startswith("nv") else None
    scheme = _scheme(formats.get(name))
    scale, _ = calculate_qparams(grouped.amin(-1), grouped.amax(-1), scheme.weights, global_scale=factor)
    return scale, factor


def _compress(name: str, weight: Tensor, scale: Tensor, factor: Tensor | None) -> dict[str, Tensor]:
    number_format = formats.get(name)
    given = {"weight": weight, "weight_scale": scale}
    if factor is not None:
        given["weight_global_scale"] = factor
    compressed: dict[str, Tensor] = _compressor(number_format).compress(given, _scheme(number_format))
    return compressed


def _same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert set(left) == set(right)
    for key in left:
        assert (left[key].dtype, left[key].shape) == (right[key].dtype, right[key].shape), key
        assert torch.equal(left[key].contiguous().view(torch.uint8), right[key].contiguous().view(torch.uint8)), key


@every_kind
def test_their_rules_give_our_bytes(name: str) -> None:
    weight = _weight(torch.float32)
    _same(_compress(name, weight, *_their_scales(name, weight)), formats.get(name).quantise(weight))


@pytest.mark.parametrize("name", ["mxfp4-wo", "mxfp8"])
def test_exponents_are_theirs_in_bfloat16_too(name: str) -> None:
    weight = _weight(torch.bfloat16)
    _same(_compress(name, weight, *_their_scales(name, weight)), formats.get(name).quantise(weight))


@pytest.mark.parametrize(
    ("name", "value", "dtype"),
    [
        ("nvfp4-wo", 1e-36, torch.float32),  # 2688 / amax overflows: theirs takes 1 instead
        ("mxfp4-wo", 60000.0, torch.float16),  # the next power of two is Inf in the weight's dtype
        ("mxfp4-wo", 3.3e38, torch.bfloat16),
        ("mxfp8", 60000.0, torch.float16),
        ("mxfp8", 3.3e38, torch.bfloat16),
        ("mxfp4-wo", 1e-6, torch.float16),  # the exponent's power of two is 0 in the weight's dtype
    ],
)
def test_where_theirs_makes_zeros(name: str, value: float, dtype: torch.dtype) -> None:
    """Here we differ, on purpose."""
    number_format, weight = formats.get(name), torch.full((2, 32), value, dtype=dtype)
    theirs = _compress(name, weight, *_their_scales(name, weight))
    assert not number_format.dequantise(theirs).any()
    ours = number_format.dequantise(number_format.quantise(weight), dtype=dtype).double()
    assert bool(((ours - weight.double()).abs() <= weight.double() / 4).all())


@given(data=st.data())
def test_their_rules_give_our_bytes_for_any_size(data: st.DataObject) -> None:
    """Groups of any sizes, from where their global scale is finite up to where their exponents are."""
    name = data.draw(st.sampled_from(KINDS))
    exponents = st.integers(-110, 125)
    sizes = torch.tensor(data.draw(st.lists(exponents, min_size=8, max_size=8)), dtype=torch.float64)
    mantissas = torch.tensor(data.draw(st.lists(st.floats(1.0, 1.9999), min_size=8, max_size=8)), dtype=torch.float64)
    values = torch.randn(8, 32, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99)))).double()
    values = values / values.abs().amax(1, keepdim=True) * (mantissas * 2.0**sizes).unsqueeze(1)
    weight = values.float()
    _same(_compress(name, weight, *_their_scales(name, weight)), formats.get(name).quantise(weight))


@every_kind
@every_dtype
@every_observer
def test_our_scales_give_their_bytes(name: str, dtype: torch.dtype, observer: str) -> None:
    stored = formats.get(name, observer=observer).quantise(_weight(dtype))
    scale = stored["weight_scale"].float()
    scale = scale if name.startswith("nv") else torch.pow(2.0, scale - 127)
    theirs = _compress(name, _weight(dtype).float(), scale, stored.get("weight_global_scale"))
    _same(theirs, stored)


@every_kind
@every_dtype
@every_observer
def test_theirs_reads_ours(name: str, dtype: torch.dtype, observer: str) -> None:
    """Always as bfloat16."""
    number_format = formats.get(name, observer=observer)
    stored = number_format.quantise(_weight(dtype))
    read = _compressor(number_format).decompress(dict(stored), _scheme(number_format))["weight"]
    assert read.dtype == torch.bfloat16
    assert torch.equal(read, number_format.dequantise(stored, dtype=torch.bfloat16))


@every_kind
@every_dtype
def test_ours_reads_theirs(name: str, dtype: torch.dtype) -> None:
    """What they make of a weight in any dtype, scales and all."""
    number_format, weight = formats.get(name), _weight(dtype)
    theirs = _compress(name, weight, *_their_scales(name, weight))
    for spec in number_format.specs(tuple(weight.shape), dtype):
        assert (tuple(theirs[spec.suffix].shape), theirs[spec.suffix].dtype) == (spec.shape, spec.dtype)
    read = _compressor(number_format).decompress(dict(theirs), _scheme(number_format))["weight"]
    assert torch.equal(number_format.dequantise(theirs, dtype=read.dtype), read)


@pytest.mark.parametrize("name", PRESETS)
def test_our_entry_is_their_preset(name: str) -> None:
    scheme = _scheme(formats.get(name))
    preset = preset_name_to_scheme(PRESETS[name], ["Linear"])
    written = QuantizationScheme.model_validate_json(preset.model_dump_json())  # as a checkpoint would have it
    assert scheme.weights == written.weights
    assert scheme.input_activations == written.input_activations
    assert infer_module_format(torch.nn.Linear, scheme).value == formats.get(name).checkpoint_format


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "mxfp8"])
@every_dtype
def test_activations_are_rounded_as_theirs(name: str, dtype: torch.dtype) -> None:
    """In float32; where a bfloat16's largest is divided by 6 in bfloat16, they differ by that rounding."""
    number_format = formats.get(name)
    args = _scheme(number_format).input_activations
    assert args is not None
    x = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(12)) * torch.logspace(-2, 2, 5).view(1, 5, 1)
    x[1, 2, :32] = 0.0
    x = x.to(dtype).float()
    factor = torch.tensor([number_format.input_scale(float(x.abs().max()))]) if name == "nvfp4" else None
    tensors = {} if factor is None else {"input_global_scale": factor}
    scale, _ = compute_dynamic_scales_and_zp(x, args, torch.nn.Identity(), global_scale=factor)
    expected = fake_quantize(x, scale, None, args, global_scale=factor)
    assert torch.equal(number_format.fake_quantise_activations(x, tensors), expected)
    assert torch.equal(number_format.fake_quantise_activations(x.to(dtype), tensors), expected.to(dtype))


@pytest.mark.slow
@pytest.mark.skipif(not MODELOPT, reason="MODELEXPORT_MODELOPT_PYTHON is not set to a Python that has nvidia-modelopt")
def test_modelopt(tmp_path: Path) -> None:
    """modelopt reads ours to exactly our values; given our scales it packs our bytes; ours reads what it makes.

    NVFP4 is exact where the global scale is a power of two, since modelopt multiplies by its reciprocal.
    """
    cases: dict[str, dict[str, Tensor]] = {}
    for dtype, observer, exact in itertools.product((torch.bfloat16, torch.float32), ("amax", "mse"), (True, False)):
        weight = _weight(dtype)
        amax = torch.tensor([42.0]) if exact else weight.float().abs().max().reshape(1)
        for name in KINDS:
            number_format = formats.get(name, observer=observer)
            given = amax if number_format.scale_granularity == "tensor" else None
            stored = number_format.quantise(weight, amax=given)
            case = f"{str(dtype)[6:]}-{observer}-{'exact' if exact else 'any'}.{name}"
            save_file({"source": weight, **stored}, tmp_path / f"{case}.safetensors")
            cases[case] = stored
    assert cases["float32-amax-exact.nvfp4-wo"]["weight_global_scale"].tolist() == [64.0]
    command = [MODELOPT, str(WITH_MODELOPT), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for case, stored in cases.items():
        number_format = formats.get(case.partition(".")[2])
        theirs = load_file(tmp_path / f"{case}.theirs.safetensors")
        values = "weight" if "weight" in stored else "weight_packed"
        own = {values: theirs["own"].view(stored[values].dtype)}
        own["weight_scale"] = theirs["own_scale"].view(stored["weight_scale"].dtype).view_as(stored["weight_scale"])
        if "own_factor" in theirs:
            own["weight_global_scale"] = 1.0 / theirs["own_factor"].reshape(1)
        tolerance = 2.0**-22 if "own_factor" in theirs else 0.0  # of a reciprocal's reciprocal
        torch.testing.assert_close(number_format.dequantise(own), theirs["own_read"], rtol=tolerance, atol=0.0)
        if "own_factor" in theirs and "any" in case:
            torch.testing.assert_close(number_format.dequantise(stored), theirs["read"], rtol=tolerance, atol=0.0)
            assert float((theirs["packed"] == stored[values]).double().mean()) > 0.9999
            continue
        assert torch.equal(theirs["read"], number_format.dequantise(stored)), case
        if "packed" in theirs:
            assert torch.equal(theirs["packed"], stored[values].view(torch.uint8)), case
