"""modelopt's spelling: tiny cases by hand, every number format there and back, parts, and what config.json says."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modelexport.errors import CheckpointError, PlanError
from modelexport.quantization import formats
from modelexport.quantization.methods import compressed_tensors, modelopt, read_quantization_config
from modelexport.quantization.methods._arguments import with_modules_below
from modelexport.quantization.methods._reciprocal import divisor_of, multiplier_of
from modelexport.quantization.methods.base import ModelQuantization, QuantizationConfig, Scheme, WeightSlice
from modelexport.system.dtypes import torch_dtype
from tests.quantization.methods._native import ALL, Numbers, arguments, cut, native_tensors, same

ALGOS = {
    "fp8-static": "FP8",
    "fp8": "FP8_PER_CHANNEL_PER_TOKEN",
    "fp8-block": "fp8_pb_wo",
    "int8-static": "W8A8_SQ_PER_CHANNEL",
    "int8-wo": "W8A16",
    "int4": "W4A16_AWQ",
    "int4-64": "W4A16_AWQ",
    "nvfp4": "NVFP4",
    "nvfp4-wo": "W4A16_NVFP4",
    "mxfp8": "MXFP8",
    "mxfp4": "mxfp4",
    "mxfp4-wo": "W4A16_MXFP4",
}


def announced(*names: str, kept: tuple[str, ...] = ("lm_head",), kv_cache: str | None = None) -> ModelQuantization:
    """Four linears, of the number formats in turn."""
    modules = [f"model.layers.{n}.mlp.down_proj" for n in range(4)]
    return ModelQuantization({m: ALL[names[n % len(names)]] for n, m in enumerate(modules)}, kept, kv_cache, "1.2.3")


def scheme_of(name: str) -> Scheme:
    scheme = modelopt.read(modelopt.quantization_files(announced(name)).config).scheme_of(
        "model.layers.0.mlp.down_proj"
    )
    assert scheme is not None
    return scheme


def test_nibbles_by_hand() -> None:
    """Two rows of eight, values -8..7 and 7..-8: 0x89ABCDEF and 0x76543210 in bytes of two rows."""
    number_format = Numbers.of("int4", "pack-quantized", arguments("int", 4, "group", group_size=32))
    rows = [[-8, -7, -6, -5, -4, -3, -2, -1] * 4, [7, 6, 5, 4, 3, 2, 1, 0] * 4]
    words = [[sum((value + 8) << (4 * n) for n, value in enumerate(row[:8]))] * 4 for row in rows]
    packed = torch.tensor(words).to(torch.int32)
    native = {"weight_packed": packed, "weight_scale": torch.ones(2, 1), "weight_shape": torch.tensor([2, 32])}
    encoded = modelopt.encode(number_format, native, WeightSlice.whole((2, 32)))
    pairs = [(upper & 15) << 4 | (lower & 15) for lower, upper in zip(*rows, strict=True)]
    assert encoded["weight"].tolist() == [pairs]
    assert pairs[:3] == [0x78, 0x69, 0x5A]
    assert same(modelopt.decode(number_format, encoded, WeightSlice.whole((2, 32))), native)


def test_int8_by_hand() -> None:
    """A row of five: compressed-tensors has 128 more in each byte and fills the second word up with 0."""
    number_format, part = ALL["int8-wo"], WeightSlice.whole((1, 5))
    packed = torch.tensor([[0, 127, 128, 129, 255, 0, 0, 0]], dtype=torch.uint8).view(torch.int32)
    native = {"weight_packed": packed, "weight_scale": torch.tensor([[0.5]]), "weight_shape": torch.tensor([1, 5])}
    encoded = modelopt.encode(number_format, native, part)
    assert encoded["weight"].tolist() == [[-128, -1, 0, 1, 127]]
    assert encoded["weight_scale"].tolist() == [0.5]
    assert same(modelopt.decode(number_format, encoded, part), native)


def test_global_scales_by_hand() -> None:
    """amax 2: a divisor of 1344 and a multiplier of 1 / 1344; the other way round through amax alone."""
    number_format, part = ALL["nvfp4"], WeightSlice.whole((1, 16))
    native = native_tensors(number_format, (1, 16)) | {
        "weight_global_scale": torch.tensor([1344.0]),
        "input_global_scale": torch.tensor([2688.0 / 3]),
    }
    encoded = modelopt.encode(number_format, native, part)
    assert list(encoded) == ["weight", "weight_scale", "weight_scale_2", "input_scale"]
    assert encoded["weight_scale_2"].item() == torch.tensor(2.0).div(2688).item()
    assert encoded["input_scale"].item() == torch.tensor(3.0).div(2688).item()
    assert encoded["input_scale"].shape == ()
    assert torch.equal(encoded["weight"], native["weight_packed"])
    assert same(modelopt.decode(number_format, encoded, part), native)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_global_scales_of_half_precision_weights_go_there_and_back(dtype: torch.dtype) -> None:
    """Every magnitude there is, by the rounding of each tool on CPU and on CUDA (where a divisor is a reciprocal)."""
    amax = torch.arange(1, 0x7F80 if dtype == torch.bfloat16 else 0x7C00, 5, dtype=torch.int16).view(dtype).float()
    divisors = torch.full((), 2688.0) / amax, amax.reciprocal() * 2688
    multipliers = amax / 2688, amax * torch.tensor(1 / 2688)
    tiny = 2.0**-126
    normal = [n for n in range(len(amax)) if divisors[0][n] < 2.0**127 and min(d[n] for d in multipliers) >= tiny]
    assert len(normal) > 5000
    for theirs in divisors:
        assert all(divisor_of(multiplier_of(theirs[n].item())) == theirs[n].item() for n in normal)
    for theirs in multipliers:
        assert all(multiplier_of(divisor_of(theirs[n].item())) == theirs[n].item() for n in normal)
    assert all(multiplier_of(divisors[0][n].item()) == multipliers[0][n].item() for n in normal)
    assert all(divisor_of(multipliers[0][n].item()) == divisors[0][n].item() for n in normal)


@settings(deadline=None, max_examples=300)
@given(st.floats(2.0**-110, 2.0**110, width=32))
def test_any_global_scale_stays_within_three_units_of_the_last_place(number: float) -> None:
    inverse = multiplier_of(number)
    assert abs(inverse * number - 1) <= 4 * 2.0**-24
    assert abs(divisor_of(inverse) / number - 1) <= 3 * 2.0**-23


def test_global_scales_at_the_edges() -> None:
    assert multiplier_of(float("inf")) == 0.0
    assert divisor_of(0.0) == float("inf")
    assert multiplier_of(1.0) == 1.0  # of a weight of zeros
    number_format, part = ALL["nvfp4-wo"], WeightSlice.whole((1, 16))
    for value in (-1.0, float("nan"), 0.0):
        native = native_tensors(number_format, (1, 16)) | {"weight_global_scale": torch.tensor([value])}
        with pytest.raises(CheckpointError, match=r"weight_global_scale is .*reciprocal"):
            modelopt.encode(number_format, native, part)
    stored = modelopt.encode(number_format, native_tensors(number_format, (1, 16)), part)
    with pytest.raises(CheckpointError, match=r"weight_scale_2 is 9\.99967e-42: it has no reciprocal"):
        modelopt.decode(number_format, stored | {"weight_scale_2": torch.tensor(1e-41)}, part)


@pytest.mark.parametrize("shape", [(384, 256), (2, 128), (130, 384)])
@pytest.mark.parametrize("name", ALGOS)
def test_there_and_back_is_the_identity(name: str, shape: tuple[int, int]) -> None:
    number_format, part = ALL[name], WeightSlice.whole(shape)
    native = native_tensors(number_format, shape)
    assert modelopt.refusal(number_format, shape) is None
    encoded = modelopt.encode(number_format, native, part)
    promises = modelopt.tensor_specs(scheme_of(name), shape)
    assert list(encoded) == list(promises)
    for suffix, promise in promises.items():
        assert encoded[suffix].shape == promise.shapes[0], suffix
        assert encoded[suffix].dtype == torch_dtype(promise.dtypes[0]), suffix
    decoded = modelopt.decode(number_format, encoded, part)
    assert same(decoded, native)
    assert same(modelopt.encode(number_format, decoded, part), encoded)


@pytest.mark.parametrize("name", ALGOS)
def test_half_precision_scales_are_widened_without_loss(name: str) -> None:
    shape = (256, 128)
    native = native_tensors(ALL[name], shape, scales="BF16")
    decoded = modelopt.decode(
        ALL[name], modelopt.encode(ALL[name], native, WeightSlice.whole(shape)), WeightSlice.whole(shape)
    )
    for suffix, tensor in native.items():
        assert same({suffix: decoded[suffix].to(tensor.dtype)}, {suffix: tensor})


@pytest.mark.parametrize("name", ALGOS)
def test_parts_give_the_parts_of_the_whole(name: str) -> None:
    """Cut along rows, along columns and along both, unevenly, on boundaries that the promised axes allow."""
    number_format, shape = ALL[name], (1280, 768)
    native = native_tensors(number_format, shape)
    own, theirs = (
        compressed_tensors.tensor_specs(number_format.scheme(), shape),
        modelopt.tensor_specs(scheme_of(name), shape),
    )
    whole = modelopt.encode(number_format, native, WeightSlice.whole(shape))
    for origin, extent in (
        ((0, 0), (128, 768)),
        ((128, 0), (1152, 768)),
        ((0, 256), (1280, 512)),
        ((256, 128), (2, 128)),
    ):
        if name == "fp8-block" and extent[0] == 2:
            continue
        part = WeightSlice(shape, origin, extent)
        encoded = modelopt.encode(number_format, cut(native, own, part), part)
        assert same(encoded, cut(whole, theirs, part))
        decoded = modelopt.decode(number_format, encoded, part)
        assert same(decoded, cut(native, own, part))


@pytest.mark.parametrize("name", ALGOS)
def test_the_number_format_is_found_again(name: str) -> None:
    """In config.json as in hf_quant_config.json, alone as in a mixture, by our own names of formats."""
    module = "model.layers.0.mlp.down_proj"
    for names in ((name,), (name, "fp8" if name != "fp8" else "nvfp4")):
        announcement = modelopt.quantization_files(announced(*names))
        side = json.loads(announcement.files["hf_quant_config.json"])
        for value in (announcement.config, side, json.loads(json.dumps(announcement.config))):
            scheme = modelopt.read(value).scheme_of(module)
            assert scheme is not None
            assert scheme.format == ALGOS[name]
            known = name.removesuffix("-64")
            if known in formats.names():
                found = formats.of_scheme(scheme)
                assert found.name == known
                assert found.group_size in (ALL[name].group_size, -1 if name == "int8-wo" else None)
                assert modelopt.refusal(found, (256, 256)) is None


def test_what_is_announced_for_one_format() -> None:
    announcement = modelopt.quantization_files(announced("nvfp4", kv_cache="fp8"))
    producer = {"name": "modelexport", "version": "1.2.3"}
    four = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    assert announcement.config == {
        "config_groups": {"group_0": {"input_activations": four, "weights": four, "targets": ["Linear"]}},
        "group_size": 16,
        "ignore": ["lm_head"],
        "quant_algo": "NVFP4",
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        "producer": producer,
        "quant_method": "modelopt",
    }
    inner = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head"]}
    side = json.loads(announcement.files["hf_quant_config.json"])
    assert side == {"producer": producer, "quantization": inner}
    for value in (announcement.config, side):
        read = modelopt.read(value)
        assert read.kv_cache_scheme == {"dynamic": False, "num_bits": 8, "type": "float"}
        assert read.ignores("lm_head")
        assert not read.ignores("model.layers.0.mlp.down_proj")


def test_what_is_announced_for_several_formats() -> None:
    announcement = modelopt.quantization_files(
        announced("int4-64", "fp8-static", kept=("lm_head", "model.layers.9.mlp.gate"))
    )
    layers = announcement.config["quantized_layers"]
    assert announcement.config["quant_algo"] == "MIXED_PRECISION"
    assert list(layers) == [f"model.layers.{n}.mlp.down_proj" for n in range(4)]
    awq = {"quant_algo": "W4A16_AWQ", "group_size": 64, "has_zero_point": False, "pre_quant_scale": True}
    assert layers["model.layers.0.mlp.down_proj"] == awq
    assert layers["model.layers.3.mlp.down_proj"] == {"quant_algo": "FP8"}
    assert announcement.config["config_groups"]["group_1"]["targets"] == [
        "model.layers.1.mlp.down_proj",
        "model.layers.3.mlp.down_proj",
    ]
    read = modelopt.read(json.loads(announcement.files["hf_quant_config.json"]))
    assert read.scheme_of("model.layers.9.mlp.gate") is None
    assert read.scheme_of("model.layers.4.mlp.down_proj") is None


def test_formats_that_differ_in_how_they_were_found_are_one() -> None:
    number_formats = formats.get("fp8"), formats.get("fp8", observer="amax", scale_dtype=torch.float32)
    announcement = modelopt.quantization_files(ModelQuantization({"a": number_formats[0], "b": number_formats[1]}, ()))
    assert announcement.config["quant_algo"] == "FP8_PER_CHANNEL_PER_TOKEN"


def test_other_checkpoints_configurations_are_read() -> None:
    """As published: wildcards, containers, lower case, weight-only NVFP4 by its groups, fused experts, INT8 caches."""
    nested = {
        "quantization": {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": "INT8",
            "group_size": 16,
            "exclude_modules": ["lm_head", "model.layers.0*", "vision_tower", "model.layers.1.mlp.gate", "*.router"],
        }
    }
    read = modelopt.read(nested)
    kept = ("lm_head", "model.layers.0.mlp.up_proj", "model.vision_tower.blocks.3.fc1", "model.layers.1.mlp.gate")
    assert all(read.ignores(name) for name in (*kept, "model.layers.5.router"))
    assert not any(read.ignores(name) for name in ("model.layers.1.mlp.gate_proj", "model.layers.2.mlp.gate", "vision"))
    assert read.kv_cache_scheme == {"dynamic": False, "num_bits": 8, "type": "int"}
    four = {"num_bits": 4, "type": "float", "group_size": 16}
    flat = {"quant_algo": "NVFP4", "config_groups": {"group_0": {"weights": four, "input_activations": None}}}
    assert modelopt.read(flat).schemes[0].format == "W4A16_NVFP4"
    mixed = {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"m.experts": {"quant_algo": "fp8_pb_wo"}}}
    scheme = modelopt.read(mixed).scheme_of("m.experts.7.up_proj")
    assert scheme is not None
    assert scheme.format == "fp8_pb_wo"
    assert modelopt.read(mixed).scheme_of("m.up_proj") is None
    config = read_quantization_config({"quantization_config": {"quant_method": "modelopt", "quant_algo": "fp8"}})
    assert isinstance(config, QuantizationConfig)
    assert config.schemes[0].describe() == "fp8 weights per tensor, fp8 activations per tensor (static)"
    assert modelopt.read({"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}).schemes == ()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"quant_algo": "FP9"}, "quant_algo 'FP9' is not known; did you mean 'FP8'"),
        ({"quant_algo": "W4A16_AWQ", "group_size": "64"}, "group_size '64'"),
        ({"quant_algo": "NVFP4", "group_size": 32}, "group_size 32; it has 16"),
        ({"quant_algo": "FP8", "ignore": "lm_head"}, "ignore must be a list"),
        ({"quant_algo": "FP8", "kv_cache_scheme": "FP7"}, "KV cache 'FP7'"),
        ({"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": "FP8"}}, "quantized_layers.a must be an object"),
    ],
)
def test_wrong_configurations_are_refused(value: dict, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        modelopt.read({"quant_method": "modelopt", **value})


def test_algorithms_that_are_only_read() -> None:
    """The tensors of formats.md that no number format of ours writes."""
    shape = (256, 384)
    for algo, suffixes, extra in (
        ("W4A8_AWQ", ["weight", "weight_scale", "weight_scale_2", "input_scale"], ["pre_quant_scale"]),
        ("NVFP4_AWQ", ["weight", "weight_scale", "weight_scale_2", "input_scale"], ["pre_quant_scale"]),
        ("W4A8_NVFP4_FP8", ["weight", "weight_scale", "weight_scale_2", "input_scale"], []),
        ("W4A8_MXFP4_FP8", ["weight", "weight_scale"], []),
        ("W8A8_SQ_PER_CHANNEL", ["weight", "weight_scale", "input_scale"], ["pre_quant_scale"]),
    ):
        (scheme,) = modelopt.read({"quant_algo": algo}).schemes
        assert list(modelopt.tensor_specs(scheme, shape)) == suffixes
        assert list(modelopt.extras(scheme, shape)) == extra
    (scheme,) = modelopt.read({"quant_algo": "W4A8_AWQ", "group_size": 64}).schemes
    promises = modelopt.tensor_specs(scheme, shape)
    assert (promises["weight"].shapes[0], promises["weight_scale"].shapes[0]) == ((128, 384), (256, 6))
    assert modelopt.extras(scheme, shape)["pre_quant_scale"].shapes == ((384,),)
    (of_32,) = modelopt.read({"quant_algo": "W4A8_NVFP4_FP8"}).schemes  # its config.json does not say so
    assert modelopt.tensor_specs(of_32, shape)["weight_scale"].shapes == ((256, 12),)
    with pytest.raises(CheckpointError, match="3 rows of 384"):
        modelopt.tensor_specs(scheme, (3, 384))


def test_inputs_that_are_multiplied_first_are_only_dequantised() -> None:
    """int4 with a pre_quant_scale: refused natively; without it, the columns are to be multiplied."""
    number_format, part = ALL["int4"], WeightSlice.whole((4, 128))
    stored = modelopt.encode(number_format, native_tensors(number_format, (4, 128)), part)
    assert modelopt.weight_multiplier(stored) is None
    scale = torch.rand(128).to(torch.bfloat16)
    with pytest.raises(CheckpointError, match=r"pre_quant_scale.*--quant none"):
        modelopt.decode(number_format, stored | {"pre_quant_scale": scale}, part)
    multiplier = modelopt.weight_multiplier(stored | {"pre_quant_scale": scale})
    assert multiplier is not None
    assert torch.equal(multiplier, scale)
    w4a8 = stored | {"weight_scale_2": torch.tensor(0.5), "input_scale": torch.tensor(2.0)}
    assert same(modelopt.decode(number_format, w4a8, part), modelopt.decode(number_format, stored, part))


@pytest.mark.parametrize(
    ("number_format", "shape", "words"),
    [
        (ALL["int8"], (64, 64), "no word for int8; .*choose --quant int8-static"),
        (ALL["w4a8"], (64, 128), "W4A8_AWQ has static activations"),
        (ALL["int4"], (63, 128), "two rows into a byte.*63 rows"),
        (ALL["int4"], (64, 192), "rows of 192 .* groups of 128"),
        (
            Numbers.of("int8-wo", "pack-quantized", arguments("int", 8, "group", group_size=128)),
            (64, 128),
            "no word for int8-wo in groups of 128",
        ),
        (
            Numbers.of("int4-asym", "pack-quantized", {**ALL["int4"].weight_arguments(), "symmetric": False}),
            (64, 128),
            "no word for int4-asym",
        ),
    ],
)
def test_what_it_cannot_hold_is_refused_with_what_to_type(
    number_format: Numbers, shape: tuple[int, int], words: str
) -> None:
    refusal = modelopt.refusal(number_format, shape)
    assert refusal is not None
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(refusal)
    assert "--format hf" in refusal
    if shape[0] == 64 and shape[1] != 192:
        with pytest.raises(PlanError, match="no word"):
            modelopt.quantization_files(ModelQuantization({"a": number_format}, ()))
        with pytest.raises(PlanError, match="no word"):
            modelopt.encode(number_format, {}, WeightSlice.whole(shape))


def test_lists_of_kept_modules_are_one_pattern() -> None:
    names = ("lm_head", *(f"model.layers.{n}.mlp.gate" for n in range(300)), "re:.*norm$", "a.b?c*")
    *same, pattern = with_modules_below(names)
    assert tuple(same) == names
    assert len(pattern) < 2000
    assert with_modules_below(()) == ()
    config = QuantizationConfig("modelopt", None, None, (), (*names, pattern), None)
    assert config.ignores("model.layers.299.mlp.gate.weight_part")
    assert config.ignores("model.lm_head")
    assert config.ignores("a.bxcd")
    assert not config.ignores("model.layers.300.mlp.gate")
    assert not config.ignores("model.layers.29.mlp.gate_proj")
