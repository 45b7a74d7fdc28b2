"""The GGUF file: a header of typed values and tensor entries, then the tensors, each at a multiple of 32 bytes.

Follows ggml's specification (docs/gguf.md), version 3, little-endian: ``GGUF``, version, number of tensors, number of
values; the values (name, type, content); the tensors (name, dims from the fastest to the slowest, type, offset from
the start of the data). A file that is read is data from a stranger: sizes are checked before memory is taken.

A large model may be in several parts, ``NAME-00001-of-00003.gguf``: each is a file of its own with some of the tensors
and ``split.*`` values that number it, the first has all other values (llama.cpp's ``gguf-split``).
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from modelexport.checkpoints.safetensors.header import TensorInfo
from modelexport.errors import CheckpointError, PlanError, quoted, shown
from modelexport.system.small_files import open_regular

ALIGNMENT = 32
_MAGIC = b"GGUF"
_VERSION = 3
_MOST_DIMS = 4
_MOST_NAME = 1 << 16
_MOST_ELEMENTS = 1 << 22  # of an array that is read; vocabularies have a few hundred thousand


class Uint16(int):
    """A number that is written as uint16."""


class Int32(int):
    """A number that is written as int32."""


Value = str | bool | int | float | bytes | Sequence[str] | Sequence[int] | Sequence[float]
"""A number is written as uint32 or float32 unless its class says otherwise, an array's as int32 or float32;
bytes are an array of uint8."""


@dataclass(frozen=True)
class BlockType:
    """A tensor type of ggml.

    Attributes:
        number: in the file.
        block: elements that are kept together.
        nbytes: of a block.
        dtype: as safetensors spells it; of blocks U8, with the bytes of a block as one more dim.
        marked: whether the tensor of blocks has another dim, of 1: those of another type have as many bytes.
    """

    number: int
    block: int
    nbytes: int
    dtype: str = "U8"
    marked: bool = False

    @property
    def tail(self) -> tuple[int, ...]:
        """The last dims of a tensor of blocks."""
        return () if self.block == 1 else (self.nbytes, 1) if self.marked else (self.nbytes,)


TYPES = {
    "F32": BlockType(0, 1, 4, "F32"),
    "F16": BlockType(1, 1, 2, "F16"),
    "Q4_0": BlockType(2, 32, 18),
    "Q4_1": BlockType(3, 32, 20),
    "Q5_0": BlockType(6, 32, 22),
    "Q5_1": BlockType(7, 32, 24),
    "Q8_0": BlockType(8, 32, 34),
    "Q2_K": BlockType(10, 256, 84),
    "Q3_K": BlockType(11, 256, 110),
    "Q4_K": BlockType(12, 256, 144),
    "Q5_K": BlockType(13, 256, 176),
    "Q6_K": BlockType(14, 256, 210),
    "IQ4_NL": BlockType(20, 32, 18, marked=True),
    "IQ4_XS": BlockType(23, 256, 136),
    "I32": BlockType(26, 1, 4, "I32"),
    "BF16": BlockType(30, 1, 2, "BF16"),
    "MXFP4": BlockType(39, 32, 17),
    "NVFP4": BlockType(40, 64, 36),
}
_BY_NUMBER = {kind.number: name for name, kind in TYPES.items()}
_OTHER_TYPES = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    24: "I8",
    25: "I16",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
}

# The types of values: their numbers, and how struct spells them.
_UINT8, _UINT16, _UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 0, 2, 4, 5, 6, 7, 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


SCALED_TYPE = "NVFP4"
"""The type whose tensors have one more beside them, of the numbers that they are multiplied by."""


def type_of(dtype: str, shape: Sequence[int]) -> str | None:
    """The ggml type of a tensor by its dtype and shape here (blocks: by their bytes); None where there is none."""
    for name, kind in TYPES.items():
        tail = kind.tail
        if dtype == kind.dtype and (not tail or (len(shape) > 1 + len(tail) and tuple(shape[-len(tail) :]) == tail)):
            return name
    return None


@dataclass(frozen=True)
class Entry:
    """A tensor to be written: its name, dtype and shape here (blocks: ``[.., in / 32, bytes]``)."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * (1 if self.dtype == "U8" else TYPES[self.dtype].nbytes)

    @property
    def kind(self) -> str:
        """Its ggml type."""
        found = type_of(self.dtype, self.shape)
        assert found is not None, f"{self.name}: {self.dtype} {self.shape} is no type of ggml's"
        return found

    @property
    def dims(self) -> tuple[int, ...]:
        """Elements along each dim, the fastest first."""
        kind = TYPES[self.kind]
        rest = self.shape[: len(self.shape) - len(kind.tail)]
        shape = rest if kind.block == 1 else (*rest[:-1], rest[-1] * kind.block)
        return tuple(reversed(shape))


def encode_header(values: Mapping[str, Value], entries: Sequence[Entry]) -> tuple[bytes, list[int], int]:
    """The bytes before the tensors, padded to where the first begins.

    Returns:
        (the bytes, each tensor's offset in the file, the file's size).

    Raises:
        PlanError: a number among the values is larger than the file can say.
    """
    pieces = [_MAGIC, struct.pack("<IQQ", _VERSION, len(entries), len(values))]
    for name, value in values.items():
        pieces += [_text(name), _value(name, value)]
    offsets, at = [], 0
    for entry in entries:
        offsets.append(at)
        dims = entry.dims
        pieces.append(_text(entry.name))
        pieces.append(struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, TYPES[entry.kind].number, at))
        at = _aligned(at + entry.nbytes)
    header = b"".join(pieces)
    header += b"\0" * (_aligned(len(header)) - len(header))
    return header, [len(header) + offset for offset in offsets], len(header) + at


def _aligned(at: int, alignment: int = ALIGNMENT) -> int:
    return -(-at // alignment) * alignment


def _text(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _value(name: str, value: Value) -> bytes:
    try:
        kind, content = _content(value, _UINT32)
    except (struct.error, OverflowError, UnicodeEncodeError) as error:
        raise PlanError(f"--format gguf: {name} is {shown(value)}, which the file cannot say: {error}") from error
    return struct.pack("<I", kind) + content


def float32_bytes(values: Sequence[float], name: str) -> bytes:
    """Numbers as a tensor of float32 has them.

    Raises:
        PlanError: one is beyond float32; ``name`` says whose.
    """
    try:
        return struct.pack(f"<{len(values)}f", *values)
    except OverflowError as error:
        raise PlanError(f"--format gguf: {name} has numbers beyond float32, up to {max(map(abs, values)):g}") from error


def _content(value: Value, whole: int) -> tuple[int, bytes]:
    """The type and the bytes of a value; ``whole``: the type of whole numbers."""
    if isinstance(value, str):
        return _STRING, _text(value)
    if isinstance(value, bool):
        return _BOOL, struct.pack("<?", value)
    if isinstance(value, int):
        whole = _UINT16 if isinstance(value, Uint16) else _INT32 if isinstance(value, Int32) else whole
        return whole, struct.pack("<" + _SCALARS[whole], value)
    if isinstance(value, float):
        return _FLOAT32, struct.pack("<f", value)
    if isinstance(value, bytes):
        return _ARRAY, struct.pack("<IQ", _UINT8, len(value)) + value
    (form,) = {type(each) for each in value}  # an array has a type, and one alone
    if form is str:  # of which a vocabulary has hundreds of thousands
        texts = [str(each).encode() for each in value]
        return _ARRAY, struct.pack("<IQ", _STRING, len(texts)) + b"".join(struct.pack("<Q", len(t)) + t for t in texts)
    kind = {bool: _BOOL, int: _INT32, float: _FLOAT32}[form]
    return _ARRAY, struct.pack("<IQ", kind, len(value)) + struct.pack(f"<{len(value)}{_SCALARS[kind]}", *value)


# ------------------------------------------------------------------ parts

_PART = re.compile(r"(?P<name>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf", re.DOTALL)
_NUMBER, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"
MOST_PARTS = (1 << 16) - 1


def part_name(file: str, number: int, count: int) -> str:
    """The name of a part (the first has number 0) of ``file``; its own name where there is one part."""
    return file if count == 1 else f"{file.removesuffix('.gguf')}-{number + 1:05d}-of-{count:05d}.gguf"


def part_values(values: Mapping[str, Value], number: int, count: int, tensors: int) -> dict[str, Value]:
    """The values of a part's header.

    Args:
        values: those of the whole.
        tensors: of all parts together.
    """
    if count == 1:
        return dict(values)
    own = {_NUMBER: Uint16(number), _COUNT: Uint16(count), _TENSORS: Int32(tensors)}
    return {**(values if number == 0 else {}), **own}


def parts_of(names: Sequence[str]) -> list[str] | None:
    """The names of all parts of a file, in order, if that is what ``names`` are some of; None where they are not."""
    found = [_PART.fullmatch(name) for name in names]
    if not names or len({(each["name"], each["count"]) if each else None for each in found}) != 1 or found[0] is None:
        return None
    count = int(found[0]["count"])
    return [part_name(f"{found[0]['name']}.gguf", number, count) for number in range(count)] if count > 1 else None


# ------------------------------------------------------------------ reading


@dataclass(frozen=True)
class GgufFile:
    """The header of a GGUF file.

    Attributes:
        values: its values; of an array the number of its elements.
        infos: its tensors; blocks as Entry has them.
    """

    path: Path
    values: Mapping[str, Any]
    infos: Mapping[str, TensorInfo]


def read_gguf(path: Path, *others: Path) -> GgufFile:
    """Read and check everything but the tensors' data, of one file or of all parts of one.

    Args:
        others: the parts behind the first.

    Raises:
        CheckpointError: a file cannot be read, is damaged or cut short, is not version 2 or 3 or not little-endian, or
            holds tensors of types that are not known here, all of which are named; or they are not all parts of one.
    """
    parts = [_read_one(each) for each in (path, *others)]
    first = parts[0]
    infos: dict[str, TensorInfo] = {}
    for number, part in enumerate(parts):
        own, count = part.values.get(_NUMBER, 0), part.values.get(_COUNT, 1) or 1
        if (own, count) != (number, len(parts)):
            raise CheckpointError(
                f"{part.path}: is part {shown(own)} (from 0 on) of {shown(count)} by its header, read as part {number} "
                f"of {len(parts)}: all parts are needed, by the names that they were written with"
            )
        twice = infos.keys() & part.infos.keys()
        if twice:
            raise CheckpointError(f"{part.path}: damaged: {quoted(min(twice))} is in a part before it, too")
        infos |= part.infos
    said = first.values.get(_TENSORS, len(infos))
    if len(parts) > 1 and said != len(infos):
        raise CheckpointError(f"{path}: says {shown(said)} tensors in all parts, {len(infos)} are there")
    return GgufFile(path, first.values, infos)


def _read_one(path: Path) -> GgufFile:
    try:
        with open_regular(path) as stream:
            return _read(path, _Stream(path, stream, os.fstat(stream.fileno()).st_size))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error


def read_values(path: Path, arrays: Collection[str]) -> dict[str, Any]:
    """Read the values alone, those of some arrays with them.

    Args:
        arrays: names of the arrays whose elements are wanted, as lists; of others their number is given.

    Raises:
        CheckpointError: the file cannot be read, is damaged or cut short, or an array has too many elements.
    """
    try:
        with open_regular(path) as stream:
            return _values(_Stream(path, stream, os.fstat(stream.fileno()).st_size, arrays))[1]
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error


@dataclass
class _Stream:
    """Reads that never ask for more than the file has."""

    path: Path
    stream: BinaryIO
    size: int
    arrays: Collection[str] = ()
    at: int = 0

    def take(self, count: int, what: str) -> bytes:
        if count > self.size - self.at:
            left = self.size - self.at
            raise CheckpointError(f"{self.path}: cut short or damaged: {what} needs {count:,} bytes, {left:,} are left")
        found = self.stream.read(count)
        if len(found) != count:
            raise CheckpointError(f"{self.path}: became shorter while it was being read")
        self.at += count
        return found

    def numbers(self, layout: str, what: str) -> tuple[Any, ...]:
        return struct.unpack("<" + layout, self.take(struct.calcsize("<" + layout), what))

    def text(self, what: str, most: int | None = None) -> str:
        (length,) = self.numbers("Q", what)
        if most is not None and length > most:
            raise CheckpointError(f"{self.path}: damaged: {what} is {length:,} bytes long")
        try:
            return self.take(length, what).decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path}: {what} is not UTF-8: {error}") from error

    def value(self, what: str) -> Any:
        (kind,) = self.numbers("I", what)
        if kind == _STRING:
            return self.text(what)
        if kind == _ARRAY:
            return self._array(what) if what in self.arrays else self._skip_array(what)
        if kind not in _SCALARS:
            raise CheckpointError(f"{self.path}: {what} is of the unknown type {kind}")
        return self.numbers(_SCALARS[kind], what)[0]

    def _array(self, what: str) -> list[Any]:
        kind, count = self.numbers("IQ", what)
        if count > _MOST_ELEMENTS:
            raise CheckpointError(f"{self.path}: {what} has {count:,} elements, at most {_MOST_ELEMENTS:,} are read")
        if kind == _STRING:
            return [self.text(what) for _ in range(count)]
        if kind not in _SCALARS:
            raise CheckpointError(f"{self.path}: {what} is an array of the type {kind}, which is not read")
        return list(self.numbers(f"{count}{_SCALARS[kind]}", what))

    def _skip_array(self, what: str) -> int:
        kind, count = self.numbers("IQ", what)
        if kind == _STRING:
            if count * 8 > self.size - self.at:
                raise CheckpointError(f"{self.path}: cut short or damaged: {what} has {count:,} texts")
            for _ in range(count):
                (length,) = self.numbers("Q", what)
                self.take(length, what)
        elif kind in _SCALARS:
            self.take(count * struct.calcsize("<" + _SCALARS[kind]), what)
        else:
            raise CheckpointError(f"{self.path}: {what} is an array of the type {kind}, which is not read")
        return int(count)


def _values(stream: _Stream) -> tuple[int, dict[str, Any]]:
    """The number of tensors, and the values."""
    path = stream.path
    if stream.take(4, "the first word") != _MAGIC:
        raise CheckpointError(f"{path}: is no GGUF file: it does not begin with GGUF")
    (version,) = stream.numbers("I", "the version")
    if version not in (2, 3):
        big = "; it is big-endian" if version in (2 << 24, 3 << 24) else ""
        raise CheckpointError(f"{path}: GGUF version {version} is not read, 2 and 3 are{big}")
    tensors, count = stream.numbers("QQ", "the header")
    if 24 * tensors + 12 * count > stream.size:
        raise CheckpointError(f"{path}: damaged: {tensors:,} tensors and {count:,} values in {stream.size:,} bytes")
    values: dict[str, Any] = {}
    for _ in range(count):
        name = stream.text("a value's name", _MOST_NAME)
        values[name] = stream.value(name)
    return int(tensors), values


def _read(path: Path, stream: _Stream) -> GgufFile:
    tensors, values = _values(stream)
    entries = [_entry(stream) for _ in range(tensors)]
    alignment = values.get("general.alignment", ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise CheckpointError(f"{path}: general.alignment is {quoted(alignment)}, not a power of two")
    return GgufFile(path, values, _place(path, entries, _aligned(stream.at, alignment), stream.size))


def _entry(stream: _Stream) -> tuple[str, tuple[int, ...], int, int]:
    """A tensor's name, dims from the slowest on, type and offset."""
    name = stream.text("a tensor's name", _MOST_NAME)
    (rank,) = stream.numbers("I", name)
    if not 1 <= rank <= _MOST_DIMS:
        raise CheckpointError(f"{stream.path}: damaged: {quoted(name)} has {rank} dims")
    *dims, kind, offset = stream.numbers(f"{rank}QIQ", name)
    return name, tuple(reversed(dims)), kind, offset


def _place(
    path: Path, entries: Sequence[tuple[str, tuple[int, ...], int, int]], start: int, size: int
) -> dict[str, TensorInfo]:
    unread: dict[str, list[str]] = {}
    infos: dict[str, TensorInfo] = {}
    reached, before = start, ""
    for name, shape, number, offset in sorted(entries, key=lambda entry: entry[3]):
        kind = TYPES.get(_BY_NUMBER.get(number, ""))
        if kind is None:
            unread.setdefault(_OTHER_TYPES.get(number, f"number {number}"), []).append(name)
            continue
        if name in infos or shape[-1] % kind.block:
            why = "is there twice" if name in infos else f"has {shape[-1]} elements in a row, blocks have {kind.block}"
            raise CheckpointError(f"{path}: damaged: {quoted(name)} {why}")
        nbytes = math.prod(shape) // kind.block * kind.nbytes
        if start + offset < reached or start + offset + nbytes > size:
            why = f"overlaps {quoted(before)}" if start + offset < reached else f"ends behind the file's {size:,} bytes"
            raise CheckpointError(f"{path}: cut short or damaged: {quoted(name)} {why}")
        reached, before = start + offset + nbytes, name
        stored = shape if kind.block == 1 else (*shape[:-1], shape[-1] // kind.block, *kind.tail)
        infos[name] = TensorInfo(name, kind.dtype, stored, path, start + offset, nbytes)
    if unread:
        found = "; ".join(f"{kind}: {len(names)} tensors, the first {names[0]}" for kind, names in unread.items())
        raise CheckpointError(
            f"{path}: holds types that are not read ({found}); {', '.join(TYPES)} are. Take the checkpoint that the "
            "file was made from, or a file of one of these"
        )
    return infos
