"""The tensors that a safetensors file holds, from its header; see :mod:`modelexport.system.safetensors_header`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from modelexport.errors import CheckpointError
from modelexport.system.safetensors_header import header_length, parse_header
from modelexport.system.small_files import open_regular, read_at


@dataclass(frozen=True)
class TensorInfo:
    """The place of a tensor in a file.

    Attributes:
        name: the tensor's name in the checkpoint.
        dtype: its dtype as the format spells it, e.g. ``"BF16"``.
        shape: its shape as the file gives it (``F4``: in elements, two to the byte).
        path: the file that holds it.
        offset: of its first byte, from the start of the file.
        nbytes: its size.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Header:
    """A checked header: tensors in the order of their data, free-form metadata, where the data begins."""

    infos: dict[str, TensorInfo]
    metadata: dict[str, str]
    data_start: int


def read_header(path: str | os.PathLike[str]) -> Header:
    """Read and check the header of one safetensors file.

    Args:
        path: the file. A symbolic link is followed (the hub's cache keeps its files behind links).

    Returns:
        The header; its ``infos`` are in the order of their data in the file.

    Raises:
        CheckpointError: the file cannot be read, is cut short, or contradicts itself; names file and tensor.
    """
    path = Path(path)
    with open_regular(path) as file:
        try:
            size = os.fstat(file.fileno()).st_size
            length = header_length(read_at(file.fileno(), 8, 0), size)
            entries, metadata = parse_header(_read(file.fileno(), length), size)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error
    start = 8 + length
    infos = {
        name: TensorInfo(name, dtype, shape, path, start + begin, end - begin)
        for name, dtype, shape, begin, end in entries
    }
    return Header(infos, metadata, start)


def header_mentions(path: str | os.PathLike[str], word: str) -> bool:
    """Returns whether the JSON of a file's header has an ASCII word somewhere: quicker than to read it.

    Raises:
        CheckpointError: the file cannot be read, or is cut short within the header.
    """
    with open_regular(Path(path)) as file:
        try:
            size = os.fstat(file.fileno()).st_size
            return word.encode("ascii") in _read(file.fileno(), header_length(read_at(file.fileno(), 8, 0), size))
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error


def _read(fd: int, length: int) -> bytes:
    text = read_at(fd, length, 8)
    if len(text) != length:
        raise CheckpointError("truncated while it was being read")
    return text
