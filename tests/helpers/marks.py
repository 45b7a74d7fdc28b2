"""Marks of the tests that the fast run leaves to ``-m extended``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def few(params: Iterable[Any], *keep: Any) -> list[Any]:
    """Returns the parameters of a test, of which all but ``keep`` are marked ``extended``.

    Args:
        params: as ``pytest.mark.parametrize`` takes them.
        keep: those that represent the others in the fast run; each must be one of ``params``.
    """
    params = list(params)
    for one in keep:
        assert one in params, f"{one} is none of the parameters"
    return [one if one in keep else extended(*(one if isinstance(one, tuple) else (one,))) for one in params]


def extended(*values: Any) -> Any:
    """Returns a set of parameters that is marked ``extended``."""
    return pytest.param(*values, marks=pytest.mark.extended)
