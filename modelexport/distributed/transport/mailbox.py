"""Messages between ranks in the process group's key-value store, and values as the bytes of a message.

A message is a JSON header and a value's bytes. A value is a config tree (see
:mod:`modelexport.distributed.transport.tree`) in the form of a payload, so it comes back with the types it had, and no
pickle is involved.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from typing import Any

from modelexport.distributed.transport.messages import LostPeerError, read_message

__all__ = ["Mailbox", "StoreGoneError", "asked", "decode", "encode", "join", "message", "parse", "separate"]

_PIECE = 4 << 20  # bytes; a TCPStore closes the connection on values above 8 MiB
_COUNT = struct.Struct("<I")
_LENGTH = struct.Struct("<Q")
_NOTHING = b"?"  # shorter than any message's first piece


class StoreGoneError(LostPeerError):
    """The store does not answer, so that no rank can be reached."""


def encode(value: Any) -> bytes:
    """The bytes of a value.

    Raises:
        TypeError: it is, or contains, something that cannot travel.
    """
    from modelexport.distributed.transport import payload  # imports torch, which a process that is alone may not need

    try:
        packed = payload.pack(value)
    except TypeError as error:
        raise TypeError(
            f"a value for other ranks may be made of int, float, bool, str, bytes, None, list, tuple, dict, tensors "
            f"and registered dataclasses, but {error}"
        ) from error
    return b"".join([packed.header, *(payload.as_bytes(tensor).numpy().tobytes() for tensor in packed.tensors)])


def decode(data: bytes) -> Any:
    """The value that :func:`encode` took; its tensors are new ones, on the CPU.

    Raises:
        GatherError: these are not the bytes of a value.
    """
    from modelexport.distributed.transport import payload

    size = _LENGTH.size + int.from_bytes(data[: _LENGTH.size], "little")
    text, entries = payload.parse_header(data[:size])
    expected = size + (entries[-1].end if entries else 0)
    if len(data) != expected:
        raise payload.DamagedPayloadError(f"a value of {len(data):,} bytes has a header for {expected:,}")
    body = memoryview(bytearray(data[size:]))  # writable, as tensors are
    return payload.unpack(text, entries, [body[entry.start : entry.end] if entry.nbytes else None for entry in entries])


def join(parts: Sequence[bytes]) -> bytes:
    """Several values as one; :func:`separate` is the inverse."""
    return b"".join([_LENGTH.pack(len(part)) + part for part in parts])


def separate(data: bytes) -> list[bytes]:
    """The parts that :func:`join` joined.

    Raises:
        LostPeerError: the last part is not whole.
    """
    parts, offset = [], 0
    while offset < len(data):
        end = offset + _LENGTH.size + int.from_bytes(data[offset : offset + _LENGTH.size], "little")
        if end > len(data):
            raise LostPeerError(f"values in the process group's store take {end:,} bytes, {len(data):,} are there")
        parts.append(data[offset + _LENGTH.size : end])
        offset = end
    return parts


def message(header: dict[str, Any], value: bytes = b"") -> bytes:
    """A header, which must be JSON, with a value's bytes."""
    return json.dumps(header, separators=(",", ":")).encode("ascii") + b"\n" + value


def parse(data: bytes) -> tuple[dict[str, Any], bytes]:
    """(header, value) of a :func:`message`.

    Raises:
        LostPeerError: it is none.
    """
    header, _, value = data.partition(b"\n")
    return read_message(header, "a message in the process group's store", {}), value


def asked(method: Callable[..., Any], *args: Any) -> Any:
    """Calls a method of a store.

    Raises:
        StoreGoneError: it does not answer.
    """
    try:
        return method(*args)
    except RuntimeError as error:  # torch's DistError, DistStoreError, DistNetworkError are such
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise StoreGoneError(
            f"the process group's store does not answer ({reason}); its host (rank 0, usually) has ended"
        ) from error


class Mailbox:
    """Messages of any size under keys of a store. The first piece of a message is written last and counts them."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def count(self, key: str) -> int:
        """Increments the counter ``key``, which all processes share, and returns it."""
        return int(asked(self._store.add, key, 1))

    def has(self, keys: list[str]) -> bool:
        """Returns whether all of ``keys`` have messages."""
        return bool(asked(self._store.check, keys))

    def put(self, key: str, data: bytes) -> list[str]:
        """Writes a message; returns the keys that it takes."""
        first, keys = self._put_rest(key, data)
        asked(self._store.set, key, first)
        return keys

    def offer(self, key: str, data: bytes) -> tuple[bytes, list[str]]:
        """Writes a message unless there is one already. Returns the one that is there, and the keys taken."""
        first, keys = self._put_rest(key, data)
        found = bytes(asked(self._store.compare_set, key, b"", first))
        return (data if found == first else self._complete(key, found)), keys

    def peek(self, key: str) -> bytes | None:
        """The message, or None where there is none; never waits, as the store's own get does."""
        # A comparison with what no message is sets nothing, and answers with what is there or else the comparand.
        found = bytes(asked(self._store.compare_set, key, _NOTHING, _NOTHING))
        return None if found == _NOTHING else self._complete(key, found)

    def get(self, keys: list[str]) -> list[bytes]:
        """Messages that are known to be there."""
        return [self._complete(key, bytes(first)) for key, first in self._read(keys)]

    def delete(self, keys: list[str]) -> bool:
        """Removes raw keys. False where the store cannot."""
        try:
            for key in keys:
                self._store.delete_key(key)
        except RuntimeError:
            return False  # not every kind of store can; one that is gone shows at the next message
        return True

    def _put_rest(self, key: str, data: bytes) -> tuple[bytes, list[str]]:
        pieces = [data[start : start + _PIECE] for start in range(0, len(data), _PIECE)]
        keys = [key, *(f"{key}/{i}" for i in range(1, len(pieces)))]
        for name, piece in zip(keys[1:], pieces[1:], strict=True):
            asked(self._store.set, name, piece)
        return _COUNT.pack(len(pieces)) + pieces[0], keys

    def _complete(self, key: str, first: bytes) -> bytes:
        count = int.from_bytes(first[: _COUNT.size], "little")
        size = len(first) - _COUNT.size
        if not (size == _PIECE if count > 1 else count == 1 and size > 0):
            raise LostPeerError(f"{key} in the process group's store has a first piece of {size:,} bytes of {count:,}")
        rest = self._read([f"{key}/{i}" for i in range(1, count)])
        return b"".join([first[_COUNT.size :], *(bytes(piece) for _, piece in rest)])

    def _read(self, keys: list[str]) -> list[tuple[str, bytes]]:
        return list(zip(keys, asked(self._store.multi_get, keys), strict=True)) if keys else []
