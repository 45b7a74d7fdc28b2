"""Our files against the safetensors library, both ways: it is the format's reference implementation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from modelexport.checkpoints.safetensors.file import (
    Reader,
    Writer,
    dtype_bits,
    dtype_name,
    dtype_names,
    open_checkpoint,
    plan_layout,
    read_header,
    torch_dtype,
)
from modelexport.errors import CheckpointError

IN_NO_TORCH = {"F6_E2M3", "F6_E3M2"}
IN_NEWER_TORCH = {"F4": "float4_e2m1fn_x2", "F8_E8M0": "float8_e8m0fnu"}
DTYPES = [
    name for name in dtype_names() if name not in IN_NO_TORCH and hasattr(torch, IN_NEWER_TORCH.get(name, "uint8"))
]


def random_tensor(dtype: str, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Random bits of a dtype; ``shape`` in elements, of which ``F4`` keeps two to the byte."""
    in_torch = torch_dtype(dtype)
    if dtype == "F4":
        shape = (*shape[:-1], shape[-1] // 2)
    bits = torch.randint(
        0,
        2 if dtype == "BOOL" else 256,
        (*shape, max(8, dtype_bits(dtype)) // 8),
        generator=torch.manual_seed(seed),
    )
    return bits.to(torch.uint8).reshape(-1).view(in_torch).reshape(shape)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and _bytes(a) == _bytes(b)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def write_ours(tensors: dict[str, torch.Tensor], directory: Path, **options: int) -> None:
    specs = [(name, dtype_name(t.dtype), file_shape(t)) for name, t in tensors.items()]
    layout = plan_layout(specs, **options)
    layout.create(directory)
    with Writer(layout, directory) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    if len(layout.files) > 1:
        (directory / "model.safetensors.index.json").write_text(layout.index_json())


def file_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    shape = tuple(tensor.shape)
    return (*shape[:-1], 2 * shape[-1]) if dtype_name(tensor.dtype) == "F4" else shape


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_written_by_us_is_read_by_the_library(dtype: str, tmp_path: Path) -> None:
    tensors = {"m": random_tensor(dtype, (6, 10)), "v": random_tensor(dtype, (4,), 1)}
    write_ours(tensors, tmp_path)
    loaded = load_file(tmp_path / "model.safetensors")
    assert loaded.keys() == tensors.keys()
    assert all(same_bits(loaded[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_written_by_the_library_is_read_by_us(dtype: str, tmp_path: Path) -> None:
    tensors = {"m": random_tensor(dtype, (6, 10)), "v": random_tensor(dtype, (4,), 1)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    checkpoint = open_checkpoint(tmp_path)
    with Reader(checkpoint) as reader:
        for name, tensor in tensors.items():
            assert checkpoint.infos[name].dtype == dtype
            assert checkpoint.infos[name].shape == file_shape(tensor)
            assert same_bits(reader.read(checkpoint.infos[name]), tensor)


def test_scalars_empty_tensors_and_odd_sizes_stay_readable_in_place(tmp_path: Path) -> None:
    # Three bytes before a bf16 tensor: in the given order the library could not view the later ones.
    tensors = {
        "odd": random_tensor("U8", (3,)),
        "half": random_tensor("BF16", (5,)),
        "scalar": random_tensor("F32", ()),
        "wide": random_tensor("F64", (3,)),
        "empty": random_tensor("F16", (0, 7)),
        "none": random_tensor("I64", (4, 0)),
        "flag": random_tensor("BOOL", ()),
    }
    write_ours(tensors, tmp_path)
    loaded = load_file(tmp_path / "model.safetensors")
    assert all(same_bits(loaded[name], tensors[name]) for name in tensors)
    checkpoint = open_checkpoint(tmp_path)
    with Reader(checkpoint) as reader:
        assert all(same_bits(reader.read(checkpoint.infos[name]), tensors[name]) for name in tensors)
    for info in checkpoint.infos.values():
        assert info.offset % max(1, dtype_bits(info.dtype) // 8) == 0


@pytest.mark.parametrize("dtype", ["BF16", "F8_E4M3", "I32", "F64"])
@pytest.mark.parametrize("shape", [(40, 24), (33, 7), (6, 5, 4), (17,)])
def test_slices_equal_get_slice(dtype: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    save_file({"t": random_tensor(dtype, shape)}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    info = checkpoint.infos["t"]
    with safe_open(tmp_path / "model.safetensors", "pt") as theirs, Reader(checkpoint) as reader:
        part = theirs.get_slice("t")
        for rows in ((0, shape[0]), (0, 1), (shape[0] // 3, shape[0] // 2), (shape[0] - 1, shape[0])):
            assert same_bits(reader.read(info, rows=rows), part[rows[0] : rows[1]])
            if len(shape) > 1:
                for cols in ((0, shape[1]), (1, 3), (shape[1] - 1, shape[1])):
                    expected = part[rows[0] : rows[1], cols[0] : cols[1]]
                    assert same_bits(reader.read(info, rows=rows, cols=cols), expected)


def test_shards_metadata_and_a_big_header(tmp_path: Path) -> None:
    values = torch.arange(18000, dtype=torch.int16).view(torch.bfloat16).reshape(3000, 2, 3)
    tensors = {f"model.layers.{i}.some.rather.long.name.weight": values[i] for i in range(3000)}
    write_ours(tensors, tmp_path, max_shard_bytes=12_000)
    checkpoint = open_checkpoint(tmp_path)
    assert [path.name for path in checkpoint.headers] == [
        "model-00001-of-00003.safetensors",
        "model-00002-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
    ]
    assert list(checkpoint.infos) == list(tensors)
    loaded: dict[str, torch.Tensor] = {}
    for path, header in checkpoint.headers.items():
        assert header.metadata == {"format": "pt"}
        assert header.data_start % 8 == 0
        with safe_open(path, "pt") as theirs:
            assert theirs.metadata() == {"format": "pt"}
            loaded |= {name: theirs.get_tensor(name) for name in theirs.keys()}  # noqa: SIM118
    assert loaded.keys() == tensors.keys()
    assert all(same_bits(loaded[name], tensors[name]) for name in tensors)


def test_names_and_metadata_outside_ascii(tmp_path: Path) -> None:
    tensors = {'gewicht.\u00fc \U0001f600 "\\/': random_tensor("F32", (2,)), "": random_tensor("F32", (1,))}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"k\u00e9y": "\n\u4e2d"})
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.infos.keys() == tensors.keys()
    assert next(iter(checkpoint.headers.values())).metadata == {"k\u00e9y": "\n\u4e2d"}
    (tmp_path / "ours").mkdir()
    write_ours(tensors, tmp_path / "ours")
    assert load_file(tmp_path / "ours" / "model.safetensors").keys() == tensors.keys()


@pytest.fixture(scope="module")
def sound_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fuzz") / "model.safetensors"
    tensors = {
        "a": random_tensor("F32", (2, 3)),
        "b.weight": random_tensor("BF16", (5,)),
        "c": random_tensor("I64", ()),
        "e": random_tensor("F8_E4M3", (0, 3)),
    }
    save_file(tensors, path, metadata={"format": "pt", "k": "v"})
    return path


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_header_is_refused_where_the_library_refuses_it(
    data: st.DataObject, sound_file: Path, tmp_path: Path
) -> None:
    """Random bytes flipped: only ever a CheckpointError that names the file, or the library's own reading."""
    raw = bytearray(sound_file.read_bytes())
    header_end = 8 + int.from_bytes(raw[:8], "little")
    likely = st.sampled_from(list(b'0123456789{}[]",:\\u eE-.'))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, header_end - 1))] = data.draw(st.one_of(likely, st.integers(0, 255)))
    path = tmp_path / "damaged.safetensors"
    path.write_bytes(raw)
    theirs = None
    try:
        with safe_open(path, "pt") as stream:
            theirs = {name: tuple(stream.get_slice(name).get_shape()) for name in stream.keys()}  # noqa: SIM118
    except (SafetensorError, UnicodeDecodeError):
        pass
    if theirs is None:
        with pytest.raises(CheckpointError, match=re.escape(f"{path}: ")):
            read_header(path)
        return
    try:
        ours = {name: info.shape for name, info in read_header(path).infos.items()}
    except CheckpointError as error:  # it lets the last of two equal names win
        if "appears twice" not in str(error):
            raise
    else:
        assert ours == theirs
