"""SIGKILL at random moments of a resharding: the rerun ends with the same bytes, and nothing of ours stays behind."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from tests._models import make_llama
from tests.test_export import digests
from tests.test_kill_storm import SIZE, cut_off

pytest.importorskip("psutil")
WAYS = ((1, "direct"), (3, "direct"), (3, "auto"))


def start(source: Path, out: Path, way: tuple[int, str]) -> subprocess.Popen[bytes]:
    """A resharding in a process group of its own."""
    ranks, exchange = way
    command = [
        *(sys.executable, "-m", "modelexport", "reshard", str(source), "--out", str(out), "--tp", "4", "--pp", "3"),
        *("--ranks", str(ranks), "--exchange", exchange),
    ]
    return subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
    )


def storm(tmp_path: Path, kills: int, seed: int) -> None:
    """Kill a process, or all, at random moments, publishing included, until ``kills`` reshardings were cut off."""
    source = make_llama(**SIZE)
    shared_before = sorted(os.listdir("/dev/shm"))
    durations = {}
    for number, way in enumerate(WAYS):
        began = time.monotonic()
        assert start(source, tmp_path / f"whole-{number}", way).wait(120) == 0
        durations[way] = time.monotonic() - began
    reference = digests(tmp_path / "whole-0")
    dice = random.Random(seed)
    interrupted, number = 0, -1
    while interrupted < kills:
        number += 1
        assert number < 4 * kills + 4, f"only {interrupted} of {number} reshardings were cut off"
        out, way = tmp_path / f"out-{number}", WAYS[number % len(WAYS)]
        process = start(source, out, way)
        # Most of the time goes into starting; what can be spoilt begins with the staging directory.
        staging = tmp_path / f".out-{number}.modelexport"
        while not staging.exists() and process.poll() is None:
            time.sleep(0.005)
        time.sleep(dice.uniform(0.0, 0.6) * durations[way])
        again = WAYS[dice.randrange(len(WAYS))]
        interrupted += cut_off(process, out, dice, partial(start, source, out, again), reference) != 0
        assert sorted(os.listdir("/dev/shm")) == shared_before
    print(f"{number + 1} kills, {interrupted} reshardings cut off, all hashes equal")


@pytest.mark.timeout(280)
def test_a_few_kills(tmp_path: Path) -> None:
    storm(tmp_path, kills=3, seed=3)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_twenty_five_kills(tmp_path: Path) -> None:
    storm(tmp_path, kills=25, seed=4)
