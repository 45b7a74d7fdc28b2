"""ExportRecipe: the one place where an export's settings are named.

A field here is a command-line flag (``--group-size``), a YAML key (``group_size``) and a keyword argument of
:func:`modelexport.exporter.export`. Whatever is not a field does not exist.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modelexport.errors import UsageError, nearest

GATHERS = ("shm", "nfs", "direct")
FORMATS = ("hf",)


def _setting(default: Any, help_text: str, *, choices: tuple[str, ...] | None = None, metavar: str = "") -> Any:
    return field(default=default, metadata={"help": help_text, "choices": choices, "metavar": metavar})


@dataclass(frozen=True, kw_only=True)
class ExportRecipe:
    """What to export, how, and where to. Fields marked with * decide the bytes that are written."""

    model: str | None = _setting(
        None, "checkpoint directory or hub id (default: the embedded demo model)", metavar="DIR|ID"
    )
    revision: str | None = _setting(None, "branch, tag or commit of a hub id", metavar="REV")
    out: str | None = _setting(None, "target directory; must not exist (see --overwrite)", metavar="DIR")
    quant: str = _setting("fp8", "number format of the decoder's linears")
    group_size: int | None = _setting(
        None, "weights that share a scale, for formats with groups (default: 128)", metavar="N"
    )
    format: str = _setting("hf", "checkpoint format", choices=FORMATS)
    tp: int = _setting(1, "tensor-parallel rank processes", metavar="N")
    gather: str | None = _setting(
        None,
        "how ranks hand over their tensors: shared memory, files in --workspace, or each rank writes its own "
        "pieces into the checkpoint (default: direct; nfs where --workspace is given)",
        choices=GATHERS,
    )
    workspace: str | None = _setting(
        None, "directory that all ranks see, for --gather nfs and for ranks on several machines", metavar="DIR"
    )
    max_shard_bytes: int = _setting(5_000_000_000, "largest weight file, in bytes", metavar="N")
    overwrite: bool = _setting(False, "replace --out if it exists, in one step, when the new one is complete")
    evaluate: bool = _setting(
        True, "perplexity and a sentence, before and after (demo model only; --no-evaluate skips it)"
    )
    timeout: float = _setting(1800.0, "seconds without progress after which a rank counts as hung", metavar="S")
    dry_run: bool = _setting(False, "print the plan, sizes and memory; write nothing")
    quiet: bool = _setting(False, "no progress bar and no summary")
    json: bool = _setting(False, "print the result as JSON")

    def __post_init__(self) -> None:
        _check_choice("format", self.format, FORMATS)
        if self.gather is not None:
            _check_choice("gather", self.gather, GATHERS)
        if self.tp < 1:
            raise UsageError(f"--tp {self.tp}: at least 1 rank is needed, e.g. --tp 4")
        if self.group_size is not None and self.group_size < 1:
            raise UsageError(f"--group-size {self.group_size}: choose 32, 64 or 128")
        if not 0 < self.timeout < math.inf:
            raise UsageError(f"--timeout {self.timeout:g}: a positive number of seconds is needed")
        if self.max_shard_bytes < 1:
            raise UsageError(f"--max-shard-bytes {self.max_shard_bytes}: a positive number is needed")
        if self.gather == "nfs" and self.workspace is None:
            raise UsageError("--gather nfs needs a directory that every rank sees: add --workspace DIR")
        if self.workspace is not None and self.gather == "shm":
            raise UsageError("--workspace is of no use to --gather shm: drop one of the two")

    @property
    def transport(self) -> str:
        """The gather in force: ``shm``, ``nfs`` or ``direct``."""
        if self.gather is not None:
            return self.gather
        return "nfs" if self.workspace is not None else "direct"

    @classmethod
    def load(cls, path: Path, overrides: Mapping[str, Any] = {}) -> ExportRecipe:
        """Read a YAML recipe, then apply ``overrides`` (flags given on the command line win)."""
        import yaml

        try:
            keys = yaml.safe_load(path.read_bytes())
        except OSError as error:
            raise UsageError(f"recipe {path} cannot be read: {error.strerror}") from error
        except yaml.YAMLError as error:
            raise UsageError(f"recipe {path} is not YAML: {' '.join(str(error).split())}") from error
        if keys is None:
            keys = {}
        if not isinstance(keys, dict):
            raise UsageError(f"recipe {path}: expected 'key: value' lines, found {type(keys).__name__}")
        return cls(**{**_checked(keys, f"recipe {path}"), **_checked(overrides, "command line")})

    @classmethod
    def from_mapping(cls, keys: Mapping[str, Any], *, where: str = "recipe") -> ExportRecipe:
        """Build a recipe from ``keys``; an unknown key or a value of the wrong type is a UsageError."""
        return cls(**_checked(keys, where))


def parse_assignments(items: Iterable[str]) -> dict[str, Any]:
    """Turn ``key=value`` strings (``--set``) into keys with YAML-typed values."""
    import yaml

    keys: dict[str, Any] = {}
    for item in items:
        key, equals, text = item.partition("=")
        if not equals or not key.strip():
            raise UsageError(f"--set {item}: expected KEY=VALUE, e.g. --set quant=int4")
        try:
            keys[_field_name(key)] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise UsageError(f"--set {item}: the value is not YAML") from error
    return keys


def _field_name(key: object) -> str:
    """``group-size`` and ``group_size`` are one key, so that the later of the two wins."""
    return str(key).strip().replace("-", "_")


def _checked(keys: Mapping[str, Any], where: str) -> dict[str, Any]:
    """``keys`` by field name, each of its field's type."""
    known = {f.name: f for f in dataclasses.fields(ExportRecipe)}
    values = {}
    for key, value in keys.items():
        name = _field_name(key)
        if name not in known:
            raise UsageError(f"{where}: unknown key '{key}'{nearest(name, known)}")
        values[name] = _coerce(known[name], value, where)
    return values


def _check_choice(key: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UsageError(f"--{key} {value}: unknown{nearest(value, choices)}")


def _coerce(spec: dataclasses.Field[Any], value: Any, where: str) -> Any:
    """Check ``value`` against the field's declared type; ints are taken where floats are asked for."""
    kinds = {"str": str, "int": int, "float": (int, float), "bool": bool}
    declared = str(spec.type).split(" | ")
    if value is None and "None" in declared:
        return None
    expected: Any = kinds[declared[0]]
    right = isinstance(value, expected) and not (isinstance(value, bool) and declared[0] != "bool")
    if not right:
        raise UsageError(f"{where}: {spec.name} must be {' or '.join(declared)}, found {value!r}")
    return float(value) if declared[0] == "float" else value
