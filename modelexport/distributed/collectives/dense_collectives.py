"""broadcast, all_reduce, reduce, all_gather, gather, scatter and barrier on one tensor per rank.

Public through :mod:`modelexport.distributed.collectives`, whose docstring says what holds for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from modelexport.distributed.collectives.argument_check import Agreement
from modelexport.distributed.collectives.byte_transport import Parcel, check_list, check_tensor, copy_into
from modelexport.distributed.collectives.groups import AnyGroup, Members, group, members, outside
from modelexport.distributed.collectives.reductions import Operand, check_operation, op_name, reduce_op, torch_op
from modelexport.distributed.collectives.request import Sent, _DistributedRequest, settle
from modelexport.distributed.collectives.streams import collective


@collective
def broadcast(
    tensor: torch.Tensor,
    src: int,
    group: AnyGroup = group.WORLD,
    async_op: bool = False,
    *,
    check: bool | None = None,
) -> _DistributedRequest | None:
    """Gives every rank of the group the tensor of rank ``src``.

    Args:
        tensor: sent by ``src``, filled on the others; any dtype, the same shape on all.
        src: rank in the whole job.
        group, async_op, check: see :mod:`modelexport.distributed.collectives`.

    Raises:
        UsageError: ``src`` is not in the group, or ``tensor`` is not a dense tensor.
    """
    team = members(group)
    if outside("broadcast", team):
        return None
    with Agreement("broadcast", team, check) as call:
        team.check_root(src, "src")
        call.declare(check_tensor(tensor, "tensor"), src=src)
    if team.alone:
        return settle(None, (), async_op)
    parcel = Parcel(tensor, team.carrier(tensor.device), filled=team.rank == src)
    work = dist.broadcast(parcel.wire, src, group=team.process_group, async_op=async_op)
    return settle(work, [Sent(parcel) if team.rank == src else parcel], async_op)


@collective
def all_reduce(
    tensor: torch.Tensor,
    op: object = reduce_op.SUM,
    group: AnyGroup = group.WORLD,
    async_op: bool = False,
    *,
    check: bool | None = None,
) -> _DistributedRequest | None:
    """Reduces the ranks' tensors element by element; every rank gets the result, identical to the bit.

    Args:
        tensor: input and output, the same shape on all ranks. Any dtype but the 8-bit floats: narrow and unsigned
            integers wrap around, bool is logic (SUM: any, PRODUCT: all), complex numbers have SUM only. Sparse
            tensors are handed to torch.
        op: a ``reduce_op``, or torch's ``ReduceOp``.
        group, async_op, check: see :mod:`modelexport.distributed.collectives`.

    Raises:
        UsageError: the operation is not defined for the dtype.
    """
    team = members(group)
    if outside("all_reduce", team):
        return None
    sparse = isinstance(tensor, torch.Tensor) and tensor.layout != torch.strided
    with Agreement("all_reduce", team, check) as call:
        call.declare(tensor if sparse else check_tensor(tensor, "tensor"), op=op_name(op), layout=tensor.layout)
        if sparse:
            check_operation("all_reduce", tensor.dtype, op_name(op))
        else:
            operand = Operand("all_reduce", tensor, op, team.carrier(tensor.device))
    if team.alone:
        return settle(None, (), async_op)
    if sparse:
        work = dist.all_reduce(tensor, torch_op(op), group=team.process_group, async_op=async_op)
        return settle(work, (), async_op)
    work = dist.all_reduce(operand.wire, operand.op, group=team.process_group, async_op=async_op)
    return settle(work, [operand], async_op)


@collective
def reduce(
    tensor: torch.Tensor,
    dst: int,
    op: object = reduce_op.SUM,
    group: AnyGroup = group.WORLD,
    async_op: bool = False,
    *,
    check: bool | None = None,
) -> _DistributedRequest | None:
    """Reduces the ranks' tensors element by element into that of rank ``dst``; the others keep theirs as they are.

    Args:
        tensor: input, and on ``dst`` output; dtypes as in :func:`all_reduce`, dense.
        dst: rank in the whole job.
        op: a ``reduce_op``, or torch's ``ReduceOp``.
        group, async_op, check: see :mod:`modelexport.distributed.collectives`.

    Raises:
        UsageError: ``dst`` is not in the group, or the operation is not defined for the dtype.
    """
    team = members(group)
    if outside("reduce", team):
        return None
    receives = team.rank == dst
    with Agreement("reduce", team, check) as call:
        team.check_root(dst, "dst")
        call.declare(check_tensor(tensor, "tensor"), dst=dst, op=op_name(op))
        # gloo keeps partial results in the tensors of the ranks that it passes.
        operand = Operand("reduce", tensor, op, team.carrier(tensor.device), private=not receives)
    if team.alone:
        return settle(None, (), async_op)
    work = dist.reduce(operand.wire, dst, operand.op, group=team.process_group, async_op=async_op)
    return settle(work, [operand if receives else Sent(operand)], async_op)


@collective
def all_gather(
    tensor_list: Sequence[torch.Tensor],
    tensor: torch.Tensor,
    group: AnyGroup = group.WORLD,
    async_op: bool = False,
    *,
    check: bool | None = None,
) -> _DistributedRequest | None:
    """Gives every rank the tensors of all.

    Args:
        tensor_list: filled; one tensor per member, in the group's order, each of the shape and dtype of ``tensor``.
        tensor: this rank's; any dtype, the same shape on all ranks.
        group, async_op, check: see :mod:`modelexport.distributed.collectives`.

    Raises:
        UsageError: ``tensor_list`` has another length, or other shapes or dtypes.
    """
    team = members(group)
    if outside("all_gather", team):
        return None
    with Agreement("all_gather", team, check) as call:
        outputs = check_list(tensor_list, team.size, check_tensor(tensor, "tensor"), "tensor_list")
        call.declare(tensor)
    if team.alone:
        copy_into(outputs[0], tensor)
        return settle(None, (), async_op)
    device = team.carrier(tensor.device)
    mine = Parcel(tensor, device)
    parcels = [Parcel(output, device, filled=False) for output in team.torch_order(outputs)]
    work = dist.all_gather([parcel.wire for parcel in parcels], mine.wire, group=team.process_group, async_op=async_op)
    return settle(work, [*parcels, Sent(mine)], async_op)


@collective
def gather(tensor: torch.Tensor, **kwargs: Any) -> _DistributedRequest | None:
    """Gathers the ranks' tensors on one of them.

    Args:
        tensor: this rank's; any dtype, the same shape on all ranks.
        dst (int): rank in the whole job; where it is left out, this rank is the destination.
        gather_list (list[Tensor]): on the destination only: filled; one tensor per member, in the group's order.
        group, async_op, check: see :mod:`modelexport.distributed.collectives`.

    Raises:
        RuntimeError: an unknown argument; the destination has no ``gather_list``, or another rank has one.
        UsageError: ``dst`` is not in the group; ``gather_list`` has another length, or other shapes or dtypes.
    """
    team, dst, gather_list, async_op, check = _rooted_arguments("dst", "gather_list", kwargs)
    if outside("gather", team):
        return None
    receives = team.rank == dst
    outputs: list[torch.Tensor] = []
    with Agreement("gather", team, check) as call:
        if receives and gather_list is None:
            raise RuntimeError("gather_list is a required argument in gather destination")
        if not receives and gather_list:
            raise RuntimeError("non-empty gather_list can be given only to gather destination")
        team.check_root(dst, "dst")
        call.declare(check_tensor(tensor, "tensor"), dst=dst)
        if receives:
            outputs = check_list(gather_list, team.size, tensor, "gather_list")
    if team.alone:
        copy_into(outputs[0], tensor)
        return settle(None, (), async_op)
    device = team.carrier(tensor.device)
    mine = Parcel(tensor, device)
    parcels = [Parcel(output, device, filled=False) for output in team.torch_order(outputs)] if receives else []
    wires = [parcel.wire for parcel in parcels] or None
    work = dist.gather(mine.wire, wires, dst=dst, group=team.process_group, async_op=async_op)
    return settle(work, [*parcels, Sent(mine)], async_op)


@collective
def scatter(tensor: torch.Tensor, **kwargs: Any) -> _DistributedRequest | None:
    """Gives each rank one of the tensors of one rank.

    Args:
        tensor: filled; any dtype, the same shape on all ranks.
        src (int): rank in the whole job; where it is left out, this rank is the source.
        scatter_list (list[Tensor]): on the source only: one tensor per member, in the group's order.
        group, async_op, check: see :mod:`modelexport.distributed.collectives`.

    Raises:
        RuntimeError: an unknown argument; the source has no ``scatter_list``, or another rank has one.
        UsageError: ``src`` is not in the group; ``scatter_list`` has another length, or other shapes or dtypes.
    """
    team, src, scatter_list, async_op, check = _rooted_arguments("src", "scatter_list", kwargs)
    if outside("scatter", team):
        return None
    sends = team.rank == src
    inputs: list[torch.Tensor] = []
    with Agreement("scatter", team, check) as call:
        if sends and scatter_list is None:
            raise RuntimeError("scatter_list is a required argument in scatter source")
        if not sends and scatter_list:
            raise RuntimeError("non-empty can be given only to scatter source")
        team.check_root(src, "src")
        call.declare(check_tensor(tensor, "tensor"), src=src)
        if sends:
            inputs = check_list(scatter_list, team.size, tensor, "scatter_list")
    if team.alone:
        copy_into(tensor, inputs[0])
        return settle(None, (), async_op)
    device = team.carrier(tensor.device)
    mine = Parcel(tensor, device, filled=False)
    parcels = [Parcel(value, device) for value in team.torch_order(inputs)] if sends else []
    wires = [parcel.wire for parcel in parcels] or None
    work = dist.scatter(mine.wire, wires, src=src, group=team.process_group, async_op=async_op)
    return settle(work, [mine, *map(Sent, parcels)], async_op)


@collective
def barrier(
    group: AnyGroup = group.WORLD, async_op: bool = False, *, check: bool | None = None
) -> _DistributedRequest | None:
    """Returns when every rank of the group has called it.

    Args:
        group, async_op, check: see :mod:`modelexport.distributed.collectives`.
    """
    team = members(group)
    if outside("barrier", team):
        return None
    with Agreement("barrier", team, check):
        pass
    if team.alone:
        return settle(None, (), async_op)
    return settle(dist.barrier(group=team.process_group, async_op=async_op), (), async_op)


def _rooted_arguments(root_name: str, list_name: str, given: dict[str, Any]) -> tuple[Members, int, Any, bool, Any]:
    """The keyword arguments of gather and scatter: who takes part, the root, its list, async_op, check."""
    known = {root_name, list_name, "group", "async_op", "check"}
    if given.keys() - known:
        raise RuntimeError("got unexpected kwargs")
    team = members(given.get("group", group.WORLD))
    root = given.get(root_name)
    return (
        team,
        team.rank if root is None else root,
        given.get(list_name),
        given.get("async_op", False),
        given.get("check"),
    )
