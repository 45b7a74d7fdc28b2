"""The layout of a checkpoint: offsets follow from shapes, which the plan knows before any data."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

from modelexport.checkpoints import raw_io
from modelexport.checkpoints.safetensors.header import TensorInfo
from modelexport.checkpoints.safetensors.placement import Placement
from modelexport.checkpoints.safetensors.reader import SINGLE_NAME
from modelexport.errors import CheckpointError, quoted
from modelexport.system.dtypes import dtype_bits, tensor_nbytes
from modelexport.system.safetensors_header import encode_header

_Numbers = TypeVar("_Numbers")
DEFAULT_MAX_SHARD_BYTES = 5_000_000_000


class SizedTensor(NamedTuple):
    """A tensor that has no place yet: its name, dtype as the format spells it, shape in elements, bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class LayoutFile:
    """One file to be: its name, its complete header (length, JSON, padding), its tensors, its size in bytes.

    The paths in ``infos`` are relative: the file's name. ``inserts`` are what else is known in advance: (offset,
    bytes), in order (the envelopes that DCP puts around each tensor).
    """

    name: str
    header: bytes
    infos: tuple[TensorInfo, ...]
    size: int
    inserts: tuple[tuple[int, bytes], ...] = ()


@dataclass(frozen=True)
class Layout:
    """The files of a checkpoint, and the place of every tensor in them.

    Attributes:
        files: in order.
        infos: every tensor by name; paths are relative to the checkpoint's directory.
        placements: for tensors that go to several arrays, or into a part of one, where their rectangles go; their
            ``infos`` then tell dtype, shape and size, but no place.
    """

    files: tuple[LayoutFile, ...]
    infos: dict[str, TensorInfo]
    placements: Mapping[str, tuple[Placement, ...]] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors, without headers."""
        return sum(info.nbytes for info in self.infos.values())

    def index_json(self) -> str:
        """The text of ``model.safetensors.index.json``. Needed only where there is more than one file."""
        weight_map = {name: str(info.path) for name, info in sorted(self.infos.items())}
        index = {"metadata": {"total_size": self.total_bytes}, "weight_map": {}}
        # As indent=2 writes it, which for a hundred thousand names takes five times as long.
        lines = json.dumps(weight_map, separators=(",\n    ", ": "))[1:-1]
        return json.dumps(index, indent=2).replace("{}", f"{{\n    {lines}\n  }}" if lines else "{}") + "\n"

    def settled(self, name: str, values: _Numbers) -> _Numbers:
        """The numbers of a part of a tensor that reading it back gives.

        They are the same, but for what is computed on its way into a file and cannot be told from its neighbours there.

        Args:
            values: a CPU tensor or a numpy array, of elements of the tensor's size.
        """
        for place in self.placements.get(name, ()):
            if place.conversion is not None and place.conversion.function != "value":
                settled: _Numbers = place.conversion.settled(values)
                return settled
        return values

    def create(self, directory: str | os.PathLike[str]) -> tuple[str, ...]:
        """Make every file: header, then its full size with the disk blocks reserved.

        A file that is there with this very header and size is kept, so that an export can be resumed.

        Returns:
            The names of the files made anew. Whoever resumes must write all their tensors again.

        Raises:
            CheckpointError: no room (with the bytes needed and free; what this call made is removed), or the
                directory cannot be written.
        """
        directory = Path(directory)
        made: list[str] = []
        wanted = [file for file in self.files if not _is_complete(directory / file.name, file)]
        try:
            for file in wanted:  # what is half there must not count as used space below
                (directory / file.name).unlink(missing_ok=True)
            needed = sum(file.size for file in wanted)
            free = shutil.disk_usage(directory).free
            if needed > free:
                raise CheckpointError(
                    f"{directory}: the checkpoint needs {needed:,} bytes, its file system has {free:,} free. "
                    "Free some space or choose an --out elsewhere"
                )
            for file in wanted:
                made.append(file.name)
                _create_file(directory / file.name, file)
        except OSError as error:
            for name in made:
                (directory / name).unlink(missing_ok=True)
            if error.errno in raw_io.DISK_FULL:
                if error.errno == errno.EFBIG:  # a limit on each file, not on all of them
                    needed = next(file.size for file in wanted if file.name == made[-1])
                raise raw_io.disk_full(directory / made[-1], needed, error) from error
            raise CheckpointError(f"{directory}: cannot be written: {error.strerror or error}") from error
        return tuple(made)


def plan_layout(
    specs: Sequence[tuple[str, str, Sequence[int]]],
    *,
    max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES,
    metadata: Mapping[str, str] | None = None,
) -> Layout:
    """Lay out tensors over files.

    Tensors keep the given order, except that within a file those whose size is no multiple of 8 bytes come
    last, wide elements before narrow ones: readers view the mapped data in place, at addresses that must suit
    the dtype, and the format allows no padding between tensors.

    Args:
        specs: (name, dtype as the format spells it, shape in elements) of every tensor.
        max_shard_bytes: a file is closed before the tensor that would make its data exceed this.
        metadata: strings for the header's ``__metadata__``; ``{"format": "pt"}``, which transformers wants,
            where None.

    Returns:
        The layout; ``model.safetensors``, or ``model-00001-of-0000N.safetensors`` and on.

    Raises:
        CheckpointError: a name twice, an unknown dtype, a header larger than readers take.
    """
    metadata = {"format": "pt"} if metadata is None else dict(metadata)
    shards: list[list[SizedTensor]] = [[]]
    filled = 0
    seen: set[str] = set()
    for name, dtype, shape in specs:
        if name in seen or name == "__metadata__":
            why = "appears twice" if name in seen else "is reserved"
            raise CheckpointError(f"tensor name {quoted(name)} {why}")
        seen.add(name)
        try:
            nbytes = tensor_nbytes(dtype, shape)
        except CheckpointError as error:
            raise CheckpointError(f"tensor {quoted(name)}: {error}") from error
        if shards[-1] and filled + nbytes > max_shard_bytes:
            shards.append([])
            filled = 0
        filled += nbytes
        shards[-1].append(SizedTensor(name, dtype, tuple(shape), nbytes))
    count = len(shards)
    files = []
    for number, infos in enumerate(shards, 1):
        name = SINGLE_NAME if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
        files.append(plan_file(name, infos, metadata))
    return Layout(tuple(files), {info.name: info for file in files for info in file.infos})


def plan_file(name: str, tensors: Sequence[SizedTensor], metadata: Mapping[str, str]) -> LayoutFile:
    """Lay out one file: its header, and its tensors in an order that readers can map, see :func:`plan_layout`.

    Args:
        metadata: strings for the header's ``__metadata__``.
    """
    tensors = sorted(tensors, key=lambda info: 0 if info.nbytes % 8 == 0 else 64 - dtype_bits(info.dtype))
    header = encode_header(tensors, metadata)
    start, path = len(header), Path(name)
    placed = []
    for info in tensors:
        placed.append(TensorInfo(info.name, info.dtype, info.shape, path, start, info.nbytes))
        start += info.nbytes
    return LayoutFile(name, header, tuple(placed), start)


def _is_complete(path: Path, file: LayoutFile) -> bool:
    try:
        if path.is_symlink() or path.stat().st_size != file.size:
            return False
        with path.open("rb") as stream:
            known = ((0, file.header), *file.inserts)
            return all(stream.seek(at) == at and stream.read(len(text)) == text for at, text in known)
    except OSError:
        return False


def _create_file(path: Path, file: LayoutFile) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        raw_io.allocate(fd, file.size)
        for at, text in ((0, file.header), *file.inserts):
            raw_io.write_exactly(fd, memoryview(text), at)
    finally:
        os.close(fd)
