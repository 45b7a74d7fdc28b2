"""The calls that carry out a master's collective on every rank: functions and arguments, rank by rank.

Most collectives are called alike everywhere. ``gather`` and ``scatter`` take their list on one rank only, and a send
on one rank is a receive on another.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from modelexport.distributed.collectives import operations
from modelexport.distributed.collectives.groups import group
from modelexport.distributed.collectives.master_worker.remote_calls import Arguments
from modelexport.distributed.collectives.master_worker.remote_types import RemoteGroup, RemotePart, RemoteTensor
from modelexport.errors import UsageError

_ROOTED = {"gather": ("dst", "gather_list", "destination"), "scatter": ("src", "scatter_list", "source")}
_PAIRED = {"send": "dst", "isend": "dst", "recv": "src", "irecv": "src"}
_ALIKE = frozenset(
    {
        "_clear_group_cache", "all_gather", "all_gather_multigpu", "all_reduce", "all_reduce_multigpu", "all_to_all",
        "all_to_all_single", "barrier", "broadcast", "broadcast_multigpu", "destroy_process_group", "new_group",
        "reduce", "reduce_multigpu",
    }
)  # fmt: skip


@dataclass
class CollectiveCall:
    """A collective as all ranks together carry it out.

    Attributes:
        name: the collective that the master called.
        on: per rank that takes part: the function to call there, and its arguments in the form of ``Arguments``.
        tensors: those that the arguments name as plain.
        answer_from: the rank whose result the master's call returns; None where there is none to return.
        in_background: the master's call returns a request.
    """

    name: str
    on: dict[int, tuple[str, dict[str, Any]]]
    tensors: list[Tensor]
    answer_from: int | None = None
    in_background: bool = False


def plan_call(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, session: object, world_size: int
) -> CollectiveCall:
    """Works out who calls what.

    Args:
        name, args, kwargs: the collective and its arguments as the master's caller gave them.
        session: whose handles are taken.

    Raises:
        TypeError: arguments that the collective does not take, or that are not known in this mode.
        UsageError: a rank that does not exist or is not in the group, tensors of a pair that differ.
        RuntimeError: the errors of ``gather`` and ``scatter`` over their lists; a function that is not for this mode.
    """
    if name not in _ALIKE and name not in _ROOTED and name not in _PAIRED:
        raise RuntimeError(f"{name} is not for master-worker mode: it concerns one process")
    bound = inspect.signature(getattr(operations, name)).bind(*args, **kwargs).arguments
    given = {**bound.pop("kwargs", {}), **bound} if name in _ROOTED else dict(bound)
    background = bool(given.pop("async_op", False)) or name in ("isend", "irecv")
    chosen = given.get("group", group.WORLD)
    ranks = list(chosen.ranks) if isinstance(chosen, RemoteGroup) else list(range(world_size))
    if name in ("destroy_process_group", "new_group"):
        ranks = list(range(world_size))
    arguments = Arguments(session)
    call = CollectiveCall(name, {}, arguments.tensors, in_background=background)
    if name in _PAIRED:
        _plan_pair(call, given, arguments, ranks)
    elif name in _ROOTED:
        _plan_rooted(call, given, arguments, ranks)
    else:
        nodes = {key: arguments.encode(value) for key, value in given.items()}
        call.on = dict.fromkeys(ranks, (name, nodes))
    if 0 not in call.on and call.tensors:
        warnings.warn(
            f"{name} leaves the master's own tensors as they are: the master is not among ranks {sorted(call.on)}",
            stacklevel=4,
        )
    return call


def _plan_rooted(call: CollectiveCall, given: dict[str, Any], arguments: Arguments, ranks: list[int]) -> None:
    root_name, list_name, role = _ROOTED[call.name]
    if given.keys() - {"tensor", root_name, list_name, "group", "check"}:
        raise RuntimeError("got unexpected kwargs")
    root = given.pop(root_name, None)
    root = 0 if root is None else root
    values = given.pop(list_name, None)
    if root not in ranks:
        raise UsageError(f"{call.name}: {root_name}={root!r} is not among ranks {ranks}; name one of them")
    if values is None and (root == 0 or call.name == "scatter"):
        raise RuntimeError(f"{list_name} is a required argument in {call.name} {role}")
    if values and root != 0 and not all(isinstance(value, RemoteTensor) for value in values):
        what = "non-empty gather_list" if call.name == "gather" else "non-empty"
        raise RuntimeError(
            f"{what} can be given only to {call.name} {role}; rank {root} is that, and has only RemoteTensors"
        )
    nodes = {key: arguments.encode(value) for key, value in given.items()} | {root_name: root}
    # Nobody wants to see what a worker gathers where no list is given, but it must put it somewhere.
    scratch = {"scratch": nodes["tensor"], "count": len(ranks)}
    listed = scratch if values is None else arguments.encode(values)
    call.on = {rank: (call.name, nodes | {list_name: listed} if rank == root else nodes) for rank in ranks}


def _plan_pair(call: CollectiveCall, given: dict[str, Any], arguments: Arguments, ranks: Sequence[int]) -> None:
    sends = _PAIRED[call.name] == "dst"
    tensor, peer = given.pop("tensor"), given.pop(_PAIRED[call.name], None)
    here = tensor.rank if isinstance(tensor, RemotePart) else 0
    if peer is None:
        raise UsageError(f"{call.name}: name the sending rank with src; no worker sends unless the master says so")
    for rank in (here, peer):
        if rank not in ranks:
            raise UsageError(f"{call.name}: rank {rank!r} is not among ranks {list(ranks)}; name one of them")
    if here == peer:
        raise UsageError(f"{call.name}: rank {here} would be its own partner; name another")
    if isinstance(tensor, RemotePart):
        tensor = tensor.tensor
    if isinstance(tensor, RemoteTensor):
        one, other = ((tensor.shapes[rank], tensor.dtypes[rank]) for rank in (here, peer))
        if one != other:
            raise UsageError(
                f"{call.name}: rank {here}'s tensor is {list(one[0])} of {one[1]}, but rank {peer}'s is "
                f"{list(other[0])} of {other[1]}; they must be alike"
            )
    nodes = {key: arguments.encode(value) for key, value in {"tensor": tensor, **given}.items()}
    source, target = (here, peer) if sends else (peer, here)
    call.on = {source: ("send", nodes | {"dst": target}), target: ("recv", nodes | {"src": source})}
    # Of a request one may ask for the sender's rank, whichever rank receives.
    call.answer_from = None if call.name == "send" else target
