"""What the rank processes of test_collectives_rules run: checks, groups, messages, errors."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from modelexport.distributed import collectives as c
from modelexport.distributed.launch import get_grid, report
from modelexport.errors import UsageError

Call = Callable[[bool], Any]  # given whether this rank is the odd one

ONE = torch.ones


def _all_gather(odd: bool, count: int = 3) -> None:
    c.all_gather([ONE(2) for _ in range(2 if odd else count)], ONE(2), check=True)


def _gather(odd: bool, **extra: Any) -> None:
    lists = {"gather_list": [ONE(2) for _ in range(3)]} if c.get_rank() == 0 else {}
    c.gather(ONE(2), dst=0, check=True, **lists, **(extra if odd else {}))


def _gather_without_dst(odd: bool) -> None:
    if odd:
        c.gather(ONE(2), check=True)
    else:
        _gather(False)


def _scatter(odd: bool) -> None:
    lists = {"scatter_list": [ONE(2) for _ in range(3)]} if c.get_rank() == 0 else {}
    c.scatter(ONE(1 if odd else 2), src=0, check=True, **lists)


def _all_to_all(odd: bool) -> None:
    c.all_to_all([ONE(1) for _ in range(3)], [ONE(2 if odd and i == 2 else 1) for i in range(3)], check=True)


def _all_to_all_single(odd: bool) -> None:
    c.all_to_all_single(ONE(3), ONE(4 if odd else 3), [1, 1, 1], [1, 1, 2] if odd else [1, 1, 1], check=True)


def _gather_multigpu(odd: bool) -> None:
    c.all_gather_multigpu([[ONE(2)] * 6] * (1 if odd else 2), [ONE(2)] * 2, check=True)


# Who is odd, the call, the error that every rank must raise.
MISTAKES: list[tuple[int, Call, str]] = [
    (1, lambda odd: c.all_reduce(ONE(3 if odd else 2), check=True),
     r"all_reduce: rank 1 brings shape \(3,\) and rank 0 brings \(2,\)"),
    (0, lambda odd: c.all_reduce(ONE(3 if odd else 2), check=True),
     r"all_reduce: rank 0 brings shape \(3,\) and rank 1 brings \(2,\)"),
    (2, lambda odd: c.reduce(ONE(2).to(torch.int16 if odd else torch.float32), 0, check=True),
     "reduce: rank 2 brings dtype int16 and rank 0 brings float32"),
    (1, lambda odd: c.all_reduce(ONE(2), c.reduce_op.MAX if odd else dist.ReduceOp.SUM, check=True),
     "all_reduce: rank 1 brings op MAX and rank 0 brings SUM"),
    (2, lambda odd: c.broadcast(ONE(2), 1 if odd else 0, check=True), "rank 2 brings src 1 and rank 0 brings 0"),
    (1, lambda odd: c.broadcast(ONE(2, device="meta" if odd else "cpu"), 0, check=True),
     "broadcast: rank 1 brings device meta and rank 0 brings cpu"),
    (2, lambda odd: c.barrier(check=True) if odd else c.broadcast(ONE(2), 0, check=True),
     "rank 2 calls barrier where rank 0 calls broadcast"),
    (1, _all_gather, "all_gather: rank 1: tensor_list has 2 tensors; it must have 3, one per rank"),
    (1, lambda odd: _gather(odd, gather_list=[ONE(2)]),
     "gather: rank 1: non-empty gather_list can be given only to gather destination"),
    (1, _gather_without_dst, "gather: rank 1: gather_list is a required argument in gather destination"),
    (1, _scatter, r"scatter: rank 1 brings shape \(1,\) and rank 0 brings \(2,\)"),
    (1, lambda odd: c.all_reduce(ONE(2).to(torch.float8_e5m2 if odd else torch.float32), check=True),
     r"all_reduce: rank 1: all_reduce does not support float8_e5m2.*reduce tensor\.to\(torch\.float32\)"),
    (2, lambda odd: c.all_reduce("tensor" if odd else ONE(2), check=True),
     "all_reduce: rank 2: tensor is str; it must be a tensor"),
    (1, _all_to_all, r"all_to_all: rank 1 sends shape \(2,\) to rank 2, which expects \(1,\)"),
    (1, _all_to_all_single, r"all_to_all_single: rank 1 sends shape \(2,\) to rank 2, which expects \(1,\)"),
    (1, lambda odd: c.all_to_all_single(ONE(4 if odd else 3), ONE(4 if odd else 3), check=True),
     r"all_to_all_single: rank 1: dim 0 of output has size 4 .* not divisible by the group's 3 ranks"),
    (1, lambda odd: c.all_reduce_multigpu([ONE(2)] * (1 if odd else 2), check=True),
     "all_reduce_multigpu: rank 1 brings count 1 and rank 0 brings 2"),
    (1, _gather_multigpu, "rank 1: output_tensor_lists has 1 lists; it must have 2"),
    (1, lambda odd: c.broadcast_multigpu([ONE(2), ONE(3 if odd else 2)], 0, check=True),
     r"broadcast_multigpu: rank 1: tensor_list\[1\] is float32\[3\]; it must be float32\[2\]"),
    (2, lambda odd: c.new_group([0, 2] if odd else [0, 1], check=True),
     r"new_group: rank 2 brings ranks \[0, 2\] and rank 0 brings \[0, 1\]"),
    (2, lambda odd: c.new_group([0, 3] if odd else [0, 1], check=True), "new_group: rank 2: .*rank 3 does not exist"),
    (1, lambda odd: c.broadcast(ONE([1] * 200 if odd else [1] * 199), 0, check=True), r"rank 1 brings shape \(1, 1, 1"),
]  # fmt: skip


def mistakes() -> None:
    """Each mistake raises the same error everywhere, and the next collective works."""
    errors = []
    for number, (culprit, call, expected) in enumerate(MISTAKES):
        with pytest.raises(c.CollectiveMismatchError, match=expected) as caught:
            call(c.get_rank() == culprit)
        errors.append(str(caught.value))
        total = torch.full((3,), float(c.get_rank() + number))
        c.all_reduce(total, check=number % 2 == 0)
        assert total.tolist() == [3.0 + 3 * number] * 3, number
    report({"errors": errors})


def checked_by_environment() -> None:
    """MODELEXPORT_DEBUG turns the check on where ``check`` is left out."""
    os.environ["MODELEXPORT_DEBUG"] = "1"
    with pytest.raises(c.CollectiveMismatchError) as caught:
        c.all_reduce(torch.ones(1 + c.get_rank()))
    report({"error": str(caught.value)})
    group = c.new_group([1, 0])
    rooms = [torch.empty(1), torch.empty(1)]
    c.all_gather(rooms, torch.tensor([float(c.get_rank())]), group)
    assert [float(room) for room in rooms] == [1.0, 0.0]
    if c.get_rank() == 0:  # only rank 0 leaves the check out: it must not wait for a header
        c.send(torch.ones(2), 1)
    else:
        assert c.recv(torch.empty(2)) == 0


# --- groups ----------------------------------------------------------------------------------------


def groups() -> None:
    """Handles in any order, of ours and of torch's, on members and others. For 4 ranks."""
    rank = c.get_rank()
    ranks = [3, 0, 2]
    group = c.new_group(ranks, timeout=30)
    assert group.ranks == tuple(ranks)
    assert (group.process_group is None) == (rank == 1)
    assert c.get_rank(group) == (ranks.index(rank) if rank != 1 else -1)
    assert c.get_world_size(group) == (3 if rank != 1 else -1)
    if rank == 1:
        _outside(group)
    else:
        _inside(group, ranks)
    everyone = [c.group.WORLD, None, dist.group.WORLD, c.new_group(), dist.new_group()]
    for handle in everyone:
        total = torch.tensor([1 << rank])
        c.all_reduce(total, group=handle)
        assert int(total) == 15, handle
        assert (c.get_rank(handle), c.get_world_size(handle)) == (rank, 4)
    mp = get_grid().mp
    rooms = [torch.zeros(()) for _ in mp.ranks]
    c.all_gather(rooms, torch.tensor(float(rank)), mp.group)
    assert [int(room) for room in rooms] == list(mp.ranks)
    torchs = dist.new_group([2, 1], timeout=timedelta(seconds=30))
    assert c.get_rank(torchs) == {1: 0, 2: 1}.get(rank, -1)
    _raises("rank 4 does not exist; there are ranks 0 to 3", lambda: c.new_group([0, 4]))
    _raises("none twice", lambda: c.new_group([1, 1]))
    _raises("at least one", lambda: c.new_group([]))
    _raises("is not a group", lambda: c.barrier("all"))
    c.barrier()
    c.destroy_process_group(group)
    if rank != 1:
        _raises("destroyed", lambda: c.barrier(group))
    c.barrier()
    report({"rank": rank})


def _inside(group: c.Group, ranks: list[int]) -> None:
    rank = c.get_rank()
    rooms = [torch.zeros(2, dtype=torch.int16) for _ in ranks]
    c.all_gather(rooms, torch.full((2,), rank, dtype=torch.int16), group)
    assert [int(room[1]) for room in rooms] == ranks
    swapped = torch.zeros(3)
    c.all_to_all_single(swapped, torch.tensor([rank * 10.0 + to for to in ranks]), group=group)
    assert swapped.tolist() == [source * 10.0 + rank for source in ranks]
    room = torch.zeros(1)
    lists = {"scatter_list": [torch.tensor([100.0 + to]) for to in ranks]} if rank == 0 else {"src": 0}
    c.scatter(room, group=group, **lists)
    assert float(room) == 100.0 + rank
    _raises(r"src=1 is not in the group of ranks \[3, 0, 2\]", lambda: c.broadcast(room, 1, group))
    _raises("dst=1 is not in the group", lambda: c.send(room, 1, group))
    if rank == 2:
        c.send(room, 3, group)
    if rank == 3:
        assert c.recv(room, group=group) == 2
        assert float(room) == 102.0
    outputs = [[torch.zeros(1) for _ in range(6)] for _ in range(2)]
    c.all_gather_multigpu(outputs, [torch.tensor([rank + 0.25]), torch.tensor([rank + 0.5])], group)
    assert [float(room) for room in outputs[1]] == [3.25, 3.5, 0.25, 0.5, 2.25, 2.5]


def _outside(group: c.Group) -> None:
    """Every call on a group of others does nothing but warn."""
    tensor = torch.full((3,), 7.0)
    rooms = [torch.full((3,), 8.0) for _ in range(3)]
    calls: dict[str, Callable[[], Any]] = {
        "broadcast": lambda: c.broadcast(tensor, 0, group),
        "all_reduce": lambda: c.all_reduce(tensor, group=group, check=True),
        "reduce": lambda: c.reduce(tensor, 0, group=group),
        "all_gather": lambda: c.all_gather(rooms, tensor, group),
        "gather": lambda: c.gather(tensor, gather_list=rooms, group=group),
        "scatter": lambda: c.scatter(tensor, scatter_list=rooms, group=group),
        "all_to_all": lambda: c.all_to_all(rooms, rooms, group),
        "all_to_all_single": lambda: c.all_to_all_single(tensor, tensor, group=group),
        "barrier": lambda: c.barrier(group),
        "isend": lambda: c.isend(tensor, 0, group),
        "send": lambda: c.send(tensor, 0, group),
        "irecv": lambda: c.irecv(tensor, 0, group),
        "broadcast_multigpu": lambda: c.broadcast_multigpu(rooms, 0, group),
        "all_reduce_multigpu": lambda: c.all_reduce_multigpu(rooms, group=group),
        "reduce_multigpu": lambda: c.reduce_multigpu(rooms, 0, group=group),
        "all_gather_multigpu": lambda: c.all_gather_multigpu([rooms], [tensor], group),
    }
    for name, call in calls.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert call() is None, name
        text = f"{name} does nothing on rank 1, which does not belong to the group of ranks [3, 0, 2]"
        assert [str(each.message) for each in caught] == [text]
        assert caught[0].filename == __file__, caught[0].filename
    with pytest.warns(UserWarning, match="recv does nothing on rank 1"):
        assert c.recv(tensor, group=group) == -1
    assert tensor.tolist() == [7.0] * 3
    assert all(room.tolist() == [8.0] * 3 for room in rooms)


def _raises(text: str, call: Callable[[], Any], kind: type[Exception] = UsageError) -> None:
    with pytest.raises(kind, match=text):
        call()


# --- messages --------------------------------------------------------------------------------------


def messages() -> None:
    """Any source, tags, requests that are polled, several on their way at once."""
    rank, size = c.get_rank(), c.get_world_size()
    if rank == 0:
        for dtype, shape in [(torch.float32, (3,)), (torch.uint16, (2, 2)), (torch.bool, ()), (torch.float32, (0,))]:
            senders = set()
            for _ in range(size - 1):
                room = torch.zeros(shape, dtype=dtype)
                senders.add(sender := c.recv(room))
                assert room.tolist() == torch.full(shape, sender, dtype=dtype).tolist()
            assert senders == set(range(1, size)), (dtype, shape)
            c.barrier()
        rooms = {tag: torch.zeros(2, 3, dtype=torch.float8_e5m2).t() for tag in (5, 6, 7)}
        requests = {tag: c.irecv(room, 1, tag=tag) for tag, room in rooms.items()}
        for tag in (6, 7, 5):
            requests[tag].wait()
            assert rooms[tag].float().tolist() == [[float(tag)] * 2] * 3
            rooms[tag].zero_()
            requests[tag].wait()  # lands once, not again over what has been written since
            assert requests[tag].is_completed()
            assert not rooms[tag].float().any()
        late = torch.zeros(2)
        request = c.irecv(late)
        assert not request.is_completed()
        c.send(torch.ones(1), 1)
        while not request.is_completed():
            time.sleep(0.001)
        assert late.tolist() == [4.0, 4.0]
        assert request.source_rank() == request._source_rank() == 1
    else:
        for dtype, shape in [(torch.float32, (3,)), (torch.uint16, (2, 2)), (torch.bool, ()), (torch.float32, (0,))]:
            c.send(torch.full(shape, rank, dtype=dtype), 0)
            c.barrier()
    if rank == 1:
        requests = {tag: c.isend(torch.full((3, 2), tag).to(torch.float8_e5m2), 0, tag=tag) for tag in (7, 5, 6)}
        for request in requests.values():
            request.wait()
        c.recv(torch.zeros(1), 0)
        c.send(torch.full((2,), 4.0), 0)
    _raises(f"dst={rank} is this rank itself", lambda: c.send(torch.ones(1), rank))
    _raises(f"src={rank} is this rank itself", lambda: c.recv(torch.ones(1), rank))
    _raises(f"dst={size} is not in the group", lambda: c.isend(torch.ones(1), size))
    report({"rank": rank})


def nothing_comes() -> None:
    """A request that is polled raises what made it fail, and again when it is waited for."""
    group = c.new_group(timeout=1)
    if c.get_rank() == 0:
        request = c.irecv(torch.zeros(1), 1, group)

        def poll() -> None:
            while not request.is_completed():
                time.sleep(0.001)

        _raises("(?i)timed out", poll, RuntimeError)
        _raises("(?i)timed out", request.wait, RuntimeError)
    report({"rank": c.get_rank()})


# --- errors and other beginnings -------------------------------------------------------------------


def argument_errors() -> None:
    """Errors that this rank sees by itself leave the others out of it. For 2 ranks."""
    other = 1 - c.get_rank()
    one, rooms = torch.ones(2), [torch.zeros(2), torch.zeros(2)]
    _raises("^gather_list is a required argument in gather destination$", lambda: c.gather(one), RuntimeError)
    _raises(
        "^non-empty gather_list can be given only to gather destination$",
        lambda: c.gather(one, dst=other, gather_list=rooms),
        RuntimeError,
    )
    _raises("^scatter_list is a required argument in scatter source$", lambda: c.scatter(one), RuntimeError)
    _raises(
        "^non-empty can be given only to scatter source$",
        lambda: c.scatter(one, src=other, scatter_list=rooms),
        RuntimeError,
    )
    _raises(r"gather_list has 1 tensors; it must have 2", lambda: c.gather(one, gather_list=rooms[:1]))
    _raises(r"tensor_list\[0\] is float32\[2\]; it must be int32\[2\]", lambda: c.all_gather(rooms, one.int()))
    _raises("tensor_list is Tensor", lambda: c.all_gather(torch.zeros(2, 2), one))
    _raises("must be 2 sizes.*they add up to 3", lambda: c.all_to_all_single(one, one, [1, 1], [1, 2]))
    _raises("0-dim tensor", lambda: c.all_to_all_single(torch.tensor(1.0), one))
    _raises("float32 on cpu and of int32 on cpu", lambda: c.all_to_all(rooms, [one.int()] * 2))
    _raises("only dim 0 may differ", lambda: c.all_to_all_single(torch.ones(2, 1), one))
    _raises("tensor is sparse", lambda: c.broadcast(one.to_sparse(), 0))
    _raises("is no reduction", lambda: c.all_reduce(one, "SUM"))
    _raises("all_reduce does not support MAX on complex", lambda: c.all_reduce(one.cfloat(), c.reduce_op.MAX))
    _raises("does not support BXOR on float32", lambda: c.reduce(one, 0, dist.ReduceOp.BXOR))
    _raises("does not support AVG on int16", lambda: c.reduce(one.short(), 0, dist.ReduceOp.AVG))
    _raises("list of at least one tensor", lambda: c.all_reduce_multigpu([]))
    _raises("must have 4, one per tensor", lambda: c.all_gather_multigpu([rooms] * 2, [one] * 2))
    sparse = torch.eye(2).to_sparse()
    c.all_reduce(sparse)
    assert sparse.to_dense().tolist() == [[2.0, 0.0], [0.0, 2.0]]
    c.barrier()


def other_beginnings(path: str) -> None:
    """Out of the launcher's group, into one by file, by a TCP store, and by the environment."""
    rank, size = c.get_rank(), c.get_world_size()
    stale = c.new_group()
    c.destroy_process_group()
    assert not c.is_initialized()
    assert not dist.is_initialized()
    assert (c.get_rank(), c.get_world_size()) == (0, 1)
    _raises("does not exist any more", lambda: c.barrier(stale))
    loose = c.new_group()
    place = {"rank": rank, "world_size": size}
    for backend, method, options in [
        ("gloo", f"file://{path}/store", {**place, "timeout": timedelta(seconds=30)}),
        ("tcp", f"file://{path}/again", {**place, "group_name": "name", "timeout": 30}),
        ("gloo", "env://", {"timeout": 30}),
    ]:
        if method == "env://":
            os.environ["MASTER_PORT"] = _free_port(path, rank)
        c.init_process_group(backend, method, **options)
        assert c.is_initialized()
        assert dist.is_initialized()
        assert (c.get_rank(), c.get_world_size()) == (rank, size)
        _raises("^trying to initialize torch.distributed twice!$", lambda: c.init_process_group("gloo"), RuntimeError)
        total = torch.tensor(1 + rank)
        c.all_reduce(total)
        assert int(total) == size * (size + 1) // 2
        _raises("was made before this process group", lambda: c.barrier(loose) if rank == 0 else _loose())
        c.barrier()
        c.destroy_process_group()
        assert not c.is_initialized()
    report({"rank": rank})


def _loose() -> None:
    raise UsageError("rank 0's handle was made before this process group")


def _free_port(path: str, rank: int) -> str:
    """A port that rank 0 found free, the same for every rank."""
    import socket

    name = f"{path}/port"
    if rank == 0:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        with open(name + ".part", "w") as file:
            file.write(port)
        os.rename(name + ".part", name)
        return port
    while not os.path.exists(name):
        time.sleep(0.01)
    with open(name) as file:
        return file.read()
