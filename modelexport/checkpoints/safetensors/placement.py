"""Places of rectangles of a tensor in files, and the runs of bytes that moving one of them takes.

A tensor of a sharded checkpoint lies in several arrays, of several files, perhaps as a part of something larger: a
fused projection, a stack of all layers' weights. Whatever the format, each rectangle is described alike: the file, the
offset of its first element and the distance in bytes from one element to the next along each dimension. A reader or
writer of such a tensor needs to know nothing else.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from modelexport.checkpoints import raw_io
from modelexport.checkpoints.safetensors.conversions import Conversion
from modelexport.checkpoints.safetensors.header import TensorInfo
from modelexport.errors import CheckpointError
from modelexport.sharding.boxes import Box, whole
from modelexport.system.dtypes import dtype_bits

if TYPE_CHECKING:
    import numpy as np

    from modelexport.checkpoints.raw_io import Array


@dataclass(frozen=True)
class Placement:
    """A rectangle of a tensor and where its bytes lie.

    Attributes:
        box: the rectangle, in the tensor's own coordinates.
        path: the file; relative to the checkpoint's directory where it is yet to be written.
        offset: of the rectangle's first element, from the start of the file.
        strides: bytes from one element to the next along each dimension of the tensor.
        conversion: what the file's elements are computed by, where they are not the tensor's own.
    """

    box: Box
    path: Path
    offset: int
    strides: tuple[int, ...]
    conversion: Conversion | None = None

    def begin(self, box: Box) -> int:
        """File offset of the first element of ``box``, which lies within :attr:`box`."""
        steps = zip(box, self.box, self.strides, strict=True)
        return self.offset + sum((start - base) * stride for (start, _), (base, _), stride in steps)

    def at(self, index: int) -> Placement:
        """The part with one index along dim 0, without that dim."""
        offset = self.offset + (index - self.box[0][0]) * self.strides[0]
        return replace(self, box=self.box[1:], offset=offset, strides=self.strides[1:])

    def every(self, step: int, start: int, count: int) -> Placement | None:
        """The part with rows ``start``, ``start + step``, ... of dim 0, as rows 0 to ``count``; None: it has none."""
        (begin, end), *others = self.box
        first = max(0, -((start - begin) // step))
        last = min(count, -((start - end) // step))
        if first >= last:
            return None
        offset = self.offset + (start + step * first - begin) * self.strides[0]
        strides = (self.strides[0] * step, *self.strides[1:])
        return replace(self, box=((first, last), *others), offset=offset, strides=strides)


def itemsize(info: TensorInfo) -> int:
    """Bytes of an element.

    Raises:
        CheckpointError: elements of half a byte, which cannot be moved by themselves.
    """
    size, rest = divmod(dtype_bits(info.dtype), 8)
    if rest:
        raise CheckpointError(f"{info.name}: {info.dtype} elements fill no whole bytes; it cannot be cut or resharded")
    return size


def whole_place(info: TensorInfo) -> Placement:
    """The place of a tensor that lies in an array of its own."""
    return Placement(whole(info.shape), info.path, info.offset, row_major(info.shape, itemsize(info)))


def row_major(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Bytes from one element to the next along each dimension of a contiguous array."""
    strides, run = [], itemsize
    for size in reversed(shape):
        strides.append(run)
        run *= size
    return tuple(reversed(strides))


def runs(array: Array, begin: int, strides: Sequence[int]) -> Iterator[tuple[np.ndarray, int, int]]:
    """Cut a move between memory and a file into sets of equally spaced runs of bytes.

    Args:
        array: the memory, a CPU tensor or a numpy array; its dims correspond to ``strides``. Not empty.
        begin: file offset of its first element.
        strides: bytes in the file from one element to the next along each dim.

    Yields:
        (uint8 ``[rows, run]`` of the array's own memory, file offset of the first row, bytes between rows).

    Raises:
        ValueError: the array's memory has no such form (it is expanded, or its last dim is not contiguous).
    """
    shape, spans, run = raw_io.geometry(array)
    inner = len(shape)
    # The last dims that lie in one run, in the file as well as in memory; the dim before them counts the rows.
    while inner:
        length = shape[inner - 1]
        if length != 1 and not strides[inner - 1] == spans[inner - 1] == run:
            break
        inner -= 1
        run *= length
    outer = max(0, inner - 1)
    pitch = strides[inner - 1] if inner else run
    for where in itertools.product(*(range(n) for n in shape[:outer])):
        memory = raw_io.row_bytes(array[where] if where else array, inner - outer)
        if memory is None:
            raise ValueError(f"an array of shape {list(shape)}, {list(spans)} bytes apart, has no rows to move")
        yield memory, begin + sum(i * strides[dim] for dim, i in enumerate(where)), pitch
