"""Runs tests of torch's suite in three ranks that stay up from test to test.

torch starts three processes for every test, which import torch anew. Here each test gets a new process group, a new
rendezvous file and a new directory instead, and otherwise what torch's own ``_run`` gives it. A rank that fails or
hangs ends the launch, whose error names the test (it is the rank's phase); the tests after it get new ranks.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import time
import unittest
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from modelexport.distributed.launch import MultiprocessConfig, launch_subprocesses, phase_scope, report
from modelexport.errors import RankFailedError
from tests.conformance._torch_distributed_adapter import Dist
from tests.conformance._torch_distributed_selection import SUITE, is_lifted
from tests.conformance._torch_distributed_values import with_values

WORLD_SIZE = 3
GROUP_TIMEOUT = 60  # seconds, torch's own default for these tests
HUNG_AFTER = 90.0  # seconds that one test may take
COLLECTIVES = "modelexport.distributed.collectives"
_PHASE = re.compile(r"running (test_\w+)")


@dataclass
class Outcome:
    """What became of the tests.

    Attributes:
        lifted: tests that were run although torch skips them here -> why it does.
        calls: of each test: how often each of our functions was called, over all ranks.
    """

    passed: list[str] = field(default_factory=list)
    lifted: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    failed: dict[str, RankFailedError] = field(default_factory=dict)
    calls: dict[str, Counter[str]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """For people: the count, then every failure and every reason to skip."""
        run = len(self.passed) + len(self.failed)
        lines = [f"{len(self.passed)} passed of {run} run, {len(self.skipped)} skipped"]
        lines += [f"FAILED {name}: rank {error.rank}: {error.summary}" for name, error in self.failed.items()]
        for word, tests in ("run all the same", self.lifted), ("skipped", self.skipped):
            for reason, count in Counter(tests.values()).most_common():
                names = ", ".join(name for name, why in tests.items() if why == reason)
                lines.append(f"{word} {count}, torch says {reason!r}: {names}")
        return lines


def run_tests(
    names: Sequence[str],
    directory: Path,
    module: str = COLLECTIVES,
    *,
    checked: bool = False,
    hung_after: float = HUNG_AFTER,
) -> Outcome:
    """Runs the named tests on three ranks.

    Args:
        names: of the suite's tests.
        directory: for their files, and for what the ranks print.
        module: takes the place of torch.distributed in the suite.
        checked: with MODELEXPORT_DEBUG set.
        hung_after: seconds that one test may take.
    """
    outcome = Outcome()
    left = list(names)
    launches = 0
    while left:
        done: dict[str, list[dict]] = {}
        config = MultiprocessConfig(
            world_size=WORLD_SIZE,
            backend="gloo",
            timeout=hung_after,
            on_event=lambda _, event, done=done: done.setdefault(event["test"], []).append(event),  # type: ignore[misc]
        )
        failure: RankFailedError | None = None
        launches += 1
        try:
            launch_subprocesses(run_in_rank, config, None, 0, left, str(directory / str(launches)), module, checked)
        except RankFailedError as error:
            failure = error
        finished = [name for name in left if len(done.get(name, [])) == WORLD_SIZE]
        for name in finished:
            _record(outcome, name, done[name])
        if failure is None:
            assert finished == left, "a rank was silent about a test"
            break
        found = _PHASE.search(failure.phase)
        if found is None or found[1] in finished:
            raise failure  # no test's fault
        outcome.failed[found[1]] = failure
        left = left[left.index(found[1]) + 1 :]
    return outcome


def _record(outcome: Outcome, name: str, events: list[dict]) -> None:
    reasons = {event["skipped"] for event in events}
    assert len(reasons) == 1, f"the ranks disagree on {name}: {reasons}"
    (reason,) = reasons
    if reason:
        outcome.skipped[name] = reason
    else:
        outcome.passed.append(name)
        if events[0]["lifted"]:
            outcome.lifted[name] = events[0]["lifted"]
    outcome.calls[name] = sum((Counter(event["calls"]) for event in events), Counter())
    outcome.seconds[name] = max(event["seconds"] for event in events)


def run_in_rank(names: Sequence[str], directory: str, module: str, checked: bool) -> None:
    """What each rank does: the tests one after the other, an event after each."""
    rank = int(os.environ["RANK"])
    torch.distributed.destroy_process_group()  # the launcher's: every test joins one of its own
    _write_output_to(Path(directory, f"rank-{rank}.txt"))
    suite = _import_suite(directory)
    os.environ["MODELEXPORT_DEBUG"] = "1" if checked else "0"
    dist = Dist(importlib.import_module(module), checked)
    suite.dist = dist

    tests = with_values(type("Tests", (suite.TestDistBackend, suite.DistributedTest._DistTestBase), {}), dist)
    rendezvous = RankRendezvous(Path(directory, "rendezvous"))
    for name in names:
        before, start = Counter(dist.calls), time.monotonic()
        with phase_scope(f"running {name}"):
            skipped = _run_test(tests(name), rank, Path(directory, name), suite, dist, rendezvous)
        event = {"test": name, "skipped": skipped, "lifted": _lifted(getattr(tests, name))}
        report({**event, "seconds": time.monotonic() - start, "calls": dict(dist.calls - before)})


class RankRendezvous:
    """Where the ranks wait for each other between tests, whatever has become of the process group.

    torch's ``Barrier`` does the same through files, looking every 0.1 s; within the tests it is used unchanged.
    """

    def __init__(self, file: Path) -> None:
        self._store = torch.distributed.FileStore(str(file), WORLD_SIZE)  # type: ignore[attr-defined]

    def wait(self, test: str, where: str) -> None:
        with phase_scope(f"running {test}", waiting=True):
            if self._store.add(f"{test} {where}", 1) == WORLD_SIZE:
                self._store.set(f"{test} {where}, all", "")
            self._store.wait([f"{test} {where}, all"], timedelta(seconds=GROUP_TIMEOUT))


def _write_output_to(file: Path) -> None:
    """Keeps what the profiler prints on every use away from the terminal."""
    file.parent.mkdir(parents=True, exist_ok=True)
    for stream in (1, 2):
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, stream)
        os.close(descriptor)


def _import_suite(directory: str) -> Any:
    """The suite's module, as torch's own runner imports it: its decorators read the environment.

    ``skip_if_small_worldsize`` is replaced: since 2024 it skips where there are fewer than 8 ranks, to spare torch's
    own machines. The tests that carry it use ranks 0 to 2 (and were run with three before).
    """
    os.environ.update(BACKEND="gloo", TEMP_DIR=directory, INIT_METHOD=f"file://{directory}/unused")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the same tests everywhere: those of CPU tensors over gloo
    sys.argv = sys.argv[:1]  # parsed on import
    common = importlib.import_module("torch.testing._internal.common_distributed")
    message = common.TEST_SKIPS["small_worldsize"].message

    def skip_if_small_worldsize(test: Any) -> Any:
        test.lifted = message
        return test

    common.skip_if_small_worldsize = skip_if_small_worldsize  # type: ignore[attr-defined]
    return importlib.import_module(SUITE)


def _lifted(test: Any) -> str:
    """Why torch would not run a test that is run, or ""."""
    reason = getattr(test, "__unittest_skip_why__", "")
    return reason if is_lifted(test.__name__, reason) else getattr(test, "lifted", "")


def _run_test(case: Any, rank: int, directory: Path, suite: Any, dist: Any, rendezvous: RankRendezvous) -> str:
    """Runs one test; returns "" or why torch skips it."""
    name = directory.name
    reason = getattr(getattr(type(case), name), "__unittest_skip_why__", "")
    if reason and not is_lifted(name, reason):
        return reason
    for part in ("barrier", "test_dir", "init_dir"):
        (directory / part).mkdir(parents=True, exist_ok=True)
    os.environ["TEMP_DIR"] = str(directory)
    suite.INIT_METHOD = os.environ["INIT_METHOD"] = f"file://{directory}/init_dir/again"
    suite.Barrier.barrier_id = 0
    case.rank, case.file_name = rank, f"{directory}/init_dir/first"
    dist.init_process_group(
        init_method=case.init_method,
        backend="gloo",
        world_size=WORLD_SIZE,
        rank=rank,
        timeout=timedelta(seconds=GROUP_TIMEOUT),
    )
    rendezvous.wait(name, "begins")
    importlib.import_module("torch.testing._internal.common_utils").set_rng_seed()
    try:
        getattr(case, name)()
    except unittest.SkipTest as skip:
        reason = str(skip)
    except SystemExit as leave:
        skips = {skip.exit_code: skip.message for skip in suite.TEST_SKIPS.values()}
        if leave.code not in skips:
            raise
        reason = skips[leave.code]
    else:
        reason = ""
    rendezvous.wait(name, "ends")
    dist.destroy_process_group()
    return reason
