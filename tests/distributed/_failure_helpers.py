"""Shared by the tests of failure: a launch that must fail, and what it may leave behind (nothing)."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from modelexport.distributed.launch import MultiprocessConfig, launch_subprocesses, prestart
from modelexport.errors import RankFailedError
from tests.distributed import _failure_targets as targets
from tests.distributed._launch_helpers import Events, wait_until

psutil = pytest.importorskip("psutil")

AT_ONCE = 5.0  # seconds: far more than it takes, far less than GENEROUS
GENEROUS = 30.0  # the time-out where a death is to be noticed


@dataclass
class Outcome:
    """An error as the launcher raised it, and how long after the deed."""

    rank: int
    phase: str
    summary: str
    seconds: float
    user_error: bool


def provoke(
    fault: str, role: str, world: int, path: Path | None, *, seconds: float = GENEROUS, other: Path | None = None
) -> Outcome:
    """Launch ranks of which one commits ``fault``, and see that it is blamed.

    Args:
        role: whether the ``sender`` or the ``first`` rank does it.
        path: the workspace, None for shared memory.
        seconds: a gather's time-out.
        other: where the culprit takes the workspace to be.
    """
    culprit = targets.SENDER[world] if role == "sender" else targets.ORDER[world][0]
    events = Events()
    config = MultiprocessConfig(world_size=world, on_event=events, timeout=GENEROUS)
    paths = (str(path) if path else None, seconds, str(other) if other else None)
    with pytest.raises(RankFailedError) as caught:
        launch_subprocesses(targets.hand_over, config, None, 0, fault, culprit, *paths)
    error, deed = caught.value, events[-1][1]["at"]
    assert error.rank == culprit, f"rank {error.rank} is blamed for what rank {culprit} did: {error}"
    assert str(error).startswith(f"rank {culprit} failed while {error.phase}: {error.summary}")
    return Outcome(error.rank, error.phase, error.summary, time.monotonic() - deed, error.user_error)


def surroundings() -> dict[str, Any]:
    """What a run might leave: processes below this one, names in shared memory, descriptors."""
    descriptors = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing, or one that a thread has closed since
            descriptors.append(os.readlink(f"/proc/self/fd/{fd}"))
    return {
        "processes": {process.pid for process in psutil.Process().children(recursive=True)},
        "shm": set(os.listdir("/dev/shm")),
        "descriptors": len(descriptors),
        "memfds": sum("memfd:" in target for target in descriptors),
    }


@contextmanager
def leaving_nothing(*directories: Path) -> Iterator[None]:
    """What is inside may leave nothing at all: not around this process, not in ``directories``."""
    before = surroundings()
    yield
    wait_until(lambda: surroundings()["processes"] <= before["processes"])
    deadline = time.monotonic() + AT_ONCE
    while more := {name: after for name, after in surroundings().items() if not after <= before[name]}:
        # The tests of another process have names in shared memory too; ours must not stay.
        assert time.monotonic() < deadline, f"left: {more}, where there was {before}"
        time.sleep(0.02)
    for thread in threading.enumerate():
        if thread.name == "modelexport-reaper":  # it clears up for ranks that took their time to end
            thread.join(AT_ONCE)
    for directory in directories:
        left = [str(path) for path in directory.rglob("*")]
        assert not left, f"left: {left}"


def run_well(path: Path | None, world: int = 2) -> None:
    """Launch ranks of which all do as they should."""
    config = MultiprocessConfig(world_size=world, timeout=GENEROUS)
    launch_subprocesses(targets.hand_over, config, None, 0, "nothing", 0, str(path) if path else None, GENEROUS)


def warm_up() -> None:
    """From here on this process has what a launcher keeps between launches."""
    prestart(("torch", "modelexport.distributed.gather"))
    run_well(None)
