"""Marks of the tests that the fast run leaves to ``-m extended``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def few(params: Iterable[Any], *keep: Any, slow: Iterable[Any] = ()) -> list[Any]:
    """Returns the parameters of a test, of which all but ``keep`` are marked ``extended``, or ``slow``.

    Args:
        params: as ``pytest.mark.parametrize`` takes them.
        keep: those that represent the others in the fast run; each must be one of ``params``.
        slow: those that take minutes, or are less likely to break alone; likewise.
    """
    params, slow = list(params), list(slow)
    for one in (*keep, *slow):
        assert one in params, f"{one} is none of the parameters"

    def marked(one: Any) -> Any:
        mark = pytest.mark.slow if one in slow else pytest.mark.extended
        return pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=mark)

    return [one if one in keep else marked(one) for one in params]


def extended(*values: Any) -> Any:
    """Returns a set of parameters that is marked ``extended``."""
    return pytest.param(*values, marks=pytest.mark.extended)
