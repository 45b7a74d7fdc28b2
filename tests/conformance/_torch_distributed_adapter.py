"""The ``dist`` that torch's suite gets: our collectives, each call counted, and a short list of torch's own names."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch.distributed

from modelexport.distributed import collectives

# Taken from the module under test; nothing else may stand in for them.
OURS: tuple[str, ...] = (
    "init_process_group",
    "destroy_process_group",
    "new_group",
    "get_rank",
    "get_world_size",
    "send",
    "recv",
    "isend",
    "irecv",
    "broadcast",
    "reduce",
    "all_reduce",
    "gather",
    "scatter",
    "all_gather",
    "barrier",
    "all_to_all",
    "all_to_all_single",
)

# Taken from torch, because the suite asks for them and the surface has no such thing -> what the suite does with it.
TORCHS: dict[str, str] = {
    "get_backend": "to know which profiler events to look for (and test_get_backend, of a group of ours)",
    "get_debug_level": "to know whether torch's own wrapper adds collectives to the profile",
    "DebugLevel": "the enum of that",
}


class P2POp(NamedTuple):
    """A transfer to be started: torch's class of this name takes torch's own isend and irecv only."""

    op: Callable
    tensor: torch.Tensor
    peer: int
    group: Any = None
    tag: int = 0


class Dist:
    """Stands for torch.distributed inside the suite.

    Attributes:
        calls: of the module under test's functions, by name.
        last_batch: what ``batch_isend_irecv`` was last called with.
    """

    P2POp = P2POp

    def __init__(self, module: ModuleType, checked: bool = False) -> None:
        """``checked``: the ranks compare their arguments first, which shows in the profile as torch's own checks do."""
        self.calls: Counter[str] = Counter()
        self.last_batch: list[P2POp] = []
        for name in OURS:
            setattr(self, name, self._counted(name, getattr(module, name)))
        for name in TORCHS:
            setattr(self, name, getattr(torch.distributed, name))
        self.get_backend = self._get_backend
        if checked:
            self.get_debug_level = lambda: torch.distributed.DebugLevel.DETAIL
        self.group = module.group
        operations = module.ReduceOp if module is torch.distributed else module.reduce_op
        self.ReduceOp = SimpleNamespace(
            **{name: getattr(operations, name) for name in ("SUM", "PRODUCT", "MIN", "MAX")},
            # Only ever passed to be refused.
            **{name: getattr(torch.distributed.ReduceOp, name) for name in ("BAND", "BOR", "BXOR")},
        )

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the suite wants dist.{name}, which is neither in OURS nor in TORCHS")

    @staticmethod
    def _get_backend(group: Any = None) -> str:
        """torch's answer on torch's group in our handle."""
        if isinstance(group, collectives.Group):
            group = group.process_group or torch.distributed.GroupMember.NON_GROUP_MEMBER
        return torch.distributed.get_backend(group)

    def batch_isend_irecv(self, operations: list[P2POp]) -> list[Any]:
        """Starts each transfer by our isend or irecv (the surface has no batches)."""
        self.last_batch = operations
        started = [
            each.op(each.tensor, each.peer, tag=each.tag, **({} if each.group is None else {"group": each.group}))
            for each in operations
        ]
        return [request for request in started if request is not None]

    def _counted(self, name: str, function: Callable) -> Callable:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            return function(*args, **kwargs)

        return call
