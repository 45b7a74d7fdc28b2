"""Ranks that another launcher started watch each other: a case is one job of plain processes, as srun starts them."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from modelexport.distributed.config import MultiprocessConfig
from modelexport.distributed.environment import interface_towards
from modelexport.distributed.supervision.watch_hub import Hub, Lines
from tests.distributed._launch_helpers import ROOT
from tests.helpers.marks import extended

pytestmark = pytest.mark.timeout(120)


@dataclass
class Ended:
    """How one rank ended: its exit status, and what it said."""

    status: int
    said: dict[str, Any]


class Jobs:
    """Runs jobs of ranks that another launcher might have started."""

    def __init__(self, program: subprocess.Popen[str], directory: Path) -> None:
        self.program = program
        self.directory = directory
        self.number = 0

    def run(self, kind: str, culprit: int, *, world: int = 3, seconds: float = 60.0) -> list[Ended]:
        """Starts ``world`` processes as srun would, and waits for all of them."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.number += 1
        files = [self.directory / f"{self.number}-{rank}.json" for rank in range(world)]
        self.workspace = self.directory / f"{self.number}-workspace"
        places = []
        for rank, file in enumerate(files):
            place = {
                "SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_STEP_NUM_TASKS": world, "SLURM_NODEID": 0,
                "SLURM_STEP_TASKS_PER_NODE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
                "TEST_WORKSPACE": self.workspace,
            }  # fmt: skip
            places.append(({name: str(value) for name, value in place.items()}, str(file)))
        assert self.program.stdin is not None
        assert self.program.stdout is not None
        self.program.stdin.write(json.dumps([places, kind, culprit, seconds]) + "\n")
        self.program.stdin.flush()
        statuses = json.loads(self.program.stdout.readline())
        said = [json.loads(file.read_text()) if file.exists() else {} for file in files]
        return [Ended(*one) for one in zip(statuses, said, strict=True)]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    command = [sys.executable, "-m", "tests.distributed._watch_ranks"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        yield Jobs(program, tmp_path_factory.mktemp("jobs"))


def test_all_leave_together_and_events_stay_in_their_process(jobs: Jobs) -> None:
    ended = jobs.run("fine", 0)
    assert [one.said["end"] for one in ended] == ["fine"] * 3
    assert [one.said["events"] for one in ended] == [[[rank, {"rank": rank}]] for rank in range(3)]
    times = [one.said["time"] for one in ended]
    assert max(times) - min(times) < 5.0


@pytest.mark.parametrize(
    ("kind", "culprit", "own", "text"),
    [
        extended("raise", 2, "ValueError", "ValueError: no luck"),
        ("raise", 0, "ValueError", "ValueError: no luck"),
        extended("exit", 1, "SystemExit", "SystemExit: 0"),
        extended("term", 1, "EndedByLauncherError", "its process was asked to end (SIGTERM)"),
        ("kill", 1, None, "its process ended without leaving an error"),
        extended("leave", 2, None, "its process ended without leaving an error"),
        extended("kill", 0, None, "its process ended"),
    ],
)
def test_every_rank_raises_what_one_died_of(jobs: Jobs, kind: str, culprit: int, own: str | None, text: str) -> None:
    began = time.monotonic()
    ended = jobs.run(kind, culprit)
    assert time.monotonic() - began < 30, "well before the time-out of 60 s, and the others' sleep of 60 s"
    for rank, one in enumerate(ended):
        if rank == culprit:
            assert one.said.get("end") == own
            continue
        assert one.said["end"] == "caught", one
        assert (one.said["rank"], text in one.said["summary"]) == (culprit, True), one
        if (kind, culprit) != ("kill", 0):  # what rank 0 did, only rank 0 knew
            assert one.said["phase"] == f"step {culprit}"
    assert ended[culprit].status == (-signal.SIGKILL if kind == "kill" else 0)
    assert not jobs.workspace.exists(), "each took its file along, and another that of the one that was killed"


def test_a_rank_that_its_launcher_ends_says_why(jobs: Jobs) -> None:
    """torchrun sends SIGTERM to all ranks of a machine when one has ended: that is not what they died of."""
    for rank, one in enumerate(jobs.run("kill+term", 2)):
        if rank != 2:
            assert (one.said["end"], one.said["rank"]) == ("caught", 2), one


def test_sigterm_ends_a_rank_inside_native_code(jobs: Jobs) -> None:
    ended = jobs.run("stuck", 2)
    assert ended[1].status == 128 + signal.SIGTERM, "it waits in a collective, and no cause is known"


def test_a_time_out_is_blamed_on_the_rank_that_did_not_come(jobs: Jobs) -> None:
    ended = jobs.run("late", 1, seconds=3.0)
    for rank in (0, 2):
        assert (ended[rank].said["end"], ended[rank].said["rank"]) == ("caught", 1), ended[rank]
        assert ended[rank].said["phase"] == "step 1"
        assert "gave up" in ended[rank].said["summary"]


def test_strangers_are_hung_up_on() -> None:
    """Whoever finds the port and does not know the token, or sends no JSON, takes no rank's place."""
    listener = socket.create_server(("127.0.0.1", 0))
    place = listener.getsockname()
    own, hubs = socket.socketpair()
    hub = Hub(listener, hubs, "secret", MultiprocessConfig(world_size=2))
    hub.start()
    for first in (
        b'{"rank": 1, "token": "guess"}\n',
        b"GET / HTTP/1.1\n",
        b'["rank"]\n',
        b"[" * 3000 + b"\n",
        b'{"rank": 1, "token": "\\ud800"}\n',
        b'{"rank": 7, "token": "secret"}\n',
    ):
        with socket.create_connection(place, timeout=10) as stranger:
            stranger.sendall(first)
            assert stranger.recv(1) == b""
    with socket.create_connection(place, timeout=10) as rank:
        rank.sendall(b'{"rank": 1, "token": "secret"}\n{"finished": 1}\n')
        own.sendall(b'{"finished": 1}\n')
        assert Lines(rank).read() == [{"released": 1}]
        assert Lines(own).read() == [{"released": 1}]
    own.close()
    hub.join(10)
    assert not any(thread.name == "modelexport-watch-hub" for thread in threading.enumerate())


def test_the_interface_that_reaches_an_address() -> None:
    names = {name for _, name in socket.if_nameindex()}
    assert interface_towards("anything", local=True) in names & {"lo", "lo0"}
    assert interface_towards("127.0.0.1", local=False) in names & {"lo", "lo0"}
    assert interface_towards("no-such-host.invalid", local=False) is None
    routes = Path("/proc/net/route").read_text().splitlines()[1:]
    default = [line.split()[0] for line in routes if line.split()[1] == "00000000"]
    if default:  # 192.0.2.1 is set aside for documentation, so it is reached by the default route
        assert interface_towards("192.0.2.1", local=False) == default[0]
