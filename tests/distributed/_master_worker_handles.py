"""More of what the processes of test_master_worker run: handles, and sessions one after the other."""

from __future__ import annotations

import gc
import os
import socket
import threading
from typing import Any

import torch
import torch.distributed as dist

from modelexport.distributed import collectives as c
from modelexport.distributed.collectives.master_worker.remote_types import RemotePart, RemoteTensor, held_bytes
from tests.distributed._master_worker_targets import numbers, raises, remote, run, same


def handles(world_size: int) -> None:
    for name in ("RemoteTensor", "RemotePart", "RemoteGroup", "held_bytes"):
        assert hasattr(c, name)
    assert c.RemoteTensor is RemoteTensor
    far = RemoteTensor.full((2, 2), 2**62 + 1, torch.int64)
    same(far, [torch.full((2, 2), 2**62 + 1)] * world_size)
    same(RemoteTensor.full(3, 0.1), [torch.full((3,), 0.1)] * world_size)
    same(RemoteTensor.full((), 1 + 2j), [torch.full((), 1 + 2j)] * world_size)
    same(RemoteTensor.full((2,), True), [torch.tensor([True, True])] * world_size)
    same(RemoteTensor.full((2,), float("inf")), [torch.full((2,), float("inf"))] * world_size)
    assert RemoteTensor.empty((4, 0), torch.bfloat16).local(1).shape == (4, 0)
    assert repr(far) == f"RemoteTensor((2, 2), torch.int64, on {world_size} ranks)"
    assert repr(far.part(1)).endswith(".part(1)")
    assert isinstance(far.part(1), RemotePart)
    uneven = RemoteTensor.from_tensors([torch.ones(rank) for rank in range(world_size)])
    assert uneven.shapes == tuple(torch.Size([rank]) for rank in range(world_size))
    assert "differ" in repr(uneven)
    same(uneven.local(1), torch.ones(1))
    source = torch.ones(2)
    copied = RemoteTensor.from_tensors([source] * world_size)
    source.zero_()
    copied.local(0).zero_()
    same(copied, [torch.ones(2)] * world_size)  # neither what it was made of nor what was fetched

    gc.collect()
    before = held_bytes()
    more = RemoteTensor.full((1000,), 0.0)
    assert held_bytes() == [size + 4000 for size in before]
    del more
    assert held_bytes() == before
    more = RemoteTensor.full((1000,), 0.0)
    more.free()
    more.free()
    assert held_bytes() == before
    with raises(RuntimeError, "has been freed"):
        c.all_reduce(more)
    with raises(RuntimeError, "has been freed"):
        more.to_list()
    with raises(ValueError, f"{world_size - 1} tensors were given, but there are {world_size} ranks"):
        RemoteTensor.from_tensors([torch.ones(1)] * (world_size - 1))
    with raises(TypeError, "rank 1's is not a dense tensor"):
        RemoteTensor.from_tensors([torch.ones(1), 3.0, *[torch.ones(1)] * (world_size - 2)])
    with raises(ValueError, f"rank {world_size} does not exist"):
        far.local(world_size)
    with raises(TypeError, "to_list"):
        far.__reduce__()
    with raises(RuntimeError):
        RemoteTensor.empty((2**50,), torch.int64)
    assert held_bytes() == before  # not on the ranks where it might have worked either
    results = [torch.ones(2) for _ in range(8)]
    threads = [threading.Thread(target=c.all_reduce, args=(one,)) for one in results]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(one, torch.full((2,), float(world_size))) for one in results)


def sessions(rank: int, world_size: int, port: int, next_port: int) -> dict[str, Any]:
    """Master-worker mode three times at one address, each time with other ranks; then process-group mode, and again."""
    held = []
    for turn in range(5):
        now = (rank + turn) % world_size
        if turn == 3:
            c.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=now, world_size=world_size)
            total = torch.ones(2)
            c.all_reduce(total)
            same(total, torch.full((2,), float(world_size)))
            c.barrier()
            c.destroy_process_group()
            port = next_port  # torch's own groups do not leave together, so their address is not to be used at once
        else:
            environment = dict(os.environ)
            assert run(now, world_size, f"tcp://127.0.0.1:{port}", _one_sum) == (False, False, 0, 1)
            assert dict(os.environ) == environment
        with socket.socket() as probe:
            taken = turn == 4 and probe.connect_ex(("127.0.0.1", port)) == 0
        gc.collect()
        held.append((len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))))
    return {"held": held, "taken": taken, "extended": hasattr(c, "RemoteTensor")}


def _one_sum(world_size: int) -> None:
    far = remote(world_size)
    c.all_reduce(far)
    total = torch.stack([numbers(rank) for rank in range(world_size)]).sum(0)
    same(far, [total] * world_size)
    assert dist.get_backend() == "gloo"
    _stale.append(far)


_stale: list[RemoteTensor] = []


def stale_handles(rank: int, world_size: int, init_method: str) -> Any:
    """Handles of a session that has ended."""
    run(rank, world_size, init_method, _one_sum)
    if rank == 0:
        old = _stale.pop()
        with raises(RuntimeError, "has ended"):
            old.to_list()
        old.free()
        with raises(RuntimeError, "call init_master_worker first"):
            RemoteTensor.empty((2,))
    again = init_method + "again"

    def use_old(_: int) -> None:
        with raises(RuntimeError, "belongs to a master-worker session that has ended"):
            c.all_reduce(older)
        c.barrier()

    older = None
    if rank == 0:
        run(0, world_size, again, _one_sum)
        older = _stale.pop()
    else:
        run(rank, world_size, again, None)
    return run(rank, world_size, again + "again", use_old)
