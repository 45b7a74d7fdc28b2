"""GGUF in several parts, as llama.cpp's gguf-split numbers them."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

from modelexport.checkpoints.formats import gguf
from modelexport.checkpoints.gguf.file import parts_of, read_gguf
from modelexport.errors import CheckpointError
from modelexport.exporting import export
from modelexport.inspection.verify import verify_checkpoint
from modelexport.resharding import reshard
from tests.helpers.format_models import assert_same, make_model, reopen, write
from tests.helpers.models import make_llama

pytestmark = pytest.mark.timeout(120)


def test_parts_hold_what_one_file_does(tmp_path: Path) -> None:
    model = make_model(model_type="mixtral")
    layout = write(gguf, tmp_path, model, model.plan(), max_shard_bytes=400_000)
    names = [file.name for file in layout.files]
    assert len(names) > 2
    assert names == [f"model-{number + 1:05d}-of-{len(names):05d}.gguf" for number in range(len(names))]
    assert_same(reopen(gguf, tmp_path), model)
    assert reopen(gguf, tmp_path).files == [tmp_path / name for name in names]
    number = struct.pack("<Q", 8) + b"split.no" + struct.pack("<IH", 2, 1)
    count = struct.pack("<Q", 11) + b"split.count" + struct.pack("<IH", 2, len(names))
    tensors = len(read_gguf(*(tmp_path / name for name in names)).infos)
    total = struct.pack("<Q", 19) + b"split.tensors.count" + struct.pack("<Ii", 5, tensors)
    text = (tmp_path / names[1]).read_bytes()
    assert text[16:24] == struct.pack("<Q", 3), "the first part alone has the model's values"
    assert text[24:].startswith(number + count + total)
    assert b"general.architecture" in (tmp_path / names[0]).read_bytes()


def test_an_export_in_parts_is_a_source(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "quant": "int8-wo",
        "group_size": 32,
        "format": "gguf",
        "evaluate": False,
        "quiet": True,
    }
    export(model=str(make_llama()), out=str(tmp_path / "one"), **settings)
    result = export(model=str(make_llama()), out=str(tmp_path / "parts"), max_shard_bytes=60_000, tp=2, **settings)
    assert len(result.files) > 2
    assert verify_checkpoint(tmp_path / "parts", against=str(make_llama())).ok
    reshard(checkpoint=str(tmp_path / "parts"), out=str(tmp_path / "joined"), format="gguf", quiet=True)
    assert (tmp_path / "joined" / "model.gguf").read_bytes() == (tmp_path / "one" / "model.gguf").read_bytes()


def test_parts_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    model = make_model()
    whole, spoilt = tmp_path / "whole", tmp_path / "spoilt"
    whole.mkdir()
    layout = write(gguf, whole, model, model.plan(), max_shard_bytes=200_000)
    first, second, third, *_ = (file.name for file in layout.files)

    def refused(why: str) -> None:
        with pytest.raises(CheckpointError, match=why):
            reopen(gguf, spoilt, model.config)
        shutil.rmtree(spoilt)

    shutil.copytree(whole, spoilt)
    (spoilt / second).unlink()
    refused(f"1 of {len(layout.files)} parts are missing: {second}")
    shutil.copytree(whole, spoilt)
    shutil.copyfile(whole / third, spoilt / second)
    refused(rf"{second}: is part 2 \(from 0 on\) of {len(layout.files)} by its header, read as part 1")
    shutil.copytree(whole, spoilt)
    text = (spoilt / first).read_bytes()
    at = text.index(b"split.tensors.count") + len("split.tensors.count") + 4
    (spoilt / first).write_bytes(text[:at] + struct.pack("<i", 3) + text[at + 4 :])
    refused("says 3 tensors in all parts")
    (spoilt := tmp_path / "alone").mkdir()
    shutil.copyfile(whole / second, spoilt / "model.gguf")
    refused(r"is part 1 \(from 0 on\) of [0-9]+ by its header, read as part 0 of 1: all parts are needed")


@pytest.mark.parametrize(
    ("names", "parts"),
    [
        (["a-00001-of-00002.gguf"], ["a-00001-of-00002.gguf", "a-00002-of-00002.gguf"]),
        (["a-00001-of-00002.gguf", "b-00002-of-00002.gguf"], None),
        (["a-00001-of-00002.gguf", "a.gguf"], None),
        (["a-00001-of-00001.gguf"], None),
        (["a.gguf"], None),
        ([], None),
    ],
)
def test_names(names: list[str], parts: list[str] | None) -> None:
    assert parts_of(names) == parts
