"""all_to_all with autograd and with checks that every rank agrees on."""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.distributed as dist

from modelexport.errors import UsageError

_MAX_DIMS = 8


def exchange(input: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """See :func:`modelexport.distributed.launch.all_to_all`."""
    size = dist.get_world_size(group) if dist.is_initialized() else 1
    if size < 0:
        raise UsageError("all_to_all: this rank does not belong to the group")
    _check(input, size, group)
    return _AllToAll.apply(input, group, size)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, group: dist.ProcessGroup | None, size: int) -> torch.Tensor:
        ctx.group, ctx.size = group, size
        return _swap(input, group, size)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        # Chunk j of rank i went to chunk i of rank j; its gradient goes the same way back.
        return _AllToAll.apply(gradient, ctx.group, ctx.size), None, None


def _swap(input: torch.Tensor, group: dist.ProcessGroup | None, size: int) -> torch.Tensor:
    source = input.resolve_conj().resolve_neg().contiguous()
    if size == 1 or source.numel() == 0:
        return source.clone()
    # As bytes: gloo refuses int16, uint16, complex and 8-bit floats, and no arithmetic is done on the way.
    sent = source.reshape(-1).view(torch.uint8).to(_device_of(group, input))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received.to(input.device).view(source.dtype).view(source.shape)


def _device_of(group: dist.ProcessGroup | None, input: torch.Tensor) -> torch.device:
    """Where the group's back end can take the data from."""
    if input.device.type == "cpu" and dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    if input.device.type != "cpu" and dist.get_backend(group) == "gloo":
        return torch.device("cpu")
    return input.device


def _check(input: torch.Tensor, size: int, group: dist.ProcessGroup | None) -> None:
    """Raises the same error on every rank where any rank's input cannot take part."""
    dims = list(input.shape[:_MAX_DIMS])
    rest = zlib.crc32(repr((tuple(input.shape), str(input.dtype))).encode())
    mine = torch.tensor([input.dim(), rest, *dims, *[0] * (_MAX_DIMS - len(dims))], dtype=torch.int64)
    headers = [mine]
    if size > 1:
        mine = mine.to(_device_of(group, input))
        headers = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(headers, mine, group=group)
    rows = [header.tolist() for header in headers]
    shapes = [tuple(row[2 : 2 + min(row[0], _MAX_DIMS)]) for row in rows]
    for member, shape in enumerate(shapes):
        who = dist.get_global_rank(group, member) if group is not None else member
        if not shape:
            raise UsageError(f"all_to_all: the input of rank {who} is a 0-dim tensor; it needs a dim 0 to split")
        if shape[0] % size:
            raise UsageError(
                f"all_to_all: dim 0 of the input of rank {who} has size {shape[0]} (shape {shape}), "
                f"which is not divisible by the group's {size} ranks"
            )
        if rows[member][:2] != rows[0][:2]:
            first = dist.get_global_rank(group, 0) if group is not None else 0
            raise UsageError(
                f"all_to_all: rank {who} brings shape {shape} and rank {first} brings {shapes[0]}, or another dtype; "
                f"every rank must bring the same"
            )
