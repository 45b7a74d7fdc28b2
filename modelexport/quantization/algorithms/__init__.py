"""Algorithms, one file each: all that the program says and asks of one is in it.

A file defines ``ALGORITHM``, a subclass of :class:`~modelexport.quantization.algorithms.base.Algorithm`; being in this
directory registers it, or being named by a plugin's entry point. Listing them does not import torch.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from typing import TYPE_CHECKING

from modelexport import plugins
from modelexport.errors import UsageError

if TYPE_CHECKING:
    from modelexport.quantization.algorithms.base import Algorithm

__all__ = ["get", "in_words", "names", "registered", "used"]


@cache
def registered() -> dict[str, type[Algorithm]]:
    """Returns every algorithm by its name, in the order of their turns, then of their names.

    Raises:
        UsageError: one rounds in a way of its own, and says that it needs no samples: it would never be called.
    """
    from modelexport.quantization.algorithms.base import KINDS, Rounding

    own = [name for _, name, _ in pkgutil.iter_modules(__path__) if name != "base" and not name.startswith("_")]
    found = {name: importlib.import_module(f"{__name__}.{name}").ALGORITHM for name in own}
    plugins.add(found, "ALGORITHM", kind="an algorithm", needed=("name", "description", "kind"))
    for name, algorithm in found.items():
        rounds = issubclass(algorithm, Rounding) and algorithm.quantise is not Rounding.quantise
        if rounds and not algorithm.needs_samples:
            raise UsageError(
                f"algorithm {name}: its quantise() is called only where samples run through the model, and it says "
                "needs_samples = False: leave out one of the two"
            )
    return dict(sorted(found.items(), key=lambda item: (KINDS.index(item[1].kind), item[0])))


def names() -> tuple[str, ...]:
    """Returns the names that ``--algorithm`` takes."""
    return tuple(registered())


def get(name: str) -> type[Algorithm]:
    """Returns the algorithm of that name."""
    return registered()[name]


def in_words(setting: object) -> str:
    """Returns the end of "quantised to int4" for the algorithms of a recipe or a record; "" where it names none."""
    if not setting:
        return ""
    own = "".join(algorithm.in_words for algorithm in used(setting) if algorithm.name == setting)
    return f", {own}" if own else f" by {setting}"


def used(setting: object) -> list[type[Algorithm]]:
    """Returns the known algorithms among those that a recipe or a record names, joined by ``+``."""
    given = setting.split("+") if isinstance(setting, str) else ()
    return [registered()[name.strip()] for name in given if name.strip() in registered()]
