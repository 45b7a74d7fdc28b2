"""Headers of safetensors files: what is encoded is parsed as it was, and is refused where it is damaged."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from modelexport.errors import CheckpointError
from modelexport.system import safetensors_header
from modelexport.system.dtypes import as_integers, dtype_name, dtype_names, tensor_nbytes, torch_dtype, torch_name
from modelexport.system.safetensors_header import encode_header, header_length, parse_header

tensors = st.lists(
    st.tuples(
        st.text(max_size=8).filter(lambda name: name != "__metadata__"),
        st.sampled_from([name for name in dtype_names() if not name.startswith(("F4", "F6"))]),
        st.lists(st.integers(0, 5), max_size=3),
    ),
    max_size=6,
    unique_by=lambda tensor: tensor[0],
)


@given(tensors, st.dictionaries(st.text(max_size=4), st.text(max_size=8), max_size=3))
def test_parsing_is_the_inverse_of_encoding(found: list[tuple[str, str, list[int]]], metadata: dict[str, str]) -> None:
    sizes = [tensor_nbytes(dtype, shape) for _, dtype, shape in found]
    header = encode_header([(*tensor, size) for tensor, size in zip(found, sizes, strict=True)], metadata)
    assert len(header) % 8 == 0
    assert header_length(header[:8], len(header)) == len(header) - 8
    entries, read = parse_header(header[8:], len(header) + sum(sizes))
    assert read == metadata
    by_name = {entry.name: (entry.dtype, list(entry.shape), entry.end - entry.begin) for entry in entries}
    assert by_name == {name: (dtype, shape, size) for (name, dtype, shape), size in zip(found, sizes, strict=True)}
    with pytest.raises(CheckpointError, match="1 bytes after the last tensor"):
        parse_header(header[8:], len(header) + sum(sizes) + 1)


def test_a_header_larger_than_readers_take_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_header, "MAX_HEADER_BYTES", 64)
    with pytest.raises(CheckpointError, match="a header of 120 bytes: safetensors allows 64"):
        encode_header([("a" * 30, "U8", (1,), 1)], {"format": "pt"})
    with pytest.raises(CheckpointError, match="claims 65 bytes"):
        header_length((65).to_bytes(8, "little"), 1000)


def test_names_of_dtypes_are_torch_s_and_back() -> None:
    for name in dtype_names():
        if not name.startswith(("F4", "F6")):
            dtype = torch_dtype(name)
            assert dtype_name(dtype) == name
            assert torch_name(name) == torch_name(dtype) == str(dtype).removeprefix("torch.")
            integers = as_integers(torch.zeros(3, dtype=dtype))
            assert integers.shape == (3,)
            assert integers.dtype.itemsize == dtype.itemsize
    with pytest.raises(CheckpointError, match="torch has no dtype for safetensors' F6_E2M3"):
        torch_name("F6_E2M3")
