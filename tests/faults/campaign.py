"""Every job under injected faults: it ends with the right bytes, or with one line and nothing left that is in the way.

``python -m tests.faults.campaign DIRECTORY --cases 500 --seed 1``: first each job runs undisturbed, and all of its
calls are logged with the lines that make them. A case is then a job, such a line, one of its calls, and what happens
there; lines that have had the fewest cases come first. The same seed gives the same cases.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from tests.faults.interposed import FAIL, FILES, KINDS, MEMFDS, SHORT, SOCKETS, Fault, run_interposed
from tests.faults.jobs import JOBS, Ended, Workshop, difference, files_left, pushing, shared_memory, version

_ROOM = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EINTR)
FAULTS: dict[str, tuple[int, ...]] = {  # kind of call -> errors; 0: it falls short
    "open": (*_ROOM, errno.EMFILE, errno.ENOMEM),
    "read": (errno.EIO, errno.EINTR, errno.ENOMEM, 0),
    "write": (*_ROOM, errno.ENOMEM, 0),
    "fsync": _ROOM,
    "mmap": (errno.ENOMEM, errno.EMFILE, errno.EIO),
    "rename": (*_ROOM, errno.ENOMEM),
    "unlink": (errno.EIO, errno.ENOMEM),
    "mkdir": (*_ROOM, errno.ENOMEM),
    "allocate": _ROOM,
    "truncate": _ROOM,
    "sendmsg": (errno.EIO, errno.EINTR, errno.ENOMEM, 0),
    "recvmsg": (errno.EIO, errno.EINTR, errno.ENOMEM, 0),
}
_GREETING = ("read", "native")
"""The eight bytes that gloo reads first from a connection. Where they do not come, or come in two parts, it gives the
connection up without a word, so that the rank at the other end learns it from its time-out alone."""
TARGETS = FILES | SOCKETS | MEMFDS
_ABORTED = re.compile(r"^modelexport: rank \d+ failed while .*: its process was killed by SIGABRT")
_WORDS = {  # that name a cause as well as its own name does
    errno.ENOSPC: ("no room is left",),
    errno.EDQUOT: ("no room is left",),
    errno.ENOMEM: ("memory ran out",),
}


@dataclass
class Outcomes:
    """Counts of what came of the cases.

    Attributes:
        injected: how many faults were.
        sites: kind and lines of the calls at which one was.
        defects: (what is wrong, how to see it again).
    """

    counts: Counter[str] = field(default_factory=Counter)
    by_error: Counter[str] = field(default_factory=Counter)
    injected: int = 0
    runs: int = 0
    sites: set[str] = field(default_factory=set)
    defects: list[tuple[str, str]] = field(default_factory=list)

    def as_json(self) -> dict[str, object]:
        """JSON-able form."""
        return {
            "runs": self.runs,
            "injected": self.injected,
            "sites": len(self.sites),
            "sites by kind": dict(Counter(site.split(" ")[0] for site in self.sites)),
            "errors": dict(self.by_error),
            "outcomes": dict(self.counts),
            "defects": self.defects,
        }

    def __str__(self) -> str:
        lines = [f"{key}: {value}" for key, value in self.as_json().items() if key != "defects"]
        return "\n".join((*lines, *(f"DEFECT {what}\n    {how}" for what, how in self.defects)))


Calls = dict[tuple[str, str], int]
"""(kind, site) -> how many calls of an undisturbed run."""


def calls_of(shop: Workshop, name: str) -> Calls:
    """The calls of a job, from an undisturbed run of it."""
    found: Counter[tuple[str, str]] = Counter()
    with shop.case() as out:
        shop.interposed.start_log(TARGETS)
        ended = shop.run(JOBS[name], out)
        shop.interposed.disarm()
        assert ended.status == 0, ended.errors
    for record in shop.interposed.log():
        kind, site = KINDS[record.kind], record.site.decode()
        if kind in FAULTS and not site.startswith("jobs.py"):
            found[kind, site] += 1
    return dict(sorted(found.items()))


def cases(calls: dict[str, Calls], rng: Random, count: int) -> list[tuple[str, Fault]]:
    """Jobs and faults: each line in turn, with an error that it has not had yet where there is one."""
    drawn: list[tuple[str, Fault]] = []
    places = {place for each in calls.values() for place in each if place != _GREETING}
    left = {(kind, site): rng.sample(FAULTS[kind], len(FAULTS[kind])) for kind, site in sorted(places)}
    while len(drawn) < count:
        for kind, site in rng.sample(sorted(left), len(left)):
            if not left[kind, site]:
                left[kind, site] = rng.sample(FAULTS[kind], len(FAULTS[kind]))
            code = left[kind, site].pop()
            name = rng.choice([name for name, each in calls.items() if (kind, site) in each])
            nth = rng.randint(1, calls[name][kind, site])
            sticky = code in (errno.ENOSPC, errno.EDQUOT) and rng.random() < 0.5
            drawn.append((name, Fault(FAIL if code else SHORT, (kind,), nth, code, site, sticky)))
    return drawn[:count]


def run_case(shop: Workshop, name: str, fault: Fault, outcomes: Outcomes) -> None:
    """Runs a job with a fault, and again without one."""
    label = f"{name}: {fault}"
    before = shared_memory()
    with shop.case() as out:
        shop.interposed.arm(fault, TARGETS)
        ended = shop.run(JOBS[name], out)
        shop.interposed.disarm()
        outcomes.runs += 1
        if not shop.interposed.fired:
            outcomes.counts["call not reached"] += 1
            return
        outcomes.injected += shop.interposed.fired
        outcomes.sites.add(shop.interposed.fired_at)
        outcomes.by_error[f"{fault.kinds[0]} {errno.errorcode.get(fault.code, 'short')}"] += 1
        wrong = _wrong_end(shop, name, fault, ended, out)
        wrong += [left for left in (shop.left_over(before), ", ".join(files_left(out))) if left]
        said = shop.ranks_output()
        if "Traceback" in said:
            wrong.append(f"a rank says {said[-1500:]!r}")
        elif said:  # torch's own, from its C++
            outcomes.counts["warnings of torch in a rank"] += 1
        outcomes.counts["right bytes" if ended.status == 0 else "one line" if not wrong else "other"] += 1
        if ended.status != 0:
            wrong += _wrong_rerun(shop, name, out)
            outcomes.runs += 1
        outcomes.defects += [(each, f"{label}; {shop.interposed.fired_path}; {ended.seconds:.1f} s") for each in wrong]


def _wrong_end(shop: Workshop, name: str, fault: Fault, ended: Ended, out: Path) -> list[str]:
    if ended.status is None:
        return ["hangs"]
    if ended.status == 0:
        other = difference(shop.output(JOBS[name], out), shop.expected[name])
        return [other or f"a traceback: {ended.errors[-800:]!r}"] if other or "Traceback" in ended.errors else []
    found = shop.output(JOBS[name], out)
    if found and (not JOBS[name].pushes or found != shop.expected[name]):  # the hub's answer may be what is lost
        return [f"status {ended.status}, but the target is there: {ended.errors[-300:]!r}"]
    lines = ended.errors.strip().replace("\n  ", " ").split("\n")  # a list of problems has a line for each
    if "native" in shop.interposed.fired_at and _ABORTED.search(ended.errors):
        return []  # torch's own threads end the process where they do not expect an error; it has been named
    if "Traceback" in ended.errors or len(lines) != 1 or not lines[0].startswith("modelexport: "):
        return [f"status {ended.status}, not one line: {ended.errors[-1500:]!r}"]
    native = "native" in shop.interposed.fired_at  # torch's own threads do not say why a connection broke
    short = native and "short write" in lines[0]  # gloo sends its greeting whole, or gives up and says so
    if fault.code == 0 and not short:  # which a program may see at any time, and goes on
        return [f"status {ended.status} because a call fell short: {lines[0]!r}"]
    reasons = [os.strerror(fault.code).lower(), *_WORDS.get(fault.code, ())]
    named = Path(shop.interposed.fired_path).name in lines[0]
    # The hub's client keeps to itself why a request was not sent whole, and waits for an answer all the same.
    unsent = JOBS[name].pushes and "sendmsg" in fault.kinds and "(timed out)" in lines[0]
    if not (named or native or unsent or any(reason in lines[0].lower() for reason in reasons)):
        return [f"status {ended.status}, names neither the cause nor the file: {lines[0]!r}"]
    return []


def _wrong_rerun(shop: Workshop, name: str, out: Path) -> list[str]:
    again = shop.run(JOBS[name], out)
    if again.status != 0:
        return [f"the rerun fails: {again.errors[-300:]!r}"]
    left = sorted({path.name for path in out.parent.iterdir()} - {out.name, "output", "workspace"})
    other = difference(shop.output(JOBS[name], out), shop.expected[name])
    return [each for each in (f"the rerun: {other}" if other else "", f"left: {left}" if left else "") if each]


def run_campaign(shop: Workshop, names: Sequence[str], count: int, seed: int, seconds: float = 1e9) -> Outcomes:
    """Runs so many cases, or for so long."""
    outcomes, deadline = Outcomes(), time.monotonic() + seconds
    drawn = cases({name: calls_of(shop, name) for name in names}, Random(seed), count)
    for number, (name, fault) in enumerate(drawn, start=1):
        if time.monotonic() > deadline:
            break
        known = len(outcomes.defects)
        run_case(shop, name, fault, outcomes)
        for what, how in outcomes.defects[known:]:  # at once: a run of hours may be cut off
            print(f"{number}: DEFECT {what}\n    {how}", file=sys.stderr, flush=True)
        if number % 50 == 0:
            print(f"{number} of {len(drawn)}: {dict(outcomes.counts)}", file=sys.stderr, flush=True)
        if not shop.server_is_alive():
            outcomes.defects.append(("the fork server died", f"{name}: {fault}"))
            break
    return outcomes


def main(arguments: Sequence[str]) -> int:
    """Runs the cases of a seed; 0 where no defect was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.campaign", description=__doc__)
    parser.add_argument("directory", type=Path, help="an empty one")
    parser.add_argument("--jobs", default=",".join(JOBS), help=", ".join(JOBS))
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1e9)
    given = parser.parse_args(arguments)
    given.directory.mkdir(parents=True, exist_ok=True)
    run_interposed(given.directory, ["-m", "tests.faults.campaign", *arguments])
    names = given.jobs.split(",")
    with pushing(given.directory) as hub:
        shop = Workshop(given.directory / "shop", names, hub)
        print({name: round(seconds, 2) for name, seconds in shop.seconds.items()}, flush=True)
        outcomes = run_campaign(shop, names, given.cases, given.seed, given.seconds)
    print(outcomes)
    print(json.dumps({"commit": version(), "seed": given.seed, "jobs": names, **outcomes.as_json()}))
    return 1 if outcomes.defects else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
