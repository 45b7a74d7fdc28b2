"""What the rank processes of test_launch run. In a module of its own, since ranks import what they run."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from modelexport.distributed.launch import (
    all_to_all,
    get_distributed_backend,
    get_grid,
    phase,
    phase_scope,
    report,
)
from modelexport.errors import CheckpointError, UsageError

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def _say_pid() -> None:
    report({"pid": os.getpid()})
    total = torch.ones(1)
    dist.all_reduce(total)  # so that every rank is at work when one fails


def describe(word: str = "", *, number: int = 0) -> None:
    """Reports this rank's surroundings and the sum of all ranks' numbers."""
    total = torch.tensor([dist.get_rank()])
    dist.all_reduce(total)
    report(
        {
            "pid": os.getpid(),
            "rank": dist.get_rank(),
            "world_size": dist.get_world_size(),
            "sum": int(total),
            "word": word,
            "number": number,
            "variables": {name: os.environ[name] for name in VARIABLES},
            "marker": os.environ.get("MODELEXPORT_TEST_MARKER"),
            "path": os.environ.get("PYTHONPATH"),
            "threads": torch.get_num_threads(),
            "policy": os.environ.get("OMP_WAIT_POLICY"),
            "cwd": os.getcwd(),
            "backend": str(get_distributed_backend()),
        }
    )


def many_events(count: int) -> None:
    for i in range(count):
        report({"i": i, "nothing": None, "text": "\u00e9\n" * 50})


def wait_for_peers() -> None:
    with phase_scope("waiting for peers", waiting=True):
        dist.barrier()


def fail(how: str, culprit: int) -> None:
    """Rank ``culprit`` fails in the way named; the others wait for it in a collective."""
    _say_pid()
    if dist.get_rank() != culprit:
        wait_for_peers()
        return
    with phase_scope("the fatal step"):
        FAILURES[how]()
    wait_for_peers()


def fail_without_phases(how: str, culprit: int) -> None:
    """As :func:`fail`, with nothing that tells who waits but where the code stands."""
    _say_pid()
    if dist.get_rank() == culprit:
        FAILURES[how]()
    dist.barrier()


def _raise() -> None:
    numbers = {"one": 1}
    print(numbers["two"])


def _raise_user_error() -> None:
    raise UsageError("size 10 is not divisible by 3; use 5")


def _raise_after_handling() -> None:
    try:
        with phase_scope("an inner step that is handled"):
            raise OSError("no such thing")
    except OSError:
        pass
    raise CheckpointError("the file is truncated")


def _sleep() -> None:
    time.sleep(600)


def _hold_the_interpreter() -> None:
    re.match(r"(a+)+$", "a" * 64 + "b")  # years of backtracking, during which no other thread gets a turn


def _hang_in_thread() -> None:
    """The main thread waits, rightly, for a thread that hangs."""

    def work() -> None:
        with phase_scope("the fatal step"):
            time.sleep(600)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    with phase_scope("waiting for the thread", waiting=True):
        thread.join()


FAILURES: dict[str, Callable[[], object]] = {
    "raise": _raise,
    "user error": _raise_user_error,
    "raise after handling": _raise_after_handling,
    "exit 0": lambda: os._exit(0),
    "sys.exit": lambda: sys.exit(0),
    "exit 3": lambda: os._exit(3),
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "SIGSTOP": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "SIGSEGV": lambda: ctypes.string_at(1),
    "hang": _sleep,
    "hang with the interpreter": _hold_the_interpreter,
    "hang in a thread": _hang_in_thread,
}


def peers_disguise_the_loss() -> None:
    """Rank 1 is killed; the others meet that loss at once and turn it into errors of their own."""
    _say_pid()
    if dist.get_rank() == 1:
        phase("dying")
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.barrier()
    except RuntimeError as error:
        raise KeyError("state") from error


def busy_but_absent() -> None:
    """Rank 1 never joins, but is busy all the while."""
    _say_pid()
    if dist.get_rank() != 1:
        wait_for_peers()
        return
    for i in range(10**9):
        phase(f"step {i}")
        time.sleep(0.05)


def all_wait() -> None:
    """Nobody works: rank 0 waits since longest."""
    _say_pid()
    if dist.get_rank() != 0:
        time.sleep(0.4)
    phase("expecting a message", waiting=True)
    threading.Event().wait(600)


def resist(culprit: int) -> None:
    """All but the culprit ignore SIGTERM."""
    if dist.get_rank() != culprit:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _say_pid()
    if dist.get_rank() == culprit:
        raise ValueError("enough")
    time.sleep(600)


def hang_forever(path: str, how: str = "hang") -> None:
    """Writes its pid to ``path`` and hangs, with its peers."""
    dist.barrier()
    target = f"{path}/{dist.get_rank()}"
    with open(target + ".tmp", "w") as file:
        file.write(str(os.getpid()))
    os.rename(target + ".tmp", target)
    FAILURES[how]()


def local_only() -> None:
    """For world size 1."""
    report({"pid": os.getpid(), "world_size": dist.get_world_size(), "sum": (1, 2)})
    with phase_scope("the fatal step"):
        raise ValueError("alone")


def exit_alone() -> None:
    sys.exit(4)


def grid_sums() -> None:
    """Sums the world ranks along each axis of the grid."""
    grid = get_grid()
    result: dict[str, object] = {"rank": dist.get_rank()}
    for group in (grid.mp, grid.pp, grid.dp):
        total = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(total, group=group.group)
        result[group.axis] = [group.rank, group.world_size, list(group.ranks), float(total)]
    report(result)


def all_to_all_values() -> None:
    """Values, gradients, dtypes and subgroups of all_to_all."""
    rank, size = dist.get_rank(), dist.get_world_size()
    source = (torch.arange(2 * size * 3, dtype=torch.float64).view(2 * size, 3) + 100 * rank).requires_grad_()
    out = all_to_all(source, None)
    for peer in range(size):
        chunk = torch.arange(2 * size * 3, dtype=torch.float64).view(2 * size, 3)[2 * rank : 2 * rank + 2]
        assert torch.equal(out[2 * peer : 2 * peer + 2], chunk + 100 * peer), (rank, peer)
    weight = torch.arange(out.numel(), dtype=torch.float64).view_as(out) + 1000 * rank
    (gradient,) = torch.autograd.grad((out * weight).sum(), source)
    assert torch.equal(gradient, all_to_all(weight, None)), rank
    for dtype in (torch.bfloat16, torch.int16, torch.uint16, torch.complex64, torch.bool, torch.float8_e4m3fn):
        mine = torch.arange(size * 4).view(size, 4).add(rank).to(torch.float32).to(dtype)
        got = all_to_all(mine, None)
        assert got.dtype == dtype
        expected = torch.stack([torch.arange(4 * rank, 4 * rank + 4) + peer for peer in range(size)])
        assert torch.equal(got.to(torch.complex64), expected.to(torch.float32).to(dtype).to(torch.complex64))
    strided = torch.arange(size * 4.0).view(2, -1).t()[: 2 * size : 2].conj()
    assert all_to_all(strided, None).shape == strided.shape
    assert all_to_all(torch.empty(size, 0), None).shape == (size, 0)
    group = get_grid().mp.group
    mine = torch.full((2,), rank)
    assert all_to_all(mine, group).tolist() == list(get_grid().mp.ranks)
    report({"rank": rank, "ok": True})


def all_to_all_errors() -> None:
    """Every rank gets the same error, also where only rank 1's input is wrong; the group lives on."""
    rank, size = dist.get_rank(), dist.get_world_size()
    good = torch.zeros(size, 2)
    for bad in (torch.tensor(1.0), torch.zeros(size + 1, 2), torch.zeros(size, 3), torch.zeros(size, 2).int()):
        try:
            all_to_all(bad if rank == 1 else good, None)
        except UsageError as error:
            report({"rank": rank, "error": str(error)})
        else:
            raise AssertionError("accepted")
    assert all_to_all(good, None).shape == (size, 2)


def launch_again() -> None:
    """A rank that wants to be a launcher."""
    from modelexport.distributed.launch import MultiprocessConfig, launch_subprocesses

    launch_subprocesses(describe, MultiprocessConfig(world_size=2))
