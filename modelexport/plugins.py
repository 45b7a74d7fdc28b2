"""Plugins: modules of other distributions that bring an algorithm, a number format, a checkpoint format or a family.

A distribution names them in its pyproject.toml::

    [project.entry-points."modelexport.plugins"]
    anything = "its.module"

A plugin's module is a file like those of the package: it defines ``ALGORITHM``, ``FORMAT``, ``FAMILY``, or what a
checkpoint format's module has. Each is registered beside the package's own by being imported.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pkgutil
import re
import sys
from collections.abc import Iterable, MutableMapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from modelexport.errors import UsageError, error_text
from modelexport.system.small_files import read_small

__all__ = ["GROUP", "add", "declared", "modules", "register", "require"]

GROUP = "modelexport.plugins"
_DEFINED = ("FORMAT", "ALGORITHM", "FAMILY", "NAME", "READS")
_LARGEST = 1 << 20  # bytes of an entry_points.txt that is looked at


@cache
def modules() -> dict[str, ModuleType]:
    """Returns the imported modules of all plugins, by their names.

    Raises:
        UsageError: one cannot be imported, or defines nothing that a plugin brings.
    """
    if not _are_there():  # to ask importlib.metadata takes longer than --help
        return {}
    from importlib.metadata import entry_points

    found = {}
    for point in sorted(entry_points(group=GROUP)):
        try:
            found[point.module] = importlib.import_module(point.module)
        except Exception as error:
            whose = f" of {point.dist.name}" if point.dist is not None else ""
            raise UsageError(
                f"plugin {point.name}{whose}: {point.module} cannot be imported: {error_text(error)}: "
                "mend or uninstall it"
            ) from error
        if not any(hasattr(found[point.module], name) for name in _DEFINED):
            raise UsageError(f"plugin {point.name}: {point.module} defines none of {', '.join(_DEFINED)}")
    return found


@cache
def declared(package: str, variable: str) -> dict[str, str]:
    """Returns the texts that modules of a package give a variable, and the modules' names.

    Found in the sources, so that ``--help`` imports none: ``NAME = "gguf"`` on a line of its own.
    """
    pattern, found = re.compile(rf'^{variable} = "([\w-]+)"$', re.MULTILINE), {}
    whole = find_spec(package)
    assert whole is not None
    for finder, name, _ in pkgutil.iter_modules(whole.submodule_search_locations, f"{package}."):
        spec = finder.find_spec(name, None)  # importlib's own function of that name imports the package first
        if spec is not None and spec.loader is not None:
            text = pattern.search(spec.loader.get_source(name))  # type: ignore[attr-defined] # of files, and of zips
            if text is not None:
                found[text[1]] = name
    return found


def add(found: MutableMapping[str, Any], attribute: str, *, kind: str, needed: Iterable[str]) -> None:
    """Adds to a catalogue, by its ``name``, what each plugin's module defines under a name of that kind.

    Raises:
        UsageError: two have the same name; or one lacks a name that is ``needed``, or a method.
    """
    for module in modules().values():
        if hasattr(module, attribute):
            entry = getattr(module, attribute)
            require(module, entry, needed, kind=kind)
            register(found, entry.name, entry, kind=kind, module=module)


def require(module: ModuleType, entry: Any, needed: Iterable[str], *, kind: str) -> None:
    """Checks that a thing that a plugin's module defines is complete.

    Raises:
        UsageError: it lacks a name, or a method that its base class leaves to it.
    """
    missing = [name for name in needed if not hasattr(entry, name)]
    missing += sorted(getattr(entry, "__abstractmethods__", ()))
    if missing:
        raise UsageError(
            f"plugin {module.__name__}: {kind} needs {', '.join(missing)}, which it does not define: see "
            "docs/extending.md"
        )


def register(found: MutableMapping[str, Any], name: str, entry: Any, *, kind: str, module: ModuleType) -> None:
    """Adds one thing that a plugin's module defines to a catalogue.

    Raises:
        UsageError: the name is taken.
    """
    if name in found:
        raise UsageError(f"plugin {module.__name__}: there is {kind} '{name}' already: give it another name")
    found[name] = entry


def _are_there() -> bool:
    """Returns whether a distribution on the path may have entry points of the group."""
    for place in dict.fromkeys(sys.path):
        with contextlib.suppress(OSError), os.scandir(place or ".") as entries:
            for entry in entries:
                if entry.name.endswith((".dist-info", ".egg-info")):
                    path = Path(entry.path, "entry_points.txt")
                    with contextlib.suppress(UsageError):
                        if GROUP.encode() in read_small(path, largest=_LARGEST, error=UsageError):
                            return True
    return False
