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
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from modelexport.distributed.transport import tree as _tree
from modelexport.errors import CheckpointError, GatherError
from modelexport.system import safetensors_header
from modelexport.system.dtypes import dtype_bits, find_dtype, torch_dtype, torch_dtype_named, torch_name
from modelexport.system.safetensors_header import HeaderEntry, encode_header, header_length

__all__ = ["DamagedPayloadError", "Payload", "PayloadEntry", "as_bytes", "pack", "parse_header", "unpack"]

_TREE, _DTYPES = "modelexport.tree", "modelexport.dtypes"


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
    entries, stored, unnamed, offset = [], [], {}, 0
    for name, tensor in order:
        shape, code = tuple(tensor.shape), _code_of(tensor.dtype)
        end = offset + tensor.numel() * tensor.dtype.itemsize
        if code is None:
            unnamed[name] = torch_name(tensor.dtype)
        stored.append((name, code or "U8", shape if code else (*shape, tensor.dtype.itemsize), end - offset))
        entries.append(PayloadEntry(name, tensor.dtype, shape, offset, end))
        offset = end
    metadata = {"format": "pt", _TREE: text}
    if unnamed:
        metadata[_DTYPES] = json.dumps(unnamed)
    try:
        header = encode_header(stored, metadata)
    except CheckpointError as error:
        raise GatherError(f"a config is too large: {error}") from error
    return Payload(header, tuple(entries), tuple(tensor for _, tensor in order))


@cache
def _code_of(dtype: torch.dtype) -> str | None:
    """safetensors' name for a dtype; None where it has none, or counts its elements in another way (F4)."""
    code = find_dtype(torch_name(dtype))
    return code if code is not None and dtype_bits(code) == 8 * dtype.itemsize else None


def parse_header(header: bytes | memoryview) -> tuple[str, tuple[PayloadEntry, ...]]:
    """The config's JSON and the tensors' entries, in the order of their bytes, everything checked.

    Raises:
        DamagedPayloadError: it is not the header of a payload, or its tensors do not tile the data.
    """
    try:
        length = header_length(bytes(header[:8]), len(header))
        if length != len(header) - 8:
            raise ValueError(f"the header says {length} bytes and has {len(header) - 8}")
        found, metadata = safetensors_header.parse_header(bytes(header[8:]))
        unnamed = json.loads(metadata.get(_DTYPES, "{}"))
        return metadata[_TREE], tuple([_entry(entry, unnamed.get(entry.name)) for entry in found])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedPayloadError(f"a payload's header is damaged: {error!r}") from error


def _entry(found: HeaderEntry, unnamed: str | None) -> PayloadEntry:
    name, code, shape, start, end = found
    dtype = torch_dtype(code) if unnamed is None else torch_dtype_named(unnamed)
    if unnamed is not None:
        if code != "U8" or shape[-1:] != (dtype.itemsize,):
            raise ValueError(f"{name!r}: {unnamed} in {code} of shape {shape}")
        shape = shape[:-1]
    elif _code_of(dtype) is None:
        raise ValueError(f"{name!r}: {code} does not count in torch's elements")
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
