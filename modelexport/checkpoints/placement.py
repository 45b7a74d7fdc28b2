"""Where rectangles of a tensor lie in files, and the runs of bytes that moving one of them takes.

A tensor of a sharded checkpoint lies in several arrays, of several files, perhaps as a part of something larger: a
fused projection, a stack of all layers' weights. Whatever the format, each rectangle is described alike: the file, the
offset of its first element and the distance in bytes from one element to the next along each dimension. A reader or
writer of such a tensor needs to know nothing else.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from modelexport.checkpoints import raw_io
from modelexport.sharding.boxes import Box

if TYPE_CHECKING:
    import numpy as np
    import torch


@dataclass(frozen=True)
class Placement:
    """A rectangle of a tensor and where its bytes lie.

    Attributes:
        box: the rectangle, in the tensor's own coordinates.
        path: the file; relative to the checkpoint's directory where it is yet to be written.
        offset: of the rectangle's first element, from the start of the file.
        strides: bytes from one element to the next along each dimension of the tensor.
    """

    box: Box
    path: Path
    offset: int
    strides: tuple[int, ...]

    def begin(self, box: Box) -> int:
        """File offset of the first element of ``box``, which lies within :attr:`box`."""
        steps = zip(box, self.box, self.strides, strict=True)
        return self.offset + sum((start - base) * stride for (start, _), (base, _), stride in steps)


def row_major(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Bytes from one element to the next along each dimension of a contiguous array."""
    strides, run = [], itemsize
    for size in reversed(shape):
        strides.append(run)
        run *= size
    return tuple(reversed(strides))


def runs(tensor: torch.Tensor, begin: int, strides: Sequence[int]) -> Iterator[tuple[np.ndarray, int, int]]:
    """Cut a move between memory and a file into sets of equally spaced runs of bytes.

    Args:
        tensor: the memory; its dims correspond to ``strides``. Not empty.
        begin: file offset of its first element.
        strides: bytes in the file from one element to the next along each dim.

    Yields:
        (uint8 ``[rows, run]`` of the tensor's own memory, file offset of the first row, bytes between rows).

    Raises:
        ValueError: the tensor's memory has no such form (it is expanded, or its last dim is not contiguous).
    """
    shape, size = tensor.shape, tensor.element_size()
    inner, run = tensor.dim(), size
    # The last dims that lie in one run, in the file as well as in memory; the dim before them counts the rows.
    while inner:
        length, stride, held = shape[inner - 1], strides[inner - 1], tensor.stride(inner - 1) * size
        if length != 1 and not stride == held == run:
            break
        inner -= 1
        run *= length
    outer = max(0, inner - 1)
    pitch = strides[inner - 1] if inner else run
    for where in itertools.product(*(range(n) for n in shape[:outer])):
        memory = raw_io.row_bytes(tensor[where], inner - outer)
        if memory is None:
            raise ValueError(f"a tensor of shape {list(shape)} with strides {tensor.stride()} has no rows to move")
        yield memory, begin + sum(i * strides[dim] for dim, i in enumerate(where)), pitch
