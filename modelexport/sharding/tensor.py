"""A local shard of a global tensor, and the id under which all ranks know it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from modelexport.errors import UsageError
from modelexport.sharding.boxes import Box, placed
from modelexport.system.dtypes import torch_name

__all__ = ["ShardId", "ShardedTensor", "is_main_replica", "order_key"]


def order_key(value: object) -> tuple[Any, ...]:
    """A sort key of a shard's id: every two ids compare, whatever they are made of, and alike on every rank.

    None comes before numbers, those before strings, bytes, and tuples (or lists), which compare part by part.

    Raises:
        UsageError: it is made of something else.
    """
    if value is None:
        return (0,)
    if isinstance(value, int):
        return (1, value)
    if isinstance(value, str):
        return (2, value)
    if isinstance(value, bytes):
        return (3, value)
    if isinstance(value, (tuple, list)):
        return (4, tuple([(1, part) if type(part) is int else order_key(part) for part in value]))
    raise UsageError(
        f"{value!r} ({type(value).__name__}) cannot be part of a shard's id: ranks could not agree on an order; "
        "use str, bytes, int, None and tuples of them"
    )


class ShardId(NamedTuple):
    """Names a shard, the same on every rank that has a replica of it. Equal to the plain tuple of its fields.

    Ids of one key may differ in any field (two shards of different size may begin at one offset), and all ids are
    totally ordered, against plain tuples too: see :func:`order_key`.
    """

    key: str
    global_offset: tuple[int, ...] | None
    local_shape: tuple[int, ...]

    def __lt__(self, other: tuple[Any, ...], /) -> bool:
        return order_key(self) < order_key(other)

    def __le__(self, other: tuple[Any, ...], /) -> bool:
        return order_key(self) <= order_key(other)

    def __gt__(self, other: tuple[Any, ...], /) -> bool:
        return order_key(self) > order_key(other)

    def __ge__(self, other: tuple[Any, ...], /) -> bool:
        return order_key(self) >= order_key(other)

    def __str__(self) -> str:
        where = "" if self.global_offset is None else f" at {list(self.global_offset)}"
        return f"{self.key!r}{where} of shape {list(self.local_shape)}"


def is_main_replica(replica_id: int | tuple[int, ...]) -> bool:
    """Returns whether a replica id is that of the main replica: 0, or a tuple of zeros."""
    return not any(replica_id) if isinstance(replica_id, tuple) else replica_id == 0


@dataclass(eq=False)
class ShardedTensor:
    """One rank's shard of a global tensor.

    Attributes:
        key: names the global tensor.
        dtype: of the global tensor. A packed dtype's element is what torch counts as one
            (``float4_e2m1fn_x2``: one byte, two values).
        local_shape: of this shard.
        global_shape: of the whole tensor.
        global_offset: where the shard begins in it; None where that is not known, and only its key tells what it is.
        replica_id: 0, or a tuple of zeros, for the main replica of this shard; others have other ids.
        data: the shard itself, or None where it is only described.

    Raises:
        UsageError: the shapes, the offset and the data do not fit each other.
    """

    key: str
    dtype: torch.dtype
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...] | None
    replica_id: int | tuple[int, ...] = 0
    data: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.key, str):
            raise UsageError(f"a shard's key is {self.key!r} ({type(self.key).__name__}); it must be a string")
        if not isinstance(self.dtype, torch.dtype):
            raise UsageError(f"shard {self.key!r}: dtype is {self.dtype!r}; it must be a torch.dtype")
        self.local_shape = self._numbers("local_shape", self.local_shape)
        self.global_shape = self._numbers("global_shape", self.global_shape)
        if self.global_offset is not None:
            self.global_offset = self._numbers("global_offset", self.global_offset)
            self._check_place(self.global_offset)
        if isinstance(self.replica_id, (list, tuple)):
            self.replica_id = self._numbers("replica_id", self.replica_id)
        elif not isinstance(self.replica_id, int):
            raise UsageError(f"shard {self.key!r}: replica_id is {self.replica_id!r}; use an int or a tuple of ints")
        if self.data is not None:
            self._check_data(self.data)

    def _numbers(self, name: str, values: Sequence[int]) -> tuple[int, ...]:
        try:
            found = tuple([int(value) for value in values])
        except (TypeError, ValueError) as error:
            raise UsageError(f"shard {self.key!r}: {name} is {values!r}; it must be a sequence of ints") from error
        if min(found, default=0) < 0:
            raise UsageError(f"shard {self.key!r}: {name} is {list(found)}; none of it may be negative")
        return found

    def _check_place(self, offset: tuple[int, ...]) -> None:
        local, whole = self.local_shape, self.global_shape
        if not len(local) == len(offset) == len(whole):
            raise UsageError(
                f"shard {self.key!r}: local_shape {list(local)}, global_offset {list(offset)} and global_shape "
                f"{list(whole)} must have one number for each dimension"
            )
        for dim, (start, size, limit) in enumerate(zip(offset, local, whole, strict=True)):
            if start + size > limit:
                raise UsageError(
                    f"shard {self.key!r} reaches from {start} to {start + size} in dim {dim}, where the whole "
                    f"tensor ends at {limit}"
                )

    def _check_data(self, data: torch.Tensor) -> None:
        if not isinstance(data, torch.Tensor):
            raise UsageError(f"shard {self.key!r}: data is {type(data).__name__}; it must be a tensor or None")
        if tuple(data.shape) != self.local_shape or data.dtype != self.dtype:
            raise UsageError(
                f"shard {self.key!r} is described as {self.dtype} of shape {list(self.local_shape)}, but its data "
                f"are {data.dtype} of shape {list(data.shape)}"
            )

    @classmethod
    def whole(cls, key: str, data: torch.Tensor, replica_id: int | tuple[int, ...] = 0) -> ShardedTensor:
        """A tensor that is not cut: its only shard."""
        shape = tuple(data.shape)
        return cls(key, data.dtype, shape, shape, (0,) * len(shape), replica_id, data)

    @classmethod
    def part(
        cls,
        key: str,
        data: torch.Tensor,
        global_shape: Sequence[int],
        global_offset: Sequence[int],
        replica_id: int | tuple[int, ...] = 0,
    ) -> ShardedTensor:
        """The shard ``data``, which begins at ``global_offset`` of a tensor of ``global_shape``."""
        return cls(key, data.dtype, tuple(data.shape), tuple(global_shape), tuple(global_offset), replica_id, data)

    @property
    def id(self) -> ShardId:
        """The id of the shard, which its replicas share."""
        return ShardId(self.key, self.global_offset, self.local_shape)

    @property
    def is_main_replica(self) -> bool:
        """True if this is the main one of the shard's replicas."""
        return is_main_replica(self.replica_id)

    @property
    def nbytes(self) -> int:
        """Bytes of the shard."""
        return math.prod(self.local_shape) * self.dtype.itemsize

    @property
    def box(self) -> Box:
        """The ranges of the global tensor that the shard takes.

        Raises:
            UsageError: its offset is not known.
        """
        if self.global_offset is None:
            raise UsageError(f"shard {self.id} has no global_offset, so nobody knows which part of the tensor it is")
        return placed(self.global_offset, self.local_shape)

    def without_data(self) -> ShardedTensor:
        """The description alone."""
        return self if self.data is None else replace(self, data=None)

    def __repr__(self) -> str:
        data = "no data" if self.data is None else f"data on {self.data.device}"
        return (
            f"ShardedTensor({self.id}, {torch_name(self.dtype)}, of {list(self.global_shape)}, "
            f"replica {self.replica_id}, {data})"
        )
