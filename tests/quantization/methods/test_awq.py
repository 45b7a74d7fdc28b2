"""AWQ's layout, against a reading of its description one nibble at a time."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from modelexport.errors import CheckpointError, PlanError
from modelexport.quantization import formats, methods
from modelexport.quantization.methods import awq
from modelexport.quantization.methods.base import ModelQuantization, Scheme, WeightSlice
from tests.quantization.methods._integers import Integers, number, number_format, same

PLACE_OF_CHANNEL = {0: 0, 2: 1, 4: 2, 6: 3, 1: 4, 3: 5, 5: 6, 7: 7}  # within a word
CASES = [(8, 32, True, 32), (24, 96, False, 32), (40, 128, False, 64), (16, 100, False, -1), (8, 12, True, -1)]


def read_back(tensors: dict[str, Tensor], group: int) -> Tensor:
    """The weight that AWQ tensors stand for, element by element."""
    qweight, qzeros, scales = tensors["qweight"].tolist(), tensors["qzeros"].tolist(), tensors["scales"].tolist()
    cols, rows = len(qweight), len(scales[0])
    out = torch.empty(rows, cols, dtype=torch.float64)
    for column in range(cols):
        g = 0 if group == -1 else column // group
        for row in range(rows):
            word, place = row // 8, PLACE_OF_CHANNEL[row % 8]
            code = number(qweight[column][word], place, 4)
            out[row, column] = (code - number(qzeros[g][word], place, 4)) * scales[g][row]
    return out.float()


@pytest.mark.parametrize(("rows", "cols", "symmetric", "group"), CASES)
def test_encoded_tensors_mean_the_same_weight_and_decode_to_the_same_bytes(
    rows: int, cols: int, symmetric: bool, group: int
) -> None:
    weight = Integers.random(rows, cols, symmetric=symmetric, group=group)
    part, native = WeightSlice.whole((rows, cols)), weight.native()
    encoded = awq.encode(weight.format, native, part)
    assert torch.equal(read_back(encoded, group), weight.values())
    assert same(awq.decode(weight.format, encoded, part), native)
    promises = awq.tensor_specs(_scheme(weight), (rows, cols))
    assert {k: (tuple(v.shape),) for k, v in encoded.items()} == {k: p.shapes for k, p in promises.items()}


def _scheme(weight: Integers) -> Scheme:
    config = awq.quantization_files(ModelQuantization({"m": weight.format}, [])).config
    (scheme,) = awq.read(config).schemes
    return scheme


def test_a_word_by_hand() -> None:
    """Output channels 0..7 of one input channel hold 0..7: nibbles, low first, are 0 2 4 6 1 3 5 7."""
    native = {
        "weight_packed": torch.arange(8, dtype=torch.int32).unsqueeze(1),  # column 0 holds the row's number
        "weight_scale": torch.full((8, 1), 0.5, dtype=torch.float16),
        "weight_shape": torch.tensor([8, 1]),
    }
    encoded = awq.encode(number_format(4, True, -1), native, WeightSlice.whole((8, 1)))
    assert encoded["qweight"].tolist() == [[0x75316420]]
    assert encoded["qzeros"].tolist() == [[0x88888888 - 2**32]]
    assert encoded["scales"].tolist() == [[0.5] * 8]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("cuts", "dim"), [((0, 8, 32), 0), ((0, 64, 96), 1)])
def test_parts_give_the_parts_of_the_whole(cuts: tuple[int, ...], dim: int, symmetric: bool) -> None:
    shape = (32, 96)
    weight = Integers.random(*shape, symmetric=symmetric, group=32)
    whole = awq.encode(weight.format, weight.native(), WeightSlice.whole(shape))
    promises = awq.tensor_specs(_scheme(weight), shape)
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
            weight.g_idx,
        )
        extent = own.codes.shape
        part = WeightSlice(shape, (start, 0) if dim == 0 else (0, start), (extent[0], extent[1]))
        native = {**own.native(), "weight_shape": torch.tensor(shape)}
        encoded = awq.encode(weight.format, native, part)
        assert same(awq.decode(weight.format, encoded, part), native)
        for suffix, tensor in encoded.items():
            pieces[suffix].append(tensor)
    for suffix, promise in promises.items():
        along = next(d for d, axis in enumerate(promise.axes) if axis is not None and axis[0] == dim)
        assert torch.equal(torch.cat(pieces[suffix], along), whole[suffix])


@pytest.mark.parametrize("group", [32, 128, -1])
@pytest.mark.parametrize("symmetric", [True, False])
def test_what_is_announced_is_read(group: int, symmetric: bool) -> None:
    used = number_format(4, symmetric, group)
    announced = ModelQuantization({"model.layers.0.mlp.up_proj": used}, ["lm_head", "model.layers.0.mlp.down_proj"])
    config = awq.quantization_files(announced).config
    assert config["zero_point"] is True
    read = methods.read_quantization_config({"quantization_config": config})
    assert read is not None
    assert read.scheme_of("lm_head") is None
    assert read.scheme_of("model.layers.0.mlp.down_proj") is None
    scheme = read.scheme_of("model.layers.0.mlp.up_proj")
    assert scheme is not None
    assert formats.of_scheme(scheme) == used


def test_configurations_of_other_tools_are_read() -> None:
    autoawq = {"quant_method": "awq", "zero_point": True, "q_group_size": 64, "w_bit": 4, "version": "GEMM"}
    read = awq.read({**autoawq, "modules_to_not_convert": ["gate"]})
    assert (read.schemes[0].symmetric, read.schemes[0].weights["group_size"]) == (False, 64)
    assert read.scheme_of("model.layers.0.block_sparse_moe.gate") is None  # any part of a name
    assert read.scheme_of("lm_head") is None
    assert read.scheme_of("model.layers.0.block_sparse_moe.experts.0.w1") is read.schemes[0]
    round_ = {"quant_method": "awq", "zero_point": False, "group_size": 128, "bits": 4, "sym": True, "version": "gemm"}
    assert awq.read(round_).schemes[0].symmetric
    resaved = {**round_, "zero_point": True}  # transformers adds sym to every AWQ model that it saves
    assert not awq.read(resaved).schemes[0].symmetric


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": "gemv"}, "'gemv' is not known here, only 'gemm'"),
        ({"bits": 8}, "8 bits; only 4"),
        ({"group_size": "128"}, "group_size must be a size or -1"),
        ({"modules_to_not_convert": "lm_head"}, "must be a list of names"),
    ],
)
def test_other_layouts_are_refused(changes: dict, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        awq.read({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", **changes})


def test_symmetric_tensors_with_other_zero_points_are_refused() -> None:
    weight = Integers.random(8, 32)
    encoded = awq.encode(weight.format, weight.native(), WeightSlice.whole((8, 32)))
    with pytest.raises(CheckpointError, match="set zero_point to true"):
        awq.decode(number_format(4, True, 32), encoded, WeightSlice.whole((8, 32)))


def test_what_it_cannot_hold_is_refused_with_what_to_type() -> None:
    assert awq.refusal(number_format(4, True, 32), (64, 64)) is None
    assert awq.refusal(number_format(4, False, -1), (64, 100)) is None
    assert awq.refusal(formats.get("none"), (63, 64)) is None
    for name in ("fp8", "int8"):
        assert "--format hf" in (awq.refusal(formats.get(name), (64, 64)) or "")
    assert "out_features 1003" in (awq.refusal(number_format(4, True, 32), (1003, 64)) or "")
    with pytest.raises(CheckpointError, match="1003 outputs"):
        awq.tensor_specs(_scheme(Integers.random(8, 32)), (1003, 64))


def test_models_that_it_cannot_announce_are_refused() -> None:
    small, large = number_format(4, True, 32), number_format(4, True, 128)
    with pytest.raises(PlanError, match="one group size for a whole model, but 32, 128"):
        awq.quantization_files(ModelQuantization({"a": small, "b": large}, []))
    with pytest.raises(PlanError, match=r"'mlp.gate' is a part of 'mlp.gate_proj'"):
        awq.quantization_files(ModelQuantization({"mlp.gate_proj": small}, ["mlp.gate"]))
