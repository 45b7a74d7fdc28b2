"""More of what the processes of test_master_worker run: what goes wrong."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelexport.distributed import collectives as c
from modelexport.distributed.collectives import operations
from modelexport.distributed.collectives.collective_mode import driver
from modelexport.distributed.collectives.master_worker import driving
from modelexport.distributed.collectives.master_worker.remote_calls import Member
from modelexport.distributed.collectives.master_worker.remote_types import RemoteTensor
from tests.distributed._master_worker_targets import left, raises, remote, run, same


def mistakes(world_size: int) -> None:
    """None of these costs more than the call."""
    uneven = RemoteTensor.from_tensors([torch.ones(2), torch.ones(3), torch.ones(2)])
    mixed = RemoteTensor.from_tensors([torch.ones(2), torch.ones(2).double(), torch.ones(2)])
    for wrong in (uneven, mixed):
        with raises(ValueError, "all_reduce: rank 1"):
            c.all_reduce(wrong)
    with raises(ValueError, "rank 1"):
        c.gather(uneven, gather_list=[torch.ones(2) for _ in range(3)])
    with raises(ValueError, "tensor_list has 2 tensors; it must have 3"):
        c.all_gather([torch.ones(2)] * 2, torch.ones(2))
    with raises(ValueError, "gather_list has 1"):
        c.gather(torch.ones(2), gather_list=[torch.ones(2)])
    with raises(ValueError, "src=3 is not in the group"):
        c.broadcast(torch.ones(2), 3)
    with raises(ValueError, "float8_e4m3fn"):
        c.all_reduce(torch.ones(2).to(torch.float8_e4m3fn))
    with raises(TypeError, "colour"):
        c.all_reduce(torch.ones(2), colour="red")
    with raises(TypeError, "dict cannot be an argument"):
        c.all_reduce({})
    with raises(RuntimeError, "_register_stream is not for master-worker mode"):
        c._register_stream(None)
    for init in (c.init_master_worker, c.init_process_group):
        with raises(RuntimeError, "trying to initialize torch.distributed twice!"):
            init("gloo", "file:///nowhere", rank=0, world_size=1)
    total = torch.ones(2)
    c.all_reduce(total)
    same(total, torch.full((2,), 3.0))


def with_a_bad_worker(rank: int, world_size: int, init_method: str, place: str) -> Any:
    """Rank 1 cannot do a certain thing once."""
    if rank == 1:
        true_prepare, true_all_reduce, calls = Member._prepare, c.all_reduce, []

        def prepare(self: Member, command: dict[str, Any], tensors: list[Tensor]) -> Any:
            calls.append(1)
            if len(calls) == 2:
                raise MemoryError("no room for the copies")
            return true_prepare(self, command, tensors)

        def all_reduce(tensor: Tensor, check: bool | None = None) -> None:
            if tensor.numel() == 5:
                raise ValueError("rank 1 dislikes five")
            true_all_reduce(tensor, check=check)

        Member._prepare = prepare  # type: ignore[method-assign]
        operations.all_reduce = all_reduce
    return run(rank, world_size, init_method, {"prepare": _bad_at_preparing, "run": _bad_at_running}[place])


def _bad_at_preparing(world_size: int) -> None:
    c.barrier()
    with raises(RuntimeError, "rank 1 failed while preparing all_reduce: memory ran out: "):
        c.all_reduce(torch.ones(2))
    total = torch.ones(2)
    c.all_reduce(total)
    same(total, torch.full((2,), float(world_size)))


def _bad_at_running(world_size: int) -> None:
    driving.GRACE = 0.2
    far = remote(world_size)
    with raises(RuntimeError, "rank 1 failed while running all_reduce: ValueError: rank 1 dislikes five"):
        c.all_reduce(torch.ones(5))
    for call in (c.barrier, far.to_list):
        with raises(RuntimeError, "cannot be used any more: rank 1 failed", "dislikes five", "destroy_process_group()"):
            call()


def pids(world_size: int) -> list[int]:
    """The ranks' processes, which :func:`with_pids` has put down."""
    return [int(path.read_text()) for path in sorted(Path(os.environ["PIDS"]).iterdir())]


def with_pids(rank: int, world_size: int, init_method: str, scenario: Callable[[int], Any] | None) -> Any:
    (Path(os.environ["PIDS"]) / str(rank)).write_text(str(os.getpid()))
    return run(rank, world_size, init_method, scenario)


def worker_killed(world_size: int) -> None:
    os.kill(pids(world_size)[2], signal.SIGKILL)
    words = "rank 2 failed while", "worker2 is gone"
    with raises(RuntimeError, *words):
        c.all_reduce(torch.ones(2))
    with raises(RuntimeError, "cannot be used any more", *words):
        c.all_reduce(torch.ones(2))


def worker_killed_in_the_middle(world_size: int) -> None:
    far = RemoteTensor.full((2_000_000,), 1.0)
    threading.Timer(0.2, os.kill, (pids(world_size)[1], signal.SIGKILL)).start()
    with raises(RuntimeError, "rank 1 failed while", "all_reduce", "worker1 is gone"):
        while True:
            c.all_reduce(far, op=c.reduce_op.MAX)


def worker_found_dead_at_the_end(world_size: int) -> str:
    os.kill(pids(world_size)[1], signal.SIGKILL)
    with raises(RuntimeError, "rank 1 failed while", "worker1 is gone"):
        c.destroy_process_group()
    assert left() == (False, False, 0, 1)
    return "named"


def worker_stopped(world_size: int) -> None:
    """An interrupt, then a time-out."""
    victim = pids(world_size)[1]
    os.kill(victim, signal.SIGSTOP)
    try:
        try:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            c.all_reduce(torch.ones(2))
        except KeyboardInterrupt:
            pass
        else:
            raise AssertionError("not interrupted")
        with raises(RuntimeError, "all_reduce was interrupted"):
            c.barrier()
    finally:
        os.kill(victim, signal.SIGCONT)


def worker_silent(world_size: int) -> str:
    victim = pids(world_size)[1]
    driver()._ranks._seconds = 3.0  # type: ignore[union-attr]
    os.kill(victim, signal.SIGSTOP)
    try:
        with raises(RuntimeError, "rank 1 failed while preparing barrier: no answer for 3 s"):
            c.barrier()
        c.destroy_process_group()
    finally:
        os.kill(victim, signal.SIGCONT)
    return "named"


def master_killed(world_size: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def master_killed_in_the_middle(world_size: int) -> None:
    far = RemoteTensor.full((2_000_000,), 1.0)
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGKILL)).start()
    while True:
        c.all_reduce(far, op=c.reduce_op.MAX)


def master_exits(world_size: int) -> None:
    raise SystemExit(3)
