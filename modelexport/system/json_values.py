"""Checked values of an untrusted JSON object: each of the kind that is needed, or an error that names its key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from modelexport.errors import CheckpointError, quoted

_MOST = 1 << 53  # what a float holds exactly, and many times what any model has of anything


@dataclass(frozen=True)
class JsonValues:
    """A JSON object's values by key. A key whose value is null counts as missing.

    Attributes:
        content: the object.
        where: names it in errors: ``"config.json"``, ``"config.json: rope_scaling"``.
    """

    content: Mapping[str, Any]
    where: str = "config.json"

    def has(self, key: str) -> bool:
        """Returns whether the object has a value for ``key``."""
        return self.content.get(key) is not None

    def whole(self, key: str, default: int | None = None, *, least: int = 1, most: int = _MOST) -> int:
        """A whole number.

        Raises:
            CheckpointError: it is something else, less than ``least`` or more than ``most``, or it is missing and has
                no ``default``.
        """
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self._error(key, value, "a positive whole number" if least else "a whole number, 0 or more,")
        if value > most:
            found = f"{value:,}" if value < 1 << 100 else quoted(value)
            raise CheckpointError(f"{self.where}: {key} is {found}; at most {most:,} are believed")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive finite number.

        Raises:
            CheckpointError: it is something else, or it is missing and has no ``default``.
        """
        value = self._value(key, default)
        if not _is_number(value) or value <= 0:
            raise self._error(key, value, "a positive number")
        return float(value)

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of finite numbers.

        Raises:
            CheckpointError: it is something else, or missing.
        """
        value = self.content.get(key)
        if not isinstance(value, list) or not all(map(_is_number, value)):
            raise self._error(key, value, "a list of numbers")
        return tuple(map(float, value))

    def text(self, key: str, default: str | None = None) -> str:
        """A text.

        Raises:
            CheckpointError: it is something else, or it is missing and has no ``default``.
        """
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self._error(key, value, "a text")
        return value

    def texts(self, key: str) -> tuple[str, ...] | None:
        """A list of texts; None where it is missing.

        Raises:
            CheckpointError: it is something else.
        """
        value = self.content.get(key)
        if value is not None and not (isinstance(value, list) and all(isinstance(each, str) for each in value)):
            raise self._error(key, value, "a list of texts")
        return None if value is None else tuple(value)

    def object(self, key: str) -> JsonValues:
        """An object; one without values where it is missing.

        Raises:
            CheckpointError: it is something else.
        """
        value = self._value(key, {})
        if not isinstance(value, dict):
            raise self._error(key, value, "an object")
        return JsonValues(value, f"{self.where}: {key}")

    def _value(self, key: str, default: Any) -> Any:
        value = self.content.get(key)
        return default if value is None else value

    def _error(self, key: str, value: Any, needed: str) -> CheckpointError:
        found = "is missing" if value is None else f"is {quoted(value)}"
        return CheckpointError(f"{self.where}: {key} {found}; {needed} is needed")


def _is_number(value: Any) -> bool:
    """Returns whether ``value`` is a number that a float holds."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond all floats
        return False
