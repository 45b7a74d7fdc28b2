"""Sharded checkpoint formats as arrays in files, and the parts of tensors that each array holds.

A format module turns rules and a parallelism into a list of :class:`Array`. That one list serves both ways. To write,
a container (safetensors, DCP) gives each array its place, and :func:`placements` tells the writer where every
rectangle of every tensor goes. To read, the arrays that such a checkpoint must have are looked up in the files that are
there, and the same function tells the reader where everything lies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from modelexport.checkpoints.safetensors.conversions import Conversion
from modelexport.checkpoints.safetensors.placement import Placement, row_major
from modelexport.errors import CheckpointError
from modelexport.sharding.boxes import Box, extent
from modelexport.system.dtypes import dtype_bits


@dataclass(frozen=True)
class Share:
    """A rectangle of a tensor, and where in an array it lies.

    Attributes:
        tensor: the tensor's name in a Hugging Face checkpoint.
        box: the rectangle, in the tensor's coordinates.
        origin: index of its first element in the array, one number for each of the array's dims. The tensor's dims
            correspond to the array's last ones.
        steps: for each dim of the tensor, by how many of the array's elements its neighbours are apart; None: 1.
        dims: the array's dim that each of the tensor's dims runs along, where these are not its last ones.
    """

    tensor: str
    box: Box
    origin: tuple[int, ...]
    steps: tuple[int, ...] | None = None
    dims: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Array:
    """One array of a file.

    Attributes:
        file: the file's name within the checkpoint.
        name: the array's name in the file (or, for DCP, its key; then several arrays of one key are its chunks).
        dtype: as safetensors spells it.
        shape: of the array. What no share covers is zero (the padding of a vocabulary).
        shares: what it holds.
        chunk: for DCP, where the array lies in its key's global tensor: (offset of it, shape of the global tensor).
        conversion: what its elements are computed by from the tensors', where they are not theirs.
        stored_shape: its shape by the file's header, where that is another one of as many elements.
    """

    file: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    shares: tuple[Share, ...]
    chunk: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    conversion: Conversion | None = field(default=None, kw_only=True)
    stored_shape: tuple[int, ...] | None = field(default=None, kw_only=True)


def placements(
    arrays: Iterable[Array], locate: Callable[[Array], tuple[Path, int]]
) -> dict[str, tuple[Placement, ...]]:
    """The places of all rectangles of every tensor, by the tensor's name.

    Args:
        locate: the file and the offset in it of an array's first byte.

    Raises:
        CheckpointError: an array of elements that fill no whole bytes.
    """
    found: dict[str, list[Placement]] = {}
    for array in arrays:
        bits = dtype_bits(array.dtype)
        if bits % 8:
            raise CheckpointError(f"{array.name}: {array.dtype} elements fill no whole bytes; it cannot be sharded")
        path, start = locate(array)
        strides = row_major(array.shape, bits // 8)
        for share in array.shares:
            rank = len(share.box)
            assert len(share.origin) == len(array.shape)
            first = start + sum(i * stride for i, stride in zip(share.origin, strides, strict=True))
            steps = share.steps or (1,) * rank
            dims = range(len(strides) - rank, len(strides)) if share.dims is None else share.dims
            own = tuple(strides[dim] * step for dim, step in zip(dims, steps, strict=True))
            if all(n > 0 for n in extent(share.box)):
                place = Placement(share.box, path, first, own, array.conversion)
                found.setdefault(share.tensor, []).append(place)
    return {name: tuple(places) for name, places in found.items()}
