"""Algorithms, one file each; :func:`get` finds them by the names that a recipe gives."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from modelexport.quantization.algorithms.base import Algorithm

__all__ = ["get"]


def get(names: Iterable[str]) -> list[type[Algorithm]]:
    """The algorithms of those names, in the order given."""
    return [importlib.import_module(f"{__name__}.{name}").ALGORITHM for name in names]
