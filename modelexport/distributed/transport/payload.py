"""A payload: one rank's config and tensors, as the bytes of a safetensors file.

A payload is a header followed by the bytes of each tensor, in the header's order, without gaps: exactly a
safetensors file. Over shared memory the parts stay where they lie and a list says where (see ``link``); in an
NFS workspace they are written one after the other. Joined, both give the same bytes.

The header's ``__metadata__`` holds the config's JSON under ``modelexport.tree``. A dtype that safetensors has no
name for is stored as ``U8`` with the item size as one more last dim, and named in ``modelexport.dtypes``.
Tensors are ordered by item size, largest first, so that each starts at a multiple of its own item size.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from typing import Any

import torch

from modelexport.distributed.transport import tree as _tree
from modelexport.errors import GatherError

__all__ = ["DamagedPayloadError", "Payload", "PayloadEntry", "as_bytes", "pack", "parse_header", "unpack"]

_TREE, _DTYPES = "modelexport.tree", "modelexport.dtypes"
_MAX_HEADER = 100_000_000  # safetensors' own bound

_SAFETENSORS = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "C64": "complex64",
}  # fmt: skip
_DTYPE_OF = {code: getattr(torch, name) for code, name in _SAFETENSORS.items() if hasattr(torch, name)}
_CODE_OF = {dtype: code for code, dtype in _DTYPE_OF.items()}


class DamagedPayloadError(GatherError):
    """The bytes are not those of a payload."""


@dataclass(frozen=True)
class PayloadEntry:
    """One tensor of a payload; ``start`` and ``end`` count from the end of the header, in bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class Payload:
    """``header`` (with its 8 length bytes) and ``tensors``, one for each of ``entries``, not yet copied."""

    header: bytes
    entries: tuple[PayloadEntry, ...]
    tensors: tuple[torch.Tensor, ...]

    @property
    def nbytes(self) -> int:
        return len(self.header) + (self.entries[-1].end if self.entries else 0)


def pack(config: Any) -> Payload:
    """Describes ``config`` (see :mod:`modelexport.distributed.transport.tree`) as a payload; copies no tensor data."""
    text, tensors = _tree.split(config)
    order = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)  # stable: else the tree's order
    entries, fields, unnamed, offset = [], {}, {}, 0
    for name, tensor in order:
        shape = tuple(tensor.shape)
        end = offset + tensor.numel() * tensor.dtype.itemsize
        code = _CODE_OF.get(tensor.dtype)
        stored = shape if code else (*shape, tensor.dtype.itemsize)
        if code is None:
            unnamed[name] = str(tensor.dtype).removeprefix("torch.")
        fields[name] = {"dtype": code or "U8", "shape": list(stored), "data_offsets": [offset, end]}
        entries.append(PayloadEntry(name, tensor.dtype, shape, offset, end))
        offset = end
    metadata = {"format": "pt", _TREE: text}
    if unnamed:
        metadata[_DTYPES] = json.dumps(unnamed)
    body = json.dumps({"__metadata__": metadata, **fields}, separators=(",", ":")).encode("ascii")
    body += b" " * (-len(body) % 8)
    if len(body) > _MAX_HEADER:
        raise GatherError(f"a config's header has {len(body)} bytes, safetensors allows {_MAX_HEADER}")
    return Payload(struct.pack("<Q", len(body)) + body, tuple(entries), tuple(tensor for _, tensor in order))


def parse_header(header: bytes | memoryview) -> tuple[str, tuple[PayloadEntry, ...]]:
    """The config's JSON and the tensors' entries, in the order of their bytes, everything checked.

    Raises:
        DamagedPayloadError: it is not the header of a payload, or its tensors do not tile the data.
    """
    try:
        (length,) = struct.unpack_from("<Q", header)
        if length != len(header) - 8:
            raise ValueError(f"the header says {length} bytes and has {len(header) - 8}")
        fields = json.loads(bytes(header[8:]))
        metadata = fields.pop("__metadata__")
        text = metadata[_TREE]
        unnamed = json.loads(metadata.get(_DTYPES, "{}"))
        entries = [_entry(name, field, unnamed.get(name)) for name, field in fields.items()]
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise DamagedPayloadError(f"a payload's header is damaged: {error!r}") from error
    entries.sort(key=lambda entry: (entry.start, entry.end))
    offset = 0
    for entry in entries:
        if entry.start != offset:
            raise DamagedPayloadError(
                f"a payload's tensor {entry.name!r} starts at byte {entry.start}, expected {offset}"
            )
        offset = entry.end
    return text, tuple(entries)


def _entry(name: str, field: dict[str, Any], unnamed: str | None) -> PayloadEntry:
    dtype = _DTYPE_OF[field["dtype"]] if unnamed is None else getattr(torch, unnamed)
    shape = tuple(int(dim) for dim in field["shape"])
    if unnamed is not None:
        if not isinstance(dtype, torch.dtype) or shape[-1:] != (dtype.itemsize,):
            raise ValueError(f"{name!r}: {unnamed} with bytes of shape {shape}")
        shape = shape[:-1]
    start, end = (int(offset) for offset in field["data_offsets"])
    if min(shape, default=0) < 0 or end - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name!r}: {dtype} of shape {shape} in bytes {start}..{end}")
    return PayloadEntry(name, dtype, shape, start, end)


def unpack(text: str, entries: tuple[PayloadEntry, ...], views: list[memoryview | None]) -> Any:
    """The config whose tensors are zero-copy views of ``views``, one for each entry (None where it is empty)."""
    tensors = {
        entry.name: torch.empty(entry.shape, dtype=entry.dtype)
        if view is None
        else torch.frombuffer(view, dtype=entry.dtype).view(entry.shape)
        for entry, view in zip(entries, views, strict=True)
    }
    return _tree.restore(text, tensors)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of ``tensor`` as uint8 of shape ``[nbytes]``, on the CPU; a view where it lies so already."""
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8)
