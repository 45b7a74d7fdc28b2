"""An accelerator that this machine does not have: a device of torch's own kind, whose numbers a CPU computes.

    python -m tests.helpers.fake_accelerator ARGUMENTS      modelexport, as WORLD_SIZE ranks, where there is one

Tensors on it report the device ``fakegpu:0``; an operation on them and on a tensor of the CPU raises, as CUDA's do;
their memory cannot be read as the host's. So whatever computes on a device runs here, threads and all, and what it
computes can be compared. torch keeps a registered device until the process ends, and what takes an accelerator where
there is one takes it: for processes of their own.
"""

from __future__ import annotations

import collections
import multiprocessing
import os
import socket
import sys
import weakref
from typing import Any

import torch
from torch import library
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

KIND = "fakegpu"
BEYOND = 1 << 62
"""What is added to the address of its memory, at which the host has none."""
_INDEXING = ("aten::index", "aten::_index_put", "aten::_unsafe_index")  # which take indices from the CPU
_COPIES = ("aten::copy_", "aten::_to_copy")

operations: collections.Counter[str] = collections.Counter()
"""The operations that ran on it, by name."""


class Memory:
    """The bytes of the storages that lie on the device.

    Attributes:
        live: at this moment.
        peak: the most there have been.
    """

    def __init__(self) -> None:
        self.live = self.peak = 0
        self._counted: set[int] = set()

    def count(self, held: torch.Tensor) -> None:
        """Counts the storage of a tensor, until nothing holds it."""
        storage = held.untyped_storage()
        place, size = storage._cdata, storage.nbytes()
        if place in self._counted:
            return
        self._counted.add(place)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._drop, place, size).atexit = False

    def _drop(self, place: int, size: int) -> None:
        self._counted.discard(place)
        self.live -= size


memory = Memory()


class OnDevice(torch.Tensor):
    """A tensor on the device.

    Attributes:
        held: its numbers, on the CPU.
    """

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> OnDevice:
        with torch.inference_mode(False):  # else torch refuses it as a view of an ordinary tensor
            made: OnDevice = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
                cls, held.shape, strides=held.stride(), dtype=held.dtype, device=torch.device(KIND, 0)
            )
        made.held = held
        memory.count(held)
        return made

    def __init__(self, held: torch.Tensor) -> None:
        pass

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return f"OnDevice({self.held!r})"

    def data_ptr(self) -> int:
        """An address by which tensors can be told apart, and at which nothing can be read."""
        return self.held.data_ptr() + BEYOND

    def tolist(self) -> Any:
        """Its numbers, as those of any tensor, which torch refuses for tensors of a class of their own."""
        return self.held.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, *args, **(kwargs or {}))


def run(func: Any, *args: Any, **kwargs: Any) -> Any:
    """An operation of which a tensor is on the device, or is to be made there."""
    name = func._schema.name
    operations[name] += 1
    leaves, structure = pytree.tree_flatten((args, kwargs))
    ours = {id(leaf.held): leaf for leaf in leaves if isinstance(leaf, OnDevice)}
    if ours and name not in _COPIES and not name.startswith(_INDEXING):
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, OnDevice) and leaf.dim():
                raise RuntimeError(f"{name}: a tensor {list(leaf.shape)} is on cpu, others are on {KIND}:0")
    asked = next((leaf for leaf in leaves if isinstance(leaf, torch.device)), None)
    held = [leaf.held if isinstance(leaf, OnDevice) else leaf for leaf in leaves]
    held = [torch.device("cpu") if isinstance(leaf, torch.device) else leaf for leaf in held]
    args, kwargs = pytree.tree_unflatten(held, structure)
    out = func(*args, **kwargs)
    if name == "aten::copy_":
        return leaves[0]
    here = bool(ours) if asked is None else asked.type == KIND
    given = {id(leaf) for leaf in held if isinstance(leaf, torch.Tensor)}

    def wrapped(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if here != (id(value) in ours) and id(value) in given:
            value = value.clone()  # it went to the other device, which has memory of its own
        known = ours.get(id(value))  # it wrote into what it was given
        return value if not here else OnDevice(value) if known is None else known

    return pytree.tree_map(wrapped, out)


def register() -> None:
    """Has torch know the device, from now on."""
    global _library
    _setup_privateuseone_for_python_backend(KIND)
    _library = library.Library("_", "IMPL")
    _library.fallback(run, "PrivateUse1")
    make = torch.tensor

    def tensor(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        made = make(*args, **kwargs)  # torch makes it on the device otherwise, which a device in Python cannot
        return made if device is None else made.to(device)

    torch.tensor = tensor


_library: library.Library


def main() -> int:
    """Runs modelexport as all ranks of a launcher, WORLD_SIZE of them: the first in this process, others in forks."""
    world = int(os.environ.setdefault("WORLD_SIZE", "1"))
    with socket.create_server(("127.0.0.1", 0)) as free:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))
    others = [multiprocessing.get_context("fork").Process(target=_rank, args=(rank,)) for rank in range(1, world)]
    for other in others:
        other.start()
    status = _run(0)
    for other in others:
        other.join()
    return max(status, *(other.exitcode or 0 for other in others), 0)


def _rank(rank: int) -> None:
    sys.exit(_run(rank))


def _run(rank: int) -> int:
    from modelexport import cli

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    register()
    return cli.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
