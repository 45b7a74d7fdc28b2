"""The mode of this process's collectives: carried out by itself, or (in master-worker mode) by a driver.

Imports no torch. Contract of a driver: while one is set, every public collective of
:mod:`modelexport.distributed.collectives` does nothing but ``return driver.call(name, args, kwargs)``, where
``name`` is the public function's name (``"all_reduce"``, ``"new_group"``, ``"get_rank"``,
``"destroy_process_group"``, ...) and ``args`` / ``kwargs`` are exactly what the caller gave: no default is filled
in, ``group.WORLD`` and ``reduce_op`` values are passed as they are, nothing has been checked. What ``call`` returns or
raises is what the caller sees. Not routed: ``is_available``, ``is_initialized`` (False while a driver is set),
``init_process_group`` and ``init_master_worker`` (refused while a driver is set).

A driver removes itself with ``set_driver(None)`` when it handles ``destroy_process_group``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Driver(Protocol):
    """The implementation of the collectives in master-worker mode.

    Attributes:
        types: names that :mod:`modelexport.distributed.collectives` has while the driver is set.
    """

    types: Mapping[str, Any]

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Carries out the public collective ``name`` and returns what it returns."""


_driver: Driver | None = None


def driver() -> Driver | None:
    """The driver that is set, or None where this process does its collectives itself."""
    return _driver


def set_driver(driver: Driver | None) -> Driver | None:
    """Makes ``driver`` carry out this process's collectives (None: the process itself); returns the former one."""
    global _driver
    former, _driver = _driver, driver
    return former


def routed(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a public collective: the driver, where one is set, is called instead."""

    @functools.wraps(function)
    def collective(*args: P.args, **kwargs: P.kwargs) -> R:
        if _driver is not None:
            return _driver.call(function.__name__, args, kwargs)
        return function(*args, **kwargs)

    return collective
