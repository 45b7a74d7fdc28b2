"""Failure, proven: each way to go wrong, by a sender or the first rank, of 2 and 4 ranks, over each transport.

Every cell asserts that the error names the culprit (never a victim) and what it was doing, that it comes at once for
a death and at the time-out for a hang, and that nothing is left: no process, nothing in /dev/shm, no descriptor of
the launcher, no file in the workspace, no temporary file. ``pytest -s`` shows the seconds.

Each fault runs always, once; half of the other cells are ``extended``, the rest ``slow``.
Through the exporter: ``tests/exporting/test_failures.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.distributed._failure_helpers import AT_ONCE, GENEROUS, leaving_nothing, provoke, warm_up

pytestmark = pytest.mark.timeout(120)

TIME_OUT = 0.8  # of a gather, in seconds, where only a time-out tells
KILLED = "killed by SIGKILL"
MAKING, HANDING, RETURNED = "making layer 1", "handing over layer 1", "waiting for the other ranks to finish"


@dataclass(frozen=True)
class Fault:
    """What one rank does, and what the launcher must say of it.

    Attributes:
        phase: what the culprit was doing (its beginning).
        words: of the error's summary: for all transports, or (shared memory, workspace); None: not there.
        roles: who does it.
        hang: only a time-out shows it.
    """

    name: str
    phase: str
    words: str | tuple[str | None, str | None]
    roles: tuple[str, ...] = ("sender", "first")
    hang: bool = False

    def summary(self, transport: str) -> str | None:
        return self.words if isinstance(self.words, str) else self.words[transport == "workspace"]


SENDER, FIRST = ("sender",), ("first",)
LIMIT = "handing over layer 0"
FAULTS = (
    Fault("raises", MAKING, "KeyError: 'no such weight'"),
    Fault("calls sys.exit(0)", MAKING, "SystemExit: 0"),
    Fault("calls os._exit(0)", MAKING, "ended with exit status 0, but without having finished"),
    Fault("is killed", MAKING, KILLED),
    Fault("is killed while others wait for room", MAKING, KILLED, FIRST),
    Fault("is killed half-way through its tensors", HANDING, KILLED, SENDER),
    Fault("is killed in a nested gather", HANDING, KILLED),
    Fault("is killed in crossed gathers", HANDING, KILLED),
    Fault("is killed inside the with", HANDING, KILLED, FIRST),
    Fault("passes what cannot travel", HANDING, "TypeError: a config cannot carry builtins.object at 'hook'"),
    Fault(
        "may make no large file",
        LIMIT,
        "ulimit -f (file size), which is 1,048,576",
        SENDER,
    ),
    Fault("may make no large file", LIMIT, (None, "ulimit -f (file size)"), FIRST),
    Fault("may map no more memory", LIMIT, ("buffer of 6291456 bytes: [Errno 12]", None), SENDER),
    Fault("may map no more memory", LIMIT, "Cannot allocate memory; raise ulimit -v", FIRST),
    Fault("may open no more files", LIMIT, ("ulimit -n (open files)", "Too many open files"), SENDER),
    Fault("may open no more files", LIMIT, ("too many open files; raise ulimit -n", "Too many open files"), FIRST),
    Fault("returns early", RETURNED, "its function has returned, and rank", hang=True),
    Fault("is stopped", MAKING, "its process is stopped (SIGSTOP or a debugger)", hang=True),
    Fault("hangs", MAKING, "no progress for", hang=True),
    Fault("is busy elsewhere", "polishing layer 1, round", "it is at work and did not come", hang=True),
    Fault("manifest without data", "", (None, "its manifest is there and its payload is not"), SENDER, hang=True),
    Fault("data without manifest", "", (None, "incomplete, its manifest is missing"), SENDER, hang=True),
    Fault("truncated data", "", (None, "7524048 of 7525048 bytes are there"), SENDER, hang=True),
    Fault("a flipped byte", "", (None, "CRC-32"), SENDER),
    Fault("another run's files", "", (None, "is corrupt: a manifest of run 0123456789abcdef"), SENDER),
    Fault("a broken disk", HANDING, (None, ".00000002.safetensors: Input/output error"), SENDER),
)


def cells() -> Iterator[Any]:
    shown = set()
    for fault in FAULTS:
        for role in fault.roles:
            for world in (4, 2):
                for transport in ("shm", "workspace"):
                    if fault.summary(transport) is None:
                        continue
                    alone = isinstance(fault.words, tuple) and None in fault.words
                    chosen = (role == "sender") == ((world == 4) == (transport == "shm")) or (alone and world == 4)
                    chosen &= not (fault.hang and world == 2)
                    first = chosen and fault.name not in shown
                    marks = () if first else pytest.mark.extended if chosen else pytest.mark.slow
                    shown |= {fault.name} if chosen else set()
                    name = f"{fault.name}-{role}-{world}-{transport}"
                    yield pytest.param(fault, role, world, transport, id=name, marks=marks)


@pytest.fixture(scope="module", autouse=True)
def warm_launcher() -> None:
    warm_up()


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The ranks' directory for temporary files."""
    path = tmp_path / "temporary"
    path.mkdir()
    monkeypatch.setenv("TMPDIR", str(path))
    return path


@pytest.mark.parametrize(("fault", "role", "world", "transport"), list(cells()))
def test_the_culprit_is_named(
    fault: Fault, role: str, world: int, transport: str, tmp_path: Path, temporary: Path
) -> None:
    path = tmp_path / "workspace" if transport == "workspace" else None
    with leaving_nothing(temporary, *([path] if path else [])):
        outcome = provoke(fault.name, role, world, path, seconds=TIME_OUT if fault.hang else GENEROUS)
    print(f"| {fault.name} | {role} | {world} | {transport} | rank {outcome.rank} | {outcome.seconds:.2f} | nothing |")
    assert outcome.phase.startswith(fault.phase or ("waiting", "handing over", "making"))
    words = fault.summary(transport)
    assert words is not None
    assert words in outcome.summary
    assert (TIME_OUT if fault.hang else 0) <= outcome.seconds < AT_ONCE
