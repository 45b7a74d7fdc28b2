"""Exports on simulated machines, whose network delays, loses and breaks, whose clocks differ, whose workspace is late.

``python -m tests.faults.hosts DIRECTORY``: every condition on several numbers of machines, one rank each. A run ends
with the bytes of a single process and nothing left in the workspace; or every machine ends, one at least says which
rank was lost, and the same command on a sound network resumes to the same bytes. The machines are network namespaces
on a switch (:mod:`tests.helpers.switch`), so it needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from modelexport.assets import demo_model_path
from tests.faults.interposed import DELAY, FILES, KINDS, PID_BITS, Fault, Interposed, Record, run_interposed
from tests.faults.jobs import FEW, Patience, difference, digests, version
from tests.helpers.hosts import Host, Network, hosts_on_a_switch, why_not
from tests.helpers.switch import Conditions

ENDLESS = 240.0
"""Seconds after which a run is taken to hang."""
_PORT = 29533
_PAUSE = 6.0  # seconds: TCP sends again before it, and the ranks' watch gives a machine up after 30
_PATIENCE = 60  # seconds that ranks wait for others: a machine may be cut off before it has joined
_LATE = ("open", "rename", "unlink", "mkdir", "fsync")
"""Calls that a file server answers."""


@dataclass(frozen=True)
class Condition:
    """The state of the machines while a job runs.

    Attributes:
        network: of the network, from the beginning.
        clock: seconds by which each machine's clock is ahead of the one's before it.
        late: seconds that every call on files of the workspace and the target takes longer.
        fault: what happens at a moment of the run: "cut" (one machine from the others, for good), "pause" (so for
            some seconds), "kill" (one machine, which from then on answers nothing), "power" (so, and what it wrote and
            did not fsync is lost).
    """

    network: Conditions = field(default_factory=Conditions)
    clock: float = 0.0
    late: float = 0.0
    fault: str = ""

    @property
    def succeeds(self) -> bool:
        """True where the job must; otherwise it may."""
        return self.fault in ("", "pause")


CONDITIONS = {
    "sound": Condition(),
    "0.1 ms": Condition(Conditions(delay=0.0001)),
    "5 ms": Condition(Conditions(delay=0.005)),
    "50 ms": Condition(Conditions(delay=0.05)),
    "1 % lost": Condition(Conditions(delay=0.001, loss=0.01)),
    "clocks": Condition(clock=-3607.0),
    "late files": Condition(late=0.02),
    "pause": Condition(fault="pause"),
    "cut": Condition(fault="cut"),
    "kill": Condition(fault="kill"),
    "power": Condition(fault="power"),
}


@dataclass(frozen=True)
class Job:
    """A command that machines run together.

    Attributes:
        alone: the command by which one process writes the same.
        spread: what is added to it on machines; ``{world}`` and ``{workspace}`` are filled in.
    """

    alone: tuple[str, ...]
    spread: tuple[str, ...] = ("--tp", "{world}", "--workspace", "{workspace}")

    def argv(self, world: int, workspace: Path) -> list[str]:
        """The arguments on each of ``world`` machines."""
        known = {"world": world, "workspace": workspace}
        return [*self.alone, *(word.format(**known) for word in self.spread), "--timeout", str(_PATIENCE)]


_INT4 = ("--model", str(demo_model_path()), "--quant", "int4", "--group-size", "32", "--no-evaluate", "--quiet")
_RESHARD = ("reshard", str(demo_model_path()), "--tp", "4", "--quiet")
JOBS = {
    "int4": Job(_INT4),
    "direct": Job(_INT4, (*Job.spread, "--gather", "direct")),
    "gptq": Job((*_INT4, "--algorithm", "gptq", *FEW)),
    "reshard": Job(_RESHARD, ()),
    "reshard p2p": Job(_RESHARD, ("--exchange", "p2p")),
    "reshard direct": Job(_RESHARD, ("--exchange", "direct")),
}


class Cluster:
    """Machines, and the job that they run together.

    Args:
        directory: an empty one, of which they share a part.
        hosts, network: of :func:`~tests.helpers.hosts.hosts_on_a_switch`.
        interposed: makes files late, and logs who writes.

    Attributes:
        shared: what they share: the workspace, and the target.
        expected: digests of the job's output in one process.
    """

    def __init__(
        self, directory: Path, hosts: Sequence[Host], network: Network, job: Job, interposed: Interposed
    ) -> None:
        self.directory, self.hosts, self.network, self.interposed = directory, hosts, network, interposed
        self.job = job
        self.shared = directory / "shared"
        self.workspace = self.shared / "workspace"
        for path in (self.workspace, directory / "logs"):
            path.mkdir(parents=True, exist_ok=True)
        self._boots = [directory / f"boot-{host.name}" for host in hosts]
        for number in range(len(hosts)):
            self.boot(number)
        self.expected = self._alone()

    def boot(self, number: int) -> None:
        """A machine is booted: it has another boot's id."""
        self._boots[number].write_text(f"{uuid.uuid4()}\n")

    def _alone(self) -> dict[str, str]:
        """Digests of the job's output in one process."""
        out = self.directory / "alone"
        subprocess.run([sys.executable, "-m", "modelexport", *self.job.alone, "--out", str(out)], check=True)
        found = digests(out)
        shutil.rmtree(out)
        return found

    def run(
        self, out: Path, condition: Condition, disturb: Callable[[list[subprocess.Popen[bytes]]], None]
    ) -> tuple[list[int | None], list[str]]:
        """Runs the job once: every machine's exit status (None: it had to be ended) and output."""
        self.network.become(condition.network)
        if condition.late:
            self.interposed.arm(Fault(DELAY, _LATE, 1, code=round(condition.late * 1e6), sticky=True), FILES)
        if condition.fault == "power":
            self.interposed.start_log(FILES)
        world, processes, logs = len(self.hosts), [], []
        for number, host in enumerate(self.hosts):
            place = {"RANK": number, "WORLD_SIZE": world, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
            env = {name: str(value) for name, value in place.items()}
            env |= {"MASTER_ADDR": self.hosts[0].address, "MASTER_PORT": str(_PORT)}
            env |= {"FAULTS_CLOCK": str(condition.clock * number), "FAULTS_MACHINE": str(number)}
            env |= {"BOOT_ID": str(self._boots[number])}
            command = ["-m", "modelexport", *self.job.argv(world, self.workspace)]
            logs.append(self.directory / "logs" / f"{host.name}.log")
            processes.append(host.start([*command, "--out", str(out)], logs[-1], env))
        try:
            disturb(processes)
            patience = Patience(ENDLESS)
            statuses = [_wait(process, patience) for process in processes]
        finally:
            for process in processes:
                end(process)
            self.interposed.disarm()
            self.network.become(Conditions())
        return statuses, [log.read_text(errors="replace") for log in logs]


def end(process: subprocess.Popen[bytes]) -> None:
    """Kills a machine's processes."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait(process: subprocess.Popen[bytes], patience: Patience) -> int | None:
    while process.poll() is None and not patience.is_over():
        time.sleep(0.01)
    return process.poll()


@dataclass
class Trials:
    """Runs of jobs under every condition, and what is wrong with them.

    Attributes:
        runs: machines, job and condition -> seconds of each run, and whether it finished.
        defects: what is wrong, and with which run.
    """

    runs: dict[str, list[tuple[float, bool]]] = field(default_factory=dict)
    defects: list[tuple[str, str]] = field(default_factory=list)

    def trial(self, cluster: Cluster, label: str, condition: Condition, seconds: float, rng: Random) -> float:
        """One run of a job, and if it does not finish the one that resumes it.

        Args:
            seconds: that the job takes undisturbed; the fault comes in its course.

        Returns:
            The seconds that it took.
        """
        out, moment = cluster.shared / "out", rng.uniform(0.4, 1.0) * seconds
        victim = rng.randrange(len(cluster.hosts))
        what = f"{label} (machine {victim} after {moment:.1f} s)" if condition.fault else label

        def disturb(processes: list[subprocess.Popen[bytes]]) -> None:
            if condition.fault:
                time.sleep(moment)
                _strike(condition.fault, cluster, processes, victim)

        began = time.monotonic()
        statuses, texts = cluster.run(out, condition, disturb)
        if condition.fault in ("kill", "power"):  # it has ended with the others, or they without it
            del statuses[victim], texts[victim]
        took, finished = time.monotonic() - began, _all_done(statuses)
        wrong = [] if finished else _wrong_end(condition, statuses, texts)
        lost = condition.fault == "power" and bool(_left(cluster))
        if lost:  # what the machine left is the next run's to remove
            _a_day_later(cluster.shared)
            if finished:
                shutil.rmtree(out)
        if lost or not finished:
            again, said = cluster.run(out, Condition(), lambda processes: None)
            if not _all_done(again):
                wrong.append(f"the rerun ends with {again}: {said[0][-600:]!r}")
        wrong += [each for each in (difference(digests(out), cluster.expected), _left(cluster)) if each]
        shutil.rmtree(out, ignore_errors=True)
        self.runs.setdefault(label, []).append((round(took, 1), finished))
        self.defects += [(each, what) for each in wrong]
        print(f"{what}: {'finished' if finished else 'ended'} in {took:.1f} s", *wrong, sep="; DEFECT ", flush=True)
        return took


def _all_done(statuses: Sequence[int | None]) -> bool:
    return all(status == 0 for status in statuses)


def _strike(fault: str, cluster: Cluster, processes: list[subprocess.Popen[bytes]], victim: int) -> None:
    others = [number for number in range(len(processes)) if number != victim]
    cluster.network.become(Conditions(parts=[[victim], others]))
    if fault in ("kill", "power"):
        end(processes[victim])
    if fault == "power":
        lose_unsynced(cluster.shared, cluster.interposed.log(), victim)
        cluster.boot(victim)
    if fault == "pause":
        time.sleep(_PAUSE)
        cluster.network.become(Conditions())


def _a_day_later(directory: Path) -> None:
    """Makes heartbeats a day old: so long a run counts as living that has ended on a machine which was booted since."""
    for heart in directory.rglob("rank-*.alive"):
        os.utime(heart, (0, time.time() - 86_500))


def lose_unsynced(directory: Path, log: Sequence[Record], machine: int) -> int:
    """Takes out of files what a machine has written and not fsynced, which are zeros then; returns how many bytes."""
    unsynced: dict[int, list[tuple[int, int]]] = {}
    beginning: dict[int, list[tuple[int, int]]] = {}
    for record in log:
        kind, inode = KINDS[record.kind], record.inode
        own = record.pid >> PID_BITS == machine
        if kind in ("write", "munmap") and record.length > 0:
            written = (record.offset, record.offset + record.length)
            kept = unsynced.setdefault(inode, [])
            kept[:] = [part for each in kept for part in _without(each, written)] + ([written] if own else [])
        elif kind == "open" and record.flags & 1 and record.flags & os.O_CREAT:  # the inode may have been another's
            unsynced.pop(inode, None)
        elif kind == "begin fsync" and own:
            beginning[inode] = list(unsynced.get(inode, []))
        elif kind == "fsync" and own and record.result >= 0:
            safe = beginning.pop(inode, [])
            for each in safe:
                unsynced[inode] = [part for kept in unsynced[inode] for part in _without(kept, each)]
    lost = 0
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("r+b") as file:
                for begin, end_ in unsynced.get(path.stat().st_ino, []):
                    file.seek(begin)
                    file.write(bytes(end_ - begin))
                    lost += end_ - begin
    return lost


def _without(part: tuple[int, int], other: tuple[int, int]) -> list[tuple[int, int]]:
    begin, stop = part
    parts = [(begin, min(stop, other[0])), (max(begin, other[1]), stop)]
    return [(a, b) for a, b in parts if a < b]


def _wrong_end(condition: Condition, statuses: list[int | None], texts: list[str]) -> list[str]:
    """What is wrong with a run that has failed."""
    wrong = []
    if condition.succeeds:
        wrong.append(f"it ends with {statuses}: {texts[0][-600:]!r}")
    for number, (status, text) in enumerate(zip(statuses, texts, strict=True)):
        if status is None:
            wrong.append(f"machine {number} hangs: {text[-600:]!r}")
        elif "Traceback" in text:
            wrong.append(f"machine {number} shows a traceback: {text[-600:]!r}")
    if not any(re.search(r"\brank \d+", text) for text in texts):  # rank 0 speaks, or all where it is gone
        wrong.append(f"nobody names a rank: {texts[0][-600:]!r}")
    return wrong


def _left(cluster: Cluster) -> str:
    """What runs have left; "" where there is nothing."""
    left = sorted(path.name for path in cluster.workspace.rglob("*"))
    left += sorted(path.name for path in cluster.shared.iterdir() if path.name.startswith("."))
    return f"left: {left}" if left else ""


def main(arguments: Sequence[str]) -> int:
    """Runs the trials; 0 where no defect was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.hosts", description=__doc__)
    parser.add_argument("directory", type=Path, help="an empty one")
    parser.add_argument("--machines", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--conditions", nargs="+", default=list(CONDITIONS), choices=CONDITIONS)
    parser.add_argument("--jobs", nargs="+", default=list(JOBS), choices=JOBS)
    parser.add_argument("--times", type=int, default=1, help="runs of each with a fault")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    if reason := why_not():
        parser.error(reason)
    given.directory.mkdir(parents=True, exist_ok=True)
    run_interposed(given.directory, ["-m", "tests.faults.hosts", *arguments])
    shared = given.directory / "shared"
    interposed = Interposed([shared])
    trials = Trials()
    for count in given.machines:
        with hosts_on_a_switch(count) as (hosts, network):
            for job in given.jobs:
                cluster = Cluster(given.directory, hosts, network, JOBS[job], interposed)
                seconds = 0.0
                for name in given.conditions:
                    condition = CONDITIONS[name]
                    for number in range(given.times if condition.fault else 1):
                        rng = Random(f"{given.seed}/{count}/{job}/{name}/{number}")
                        took = trials.trial(cluster, f"{count} machines, {job}, {name}", condition, seconds, rng)
                        seconds = seconds or took
    for what, how in trials.defects:
        print(f"DEFECT {what}\n    {how}")
    print(json.dumps({"commit": version(), "seed": given.seed, "runs": trials.runs, "defects": trials.defects}))
    return 1 if trials.defects else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
