"""Run a command and account for everything it starts: wall, CPU seconds, memory peaks. Linux, no privileges needed.

CPU: this process makes itself the reaper of orphans, so that ranks under a fork server, which are nobody's
children in the end, are waited for by their parent or by us, and the kernel's own accounts (wait4) are complete.
Memory: Pss_Anon + Pss_Shmem (private memory, and shared memory divided among those that map it) of each process
below us, sampled. A peak shorter than the interval can be missed, and sampling slows what is sampled (the kernel walks
all of its pages): take the times from another run, or sample for a small share of the time.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import io
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PERFORMANCE = Path(__file__).resolve().parents[2] / "docs" / "performance.md"
SAMPLE_SECONDS = 0.02
SELDOM = 0.03
"""The share of the time that sampling may take in a run whose time counts."""
_PR_SET_CHILD_SUBREAPER = 36


@dataclass
class Run:
    """One run of a command: seconds, exit status, memory peaks in bytes where it was sampled.

    ``lingering``: seconds from the command's end to the end of the last process it had started.
    ``others``: cores that were busy with something else meanwhile, on average.
    """

    wall: float
    cpu: float
    status: int
    lingering: float = 0.0
    others: float = 0.0
    process_peak: int = 0
    tree_peak: int = 0
    processes: int = 0
    interval: float = 0.0


def become_reaper() -> None:
    """From now on, orphaned descendants become our children, so that wait4 reports what they used."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def run(command: list[str], log: Path, *, sample: bool, timeout: float, share: float = 1.0) -> Run:
    """Run a command to its end and to the end of everything it started.

    Args:
        sample: whether its memory is sampled, ``share`` of the time at most.
    """
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    actions = [
        (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    busy = busy_seconds()
    began = time.perf_counter()
    main = os.posix_spawnp(command[0], command, environment, file_actions=actions)
    sampler = Sampler(os.getpid(), share) if sample else None
    killer = threading.Timer(timeout, kill_descendants)
    killer.daemon = True
    killer.start()
    result = Run(0.0, 0.0, -1)
    try:
        while True:
            try:
                pid, status, usage = os.wait4(-1, 0)
            except ChildProcessError:
                break
            result.cpu += usage.ru_utime + usage.ru_stime
            if pid == main:
                result.wall = time.perf_counter() - began
                result.status = os.waitstatus_to_exitcode(status)
    except BaseException:
        kill_descendants()
        raise
    finally:
        killer.cancel()
        whole = time.perf_counter() - began
        result.lingering = whole - result.wall
        result.others = max(0.0, busy_seconds() - busy - result.cpu) / whole
        if sampler is not None:
            sampler.stop(result)
    return result


def busy_seconds() -> float:
    """CPU seconds that this machine's processes have used since it started, as far as it can tell."""
    with open("/proc/stat") as file:
        user, nice, system, _, _, irq, softirq, steal = map(int, file.readline().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def kill_descendants() -> None:
    """End what we started and has not ended."""
    for pid in descendants(os.getpid()):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def descendants(root: int) -> list[int]:
    """Every process below ``root``, from one pass over /proc."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            try:
                with open(f"/proc/{entry}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:  # it has just ended
                continue
            children.setdefault(int(fields[1]), []).append(int(entry))
    found, todo = [], [root]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


class Sampler:
    """Reads the memory of every process below ``root``, ``share`` of the time at most, until it is stopped."""

    def __init__(self, root: int, share: float = 1.0) -> None:
        self._root, self._share, self._stop = root, share, threading.Event()
        self._peaks: dict[int, int] = {}
        self._tree_peak = self._rounds = 0
        self._began = time.perf_counter()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._stop.is_set():
            began, total = time.perf_counter(), 0
            for pid in descendants(self._root):
                size = private_bytes(pid)
                self._peaks[pid] = max(self._peaks.get(pid, 0), size)
                total += size
            self._tree_peak = max(self._tree_peak, total)
            self._rounds += 1
            took = time.perf_counter() - began
            self._stop.wait(max(SAMPLE_SECONDS - took, took / self._share - took, 0.0))

    def stop(self, result: Run) -> None:
        """Stop, and enter the peaks into ``result``."""
        self._stop.set()
        self._thread.join()
        result.process_peak = max(self._peaks.values(), default=0)
        result.tree_peak, result.processes = self._tree_peak, len(self._peaks)
        result.interval = (time.perf_counter() - self._began) / max(1, self._rounds)


def private_bytes(pid: int) -> int:
    """Pss_Anon + Pss_Shmem of a process; 0 if it has ended."""
    total = 0
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            for line in file:
                if line.startswith((b"Pss_Anon:", b"Pss_Shmem:")):
                    total += 1024 * int(line.split()[1])
    except OSError:
        return 0
    return total


# ------------------------------------------------------------------------------- the tables of docs/performance.md


def add_write_option(parser: argparse.ArgumentParser) -> None:
    """Adds ``--write``, which :func:`written` takes."""
    parser.add_argument("--write", action="store_true", help="put the table into docs/performance.md, too")


@contextlib.contextmanager
def written(script: str, write: bool) -> Iterator[None]:
    """Copies what is printed inside into docs/performance.md, between the marks of the script, if ``write``."""
    if not write:
        yield
        return
    name, printed = Path(script).stem, io.StringIO()
    replace_table(PERFORMANCE.read_text(encoding="utf-8"), name, "")  # hours are not to end in a missing mark
    with contextlib.redirect_stdout(_Both(sys.stdout, printed)):
        yield
    text = replace_table(PERFORMANCE.read_text(encoding="utf-8"), name, printed.getvalue())
    PERFORMANCE.write_text(text, encoding="utf-8")


def replace_table(text: str, name: str, table: str) -> str:
    """Returns ``text`` with ``table`` between ``<!-- name -->`` and ``<!-- /name -->``; fenced, unless it is Markdown.

    Raises:
        ValueError: these marks are not there, or more than once.
    """
    fence = "" if re.search(r"^\|", table, re.MULTILINE) else "```"
    inside = f"{fence}{'text' if fence else ''}\n{table.strip()}\n{fence}".strip()
    marks = re.compile(f"(<!-- {name} -->\n).*?(\n<!-- /{name} -->)", re.DOTALL)
    if len(marks.findall(text)) != 1:
        raise ValueError(f"<!-- {name} --> ... <!-- /{name} -->: needed once, found {len(marks.findall(text))} times")
    return marks.sub(lambda found: found[1] + inside + found[2], text)


class _Both(io.TextIOBase):
    """Prints to two streams."""

    def __init__(self, *streams: io.TextIOBase) -> None:
        self._streams = streams

    def write(self, text: str) -> int:
        for stream in self._streams:
            stream.write(text)
            stream.flush()
        return len(text)
