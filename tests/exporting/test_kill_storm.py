"""SIGKILL at random moments: the rerun ends with the same bytes, and nothing of ours stays behind."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from tests.distributed._failure_helpers import surroundings
from tests.distributed._launch_helpers import wait_until
from tests.exporting.test_export import digests
from tests.helpers.marks import extended
from tests.helpers.models import make_llama

psutil = pytest.importorskip("psutil")
SIZE = {"hidden": 512, "intermediate": 1536, "layers": 24, "vocab": 4000, "kv_heads": 4}


@dataclass(frozen=True)
class Job:
    """A command that is killed.

    Attributes:
        command: as it begins; the source follows.
        arguments: all the ways to run it, which write the same.
        when: of a run's seconds, the least and the most after which it is killed.
        from_staging: whether these are counted from when there is a staging directory: where most of the time goes
            into starting.
    """

    command: Sequence[str]
    arguments: Sequence[Sequence[str]]
    when: tuple[float, float]
    from_staging: bool = False

    def start(self, source: Path, out: Path, way: int) -> subprocess.Popen[bytes]:
        """Starts the command in a process group of its own."""
        return subprocess.Popen(
            [sys.executable, "-m", "modelexport", *self.command, str(source), "--out", str(out), *self.arguments[way]],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
        )


JOBS = {
    "export": Job(("--tp", "4", "--model"), (("--gather", "shm"), ("--gather", "direct")), (0.05, 1.0)),
    "reshard": Job(
        ("reshard", "--tp", "4", "--pp", "3"),
        [
            ("--ranks", ranks, "--exchange", exchange)
            for ranks, exchange in (("1", "direct"), ("3", "direct"), ("3", "auto"))
        ],
        (0.0, 0.6),
        from_staging=True,
    ),
}


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


def storm(job: Job, tmp_path: Path, kills: int, seed: int) -> None:
    """Kill a random process or all at random moments, publishing included, until ``kills`` runs were cut off."""
    source = make_llama(**SIZE)
    before = surroundings()["shm"]
    began = time.monotonic()
    assert job.start(source, tmp_path / "whole", -1).wait(120) == 0  # the way that takes longest
    duration = time.monotonic() - began
    reference = digests(tmp_path / "whole")
    dice = random.Random(seed)
    interrupted = 0
    number = -1
    while interrupted < kills:
        number += 1
        assert number < 4 * kills + 4, f"only {interrupted} of {number} runs were cut off"
        out, way = tmp_path / f"out-{number}", number % len(job.arguments)
        process = job.start(source, out, way)
        staging = tmp_path / f".out-{number}.modelexport"
        while job.from_staging and not staging.exists() and process.poll() is None:
            time.sleep(0.005)
        time.sleep(dice.uniform(*job.when) * duration)
        again = partial(job.start, source, out, dice.randrange(len(job.arguments)))
        interrupted += cut_off(process, out, dice, again, reference) != 0
        wait_until(lambda: surroundings()["shm"] <= before)  # the tests of another process have names there too
    print(f"{number + 1} kills, {interrupted} runs cut off, all hashes equal")


@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    ("name", "kills", "seed"),
    [("export", 1, 5), extended("export", 4, 1), extended("reshard", 3, 3)],
)
def test_a_few_kills(tmp_path: Path, name: str, kills: int, seed: int) -> None:
    storm(JOBS[name], tmp_path, kills, seed)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("name", "kills", "seed"), [("export", 50, 2), ("reshard", 25, 4)])
def test_many_kills(tmp_path: Path, name: str, kills: int, seed: int) -> None:
    storm(JOBS[name], tmp_path, kills, seed)
