"""Writing safetensors files: rectangles go to their places from any process, and nothing else is touched."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from modelexport.checkpoints import raw_io
from modelexport.checkpoints.safetensors import writer as safetensors_writer
from modelexport.checkpoints.safetensors.file import Reader, Writer, dtype_name, open_checkpoint, plan_layout
from modelexport.errors import CheckpointError
from tests.checkpoints._samples import TWO, save
from tests.helpers.warm import run_warm


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


def test_pieces_side_by_side_are_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole rows made of several ranks' columns reach the file as large writes; the rest goes piece by piece."""
    monkeypatch.setattr(raw_io, "JOINED_BLOCK", 3000)
    joined: list[int] = []
    write_joined = raw_io.write_joined
    monkeypatch.setattr(raw_io, "write_joined", lambda fd, c, at: (joined.append(len(c)), write_joined(fd, c, at))[0])
    weight, cube = torch.randn(90, 70).bfloat16(), torch.randint(-9, 9, (6, 5, 4), dtype=torch.int16)
    layout = plan_layout([("w", "BF16", (90, 70)), ("h", "BF16", (90, 70)), ("c", "I16", (6, 5, 4)), ("v", "U8", (6,))])
    layout.create(tmp_path)

    def parts(whole: torch.Tensor, rows: list[int], cols: list[int]) -> list[tuple[torch.Tensor, list[int]]]:
        return [
            (whole[a:b, c:d].clone() if d % 2 else whole[a:b, c:d], [a, c] + [0] * (whole.dim() - 2))
            for c, d in pairwise(cols)
            for a, b in pairwise(rows)
        ]

    with Writer(layout, tmp_path) as writer:
        assert writer.write_pieces("w", parts(weight, [0, 31, 90], [0, 20, 45, 70])[::-1]) == 90 * 70 * 2
        assert joined == [3, 3]
        assert writer.write_pieces("c", parts(cube, [0, 6], [0, 2, 5])) == 6 * 5 * 4 * 2
        assert joined == [3, 3, 2]
        holes = parts(weight, [0, 90], [0, 20, 45, 70])
        assert writer.write_pieces("h", [holes[0], holes[2]]) == 90 * 45 * 2
        assert writer.write_pieces("h", [holes[1], (weight[:0], (90, 0))]) == 90 * 25 * 2
        assert joined == [3, 3, 2]
        vector = torch.arange(6, dtype=torch.uint8)
        assert writer.write_pieces("v", [(vector[4:], (4,)), (vector[:4], (0,))]) == 6
        with pytest.raises(ValueError, match="tensor 'w'"):
            writer.write_pieces("w", [(weight, (0, 0)), (weight, (0, 1))])
    checkpoint = open_checkpoint(tmp_path)
    with Reader(checkpoint) as reader:
        for name, whole in (("w", weight), ("h", weight), ("c", cube), ("v", vector)):
            assert torch.equal(reader.read(checkpoint.infos[name]), whole), name


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


WRITERS = """
import multiprocessing, sys, torch
from modelexport.checkpoints.safetensors.file import Writer, plan_layout
directory, world = sys.argv[1], 3
layout = plan_layout([("pad", "U8", (5,)), ("cols", "I16", (500, 301)), ("rows", "I16", (301, 50))])
cols = torch.arange(500 * 301).reshape(500, 301).to(torch.int16)
rows = torch.arange(301 * 50).reshape(301, 50).to(torch.int16)
def write(rank, barrier):
    a, b = 301 * rank // world, 301 * (rank + 1) // world
    barrier.wait(60)
    with Writer(layout, directory) as writer:
        writer.start_writeback()
        for start in range(0, 500, 50):
            writer.write("cols", cols[start : start + 50, a:b], offset=(start, a))
        writer.write("rows", rows[a:b], offset=(a, 0))
        writer.sync()
context = multiprocessing.get_context("fork")
barrier = context.Barrier(world)
ranks = [context.Process(target=write, args=(rank, barrier)) for rank in range(world)]
for rank in ranks:
    rank.start()
for rank in ranks:
    rank.join()
print([rank.exitcode for rank in ranks])
"""


@pytest.mark.timeout(120)
def test_several_processes_fill_the_same_pages(tmp_path: Path) -> None:
    layout = plan_layout([("pad", "U8", (5,)), ("cols", "I16", (500, 301)), ("rows", "I16", (301, 50))])
    layout.create(tmp_path)
    done = run_warm("-c", WRITERS, str(tmp_path))
    assert done.stdout == "[0, 0, 0]\n", done.stderr
    checkpoint = open_checkpoint(tmp_path)
    with Reader(checkpoint) as reader:
        for name, shape in (("cols", (500, 301)), ("rows", (301, 50))):
            expected = torch.arange(shape[0] * shape[1]).reshape(shape).to(torch.int16)
            assert torch.equal(reader.read(checkpoint.infos[name]), expected)
        assert not reader.read(checkpoint.infos["pad"]).any()


FULL_DISK = """
import errno, itertools, json, os, shutil, sys, torch
from pathlib import Path
from modelexport.checkpoints import raw_io\nfrom modelexport.checkpoints.safetensors import writer as safetensors_writer
from modelexport.checkpoints.safetensors.file import Writer, plan_layout
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
    done = run_warm("-c", before + FULL_DISK, str(directory))
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
        assert (
            "model.safetensors: 6,000,112 bytes are needed, and ulimit -f lets this process write files of 1,048,576"
            in message
        )
        assert left == []
