"""Master-worker mode: rank 0 calls, the others carry out; from processes of their own."""

from __future__ import annotations

import multiprocessing
import os
import re
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from modelexport.distributed import collectives
from modelexport.distributed.collectives.master_worker import remote_types
from modelexport.distributed.collectives.master_worker.serving import Inbox
from modelexport.distributed.config import free_port
from modelexport.distributed.launch import prestart
from tests.distributed import _master_worker_failures as failures
from tests.distributed import _master_worker_handles as with_handles
from tests.distributed import _master_worker_targets as targets
from tests.distributed._launch_helpers import alive, wait_until
from tests.helpers.marks import extended

pytestmark = pytest.mark.timeout(90)


class Processes:
    """Ranks as processes, each of which runs one function and tells how it ended."""

    def __init__(self, directory: Path) -> None:
        self.log = directory / "log"
        self.log.touch()
        self.directory = directory
        self._running: list[tuple[Any, Connection]] = []

    def start(self, world_size: int, target: Callable[..., Any], *args: Any) -> None:
        """Starts ``target(rank, world_size, *args)`` for each rank."""
        prestart(("torch", "torch.distributed.rpc"))
        context: Any = multiprocessing.get_context("forkserver")
        pids = self.directory / "pids"
        pids.mkdir()
        for rank in range(world_size):
            mine, theirs = multiprocessing.Pipe()
            environment = {"MODELEXPORT_TIMEOUT": "40", "PIDS": str(pids)}
            process = context.Process(
                target=targets.enter, args=(theirs, str(self.log), environment, target, rank, world_size, *args)
            )
            process.start()
            theirs.close()
            self._running.append((process, mine))

    def ends(self) -> list[tuple[str, Any]]:
        """How each rank ended: ``("returned", value)``, ``("ValueError", traceback)``, ``("killed", signal)``."""
        found = []
        for process, pipe in self._running:
            process.join(60)
            assert not process.is_alive(), f"it did not end; log:\n{self.log.read_text()}"
            try:
                found.append(pipe.recv())
            except EOFError:
                found.append(("killed", -process.exitcode))
        return found

    def said(self) -> str:
        """What the ranks wrote to stderr, without what torch's rpc says where a process is late.

        A graceful shutdown ends with a request to each worker. The master leaves when it has read the answers; a worker
        whose thread has not yet looked at the end of its sending by then finds the pipe closed, and logs that.
        """
        late = re.compile(r"RPC agent for \w+ encountered error when sending response to request .*: pipe closed")
        return "".join(line for line in self.log.read_text().splitlines(keepends=True) if not late.search(line))

    def explain(self, ends: list[tuple[str, Any]]) -> str:
        """For the message of a failed assertion."""
        told = "\n".join(f"rank {rank}: {how}\n{what}" for rank, (how, what) in enumerate(ends))
        return f"{told}\nlog:\n{self.log.read_text()}"

    def stop(self) -> None:
        for process, pipe in self._running:
            process.kill()
            process.join()
            pipe.close()
        assert not any(alive(process.pid) for process, _ in self._running)


@pytest.fixture
def processes(tmp_path: Path) -> Any:
    shared_memory = set(os.listdir("/dev/shm"))
    made = Processes(tmp_path)
    yield made
    made.stop()
    wait_until(lambda: set(os.listdir("/dev/shm")) <= shared_memory)


def init_method(kind: str, directory: Path) -> str:
    return {
        "env": f"env://{free_port()}",
        "tcp": f"tcp://127.0.0.1:{free_port()}",
        "file": f"file://{directory}/store",
    }[kind]


NOTHING_LEFT = ("returned", (False, False, 0, 1))


@pytest.mark.parametrize(
    ("scenario", "world_size", "how"),
    [
        (targets.every_collective, 1, "file"),
        extended(targets.every_collective, 2, "env"),
        (targets.every_collective, 3, "tcp"),
        extended(targets.every_collective, 4, "file"),
        (targets.groups, 4, "tcp"),
        (targets.pairs, 3, "file"),
        (targets.dtypes, 2, "tcp"),
        (with_handles.handles, 2, "file"),
        (failures.mistakes, 3, "env"),
    ],
)
def test_from_the_master(processes: Processes, scenario: Callable, world_size: int, how: str) -> None:
    where = init_method(how, processes.directory)
    processes.start(world_size, targets.run, where, scenario)
    ends = processes.ends()
    assert ends == [NOTHING_LEFT] * world_size, processes.explain(ends)
    assert processes.said() == ""
    assert not (processes.directory / "store").exists()


@pytest.mark.parametrize("place", ["prepare", "run"])
def test_a_worker_that_fails(processes: Processes, place: str) -> None:
    """It is named; nobody waits for it for ever. Before the collective has begun, nothing else happens."""
    processes.start(3, failures.with_a_bad_worker, init_method("tcp", processes.directory), place)
    ends = processes.ends()
    assert ends == [NOTHING_LEFT] * 3, processes.explain(ends)


@pytest.mark.parametrize(("scenario", "dead"), [(failures.worker_killed, 2), (failures.worker_killed_in_the_middle, 1)])
def test_death_of_a_worker(processes: Processes, scenario: Callable, dead: int) -> None:
    processes.start(3, failures.with_pids, init_method("tcp", processes.directory), scenario)
    ends = processes.ends()
    expected: list[tuple[str, Any]] = [NOTHING_LEFT] * 3
    expected[dead] = ("killed", 9)
    assert ends == expected, processes.explain(ends)


def test_death_of_a_worker_seen_at_the_end(processes: Processes) -> None:
    scenario = failures.worker_found_dead_at_the_end
    processes.start(3, failures.with_pids, init_method("file", processes.directory), scenario)
    ends = processes.ends()
    assert ends == [("returned", "named"), ("killed", 9), NOTHING_LEFT], processes.explain(ends)


@pytest.mark.parametrize(
    ("scenario", "end"),
    [
        (failures.master_killed, "killed"),
        (failures.master_killed_in_the_middle, "killed"),
        (failures.master_exits, "SystemExit"),
    ],
)
def test_end_of_the_master(processes: Processes, scenario: Callable, end: str) -> None:
    processes.start(3, targets.run, init_method("tcp", processes.directory), scenario)
    [master, *workers] = processes.ends()
    assert master[0] == end
    for rank, (kind, text) in enumerate(workers, 1):
        assert kind == "RankFailedError"
        words = f"rank 0 failed while driving rank {rank}: the master's process has ended without"
        assert words in text.splitlines()[-1]


def test_interrupted(processes: Processes) -> None:
    processes.start(2, failures.with_pids, init_method("tcp", processes.directory), failures.worker_stopped)
    ends = processes.ends()
    assert ends == [NOTHING_LEFT] * 2, processes.explain(ends)


@pytest.mark.extended
def test_a_worker_that_does_not_answer(processes: Processes) -> None:
    processes.start(3, failures.with_pids, init_method("tcp", processes.directory), failures.worker_silent)
    ends = processes.ends()
    assert ends[0] == ("returned", "named"), processes.explain(ends)
    assert ends[2] == NOTHING_LEFT
    kind, text = ends[1]  # it runs again, and learns what it has missed
    assert kind == "RankFailedError"
    assert "rank 0 failed while driving rank 1" in text.splitlines()[-1]


def test_again_and_again(processes: Processes) -> None:
    processes.start(3, with_handles.sessions, free_port(), free_port())
    ends = processes.ends()
    assert [how for how, _ in ends] == ["returned"] * 3, processes.explain(ends)
    for _, told in ends:
        # torch keeps a process's first rpc agent (two idle threads, descriptors) for ever, and only that one.
        first, *later = told["held"]
        assert later == [first] * 4
        assert not told["taken"]
        assert not told["extended"]
    assert processes.said() == ""


def test_handles_of_another_session(processes: Processes) -> None:
    processes.start(2, with_handles.stale_handles, init_method("file", processes.directory))
    ends = processes.ends()
    assert ends == [NOTHING_LEFT] * 2, processes.explain(ends)


# ------------------------------------------------------------------------ in this process


def test_one_rank_is_master_alone(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="experimental") as caught:
        collectives.init_master_worker("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    assert caught[0].filename == __file__
    try:
        assert dist.is_initialized()
        assert not collectives.is_initialized()
        total = torch.ones(2)
        collectives.all_reduce(total)
        assert total.tolist() == [1.0, 1.0]
        with pytest.raises(ValueError, match="rank 1 is not among"):
            collectives.send(total, 1)
    finally:
        collectives.destroy_process_group()
    assert not dist.is_initialized()
    assert not hasattr(collectives, "RemoteTensor")
    with pytest.raises(RuntimeError, match="call init_master_worker first"):
        remote_types.RemoteTensor.empty((2,))


@pytest.mark.filterwarnings("ignore:master-worker mode is experimental")
@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        (("gloo", "env://", {"colour": 1, "rank": 0}), AssertionError, "got unexpected keyword arguments: colour"),
        (("smoke", "env://", {}), RuntimeError, "Invalid distributed backend name: smoke"),
        (("mpi", "env://", {}), RuntimeError, "this build of torch .* has no mpi; use 'gloo', or a torch built from"),
    ],
)
def test_what_cannot_start(arguments: tuple[str, str, dict[str, Any]], kind: type[Exception], words: str) -> None:
    backend, init_method, others = arguments
    environment = dict(os.environ)
    with pytest.raises(kind, match=words):
        collectives.init_master_worker(backend, init_method, **others)
    assert not dist.is_initialized()
    assert dict(os.environ) == environment


@pytest.mark.filterwarnings("ignore:master-worker mode is experimental")
@pytest.mark.skipif(dist.is_nccl_available(), reason="this torch has NCCL")
def test_nccl_without_cuda() -> None:
    with pytest.raises(RuntimeError, match="has no nccl; use 'gloo'"):
        collectives.init_master_worker("nccl", "env://")


def test_commands_are_taken_out_in_order() -> None:
    inbox = Inbox()
    for number in (2, 0, 1, 4):
        inbox.put(number, f"{number}", [])
    assert [inbox.take()[0] for _ in range(3)] == ["0", "1", "2"]
    inbox.lose("it has gone")
    with pytest.raises(ConnectionError, match="it has gone"):
        inbox.take()  # the fourth will never come
    inbox.put(3, "3", [])
    assert [inbox.take()[0], inbox.take()[0]] == ["3", "4"]
