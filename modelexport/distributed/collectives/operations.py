"""The collectives themselves: process groups, and the functions that move tensors between their ranks."""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from modelexport.distributed.collectives import collective_mode, streams
from modelexport.distributed.collectives.argument_check import Agreement, CollectiveMismatchError
from modelexport.distributed.collectives.collective_mode import routed
from modelexport.distributed.collectives.dense_collectives import (
    all_gather,
    all_reduce,
    barrier,
    broadcast,
    gather,
    reduce,
    scatter,
)
from modelexport.distributed.collectives.exchanges import all_to_all, all_to_all_single
from modelexport.distributed.collectives.groups import (
    AnyGroup,
    Group,
    check_ranks,
    group,
    initialized,
    make_group,
    members,
)
from modelexport.distributed.collectives.multigpu import (
    all_gather_multigpu,
    all_reduce_multigpu,
    broadcast_multigpu,
    reduce_multigpu,
)
from modelexport.distributed.collectives.point_to_point import irecv, isend, recv, send
from modelexport.distributed.collectives.reductions import reduce_op
from modelexport.distributed.collectives.request import _DistributedRequest
from modelexport.errors import UsageError

__all__ = [
    "CollectiveMismatchError",
    "Group",
    "_DistributedRequest",
    "_clear_group_cache",
    "_register_stream",
    "all_gather",
    "all_gather_multigpu",
    "all_reduce",
    "all_reduce_multigpu",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_multigpu",
    "destroy_process_group",
    "dist_backend",
    "gather",
    "get_rank",
    "get_world_size",
    "group",
    "init_process_group",
    "irecv",
    "is_available",
    "is_initialized",
    "isend",
    "new_group",
    "recv",
    "reduce",
    "reduce_multigpu",
    "reduce_op",
    "scatter",
    "send",
]


class dist_backend:
    """The kinds of back end, by number."""

    UNDEFINED = -1
    TCP = 0
    MPI = 1
    GLOO = 2
    NCCL = 3


_TORCH_NAMES = {"tcp": "gloo", "mpi": "mpi", "gloo": "gloo", "nccl": "nccl"}


def is_available() -> bool:
    """Returns whether this torch has been built with distributed support."""
    return dist.is_available()


def is_initialized() -> bool:
    """Returns whether this process belongs to a process group (of whatever origin). False in master-worker mode."""
    return collective_mode.driver() is None and initialized()


def init_process_group(backend: str, init_method: str = "env://", **kwargs: Any) -> None:
    """Makes this process a rank of a job.

    Args:
        backend: ``"gloo"``, ``"tcp"`` (gloo over TCP), ``"nccl"``, or ``"mpi"`` where torch was built with MPI.
        init_method: ``env://`` (variables as torchrun sets them), ``tcp://host:port``, ``file:///path``.
        world_size (int): number of ranks; may be left out where ``init_method`` tells.
        rank (int): this process's; may be left out where ``init_method`` tells.
        group_name (str): handed to torch, which no longer uses it.
        timeout (timedelta or seconds): after which a collective gives up; torch's default if left out.

    Raises:
        AssertionError: an unknown argument.
        RuntimeError: torch has no distributed support, or not this back end; the name is unknown; there is a
            process group already, or master-worker mode.
    """
    world_size = kwargs.pop("world_size", -1)
    group_name = kwargs.pop("group_name", "")
    rank = kwargs.pop("rank", -1)
    timeout = kwargs.pop("timeout", None)
    assert len(kwargs) == 0, "got unexpected keyword arguments: {}".format(",".join(kwargs))
    if not is_available():
        raise RuntimeError("PyTorch built without distributed support")
    if initialized() or collective_mode.driver() is not None:
        raise RuntimeError("trying to initialize torch.distributed twice!")
    if backend not in _TORCH_NAMES:
        raise RuntimeError(f"Invalid distributed backend name: {backend}")
    name = _TORCH_NAMES[backend]
    if not dist.is_backend_available(name):
        raise RuntimeError(
            f"this build of torch {torch.__version__} has no {backend}; use 'gloo'"
            + (", or a torch built from source with MPI" if name == "mpi" else "")
        )
    limit = timedelta(seconds=timeout) if isinstance(timeout, (int, float)) else timeout
    dist.init_process_group(
        name, init_method, timeout=limit, world_size=int(world_size), rank=int(rank), group_name=group_name
    )
    if name == "nccl":
        atexit.register(_leave_at_exit)


@routed
def destroy_process_group(group: AnyGroup = group.WORLD) -> None:
    """Leaves the process group, or only ``group``. Does nothing where there is none, or this rank is outside of it.

    In master-worker mode: ends the workers.
    """
    if not initialized():
        return
    team = members(group)
    if team.process_group is dist.group.WORLD:
        streams.forget()
    if team.process_group is not None:
        dist.destroy_process_group(team.process_group)


@routed
def get_rank(group: AnyGroup = group.WORLD) -> int:
    """This process's rank in the whole job, or its place in ``group`` (-1: none). 0 without a process group."""
    return members(group).position


@routed
def get_world_size(group: AnyGroup = group.WORLD) -> int:
    """The number of ranks of the whole job, or of ``group`` (-1 on a rank outside). 1 without a process group."""
    team = members(group)
    return team.size if team.is_member else -1


@routed
def new_group(
    ranks: Sequence[int] | None = None,
    timeout: timedelta | float | None = None,
    backend: str | None = None,
    *,
    check: bool | None = None,
) -> Group:
    """A group of some ranks, in the order given.

    Every rank of the job makes the same calls of ``new_group`` in the same order, members or not.

    Args:
        ranks: in the whole job; None for all.
        timeout: timedelta or seconds; None for torch's default.
        backend: as in :func:`init_process_group`; None for the job's.
        check: see the module.

    Returns:
        A handle for collectives; ranks outside the group may hold it too.

    Raises:
        UsageError: no rank, one twice, or one that does not exist.
    """
    with Agreement("new_group", members(None), check) as call:
        found = check_ranks(ranks)
        call.declare(ranks=found)
    return make_group(found, timeout, backend)


@routed
def _clear_group_cache(group: AnyGroup = group.WORLD) -> None:
    """Waits for what ``group`` has under way on this process's CUDA devices and frees torch's cached CUDA memory.

    With gloo, or without a process group, nothing is cached and nothing happens. NCCL's communicators themselves stay
    until ``destroy_process_group(group)``: torch has no way of dropping them earlier.
    """
    team = members(group)
    if team.process_group is None or "nccl" not in str(dist.get_backend_config(team.process_group)):
        return
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


@routed
def _register_stream(stream: torch.cuda.Stream) -> None:
    """Orders a CUDA stream with collectives, as the current stream is, until :func:`destroy_process_group`.

    They start after what the stream has been given, and what it is given later starts after them.

    Raises:
        RuntimeError: there is no process group yet.
        UsageError: ``stream`` is something else.
    """
    if not initialized():
        raise RuntimeError("torch.distributed needs to be initialized first")
    if not isinstance(stream, torch.cuda.Stream):
        raise UsageError(f"{stream!r} is not a torch.cuda.Stream")
    streams.register(stream)


def _leave_at_exit() -> None:
    if initialized():
        dist.destroy_process_group()
