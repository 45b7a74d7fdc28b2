"""The header of a safetensors file, checked before a byte of the file is used.

The format: 8 bytes little-endian header length; a UTF-8 JSON object, padded with spaces,
``{name: {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__": {str: str}}``; then the data, which
the tensors tile exactly. A header is data from a stranger: sizes are checked before memory is taken and every
contradiction is a :class:`CheckpointError` that names the file and the tensor.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from modelexport.errors import CheckpointError, quoted
from modelexport.system.small_files import open_regular

if TYPE_CHECKING:
    import torch

MAX_HEADER_BYTES = 100_000_000
"""The limit that the safetensors library sets too."""
_MAX_INT = 2**63 - 1

# name in the file -> (bits per element, torch's name for it or None)
_DTYPES: dict[str, tuple[int, str | None]] = {
    "BOOL": (8, "bool"),
    "F4": (4, "float4_e2m1fn_x2"),
    "F6_E2M3": (6, None),
    "F6_E3M2": (6, None),
    "U8": (8, "uint8"),
    "I8": (8, "int8"),
    "F8_E5M2": (8, "float8_e5m2"),
    "F8_E4M3": (8, "float8_e4m3fn"),
    "F8_E8M0": (8, "float8_e8m0fnu"),
    "F8_E4M3FNUZ": (8, "float8_e4m3fnuz"),
    "F8_E5M2FNUZ": (8, "float8_e5m2fnuz"),
    "I16": (16, "int16"),
    "U16": (16, "uint16"),
    "F16": (16, "float16"),
    "BF16": (16, "bfloat16"),
    "I32": (32, "int32"),
    "U32": (32, "uint32"),
    "F32": (32, "float32"),
    "C64": (64, "complex64"),
    "F64": (64, "float64"),
    "I64": (64, "int64"),
    "U64": (64, "uint64"),
}


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


def dtype_names() -> tuple[str, ...]:
    """Every dtype the format knows, as it spells them."""
    return tuple(_DTYPES)


def dtype_bits(dtype: str) -> int:
    """Bits per element of a format's dtype name.

    Raises:
        CheckpointError: no such dtype.
    """
    if dtype not in _DTYPES:
        raise CheckpointError(f"unknown dtype {dtype!r}; safetensors has {', '.join(_DTYPES)}")
    return _DTYPES[dtype][0]


def torch_dtype(dtype: str) -> torch.dtype:
    """torch's dtype for a format's dtype name.

    Raises:
        CheckpointError: the name is unknown, or this torch has no such dtype.
    """
    import torch

    dtype_bits(dtype)
    found = getattr(torch, _DTYPES[dtype][1] or "", None)
    if found is None:
        raise CheckpointError(f"torch {torch.__version__} has no dtype for safetensors' {dtype}")
    return found


def dtype_name(dtype: torch.dtype) -> str:
    """The format's name for a torch dtype.

    Raises:
        CheckpointError: safetensors cannot hold it.
    """
    spelled = str(dtype).removeprefix("torch.")
    for name, (_, in_torch) in _DTYPES.items():
        if in_torch == spelled:
            return name
    raise CheckpointError(f"safetensors has no dtype for {dtype}")


def tensor_nbytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor of this dtype and shape (in elements).

    Raises:
        CheckpointError: unknown dtype, a negative or too large size, elements that fill no whole bytes.
    """
    bits = dtype_bits(dtype)
    if any(n == 0 for n in shape):
        return 0
    for n in shape:
        if n < 0:
            raise CheckpointError(f"negative size {n} in shape {list(shape)}")
        bits *= n
        if bits > 8 * _MAX_INT:
            raise CheckpointError("its size overflows 63 bits")
    if bits % 8:
        raise CheckpointError(f"{bits} bits of {dtype} do not fill whole bytes")
    return bits // 8


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
            text, data_start = _header_text(path, file.fileno(), size)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    return _parse(path, text, data_start, size)


def _header_text(path: Path, fd: int, size: int) -> tuple[bytes, int]:
    if size < 8:
        raise CheckpointError(f"{path}: truncated: {size} bytes, but a header length alone takes 8")
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{path}: its header claims {length:,} bytes, at most {MAX_HEADER_BYTES:,} are allowed; "
            "this is not a safetensors file, or it is damaged"
        )
    if 8 + length > size:
        raise CheckpointError(f"{path}: truncated: the header ends at byte {8 + length:,}, the file at {size:,}")
    text = b""
    while len(text) < length:
        piece = os.pread(fd, length - len(text), 8 + len(text))
        if not piece:
            raise CheckpointError(f"{path}: truncated while it was being read")
        text += piece
    return text, 8 + length


def _parse(path: Path, text: bytes, data_start: int, size: int) -> Header:
    entries = _json_object(path, text)
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: __metadata__ must map strings to strings")
    infos = [_info(path, name, entry, data_start) for name, entry in entries.items()]
    infos.sort(key=lambda info: (info.offset, info.nbytes, info.name))
    _check_tiling(path, infos, data_start, size)
    return Header({info.name: info for info in infos}, metadata, data_start)


def _json_object(path: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
            raise CheckpointError(f"{path}: {quoted(twice)} appears twice in the header")
        return found

    def no_constant(word: str) -> NoReturn:
        raise ValueError(f"{word} is not JSON")

    if not text.startswith(b"{"):
        raise CheckpointError(f"{path}: the header must begin with '{{', found {text[:1]!r}")
    try:
        parsed = json.loads(text.decode("utf-8"), object_pairs_hook=unique, parse_constant=no_constant)
        if b"\\u" in text:  # "\ud800" alone is half a surrogate pair, a string that no one can print
            json.dumps(parsed, ensure_ascii=False).encode("utf-8")
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the header is not valid JSON: {error}") from error
    return parsed


def _info(path: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    where = f"{path}: tensor {quoted(name)}"
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise CheckpointError(f"{where}: needs dtype, shape and data_offsets, has {_clip(entry)}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str):
        raise CheckpointError(f"{where}: dtype must be a string, is {_clip(dtype)}")
    if not _is_sizes(shape):
        raise CheckpointError(f"{where}: shape must be a list of sizes, is {_clip(shape)}")
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where}: data_offsets must be [begin, end], are {_clip(offsets)}")
    try:
        expected = tensor_nbytes(dtype, shape)
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from error
    begin, end = offsets
    if expected != end - begin:
        raise CheckpointError(
            f"{where}: {dtype} {_clip(shape)} takes {expected:,} bytes, its data_offsets {offsets} hold {end - begin:,}"
        )
    return TensorInfo(name, dtype, tuple(shape), path, data_start + begin, expected)


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n <= _MAX_INT for n in value)


def _clip(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _check_tiling(path: Path, infos: Sequence[TensorInfo], data_start: int, size: int) -> None:
    at = data_start
    before = "the header"
    for info in infos:
        if info.offset != at:
            what = "a gap" if info.offset > at else "an overlap"
            raise CheckpointError(
                f"{path}: tensor {quoted(info.name)}: {what}: it begins at byte {info.offset:,} of the file, "
                f"{before} ends at {at:,}"
            )
        at += info.nbytes
        before = f"tensor {quoted(info.name)}"
        if at > size:
            raise CheckpointError(
                f"{path}: tensor {quoted(info.name)}: truncated: it ends at byte {at:,}, the file at {size:,} "
                f"({_end(infos):,} bytes expected in all)"
            )
    if at != size:
        raise CheckpointError(f"{path}: {size - at:,} bytes after the last tensor: {at:,} expected, {size:,} found")


def _end(infos: Sequence[TensorInfo]) -> int:
    return max(info.offset + info.nbytes for info in infos)
