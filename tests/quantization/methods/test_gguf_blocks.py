"""GGUF's blocks, read byte by byte as ggml's description has them, against the number formats' own values."""

from __future__ import annotations

import struct
from typing import Any

import pytest
import torch

from modelexport.checkpoints.gguf.file import Entry, type_of
from modelexport.errors import CheckpointError
from modelexport.quantization import formats
from modelexport.quantization.formats.base import NumberFormat
from modelexport.quantization.ggml_layouts import LAYOUTS
from modelexport.quantization.methods import gguf, of_method, read_quantization_config, refusal
from modelexport.quantization.methods.base import ModelQuantization, WeightSlice

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
QUANTS = {"Q8_0": "int8-wo", "Q4_0": "int4", "MXFP4": "mxfp4-wo", "NVFP4": "nvfp4-wo"}
BITS = {"Q8_0": 8, "Q4_0": 4, "MXFP4": 4, "NVFP4": 4}
WIDTH = {"Q8_0": 32, "Q4_0": 32, "MXFP4": 32, "NVFP4": 64}


def number_format(kind: str) -> NumberFormat:
    size = None if "FP4" in kind else 32
    return formats.get(QUANTS[kind], group_size=size, scale_dtype=torch.float16)


def native(kind: str, rows: int, cols: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Any codes at all, and scales of every size."""
    generator = torch.Generator().manual_seed(seed)
    octets = torch.randint(0, 256, (rows, cols * BITS[kind] // 8), generator=generator, dtype=torch.uint8)
    if kind == "MXFP4":
        exponents = torch.randint(0, 255, (rows, cols // 32), generator=generator, dtype=torch.uint8)
        return {"weight_packed": octets, "weight_scale": exponents}
    if kind == "NVFP4":  # a power of two, by which no product is rounded
        local = torch.randint(0, 127, (rows, cols // 16), generator=generator, dtype=torch.uint8)
        factor = torch.tensor([2.0**10])
        return {
            "weight_packed": octets,
            "weight_scale": local.view(torch.float8_e4m3fn),
            "weight_global_scale": factor,
        }
    scales = torch.randn(rows, cols // 32, generator=generator).mul(0.01).to(torch.float16)
    return {
        "weight_packed": octets.view(torch.int32),
        "weight_scale": scales,
        "weight_shape": torch.tensor([rows, cols]),
    }


def e4m3(code: int) -> float:
    exponent, mantissa = code >> 3, code & 7
    return 2.0**-9 * mantissa if exponent == 0 else 2.0 ** (exponent - 7) * (1 + mantissa / 8)


def values(kind: str, block: bytes) -> list[float]:
    """The numbers of a block; of NVFP4 before they are multiplied by the one beside it."""
    if kind == "NVFP4":
        found = []
        for number, scale in enumerate(block[:4]):
            codes = block[4 + 8 * number : 12 + 8 * number]
            both = [byte & 15 for byte in codes] + [byte >> 4 for byte in codes]
            found += [(-1 if code & 8 else 1) * E2M1[code & 7] * e4m3(scale) for code in both]
        return found
    if kind == "Q8_0":
        (d,) = struct.unpack_from("<e", block)
        return [d * q for q in struct.unpack_from("<32b", block, 2)]
    codes = block[-16:]
    numbers = [byte & 15 for byte in codes] + [byte >> 4 for byte in codes]
    if kind == "MXFP4":
        return [(-1 if code & 8 else 1) * E2M1[code & 7] * 2.0 ** (block[0] - 127) for code in numbers]
    (d,) = struct.unpack_from("<e", block)
    return [(code - 8) * d for code in numbers]


@pytest.mark.parametrize("kind", QUANTS)
def test_a_block_says_what_the_number_format_does(kind: str) -> None:
    rows, cols = 5, 3 * WIDTH[kind]
    form, tensors = number_format(kind), native(kind, rows, cols)
    stored = gguf.encode(form, tensors, WeightSlice.whole((rows, cols)))
    weight = stored["weight"]
    assert weight.dtype == torch.uint8
    assert weight.shape == (rows, 3, gguf.BLOCK_BYTES[kind])
    blocks = [values(kind, bytes(block.tolist())) for block in weight.view(-1, weight.shape[-1])]
    expected = torch.tensor(blocks, dtype=torch.float64).view(rows, cols) * float(stored.get("scale", 1.0))
    assert torch.equal(form.dequantise(tensors), expected.float())


@pytest.mark.parametrize("kind", QUANTS)
@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (16, 5), (11, 2)])
def test_there_and_back(kind: str, rows: int, blocks: int) -> None:
    cols = blocks * WIDTH[kind]
    form, tensors, part = number_format(kind), native(kind, rows, cols, seed=1), WeightSlice.whole((rows, cols))
    back = gguf.decode(form, gguf.encode(form, tensors, part), part)
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype, name
        assert torch.equal(back[name], tensor), name


@pytest.mark.parametrize("kind", QUANTS)
def test_parts_make_up_the_whole(kind: str) -> None:
    """A rank that has columns 64 to 127 of rows 3 to 9 writes just these blocks."""
    form, tensors = number_format(kind), native(kind, 12, 192, seed=2)
    whole = gguf.encode(form, tensors, WeightSlice.whole((12, 192)))["weight"]
    part = WeightSlice((12, 192), (3, 64), (7, 64))
    packed, scales = tensors["weight_packed"], tensors["weight_scale"]
    each = packed.shape[1] // 3
    first, last = 64 * scales.shape[1] // 192, 128 * scales.shape[1] // 192
    own = {**tensors, "weight_packed": packed[3:10, each : 2 * each], "weight_scale": scales[3:10, first:last]}
    written = gguf.encode(form, own, part)
    blocks = slice(64 // WIDTH[kind], 128 // WIDTH[kind])
    assert torch.equal(written["weight"], whole[3:10, blocks])
    back = gguf.decode(form, {**written, "weight": whole[3:10, blocks]}, part)
    assert torch.equal(back["weight_packed"], own["weight_packed"])
    assert torch.equal(back["weight_scale"], own["weight_scale"])


@pytest.mark.parametrize("quant", QUANTS.values())
def test_a_weight_quantised_for_it_goes_in(quant: str) -> None:
    """Zeros, the largest and the smallest numbers among them: float16 holds every scale."""
    weight = torch.randn(8, 128, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    weight[0] = 0
    weight[1, :32] = 1e-8
    weight[2, 40] = 3000
    form = formats.get(quant, group_size=None if "fp4" in quant else 32, scale_dtype=torch.float16)
    tensors, part = form.quantise(weight), WeightSlice.whole((8, 128))
    stored = gguf.encode(form, tensors, part)
    assert {name: (str(t.dtype), tuple(t.shape)) for name, t in stored.items()} == {
        name: ("torch.uint8" if name == "weight" else "torch.float32", promise.shapes[0])
        for name, promise in gguf.tensor_specs(form.scheme("gguf"), (8, 128)).items()
    }
    assert torch.equal(form.dequantise(gguf.decode(form, stored, part)), form.dequantise(tensors))


def test_negative_scales_are_read() -> None:
    """llama.cpp lays the largest magnitude on -8: its scales have either sign."""
    block = bytes(struct.pack("<e", -0.25)) + bytes(range(16, 32))
    form = number_format("Q4_0")
    tensors = gguf.decode(
        form, {"weight": torch.tensor([[list(block)]], dtype=torch.uint8)}, WeightSlice.whole((1, 32))
    )
    assert form.dequantise(tensors)[0].tolist() == values("Q4_0", block)


def test_what_float16_does_not_hold_is_refused() -> None:
    part = WeightSlice.whole((1, 64))
    tensors = native("Q4_0", 1, 64)
    tensors["weight_scale"] = torch.tensor([[1.0, 2.0**-30]], dtype=torch.bfloat16)
    with pytest.raises(CheckpointError, match=r"1 of 2 blocks have a scale that is no float16 number.*9\.3"):
        gguf.encode(number_format("Q4_0"), tensors, part)
    tensors = native("MXFP4", 1, 64)
    tensors["weight_scale"][0, 1] = 255
    with pytest.raises(CheckpointError, match="exponent is 255"):
        gguf.encode(number_format("MXFP4"), tensors, part)


def test_scales_that_nvfp4_s_blocks_have_no_code_for_are_refused() -> None:
    """The sign is not among them: ggml reads -1 as 1."""
    form, part, tensors = number_format("NVFP4"), WeightSlice.whole((1, 64)), native("NVFP4", 1, 64)
    tensors["weight_scale"] = torch.tensor([[1.0, -0.0, -1.0, torch.nan]]).to(torch.float8_e4m3fn)
    with pytest.raises(CheckpointError, match="2 of 4 scales of 16 weights are negative or NaN"):
        gguf.encode(form, tensors, part)
    tensors["weight_scale"] = torch.tensor([[1.0, -0.0, 2.0, 448.0]]).to(torch.float8_e4m3fn)
    stored = gguf.encode(form, tensors, part)
    assert stored["weight"][0, 0, :4].tolist() == [0x38, 0, 0x40, 0x7E]
    stored["weight"][0, 0, :4] = torch.tensor([0xB8, 0x7F, 0, 0])
    assert gguf.decode(form, stored, part)["weight_scale"].float().tolist() == [[1.0, 0.0, 0.0, 0.0]]
    stored["weight"][0, 0, 3] = 255
    with pytest.raises(CheckpointError, match="is 255: 480 to GGUF"):
        gguf.decode(form, stored, part)


def test_blocks_of_nvfp4_without_a_scale_beside_them_are_what_they_say() -> None:
    (scheme,) = gguf.read({"types": {gguf.UNSCALED: ["Linear"]}}).schemes
    assert gguf.tensor_specs(scheme, (2, 64)).keys() == {"weight"}
    form, part, tensors = number_format("NVFP4"), WeightSlice.whole((2, 64)), native("NVFP4", 2, 64)
    assert formats.of_scheme(scheme).name == form.name
    weight = gguf.encode(form, tensors, part)["weight"]
    found = form.dequantise(gguf.decode(form, {"weight": weight}, part))
    assert found.tolist() == [values("NVFP4", bytes(row[0].tolist())) for row in weight]


def test_an_embedding_has_no_scale_beside_its_blocks() -> None:
    assert "looks rows up in blocks of NVFP4 without their scale" in str(gguf.embedding_refusal(number_format("NVFP4")))
    assert gguf.embedding_refusal(number_format("MXFP4")) is None


@pytest.mark.parametrize(
    ("quant", "group", "why"),
    [
        ("int4", 128, "no blocks for int4 weights per group of 128; choose a block type of llama.cpp (--quant q4_k"),
        ("int4-asym", 32, "no blocks for int4 asymmetric weights per group of 32"),
        ("fp8", None, "no blocks for fp8 weights per channel"),
        ("mxfp4", None, "no blocks for fp4 weights per group of 32, fp4 activations"),
        ("nvfp4", None, "no blocks for fp4 weights per group of 16, fp4 activations"),
        ("mxfp8", None, "no blocks for fp8 weights"),
    ],
)
def test_what_has_no_blocks_is_refused_before(quant: str, group: int | None, why: str) -> None:
    refused = gguf.refusal(formats.get(quant, group_size=group), (64, 128))
    assert refused is not None
    assert why in refused
    assert "int8-wo --group-size 32" in refused


@pytest.mark.parametrize("kind", QUANTS)
def test_what_has_blocks_is_not_refused(kind: str) -> None:
    assert gguf.refusal(number_format(kind), (64, 128)) is None
    assert "72 input features" in str(gguf.refusal(number_format(kind), (64, 72)))
    width = WIDTH[kind]
    promise = gguf.tensor_specs(number_format(kind).scheme("gguf"), (64, 128))["weight"]
    expected = ((64, 128 // width, gguf.BLOCK_BYTES[kind]),)
    assert (promise.shapes, promise.axes) == (expected, ((0, 1), (1, width), None))


def announced(quants: dict[str, str]) -> dict[str, Any]:
    forms = {module: number_format(kind) for module, kind in quants.items()}
    return gguf.quantization_files(ModelQuantization(forms, ["lm_head"])).config


def test_config_json_says_the_types() -> None:
    one = announced({"a.q": "Q4_0", "a.k": "Q4_0"})
    assert one == {"quant_method": "gguf", "types": {"Q4_0": ["Linear"]}, "ignore": ["lm_head"]}
    mixed = announced({"a.q": "Q4_0", "a.k": "Q8_0", "a.v": "MXFP4", "a.o": "Q4_0"})
    assert mixed["types"] == {"Q4_0": ["Linear"], "Q8_0": ["a.k"], "MXFP4": ["a.v"]}
    read = read_quantization_config({"quantization_config": mixed})
    assert read is not None
    found = {module: read.scheme_of(module) for module in ("a.q", "a.k", "a.v", "lm_head", "a.other")}
    names = {module: scheme and formats.of_scheme(scheme).name for module, scheme in found.items()}
    assert names == {"a.q": "int4", "a.k": "int8-wo", "a.v": "mxfp4-wo", "lm_head": None, "a.other": "int4"}
    with pytest.raises(CheckpointError, match="no block type 'IQ1_S' here"):
        gguf.read({"types": {"IQ1_S": ["Linear"]}})


def test_blocks_are_announced_by_their_number_formats() -> None:
    """llama.cpp's own Q4_0 is read as the integers of other engines, and a file's Q4_K as q4-k: so is what is written
    as q4-0 told from the former."""
    forms = {"a.q": formats.get("q4_k"), "a.k": formats.get("q4_0"), "a.v": number_format("Q4_0")}
    types = gguf.quantization_files(ModelQuantization(forms, [])).config["types"]
    assert types == {"q4-k": ["Linear"], "q4-0": ["a.k"], "Q4_0": ["a.v"]}
    schemes = gguf.read({"types": {**types, "Q4_K": ["a.o"]}}).schemes
    assert [formats.of_scheme(scheme).name for scheme in schemes] == ["q4-k", "q4-0", "int4", "q4-k"]


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "Q4_0"])
def test_a_file_tells_block_types_by_their_shapes(name: str) -> None:
    """Q4_0 and IQ4_NL have as many bytes."""
    form, shape = formats.get(LAYOUTS[name].number_format), (3, 512)
    blocks = form.quantise(torch.randn(shape, generator=torch.Generator().manual_seed(4)))
    stored = gguf.encode(form, blocks, WeightSlice.whole(shape))["weight"]
    (promise,) = gguf.tensor_specs(form.scheme("gguf"), shape).values()
    assert tuple(stored.shape) == promise.shapes[0]
    assert type_of("U8", stored.shape) == name
    assert Entry("a", "U8", tuple(stored.shape)).dims == (512, 3)
    back = gguf.decode(form, {"weight": stored}, WeightSlice.whole(shape))
    assert torch.equal(back["weight"], blocks["weight"])


@pytest.mark.parametrize("method", ["compressed-tensors", "awq", "gptq", "modelopt", "fp8", "trtllm"])
def test_other_checkpoints_do_not_hold_blocks(method: str) -> None:
    found = refusal(of_method(method), formats.get("q6_k"), (256, 256))
    assert found is not None
    assert "choose --format gguf" in found
