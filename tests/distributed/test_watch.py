"""Ranks that another launcher started watch each other: a case is one job of plain processes, as srun starts them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
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

PROGRAM = """
import json, os, signal, sys, threading, time
from modelexport.distributed import launch
from modelexport.errors import RankFailedError

def work(kind, culprit):
    import torch, torch.distributed as dist
    rank, ones = dist.get_rank(), torch.ones(3)
    launch.phase(f"step {rank}")
    dist.all_reduce(ones)
    launch.report({"rank": rank})
    if kind == "fine":
        return time.sleep(0.2 * rank)
    if kind == "kill+term" and rank != culprit:
        threading.Timer(0.4, os.kill, (os.getpid(), signal.SIGTERM)).start()
    if kind == "stuck":
        if rank == 1: threading.Timer(0.4, os.kill, (os.getpid(), signal.SIGTERM)).start(); dist.all_reduce(ones)
        return time.sleep(60)
    if rank == culprit:
        time.sleep(0.4)
        if kind == "raise": raise ValueError("no luck")
        if kind.startswith("kill"): os.kill(os.getpid(), signal.SIGKILL)
        if kind == "leave": os._exit(0)
        if kind == "exit": sys.exit(0)
        if kind == "term": os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)
        if kind == "late": time.sleep(9)
    if kind == "late" or rank == (culprit + 1) % 3:
        launch.phase("waiting in a collective", waiting=True)
        dist.all_reduce(ones)  # in native code, where no signal reaches Python
    if rank == (culprit + 2) % 3:
        threading.Event().wait(60)
    time.sleep(60)

events = []
cfg = launch.external_config(launch.MultiprocessConfig(timeout=float(sys.argv[3]), backend="gloo"))
say = lambda **what: print(json.dumps({"time": time.time(), "events": events, **what}), flush=True)
try:
    with launch.local_status(lambda rank, event: events.append([rank, event]), cfg.rank):
        launch.init_and_run(work, cfg, sys.argv[1], int(sys.argv[2]))
    say(end="fine")
except RankFailedError as error:
    say(end="caught", rank=error.rank, phase=error.phase, summary=error.summary)
except BaseException as error:
    say(end=type(error).__name__, summary=str(error))
"""


@dataclass
class Ended:
    """How one process ended: its exit status, what it said last, seconds since the first of all ended."""

    status: int
    said: dict[str, Any]
    errors: str


def run(kind: str, culprit: int, *, world: int = 3, seconds: float = 60.0) -> list[Ended]:
    """Start ``world`` processes as srun would, and wait for all of them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for rank in range(world):
        place = {
            "SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_STEP_NUM_TASKS": world, "SLURM_NODEID": 0,
            "SLURM_STEP_TASKS_PER_NODE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        }  # fmt: skip
        env = {**os.environ, "PYTHONPATH": str(ROOT), **{name: str(value) for name, value in place.items()}}
        command = [sys.executable, "-c", PROGRAM, kind, str(culprit), str(seconds)]
        processes.append(subprocess.Popen(command, env=env, stdout=-1, stderr=-1, text=True))
    ended = []
    try:
        for process in processes:
            out, errors = process.communicate(timeout=60)
            said = json.loads(out.splitlines()[-1]) if out else {}
            ended.append(Ended(process.returncode, said, errors))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return ended


def test_all_leave_together_and_events_stay_in_their_process() -> None:
    ended = run("fine", 0)
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
def test_every_rank_raises_what_one_died_of(kind: str, culprit: int, own: str | None, text: str) -> None:
    began = time.monotonic()
    ended = run(kind, culprit)
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


def test_a_rank_that_its_launcher_ends_says_why() -> None:
    """torchrun sends SIGTERM to all ranks of a machine when one has ended: that is not what they died of."""
    for rank, one in enumerate(run("kill+term", 2)):
        if rank != 2:
            assert (one.said["end"], one.said["rank"]) == ("caught", 2), one


def test_sigterm_ends_a_rank_inside_native_code() -> None:
    ended = run("stuck", 2)
    assert ended[1].status == 128 + signal.SIGTERM, "it waits in a collective, and no cause is known"


def test_a_time_out_is_blamed_on_the_rank_that_did_not_come() -> None:
    ended = run("late", 1, seconds=4.0)
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
