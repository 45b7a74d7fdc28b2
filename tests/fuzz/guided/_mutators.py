"""Mutations of inputs that may be damaged already: by the format where they are still of it, else by bytes."""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections.abc import Callable, Sequence
from random import Random

from tests.fuzz._mutations import Mutation, Pairs, encode, mutate_bytes, mutate_json, mutate_safetensors, mutate_value
from tests.fuzz._mutations import mutate as mutate_file

_CHECKED = re.compile(rb'\{"crc32":\d+,')


def or_bytes(mutation: Mutation) -> Mutation:
    """``mutation`` where an input is of its format, and changes of bytes where it is not, and now and then."""

    def mutate(data: bytes, rng: Random) -> bytes:
        if rng.random() < 0.2:
            return mutate_bytes(data, rng)
        try:
            return mutation(data, rng)
        except Exception:  # of whatever kind: it is not of the format
            return mutate_bytes(data, rng)

    return mutate


def _lines(data: bytes, rng: Random) -> bytes:
    lines = data.split(b"\n")
    at = rng.randrange(len(lines))
    kind = rng.randrange(6)
    if kind == 0:
        lines.insert(at, rng.choice((lines[at], b"", b"null", b"{}", b"[]", b"1", b"[" * 3000)))
    elif kind == 1:
        del lines[at]
    elif kind == 2:
        lines[at], lines[0] = lines[0], lines[at]
    else:
        lines[at] = mutate_json(lines[at], rng)
    return b"\n".join(lines)


def _checked_lines(data: bytes, rng: Random) -> bytes:
    """Lines that begin with the CRC-32 of the rest, as those of a journal."""
    found = []
    for line in _lines(b"\n".join(b"{" + _CHECKED.sub(b"", line) for line in data.split(b"\n")), rng).split(b"\n"):
        rest = line[1:]
        found.append(b'{"crc32":%d,%b' % (zlib.crc32(rest), rest) if rest else b"")
    return b"\n".join(found)


def _message(data: bytes, rng: Random) -> bytes:
    """A JSON header in a line, and bytes."""
    header, mark, value = data.partition(b"\n")
    if value and rng.random() < 0.4:
        return header + mark + payload(value, rng)
    return mutate_json(header, rng) + mark + value


def _payload(data: bytes, rng: Random) -> bytes:
    """A safetensors file whose metadata holds JSON."""
    if rng.random() < 0.4:
        return mutate_safetensors(data, rng)
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length], object_pairs_hook=Pairs)
    for at, (key, entry) in enumerate(header):
        if key == "__metadata__":
            changed = Pairs((name, _changed(value, rng)) for name, value in entry)
            header[at] = key, changed
    text = encode(header).encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(text)) + text + data[8 + length :]


def _changed(value: object, rng: Random) -> object:
    if not isinstance(value, str) or rng.random() < 0.3:
        return value
    return encode(mutate_value(json.loads(value, object_pairs_hook=Pairs), rng))


def framed(layout: str, mutation: Mutation) -> Mutation:
    """Parts, each behind its length, which stays right most of the time."""

    def mutate(data: bytes, rng: Random) -> bytes:
        size = struct.calcsize(layout)
        parts, at = [], 0
        while at < len(data):
            (length,) = struct.unpack_from(layout, data, at)
            parts.append(data[at + size : at + size + length])
            at += size + length
        chosen = rng.randrange(len(parts))
        if rng.random() < 0.2:
            parts.insert(chosen, parts[chosen])
        else:
            parts[chosen] = mutation(parts[chosen], rng)
        return b"".join(struct.pack(layout, len(part)) + part for part in parts)

    return or_bytes(mutate)


json_object: Callable[[bytes, Random], bytes] = or_bytes(mutate_json)
json_lines: Callable[[bytes, Random], bytes] = or_bytes(_lines)
checked_lines: Callable[[bytes, Random], bytes] = or_bytes(_checked_lines)
message: Callable[[bytes, Random], bytes] = or_bytes(_message)
payload: Callable[[bytes, Random], bytes] = or_bytes(_payload)
safetensors: Callable[[bytes, Random], bytes] = or_bytes(mutate_safetensors)


_PART = struct.Struct("<II")


def files_in(data: bytes, count: int) -> list[bytes]:
    """The contents of several files: each as its length, a number of zeros that follow it, and its bytes."""
    found, at = [], 0
    while len(found) < count and len(data) >= at + _PART.size:
        length, zeros = _PART.unpack_from(data, at)
        at += _PART.size
        found.append(data[at : at + length] + bytes(min(zeros, 1 << 20)))
        at += length
    return found


def joined_files(contents: list[bytes]) -> bytes:
    """The inverse of :func:`files_in`."""
    stripped = [content.rstrip(b"\0") for content in contents]
    parts = zip(contents, stripped, strict=True)
    return b"".join(_PART.pack(len(bare), len(content) - len(bare)) + bare for content, bare in parts)


def several(names: Sequence[str]) -> Mutation:
    """Changes one of several files, by its name."""

    def mutate(data: bytes, rng: Random) -> bytes:
        contents = files_in(data, len(names))
        at = rng.randrange(len(contents))
        whole = contents[at]
        contents[at] = or_bytes(lambda part, rng: mutate_file(names[at], part, rng))(whole.rstrip(b"\0"), rng)
        if rng.random() < 0.9:
            contents[at] += bytes(max(0, len(whole) - len(whole.rstrip(b"\0"))))
        return joined_files(contents)

    return or_bytes(mutate)
