"""Weights of bitsandbytes and HQQ, decoded one number at a time by hand; conformance asks the libraries themselves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from modelexport.checkpoints.safetensors.file import Reader
from modelexport.errors import CheckpointError
from modelexport.exporting import export
from modelexport.models.decoded import decoded
from modelexport.models.opening import open_model
from tests.helpers.models import copy_checkpoint, make_llama

pytestmark = pytest.mark.timeout(120)

Tensors = dict[str, Tensor]
GENERATOR = torch.Generator().manual_seed(5)


def random_bytes(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=GENERATOR)


def nf4(rows: int, cols: int, *, nested: bool, block: int = 64) -> tuple[Tensors, Tensor]:
    """Random tensors of bitsandbytes', and the weight that they stand for."""
    size = rows * cols
    blocks = -(-size // block)
    table = torch.linspace(-1, 1, 16)
    stored: Tensors = {"weight": random_bytes(size // 2, 1), "weight.quant_map": table}
    said: dict[str, Any] = {"quant_type": "nf4", "blocksize": block, "dtype": "bfloat16", "shape": [rows, cols]}
    if nested:
        stored["weight.absmax"] = random_bytes(blocks)
        stored["weight.nested_absmax"] = 0.1 + torch.rand(-(-blocks // 4), generator=GENERATOR)
        stored["weight.nested_quant_map"] = torch.linspace(-1, 1, 256)
        said |= {"nested_blocksize": 4, "nested_dtype": "float32", "nested_offset": 0.25}
        factors = [
            float(stored["weight.nested_quant_map"][code]) * float(stored["weight.nested_absmax"][n // 4]) + 0.25
            for n, code in enumerate(stored["weight.absmax"].tolist())
        ]
    else:
        stored["weight.absmax"] = torch.rand(blocks, generator=GENERATOR)
        factors = stored["weight.absmax"].tolist()
    text = json.dumps(said).encode()
    stored["weight.quant_state.bitsandbytes__nf4"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    codes = [code for byte in stored["weight"].flatten().tolist() for code in (byte >> 4, byte & 15)]
    values = [float(table[code]) * factors[n // block] for n, code in enumerate(codes)]
    return stored, torch.tensor(values).view(rows, cols).bfloat16()


def int8(rows: int, cols: int) -> tuple[Tensors, Tensor]:
    codes = random_bytes(rows, cols).view(torch.int8)
    largest = torch.rand(rows, generator=GENERATOR)
    stored = {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return stored, (codes.float() * largest[:, None] / 127).bfloat16()


def hqq(rows: int, cols: int, bits: int, group: int = 32) -> tuple[Tensors, Tensor]:
    groups, per_byte = rows * cols // group, 8 // bits
    packed = random_bytes(groups // per_byte, group)
    scale, zero = (torch.rand(groups, 1, generator=GENERATOR).bfloat16() for _ in range(2))
    step, values = groups // per_byte, []
    for g in range(groups):
        shift = 8 - bits * (g // step + 1)
        codes = [(byte >> shift) & (2**bits - 1) for byte in packed[g % step].tolist()]
        values += [(code - float(zero[g])) * float(scale[g]) for code in codes]
    numbers = {"nbits": bits, "group_size": group, "axis": 1}
    stored = {"W_q": packed, "scale": scale, "zero": zero, "shape": torch.tensor([rows, cols])}
    stored |= {name: torch.tensor(number) for name, number in numbers.items()}
    return stored, torch.tensor(values).view(rows, cols).bfloat16()


MAKERS: dict[str, tuple[str, Callable[[int, int], tuple[Tensors, Tensor]]]] = {
    "nf4": ("bitsandbytes", lambda rows, cols: nf4(rows, cols, nested=False)),
    "nf4, nested": ("bitsandbytes", lambda rows, cols: nf4(rows, cols, nested=True)),
    "nf4, blocks over rows": ("bitsandbytes", lambda rows, cols: nf4(rows, cols, nested=True, block=96)),
    "int8": ("bitsandbytes", int8),
    "hqq, 4 bits": ("hqq", lambda rows, cols: hqq(rows, cols, 4)),
    "hqq, 2 bits": ("hqq", lambda rows, cols: hqq(rows, cols, 2)),
}
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def quantised(maker: str, target: Path) -> tuple[Path, Tensors]:
    """A tiny Llama with such linears, and all its weights in full."""
    method, make = MAKERS[maker]
    whole: Tensors = {}

    def stored(tensors: Tensors) -> Tensors:
        found: Tensors = {}
        for name, tensor in tensors.items():
            module = name.removesuffix(".weight")
            if module.endswith(LINEARS):
                parts, whole[name] = make(*tensor.shape)
                found |= {f"{module}.{suffix}": part for suffix, part in parts.items()}
            else:
                found[name] = whole[name] = tensor
        return found

    config = {"quantization_config": {"quant_method": method}}
    source = make_llama(hidden=64, intermediate=96, layers=1)
    return copy_checkpoint(source, target, tensors=stored, config=config), whole


@pytest.mark.parametrize("maker", MAKERS)
def test_weights_are_what_their_numbers_stand_for(maker: str, tmp_path: Path) -> None:
    source, whole = quantised(maker, tmp_path / "source")
    checkpoint = decoded(open_model(source))
    assert set(checkpoint.infos) == set(whole)
    with Reader(checkpoint) as reader:
        for name, wanted in whole.items():
            torch.testing.assert_close(reader.read(checkpoint.infos[name]), wanted, rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("maker", MAKERS)
def test_a_part_is_that_of_the_whole(maker: str, tmp_path: Path) -> None:
    checkpoint = decoded(open_model(quantised(maker, tmp_path / "source")[0]))
    info = checkpoint.infos["model.layers.0.mlp.down_proj.weight"]
    with Reader(checkpoint) as reader:
        whole = reader.read(info)
        assert torch.equal(reader.read(info, rows=(5, 50), cols=(7, 33)), whole[5:50, 7:33])


def test_in_one_pass_and_by_two_ranks_it_is_what_two_exports_give(tmp_path: Path) -> None:
    source, _ = quantised("nf4, nested", tmp_path / "source")
    quiet: dict[str, Any] = {"evaluate": False, "quiet": True}
    export(model=str(source), quant="none", out=str(tmp_path / "plain"), **quiet)
    export(model=str(tmp_path / "plain"), quant="int4:32", out=str(tmp_path / "twice"), **quiet)
    found = export(model=str(source), quant="int4:32", out=str(tmp_path / "once"), tp=2, **quiet)
    once, twice = (load_file(tmp_path / name / "model.safetensors") for name in ("once", "twice"))
    assert once.keys() == twice.keys()
    assert all(torch.equal(once[name], twice[name]) for name in once)
    assert any("7 linears are nf4 in the source" in note for note in found.notes)


@pytest.mark.parametrize(
    ("maker", "suffix", "value", "says"),
    [
        ("nf4", "weight.quant_state.bitsandbytes__nf4", torch.zeros(4, dtype=torch.uint8), "is no JSON"),
        ("nf4", "weight.absmax", torch.ones(3), "absmax has 3 elements; 64 are needed"),
        ("nf4", "weight.quant_map", None, "quant_map is missing"),
        ("int8", "SCB", torch.ones(3), "SCB float32"),
        ("hqq, 4 bits", "axis", torch.tensor(0), "axis 0"),
        ("hqq, 4 bits", "nbits", None, "has W_q, and no nbits"),
    ],
)
def test_what_does_not_go_together_is_refused(
    maker: str, suffix: str, value: Tensor | None, says: str, tmp_path: Path
) -> None:
    source, _ = quantised(maker, tmp_path / "source")

    def spoilt(tensors: Tensors) -> Tensors:
        name = f"model.layers.0.self_attn.q_proj.{suffix}"
        rest = {key: tensor for key, tensor in tensors.items() if key != name}
        return rest if value is None else {**rest, name: value}

    with pytest.raises(CheckpointError, match=says):
        decoded(open_model(copy_checkpoint(source, tmp_path / "spoilt", tensors=spoilt)))
