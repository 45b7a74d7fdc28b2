"""``.metadata`` of a distributed checkpoint (DCP): which tensors there are, in which chunks, and where each chunk lies.

The file is a pickle of torch's ``Metadata``. It is read as inert data (nothing of it is executed, torch is not needed)
and written as such; torch 2.6 to 2.13 read the same fields.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelexport.checkpoints.torch_archive.pickle_reading import MAX_PICKLE_BYTES, Call, Name, read_pickle, shown
from modelexport.checkpoints.torch_archive.pickle_writing import write_pickle
from modelexport.checkpoints.torch_archive.zip import dtype_from_torch, dtype_to_torch
from modelexport.errors import CheckpointError, quoted
from modelexport.sharding.boxes import Box, extent, offset, placed, uncovered, volume, whole
from modelexport.system.small_files import read_small

METADATA_NAME = ".metadata"
_MAX_INT = 1 << 60
# Names that stand in the file for its readers; nothing of that package is imported.
_PACKAGE = ".".join(("torch", "distributed", "checkpoint"))
_OF_METADATA = f"{_PACKAGE}.metadata"
_MOST_IRREGULAR = 1 << 13


@dataclass(frozen=True)
class Chunk:
    """A rectangle of a tensor and the archive that holds it: ``length`` bytes from byte ``start`` of ``file``."""

    box: Box
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a distributed checkpoint, by its key.

    Attributes:
        dtype: as safetensors spells it.
        chunks: without overlap, together all of it.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


class Metadata:
    """The content of ``.metadata``. A tensor's entry is parsed and checked when it is asked for: most are not.

    Attributes:
        keys: of all tensors.
        objects: keys of what are no tensors.
    """

    def __init__(self, described: dict[str, Any], stored: dict[Any, Any]) -> None:
        self._described = {key: fields for key, entry in described.items() if "chunks" in (fields := _fields(entry))}
        self.keys = tuple(self._described)
        self.objects = tuple(key for key in described if key not in self._described)
        self._stored: dict[str, list[tuple[Any, Any]]] = {}
        for index, info in stored.items():
            name = _fields(index).get("fqn")
            if isinstance(name, str):
                self._stored.setdefault(name, []).append((index, info))
        self._found: dict[str, StoredTensor] = {}

    def tensor(self, key: str) -> StoredTensor:
        """The tensor of that key.

        Raises:
            CheckpointError: its entry makes no sense; says what does not.
        """
        if key not in self._found:
            archives = {}
            for index, info in self._stored.get(key, ()):
                archives[_sizes(_fields(index).get("offset")) or ()] = _fields(info)
            self._found[key] = _tensor(key, self._described[key], archives)
        return self._found[key]


# ------------------------------------------------------------------ reading


def read_metadata(directory: Path) -> Metadata:
    """Read and check ``.metadata``; no other file is looked at.

    Raises:
        CheckpointError: it is missing, damaged, or does not hold what torch writes there.
    """
    path = directory / METADATA_NAME
    fields = _fields(read_pickle(read_small(path, largest=MAX_PICKLE_BYTES), what=str(path)))
    described, stored = fields.get("state_dict_metadata"), fields.get("storage_data")
    if not isinstance(described, dict) or not isinstance(stored, dict):
        raise CheckpointError(f"{path}: is no metadata of a distributed checkpoint: it lists neither tensors nor files")
    for key in described:
        if not isinstance(key, str):
            raise CheckpointError(f"{path}: a key is {shown(key)}; every key must be text")
    return Metadata(described, stored)


def _fields(value: Any) -> dict[Any, Any]:
    """The attributes of an object in the pickle."""
    state = value.state if isinstance(value, Call) else None
    return state if isinstance(state, dict) else {}


_Archives = dict[tuple[int, ...], dict[Any, Any]]
"""Where the chunk that begins at an offset lies: the fields of torch's record of it."""


def _tensor(key: str, fields: dict[Any, Any], archives: _Archives) -> StoredTensor:
    shape, listed_chunks = _sizes(fields.get("size")), fields.get("chunks")
    if shape is None or not isinstance(listed_chunks, list):
        raise CheckpointError(
            f"{quoted(key)}: its size is {shown(fields.get('size'))}, its chunks {shown(listed_chunks)}"
        )
    dtype = _dtype(key, fields.get("properties"))
    chunks: dict[Box, Chunk] = {}
    for entry in listed_chunks:
        start, size = _sizes(_fields(entry).get("offsets")), _sizes(_fields(entry).get("sizes"))
        if start is None or size is None or not len(start) == len(size) == len(shape):
            raise CheckpointError(
                f"{quoted(key)} of shape {list(shape)}: a chunk's offset and size are {start} and {size}"
            )
        box = placed(start, size)
        if any(stop > n for (_, stop), n in zip(box, shape, strict=True)):
            raise CheckpointError(
                f"{quoted(key)} of shape {list(shape)}: the chunk of size {list(size)} at {list(start)} is outside it"
            )
        if volume(box) or not volume(whole(shape)):
            chunks[box] = Chunk(box, *_archive(key, start, archives))
    _check_tiling(key, shape, chunks)
    return StoredTensor(key, dtype, shape, tuple(chunks.values()))


def _archive(key: str, start: tuple[int, ...], archives: _Archives) -> tuple[str, int, int]:
    info = archives.get(start)
    if info is None:
        raise CheckpointError(f"{quoted(key)}: no file is given for its chunk at {list(start)}")
    file, at, length = info.get("relative_path"), info.get("offset"), info.get("length")
    # A plain name only: that keeps out "../", absolute paths and directories that are links elsewhere.
    if not isinstance(file, str) or file in ("", ".", "..") or any(c in file for c in "/\\\0"):
        raise CheckpointError(f"{quoted(key)}: {shown(file)} is not the name of a file in the checkpoint's directory")
    if not isinstance(at, int) or not isinstance(length, int) or not (_is_size(at) and _is_size(length)):
        raise CheckpointError(f"{quoted(key)}: its chunk at {list(start)} takes {shown(length)} bytes from {shown(at)}")
    if info.get("transform_descriptors"):
        raise CheckpointError(
            f"{quoted(key)}: was written through {shown(info['transform_descriptors'])}, which only the program that "
            "wrote it can undo; save it again without such an extension"
        )
    return file, at, length


def _dtype(key: str, properties: Any) -> str:
    state = properties.state if isinstance(properties, Call) else None
    kind = state.get("dtype") if isinstance(state, dict) else state[0] if isinstance(state, tuple) and state else None
    dtype = dtype_from_torch(kind.name) if isinstance(kind, Name) else None
    if dtype is None:
        raise CheckpointError(f"{quoted(key)}: its dtype {shown(kind)} is none that can be read")
    return dtype


def _sizes(value: Any) -> tuple[int, ...] | None:
    """A ``torch.Size`` in a pickle, or what else holds sizes there."""
    if isinstance(value, Call) and value.name == "Size":
        value = value.args[0] if value.args else ()
    if isinstance(value, (tuple, list)) and len(value) <= 64 and all(_is_size(n) for n in value):
        return tuple(value)
    return None


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MAX_INT


def _check_tiling(key: str, shape: Sequence[int], boxes: Iterable[Box]) -> None:
    """Chunks must not overlap and leave nothing out."""
    parts = sorted(boxes)
    total, wanted = sum(volume(box) for box in parts), volume(whole(shape))
    if total == wanted and _is_grid(parts, len(shape)):
        return
    if len(parts) > _MOST_IRREGULAR:
        raise CheckpointError(
            f"{quoted(key)}: its {len(parts):,} chunks form no grid; more than {_MOST_IRREGULAR:,} must"
        )
    missing = uncovered(whole(shape), parts) if wanted else []
    if missing:
        gap = missing[0]
        raise CheckpointError(
            f"{quoted(key)} of shape {list(shape)} is not whole: its {len(parts)} chunks leave out "
            f"{list(extent(gap))} at {list(offset(gap))}"
        )
    if total != wanted:
        raise CheckpointError(f"{quoted(key)}: its chunks overlap: they have {total:,} elements, the tensor {wanted:,}")


def _is_grid(boxes: Sequence[Box], dims: int) -> bool:
    """Returns whether boxes, all different, are the cells of a grid: then they cannot overlap. Quick for many of
    them."""
    cells = 1
    for dim in range(dims):
        ranges = sorted({box[dim] for box in boxes})
        if any(stop > start for (_, stop), (start, _) in itertools.pairwise(ranges)):
            return False
        cells *= len(ranges)
    return cells == len(boxes)


# ------------------------------------------------------------------ writing


def metadata_bytes(tensors: Iterable[StoredTensor]) -> bytes:
    """The content of ``.metadata`` for tensors whose chunks are where they say.

    Raises:
        CheckpointError: torch has no name for a dtype.
    """
    described, stored, paths = {}, {}, {}
    for tensor in tensors:
        chunks = []
        for number, chunk in enumerate(tensor.chunks):
            start = _size_call(offset(chunk.box))
            chunks.append(_made("ChunkStorageMetadata", {"offsets": start, "sizes": _size_call(extent(chunk.box))}))
            index = _made("MetadataIndex", {"fqn": tensor.key, "index": number, "offset": start})
            fields = {"relative_path": chunk.file, "offset": chunk.start, "length": chunk.length}
            stored[index] = _made("_StorageInfo", fields, module=f"{_PACKAGE}.filesystem")
        fields = {"properties": _properties(tensor.dtype), "size": _size_call(tensor.shape), "chunks": chunks}
        described[tensor.key] = _made("TensorStorageMetadata", fields)
        paths[tensor.key] = (tensor.key,)
    origin = _made("StorageMeta", {"checkpoint_id": None, "save_id": None, "load_id": None, "modules": []})
    return write_pickle(
        _made(
            "Metadata",
            {
                "state_dict_metadata": described,
                "planner_data": paths,
                "storage_data": stored,
                "storage_meta": origin,
                "version": "1.0.0",
            },
        )
    )


def _made(name: str, fields: dict[str, Any], *, module: str = _OF_METADATA) -> Call:
    return Call(Name(module, name), new=True, state=fields)


def _size_call(sizes: Sequence[int]) -> Call:
    return Call(Name("torch", "Size"), (tuple(sizes),))


def _properties(dtype: str) -> Call:
    layout = Call(Name("torch.serialization", "_get_layout"), ("torch.strided",))
    contiguous = Call(Name(_OF_METADATA, "_MEM_FORMAT_ENCODING"), (0,))
    state = (Name("torch", dtype_to_torch(dtype)), layout, False, contiguous, False)
    return Call(Name(_OF_METADATA, "TensorProperties"), new=True, state=state)
