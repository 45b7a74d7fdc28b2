"""The envelope that ``torch.save`` puts around a tensor: found in a file without loading it, and laid out in advance.

Such a file is a zip archive whose members are stored uncompressed: ``<any>/data.pkl``, a pickle that says of which
dtype, shape and strides the tensor is and in which member its elements lie (``<any>/data/0``), that member, and a few
small ones. So a tensor is a range of bytes in a file like any other, once the archive's directory and that pickle are
read; neither is ever executed.

The other way round the size of every member is known before any data is, so the envelope can be written first and the
elements put in place later, by anyone. Only their checksum is not known then: it is left 0, as ``torch.save`` itself
leaves it after ``torch.serialization.set_crc32_options(False)``; torch does not check it.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from modelexport.checkpoints.safetensors.placement import row_major
from modelexport.checkpoints.torch_archive.pickle_reading import Call, Name, Persistent, read_pickle
from modelexport.checkpoints.torch_archive.pickle_writing import write_pickle
from modelexport.errors import CheckpointError, quoted
from modelexport.system.dtypes import dtype_bits, dtype_names, find_dtype, tensor_nbytes, torch_name
from modelexport.system.small_files import read_at

ALIGNMENT = 64
"""Tensors begin at a multiple of this, in their archive and in the file."""
_PROBE = 1024
_MAX_PICKLE = 1 << 16
_MAX_DIRECTORY = 1 << 20
_MAX_STATE_PICKLE = 1 << 28  # of a state dict: more than a million tensors
_MAX_STATE_DIRECTORY = 1 << 28
_MAX_DEPTH = 3  # of dicts in the state dict of a module
_NO_SIZE = 0xFFFFFFFF

_STORAGES = {  # torch's typed storages; elements of newer dtypes lie in an untyped one
    "F64": "DoubleStorage",
    "F32": "FloatStorage",
    "F16": "HalfStorage",
    "BF16": "BFloat16Storage",
    "I64": "LongStorage",
    "I32": "IntStorage",
    "I16": "ShortStorage",
    "I8": "CharStorage",
    "U8": "ByteStorage",
    "BOOL": "BoolStorage",
    "C64": "ComplexFloatStorage",
}
_BY_STORAGE = {storage: dtype for dtype, storage in _STORAGES.items()}
_KEPT = tuple(name for name in dtype_names() if dtype_bits(name) % 8 == 0)


def dtype_from_torch(name: str) -> str | None:
    """safetensors' name for the dtype that torch calls ``name`` (``"bfloat16"``); None where it has none."""
    found = find_dtype(name)
    return found if found in _KEPT else None


def dtype_to_torch(dtype: str) -> str:
    """Torch's dtype of a safetensors name.

    Raises:
        CheckpointError: torch cannot keep tensors of it.
    """
    if dtype not in _KEPT:
        raise CheckpointError(f"{dtype} tensors cannot be kept as torch.save does; it has {', '.join(_KEPT)}")
    return torch_name(dtype)


@dataclass(frozen=True)
class ArchivedTensor:
    """A tensor in an archive.

    Attributes:
        dtype: as safetensors spells it.
        shape: in elements.
        strides: bytes from one element to the next along each dim.
        offset: of the first element, from the start of the file.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


# ------------------------------------------------------------------ reading


def find_tensor(fd: int, start: int, length: int) -> ArchivedTensor:
    """Finds the one tensor that was saved to bytes ``[start, start + length)`` of an open file.

    Raises:
        CheckpointError: there is no such archive, it is damaged, or it holds something else than a plain tensor.
        OSError: the file cannot be read.
    """
    view = _View(fd, start, length)
    members = _directory(view)
    pickle = _content(view, members.get("data.pkl"), "data.pkl", limit=_MAX_PICKLE)
    described = _described(pickle)
    _check_order(view, members)
    return _located(view, members, described)


def find_state_dict(fd: int, length: int) -> dict[str, ArchivedTensor]:
    """Finds all tensors of a state dict that was saved to an open file of that length.

    Tensors that share a storage, whole or in parts, are each found where they lie.

    Raises:
        CheckpointError: there is no such archive, it is damaged, or it holds something else than plain tensors by name.
        OSError: the file cannot be read.
    """
    view, members, content = _state(fd, length)
    return {name: _named(view, members, name, value) for name, value in _entries(content)}


def find_module_states(fd: int, length: int) -> tuple[dict[str, ArchivedTensor], dict[str, dict[str, Any]]]:
    """As :func:`find_state_dict`, of a dict of the state dicts of modules.

    Returns:
        The tensors by the names of module and tensor; and module -> name -> what is no tensor, inert. Of dicts within
        a state the names are joined by a dot.

    Raises:
        CheckpointError, OSError: as :func:`find_state_dict`.
    """
    view, members, content = _state(fd, length)
    found: dict[str, ArchivedTensor] = {}
    settings: dict[str, dict[str, Any]] = {}
    for module, state in _entries(content):
        for name, value in _flat(state):
            if isinstance(value, Call) and value.name.startswith("_rebuild_"):
                full = f"{module}.{name}"
                found[full] = _named(view, members, full, value)
            else:
                settings.setdefault(module, {})[name] = value
    return found, settings


def _flat(state: Any, depth: int = 0) -> Iterable[tuple[str, Any]]:
    """The entries of a state dict and of the dicts in it."""
    for name, value in _entries(state):
        if isinstance(value, dict) and depth < _MAX_DEPTH:
            yield from ((f"{name}.{inner}", held) for inner, held in _flat(value, depth + 1))
        else:
            yield name, value


def _state(fd: int, length: int) -> tuple[_View, dict[str, _Member], Any]:
    """An archive, its members, and what its pickle describes."""
    view = _View(fd, 0, length)
    members = _directory(view, limit=_MAX_STATE_DIRECTORY)
    content = read_pickle(
        _content(view, members.get("data.pkl"), "data.pkl", limit=_MAX_STATE_PICKLE, what="a state dict"),
        what="data.pkl",
    )
    _check_order(view, members)
    return view, members, content


def _named(view: _View, members: Mapping[str, _Member], name: str, value: Any) -> ArchivedTensor:
    try:
        return _located(view, members, _tensor(value))
    except CheckpointError as error:
        raise CheckpointError(f"{quoted(name)}: {error}") from error


def _entries(content: Any) -> Iterable[tuple[str, Any]]:
    """The entries of a state dict, whose names are texts."""
    for name, value in _items(content):
        if not isinstance(name, str):
            raise CheckpointError(f"holds a {type(name).__name__} as a name; a state dict has texts")
        yield name, value


def _items(content: Any) -> Iterable[tuple[Any, Any]]:
    """The entries of a dict, or of an OrderedDict as modules return it."""
    if isinstance(content, dict):
        return content.items()
    if isinstance(content, Call) and content.name == "OrderedDict" and not content.args:
        return content.items
    kind = (content.name or "an object") if isinstance(content, Call) else type(content).__name__
    raise CheckpointError(f"holds {kind}; a state dict is needed: tensors by their names")


def _check_order(view: _View, members: Mapping[str, _Member]) -> None:
    if "byteorder" in members and _content(view, members["byteorder"], "byteorder", limit=16) != b"little":
        raise CheckpointError("its elements are not little-endian")


def _located(view: _View, members: Mapping[str, _Member], described: _Described) -> ArchivedTensor:
    """The place in the file of a tensor that a pickle describes."""
    dtype, key, held, first, shape, strides = described
    at, size = _span(view, members.get(f"data/{key}"), f"data/{key}")
    if held > size:
        raise CheckpointError(f"its storage takes {held:,} bytes, data/{key} has {size:,}")
    return ArchivedTensor(dtype, shape, strides, view.start + at + first)


class _View:
    """A part of a file. Its two ends, in which everything but the elements lies, are read at once."""

    def __init__(self, fd: int, start: int, length: int) -> None:
        self.fd, self.start, self.length = fd, start, length
        self.head = self._pread(0, min(_PROBE, length))
        self.tail_at = max(0, length - _PROBE)
        self.tail = self._pread(self.tail_at, length - self.tail_at) if self.tail_at else self.head

    def _pread(self, at: int, count: int) -> bytes:
        piece = read_at(self.fd, count, self.start + at)
        if len(piece) != count:
            raise CheckpointError("the file was cut short while it was being read")
        return piece

    def read(self, at: int, count: int) -> bytes:
        if not 0 <= at <= at + count <= self.length:
            raise CheckpointError(f"bytes {at:,} to {at + count:,} are asked for, the archive has {self.length:,}")
        if at + count <= len(self.head):
            return self.head[at : at + count]
        if at >= self.tail_at:
            return self.tail[at - self.tail_at :][:count]
        return self._pread(at, count)


@dataclass(frozen=True)
class _Member:
    header: int
    size: int


def _directory(view: _View, limit: int = _MAX_DIRECTORY) -> dict[str, _Member]:
    """The archive's members, by their names without the archive's own."""
    if view.length < 22:
        raise CheckpointError(f"{view.length:,} bytes are no archive of torch.save")
    end = view.tail.rfind(b"PK\x05\x06")
    if end < 0 or len(view.tail) - end < 22:
        raise CheckpointError("is no archive of torch.save, or is cut short: no zip directory at its end")
    count, size, at = struct.unpack("<HII", view.tail[end + 10 : end + 20])
    wide = view.tail[max(0, end - 20) : end]
    if len(wide) == 20 and wide[:4] == b"PK\x06\x07":
        record = view.read(struct.unpack("<Q", wide[8:16])[0], 56)
        if record[:4] != b"PK\x06\x06":
            raise CheckpointError("damaged zip directory: its 64-bit part is not where it should be")
        count, size, at = struct.unpack("<QQQ", record[32:56])
    if size > limit:
        raise CheckpointError(f"its zip directory claims {size:,} bytes, at most {limit:,} are read")
    text = view.read(at, size)
    members: dict[str, _Member] = {}
    place = 0
    while place < len(text):
        if text[place : place + 4] != b"PK\x01\x02" or len(text) - place < 46:
            raise CheckpointError(f"damaged zip directory: no entry at its byte {place:,}")
        flags, method = struct.unpack("<HH", text[place + 8 : place + 12])
        packed, unpacked, named, extra, comment = struct.unpack("<IIHHH", text[place + 20 : place + 34])
        name = text[place + 46 : place + 46 + named].decode("utf-8", "replace").partition("/")[2]
        fields = text[place + 46 + named : place + 46 + named + extra]
        (header,) = struct.unpack("<I", text[place + 42 : place + 46])
        unpacked, packed, header = _wide_sizes(fields, [unpacked, packed, header])
        if method or flags & 1 or packed != unpacked:
            raise CheckpointError(f"{name} is compressed or encrypted; torch.save does neither")
        if name in members:
            raise CheckpointError(f"{name} is there twice")
        members[name] = _Member(header, unpacked)
        place += 46 + named + extra + comment
    if place != len(text) or len(members) != count:
        raise CheckpointError(f"damaged zip directory: {count:,} members expected, {len(members):,} found")
    return members


def _wide_sizes(fields: bytes, sizes: list[int]) -> list[int]:
    """Fill in what did not fit 32 bits from the extra fields of a directory entry."""
    while len(fields) >= 4:
        kind, length = struct.unpack("<HH", fields[:4])
        if kind == 1:
            wide = iter(
                struct.unpack(
                    f"<{min(length, len(fields) - 4) // 8}Q", fields[4 : 4 + min(length, len(fields) - 4) // 8 * 8]
                )
            )
            return [next(wide, size) if size == _NO_SIZE else size for size in sizes]
        fields = fields[4 + length :]
    return sizes


def _span(view: _View, member: _Member | None, name: str) -> tuple[int, int]:
    """The place of a member's bytes in the archive: (offset, size)."""
    if member is None:
        raise CheckpointError(f"is no tensor that torch.save wrote: it has no {name}")
    header = view.read(member.header, 30)
    if header[:4] != b"PK\x03\x04":
        raise CheckpointError(f"damaged: {name} is not where the zip directory says")
    named, extra = struct.unpack("<HH", header[26:30])
    at = member.header + 30 + named + extra
    if at + member.size > view.length:
        raise CheckpointError(f"{name} takes bytes {at:,} to {at + member.size:,}, its archive ends at {view.length:,}")
    return at, member.size


def _content(view: _View, member: _Member | None, name: str, *, limit: int, what: str = "a tensor") -> bytes:
    at, size = _span(view, member, name)
    if size > limit:
        raise CheckpointError(f"{name} has {size:,} bytes; {what}'s has at most {limit:,}")
    return view.read(at, size)


_Described = tuple[str, str, int, int, tuple[int, ...], tuple[int, ...]]
"""dtype, storage's key and bytes, offset in it, shape, strides in bytes."""


@lru_cache(maxsize=512)
def _described(pickle: bytes) -> _Described:
    """The one tensor of a pickle. Chunks of one kind share the answer."""
    return _tensor(read_pickle(pickle, what="data.pkl"))


def _tensor(value: Any) -> _Described:
    """The plain tensor that a value from a pickle describes."""
    call = _unwrapped(value)
    kind = call.name if isinstance(call, Call) else type(call).__name__
    if not isinstance(call, Call) or (kind, min(len(call.args), 7)) not in _REBUILDS:
        raise CheckpointError(f"holds {kind or 'something else'}; only plain tensors can be read in place")
    storage, first, shape, strides = call.args[:4]
    if not (isinstance(storage, Persistent) and isinstance(storage.id, tuple) and len(storage.id) == 5):
        raise CheckpointError("its storage is not described as torch.save does")
    _, storage_class, key, _, count = storage.id
    dtype_name = storage_class.name if isinstance(storage_class, Name) else ""
    dtype = _BY_STORAGE.get(dtype_name)
    size = dtype_bits(dtype) // 8 if dtype else 1  # an untyped storage counts bytes
    if kind == "_rebuild_tensor_v3":
        dtype_name = call.args[6].name if isinstance(call.args[6], Name) else ""
        dtype = dtype_from_torch(dtype_name)
    if dtype is None:
        raise CheckpointError(f"{dtype_name or 'its dtype'} is none of {', '.join(_KEPT)}")
    if not (isinstance(key, str) and _is_size(count) and _is_size(first) and _are_sizes(shape) and _are_sizes(strides)):
        raise CheckpointError("sizes, strides or offset of the tensor are no whole numbers")
    if len(shape) != len(strides):
        raise CheckpointError(f"it has {len(shape)} dims and {len(strides)} strides")
    item = dtype_bits(dtype) // 8
    last = first + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + 1 if 0 not in shape else 0
    if last * item > count * size:
        raise CheckpointError(f"the tensor ends at byte {last * item:,} of its storage, which has {count * size:,}")
    return dtype, key, count * size, first * item, shape, tuple(stride * item for stride in strides)


_REBUILDS = {*(("_rebuild_tensor_v2", n) for n in (5, 6, 7)), ("_rebuild_tensor_v3", 7)}


def _unwrapped(value: Any) -> Any:
    """The plain tensor within a parameter, or within a tensor that Python attributes were hung on."""
    for _ in range(4):
        name = value.name if isinstance(value, Call) else ""
        if name == "_rebuild_parameter" and value.args:
            value = value.args[0]
        elif name == "_rebuild_from_type_v2" and len(value.args) == 4 and isinstance(value.args[2], tuple):
            function, kind, args, _ = value.args
            if not isinstance(kind, Name) or kind.name not in ("Tensor", "Parameter"):
                raise CheckpointError(
                    f"holds a {kind.name if isinstance(kind, Name) else 'strange type'}, no plain tensor"
                )
            value = Call(function, args)
        else:
            break
    return value


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 48


def _are_sizes(values: Any) -> bool:
    return isinstance(values, tuple) and len(values) <= 64 and all(_is_size(value) for value in values)


# ------------------------------------------------------------------ writing


@dataclass(frozen=True)
class Envelope:
    """The bytes around a tensor's elements.

    Attributes:
        head, tail: the bytes before and after them.
        length: of the whole archive. Its elements begin at ``len(head)``, a multiple of :data:`ALIGNMENT`.
    """

    head: bytes
    tail: bytes
    length: int


@lru_cache(maxsize=1024)
def envelope(dtype: str, shape: tuple[int, ...]) -> Envelope:
    """The envelope of a contiguous tensor, which is to begin at a multiple of :data:`ALIGNMENT` in its file.

    Raises:
        CheckpointError: torch cannot keep tensors of this dtype.
    """
    dtype_to_torch(dtype)
    size = tensor_nbytes(dtype, shape)
    archive = _Archive()
    for name, content in (("data.pkl", _tensor_pickle(dtype, shape)), ("byteorder", b"little"), ("version", b"3\n")):
        archive.add(name, content)
    archive.begin("data/0", size, checksum=0)
    head = bytes(archive.data)
    tail = archive.directory(len(head) + size)
    return Envelope(head, tail, len(head) + size + len(tail))


def object_archive(value: Any) -> bytes:
    """The archive that ``torch.save`` makes of an object without tensors."""
    archive = _Archive()
    for name, content in (("data.pkl", write_pickle(value)), ("byteorder", b"little"), ("version", b"3\n")):
        archive.add(name, content)
    return bytes(archive.data) + archive.directory(len(archive.data))


def _tensor_pickle(dtype: str, shape: Sequence[int]) -> bytes:
    storage, count = _STORAGES.get(dtype), math.prod(shape)
    hooks = Call(Name("collections", "OrderedDict"))
    strides = row_major(shape, 1)
    if storage is not None:
        held = Persistent(("storage", Name("torch", storage), "0", "cpu", count))
        return write_pickle(Call(_rebuild("v2"), (held, 0, tuple(shape), strides, False, hooks)))
    held = Persistent(("storage", Name("torch.storage", "UntypedStorage"), "0", "cpu", count * dtype_bits(dtype) // 8))
    kind = Name("torch", torch_name(dtype))
    return write_pickle(Call(_rebuild("v3"), (held, 0, tuple(shape), strides, False, hooks, kind)))


def _rebuild(version: str) -> Name:
    return Name("torch._utils", f"_rebuild_tensor_{version}")


class _Archive:
    """A zip archive in the making: stored members, each on an aligned place as torch aligns them."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.entries: list[bytes] = []

    def add(self, name: str, content: bytes) -> None:
        self.begin(name, len(content), checksum=zlib.crc32(content))
        self.data += content

    def begin(self, name: str, size: int, *, checksum: int) -> None:
        """The member's header, up to its content."""
        path = f"archive/{name}".encode()
        large = size >= _NO_SIZE
        wide = struct.pack("<HHQQ", 1, 16, size, size) if large else b""
        told = _NO_SIZE if large else size
        common = struct.pack("<HHHHHIII", 45 if large else 20, 0, 0, 0, _DATE, checksum, told, told)
        header = len(self.data)
        free = -(header + 30 + len(path) + len(wide) + 4) % ALIGNMENT
        extra = wide + struct.pack("<2sH", b"FB", free) + b"Z" * free
        self.data += b"PK\x03\x04" + common + struct.pack("<HH", len(path), len(extra)) + path + extra
        ends = struct.pack("<HHHHHII", len(path), len(wide), 0, 0, 0, 0, header)
        self.entries.append(b"PK\x01\x02" + struct.pack("<H", 45) + common + ends + path + wide)

    def directory(self, at: int) -> bytes:
        """The central directory, which follows the last member's content; that ends at ``at``."""
        entries = b"".join(self.entries)
        count, size = len(self.entries), len(entries)
        wide = b"PK\x06\x06" + struct.pack("<QHHIIQQQQ", 44, 45, 45, 0, 0, count, count, size, at)
        locator = b"PK\x06\x07" + struct.pack("<IQI", 0, at + size, 1)
        short = struct.pack("<HHHHIIH", 0, 0, count, count, size, min(at, _NO_SIZE), 0)
        return entries + wide + locator + b"PK\x05\x06" + short


_DATE = (1 << 5) | 1  # 1980-01-01, the first day that a zip archive knows
