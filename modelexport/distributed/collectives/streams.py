"""CUDA streams that collectives are ordered with, besides the current one, and what every public collective does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from modelexport.distributed.collectives.collective_mode import routed

P = ParamSpec("P")
R = TypeVar("R")
_registered: list[torch.cuda.Stream] = []


def register(stream: torch.cuda.Stream) -> None:
    """From now on a collective starts after what ``stream`` has been given, and ``stream`` goes on after it."""
    if stream not in _registered:
        _registered.append(stream)


def forget() -> None:
    """Undoes every :func:`register`."""
    _registered.clear()


def collective(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a public function that moves tensors: routed to the driver, and ordered with the registered streams."""

    @functools.wraps(function)
    def ordered(*args: P.args, **kwargs: P.kwargs) -> R:
        for stream in _registered:
            torch.cuda.current_stream(stream.device).wait_stream(stream)
        result = function(*args, **kwargs)
        release()
        return result

    return routed(ordered)


def release() -> None:
    """Lets the registered streams go on after what the current ones have been given."""
    for stream in _registered:
        stream.wait_stream(torch.cuda.current_stream(stream.device))
