"""Tensors that lie in parts of arrays: read and written as if they were whole."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modelexport.checkpoints.safetensors.arrays import Array, Share, placements
from modelexport.checkpoints.safetensors.file import Checkpoint, Layout, LayoutFile, Reader, TensorInfo, Writer
from modelexport.checkpoints.safetensors.placement import Placement, row_major, runs
from modelexport.errors import CheckpointError

DTYPES = {"BF16": torch.bfloat16, "I32": torch.int32, "F8_E4M3": torch.float8_e4m3fn, "I64": torch.int64}


def numbers(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    count = int(torch.tensor(shape).prod()) * dtype.itemsize
    return (torch.arange(count) % 251).to(torch.uint8).view(dtype).view(shape)


def info(shape: tuple[int, ...], dtype: str) -> TensorInfo:
    return TensorInfo("w", dtype, shape, Path("none"), 0, numbers(shape, DTYPES[dtype]).nbytes)


def both(directory: Path, shape: tuple[int, ...], dtype: str, places: tuple[Placement, ...], size: int):
    file = LayoutFile("data", b"", (), size)
    layout = Layout((file,), {"w": info(shape, dtype)}, {"w": places})
    layout.create(directory)
    there = tuple(Placement(p.box, directory / p.path, p.offset, p.strides) for p in places)
    return layout, Checkpoint(directory, layout.infos, None, {}, {"w": there})


def test_parts_of_a_fused_stack_with_padding_and_a_stride(tmp_path: Path) -> None:
    """Rows 0-3 inside a [2, 6, 4] stack behind a gap, rows 4-7 in every second row of another array."""
    arrays = [
        Array("a", "stack", "I32", (2, 6, 4), (Share("w", ((0, 4), (0, 4)), (1, 2, 0)),)),
        Array("b", "comb", "I32", (8, 4), (Share("w", ((4, 8), (0, 4)), (1, 0), (2, 1)),)),
    ]
    found = placements(arrays, lambda array: (Path(array.file), {"a": 16, "b": 8}[array.file]))
    layout = Layout(
        (LayoutFile("a", b"A" * 16, (), 16 + 192), LayoutFile("b", b"B" * 8, (), 8 + 128)),
        {"w": info((8, 4), "I32")},
        found,
    )
    layout.create(tmp_path)
    value = numbers((8, 4), torch.int32)
    with Writer(layout, tmp_path) as writer:
        assert writer.write("w", value[:, :3]) + writer.write("w", value[:, 3:], offset=(0, 3)) == value.nbytes
    stack = torch.frombuffer(bytearray((tmp_path / "a").read_bytes())[16:], dtype=torch.int32).view(2, 6, 4)
    comb = torch.frombuffer(bytearray((tmp_path / "b").read_bytes())[8:], dtype=torch.int32).view(8, 4)
    assert torch.equal(stack[1, 2:], value[:4])
    assert torch.equal(comb[1::2], value[4:])
    assert not stack[0].any()
    assert not stack[1, :2].any()
    assert not comb[::2].any()
    there = {"w": tuple(Placement(p.box, tmp_path / p.path, p.offset, p.strides) for p in found["w"])}
    with Reader(Checkpoint(tmp_path, layout.infos, None, {}, there)) as reader:
        assert torch.equal(reader.read(layout.infos["w"]), value)
        assert torch.equal(reader.read(layout.infos["w"], rows=(3, 6), cols=(1, 3)), value[3:6, 1:3])


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[int], list[int]]:
    shape = (draw(st.integers(1, 9)), draw(st.integers(1, 40)))
    return shape, *(sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=3))}) for n in shape)


@settings(max_examples=60)
@given(cuts(), cuts(), st.sampled_from(sorted(DTYPES)), st.booleans())
def test_any_grid_of_pieces_is_read_and_written_like_the_whole(tmp_path_factory, stored, written, dtype, twice) -> None:
    shape, rows, cols = stored
    directory = tmp_path_factory.mktemp("grid")
    places, at, size = [], 24, DTYPES[dtype].itemsize
    for _ in range(1 + twice):  # a replica of everything
        for r in itertools.pairwise(rows):
            for c in itertools.pairwise(cols):
                extent = (r[1] - r[0], c[1] - c[0])
                places.append(Placement((r, c), Path("data"), at, row_major(extent, size)))
                at += extent[0] * extent[1] * size
    layout, checkpoint = both(directory, shape, dtype, tuple(places), at)
    value = numbers(shape, DTYPES[dtype])
    other_rows = sorted({min(r, shape[0]) for r in written[1]} | {0, shape[0]})
    other_cols = sorted({min(c, shape[1]) for c in written[2]} | {0, shape[1]})
    with Writer(layout, directory) as writer:
        for r0, r1 in itertools.pairwise(other_rows):
            for c0, c1 in itertools.pairwise(other_cols):
                writer.write("w", value[r0:r1, c0:c1], offset=(r0, c0))
    as_bytes = torch.uint8
    with Reader(checkpoint) as reader:
        assert torch.equal(reader.read(layout.infos["w"]).view(as_bytes), value.view(as_bytes))
        for place in checkpoint.placements["w"]:
            (r0, r1), (c0, c1) = place.box
            out = torch.empty(r1 - r0, c1 - c0, dtype=value.dtype)
            reader.read_place(layout.infos["w"], place, place.box, out)
            assert torch.equal(out.view(as_bytes), value[r0:r1, c0:c1].contiguous().view(as_bytes))


def test_a_hole_is_an_error_that_says_where(tmp_path: Path) -> None:
    place = Placement(((0, 2), (0, 4)), Path("data"), 0, (16, 4))
    layout, checkpoint = both(tmp_path, (3, 4), "I32", (place,), 32)
    with Reader(checkpoint) as reader:
        assert reader.read(layout.infos["w"], rows=(0, 2)).shape == (2, 4)
        with pytest.raises(CheckpointError, match=r"'w' of shape \[3, 4\] is not whole.*\[2:3, 1:4\]"):
            reader.read(layout.infos["w"], cols=(1, 4))


def test_a_file_cut_short_is_an_error(tmp_path: Path) -> None:
    place = Placement(((0, 2), (0, 4)), Path("data"), 0, (16, 4))
    layout, checkpoint = both(tmp_path, (2, 4), "I32", (place,), 32)
    with (tmp_path / "data").open("r+b") as stream:
        stream.truncate(20)
    with Reader(checkpoint) as reader, pytest.raises(CheckpointError, match=r"data: tensor 'w': .* cut short"):
        reader.read(layout.infos["w"])


def test_scalars_vectors_and_three_dims(tmp_path: Path) -> None:
    for shape in ((), (5,), (2, 3, 4)):
        value = numbers(shape, torch.int32)
        directory = tmp_path / str(len(shape))
        directory.mkdir()
        box = tuple((0, n) for n in shape)
        place = Placement(box, Path("data"), 8, row_major(shape, 4))
        layout, checkpoint = both(directory, shape, "I32", (place,), 8 + value.nbytes)
        with Writer(layout, directory) as writer, Reader(checkpoint) as reader:
            writer.write("w", value.t() if value.dim() == 1 else value)
            assert torch.equal(reader.read(layout.infos["w"]), value)


def test_memory_without_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="no rows"):
        list(runs(torch.zeros(4, 1).expand(4, 3), 0, (12, 4)))


def test_inserts_are_written_and_looked_at_again(tmp_path: Path) -> None:
    file = LayoutFile("data", b"head", (), 20, ((8, b"mid"), (17, b"end")))
    layout = Layout((file,), {})
    assert layout.create(tmp_path) == ("data",)
    assert (tmp_path / "data").read_bytes() == b"head\0\0\0\0mid\0\0\0\0\0\0end"
    assert layout.create(tmp_path) == ()
    with (tmp_path / "data").open("r+b") as stream:
        stream.seek(9)
        stream.write(b"x")
    assert layout.create(tmp_path) == ("data",)
