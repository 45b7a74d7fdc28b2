"""The memory of CPU tensors as numpy arrays of bytes, without a call of torch.

Each method of a tensor gives up the interpreter's lock; another thread of the export takes it, and gives it back when
it next waits. For a small expert that takes longer than rounding its weight does.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["ReusableBuffer", "tensor_bytes"]


class _Lent:
    """Memory as numpy is told of it; keeps what it belongs to."""

    __slots__ = ("__array_interface__", "owner")

    def __init__(self, owner: Tensor, nbytes: int) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "data": (owner.data_ptr(), False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


def tensor_bytes(tensor: Tensor, nbytes: int | None = None) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Returns the bytes of a CPU tensor from its first element on, as a writable uint8 array over the same memory.

    The array keeps the tensor alive.

    Args:
        tensor: a contiguous one, unless ``nbytes`` is given.
        nbytes: how many; by default those of all elements.
    """
    nbytes = tensor.nbytes if nbytes is None else nbytes
    if nbytes == 0:  # without an address
        return np.empty(0, np.uint8)
    return np.asarray(_Lent(tensor, nbytes))


class ReusableBuffer:
    """A buffer from which a step's tensors are carved; the next step takes it again, since memory touched for the first
    time costs more than what is done with it."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._views: dict[torch.dtype, Tensor] = {}
        self._used = 0

    def reserve(self, nbytes: int) -> None:
        """Begin a step that needs at most ``nbytes``."""
        if self._buffer.numel() < nbytes:
            self._views.clear()  # let go of the old one first
            self._buffer = torch.empty(0, dtype=torch.uint8)
            self._buffer = torch.empty(-(-nbytes // 64) * 64, dtype=torch.uint8)
        self._used = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The next tensor of the step, on a cache line of its own."""
        nbytes = dtype.itemsize
        for size in shape:
            nbytes *= size
        start, self._used = self._used, self._used + -(-nbytes // 64) * 64
        whole = self._views.get(dtype)
        if whole is None:
            whole = self._views[dtype] = self._buffer.view(dtype)
        strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        return whole.as_strided(shape, strides, start // dtype.itemsize)  # one call of torch
