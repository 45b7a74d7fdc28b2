"""safetensors files: damage is named, rectangles go to their places, and nothing else is touched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from modelexport.checkpoints.safetensors.file import (
    Reader,
    Writer,
    open_checkpoint,
    plan_layout,
    read_header,
    torch_dtype,
)
from modelexport.errors import CheckpointError
from tests.checkpoints._samples import TWO, save

F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def make(path: Path, header: Any, data: int = 0, *, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + bytes(data))
    return path


def entry(begin: int, end: int, dtype: str = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - begin], "data_offsets": [begin, end]}


BAD_HEADERS: dict[str, tuple[Any, int, str]] = {
    "gap": ({"a": entry(0, 4), "b": entry(6, 8)}, 8, "'b': a gap"),
    "gap at the start": ({"a": entry(1, 4)}, 4, "'a': a gap"),
    "overlap": ({"a": entry(0, 4), "b": entry(2, 8)}, 8, "'b': an overlap"),
    "trailing bytes": ({"a": entry(0, 4)}, 9, "5 bytes after the last tensor"),
    "truncated data": ({"a": entry(0, 4), "b": entry(4, 8)}, 7, "'b': truncated"),
    "no data at all": ({"a": entry(0, 4)}, 0, "'a': truncated"),
    "data without tensors": ({}, 1, "1 bytes after the last tensor"),
    "wrong size": ({"a": {**F32, "data_offsets": [0, 4]}}, 4, "'a': F32 [2] takes 8 bytes"),
    "unknown dtype": ({"a": {**F32, "dtype": "F31"}}, 8, "'a': unknown dtype 'F31'"),
    "dtype no string": ({"a": {**F32, "dtype": 3}}, 8, "'a': dtype"),
    "dtype a list": ({"a": {**F32, "dtype": ["F32"]}}, 8, "'a': dtype"),
    "negative shape": ({"a": {**F32, "shape": [-2]}}, 8, "'a': shape"),
    "fractional shape": ({"a": {**F32, "shape": [2.0]}}, 8, "'a': shape"),
    "boolean shape": ({"a": {**F32, "shape": [True, 2]}}, 8, "'a': shape"),
    "huge shape": ({"a": {**F32, "shape": [2**62, 2**62]}}, 8, "'a': its size overflows"),
    "larger than any integer": ({"a": {**F32, "shape": [2**80]}}, 8, "'a': shape"),
    "offsets reversed": ({"a": {**F32, "data_offsets": [8, 0]}}, 8, "'a': data_offsets"),
    "offsets negative": ({"a": {**F32, "data_offsets": [-8, 0]}}, 8, "'a': data_offsets"),
    "three offsets": ({"a": {**F32, "data_offsets": [0, 4, 8]}}, 8, "'a': data_offsets"),
    "entry no object": ({"a": 7}, 0, "'a': needs dtype"),
    "key missing": ({"a": {"dtype": "F32", "shape": [2]}}, 8, "'a': needs dtype"),
    "half a byte": ({"a": {"dtype": "F4", "shape": [3], "data_offsets": [0, 1]}}, 1, "'a': 12 bits"),
    "metadata not strings": ({"__metadata__": {"a": 1}}, 0, "__metadata__"),
    "metadata no object": ({"__metadata__": []}, 0, "__metadata__"),
    "not an object": (b"[]", 0, "must begin with '{'"),
    "leading space": (b" {}", 0, "must begin with '{'"),
    "not JSON": (b"{,}", 0, "not valid JSON"),
    "nothing": (b"", 0, "must begin with '{'"),
    "NaN": (b'{"a": NaN}', 0, "not valid JSON"),
    "not UTF-8": (b'{"\xff": 1}', 0, "not valid JSON"),
    "half a surrogate": (
        b'{"\\ud800": {"dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
        0,
        "not valid JSON",
    ),
    "nested without end": (b'{"a":' + b"[" * 100_000, 0, "not valid JSON"),
    "endless digits": (b'{"a":' + b"9" * 100_000 + b"}", 0, "not valid JSON"),
    "name twice": (b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{}}', 0, "'a' appears twice"),
    "key twice": (
        b'{"a":{"dtype":"U8","dtype":"I8","shape":[0],"data_offsets":[0,0]}}',
        0,
        "'dtype' appears twice",
    ),
}


@pytest.mark.parametrize("damage", BAD_HEADERS)
def test_a_bad_header_names_file_and_tensor(damage: str, tmp_path: Path) -> None:
    header, data, says = BAD_HEADERS[damage]
    path = make(tmp_path / "model.safetensors", header, data)
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert str(path) in str(caught.value)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "0 bytes, but a header length alone takes 8"),
        (b"\x02\0\0\0\0\0\0", "7 bytes, but"),
        (b"\x03\0\0\0\0\0\0\0{}", "the header ends at byte 11, the file at 10"),
        (b"\xff" * 8 + b"{}", "not a safetensors file"),
        (b"PK\x03\x04 a zip file, as torch.save writes it", "not a safetensors file"),
    ],
)
def test_a_file_cut_in_its_header(content: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=says):
        read_header(path)


def test_truncation_at_every_byte(tmp_path: Path) -> None:
    path = make(tmp_path / "x.safetensors", {"a": entry(0, 4), "b": entry(4, 8)}, 8)
    whole = path.read_bytes()
    assert list(read_header(path).infos) == ["a", "b"]
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"x\.safetensors: .*truncated"):
            read_header(path)


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("absent", "pipe", "loop", ".", "nul\0"):
        with pytest.raises(CheckpointError, match=r"a regular file is needed|cannot be read"):
            read_header(tmp_path / name)


def sharded(directory: Path) -> Path:
    save(directory, TWO, max_shard_bytes=24)
    return directory


def edit_index(directory: Path, change: Callable[[dict[str, str]], object]) -> None:
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


@pytest.mark.parametrize(
    "file",
    [
        "../model-00001-of-00002.safetensors",
        "/etc/passwd",
        "a/b.safetensors",
        "..",
        ".",
        "",
        "x\0",
        "a\\b",
        3,
    ],
)
def test_an_index_that_points_elsewhere(file: str, tmp_path: Path) -> None:
    sharded(tmp_path)
    edit_index(tmp_path, lambda weight_map: weight_map.update(a=file))
    with pytest.raises(CheckpointError, match=r"tensor 'a' is in .* not the name of a file in that directory"):
        open_checkpoint(tmp_path)


def test_index_and_files_that_disagree(tmp_path: Path) -> None:
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    cases: list[tuple[Callable[[dict[str, str]], object], str]] = [
        (lambda m: m.update(c=first), f"tensor 'c' should be in {first}, but it is not there"),
        (lambda m: m.update(a=second, b=first), f"tensor 'a' should be in {second}, but it is in {first}"),
        (
            lambda m: m.update(c="gone.safetensors"),
            "gone.safetensors: missing; .* keeps 1 tensors in it, the first 'c'",
        ),
    ]
    for number, (change, says) in enumerate(cases):
        directory = tmp_path / str(number)
        directory.mkdir()
        edit_index(sharded(directory), change)
        with pytest.raises(CheckpointError, match=says):
            open_checkpoint(directory)


def test_a_tensor_that_the_index_lacks(tmp_path: Path) -> None:
    save(tmp_path, TWO | {"c": torch.zeros(1)}, max_shard_bytes=40)
    edit_index(tmp_path, lambda weight_map: weight_map.pop("c"))
    with pytest.raises(CheckpointError, match=r"tensor 'c' is not in model.safetensors.index.json"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"weight_map": 1}', b"\xff", b"[" * 100_000])
def test_a_damaged_index(content: bytes, tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json: "):
        open_checkpoint(tmp_path)


def test_a_directory_without_index(tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    checkpoint = open_checkpoint(tmp_path)
    assert list(checkpoint.infos) == ["a", "b"]
    assert checkpoint.config == {"model_type": "llama"}
    (tmp_path / "again.safetensors").write_bytes((tmp_path / "model-00001-of-00002.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match="tensor 'a' is in two files"):
        open_checkpoint(tmp_path)
    (tmp_path / "again.safetensors").unlink()
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00001-of-00002\.safetensors is missing"):
        open_checkpoint(tmp_path)


def test_directories_without_safetensors(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no safetensors file; found nothing"):
        open_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"only as pickles .*save_pretrained"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        open_checkpoint(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="is not a directory"):
        open_checkpoint(tmp_path / "pytorch_model.bin")


def test_a_stale_single_file_beside_an_index(tmp_path: Path) -> None:
    sharded(tmp_path)
    save(tmp_path, TWO)
    with pytest.raises(CheckpointError, match=r"has both .* remove the one that is stale"):
        open_checkpoint(tmp_path)


def test_links_out_of_the_directory_are_how_the_hub_caches_files(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    save(tmp_path / "blobs", TWO)
    (tmp_path / "snapshot" / "model.safetensors").symlink_to("../blobs/model.safetensors")
    checkpoint = open_checkpoint(tmp_path / "snapshot")
    with Reader(checkpoint) as reader:
        assert torch.equal(reader.read(checkpoint.infos["a"]), TWO["a"])
    (tmp_path / "blobs" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"snapshot/model\.safetensors: cannot be read"):
        open_checkpoint(tmp_path / "snapshot")


def test_a_file_cut_short_after_it_was_opened(tmp_path: Path) -> None:
    save(tmp_path, {"t": torch.ones(1000, 64)})
    checkpoint = open_checkpoint(tmp_path)
    info = checkpoint.infos["t"]
    with Reader(checkpoint) as reader:
        reader.read(info)
        os.truncate(info.path, info.offset + 1000)
        for part in ({}, {"cols": (3, 9)}, {"rows": (2, 100)}):
            with pytest.raises(CheckpointError, match=r"tensor 't': .* bytes expected, .* found"):
                reader.read(info, **part)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="closed"):
        reader.read(info)


def test_reading_into_the_callers_memory(tmp_path: Path) -> None:
    weight = torch.randn(64, 48).bfloat16()
    save(tmp_path, {"w": weight})
    checkpoint = open_checkpoint(tmp_path)
    info = checkpoint.infos["w"]
    with Reader(checkpoint) as reader:
        whole = torch.zeros(128, 96, dtype=torch.bfloat16)
        inner = whole[32:96, 24:72]
        assert reader.read(info, out=inner) is inner
        assert torch.equal(inner, weight)
        inner.zero_()
        assert not whole.any()
        part = reader.read(info, rows=(5, 9), cols=(1, 2), out=whole[0:4, 0:1])
        assert torch.equal(part, weight[5:9, 1:2])
        for out in (torch.zeros(64, 48), torch.zeros(48, 64, dtype=torch.bfloat16), whole.T[:64, :48]):
            with pytest.raises(ValueError, match="tensor 'w'"):
                reader.read(info, out=out)
        for part in ({"rows": (0, 65)}, {"rows": (3, 2)}, {"cols": (-1, 4)}):
            with pytest.raises(ValueError, match="outside its shape"):
                reader.read(info, **part)  # type: ignore[arg-type]


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this torch has no float4")
def test_packed_fp4_is_cut_between_bytes(tmp_path: Path) -> None:
    packed = torch.arange(40, dtype=torch.uint8).reshape(5, 8)
    fp4 = torch_dtype("F4")
    layout = plan_layout([("w", "F4", (5, 16))])
    layout.create(tmp_path)
    with Writer(layout, tmp_path) as writer:
        writer.write("w", packed[:, 2:].contiguous().view(fp4), offset=(0, 2))
        writer.write("w", packed[:, :2].contiguous().view(fp4), offset=(0, 0))
    checkpoint = open_checkpoint(tmp_path)
    with Reader(checkpoint) as reader:
        got = reader.read(checkpoint.infos["w"], rows=(1, 4), cols=(4, 10))
        assert torch.equal(got.view(torch.uint8), packed[1:4, 2:5])
        with pytest.raises(ValueError, match="between whole bytes"):
            reader.read(checkpoint.infos["w"], cols=(1, 3))


def test_importing_needs_neither_torch_nor_numpy() -> None:
    script = (
        "import sys, modelexport.checkpoints.safetensors.file, modelexport.checkpoints.staging; "
        "print([m for m in ('torch', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
