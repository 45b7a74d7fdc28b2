"""Fuzzes the readers under the guidance of coverage, by atheris (libFuzzer for Python): see CONTRIBUTING.md.

``python -m tests.fuzz.guided DIR`` goes through all readers, again and again, each in a process of its own, until so
many executions are done, and prints the counts as JSON. ``DIR`` keeps inputs that have reached new code, the log and
what was found, so that another call goes on. ``--keep`` then puts the smallest inputs that reach the same lines into
the corpus in the tests.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import mmap
import os
import re
import resource
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from random import Random
from typing import Any

try:
    import atheris
except ImportError:
    sys.exit(
        "python -m tests.fuzz.guided: needs atheris, which is not installed in this environment; try: "
        "pip install atheris (its wheels are for Linux and CPython 3.11 to 3.13)"
    )

# Kernels are compiled, and numba takes no bytecode that somebody has changed.
with atheris.instrument_imports(include=["modelexport"], exclude=["modelexport.quantization.kernels"]):
    from tests.fuzz.guided import _corpus
    from tests.fuzz.guided._execution import Fault, Place, Reader, execute
    from tests.fuzz.guided._readers import READERS

LONGEST = 16_384
"""Bytes of an input."""
_MEMORY = 1 << 30
_ADDRESSES = 8 << 30
_FAST = 250  # executions a second
_DONE = re.compile(r"cov: (\d+) ft: (\d+) corp: (\d+)")


class Counts:
    """Executions, those that read, those that refused, and faults, of a process that may end at any time."""

    NAMES = ("executions", "read", "refused", "faults")

    def __init__(self) -> None:
        self._words = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("Q")

    def add(self, outcome: Fault | str) -> None:
        self._words[0] += 1
        self._words[3 if isinstance(outcome, Fault) else self.NAMES.index(outcome)] += 1

    def __iter__(self) -> Any:
        return iter(dict(zip(self.NAMES, self._words, strict=False)).items())


class Findings:
    """Faults, the first input of each kind."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory

    def add(self, reader: str, fault: Fault, data: bytes) -> None:
        name = f"{reader}-{hashlib.sha1(fault.kind.encode()).hexdigest()[:10]}"
        if (self._directory / name).exists():
            return
        (self._directory / name).write_bytes(data)
        with open(self._directory / "findings.jsonl", "a") as log:
            log.write(json.dumps({"input": name, "kind": fault.kind, "text": fault.text}) + "\n")


def _mutator(reader: Reader) -> Callable[[bytes, int, int], bytes]:
    def mutate(data: bytes, most: int, seed: int) -> bytes:
        rng = Random(seed)
        if rng.random() < 0.65:
            return atheris.Mutate(data, most)
        return reader.mutate(data, rng)[:most]

    return mutate


def fuzz(reader: Reader, work: Path, counts: Counts, limits: Mapping[str, int]) -> None:
    """Runs libFuzzer in this process, which ends with it."""
    place, findings = Place(work / "places" / reader.name), Findings(work / "findings")
    warnings.simplefilter("error")

    def one(data: bytes) -> None:
        outcome = execute(reader, data, place)
        counts.add(outcome)
        if isinstance(outcome, Fault):
            findings.add(reader.name, outcome, data)

    inputs = work / "inputs" / reader.name
    inputs.mkdir(parents=True, exist_ok=True)
    for data in _corpus.load(reader.name):
        (inputs / hashlib.sha1(data).hexdigest()).write_bytes(data)
        execute(reader, data, place)  # what is imported on first use is there when time and memory count
    own = next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if "VmSize" in line)
    resource.setrlimit(resource.RLIMIT_AS, (min(_ADDRESSES, (own << 10) + _MEMORY),) * 2)
    options = {**limits, "max_len": LONGEST, "timeout": 120, "rss_limit_mb": 0, "print_final_stats": 1, "reload": 0}
    command = ["fuzz", *(f"-{name}={value}" for name, value in options.items())]
    atheris.Setup(
        [*command, f"-artifact_prefix={work}/findings/{reader.name}-ended-", str(inputs)],
        one,
        custom_mutator=_mutator(reader),
    )
    atheris.Fuzz()


def run(reader: Reader, work: Path, limits: Mapping[str, int]) -> dict[str, Any]:
    """Fuzzes a reader in a child process; returns what came of it."""
    counts, began = Counts(), time.monotonic()
    output = work / "output" / reader.name
    output.parent.mkdir(parents=True, exist_ok=True)
    child = os.fork()
    if not child:
        with open(output, "wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        try:
            fuzz(reader, work, counts, limits)
        finally:
            os._exit(99)  # the fuzzer has ended the process before
    _, status = os.waitpid(child, 0)
    found = _DONE.findall(output.read_text(errors="replace"))
    cover = dict(zip(("edges", "features", "inputs"), map(int, found[-1]), strict=True)) if found else {}
    result = {"reader": reader.name, **dict(counts), **cover, "seconds": round(time.monotonic() - began, 1)}
    return {**result, "status": os.waitstatus_to_exitcode(status)}


def campaign(work: Path, readers: Iterable[Reader], executions: int, seconds: int) -> None:
    """Goes through the readers until so many executions are done, those of earlier calls counted.

    Readers of whole checkpoints, which are slow, have a shorter turn.
    """
    log = work / "log.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    readers = list(readers)
    done, turn = sum(line["executions"] for line in lines), len(lines)
    while done < executions:
        reader = readers[turn % len(readers)]
        limits = {"max_total_time": _turn(reader, lines, seconds), "runs": executions - done}
        result = run(reader, work, {**limits, "seed": turn + 1})
        done, turn = done + result["executions"], turn + 1
        with open(log, "a") as file:
            file.write(json.dumps(result) + "\n")
        lines.append(result)
    print(json.dumps(totals(lines), indent=1))


def _turn(reader: Reader, lines: Iterable[Mapping[str, Any]], seconds: int) -> int:
    """Seconds of a reader's next turn, by what it did in its best one."""
    rates = [line["executions"] / line["seconds"] for line in lines if line["reader"] == reader.name]
    return seconds if max(rates, default=0.0) > _FAST else seconds // 8


def totals(lines: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The counts of each reader, and of all."""
    found: dict[str, dict[str, Any]] = {}
    for line in lines:
        for name in (line["reader"], "all"):
            own = found.setdefault(name, dict.fromkeys((*Counts.NAMES, "seconds"), 0))
            for key in own:
                own[key] = round(own[key] + line[key], 1)
    return found


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.guided", description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--executions", type=int, default=10_000_000, help="in all")
    parser.add_argument("--seconds", type=int, default=30, help="of a reader's turn")
    parser.add_argument("--only", nargs="*", default=[], help="names of readers")
    parser.add_argument("--keep", action="store_true", help="put a small set of inputs into the tests' corpus")
    given = parser.parse_args(arguments)
    given.work.mkdir(parents=True, exist_ok=True)
    chosen = [reader for reader in READERS if not given.only or reader.name in given.only]
    if given.keep:
        from tests.fuzz.guided._minimise import keep

        for reader in chosen:
            keep(reader, given.work)
        return
    campaign(given.work, chosen, given.executions, given.seconds)


if __name__ == "__main__":
    main(sys.argv[1:])
