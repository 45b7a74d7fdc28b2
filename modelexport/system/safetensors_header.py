"""The header of a safetensors file, encoded, and checked before a byte of the data is used.

The format: 8 bytes little-endian header length; a UTF-8 JSON object, padded with spaces,
``{name: {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__": {str: str}}``; then the data, which
the tensors tile exactly. A header is data from a stranger: sizes are checked before memory is taken and every
contradiction is a :class:`CheckpointError` that names the tensor.

Checkpoints, the payloads that ranks send each other, and the samples' hidden states are such files.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from modelexport.errors import CheckpointError, quoted
from modelexport.system.dtypes import tensor_nbytes

__all__ = ["MAX_HEADER_BYTES", "HeaderEntry", "encode_header", "header_length", "parse_header"]

MAX_HEADER_BYTES = 100_000_000
"""The limit that the safetensors library sets too."""
_MAX_INT = 2**63 - 1


class HeaderEntry(NamedTuple):
    """A tensor of a header; ``begin`` and ``end`` count bytes from the end of the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def encode_header(tensors: Iterable[tuple[str, str, Sequence[int], int]], metadata: Mapping[str, str]) -> bytes:
    """The complete header, its length included, of tensors that lie one after the other.

    Args:
        tensors: (name, dtype as the format spells it, shape, bytes) of each, in order.
        metadata: strings for ``__metadata__``, which is left out where there are none.

    Raises:
        CheckpointError: it is larger than readers take.
    """
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    at = 0
    for name, dtype, shape, nbytes in tensors:
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(f"a header of {len(text):,} bytes: safetensors allows {MAX_HEADER_BYTES:,}")
    return len(text).to_bytes(8, "little") + text


def header_length(prefix: bytes, size: int) -> int:
    """The length of the header's JSON, from the first 8 bytes of a file of so many bytes.

    Raises:
        CheckpointError: the file is too short, or the header longer than any.
    """
    if size < 8:
        raise CheckpointError(f"truncated: {size} bytes, but a header length alone takes 8")
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"its header claims {length:,} bytes, at most {MAX_HEADER_BYTES:,} are allowed; "
            "this is not a safetensors file, or it is damaged"
        )
    if 8 + length > size:
        raise CheckpointError(f"truncated: the header ends at byte {8 + length:,}, the file at {size:,}")
    return length


def parse_header(text: bytes, size: int | None = None) -> tuple[list[HeaderEntry], dict[str, str]]:
    """The tensors of a header's JSON, in the order of their data, and its metadata.

    Args:
        text: the JSON, without the 8 bytes before it.
        size: of the whole file, where it is known.

    Raises:
        CheckpointError: it contradicts itself, or the size of the file.
    """
    fields = _json_object(text)
    metadata = fields.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError("__metadata__ must map strings to strings")
    entries = []
    for name, field in fields.items():
        try:
            entries.append(_entry(name, field))
        except CheckpointError as error:
            raise CheckpointError(f"tensor {quoted(name)}: {error}") from error
    entries.sort(key=lambda entry: (entry.begin, entry.end, entry.name))
    _check_tiling(entries, 8 + len(text), size)
    return entries, metadata


def _json_object(text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
            raise CheckpointError(f"{quoted(twice)} appears twice in the header")
        return found

    def no_constant(word: str) -> NoReturn:
        raise ValueError(f"{word} is not JSON")

    if not text.startswith(b"{"):
        raise CheckpointError(f"the header must begin with '{{', found {text[:1]!r}")
    try:
        parsed: dict[str, Any] = json.loads(text.decode("utf-8"), object_pairs_hook=unique, parse_constant=no_constant)
        if b"\\u" in text:  # "\ud800" alone is half a surrogate pair, a string that no one can print
            json.dumps(parsed, ensure_ascii=False).encode("utf-8")
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"the header is not valid JSON: {error}") from error
    return parsed


def _entry(name: str, field: Any) -> HeaderEntry:
    if not isinstance(field, dict) or not {"dtype", "shape", "data_offsets"} <= field.keys():
        raise CheckpointError(f"needs dtype, shape and data_offsets, has {_clip(field)}")
    dtype, shape, offsets = field["dtype"], field["shape"], field["data_offsets"]
    if not isinstance(dtype, str):
        raise CheckpointError(f"dtype must be a string, is {_clip(dtype)}")
    if not _is_sizes(shape):
        raise CheckpointError(f"shape must be a list of sizes, is {_clip(shape)}")
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"data_offsets must be [begin, end], are {_clip(offsets)}")
    expected = tensor_nbytes(dtype, shape)
    begin, end = offsets
    if expected != end - begin:
        raise CheckpointError(
            f"{dtype} {_clip(shape)} takes {expected:,} bytes, its data_offsets {offsets} hold {end - begin:,}"
        )
    return HeaderEntry(name, dtype, tuple(shape), begin, end)


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n <= _MAX_INT for n in value)


def _clip(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _check_tiling(entries: Sequence[HeaderEntry], start: int, size: int | None) -> None:
    """``start``: of the data in the file."""
    before, at = None, start
    for entry in entries:
        begin, end = start + entry.begin, start + entry.end
        if begin != at:
            above = "the header" if before is None else f"tensor {quoted(before.name)}"
            raise CheckpointError(
                f"tensor {quoted(entry.name)}: {'a gap' if begin > at else 'an overlap'}: it begins at byte {begin:,} "
                f"of the file, {above} ends at {at:,}"
            )
        if size is not None and end > size:
            raise CheckpointError(
                f"tensor {quoted(entry.name)}: truncated: it ends at byte {end:,}, the file at {size:,} "
                f"({start + max(entry.end for entry in entries):,} bytes expected in all)"
            )
        before, at = entry, end
    if size is not None and at != size:
        raise CheckpointError(f"{size - at:,} bytes after the last tensor: {at:,} expected, {size:,} found")
