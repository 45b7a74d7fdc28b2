"""Groups of ranks: the handle that ``new_group`` gives, ``group.WORLD``, and who takes part in a call.

torch numbers a group's members by ascending rank; here they keep the order in which they were given, so lists are
put into torch's order on their way in and out (:meth:`Members.torch_order`).
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from modelexport.errors import UsageError

T = TypeVar("T")


class _World:
    """The type of ``group.WORLD``."""

    def __repr__(self) -> str:
        return "group.WORLD"


class group:
    """Holds ``WORLD``: all ranks. It can be named before there is a process group, so it serves as a default."""

    WORLD = _World()


class Group:
    """A handle of a group of ranks, which ``new_group`` returns to members and to all others.

    Attributes:
        ranks: the members' ranks in the whole job, in the order given to ``new_group``.
        process_group: torch's group; None on ranks that are not members, and without a process group.
    """

    __slots__ = ("process_group", "ranks")

    def __init__(self, ranks: Sequence[int], process_group: dist.ProcessGroup | None) -> None:
        self.ranks = tuple(ranks)
        self.process_group = process_group

    def __repr__(self) -> str:
        return f"Group(ranks={list(self.ranks)})"


AnyGroup: TypeAlias = "_World | Group | dist.ProcessGroup | None"


@dataclass(frozen=True)
class Members:
    """The ranks that take part in one call, seen from this process."""

    ranks: tuple[int, ...]  # in the order of the group's lists
    rank: int  # this process's, in the whole job
    process_group: dist.ProcessGroup | None  # None: no process group, or this process is no member

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def is_member(self) -> bool:
        return self.rank in self.ranks

    @property
    def alone(self) -> bool:
        return self.size == 1

    @property
    def position(self) -> int:
        """This process's place in the group's lists; -1 where it is no member."""
        return self.ranks.index(self.rank) if self.is_member else -1

    def check_root(self, rank: int, name: str) -> None:
        """Raises UsageError where ``rank`` (the value of argument ``name``) is not in the group."""
        if rank not in self.ranks:
            raise UsageError(f"{name}={rank!r} is not in the group of ranks {list(self.ranks)}; name one of them")

    def torch_order(self, items: Sequence[T]) -> list[T]:
        """``items``, one per member in the group's order, in the order in which torch numbers the members."""
        if self.process_group is None:
            return list(items)
        place = {rank: index for index, rank in enumerate(self.ranks)}
        return [items[place[rank]] for rank in dist.get_process_group_ranks(self.process_group)]

    @property
    def reordered(self) -> bool:
        """True if torch numbers the members in another order than the group's."""
        return self.torch_order(self.ranks) != list(self.ranks)

    def carrier(self, device: torch.device) -> torch.device:
        """The device from which the group's back end can take what lies on ``device``."""
        if self.process_group is None:
            return device
        served = _backends(str(dist.get_backend_config(self.process_group)))
        backend = served.get(device.type)
        # gloo is given host memory only: what it does with CUDA tensors differs per collective and build.
        if backend is not None and (backend != "gloo" or device.type == "cpu"):
            return device
        if "cpu" in served:
            return torch.device("cpu")
        kind = next(iter(served))
        return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


@functools.cache
def _backends(config: str) -> dict[str, str]:
    """``{"cpu": "gloo", "cuda": "nccl"}`` for torch's ``"cpu:gloo,cuda:nccl"``."""
    return dict(part.split(":", 1) for part in config.split(","))


def initialized() -> bool:
    """Returns whether this process has a process group of torch's."""
    return dist.is_available() and dist.is_initialized()


def members(group: AnyGroup) -> Members:
    """The members of ``group``, which take part in a call on it.

    Args:
        group: ``group.WORLD`` or None, a handle of ``new_group``, or torch's own group.

    Raises:
        UsageError: no group at all, or one of a process group that is gone.
    """
    if not initialized():
        if group is None or isinstance(group, _World) or (isinstance(group, Group) and group.process_group is None):
            return Members((0,), 0, None)
        raise UsageError(f"{group!r} belongs to a process group that does not exist any more; make another one")
    rank = dist.get_rank()
    if group is None or isinstance(group, _World):
        return Members(tuple(range(dist.get_world_size())), rank, dist.group.WORLD)
    if isinstance(group, Group):
        if group.process_group is None and rank in group.ranks:
            raise UsageError(f"{group!r} was made before this process group; call new_group again")
        if group.process_group is not None:
            _torch_members(group.process_group)
        return Members(group.ranks, rank, group.process_group)
    if isinstance(group, dist.ProcessGroup):
        return Members(_torch_members(group), rank, group)
    if group == dist.GroupMember.NON_GROUP_MEMBER:  # what torch.distributed.new_group gives to non-members
        return Members((), rank, None)
    raise UsageError(f"{group!r} is not a group; give group.WORLD, what new_group returned, or torch's own group")


def _torch_members(process_group: dist.ProcessGroup) -> tuple[int, ...]:
    try:
        return tuple(dist.get_process_group_ranks(process_group))
    except KeyError:
        raise UsageError("the group has been destroyed; make another one with new_group") from None


def outside(name: str, team: Members) -> bool:
    """Returns whether this rank is outside the group, and warns then that the call ``name`` does nothing."""
    if team.is_member:
        return False
    among = f" of ranks {list(team.ranks)}" if team.ranks else ""
    warnings.warn(f"{name} does nothing on rank {team.rank}, which does not belong to the group{among}", stacklevel=5)
    return True


def check_ranks(ranks: Sequence[int] | None) -> list[int]:
    """The ranks of a group to be made; None: all.

    Raises:
        UsageError: none, one twice, or one that does not exist.
    """
    size = dist.get_world_size() if initialized() else 1
    if ranks is None:
        return list(range(size))
    found = [int(rank) for rank in ranks]
    outside = [rank for rank in found if not 0 <= rank < size]
    if outside:
        raise UsageError(f"new_group: rank {outside[0]} does not exist; there are ranks 0 to {size - 1}")
    if not found or len(set(found)) != len(found):
        raise UsageError(f"new_group: ranks {found} must name at least one rank, and none twice")
    return found


def make_group(ranks: list[int], timeout: timedelta | float | None, backend: str | None) -> Group:
    """The group of ``ranks`` (checked); every rank of the job calls this in the same order."""
    if not initialized():
        return Group(ranks, None)
    limit = timedelta(seconds=timeout) if isinstance(timeout, (int, float)) else timeout
    extra: dict[str, Any] = {"timeout": limit, "backend": "gloo" if backend == "tcp" else backend}
    made = dist.new_group(sorted(ranks), **extra)
    return Group(ranks, made if dist.get_rank() in ranks else None)
