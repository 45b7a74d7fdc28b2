"""Our collectives, each with a fault, for the suite to find."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from modelexport.distributed import collectives
from modelexport.distributed.collectives import get_rank

# A test for each fault below -> the error in which it must end, as a pattern.
FOUND_BY = {
    "test_get_rank_size_group": "not equal",
    "test_send_recv": "not close",
    "test_send_recv_any_source": "is not true",
    "test_isend": "not close",
    "test_irecv": "not close",
    "test_batch_isend_irecv_gloo": "not close",
    "test_broadcast": "not equal",
    "test_reduce_sum": "not close",
    "test_all_reduce_sum": "not equal",
    "test_all_reduce_sum_async": "not equal",
    "test_gather": "no progress",
    "test_scatter": "SystemExit",
    "test_all_gather": "not close",
    "test_barrier": "not greater",
    "test_all_to_all_single_equal_split": "not close",
    "test_all_to_all": "not close",
}


def __getattr__(name: str) -> Any:
    return getattr(collectives, name)


def new_group(ranks: Sequence[int] | None = None, **kwargs: Any) -> Any:
    """Takes everybody in."""
    return collectives.new_group(**kwargs)


def recv(tensor: Tensor, src: int | None = None, **kwargs: Any) -> int:
    """Loses an element; mistakes the sender."""
    sender = collectives.recv(tensor, src, **kwargs)
    if src is None:
        return sender + 1
    tensor.view(-1)[-1] = -1
    return sender


def isend(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Sends something else."""
    return collectives.isend(tensor + 1, *args, **kwargs)


def irecv(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Receives into another tensor."""
    return collectives.irecv(tensor.clone(), *args, **kwargs)


def broadcast(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Wrong for one dtype."""
    collectives.broadcast(tensor, *args, **kwargs)
    if tensor.dtype == torch.long:
        tensor.add_(1)


def reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Off by one."""
    collectives.reduce(tensor, *args, **kwargs)
    tensor.sub_(1)


def all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Off by one, on one rank."""
    request = collectives.all_reduce(tensor, *args, **kwargs)
    if request is not None:
        request.wait()
    if get_rank() == 2:
        tensor.sub_(1)
    return request


def gather(tensor: Tensor, **kwargs: Any) -> None:
    """Hangs on rank 1."""
    if get_rank() == 1:
        time.sleep(1000)
    collectives.gather(tensor, **kwargs)


def scatter(tensor: Tensor, **kwargs: Any) -> None:
    """Ends its process on rank 2, as if all were well."""
    if get_rank() == 2:
        raise SystemExit(0)
    collectives.scatter(tensor, **kwargs)


def all_gather(tensor_list: list[Tensor], *args: Any, **kwargs: Any) -> None:
    """In the wrong order."""
    collectives.all_gather(tensor_list[::-1], *args, **kwargs)


def barrier(*args: Any, **kwargs: Any) -> None:
    """Waits for nobody."""


def all_to_all_single(output: Tensor, *args: Any, **kwargs: Any) -> None:
    """In the wrong order."""
    collectives.all_to_all_single(output, *args, **kwargs)
    output.copy_(output.flip(0))


def all_to_all(outputs: list[Tensor], *args: Any, **kwargs: Any) -> None:
    """In the wrong order."""
    collectives.all_to_all(outputs[::-1], *args, **kwargs)
