"""Faults, lost power and kills at calls: a few of each here, many with the programs beside (marked slow)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.faults import campaign
from tests.faults.interposed import is_built
from tests.faults.jobs import _LAST_WORDS
from tests.faults.power_loss import Node
from tests.helpers.hosts import why_not

pytestmark = [
    pytest.mark.timeout(280),
    pytest.mark.skipif(not sys.platform.startswith("linux") or not is_built(), reason="needs gcc, to build a library"),
]
ROOT = Path(__file__).parents[2]


def run(program: str, *arguments: str) -> dict[str, Any]:
    """What a program beside this file prints last."""
    command = [sys.executable, "-m", f"tests.faults.{program}", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    print(done.stdout)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run("_few", str(tmp_path_factory.mktemp("few")))


def test_a_fault_ends_in_the_right_bytes_or_one_line(few: dict[str, Any]) -> None:
    found = few["faults"]
    assert found["defects"] == []
    assert found["injected"] >= 3
    assert found["sites"] >= 3


def test_when_power_is_lost_the_target_is_whole_or_absent(few: dict[str, Any]) -> None:
    found = few["power"]
    assert found["defects"] == []
    assert found["reruns"] == 2
    assert found["prefixes"] > found["calls"] > 100
    assert found["whole"] + found["absent"] == found["states"]
    assert found["whole"] > 10


def test_without_fsync_the_target_would_not_always_be_whole(few: dict[str, Any]) -> None:
    assert few["unsynced"] > 10


def test_on_several_machines_an_fsync_is_good_for_its_own_machines_writes_alone() -> None:
    node = Node(is_directory=False, inode=1)
    node.changes = [(0, 7, 0, b"by 7"), (1, 8, 4, b"by 8"), (5, 7, 0, b"later")]
    node.syncs = [(2, 3, 7)]
    assert node.unsynced(3, apart=False) == {0, 1}  # the fsync has not ended
    assert node.unsynced(5, apart=False) == set()
    assert node.unsynced(5, apart=True) == {1}
    assert node.unsynced(6, apart=True) == {1, 5}


def test_last_words_of_multiprocessing_are_told_from_a_ranks() -> None:
    ours = b'Traceback (most recent call last):\n  File "rank.py", line 1, in run_rank\nValueError: ours\n'
    began = b'Traceback (most recent call last):\n  File "spawn.py", line 132, in _main\n'
    load = b"    self = reduction.pickle.load(from_parent)\n"
    for end in (b"_pickle.UnpicklingError: pickle data was truncated\n", b"EOFError: Ran out of input\n"):
        assert _LAST_WORDS.sub(b"", ours + began + load + end + ours) == ours + ours
    damaged = began + load + b"_pickle.UnpicklingError: invalid load key\n"
    assert _LAST_WORDS.sub(b"", damaged) == damaged


def test_greetings_of_gloo_are_left_alone() -> None:
    calls = {"a job": {("read", "native"): 2, ("read", "reader.py:1 read"): 1}}
    drawn = campaign.cases(calls, Random(0), 8)
    assert len(drawn) == 8
    assert {fault.site for _, fault in drawn} == {"reader.py:1 read"}


def test_a_kill_loses_nothing(few: dict[str, Any]) -> None:
    found = few["kills"]
    assert found["defects"] == []
    assert found["kills"] + found["late"] == 4
    assert found["kills"] > 0


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("program", ["campaign", "power_loss", "kills", "hosts"])
def test_very_many(program: str, tmp_path: Path) -> None:
    if program == "hosts" and (reason := why_not()):
        pytest.skip(reason)
    assert not run(program, str(tmp_path))["defects"]
