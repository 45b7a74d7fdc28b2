"""all_to_all: differentiable for :mod:`modelexport.distributed.launch`, and as a collective in its two forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from modelexport.distributed.collectives.argument_check import Agreement
from modelexport.distributed.collectives.byte_transport import (
    as_wire,
    can_travel,
    check_tensor,
    copy_into,
    describe,
    flat_bytes,
)
from modelexport.distributed.collectives.groups import AnyGroup, Members, group, members, outside
from modelexport.distributed.collectives.request import _DistributedRequest, settle
from modelexport.distributed.collectives.streams import collective
from modelexport.errors import UsageError
from modelexport.system.dtypes import torch_name


def exchange(input: torch.Tensor, group: AnyGroup) -> torch.Tensor:
    """See :func:`modelexport.distributed.launch.all_to_all`."""
    team = members(group)
    if not team.is_member:
        raise UsageError("all_to_all: this rank does not belong to the group")
    with Agreement("all_to_all", team, check=True) as call:
        _split_sizes(check_tensor(input, "the input"), None, team, "the input")
        call.declare(input)
    return _AllToAll.apply(input, team)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, team: Members) -> torch.Tensor:
        ctx.team = team
        output = torch.empty_like(input, memory_format=torch.contiguous_format)
        _swap(output.tensor_split(team.size), input.tensor_split(team.size), team, async_op=False)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        # Chunk j of rank i went to chunk i of rank j; its gradient goes the same way back.
        return _AllToAll.apply(gradient, ctx.team), None


@collective
def all_to_all(
    output_tensor_list: Sequence[torch.Tensor],
    input_tensor_list: Sequence[torch.Tensor],
    group: AnyGroup = group.WORLD,
    async_op: bool = False,
    *,
    check: bool | None = None,
) -> _DistributedRequest | None:
    """Sends tensor i of each rank to the group's i-th rank. Not differentiable: see ``launch.all_to_all`` for that.

    Args:
        output_tensor_list: filled; tensor i comes from the group's i-th rank and has the shape of what that sends.
        input_tensor_list: one tensor per member, in the group's order; any dtype (the same for all), any shapes.
        group, async_op, check: see :mod:`modelexport.distributed.collectives`.

    Raises:
        UsageError: a list has another length than the group, or dtypes or devices differ.
    """
    team = members(group)
    if outside("all_to_all", team):
        return None
    with Agreement("all_to_all", team, check) as call:
        outputs = _check_chunks(output_tensor_list, team, "output_tensor_list")
        inputs = _check_chunks(input_tensor_list, team, "input_tensor_list")
        _check_same_kind(outputs[0], inputs[0])
        call.declare(dtype=torch_name(inputs[0].dtype), device=inputs[0].device.type)
        call.exchanges(inputs, outputs)
    return _swap(outputs, inputs, team, async_op)


@collective
def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: AnyGroup = group.WORLD,
    async_op: bool = False,
    *,
    check: bool | None = None,
) -> _DistributedRequest | None:
    """Sends chunk i of dim 0 of each rank's input to the group's i-th rank.

    Args:
        output: ``[n, ...]``, filled: chunk i comes from the group's i-th rank.
        input: ``[m, ...]``, any dtype.
        output_split_sizes, input_split_sizes: sizes of the chunks; None or empty for equal ones.
        group, async_op, check: see :mod:`modelexport.distributed.collectives`.

    Raises:
        UsageError: a 0-dim tensor, a dim 0 that the group does not divide or that the sizes do not add up to, or
            an output unlike the input in dtype, device or the other dims.
    """
    team = members(group)
    if outside("all_to_all_single", team):
        return None
    with Agreement("all_to_all_single", team, check) as call:
        taken = _split_sizes(check_tensor(output, "output"), output_split_sizes, team, "output")
        given = _split_sizes(check_tensor(input, "input"), input_split_sizes, team, "input")
        _check_same_kind(output, input)
        if output.shape[1:] != input.shape[1:]:
            raise UsageError(f"output is {describe(output)} and input {describe(input)}; only dim 0 may differ")
        call.declare(dtype=torch_name(input.dtype), device=input.device.type)
        outputs, inputs = output.detach().split(taken), input.detach().split(given)
        call.exchanges(inputs, outputs)
    direct = _direct(output, input, team)
    if direct is None:
        return _swap(outputs, inputs, team, async_op)
    # The sizes are always given: with them gloo sends the same messages as for ranks that have to stage.
    work = dist.all_to_all_single(*direct, taken, given, group=team.process_group, async_op=async_op)
    return settle(work, (), async_op)


class _Chunks:
    """One flat run of bytes per member on its way in, to be put into ``targets``."""

    def __init__(self, targets: Sequence[torch.Tensor], wire: torch.Tensor, sent: torch.Tensor | None) -> None:
        self._targets, self._wire = targets, wire
        self._sent = sent  # kept alive until it has been sent

    def unpack(self) -> None:
        pieces = self._wire.split([target.numel() * target.itemsize for target in self._targets])
        for target, piece in zip(self._targets, pieces, strict=True):
            if target.numel():
                copy_into(target, piece.view(target.dtype).view(target.shape))


def _swap(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], team: Members, async_op: bool
) -> _DistributedRequest | None:
    """Chunk i of ``inputs`` to the i-th member, chunk i of ``outputs`` from it, as bytes."""
    if team.alone:
        copy_into(outputs[0], inputs[0])
        return settle(None, (), async_op)
    device = team.carrier(inputs[0].device)
    inputs, outputs = team.torch_order(inputs), team.torch_order(outputs)
    pieces = [_bytes(chunk) for chunk in inputs]
    sent = torch.cat(pieces).to(device)
    taken = [chunk.numel() * chunk.itemsize for chunk in outputs]
    given = [piece.numel() for piece in pieces]
    received = torch.empty(sum(taken), dtype=torch.uint8, device=device)
    work = dist.all_to_all_single(received, sent, taken, given, group=team.process_group, async_op=async_op)
    return settle(work, [_Chunks(outputs, received, sent if async_op else None)], async_op)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return flat_bytes(tensor.detach().resolve_conj().resolve_neg().contiguous())


def _direct(output: torch.Tensor, input: torch.Tensor, team: Members) -> tuple[torch.Tensor, torch.Tensor] | None:
    """``output`` and ``input`` in the form in which the back end exchanges them in place; None where it cannot."""
    device = team.carrier(input.device)
    if team.alone or team.reordered or not can_travel(output, device) or not can_travel(input, device):
        return None
    return as_wire(output.detach()), as_wire(input.detach())


def _split_sizes(tensor: torch.Tensor, sizes: Sequence[int] | None, team: Members, name: str) -> list[int]:
    if not tensor.dim():
        raise UsageError(f"{name} is a 0-dim tensor; it needs a dim 0 to split")
    if not sizes:
        if tensor.shape[0] % team.size:
            raise UsageError(
                f"dim 0 of {name} has size {tensor.shape[0]} (shape {tuple(tensor.shape)}), "
                f"which is not divisible by the group's {team.size} ranks"
            )
        return [tensor.shape[0] // team.size] * team.size
    found = [int(size) for size in sizes]
    if len(found) != team.size or min(found) < 0 or sum(found) != tensor.shape[0]:
        raise UsageError(
            f"{name}_split_sizes {found} must be {team.size} sizes, one per rank, which add up to the "
            f"{tensor.shape[0]} rows of {name}; they add up to {sum(found)}"
        )
    return found


def _check_chunks(values: Sequence[torch.Tensor], team: Members, name: str) -> list[torch.Tensor]:
    if not isinstance(values, Sequence) or len(values) != team.size:
        found = f"{len(values)} tensors" if isinstance(values, Sequence) else type(values).__name__
        raise UsageError(f"{name} has {found}; it must have {team.size}, one per rank")
    chunks = [check_tensor(value, f"{name}[{index}]") for index, value in enumerate(values)]
    for chunk in chunks[1:]:
        _check_same_kind(chunk, chunks[0])
    return chunks


def _check_same_kind(one: torch.Tensor, other: torch.Tensor) -> None:
    if one.dtype != other.dtype or one.device != other.device:
        raise UsageError(
            f"tensors of {torch_name(one.dtype)} on {one.device} and of {torch_name(other.dtype)} on {other.device} "
            f"cannot be swapped for each other; use one dtype and device"
        )
