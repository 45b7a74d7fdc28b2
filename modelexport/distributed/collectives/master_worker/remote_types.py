"""Tensors that live in the rank processes while the master holds their handle (master-worker mode).

A :class:`RemoteTensor` is one tensor on every rank. Wherever a collective takes a tensor, the master may give a
handle instead: each rank then uses its own tensor, and results stay there. These names are reachable from
:mod:`modelexport.distributed.collectives` as well while a master drives its workers.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from modelexport.distributed.collectives.collective_mode import driver
from modelexport.errors import UsageError
from modelexport.system.dtypes import torch_name

__all__ = ["RemoteGroup", "RemotePart", "RemoteTensor", "held_bytes"]


class _Session(Protocol):
    """The part of the master that handles of its tensors and groups use."""

    world_size: int

    def make(self, specs: list[dict[str, Any]], given: list[Tensor] | None) -> int:
        """Makes a tensor on every rank and returns its number."""

    def fetch(self, number: int, ranks: Sequence[int]) -> list[Tensor]:
        """Copies of those ranks' tensors."""

    def free(self, number: int) -> None:
        """Frees the tensors now."""

    def forget(self, number: int) -> None:
        """Frees the tensors with the next command; callable from a garbage collection."""

    def held_bytes(self) -> list[int]:
        """Bytes held on each rank."""


def _session() -> _Session:
    found: Any = driver()
    if found is None or not hasattr(found, "make"):
        raise RuntimeError(
            "remote tensors exist only on the master of master-worker mode: call init_master_worker first"
        )
    return found


def held_bytes() -> list[int]:
    """Bytes of remote tensors on each rank; those of deleted handles are freed first."""
    return _session().held_bytes()


def _check_rank(rank: int, world_size: int) -> None:
    if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < world_size:
        raise UsageError(f"rank {rank!r} does not exist: there are {world_size} ranks, 0 to {world_size - 1}")


class RemoteTensor:
    """One tensor on each rank, rank 0's (the master's) included. Made by the class methods.

    The tensors are freed when the handle is deleted (with the next command that goes to the ranks), at once by
    :meth:`free`, and all of them by ``destroy_process_group()``. A handle cannot be copied, pickled or used in
    another session.

    Attributes:
        shapes: of the tensors, in the order of ranks.
        dtypes: likewise.
    """

    def __init__(self, session: _Session, number: int, shapes: Sequence[torch.Size], dtypes: Sequence[torch.dtype]):
        self.session = session
        self.number = number
        self.shapes = tuple(shapes)
        self.dtypes = tuple(dtypes)
        self._finalizer = weakref.finalize(self, session.forget, number)
        self._finalizer.atexit = False

    @classmethod
    def from_tensors(cls, tensors: Sequence[Tensor]) -> RemoteTensor:
        """Puts a copy of ``tensors[rank]`` on each rank. Shapes and dtypes may differ; a CUDA tensor becomes one
        on the rank's own current device.

        Raises:
            UsageError: their number is not the number of ranks.
            TypeError: one of them is not a dense tensor.
        """
        session = _session()
        if len(tensors) != session.world_size:
            raise UsageError(
                f"{len(tensors)} tensors were given, but there are {session.world_size} ranks: one for each"
            )
        for rank, tensor in enumerate(tensors):
            if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.is_meta:
                raise TypeError(f"rank {rank}'s is not a dense tensor with data but {type(tensor).__name__}")
        specs = [{"device": tensor.device.type} for tensor in tensors]
        number = session.make(specs, [tensor.detach() for tensor in tensors])
        return cls(session, number, [tensor.shape for tensor in tensors], [tensor.dtype for tensor in tensors])

    @classmethod
    def full(
        cls, shape: Sequence[int], value: float, dtype: torch.dtype | None = None, *, device: str | None = None
    ) -> RemoteTensor:
        """A tensor of ``shape`` filled with ``value`` on each rank.

        Args:
            dtype: None for what :func:`torch.full` makes of ``value``.
            device: ``"cpu"`` or ``"cuda"`` (each rank's current one); None for the one that the back end serves.
        """
        example = torch.full((), value, dtype=dtype)
        return cls._uniform(shape, example.dtype, device, example.item())

    @classmethod
    def empty(
        cls, shape: Sequence[int], dtype: torch.dtype | None = None, *, device: str | None = None
    ) -> RemoteTensor:
        """A tensor of ``shape`` on each rank, its values undefined; arguments as for :meth:`full`."""
        return cls._uniform(shape, dtype or torch.get_default_dtype(), device, None)

    @classmethod
    def _uniform(
        cls, shape: Sequence[int], dtype: torch.dtype, device: str | None, value: complex | None
    ) -> RemoteTensor:
        session = _session()
        size = torch.Size([shape] if isinstance(shape, int) else shape)
        spec: dict[str, Any] = {"shape": list(size), "dtype": torch_name(dtype), "device": device}
        if value is not None:
            spec["value"] = [value.real, value.imag] if isinstance(value, complex) else value
        world_size = session.world_size
        return cls(session, session.make([spec] * world_size, None), [size] * world_size, [dtype] * world_size)

    def to_list(self) -> list[Tensor]:
        """Copies of all ranks' tensors, on the CPU, in the order of ranks."""
        return self.session.fetch(self.alive(), range(self.session.world_size))

    def local(self, rank: int) -> Tensor:
        """A copy of one rank's tensor, on the CPU.

        Raises:
            UsageError: there is no such rank.
        """
        _check_rank(rank, self.session.world_size)
        return self.session.fetch(self.alive(), [rank])[0]

    def part(self, rank: int) -> RemotePart:
        """One rank's tensor as an argument of ``send``, ``recv``, ``isend`` and ``irecv``."""
        _check_rank(rank, self.session.world_size)
        return RemotePart(self, rank)

    def free(self) -> None:
        """Frees the tensors now. Again: nothing happens."""
        if self._finalizer.detach() is not None:
            self.session.free(self.number)

    def alive(self) -> int:
        if not self._finalizer.alive:
            raise RuntimeError("this RemoteTensor has been freed")
        return self.number

    def __reduce__(self) -> NoReturn:
        raise TypeError("a RemoteTensor is a handle of this process alone: fetch the values with to_list() or local()")

    def __repr__(self) -> str:
        same = len(set(self.shapes)) == 1 and len(set(self.dtypes)) == 1
        what = f"{tuple(self.shapes[0])}, {self.dtypes[0]}" if same else "shapes and dtypes differ"
        return f"RemoteTensor({what}, on {len(self.shapes)} ranks)"


class RemotePart:
    """One rank's tensor of a :class:`RemoteTensor`: names the rank that sends (``send``) or receives (``recv``)."""

    def __init__(self, tensor: RemoteTensor, rank: int):
        self.tensor = tensor
        self.rank = rank

    def __repr__(self) -> str:
        return f"{self.tensor!r}.part({self.rank})"


class RemoteGroup:
    """A group of ranks, which ``new_group`` returns to the master and collectives take.

    Attributes:
        ranks: its members' ranks, in the order given.
    """

    def __init__(self, session: _Session, number: int, ranks: Sequence[int]):
        self.session = session
        self.number = number
        self.ranks = tuple(ranks)

    def __repr__(self) -> str:
        return f"RemoteGroup(ranks={list(self.ranks)})"
