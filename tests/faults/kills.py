"""SIGKILL of a launcher, a rank or all, at moments and calls over the whole of every job: the rerun has the same bytes.

``python -m tests.faults.kills DIRECTORY --kills 1000``: half of the kills come at a time, half at a call: a line of the
package that reads, writes, syncs, renames or speaks with another process, of which the process that makes it dies. How
far the run had come is read from what it left; so many kills fell into each phase.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import psutil

from tests.faults.campaign import Calls, calls_of
from tests.faults.interposed import FILES, KILL, SOCKETS, Fault, run_interposed
from tests.faults.jobs import (
    JOBS,
    PUSH,
    REPOSITORY,
    Ended,
    Workshop,
    difference,
    digests,
    pushing,
    shared_memory,
    version,
)

_TARGETS = FILES | SOCKETS


@dataclass
class Outcomes:
    """Counts of the kills.

    Attributes:
        phases: (job, how far it had come) of each.
        victims: who was killed.
        late: runs that had ended before their kill came.
        sites: lines at which a process was killed.
    """

    phases: Counter[tuple[str, str]] = field(default_factory=Counter)
    victims: Counter[str] = field(default_factory=Counter)
    sites: set[str] = field(default_factory=set)
    late: int = 0
    defects: list[tuple[str, str]] = field(default_factory=list)

    @property
    def kills(self) -> int:
        """How many there were."""
        return sum(self.phases.values())

    def as_json(self) -> dict[str, object]:
        """JSON-able form."""
        by_phase: Counter[str] = Counter()
        by_job: dict[str, dict[str, int]] = {}
        for (job, phase), count in sorted(self.phases.items()):
            by_phase[phase] += count
            by_job.setdefault(job, {})[phase] = count
        found = {"kills": self.kills, "late": self.late, "victims": dict(self.victims), "sites": len(self.sites)}
        return {**found, "phases": dict(by_phase), "jobs": by_job, "defects": self.defects}


class Killer:
    """Runs jobs, kills them, and runs them again.

    Args:
        shop: which has run the jobs.
    """

    def __init__(self, shop: Workshop, names: Sequence[str]) -> None:
        self.shop, self.outcomes = shop, Outcomes()
        self._jobs = {name: JOBS[name] for name in names if name != PUSH}
        self._calls: dict[str, Calls] = {name: calls_of(shop, name) for name in self._jobs}
        self._steps = {name: self._count_steps(name) for name in self._jobs}
        self._requests = self._count_requests() if PUSH in names else 0

    def kill(self, name: str, rng: Random) -> None:
        """One kill: of the job's processes, at a time or a call."""
        if name == PUSH:
            self._kill_push(rng)
            return
        before = shared_memory()
        with self.shop.case() as out:
            if rng.random() < 0.5:
                label, ended = self._at_call(name, out, rng)
            else:
                label, ended = self._at_time(name, out, rng)
            if ended.status == 0:
                self.outcomes.late += 1
                return
            phase = _phase(out, self._steps[name])
            self.outcomes.phases[name, phase] += 1
            wrong = [self.shop.left_over(before)]
            if ended.status is None:
                wrong.append("hangs")
            texts = (ended.errors, self.shop.ranks_output())
            wrong += [f"a traceback: {said[-1500:]!r}" for said in texts if "Traceback" in said]
            wrong.append(self._wrong_rerun(name, out))
            self.outcomes.defects += [(each, f"{name}: {label}; {phase}") for each in wrong if each]

    def _at_call(self, name: str, out: Path, rng: Random) -> tuple[str, Ended]:
        """Every line is as likely as any other, however often it is passed."""
        kind, site = rng.choice(sorted(self._calls[name]))
        fault = Fault(KILL, (kind,), rng.randint(1, self._calls[name][kind, site]), site=site)
        interposed = self.shop.interposed
        interposed.arm(fault, _TARGETS)
        ended = self.shop.run(self._jobs[name], out)
        interposed.disarm()
        if ended.status != 0:
            self.outcomes.sites.add(interposed.fired_at)
            self.outcomes.victims["launcher" if ended.status == -signal.SIGKILL else "rank"] += 1
        return str(fault), ended

    def _at_time(self, name: str, out: Path, rng: Random) -> tuple[str, Ended]:
        running = self.shop.start(self._jobs[name], out)
        seconds = rng.uniform(0.0, self.shop.seconds[name])
        time.sleep(seconds)
        ranks = self.shop.ranks()
        victim = rng.choice(("launcher", "rank", "all") if ranks else ("launcher",))
        chosen = {"launcher": [], "rank": ranks and [rng.choice(ranks)], "all": ranks}[victim]
        if victim != "rank":
            os.kill(running.pid, signal.SIGKILL)  # a zombie at worst: it is waited for below
        for process in chosen:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        ended = running.wait()
        if ended.status != 0:
            self.outcomes.victims[victim] += 1
        return f"{victim} after {seconds:.3f} s", ended

    def _wrong_rerun(self, name: str, out: Path) -> str:
        """Runs the job again; what is wrong then."""
        was_there = out.exists()
        again = self.shop.run(self._jobs[name], out)
        if was_there and (again.status != 2 or "exists already" not in again.errors):
            return f"the target was there, and the rerun ends with {again.status}: {again.errors[-300:]!r}"
        if not was_there and again.status != 0:
            return f"the rerun ends with {again.status}: {again.errors[-300:]!r}"
        other = difference(digests(out), self.shop.expected[name])
        if other:
            return other
        left = sorted({path.name for path in out.parent.iterdir()} - {out.name, "output", "workspace"})
        workspace = out.parent / "workspace"
        left += sorted(path.name for path in workspace.rglob("*")) if workspace.exists() else []
        return f"left after the rerun: {left}" if left else ""

    def _count_steps(self, name: str) -> int:
        with self.shop.case() as out:
            self.shop.interposed.start_log(FILES, data=True)
            assert self.shop.run(self._jobs[name], out).status == 0
            self.shop.interposed.disarm()
        data = self.shop.interposed.data()
        journal = [r for r in self.shop.interposed.log() if r.path.endswith(b"journal.jsonl") and r.data >= 0]
        return sum(b'"step":' in data[r.data : r.data + r.length] for r in journal)

    # --- pushes ------------------------------------------------------------------------------------------------------

    def _count_requests(self) -> int:
        assert self.shop.hub is not None
        with self.shop.case() as out:
            assert self.shop.run(JOBS[PUSH], out).status == 0
            return len(self.shop.hub.requests)

    def _kill_push(self, rng: Random) -> None:
        """At a time, or once the hub has had so many requests."""
        hub = self.shop.hub
        assert hub is not None
        by_time, seconds = rng.random() < 0.5, rng.uniform(0.0, self.shop.seconds[PUSH])
        requests = rng.randint(1, self._requests)
        with self.shop.case() as out:
            running = self.shop.start(JOBS[PUSH], out)
            deadline = time.monotonic() + (seconds if by_time else 5.0)
            while time.monotonic() < deadline and (by_time or len(hub.requests) < requests):
                time.sleep(0.0005)
            os.kill(running.pid, signal.SIGKILL)
            if running.wait().status == 0:
                self.outcomes.late += 1
                return
            time.sleep(0.02)  # the hub may be at its last request
            self.outcomes.victims["launcher"] += 1
            self.outcomes.phases[PUSH, self._push_phase()] += 1
            if self.shop.output(JOBS[PUSH], out) not in ({}, self.shop.expected[PUSH]):
                how = f"push: {seconds:.3f} s" if by_time else f"push: {requests} requests"
                self.outcomes.defects.append(("the repository has a part of the checkpoint", how))
            again = self.shop.run(JOBS[PUSH], out)
            if again.status != 0 or self.shop.output(JOBS[PUSH], out) != self.shop.expected[PUSH]:
                self.outcomes.defects.append((f"the rerun ends with {again.status}: {again.errors[-300:]!r}", "push"))

    def _push_phase(self) -> str:
        hub = self.shop.hub
        assert hub is not None
        repository = hub.repositories.get(REPOSITORY)
        if repository is None:
            return "push: before the repository is made"
        if repository.files:
            return "push: after the commit"
        return "push: files sent, before the commit" if hub.blobs else "push: before the first file is sent"


def _phase(out: Path, steps: int) -> str:
    """How far a run had come, from what it left."""
    home = out.parent / f".{out.name}.modelexport"
    journal = home / "journal.jsonl"
    if out.exists():
        return "6 after the rename, before its end"
    if not home.exists():
        return "1 before the staging directory"
    text = journal.read_bytes() if journal.exists() else b""
    done = text.count(b'"step":')
    if b'"publishing":' in text:
        return "5 all on the disk, before the rename"
    if done >= steps:
        return "4 all steps written, before they are on the disk"
    if done:
        return "3 in the middle of the steps"
    return "2 before the first step is done"


def main(arguments: Sequence[str]) -> int:
    """Kills jobs in turn; 0 where no defect was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.kills", description=__doc__)
    parser.add_argument("directory", type=Path, help="an empty one")
    parser.add_argument("--jobs", default=",".join(JOBS), help="more often if named again: " + ", ".join(JOBS))
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1e9)
    given = parser.parse_args(arguments)
    given.directory.mkdir(parents=True, exist_ok=True)
    run_interposed(given.directory, ["-m", "tests.faults.kills", *arguments])
    names, deadline = given.jobs.split(","), time.monotonic() + given.seconds
    with pushing(given.directory) as hub:
        shop = Workshop(given.directory / "shop", list(dict.fromkeys(names)), hub)
        print({name: round(seconds, 2) for name, seconds in shop.seconds.items()}, flush=True)
        killer = Killer(shop, names)
        number = 0
        while killer.outcomes.kills < given.kills and time.monotonic() < deadline:
            killer.kill(names[number % len(names)], Random(f"{given.seed}/{number}"))
            number += 1
            if number % 50 == 0:
                print(number, killer.outcomes.kills, flush=True)
    for what, how in killer.outcomes.defects:
        print(f"DEFECT {what}\n    {how}")
    print(json.dumps({"commit": version(), "seed": given.seed, **killer.outcomes.as_json()}))
    return 1 if killer.outcomes.defects else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
