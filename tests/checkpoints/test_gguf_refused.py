"""What GGUF cannot hold is refused before anything is written, and files that are not whole when they are opened."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import pytest

from modelexport.checkpoints.formats import gguf
from modelexport.checkpoints.gguf.architectures import LEFT_OUT
from modelexport.checkpoints.gguf.file import encode_header, read_gguf
from modelexport.checkpoints.gguf.metadata import model_types
from modelexport.errors import CheckpointError, PlanError
from tests.checkpoints.test_gguf_architectures import tiny
from tests.helpers.format_models import make_model, reopen, write
from tests.helpers.tiny_models import causal_types


@pytest.mark.parametrize(
    ("shape", "config", "why"),
    [
        ({}, {"model_type": "helium"}, "'helium' is not written: llama.cpp has no architecture for it; --format hf"),
        ({}, {"model_type": "x9"}, "no architecture of llama.cpp is known for 'x9'; --format hf holds it. Known are l"),
        ({}, {"model_type": "phimoe"}, "'phimoe' is not written: llama.cpp computes its norms .*--format hf holds it"),
        ({}, {"hidden_act": "gelu"}, "hidden_act is 'gelu', and llama.cpp computes silu"),
        (
            {"scheme": "int8"},
            {},
            "28 tensors are of no type that GGUF has.*must have been quantised with --format gguf",
        ),
    ],
)
def test_what_llama_cpp_cannot_hold_is_refused(shape: dict[str, Any], config: dict[str, Any], why: str) -> None:
    model = make_model(**shape)
    with pytest.raises(PlanError, match=why):
        gguf.lay_out(model.plan(), {**model.config, **config})


def test_every_type_that_is_exported_is_written_or_has_a_reason() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    known = {*model_types(), *LEFT_OUT}
    for kind in causal_types().keys() - known:
        config = CONFIG_MAPPING[kind]()
        assert getattr(config, "text_config", config).model_type in known, kind  # the language model is written alone
    assert not set(LEFT_OUT).intersection(model_types())


def test_a_type_that_is_not_known_is_refused_with_its_tensors() -> None:
    model = tiny("mamba")
    names = r"backbone.layers.\*.norm.weight, backbone.layers.\*.mixer.A_log, .*backbone.layers.\*.mixer.dt_proj.bias"
    with pytest.raises(PlanError, match=rf"known for 'mamba9' and no names are known for {names}.*; --format hf"):
        gguf.lay_out(model.plan(), {**model.config, "model_type": "mamba9"})


def test_a_cut_file_is_refused() -> None:
    model = make_model()
    with pytest.raises(PlanError, match=r"tp 2, pp 1, ep 1 was asked for.*leave --target-tp"):
        gguf.lay_out(model.plan(2), model.config)


def test_files_that_are_not_read(tmp_path: Path) -> None:
    model = make_model()
    write(gguf, tmp_path, model, model.plan())
    path = tmp_path / "model.gguf"
    good = path.read_bytes()

    def spoilt(old: bytes, new: bytes, why: str) -> None:
        assert good.count(old) == 1
        path.write_bytes(good.replace(old, new))
        with pytest.raises(CheckpointError, match=why):
            reopen(gguf, tmp_path)

    dims = struct.pack("<I2Q", 2, 128, 128)
    of_output = b"blk.1.attn_output.weight" + dims
    spoilt(
        of_output + struct.pack("<I", 30),
        of_output + struct.pack("<I", 22),
        r"\(IQ2_S: 1 tensors, the first blk\.1\.attn_o",
    )
    spoilt(of_output + struct.pack("<I", 30), of_output + struct.pack("<I", 99), "number 99: 1 tensors")
    spoilt(b"blk.1.attn_output.weight", b"blk.9.attn_output.weight", "blk.1.attn_output.weight.*missing")
    spoilt(b"GGUF" + struct.pack("<I", 3), b"GGUF" + struct.pack("<I", 1), "version 1 is not read")
    spoilt(b"GGUF" + struct.pack("<I", 3), b"GGUF" + struct.pack(">I", 3), "big-endian")
    architecture = b"general.architecture" + struct.pack("<IQ", 8, 5)
    spoilt(architecture + b"llama", architecture + b"bloom", "holds a 'bloom', config.json is of a 'llama'")
    path.write_bytes(good)
    (tmp_path / "other.gguf").write_bytes(good)
    with pytest.raises(CheckpointError, match=r"has 2 GGUF files \(model.gguf, other.gguf\)"):
        reopen(gguf, tmp_path)


def test_one_of_several_parts_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(encode_header({"split.count": 3}, [])[0])
    with pytest.raises(CheckpointError, match=r"is part 0 \(from 0 on\) of 3 by its header, read as part 0 of 1"):
        read_gguf(tmp_path / "a.gguf")


def test_a_damaged_header_is_an_error_and_nothing_else(tmp_path: Path) -> None:
    """Cut off anywhere, or with any byte changed: a CheckpointError, or a file that says something else."""
    model = make_model()
    layout = write(gguf, tmp_path, model, model.plan())
    path = tmp_path / "model.gguf"
    good = path.read_bytes()
    header = len(layout.files[0].header)
    chance = random.Random(0)
    for length in chance.sample(range(header), 40):
        path.write_bytes(good[:length])
        with pytest.raises(CheckpointError):
            read_gguf(path)
    path.write_bytes(good[:-64])
    with pytest.raises(CheckpointError, match="cut short"):
        read_gguf(path)
    refused = 0
    for _ in range(300):
        text = bytearray(good)
        text[chance.randrange(header)] ^= 1 << chance.randrange(8)
        path.write_bytes(text)
        try:
            reopen(gguf, tmp_path)
        except CheckpointError:
            refused += 1
    assert refused > 150
