"""safetensors files: damage is named, rectangles go to their places, and nothing else is touched."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from modelexport.checkpoints import raw_io, safetensors_writer
from modelexport.checkpoints.safetensors_file import (
    Layout,
    Reader,
    Writer,
    dtype_name,
    open_checkpoint,
    plan_layout,
    read_header,
    torch_dtype,
)
from modelexport.errors import CheckpointError

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
        with pytest.raises(CheckpointError, match=r"cannot be opened|not a regular file|cannot be read"):
            read_header(tmp_path / name)


def save(directory: Path, tensors: dict[str, torch.Tensor], **options: int) -> Layout:
    layout = plan_layout([(n, dtype_name(t.dtype), tuple(t.shape)) for n, t in tensors.items()], **options)
    layout.create(directory)
    with Writer(layout, directory) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    if len(layout.files) > 1:
        (directory / "model.safetensors.index.json").write_text(layout.index_json())
    return layout


TWO = {"a": torch.arange(6, dtype=torch.float32).reshape(2, 3), "b": torch.arange(4, dtype=torch.int64)}


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
    with pytest.raises(CheckpointError, match=r"snapshot/model\.safetensors: cannot be opened"):
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
        reader.prefetch(info, rows=(0, 32))
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


@pytest.fixture(params=["mapped", "no mappings", "not mappable", "short writes"])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Every way in which bytes can reach the file."""
    if request.param == "no mappings":

        def refuse(*args: object, **kwargs: object) -> object:
            raise OSError(19, "No such device")

        monkeypatch.setattr(raw_io.mmap, "mmap", refuse)
    elif request.param == "not mappable":
        monkeypatch.setattr(raw_io, "can_map_for_writing", lambda fd: False)
    elif request.param == "short writes":
        pwrite, preadv = os.pwrite, os.preadv
        monkeypatch.setattr(raw_io.mmap, "ALLOCATIONGRANULARITY", 3)  # an offset that mmap refuses
        monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:7], at))
        monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:5]], at))
    return request.param


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[list[int]]]:
    """A shape, and along each dim the places where it is cut."""
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=0, max_size=4)))
    return shape, [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=2))}) for n in shape]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=cuts(), dtype=st.sampled_from([torch.bfloat16, torch.uint8, torch.float64]), transposed=st.booleans())
def test_pieces_make_the_whole(
    cut: tuple[tuple[int, ...], list[list[int]]],
    dtype: torch.dtype,
    transposed: bool,
    transport: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Any grid of pieces, from any memory layout, gives the file that one write of the whole gives."""
    shape, edges = cut
    whole = torch.arange(math.prod(shape)).reshape(shape).to(dtype)
    directory = tmp_path_factory.mktemp("pieces")
    layout = plan_layout([("before", "U8", (5,)), ("t", dtype_name(dtype), shape), ("after", "U8", (3,))])
    layout.create(directory)
    with Writer(layout, directory) as writer:
        for corner in _grid([range(len(e) - 1) for e in edges]):
            box = tuple(slice(edges[d][i], edges[d][i + 1]) for d, i in enumerate(corner))
            piece = whole[box]
            if transposed:
                backwards = list(reversed(range(piece.ndim)))
                piece = piece.permute(backwards).contiguous().permute(backwards)
            written = writer.write("t", piece, offset=[s.start for s in box])
            assert written == piece.numel() * piece.element_size()
    checkpoint = open_checkpoint(directory)
    with Reader(checkpoint) as reader:
        assert torch.equal(reader.read(checkpoint.infos["t"]), whole)
        assert not reader.read(checkpoint.infos["before"]).any()
        assert not reader.read(checkpoint.infos["after"]).any()
        if len(shape) > 1:
            rows, cols = (edges[0][0], edges[0][1]), (edges[1][-2], edges[1][-1])
            part = reader.read(checkpoint.infos["t"], rows=rows, cols=cols)
            assert torch.equal(part, whole[slice(*rows), slice(*cols)])


def _grid(ranges: list[range]) -> Iterator[tuple[int, ...]]:
    if not ranges:
        yield ()
        return
    for first in ranges[0]:
        for rest in _grid(ranges[1:]):
            yield (first, *rest)


def test_columns_beyond_one_mapping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raw_io, "MAPPED_BLOCK", 5000)
    weight = torch.randint(0, 255, (300, 700), dtype=torch.uint8)
    layout = plan_layout([("w", "U8", (300, 700))])
    layout.create(tmp_path)
    with Writer(layout, tmp_path) as writer:
        for start in range(0, 700, 100):
            writer.write("w", weight[:, start : start + 100], offset=(0, start))
    checkpoint = open_checkpoint(tmp_path)
    with Reader(checkpoint) as reader:
        assert torch.equal(reader.read(checkpoint.infos["w"]), weight)
        assert torch.equal(reader.read(checkpoint.infos["w"], cols=(123, 456)), weight[:, 123:456])


def test_many_threads_share_a_reader_and_a_writer(tmp_path: Path) -> None:
    weight = torch.randint(0, 255, (1200, 500), dtype=torch.uint8)
    layout = plan_layout([("w", "U8", (1200, 500))])
    layout.create(tmp_path)
    boxes = [((r, r + 100), (c, c + 125)) for r in range(0, 1200, 100) for c in range(0, 500, 125)]
    with Writer(layout, tmp_path) as writer, ThreadPoolExecutor(4) as pool:
        wrote = [pool.submit(writer.write, "w", weight[slice(*r), slice(*c)], offset=(r[0], c[0])) for r, c in boxes]
        assert sum(future.result() for future in wrote) == 600_000
    checkpoint = open_checkpoint(tmp_path)
    with Reader(checkpoint) as reader, ThreadPoolExecutor(4) as pool:
        info = checkpoint.infos["w"]
        read = [pool.submit(reader.read, info, rows=r, cols=c) for r, c in boxes]
        for (r, c), future in zip(boxes, read, strict=True):
            assert torch.equal(future.result(), weight[slice(*r), slice(*c)])


def test_writeback_begins_behind_the_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[tuple[int, int]] = []
    monkeypatch.setattr(raw_io, "begin_writeback", lambda fd, offset, length: begun.append((offset, length)))
    monkeypatch.setattr(safetensors_writer, "_WRITEBACK_BYTES", 4000)
    layout = plan_layout([("w", "U8", (100, 100)), ("s", "F32", ())])
    layout.create(tmp_path)
    start = layout.infos["w"].offset
    with Writer(layout, tmp_path) as writer:
        writer.start_writeback()
        for row in range(0, 100, 10):
            writer.write("w", torch.ones(10, 40, dtype=torch.uint8), offset=(row, 0))  # rows not complete yet
            writer.write("w", torch.ones(10, 60, dtype=torch.uint8), offset=(row, 40))
        writer.write("s", torch.tensor(1.0))
    assert begun[0][0] == start
    assert sum(length for _, length in begun) == 10_004
    assert all(a[0] + a[1] == b[0] for a, b in pairwise(begun))


def test_pieces_that_do_not_fit(tmp_path: Path) -> None:
    layout = plan_layout([("w", "F32", (4, 6))])
    layout.create(tmp_path)
    with Writer(layout, tmp_path) as writer:
        for piece, offset in [
            (torch.zeros(2, 2), (3, 0)),
            (torch.zeros(2, 2), (0, -1)),
            (torch.zeros(2), (0,)),
            (torch.zeros(5, 6), None),
            (torch.zeros(4, 6).bfloat16(), None),
        ]:
            with pytest.raises(ValueError, match="tensor 'w'"):
                writer.write("w", piece, offset=offset)
        assert writer.write("w", torch.zeros(0, 6), offset=(4, 0)) == 0
    with pytest.raises(ValueError, match="closed"):
        writer.write("w", torch.zeros(4, 6))


def test_layouts() -> None:
    single = plan_layout([("a", "BF16", (2, 2)), ("b", "I8", (3,)), ("c", "F32", (2,)), ("d", "BF16", (3,))])
    assert [file.name for file in single.files] == ["model.safetensors"]
    assert list(single.infos) == ["a", "c", "d", "b"]
    assert single.total_bytes == 25
    assert single.files[0].size == len(single.files[0].header) + 25
    assert json.loads(single.files[0].header[8:])["__metadata__"] == {"format": "pt"}
    many = plan_layout([(str(i), "U8", (8 * size,)) for i, size in enumerate([3, 1, 9, 4])], max_shard_bytes=32)
    assert [[info.name for info in file.infos] for file in many.files] == [["0", "1"], ["2"], ["3"]]
    assert json.loads(many.index_json()) == {
        "metadata": {"total_size": 136},
        "weight_map": {
            "0": "model-00001-of-00003.safetensors",
            "1": "model-00001-of-00003.safetensors",
            "2": "model-00002-of-00003.safetensors",
            "3": "model-00003-of-00003.safetensors",
        },
    }
    assert plan_layout([], metadata={}).files[0].header == b"\x08\0\0\0\0\0\0\0{}      "
    for specs in (
        [("a", "U8", (1,))] * 2,
        [("__metadata__", "U8", (1,))],
        [("a", "U7", (1,))],
        [("a", "U8", (-1,))],
    ):
        with pytest.raises(CheckpointError, match=r"'a'|'__metadata__'"):
            plan_layout(specs)


def test_creating_again_keeps_what_is_complete(tmp_path: Path) -> None:
    layout = save(tmp_path, TWO, max_shard_bytes=24)
    first, second = (tmp_path / file.name for file in layout.files)
    kept = first.read_bytes()
    os.truncate(second, 100)
    assert layout.create(tmp_path) == (second.name,)
    assert first.read_bytes() == kept
    assert second.stat().st_size == layout.files[1].size
    first.write_bytes(kept.replace(b'"a"', b'"x"'))
    assert layout.create(tmp_path) == (first.name,)
    assert layout.create(tmp_path) == ()


WRITER_PROCESS = """
import sys, torch
from modelexport.checkpoints.safetensors_file import Writer, plan_layout
directory, rank, world = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
layout = plan_layout([("pad", "U8", (5,)), ("cols", "I16", (500, 301)), ("rows", "I16", (301, 50))])
def part(n):
    return n * rank // world, n * (rank + 1) // world
cols = torch.arange(500 * 301).reshape(500, 301).to(torch.int16)
rows = torch.arange(301 * 50).reshape(301, 50).to(torch.int16)
print("ready", flush=True)
sys.stdin.readline()
with Writer(layout, directory) as writer:
    writer.start_writeback()
    a, b = part(301)
    for start in range(0, 500, 50):
        writer.write("cols", cols[start : start + 50, a:b], offset=(start, a))
    writer.write("rows", rows[a:b], offset=(a, 0))
    writer.sync()
"""


@pytest.mark.timeout(120)
def test_several_processes_fill_the_same_pages(tmp_path: Path) -> None:
    layout = plan_layout([("pad", "U8", (5,)), ("cols", "I16", (500, 301)), ("rows", "I16", (301, 50))])
    layout.create(tmp_path)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER_PROCESS, str(tmp_path), str(rank), "3"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdin is not None
            assert rank.stdout.readline() == "ready\n"
        for rank in ranks:  # all are past their imports: now they write at the same time
            print("go", file=rank.stdin, flush=True)
        failures = [rank.communicate(timeout=60)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate(timeout=20)
    assert [rank.returncode for rank in ranks] == [0, 0, 0], failures
    checkpoint = open_checkpoint(tmp_path)
    with Reader(checkpoint) as reader:
        for name, shape in (("cols", (500, 301)), ("rows", (301, 50))):
            expected = torch.arange(shape[0] * shape[1]).reshape(shape).to(torch.int16)
            assert torch.equal(reader.read(checkpoint.infos[name]), expected)
        assert not reader.read(checkpoint.infos["pad"]).any()


FULL_DISK = """
import errno, itertools, json, os, shutil, sys, torch
from pathlib import Path
from modelexport.checkpoints import raw_io, safetensors_writer
from modelexport.checkpoints.safetensors_file import Writer, plan_layout
from modelexport.errors import CheckpointError
directory = Path(sys.argv[1])
layout = plan_layout([("big", "U8", (600, 10000))])
piece = torch.ones(600, 10000, dtype=torch.uint8)
call, usage = raw_io._call, shutil.disk_usage
for reserve, width in itertools.product((True, False), (10000, 2000)):
    if not reserve:  # no reservation, and the room was still free when it was asked for: the write must say it
        shutil.disk_usage = lambda path: shutil._ntuple_diskusage(1 << 40, 0, 1 << 40)
        def refuse(name, *args):
            if name == "fallocate":
                raise OSError(errno.EOPNOTSUPP, "no")
            call(name, *args)
        raw_io._call = refuse
    try:
        layout.create(directory)
        shutil.disk_usage = usage
        with Writer(layout, directory) as writer:
            for start in range(0, 10000, width):
                writer.write("big", piece[:, start : start + width], offset=(0, start))
    except CheckpointError as error:
        print(json.dumps([reserve, str(error), os.listdir(directory)]))
    for name in os.listdir(directory):
        (directory / name).unlink()
"""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    target = tmp_path / "disk"
    target.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(target)]
    try:
        mounted = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except FileNotFoundError:
        pytest.skip("no mount command")
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a small tmpfs: {mounted.stderr.strip()}")
    try:
        yield target
    finally:
        subprocess.run(["umount", str(target)], timeout=20, check=True)


def run_out_of_room(directory: Path, before: str = "") -> list[tuple[bool, str, list[str]]]:
    """(whether blocks could be reserved, the error, the files left) for whole rows and for columns."""
    done = subprocess.run(
        [sys.executable, "-c", before + FULL_DISK, str(directory)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.timeout(120)
def test_a_full_disk(small_disk: Path) -> None:
    refusals = run_out_of_room(small_disk)
    assert [reserve for reserve, _, _ in refusals] == [True, True, False, False]
    for reserve, message, left in refusals:
        if reserve:
            assert re.search(
                r"disk: the checkpoint needs 6,000,\d\d\d bytes, its file system has 4,\d+,\d+ free", message
            )
            assert left == []
        else:
            assert "model.safetensors: no room for 6,000,000 bytes (No space left on device); " in message
            assert "bytes are free on its file system. Free some space" in message


@pytest.mark.timeout(120)
def test_a_limit_on_file_size(tmp_path: Path) -> None:
    """What can be tested of a full disk without being root."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
    refusals = run_out_of_room(tmp_path, limit)
    assert [reserve for reserve, _, _ in refusals] == [True, True, False, False]
    for _, message, left in refusals:
        assert "model.safetensors: no room for 6,000,112 bytes (File too large)" in message
        assert left == []


def test_importing_needs_neither_torch_nor_numpy() -> None:
    script = (
        "import sys, modelexport.checkpoints.safetensors_file, modelexport.checkpoints.staging; "
        "print([m for m in ('torch', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
