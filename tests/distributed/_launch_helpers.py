"""Shared by the tests of launching: launchers that keep events, programs of their own, processes' ends."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from modelexport.distributed.launch import MultiprocessConfig, launch_subprocesses
from modelexport.errors import RankFailedError

ROOT = Path(__file__).parents[2]


class Events(list):
    """An on_event that keeps what it gets, and knows the ranks' processes."""

    def __call__(self, rank: int, event: dict) -> None:
        self.append((rank, event))

    def pids(self) -> list[int]:
        return [event["pid"] for _, event in self]


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def launch(func: Callable, world_size: int, *args: Any, **config: Any) -> Events:
    events = Events()
    cfg = MultiprocessConfig(world_size=world_size, on_event=events, **config)
    launch_subprocesses(func, cfg, None, 0, *args)
    return events


def failing(func: Callable, world_size: int, *args: Any, **config: Any) -> tuple[RankFailedError, Events]:
    """Launches what must fail; nothing but the error may be left."""
    events = Events()
    cfg = MultiprocessConfig(world_size=world_size, on_event=events, **config)
    with pytest.raises(RankFailedError) as caught:
        launch_subprocesses(func, cfg, None, 0, *args)
    pids = events.pids()
    assert len(pids) == world_size
    wait_until(lambda: not any(map(alive, pids)))
    return caught.value, events


def start_program(code: str, *args: str, file: Path | None = None, **env: str) -> subprocess.Popen:
    command = [sys.executable, "-c", code] if file is None else [sys.executable, str(file)]
    if file is not None:
        file.write_text(code)
    environ = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    return subprocess.Popen(
        [*command, *args], env=environ, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def finish(program: subprocess.Popen, status: int = 0) -> tuple[str, str]:
    try:
        out, err = program.communicate(timeout=60)
    finally:
        program.kill()
    assert program.returncode == status, err
    return out, err
