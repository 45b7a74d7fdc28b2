"""JSON messages from other processes, checked: each field of its kind, or one error that says whose message it was.

Processes of one job send each other what this package writes. What arrives may be something else all the same: from a
process of another version, from a store that others write to, from a disk that has lost a part of a file, or from a
stranger who connects.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from modelexport.errors import GatherError, error_text, quoted

__all__ = [
    "ANY",
    "FLAG",
    "LIST",
    "NUMBER",
    "OBJECT",
    "PATH",
    "TEXT",
    "TEXTS",
    "TEXT_OR_NONE",
    "WHOLE",
    "WHOLES",
    "Kind",
    "LostPeerError",
    "check_fields",
    "read_message",
    "read_value",
    "utf8",
]


class LostPeerError(GatherError):
    """Another rank ended, failed, did not come in time or left unusable data: the cause is to be sought there.

    Attributes:
        blamed: the ranks that the launcher is to look at.
        indirect: the one who collects does not read: it may well be waiting for another rank itself.
        raised_at: monotonic seconds; whoever is told of this error by our hanging up raises later.
    """

    peer_failure = True

    def __init__(self, text: str, blamed: Sequence[int] = (), *, indirect: bool = False) -> None:
        super().__init__(text)
        self.blamed, self.indirect = tuple(blamed), indirect
        self.raised_at = time.monotonic()


class Kind(NamedTuple):
    """A kind of value that a field may have, and its name in errors."""

    name: str
    fits: Callable[[Any], bool]


def _is_whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < math.inf


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_path(value: Any) -> bool:
    try:
        return _is_text(value) and value != "" and b"\0" not in os.fsencode(value)
    except UnicodeEncodeError:
        return False


WHOLE = Kind("a whole number below 2^63", _is_whole)
NUMBER = Kind("a finite number", _is_number)
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
TEXT = Kind("a text", _is_text)
ANY = Kind("anything", lambda value: True)
TEXT_OR_NONE = Kind("a text or null", lambda value: value is None or _is_text(value))
PATH = Kind("a path", _is_path)
LIST = Kind("a list", lambda value: isinstance(value, list))
OBJECT = Kind("an object", lambda value: isinstance(value, dict))
WHOLES = Kind("a list of whole numbers", lambda value: isinstance(value, list) and all(map(_is_whole, value)))
TEXTS = Kind("a list of texts", lambda value: isinstance(value, list) and all(map(_is_text, value)))


def read_value(text: bytes | str, sender: str, blamed: Sequence[int] = ()) -> Any:
    """The JSON value in a message.

    Args:
        sender: whose message it is, and which, for the error.
        blamed: the rank that has sent it, where it is known.

    Raises:
        LostPeerError: it is no JSON.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _damaged(sender, f"{len(text):,} bytes that are no JSON ({error_text(error)})", blamed) from error


def read_message(
    text: bytes | str,
    sender: str,
    needed: Mapping[str, Kind],
    optional: Mapping[str, Kind] | None = None,
    *,
    blamed: Sequence[int] = (),
) -> dict[str, Any]:
    """The JSON object in a message; arguments as for :func:`read_value` and :func:`check_fields`.

    Raises:
        LostPeerError: it is no JSON object, or a field is missing or of another kind.
    """
    found = read_value(text, sender, blamed)
    return check_fields(found, sender, needed, optional, blamed=blamed)


def check_fields(
    found: Any,
    sender: str,
    needed: Mapping[str, Kind],
    optional: Mapping[str, Kind] | None = None,
    *,
    blamed: Sequence[int] = (),
) -> dict[str, Any]:
    """``found`` itself, which has to be an object with these fields; it may have others.

    Args:
        needed, optional: the kinds of the fields' values, by name.

    Raises:
        LostPeerError: it is no object, or a field is missing or of another kind.
    """
    if not isinstance(found, dict):
        raise _damaged(sender, f"{quoted(found)}, and an object is needed", blamed)
    for name, kind in needed.items():
        if name not in found:
            raise _damaged(sender, f"no '{name}': {quoted(found)}", blamed)
        if not kind.fits(found[name]):
            raise _damaged(sender, f"as '{name}' {quoted(found[name])}, and {kind.name} is needed", blamed)
    for name, kind in (optional or {}).items():
        if name in found and not kind.fits(found[name]):
            raise _damaged(sender, f"as '{name}' {quoted(found[name])}, and {kind.name} is needed", blamed)
    return found


def utf8(text: Any) -> bytes:
    """The bytes of a text by which secrets are compared; of whatever else came in its place, too."""
    return str(text).encode("utf-8", "surrogatepass")  # JSON may hold halves of surrogate pairs


def _damaged(sender: str, what: str, blamed: Sequence[int]) -> LostPeerError:
    return LostPeerError(
        f"{sender} has {what}: run the same version of modelexport on every rank, and let nothing else write there",
        blamed,
    )
