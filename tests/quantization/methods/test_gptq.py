"""GPTQ's layout, against a reading of its description one number at a time."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from modelexport.errors import CheckpointError, PlanError
from modelexport.quantization import formats, methods
from modelexport.quantization.methods import gptq
from modelexport.quantization.methods.base import ModelQuantization, Scheme, WeightSlice
from tests.quantization.methods._integers import Integers, number, number_format, same

CASES = [(8, 32, 4, True, 32), (24, 96, 4, False, 32), (16, 104, 4, False, -1), (8, 128, 8, True, 64)]
CASES += [(12, 64, 8, False, 32), (4, 36, 8, True, -1)]
BASE = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}


def read_back(tensors: dict[str, Tensor], bits: int, minus_one: bool) -> Tensor:
    """The weight that GPTQ tensors stand for, element by element."""
    qweight, qzeros, scales = tensors["qweight"].tolist(), tensors["qzeros"].tolist(), tensors["scales"].tolist()
    groups, per_word = tensors["g_idx"].tolist(), 32 // bits
    out = torch.empty(len(scales[0]), len(groups), dtype=torch.float64)
    for column, group in enumerate(groups):
        for row in range(len(scales[0])):
            zero = number(qzeros[group][row // per_word], row % per_word, bits)
            zero = (zero + 1) % 2**bits if minus_one else zero
            code = number(qweight[column // per_word][row], column % per_word, bits)
            out[row, column] = (code - zero) * scales[group][row]
    return out.float()


def scheme_of(weight: Integers, **changes: object) -> Scheme:
    config = gptq.quantization_files(ModelQuantization({"m": weight.format}, [])).config
    return gptq.read({**config, **changes}).schemes[-1]


@pytest.mark.parametrize(("rows", "cols", "bits", "symmetric", "group"), CASES)
def test_encoded_tensors_mean_the_same_weight_and_decode_to_the_same_bytes(
    rows: int, cols: int, bits: int, symmetric: bool, group: int
) -> None:
    weight = Integers.random(rows, cols, bits=bits, symmetric=symmetric, group=group)
    part, native = WeightSlice.whole((rows, cols)), weight.native()
    encoded = gptq.encode(weight.format, native, part)
    scheme = scheme_of(weight)
    assert scheme.format == ("gptq" if symmetric else "gptq_v2")
    assert torch.equal(read_back(encoded, bits, minus_one=scheme.format == "gptq"), weight.values())
    assert same(gptq.decode(weight.format, encoded, part), native)
    assert scheme.method == "gptq"
    assert torch.equal(gptq.dequantise(weight.format, encoded, part), weight.values())
    promises = gptq.tensor_specs(scheme, (rows, cols))
    assert {k: (tuple(v.shape),) for k, v in encoded.items()} == {k: p.shapes for k, p in promises.items()}


def test_words_by_hand() -> None:
    """Input channels 0..7 of one output channel hold 0..7; a symmetric zero point of 8 is stored as 7."""
    native = {
        "weight_packed": torch.tensor([[0x76543210]] * 8, dtype=torch.int32),
        "weight_scale": torch.full((8, 1), 0.5, dtype=torch.float16),
        "weight_shape": torch.tensor([8, 8]),
    }
    encoded = gptq.encode(number_format(4, True, -1), native, WeightSlice.whole((8, 8)))
    assert encoded["qweight"].tolist() == [[0x76543210] * 8]
    assert encoded["qzeros"].tolist() == [[0x77777777]]
    assert encoded["g_idx"].tolist() == [0] * 8


def test_zero_points_minus_one_are_read_as_well() -> None:
    """v1 and asymmetric: all sixteen zero points, 0 stored as 15, no number carried into its neighbour."""
    weight = Integers.random(16, 32, symmetric=False, group=32)
    weight.zeros[:, 0] = np.arange(16)
    part, native = WeightSlice.whole((16, 32)), weight.native()
    encoded = gptq.encode(weight.format, native, part)
    encoded["qzeros"] = torch.tensor([[0x6543210F, 0xEDCBA987 - 2**32]], dtype=torch.int32)
    scheme = scheme_of(weight, checkpoint_format="gptq")
    assert scheme.method == "gptq_v1"
    assert torch.equal(read_back(encoded, 4, minus_one=True), weight.values())
    assert same(methods.of_method(scheme.method).decode(weight.format, encoded, part), native)
    assert torch.equal(methods.of_method("gptq_v1").dequantise(weight.format, encoded, part), weight.values())


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("cuts", "dim"), [((0, 8, 32), 0), ((0, 64, 96), 1)])
def test_parts_give_the_parts_of_the_whole(cuts: tuple[int, ...], dim: int, symmetric: bool) -> None:
    shape = (32, 96)
    weight = Integers.random(*shape, symmetric=symmetric, group=32)
    whole = gptq.encode(weight.format, weight.native(), WeightSlice.whole(shape))
    scheme = scheme_of(weight)
    pieces: dict[str, list[Tensor]] = {suffix: [] for suffix in whole}
    for start, stop in pairwise(cuts):
        rows, cols = (slice(start, stop), slice(None)) if dim == 0 else (slice(None), slice(start, stop))
        groups = slice(None) if dim == 0 else slice(start // 32, stop // 32)
        own = Integers(
            4,
            symmetric,
            32,
            weight.codes[rows, cols],
            weight.zeros[rows, groups],
            weight.scales[rows, groups],
            weight.g_idx[cols],
        )
        extent = own.codes.shape
        part = WeightSlice(shape, (start, 0) if dim == 0 else (0, start), (extent[0], extent[1]))
        native = {**own.native(), "weight_shape": torch.tensor(shape)}
        encoded = gptq.encode(weight.format, native, part)
        assert same(gptq.decode(weight.format, encoded, part), native)
        assert torch.equal(gptq.dequantise(weight.format, encoded, part), weight.values()[rows, cols])
        for suffix, tensor in encoded.items():
            pieces[suffix].append(tensor)
    for suffix, promise in gptq.tensor_specs(scheme, shape).items():
        along = [d for d, axis in enumerate(promise.axes) if axis is not None and axis[0] == dim]
        joined = torch.cat(pieces[suffix], along[0]) if along else pieces[suffix][0]
        assert torch.equal(joined, whole[suffix])


def act_ordered(symmetric: bool, layout: str) -> tuple[Integers, dict[str, Tensor], Scheme]:
    """A weight whose columns were dealt to its groups at random, 32 to each, as GPTQ's tensors."""
    weight = Integers.random(16, 96, symmetric=symmetric, group=32)
    if layout == "gptq":
        weight.zeros = weight.zeros.clip(1)  # 0 minus one borrows from its neighbours
    encoded = gptq.encode(weight.format, weight.native(), WeightSlice.whole((16, 96)))
    if layout == "gptq" and not symmetric:
        encoded["qzeros"] = encoded["qzeros"] - 0x11111111  # one less in each of the eight
    weight.g_idx = np.random.default_rng(1).permutation(weight.g_idx)
    encoded["g_idx"] = torch.from_numpy(weight.g_idx).to(torch.int32)
    return weight, encoded, scheme_of(weight, desc_act=True, checkpoint_format=layout)


@pytest.mark.parametrize("layout", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_act_order_is_dequantised_exactly_and_not_decoded(symmetric: bool, layout: str) -> None:
    weight, encoded, scheme = act_ordered(symmetric, layout)
    method = methods.of_method(scheme.method)
    assert {"gptq": "gptq_v1"}.get(layout, layout) == method.METHOD
    part = WeightSlice.whole((16, 96))
    assert torch.equal(method.dequantise(weight.format, encoded, part), weight.values())  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match="--quant none dequantises"):
        method.decode(weight.format, encoded, part)


def test_a_part_of_act_ordered_columns_needs_all_scales() -> None:
    weight, encoded, scheme = act_ordered(False, "gptq_v2")
    promises = methods.tensor_specs(scheme, (16, 96))
    cut = {suffix: next((d for d, a in enumerate(p.axes) if a and a[0] == 1), None) for suffix, p in promises.items()}
    assert cut == {"qweight": 0, "qzeros": None, "scales": None, "g_idx": 0}
    tensors = {**encoded, "qweight": encoded["qweight"][5:9], "g_idx": encoded["g_idx"][40:72]}
    part = WeightSlice((16, 96), (0, 40), (16, 32))
    assert torch.equal(gptq.dequantise(weight.format, tensors, part), weight.values()[:, 40:72])
    with pytest.raises(CheckpointError, match="scales of 2"):
        gptq.dequantise(weight.format, {**encoded, "scales": encoded["scales"][:2]}, WeightSlice.whole((16, 96)))


def test_symmetric_gptq_v2_is_read_by_the_method_that_decodes_it() -> None:
    """Copied as it is, it would be announced as "gptq", and its readers would add one to its zero points."""
    weight = Integers.random(8, 32, symmetric=True)
    encoded = gptq.encode(weight.format, weight.native(), WeightSlice.whole((8, 32)))
    encoded["qzeros"].fill_(0x88888888 - 2**32)
    scheme = scheme_of(weight, checkpoint_format="gptq_v2")
    assert scheme.method == "gptq_v2"
    decoded = methods.of_method(scheme.method).decode(weight.format, encoded, WeightSlice.whole((8, 32)))
    assert same(decoded, weight.native())


def test_act_order_in_name_only_is_decoded() -> None:
    """desc_act with columns that are in order after all, a part of them with the scales of all groups."""
    weight = Integers.random(16, 96, group=32)
    whole = gptq.encode(weight.format, weight.native(), WeightSlice.whole((16, 96)))
    part = {**whole, "qweight": whole["qweight"][4:8], "g_idx": whole["g_idx"][32:64]}
    found = gptq.decode(weight.format, part, WeightSlice((16, 96), (0, 32), (16, 32)))
    assert torch.equal(weight.format.dequantise(found), weight.values()[:, 32:64])


def test_static_groups_are_in_order() -> None:
    scheme = gptq.read({**BASE, "desc_act": True, "static_groups": True}).schemes[0]
    assert scheme.weights["actorder"] == "weight"
    assert gptq.tensor_specs(scheme, (8, 64))["scales"].axes == ((1, 32), (0, 1))


@pytest.mark.parametrize("group", [32, 128, -1])
@pytest.mark.parametrize(("bits", "symmetric"), [(4, True), (4, False), (8, True), (8, False)])
def test_what_is_announced_is_read(bits: int, symmetric: bool, group: int) -> None:
    used = number_format(bits, symmetric, group)
    announced = ModelQuantization({"model.layers.0.mlp.up_proj": used}, ["lm_head", "model.layers.0.mlp.down_proj"])
    read = methods.read_quantization_config({"quantization_config": gptq.quantization_files(announced).config})
    assert read is not None
    assert read.scheme_of("lm_head") is None
    assert read.scheme_of("model.layers.0.mlp.down_proj") is None
    scheme = read.scheme_of("model.layers.0.mlp.up_proj")
    assert scheme is not None
    assert (formats.of_scheme(scheme), scheme.method) == (used, "gptq")


def test_several_formats_are_rules_by_name_that_vllm_finds_too() -> None:
    four, eight = number_format(4, True, 32), number_format(8, True, 64)
    layers = [f"model.layers.{i}" for i in (1, 10)]
    given = {f"{layer}.self_attn.{name}": four for layer in layers for name in ("q_proj", "k_proj", "o_proj")}
    given |= {f"{layers[0]}.self_attn.{name}": eight for name in ("q_proj", "k_proj")}
    given |= {f"{layers[1]}.mlp.experts.{e}.w1": eight for e in range(2)}
    config = gptq.quantization_files(ModelQuantization(given, ["lm_head"])).config
    read = gptq.read(config)
    for name, used in given.items():
        scheme = read.scheme_of(name)
        assert scheme is not None
        assert formats.of_scheme(scheme) == used
    for name in ("model.layers.1.self_attn.qkv_proj", "model.layers.10.mlp.experts"):  # as vLLM fuses them
        assert read.scheme_of(name).weights["num_bits"] == 8  # type: ignore[union-attr]
    with pytest.raises(PlanError, match="int4, int4-asym are asked for"):
        gptq.quantization_files(ModelQuantization({"a": four, "b": number_format(4, False, 32)}, []))


def test_rules_of_gptqmodel_are_read_in_their_order() -> None:
    rules = {
        r"+:.*layers\.[23]\..*down_proj": {"bits": 8, "group_size": -1, "damp_percent": 0.1},
        r"-:.*layers\.2\.": {},
        r".*\.o_proj": {"sym": False},
    }
    read = gptq.read({**BASE, "checkpoint_format": "gptq_v2", "dynamic": rules})
    down = read.scheme_of("model.layers.2.mlp.down_proj")  # the first rule that matches, not the one that keeps it
    assert down is not None
    assert (down.bits, down.weights["strategy"]) == (8, "channel")
    assert read.scheme_of("model.layers.2.mlp.up_proj") is None
    assert read.scheme_of("model.layers.1.self_attn.o_proj").symmetric is False  # type: ignore[union-attr]
    assert read.scheme_of("model.layers.1.self_attn.q_proj") is read.schemes[-1]


def test_modules_in_block_are_the_only_ones() -> None:
    read = gptq.read({**BASE, "modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.up_proj"]]})
    assert read.scheme_of("model.layers.0.mlp.up_proj") is read.schemes[-1]
    assert read.scheme_of("model.layers.0.mlp.down_proj") is None
    assert gptq.read({**BASE, "lm_head": True}).scheme_of("lm_head") is not None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bits": 3}, r"gptq with 3 bits \(gptq\); 4 and 8 are known"),
        ({"dynamic": {"+:x": {"bits": 2}}}, r"gptq with 2 bits \(\+:x\)"),
        ({"dynamic": {"-:(": {}}}, "is no regular expression"),
        ({"dynamic": [1]}, "dynamic must be an object"),
        ({"checkpoint_format": "marlin"}, "'marlin' is not known"),
        ({"pack_dtype": "int16"}, "pack_dtype is 'int16'"),
        ({"group_size": 0}, "group_size must be a size or -1, is 0"),
        ({"modules_in_block_to_quantize": "q_proj"}, "must be a list"),
    ],
)
def test_other_layouts_are_refused(changes: dict, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        gptq.read({**BASE, **changes})


def test_symmetric_tensors_with_other_zero_points_are_refused() -> None:
    weight = Integers.random(8, 32)
    encoded = gptq.encode(weight.format, weight.native(), WeightSlice.whole((8, 32)))
    with pytest.raises(CheckpointError, match="other zero points than 8"):
        gptq.decode(number_format(4, True, 32), encoded, WeightSlice.whole((8, 32)))


def test_what_it_cannot_hold_is_refused_with_what_to_type() -> None:
    assert gptq.refusal(number_format(8, False, 32), (64, 64)) is None
    assert gptq.refusal(formats.get("none"), (63, 64)) is None
    for name in ("fp8", "int8"):
        assert "--format hf" in (gptq.refusal(formats.get(name), (64, 64)) or "")
    assert "out_features 1003" in (gptq.refusal(number_format(4, True, 32), (1003, 64)) or "")
    assert "in_features 100" in (gptq.refusal(number_format(4, True, -1), (64, 100)) or "")
    with pytest.raises(CheckpointError, match="1003 outputs"):
        gptq.tensor_specs(gptq.read(BASE).schemes[0], (1003, 64))
    with pytest.raises(CheckpointError, match="written 'gptq'"):
        methods.read_quantization_config({"quantization_config": {**BASE, "quant_method": "gptq_v1"}})
