"""What the processes of test_master_worker run: rank 0 a scenario, the others nothing but ``init_master_worker``."""

from __future__ import annotations

import contextlib
import os
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from modelexport.distributed import collectives as c
from modelexport.distributed.collectives.master_worker.remote_types import RemoteTensor


def enter(pipe: Connection, log: str, environment: dict[str, str], target: Callable[..., Any], *args: Any) -> None:
    """A process of the tests. What rpc logs about connections that end goes into a file."""
    os.environ |= environment
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 2)
    os.close(file)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message="master-worker mode is experimental")
    try:
        answer = ("returned", target(*args))
    except BaseException as error:
        answer = (type(error).__name__, "".join(traceback.format_exception(error)))
    pipe.send(answer)


def run(rank: int, world_size: int, init_method: str, scenario: Callable[[int], Any] | None) -> Any:
    """One session: the scenario on rank 0, and whether anything is left initialised on any."""
    join(rank, world_size, init_method)
    if scenario is None or rank:
        return left()
    assert left() == (True, False, 0, world_size)
    result = scenario(world_size)
    c.destroy_process_group()
    return left() if result is None else result


def join(rank: int, world_size: int, init_method: str) -> None:
    if init_method.startswith("env://"):
        port = init_method.removeprefix("env://")
        os.environ |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
        }
        c.init_master_worker("tcp")
    else:
        c.init_master_worker("gloo", init_method, rank=rank, world_size=world_size, group_name="a name")


def left() -> tuple[bool, bool, int, int]:
    return dist.is_initialized(), c.is_initialized(), c.get_rank(), c.get_world_size()


# ------------------------------------------------------------------------ values


def numbers(rank: int, shape: tuple[int, ...] = (2, 3)) -> Tensor:
    """Small whole numbers, other ones on each rank."""
    count = 1
    for size in shape:
        count *= size
    return torch.tensor([(7 * rank + 3 * index) % 11 - 4 for index in range(count)], dtype=torch.float32).reshape(shape)


def remote(world_size: int, shape: tuple[int, ...] = (2, 3)) -> RemoteTensor:
    return RemoteTensor.from_tensors([numbers(rank, shape) for rank in range(world_size)])


def same(found: Tensor | RemoteTensor, expected: Tensor | list[Tensor]) -> None:
    pairs = zip(found.to_list(), expected, strict=True) if isinstance(found, RemoteTensor) else [(found, expected)]
    for index, (one, other) in enumerate(pairs):
        assert one.dtype == other.dtype, index
        assert torch.equal(one, other), (index, one, other)


@contextlib.contextmanager
def raises(kind: type[Exception], *words: str) -> Iterator[None]:
    """An error whose text has all the words."""
    with pytest.raises(kind) as caught:
        yield
    for word in words:
        assert word in str(caught.value)


# ------------------------------------------------------------------------ every collective


def every_collective(world_size: int) -> None:
    ranks = range(world_size)
    mine = [numbers(rank) for rank in ranks]
    last = world_size - 1
    _reductions(world_size, mine)

    plain, far = numbers(0), remote(world_size)
    c.broadcast(plain, last)
    same(plain, numbers(0))  # a copy of it was there
    c.broadcast(far, src=last)
    same(far, [mine[last]] * world_size)

    plain, far = numbers(5), remote(world_size)
    slots = [torch.zeros(2, 3) for _ in ranks]
    c.all_gather(slots, plain)
    assert all(torch.equal(slot, numbers(5)) for slot in slots)
    c.all_gather(slots, far)
    same(torch.stack(slots), torch.stack(mine))
    far_slots = [RemoteTensor.full((2, 3), 0.5) for _ in ranks]
    c.all_gather(far_slots, far)
    for rank in ranks:
        same(far_slots[rank], [mine[rank]] * world_size)
    _gather_and_scatter(world_size, mine)
    _all_to_all(world_size)
    _several_per_rank(world_size)
    c.barrier()
    assert c.barrier(async_op=True).wait() is None
    c._clear_group_cache()


def _reductions(world_size: int, mine: list[Tensor]) -> None:
    plain = torch.ones(3)
    assert c.all_reduce(plain) is None
    same(plain, torch.full((3,), float(world_size)))
    stacked = torch.stack(mine)
    for op, total in [
        (c.reduce_op.SUM, stacked.sum(0)),
        (c.reduce_op.PRODUCT, stacked.prod(0)),
        (c.reduce_op.MIN, stacked.amin(0)),
        (dist.ReduceOp.MAX, stacked.amax(0)),
    ]:
        far = remote(world_size)
        c.all_reduce(far, op=op)
        same(far, [total] * world_size)
        for dst in {0, world_size - 1}:
            far = remote(world_size)
            c.reduce(far, dst, op)
            same(far, [total if rank == dst else mine[rank] for rank in range(world_size)])
    plain = torch.full((2,), 2.0)
    c.reduce(plain, 0, c.reduce_op.PRODUCT)
    same(plain, torch.full((2,), 2.0**world_size))
    c.reduce(plain, dst=world_size - 1)
    same(plain, torch.full((2,), 2.0**world_size))  # another rank's result


def _gather_and_scatter(world_size: int, mine: list[Tensor]) -> None:
    ranks, last = range(world_size), world_size - 1
    slots = [torch.zeros(2, 3) for _ in ranks]
    c.gather(remote(world_size), gather_list=slots)  # the master is the one
    same(torch.stack(slots), torch.stack(mine))
    c.gather(numbers(3), dst=0, gather_list=slots)
    same(torch.stack(slots), torch.stack([numbers(3)] * world_size))
    far_slots = [RemoteTensor.full((2, 3), 0.5) for _ in ranks]
    c.gather(remote(world_size), dst=last, gather_list=far_slots)
    for source in ranks:
        same(far_slots[source], [mine[source] if rank == last else torch.full((2, 3), 0.5) for rank in ranks])

    far = RemoteTensor.empty((2, 3))
    c.scatter(far, scatter_list=mine)  # from the master's own tensors to where they belong
    same(far, mine)
    plain = torch.zeros(2, 3)
    c.scatter(plain, src=0, scatter_list=[numbers(rank + 1) for rank in ranks])
    same(plain, numbers(1))
    pieces = [RemoteTensor.from_tensors([numbers(10 * rank + piece) for rank in ranks]) for piece in ranks]
    c.scatter(far, src=last, scatter_list=pieces)
    same(far, [numbers(10 * last + rank) for rank in ranks])
    c.scatter(plain, src=last, scatter_list=pieces)
    same(plain, numbers(10 * last))
    if world_size > 1:
        assert c.gather(numbers(0), dst=1) is None  # rank 1 gets it, and nobody looks there
        with raises(RuntimeError, "non-empty gather_list can be given only to gather destination"):
            c.gather(numbers(0), dst=1, gather_list=slots)
        with raises(RuntimeError, "non-empty can be given only to scatter source"):
            c.scatter(plain, src=1, scatter_list=mine)
    with raises(RuntimeError, "gather_list is a required argument in gather destination"):
        c.gather(numbers(0))
    with raises(RuntimeError, "scatter_list is a required argument in scatter source"):
        c.scatter(far, src=last)
    with raises(RuntimeError, "got unexpected kwargs"):
        c.gather(numbers(0), gather_list=slots, colour="red")
    with raises(ValueError, f"dst={world_size}", "is not among ranks"):
        c.gather(numbers(0), dst=world_size)


def _all_to_all(world_size: int) -> None:
    ranks = range(world_size)
    given = RemoteTensor.from_tensors([numbers(rank, (world_size, 2)) for rank in ranks])
    taken = RemoteTensor.empty((world_size, 2))
    swapped = [torch.stack([numbers(source, (world_size, 2))[rank] for source in ranks]) for rank in ranks]
    c.all_to_all_single(taken, given)
    same(taken, swapped)
    plain = torch.zeros(world_size, 2)
    c.all_to_all_single(plain, given)
    same(plain, swapped[0])
    columns = [RemoteTensor.from_tensors([numbers(10 * rank + column) for rank in ranks]) for column in ranks]
    outputs = [RemoteTensor.empty((2, 3)) for _ in ranks]
    c.all_to_all(outputs, columns)
    for source in ranks:
        same(outputs[source], [numbers(10 * source + rank) for rank in ranks])


def _several_per_rank(world_size: int) -> None:
    ranks = range(world_size)

    def pair() -> list[RemoteTensor]:
        return [RemoteTensor.from_tensors([numbers(2 * rank + one) for rank in ranks]) for one in (0, 1)]

    total = torch.stack([numbers(index) for index in range(2 * world_size)]).sum(0)
    far = pair()
    c.broadcast_multigpu(far, world_size - 1)
    for one in far:
        same(one, [numbers(2 * (world_size - 1))] * world_size)
    far = pair()
    c.all_reduce_multigpu(far)
    for one in far:
        same(one, [total] * world_size)
    far = pair()
    c.reduce_multigpu(far, dst=0)
    same(far[0], [total, *[numbers(2 * rank) for rank in ranks[1:]]])
    plain = [torch.ones(2), torch.full((2,), 2.0)]
    c.all_reduce_multigpu(plain, c.reduce_op.SUM)
    assert all(torch.equal(one, torch.full((2,), 3.0 * world_size)) for one in plain)
    slots = [[torch.zeros(2, 3) for _ in range(2 * world_size)] for _ in range(2)]
    c.all_gather_multigpu(slots, pair())
    for row in slots:
        same(torch.stack(row), torch.stack([numbers(index) for index in range(2 * world_size)]))


# ------------------------------------------------------------------------ pairs, groups, dtypes


def pairs(world_size: int) -> None:
    assert world_size == 3
    before = [numbers(rank) for rank in range(3)]
    far = remote(3)
    assert c.send(far, 2) is None
    same(far, [before[0], before[1], before[0]])
    assert c.recv(far, 1) == 1
    same(far, [before[1], before[1], before[0]])
    far = remote(3)
    c.send(far.part(1), dst=2)
    same(far, [before[0], before[1], before[1]])
    assert c.recv(far.part(1), src=0, tag=5) == 0
    same(far, [before[0], before[0], before[1]])

    plain = numbers(4)
    c.send(plain, 1)  # into a copy of it, to be seen by nobody
    assert c.recv(plain, src=2) == 2
    same(plain, numbers(4))

    far = remote(3)
    requests = [c.isend(far.part(0), 1), c.irecv(far.part(2), src=1), c.isend(far, 2)]
    total = torch.ones(2)
    reduced = c.all_reduce(total, async_op=True)
    assert reduced.wait() is None
    same(total, torch.full((2,), 3.0))
    for request in requests:
        request.wait()
        assert request.is_completed()
    assert requests[1].source_rank() == 1
    same(far, [before[0]] * 3)
    late = c.irecv(far, 1)
    while not late.is_completed():
        time.sleep(0.001)
    assert late.source_rank() == 1

    with raises(ValueError, "name the sending rank with src"):
        c.recv(far)
    with raises(ValueError, "rank 0 would be its own partner"):
        c.send(far, 0)
    with raises(ValueError, "rank 3 is not among ranks [0, 1, 2]"):
        c.recv(far, 3)
    uneven = RemoteTensor.from_tensors([torch.ones(2), torch.ones(3), torch.ones(2)])
    with raises(ValueError, "rank 0's tensor is [2] of torch.float32, but rank 1's is [3]", "alike"):
        c.send(uneven, 1)
    c.send(uneven, 2)
    with raises(TypeError, "only send, recv, isend and irecv take one"):
        c.broadcast(far.part(1), 0)


def groups(world_size: int) -> None:
    assert world_size == 4
    outer, inner = c.new_group([3, 0]), c.new_group([1, 2])
    assert (outer.ranks, inner.ranks, c.new_group().ranks) == ((3, 0), (1, 2), (0, 1, 2, 3))
    assert (c.get_rank(outer), c.get_world_size(outer)) == (1, 2)
    assert (c.get_rank(inner), c.get_world_size(group=inner)) == (-1, -1)
    assert (c.get_rank(c.group.WORLD), c.get_world_size()) == (0, 4)
    far = remote(4)
    mine = [numbers(rank) for rank in range(4)]
    c.all_reduce(far, group=inner)
    same(far, [mine[0], mine[1] + mine[2], mine[1] + mine[2], mine[3]])
    far = remote(4)
    c.broadcast(far, 3, outer)
    same(far, [mine[3], mine[1], mine[2], mine[3]])
    slots = [torch.zeros(2, 3) for _ in range(2)]
    c.gather(remote(4), gather_list=slots, group=outer)
    same(torch.stack(slots), torch.stack([mine[3], mine[0]]))
    c.barrier(inner)
    with pytest.warns(UserWarning, match=r"the master is not among ranks \[1, 2\]") as caught:
        c.all_reduce(plain := torch.ones(2), group=inner)
    assert caught[0].filename == __file__
    same(plain, torch.ones(2))
    far = remote(4)
    c.send(far.part(2), 1, group=inner)
    same(far, [mine[0], mine[2], mine[2], mine[3]])
    with raises(ValueError, "rank 0 is not among ranks [1, 2]"):
        c.send(far, 1, group=inner)
    with raises(ValueError, "dst=0 is not among ranks [1, 2]"):
        c.gather(far, group=inner, gather_list=slots)
    with raises(ValueError, "rank 4 does not exist"):
        c.new_group([0, 4])
    with raises(TypeError, "ProcessGroup cannot be an argument in master-worker mode"):
        c.barrier(dist.group.WORLD)
    c.destroy_process_group(outer)
    with raises(ValueError, "destroyed"):
        c.barrier(outer)
    c.all_reduce(far)


def dtypes(world_size: int) -> None:
    names = [
        "float16", "bfloat16", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "bool",
        "complex64", "float8_e4m3fn", "float8_e5m2",
    ]  # fmt: skip
    for name in names:
        values = torch.arange(6).reshape(2, 3).to(getattr(torch, name))
        far = RemoteTensor.from_tensors([values, torch.zeros_like(values)])
        assert far.dtypes == (values.dtype,) * 2
        c.broadcast(far, 0)
        for copy in far.to_list():
            assert copy.dtype == values.dtype
            assert copy.view(torch.uint8).tolist() == values.view(torch.uint8).tolist(), name
        slots = [torch.zeros_like(values) for _ in range(2)]
        c.all_gather(slots, values)
        assert [slot.view(torch.uint8).tolist() for slot in slots] == [values.view(torch.uint8).tolist()] * 2, name
    for odd in (
        torch.tensor(3.0), torch.zeros(0, 4), torch.arange(12.0).reshape(3, 4).t(), torch.arange(20.0)[::3],
        torch.ones(2, dtype=torch.complex64).mul(1j).conj(), torch.nn.Parameter(torch.ones(2)),
    ):  # fmt: skip
        before = odd.detach().clone()
        c.all_reduce(odd.detach())
        same(odd.detach().clone(), before * 2)
        same(RemoteTensor.from_tensors([odd, odd]), [before * 2] * 2)
    big = torch.arange(3_000_000)
    c.broadcast(big, 1)
    same(big, torch.arange(3_000_000))
    for bad in (torch.ones(2).to_sparse(), torch.ones(2, device="meta")):
        with raises(TypeError, "dense tensors"):
            c.all_reduce(bad)
