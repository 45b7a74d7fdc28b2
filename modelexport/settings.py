"""Settings named in one place: each field of a dataclass is a command-line flag, a YAML key and a keyword argument.

Whatever is not a field does not exist.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from modelexport.errors import UsageError, nearest, quoted, shown
from modelexport.system.small_files import LARGEST_CONFIG, read_small
from modelexport.system.yaml_reading import read_yaml

_HELP = "modelexport --help"

S = TypeVar("S", bound="Settings")


def setting(
    default: Any,
    help_text: str,
    *,
    choices: tuple[str, ...] | None = None,
    metavar: str = "",
    pairs: bool = False,
    several: bool = False,
    decides_bytes: bool = False,
) -> Any:
    """A field with its text for ``--help``.

    Args:
        several: whether the flag may be given several times; the field is a tuple of texts, in a recipe a list or one.
        pairs: whether a list of (key, value) is taken as well, for ``key=value,key=value``.
        decides_bytes: whether other bytes are written with another value: such a setting is part of the fingerprint by
            which an interrupted run is resumed, of the checkpoint's record and of its card.
    """
    texts = {"help": help_text, "choices": choices, "metavar": metavar}
    return field(
        default=default, metadata={**texts, "pairs": pairs, "several": several, "decides_bytes": decides_bytes}
    )


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Base of a command's settings; its fields are made with :func:`setting`."""

    @classmethod
    def load(cls: type[S], path: Path, overrides: Mapping[str, Any] = {}) -> S:
        """Read a YAML recipe, then apply ``overrides`` (flags given on the command line win)."""
        content = read_small(path, largest=LARGEST_CONFIG, label=f"recipe {path}", error=UsageError)
        try:
            keys = read_yaml(content)
        except ValueError as error:
            raise UsageError(f"recipe {path} is not YAML: {error}") from error
        if keys is None:
            keys = {}
        if not isinstance(keys, dict):
            raise UsageError(f"recipe {path}: expected 'key: value' lines, found {type(keys).__name__}")
        return cls(**{**_checked(cls, keys, f"recipe {path}"), **_checked(cls, overrides, "command line")})

    @classmethod
    def from_mapping(cls: type[S], keys: Mapping[str, Any], *, where: str = "recipe") -> S:
        """Build settings from ``keys``; an unknown key or a value of the wrong type is a UsageError."""
        return cls(**_checked(cls, keys, where))

    def deciding(self) -> dict[str, Any]:
        """Returns the settings that decide the bytes that are written, as JSON has them, in their fields' order."""
        found = {spec.name: getattr(self, spec.name) for spec in dataclasses.fields(self) if decides_bytes(spec)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}


def decides_bytes(spec: dataclasses.Field[Any]) -> bool:
    """Returns whether a setting decides the bytes that are written."""
    return bool(spec.metadata.get("decides_bytes"))


def moved(cls: type[Settings]) -> dict[str, str]:
    """Returns where settings are that have no field of their own name: former name -> field."""
    return {former: spec.name for spec in dataclasses.fields(cls) if (former := spec.metadata.get("former"))}


def parse_assignments(items: Iterable[str]) -> dict[str, Any]:
    """Turn ``key=value`` strings (``--set``) into keys with YAML-typed values."""
    keys: dict[str, Any] = {}
    for item in items:
        key, equals, text = item.partition("=")
        if not equals or not key.strip():
            raise UsageError(f"--set {item}: expected KEY=VALUE, e.g. --set quant=int4")
        try:
            keys[_field_name(key)] = read_yaml(text)
        except ValueError as error:
            raise UsageError(f"--set {item}: the value is not YAML") from error
    return keys


def _field_name(key: object) -> str:
    """``group-size`` and ``group_size`` are one key, so that the later of the two wins."""
    return key.strip().replace("-", "_") if isinstance(key, str) else shown(key)


def _checked(cls: type[Settings], keys: Mapping[str, Any], where: str) -> dict[str, Any]:
    """``keys`` by field name, each of its field's type."""
    known = {f.name: f for f in dataclasses.fields(cls)}
    values = {}
    for key, value in keys.items():
        name = _field_name(key)
        if name not in known and name in moved(cls):
            raise UsageError(f"{where}: {name}: is {moved(cls)[name]} now")
        if name not in known:
            raise UsageError(f"{where}: unknown key '{shown(key)}'{nearest(name, known, listing=_HELP)}")
        values[name] = _coerce(known[name], value, where)
    return values


def check_sizes(**sizes: int) -> None:
    """Raise a UsageError for the first flag whose number of ranks is none."""
    for name, size in sizes.items():
        if size < 1:
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} {size}: at least 1 rank is needed, e.g. {flag} 4")


def check_common(timeout: float, max_shard_bytes: int | None) -> None:
    """Raise a UsageError for a time-out or a size of files that cannot be."""
    if not 0 < timeout < math.inf:
        raise UsageError(f"--timeout {timeout:g}: a positive number of seconds is needed")
    if max_shard_bytes is not None and max_shard_bytes < 1:
        raise UsageError(f"--max-shard-bytes {max_shard_bytes}: a positive number is needed")


def check_choice(key: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise a UsageError, with the nearest choice, where ``value`` is none of them."""
    if value not in choices:
        raise UsageError(f"--{key} {value}: unknown{nearest(value, choices)}")


def with_weight(text: str, flag: str, is_there: Callable[[str], bool]) -> tuple[str, float]:
    """Splits ``NAME`` or ``NAME=WEIGHT``, as settings that may be given several times have them.

    Args:
        flag: the setting, for the message.
        is_there: whether there is something of a name: then an equals sign is a part of it.

    Returns:
        The name, and its weight: 1 where none is given.

    Raises:
        UsageError: the weight is no finite number, or 0.
    """
    name, equals, number = text.rpartition("=")
    if not equals or is_there(text):
        return text, 1.0
    try:
        weight = float(number)
    except ValueError:
        weight = math.nan
    if not math.isfinite(weight) or weight == 0:
        raise UsageError(f"{flag} {shown(text)}: {shown(number)} is no weight: a number is needed, e.g. =0.5")
    return name, weight


def _coerce(spec: dataclasses.Field[Any], value: Any, where: str) -> Any:
    """Check ``value`` against the field's declared type; ints are taken where floats are asked for."""
    kinds = {"str": str, "int": int, "float": (int, float), "bool": bool}
    declared = str(spec.type).split(" | ")
    if value is None and "None" in declared:
        return None
    if spec.metadata.get("several"):
        return _texts(spec.name, value, where)
    if spec.metadata.get("pairs") and isinstance(value, (list, tuple)):
        return _joined_pairs(spec.name, value, where)
    expected: Any = kinds[declared[0]]
    right = isinstance(value, expected) and not (isinstance(value, bool) and declared[0] != "bool")
    if not right:
        raise UsageError(f"{where}: {spec.name} must be {' or '.join(declared)}, found {quoted(value)}")
    try:
        return float(value) if declared[0] == "float" else value
    except OverflowError:
        raise UsageError(f"{where}: {spec.name} is {shown(value)}: no float holds it") from None


def _texts(name: str, value: Any, where: str) -> tuple[str, ...]:
    """A text, or a list of them, as a tuple."""
    items = [value] if isinstance(value, str) else () if value is None else value
    if not isinstance(items, (list, tuple)) or not all(isinstance(item, str) for item in items):
        raise UsageError(f"{where}: {name} must be a text or a list of texts, found {quoted(value)}")
    return tuple(items)


def _joined_pairs(name: str, items: Iterable[Any], where: str) -> str:
    """A list of pairs (or of mappings of one key) as the text that the command line takes."""
    texts = []
    for item in items:
        if isinstance(item, dict) and len(item) == 1:
            item = next(iter(item.items()))
        if not (isinstance(item, (list, tuple)) and len(item) == 2 and all(isinstance(part, str) for part in item)):
            raise UsageError(f"{where}: {name} must be a name, or a list of [pattern, name], found {quoted(item)}")
        texts.append("=".join(item))
    return ",".join(texts)
