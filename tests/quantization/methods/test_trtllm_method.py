"""TensorRT-LLM's spelling: a case by hand, every number format there and back, parts, and what config.json says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modelexport.errors import CheckpointError, PlanError
from modelexport.quantization import formats
from modelexport.quantization.methods import of_format, read_quantization_config, trtllm
from modelexport.quantization.methods.base import ModelQuantization, Scheme, WeightSlice
from modelexport.system.dtypes import torch_dtype
from tests.quantization.methods._native import ALL, Numbers, arguments, cut, native_tensors, same

ALGOS = {
    "fp8-static": "FP8",
    "fp8": "FP8_PER_CHANNEL_PER_TOKEN",
    "int8-static": "W8A8_SQ_PER_CHANNEL",
    "int8": "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN",
    "int4": "W4A16_AWQ",
    "int4-64": "W4A16_AWQ",
    "nvfp4": "NVFP4",
}
STORED = {  # of a weight of 6 rows of 256, as TensorRT-LLM's classes and modelopt's export have them
    "fp8-static": {
        "weight": ("F8_E4M3", (6, 256)),
        "weights_scaling_factor": ("F32", (1,)),
        "activation_scaling_factor": ("F32", (1,)),
    },
    "fp8": {"weight": ("F8_E4M3", (6, 256)), "per_channel_scale": ("F32", (6,))},
    "int8-static": {
        "weight": ("I8", (6, 256)),
        "weights_scaling_factor": ("F32", (6,)),
        "activation_scaling_factor": ("F32", (1,)),
    },
    "int8": {"weight": ("I8", (6, 256)), "per_channel_scale": ("F32", (1, 6))},
    "int4": {"weight": ("I8", (3, 256)), "weights_scaling_factor": ("F32", (6, 2))},
    "int4-64": {"weight": ("I8", (3, 256)), "weights_scaling_factor": ("F32", (6, 4))},
    "nvfp4": {
        "weight": ("U8", (6, 128)),
        "weights_scaling_factor": ("F8_E4M3", (6, 16)),
        "weights_scaling_factor_2": ("F32", ()),
        "activation_scaling_factor": ("F32", ()),
    },
}


def announced(name: str, *, kv_cache: str | None = None) -> ModelQuantization:
    modules = [f"model.layers.{n}.mlp.down_proj" for n in range(2)]
    return ModelQuantization(dict.fromkeys(modules, ALL[name]), ("lm_head",), kv_cache, "1.2.3")


def scheme_of(name: str) -> Scheme:
    read = read_quantization_config({"quantization_config": trtllm.quantization_files(announced(name)).config})
    assert read is not None
    assert read.scheme_of("lm_head") is None
    scheme = read.scheme_of("model.layers.0.mlp.down_proj")
    assert scheme is not None
    return scheme


@pytest.mark.parametrize("name", ALGOS)
def test_what_is_stored(name: str) -> None:
    """Dtypes and shapes, of what is promised and of what is made; the promise outlives config.json."""
    number_format, shape = ALL[name], (6, 256)
    assert trtllm.refusal(number_format, shape) is None
    promises = trtllm.tensor_specs(scheme_of(name), shape)
    assert promises == trtllm.tensor_specs(number_format.scheme(), shape)
    assert {key: (p.dtypes[0], p.shapes[0]) for key, p in promises.items()} == STORED[name]
    encoded = trtllm.encode(number_format, native_tensors(number_format, shape), WeightSlice.whole(shape))
    assert {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in encoded.items()} == {
        key: (torch_dtype(dtype), extent) for key, (dtype, extent) in STORED[name].items()
    }


def test_nibbles_by_hand() -> None:
    """Rows -8..7 and 7..-8: the even one in the low halves, in two's complement, as signed bytes."""
    number_format = Numbers.of("int4", "pack-quantized", arguments("int", 4, "group", group_size=64))
    rows = [[-8, -7, -6, -5, -4, -3, -2, -1] * 8, [7, 6, 5, 4, 3, 2, 1, 0] * 8]
    words = [[sum((value + 8) << (4 * n) for n, value in enumerate(row[:8]))] * 8 for row in rows]
    native = {
        "weight_packed": torch.tensor(words).to(torch.int32),
        "weight_scale": torch.tensor([[0.5], [0.25]]),
        "weight_shape": torch.tensor([2, 64]),
    }
    encoded = trtllm.encode(number_format, native, WeightSlice.whole((2, 64)))
    pairs = [(upper & 15) << 4 | (lower & 15) for lower, upper in zip(*rows, strict=True)]
    assert encoded["weight"].tolist() == [[byte - 256 if byte > 127 else byte for byte in pairs]]
    assert encoded["weights_scaling_factor"].tolist() == [[0.5], [0.25]]
    assert same(trtllm.decode(number_format, encoded, WeightSlice.whole((2, 64))), native)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(ALGOS)), st.integers(1, 4), st.integers(1, 3), st.integers(0, 3), st.data())
def test_there_and_back_and_in_parts(name: str, pairs: int, groups: int, seed: int, data: st.DataObject) -> None:
    """decode(encode) is the identity; a part encoded by itself is that part of the whole."""
    number_format, shape = ALL[name], (2 * pairs, 128 * groups)
    native = native_tensors(number_format, shape, seed=seed)
    whole = trtllm.encode(number_format, native, WeightSlice.whole(shape))
    assert same(trtllm.decode(number_format, whole, WeightSlice.whole(shape)), native)
    along = data.draw(st.integers(0, 1))
    unit = (2, 128)[along]
    first = data.draw(st.integers(0, shape[along] // unit - 1)) * unit
    origin, extent = [0, 0], list(shape)
    origin[along], extent[along] = first, data.draw(st.integers(1, (shape[along] - first) // unit)) * unit
    part = WeightSlice(shape, (origin[0], origin[1]), (extent[0], extent[1]))
    from modelexport.quantization.methods import compressed_tensors

    own = cut(native, compressed_tensors.tensor_specs(number_format.scheme(), shape), part)
    promises = trtllm.tensor_specs(number_format.scheme(), shape)
    assert same(trtllm.encode(number_format, own, part), cut(whole, promises, part))


def test_real_weights_dequantise_to_the_same() -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    for quant, group in (("fp8-static", None), ("fp8", None), ("int8", None), ("nvfp4", None), ("int4", 64)):
        number_format = formats.get(quant, group_size=group, scale_dtype=torch.float32)
        inputs = 3.0 if number_format.has_static_inputs else None
        native = number_format.quantise(weight, inputs=inputs)
        part = WeightSlice.whole((64, 256))
        encoded = trtllm.encode(number_format, native, part)
        assert same(trtllm.decode(number_format, encoded, part), native), quant
        if quant == "fp8-static":  # amax / 448, in float32
            amax = weight.float().abs().max()
            assert encoded["weights_scaling_factor"].item() == (amax / 448).item()
            assert encoded["activation_scaling_factor"].item() == (torch.tensor(3.0) / 448).item()
        if quant == "nvfp4":
            amax = weight.float().abs().max()
            assert encoded["weights_scaling_factor_2"].item() == (amax / torch.tensor(6.0 * 448)).item()


def test_what_config_json_says() -> None:
    assert of_format("trtllm") is trtllm
    config = trtllm.quantization_files(announced("int4-64", kv_cache="fp8")).config
    assert config == {
        "quant_method": "trtllm",
        "quant_algo": "W4A16_AWQ",
        "kv_cache_quant_algo": "FP8",
        "group_size": 64,
        "has_zero_point": False,
        "pre_quant_scale": False,
        "ignore": ["lm_head"],
    }
    read = trtllm.read(config)
    assert read.kv_cache_scheme == {"dynamic": False, "num_bits": 8, "type": "float"}
    assert read.schemes[0].weights["group_size"] == 64
    cache = trtllm.quantization_files(ModelQuantization({}, ("lm_head",), "fp8")).config
    assert trtllm.read(cache).schemes == ()
    for name, algo in ALGOS.items():
        assert trtllm.quantization_files(announced(name)).config["quant_algo"] == algo
        found = formats.of_scheme(scheme_of(name))
        assert found.name == name.removesuffix("-64")


def test_what_it_has_no_word_for() -> None:
    refused = {name: trtllm.refusal(number_format, (256, 256)) for name, number_format in ALL.items()}
    assert {name for name, why in refused.items() if why is None} == set(ALGOS)
    assert "itself, when it builds from a checkpoint of --quant none" in str(refused["int8-wo"])
    assert "choose --quant nvfp4, --format hf" in str(refused["nvfp4-wo"])
    small = formats.get("int4", group_size=32)
    assert "int4 in groups of 32; choose --format hf" in str(trtllm.refusal(small, (256, 256)))
    assert "5 rows of 128 are not in pairs" in str(trtllm.refusal(formats.get("int4"), (5, 128)))
    with pytest.raises(PlanError, match="no word for mxfp8"):
        trtllm.encode(ALL["mxfp8"], {}, WeightSlice.whole((2, 64)))
    several = ModelQuantization({"a": ALL["fp8"], "b": ALL["int8"]}, ())
    with pytest.raises(PlanError, match=r"several number formats \(fp8: a, ...; int8: b, ...\).*MIXED_PRECISION"):
        trtllm.quantization_files(several)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ' is not read; did you mean"),
        ({"has_zero_point": True}, r"FP8 with has_zero_point \(zero points\) is not read"),
        ({"quant_algo": "W4A16_AWQ", "pre_quant_scale": True}, "W4A16_AWQ with pre_quant_scale"),
        ({"quant_algo": "W4A16_AWQ", "group_size": "64"}, "group_size '64'; a number of columns is needed"),
        ({"kv_cache_quant_algo": "NVFP4"}, "kv_cache_quant_algo 'NVFP4' is not read; FP8 and INT8 are"),
        ({"ignore": 3}, "ignore must be a list of names"),
    ],
)
def test_a_config_that_is_not_read(change: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        trtllm.read({"quant_method": "trtllm", "quant_algo": "FP8", **change})


def test_a_scale_without_reciprocal_is_refused() -> None:
    number_format, part = ALL["nvfp4"], WeightSlice.whole((2, 16))
    encoded = trtllm.encode(number_format, native_tensors(number_format, (2, 16)), part)
    with pytest.raises(CheckpointError, match=r"weight_scale_2 is -1: it has no reciprocal"):
        trtllm.decode(number_format, {**encoded, "weights_scaling_factor_2": torch.tensor(-1.0)}, part)


def test_older_files_have_the_bytes_of_fp8_as_int8() -> None:
    number_format, part = ALL["fp8"], WeightSlice.whole((2, 16))
    native = native_tensors(number_format, (2, 16))
    encoded = trtllm.encode(number_format, native, part)
    encoded["weight"] = encoded["weight"].view(torch.int8)
    assert same(trtllm.decode(number_format, encoded, part), native)
