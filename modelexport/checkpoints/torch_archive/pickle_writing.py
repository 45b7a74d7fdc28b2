"""Make pickles out of inert data, so that other programs find in our files the objects that they expect there.

The counterpart of :mod:`modelexport.checkpoints.torch_archive.pickle_reading`: no object of those programs is needed to
write its pickle, and so none of their packages.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

from modelexport.checkpoints.torch_archive.pickle_reading import Call, Name, Persistent


def write_pickle(value: Any) -> bytes:
    """The pickle, of protocol 2, of a value made of what :func:`read_pickle` gives. Not for circular values."""
    out = bytearray(b"\x80\x02")
    _emit(value, out, {})
    return bytes(out + b".")


def _emit(value: Any, out: bytearray, memo: dict[Any, int]) -> None:
    if value is None or isinstance(value, bool):
        out += {None: b"N", True: b"\x88", False: b"\x89"}[value]
    elif isinstance(value, int):
        size = (value.bit_length() + 8) // 8
        small = -(1 << 31) <= value < 1 << 31
        out += (
            b"J" + struct.pack("<i", value)
            if small
            else bytes((0x8A, size)) + value.to_bytes(size, "little", signed=True)
        )
    elif isinstance(value, float):
        out += b"G" + struct.pack(">d", value)
    elif isinstance(value, (str, Name)):
        _emit_once(value, out, memo)
    elif isinstance(value, tuple):
        _emit_all((b"(",), value, out, memo)
        out += b"t"
    elif isinstance(value, list):
        _emit_batches(b"]", [(item,) for item in value], b"e", out, memo)
    elif isinstance(value, dict):
        _emit_batches(b"}", list(value.items()), b"u", out, memo)
    elif isinstance(value, Persistent):
        _emit(value.id, out, memo)
        out += b"Q"
    elif isinstance(value, Call):
        _emit(value.function, out, memo)
        _emit(value.args, out, memo)
        out += b"\x81" if value.new else b"R"
        if value.state is not None:
            _emit(value.state, out, memo)
            out += b"b"
    else:
        raise TypeError(f"{type(value).__name__} is not written")


def _emit_all(before: Iterable[bytes], values: Iterable[Any], out: bytearray, memo: dict[Any, int]) -> None:
    for piece in before:
        out += piece
    for value in values:
        _emit(value, out, memo)


def _emit_batches(empty: bytes, rows: list[tuple[Any, ...]], end: bytes, out: bytearray, memo: dict[Any, int]) -> None:
    """A list or dict, filled a thousand at a time, so that no reader needs a large stack."""
    out += empty
    for start in range(0, len(rows), 1000):
        _emit_all((b"(",), (value for row in rows[start : start + 1000] for value in row), out, memo)
        out += end


def _emit_once(value: str | Name, out: bytearray, memo: dict[Any, int]) -> None:
    """Text and names come again and again: they are written once and remembered."""
    if value in memo:
        out += b"j" + struct.pack("<I", memo[value])
        return
    if isinstance(value, Name):
        out += f"c{value.module}\n{value.name}\n".encode()
    else:
        text = value.encode("utf-8", "surrogatepass")
        out += b"X" + struct.pack("<I", len(text)) + text
    memo[value] = len(memo)
    out += b"r" + struct.pack("<I", memo[value])
