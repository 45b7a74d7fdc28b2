"""Collectives on several tensors per rank, one for each of its devices (or several on one device, or on the CPU).

torch removed these in 2.2; they are built on the collectives of one tensor per rank. Public through
:mod:`modelexport.distributed.collectives`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from modelexport.distributed.collectives.argument_check import Agreement
from modelexport.distributed.collectives.byte_transport import check_list, check_tensor, copy_into
from modelexport.distributed.collectives.dense_collectives import all_gather, broadcast
from modelexport.distributed.collectives.groups import AnyGroup, group, members, outside
from modelexport.distributed.collectives.reductions import Operand, op_name, reduce_op
from modelexport.distributed.collectives.streams import collective
from modelexport.errors import UsageError


@collective
def broadcast_multigpu(
    tensor_list: Sequence[torch.Tensor], src: int, group: AnyGroup = group.WORLD, *, check: bool | None = None
) -> None:
    """Gives every tensor of every rank the value of rank ``src``'s first one.

    Args:
        tensor_list: the same number of tensors on every rank, all of one shape and dtype (any), on any devices.
        src: rank in the whole job.
        group, check: see :mod:`modelexport.distributed.collectives`.

    Raises:
        UsageError: the list is empty or its tensors differ, or ``src`` is not in the group.
    """
    team = members(group)
    if outside("broadcast_multigpu", team):
        return
    with Agreement("broadcast_multigpu", team, check) as call:
        team.check_root(src, "src")
        tensors = _tensors(tensor_list)
        call.declare(tensors[0], src=src, count=len(tensors))
    broadcast(tensors[0], src, group, check=False)
    for tensor in tensors[1:]:
        copy_into(tensor, tensors[0])


@collective
def all_reduce_multigpu(
    tensor_list: Sequence[torch.Tensor],
    op: object = reduce_op.SUM,
    group: AnyGroup = group.WORLD,
    *,
    check: bool | None = None,
) -> None:
    """Reduces all tensors of all ranks element by element; every one of them becomes the result, identical to the bit.

    Args:
        tensor_list: the same number of tensors on every rank, all of one shape and dtype (as for ``all_reduce``,
            dense), on any devices.
        op: a ``reduce_op``, or torch's ``ReduceOp``.
        group, check: see :mod:`modelexport.distributed.collectives`.

    Raises:
        UsageError: the list is empty or its tensors differ, or the operation is not defined for the dtype.
    """
    team = members(group)
    if outside("all_reduce_multigpu", team):
        return
    with Agreement("all_reduce_multigpu", team, check) as call:
        tensors = _tensors(tensor_list)
        call.declare(tensors[0], op=op_name(op), count=len(tensors))
        total = _local_total("all_reduce_multigpu", tensors, op, team.carrier(tensors[0].device))
    if not team.alone:
        dist.all_reduce(total.wire, total.op, group=team.process_group)
    total.unpack()
    for tensor in tensors[1:]:
        copy_into(tensor, tensors[0])


@collective
def reduce_multigpu(
    tensor_list: Sequence[torch.Tensor],
    dst: int,
    op: object = reduce_op.SUM,
    group: AnyGroup = group.WORLD,
    *,
    check: bool | None = None,
) -> None:
    """Reduces all tensors of all ranks element by element into rank ``dst``'s first one; no other one changes.

    Args:
        tensor_list: the same number of tensors on every rank, all of one shape and dtype (as for ``all_reduce``,
            dense), on any devices.
        dst: rank in the whole job.
        op: a ``reduce_op``, or torch's ``ReduceOp``.
        group, check: see :mod:`modelexport.distributed.collectives`.

    Raises:
        UsageError: the list is empty or its tensors differ, ``dst`` is not in the group, or the operation is not
            defined for the dtype.
    """
    team = members(group)
    if outside("reduce_multigpu", team):
        return
    with Agreement("reduce_multigpu", team, check) as call:
        team.check_root(dst, "dst")
        tensors = _tensors(tensor_list)
        call.declare(tensors[0], dst=dst, op=op_name(op), count=len(tensors))
        total = _local_total("reduce_multigpu", tensors, op, team.carrier(tensors[0].device))
    if not team.alone:
        dist.reduce(total.wire, dst, total.op, group=team.process_group)
    if team.rank == dst:
        total.unpack()


@collective
def all_gather_multigpu(
    output_tensor_lists: Sequence[Sequence[torch.Tensor]],
    input_tensor_list: Sequence[torch.Tensor],
    group: AnyGroup = group.WORLD,
    *,
    check: bool | None = None,
) -> None:
    """Gives every device of every rank the tensors of all.

    Args:
        output_tensor_lists: filled; n lists of W * n tensors: tensor j of the group's k-th rank arrives in
            ``output_tensor_lists[i][k * n + j]`` for every i.
        input_tensor_list: n tensors, the same number on every rank, all of one shape and dtype (any), on any devices.
        group, check: see :mod:`modelexport.distributed.collectives`.

    Raises:
        UsageError: a list has another length, or tensors differ in shape or dtype.
    """
    team = members(group)
    if outside("all_gather_multigpu", team):
        return
    with Agreement("all_gather_multigpu", team, check) as call:
        inputs = _tensors(input_tensor_list, "input_tensor_list")
        count = len(inputs)
        if len(output_tensor_lists) != count:
            raise UsageError(
                f"output_tensor_lists has {len(output_tensor_lists)} lists; it must have {count}, one per tensor of "
                f"input_tensor_list"
            )
        outputs = [
            check_list(tensors, team.size * count, inputs[0], f"output_tensor_lists[{index}]", "tensor of any rank")
            for index, tensors in enumerate(output_tensor_lists)
        ]
        call.declare(inputs[0], count=count)
    for index, tensor in enumerate(inputs):
        all_gather(outputs[0][index::count], tensor, group, check=False)
    for tensors in outputs[1:]:
        for target, source in zip(tensors, outputs[0], strict=True):
            copy_into(target, source)


def _tensors(values: Sequence[torch.Tensor], name: str = "tensor_list") -> list[torch.Tensor]:
    if not isinstance(values, Sequence) or not values:
        raise UsageError(f"{name} must be a list of at least one tensor, one per device of this rank; got {values!r}")
    return check_list(values, len(values), check_tensor(values[0], f"{name}[0]"), name, "device")


def _local_total(call: str, tensors: list[torch.Tensor], op: object, device: torch.device) -> Operand:
    """This rank's tensors reduced to one operand, which leaves all of them untouched until it is unpacked."""
    total = Operand(call, tensors[0], op, device, private=True)
    for tensor in tensors[1:]:
        total.combine(Operand(call, tensor, op, device, private=True))
    return total
