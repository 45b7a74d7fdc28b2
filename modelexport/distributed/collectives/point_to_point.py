"""send, recv, isend and irecv. Public through :mod:`modelexport.distributed.collectives`."""

from __future__ import annotations

import torch
import torch.distributed as dist

from modelexport.distributed.collectives.byte_transport import Parcel, check_tensor
from modelexport.distributed.collectives.groups import AnyGroup, Members, group, members, outside
from modelexport.distributed.collectives.request import Sent, _DistributedRequest
from modelexport.distributed.collectives.streams import collective
from modelexport.errors import UsageError


@collective
def isend(tensor: torch.Tensor, dst: int, group: AnyGroup = group.WORLD, tag: int = 0) -> _DistributedRequest | None:
    """Starts to send a tensor.

    Args:
        tensor: any dtype; not to be changed until the request is complete.
        dst: rank in the whole job, another than this one.
        group: dst and this rank belong to it.
        tag: the receive must name the same one.

    Returns:
        A request; None on a rank outside the group.

    Raises:
        UsageError: ``dst`` is this rank or not in the group, or this process is alone.
    """
    team = members(group)
    if outside("isend", team):
        return None
    _check_peer("send", team, dst, "dst")
    parcel = Parcel(check_tensor(tensor, "tensor"), team.carrier(tensor.device))
    work = dist.isend(parcel.wire, dst, group=team.process_group, tag=tag)
    return _DistributedRequest(work, [Sent(parcel)])


@collective
def irecv(
    tensor: torch.Tensor, src: int | None = None, group: AnyGroup = group.WORLD, tag: int = 0
) -> _DistributedRequest | None:
    """Starts to receive a tensor, which holds the data once the request is complete.

    Args:
        tensor: filled; of the sender's dtype and shape.
        src: rank in the whole job, another than this one; None for any (``source_rank()`` of the request tells).
        group: src and this rank belong to it.
        tag: that of the send.

    Returns:
        A request; None on a rank outside the group.

    Raises:
        UsageError: ``src`` is this rank or not in the group, or this process is alone; the back end cannot receive
            from any source.
    """
    team = members(group)
    if outside("irecv", team):
        return None
    _check_peer("receive", team, src, "src")
    device = team.carrier(check_tensor(tensor, "tensor").device)
    if src is None and device.type == "cuda":
        raise UsageError("NCCL cannot receive from any source; name the sending rank with src")
    parcel = Parcel(tensor, device, filled=False)
    work = dist.irecv(parcel.wire, src, group=team.process_group, tag=tag)
    numbered = team.torch_order(team.ranks)
    return _DistributedRequest(work, [parcel], lambda work: numbered[work._source_rank()] if src is None else src)


@collective
def send(tensor: torch.Tensor, dst: int, group: AnyGroup = group.WORLD, tag: int = 0) -> None:
    """Sends a tensor; returns when it may be changed again. Arguments and errors: :func:`isend`."""
    if outside("send", members(group)):
        return
    request = isend(tensor, dst, group, tag)
    assert request is not None
    request.wait()


@collective
def recv(tensor: torch.Tensor, src: int | None = None, group: AnyGroup = group.WORLD, tag: int = 0) -> int:
    """Receives a tensor. Arguments and errors: :func:`irecv`.

    Returns:
        The sender's rank in the whole job; -1 on a rank outside the group.
    """
    if outside("recv", members(group)):
        return -1
    request = irecv(tensor, src, group, tag)
    assert request is not None
    request.wait()
    return request.source_rank()


def _check_peer(verb: str, team: Members, peer: int | None, name: str) -> None:
    if team.alone:
        why = "there is no process group" if team.process_group is None else "the group has one rank"
        raise UsageError(f"cannot {verb}: {why}, so this rank has nobody to {verb} {'to' if name == 'dst' else 'from'}")
    if peer is None:
        return
    team.check_root(peer, name)
    if peer == team.rank:
        raise UsageError(f"cannot {verb}: {name}={peer} is this rank itself; use tensor.copy_()")
