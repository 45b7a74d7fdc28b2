"""SIGKILL at random moments: the rerun ends with the same bytes, and nothing of ours stays behind."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests._models import make_llama
from tests.test_export import digests

psutil = pytest.importorskip("psutil")
SIZE = {"hidden": 512, "intermediate": 1536, "layers": 24, "vocab": 4000, "kv_heads": 4}


def start(source: Path, out: Path, gather: str) -> subprocess.Popen[bytes]:
    """An export in a process group of its own."""
    command = [
        sys.executable,
        "-m",
        "modelexport",
        "--model",
        source,
        "--out",
        out,
        "--tp",
        "4",
        "--gather",
        gather,
    ]
    return subprocess.Popen(
        [str(part) for part in command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
    )


def family(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The process and all its descendants."""
    try:
        root = psutil.Process(process.pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def all_gone(processes: list[psutil.Process], seconds: float = 10.0) -> list[psutil.Process]:
    """Those still alive after at most ``seconds``; a zombie that its init has not reaped yet is dead."""
    deadline = time.monotonic() + seconds
    alive = processes
    while alive and time.monotonic() < deadline:
        alive = [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        time.sleep(0.05)
    return alive


def cut_off(
    process: subprocess.Popen[bytes],
    out: Path,
    dice: random.Random,
    rerun: Callable[[], subprocess.Popen[bytes]],
    reference: dict[str, str],
) -> int:
    """Kill a job's group or one of its ranks, run it again if ``out`` is not there, compare; its first exit status."""
    members = family(process)
    try:
        ranks = [p for p in members if p.ppid() in {q.pid for q in members[1:]}]
        if dice.random() < 0.5 or not ranks:
            os.killpg(process.pid, signal.SIGKILL)
        else:
            dice.choice(ranks).kill()
    except (ProcessLookupError, psutil.NoSuchProcess):
        pass  # it had just finished
    status = process.wait(30)
    assert all_gone(members) == [], f"{out.name}: processes are left"
    if not out.exists():
        assert status != 0
        assert rerun().wait(120) == 0, f"{out.name}: the rerun failed"
    assert digests(out) == reference, out.name
    leftover = [path.name for path in out.parent.iterdir() if path.name.startswith(f".{out.name}.")]
    assert leftover in ([], [f".{out.name}.modelexport"]) if status else leftover == []
    return status


def storm(tmp_path: Path, kills: int, seed: int) -> None:
    """Kill a random rank or the whole group at random moments, publishing included, until ``kills`` were cut off."""
    source = make_llama(**SIZE)
    shm_before = sorted(os.listdir("/dev/shm"))
    for name in ("warm-up", "reference"):
        began = time.monotonic()
        assert start(source, tmp_path / name, "shm").wait(120) == 0
        duration = time.monotonic() - began
    reference = digests(tmp_path / "reference")
    dice = random.Random(seed)
    interrupted = 0
    number = -1
    while interrupted < kills:
        number += 1
        assert number < 3 * kills, f"only {interrupted} of {number} exports were cut off"
        out = tmp_path / f"out-{number}"
        process = start(source, out, dice.choice(["shm", "direct"]))
        time.sleep(dice.uniform(0.05, 1.0) * duration)
        again = "shm" if number % 2 else "direct"
        interrupted += cut_off(process, out, dice, partial(start, source, out, again), reference) != 0
        assert sorted(os.listdir("/dev/shm")) == shm_before
    print(f"{number + 1} kills, {interrupted} exports cut off, all hashes equal")


@pytest.mark.timeout(280)
def test_a_few_kills(tmp_path: Path) -> None:
    storm(tmp_path, kills=4, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_fifty_kills(tmp_path: Path) -> None:
    storm(tmp_path, kills=50, seed=2)
