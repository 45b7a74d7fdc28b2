"""DeepSeek's spelling of FP8 in blocks, and the two of FP8 per tensor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from modelexport.errors import CheckpointError, PlanError
from modelexport.exporting import export
from modelexport.inspection.evaluate.models import load_dequantised
from modelexport.quantization import decoding, formats
from modelexport.quantization.methods import compressed_tensors, fp8
from modelexport.quantization.methods.base import ModelQuantization, Scheme, WeightSlice
from modelexport.system.dtypes import torch_dtype
from tests.helpers.models import make_llama
from tests.quantization.methods._native import ALL, cut, native_tensors, same

DEEPSEEK = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}


def scheme(value: dict) -> Scheme:
    found = fp8.read({"quant_method": "fp8", **value}).scheme_of("model.layers.0.mlp.up_proj")
    assert found is not None
    return found


def test_deepseeks_own_configuration() -> None:
    read = fp8.read(DEEPSEEK)
    assert read.scheme_of("lm_head") is None
    assert read.scheme_of("model.layers.0.mlp.up_proj") is not None
    promises = fp8.tensor_specs(scheme(DEEPSEEK), (576, 7168))  # its kv_a_proj_with_mqa: half a block of rows
    assert promises["weight_scale_inv"].shapes == ((5, 56),)
    assert promises["weight_scale_inv"].axes == ((0, 128), (1, 128))
    assert promises["weight"].dtypes == ("F8_E4M3",)
    if "fp8-block" in formats.names():
        assert formats.of_scheme(scheme(DEEPSEEK)).name == "fp8-block"


@pytest.mark.parametrize("scales", ["F32", "BF16"])
@pytest.mark.parametrize("name", ["fp8-block", "fp8-static"])
def test_there_and_back_is_the_identity_of_wholes_and_parts(name: str, scales: str) -> None:
    number_format, shape = ALL[name], (320, 384)
    native = native_tensors(number_format, shape, scales=scales)
    announcement = fp8.quantization_files(
        ModelQuantization({"model.layers.0.mlp.up_proj": number_format}, ("lm_head",))
    )
    promises = fp8.tensor_specs(scheme(announcement.config), shape)
    whole = fp8.encode(number_format, native, WeightSlice.whole(shape))
    assert list(whole) == list(promises)
    for suffix, promise in promises.items():
        assert whole[suffix].shape == promise.shapes[0]
        assert whole[suffix].dtype == (torch_dtype("F8_E4M3") if suffix == "weight" else torch_dtype(scales))
    assert same(fp8.decode(number_format, whole, WeightSlice.whole(shape)), native)
    own = compressed_tensors.tensor_specs(number_format.scheme(), shape)
    for origin, extent in (((256, 0), (64, 384)), ((0, 128), (320, 256)), ((128, 256), (192, 128))):
        part = WeightSlice(shape, origin, extent)
        encoded = fp8.encode(number_format, cut(native, own, part), part)
        assert same(encoded, cut(whole, promises, part))
        assert same(fp8.decode(number_format, encoded, part), cut(native, own, part))


def test_what_is_announced() -> None:
    kept = ("lm_head", "model.layers.3.mlp.gate")
    block = fp8.quantization_files(ModelQuantization({"a": ALL["fp8-block"]}, kept))
    assert block.config == {**DEEPSEEK, "modules_to_not_convert": list(kept)}
    assert not block.files
    static = fp8.quantization_files(ModelQuantization({"a": ALL["fp8-static"]}, kept))
    assert static.config == {
        "quant_method": "fp8",
        "activation_scheme": "static",
        "modules_to_not_convert": list(kept),
    }
    for announcement, name in ((block, "fp8-block"), (static, "fp8-static")):
        read = fp8.read(announcement.config)
        assert read.ignore[:2] == kept
        assert not read.ignores("model.layers.3.mlp.gate_proj")
        if name in formats.names():
            assert formats.of_scheme(read.schemes[0]).name == name


def test_both_spellings_of_one_scale_are_read() -> None:
    """vLLM's, and transformers', whose config.json says that there are no blocks."""
    number_format, part = ALL["fp8-static"], WeightSlice.whole((4, 8))
    stored = fp8.encode(number_format, native_tensors(number_format, (4, 8)), part)
    theirs = scheme({"activation_scheme": "static", "weight_block_size": None})
    assert list(fp8.tensor_specs(theirs, (4, 8))) == ["weight", "weight_scale_inv", "activation_scale"]
    assert list(fp8.tensor_specs(scheme({"activation_scheme": "static"}), (4, 8))) == list(stored)
    renamed = {
        "weight": stored["weight"],
        "weight_scale_inv": stored["weight_scale"],
        "activation_scale": stored["input_scale"],
    }
    assert same(fp8.decode(number_format, renamed, part), fp8.decode(number_format, stored, part))
    values = formats.get("fp8-static").dequantise(fp8.decode(number_format, stored, part))
    for spelt in (stored, renamed):
        assert torch.equal(
            decoding.dequantise("fp8", formats.get("fp8-static"), spelt, WeightSlice.whole((4, 8))).nan_to_num(),
            values.nan_to_num(),
        )
    dynamic = scheme({"activation_scheme": "dynamic"})
    assert list(fp8.tensor_specs(dynamic, (4, 8))) == ["weight", "weight_scale"]
    assert "per token (dynamic)" in dynamic.describe()


def test_other_blocks_and_exponents_are_read() -> None:
    """As data, whether or not a number format of ours holds them."""
    other = scheme({"weight_block_size": [64, 32], "ignored_layers": ["model.layers.1"]})
    assert fp8.tensor_specs(other, (100, 100))["weight_scale_inv"].shapes == ((2, 4),)
    assert other.describe() == "fp8 weights per block of 64x32, fp8 activations per group of 32 (dynamic)"
    exponents = scheme({"weight_block_size": [1, 32], "scale_fmt": "ue8m0"})
    assert fp8.tensor_specs(exponents, (4, 64))["weight_scale_inv"].shapes == ((4, 2),)
    stored = {
        "weight": torch.zeros(4, 64).to(torch.float8_e4m3fn),
        "weight_scale_inv": torch.arange(8, dtype=torch.uint8).reshape(4, 2),
    }
    decoded = fp8.decode(ALL["mxfp8"], stored, WeightSlice.whole((4, 64)))
    assert torch.equal(decoded["weight_scale"], stored["weight_scale_inv"])


@pytest.mark.skipif(not hasattr(torch, "float8_e8m0fnu"), reason="this torch has no E8M0")
def test_block_scales_that_are_exponents_become_float32() -> None:
    stored = {
        "weight": torch.ones(128, 256).to(torch.float8_e4m3fn),
        "weight_scale_inv": torch.tensor([[126, 130]], dtype=torch.uint8).view(torch.float8_e8m0fnu),
    }
    decoded = fp8.decode(ALL["fp8-block"], stored, WeightSlice.whole((128, 256)))
    assert decoded["weight_scale"].dtype == torch.float32
    assert decoded["weight_scale"].tolist() == [[0.5, 8.0]]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"weight_block_size": 128}, "weight_block_size 128; two numbers"),
        ({"weight_block_size": [128, 0]}, "two numbers"),
        ({"activation_scheme": "sometimes"}, "activation_scheme 'sometimes'; known: dynamic, static"),
        ({"activation_scheme": "static", "weight_block_size": [128, 128]}, "engines take 'dynamic'"),
        ({"modules_to_not_convert": "lm_head"}, "must be a list"),
    ],
)
def test_wrong_configurations_are_refused(value: dict, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        fp8.read({"quant_method": "fp8", **value})


def test_what_it_cannot_hold_is_refused_with_what_to_type() -> None:
    for name in ("fp8", "int8", "nvfp4", "mxfp8", "int4"):
        assert "--quant fp8-block, or --format hf" in str(fp8.refusal(ALL[name], (128, 128)))
        with pytest.raises(PlanError, match=f"not {name};"):
            fp8.quantization_files(ModelQuantization({"a": ALL[name]}, ()))
        with pytest.raises(PlanError, match=f"not {name};"):
            fp8.encode(ALL[name], {}, WeightSlice.whole((128, 128)))
    assert fp8.refusal(ALL["fp8-block"], (100, 100)) is None
    with pytest.raises(PlanError, match="one number format, but fp8-block and fp8-static"):
        fp8.quantization_files(ModelQuantization({"a": ALL["fp8-block"], "b": ALL["fp8-static"]}, ()))
    with pytest.raises(PlanError, match="KV cache"):
        fp8.quantization_files(ModelQuantization({"a": ALL["fp8-block"]}, (), kv_cache="fp8"))
    with pytest.raises(CheckpointError, match="a scale is missing: weight are there"):
        fp8.decode(ALL["fp8-block"], {"weight": torch.zeros(1, 1)}, WeightSlice.whole((1, 1)))


def test_transformers_reads_what_is_announced() -> None:
    from transformers import FineGrainedFP8Config
    from transformers.quantizers.auto import AutoHfQuantizer

    config = fp8.quantization_files(ModelQuantization({"a": ALL["fp8-block"]}, ("lm_head",))).config
    read = AutoHfQuantizer.from_config(dict(config), pre_quantized=True).quantization_config
    assert isinstance(read, FineGrainedFP8Config)
    assert list(read.weight_block_size) == [128, 128]
    assert read.activation_scheme == "dynamic"
    assert read.modules_to_not_convert == ["lm_head"]


@pytest.mark.timeout(120)
@pytest.mark.filterwarnings("ignore")  # transformers' own: without a GPU it dequantises
def test_transformers_dequantises_to_our_values(tmp_path: Path) -> None:
    """Its own reading of a checkpoint on CPU gives the weights that ours gives, to the bit."""
    from transformers import AutoModelForCausalLM

    export(
        model=str(make_llama()),
        out=str(tmp_path / "out"),
        quant="fp8-block",
        format="fp8-block",
        tp=2,
        quiet=True,
        evaluate=False,
    )
    theirs, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.bfloat16, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    ours = load_dequantised(tmp_path / "out", dtype=torch.bfloat16).state_dict()
    for name, weight in theirs.state_dict().items():
        assert torch.equal(weight, ours[name]), name
