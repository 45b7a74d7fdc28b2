"""Put pieces of tensors where they belong in files whose headers are written, in any order, from any process."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from modelexport.checkpoints import raw_io
from modelexport.checkpoints.safetensors.header import TensorInfo
from modelexport.checkpoints.safetensors.layout import Layout
from modelexport.checkpoints.safetensors.placement import row_major, runs, whole_place
from modelexport.errors import CheckpointError
from modelexport.sharding.boxes import intersect, placed, relative, slices
from modelexport.system.dtypes import dtype_name

if TYPE_CHECKING:
    import numpy as np
    import torch

    from modelexport.checkpoints.raw_io import Array
    from modelexport.checkpoints.safetensors.placement import Placement
    from modelexport.sharding.boxes import Box

_WRITEBACK_BYTES = 32 << 20


class Writer:
    """Puts pieces of tensors at their places in files that :meth:`Layout.create` made.

    Any number of processes may each have one, on the same files; pieces must not overlap. Thread-safe.
    """

    def __init__(self, layout: Layout, directory: str | os.PathLike[str]) -> None:
        self._layout = layout
        self._directory = Path(directory)
        self._files: dict[Path, tuple[int, bool]] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._writeback: _Writeback | None = None

    def write(self, name: str, tensor: torch.Tensor, *, offset: Sequence[int] | None = None) -> int:
        """Write one piece: the rectangle of tensor ``name`` that begins at ``offset``.

        Args:
            name: the tensor in the layout.
            tensor: the piece, on the CPU, of the layout's dtype; may be a strided view.
            offset: where it begins, in elements of each dim of ``tensor``; the origin where None.

        Returns:
            The bytes written. They are in the page cache then, visible to every process of this machine.

        Raises:
            CheckpointError: no room, an I/O error.
            ValueError: a piece of another dtype or outside the tensor.
        """
        info = self._layout.infos[name]
        full = _shape_in_torch(info)
        start = tuple(offset) if offset is not None else (0,) * len(full)
        _check_piece(info, tensor, start, full)
        if tensor.numel() == 0:
            return 0
        if tensor.dim() and (tensor.stride(-1) != 1 or 0 in tensor.stride()):  # expanded, transposed, ...
            tensor = tensor.contiguous()
        places = self._layout.placements.get(name)
        if places is not None:
            return self._scatter(info, places, tensor, placed(start, tuple(tensor.shape)))
        strides = row_major(full, tensor.element_size())
        first = info.offset + sum(begin * stride for begin, stride in zip(start, strides, strict=True))
        self._move(info, info.path, tensor, first, strides)
        self._note_written(self._open(info.path)[0], info, tensor, start, full)
        return tensor.numel() * tensor.element_size()

    def write_box(self, name: str, box: Box, array: Array) -> int:
        """Write the rectangle ``box`` of a tensor from memory of any kind: a CPU tensor or a numpy array.

        Args:
            array: of the rectangle's shape, with elements as large as the tensor's, rows contiguous.

        Returns:
            The bytes written, replicas counted.

        Raises:
            CheckpointError: no room, an I/O error.
        """
        info = self._layout.infos[name]
        places = self._layout.placements.get(name)
        return self._scatter(info, (whole_place(info),) if places is None else places, array, box)

    def _scatter(self, info: TensorInfo, places: Sequence[Placement], array: Array, box: Box) -> int:
        """Write a rectangle to every place that wants a part of it; returns the bytes written, replicas counted."""
        written = 0
        for place in places:
            shared = intersect(box, place.box)
            if shared is None:
                continue
            part = array if shared == box else array[slices(relative(shared, box))]
            if place.conversion is not None:
                part = place.conversion.encode(part)
            self._move(info, place.path, part, place.begin(shared), place.strides)
            written += part.nbytes
            whole_rows = row_major(tuple(part.shape), part.itemsize) == place.strides
            if self._writeback is not None and whole_rows:
                self._writeback.note(self._open(place.path)[0], place.begin(shared), part.nbytes)
        return written

    def _move(self, info: TensorInfo, path: Path, array: Array, begin: int, strides: Sequence[int]) -> None:
        fd, mappable = self._open(path)
        with self._named_errors(info, path):
            for memory, offset, pitch in runs(array, begin, strides):
                raw_io.write_rows(fd, memory, offset, pitch, mappable=mappable)

    def write_pieces(self, name: str, pieces: Sequence[tuple[torch.Tensor, Sequence[int]]]) -> int:
        """Write several pieces of one tensor, as :meth:`write` does each.

        Pieces that lie side by side and make up whole rows are joined on their way into the file, which is up
        to ten times faster than writing each and takes no memory for the whole.

        Args:
            name: the tensor in the layout.
            pieces: (piece, offset) of each, which must not overlap.

        Returns:
            The bytes written.

        Raises:
            CheckpointError: no room, an I/O error.
            ValueError: a piece of another dtype or outside the tensor.
        """
        info = self._layout.infos[name]
        full = _shape_in_torch(info)
        for tensor, offset in pieces:
            _check_piece(info, tensor, tuple(offset), full)
        written = 0
        for group in _side_by_side([(tensor, tuple(offset)) for tensor, offset in pieces]):
            columns = None if name in self._layout.placements else _columns(group, full)
            if columns is None:
                written += sum(self.write(name, tensor, offset=offset) for tensor, offset in group)
                continue
            fd, _ = self._open(info.path)
            rows, width = columns[0].shape[0], info.nbytes // full[0]
            begin = info.offset + group[0][1][0] * width
            with self._named_errors(info, info.path):
                raw_io.write_joined(fd, columns, begin)
            if self._writeback is not None:
                self._writeback.note(fd, begin, rows * width)
            written += rows * width
        return written

    def start_writeback(self) -> None:
        """From now on let a background thread push written pages towards the disk, so that the last fsync,
        which waits for the disk, finds most of the work done."""
        with self._lock:
            if self._writeback is None and not self._closed:
                self._writeback = _Writeback()

    def sync(self) -> None:
        """Wait until everything this process and others wrote to the files it has opened is on disk.

        Raises:
            CheckpointError: the disk refused it.
        """
        with self._lock:
            files = dict(self._files)
        for path, (fd, _) in files.items():
            try:
                os.fdatasync(fd)
            except OSError as error:
                raise CheckpointError(
                    f"{self._directory / path}: cannot be written to disk: {error.strerror or error}"
                ) from error

    def close(self) -> None:
        """Stop the background thread and close the files. Does not wait for the disk."""
        with self._lock:
            self._closed = True
            writeback, self._writeback = self._writeback, None
        if writeback is not None:
            writeback.stop()
        with self._lock:
            while self._files:
                os.close(self._files.popitem()[1][0])

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _named_errors(self, info: TensorInfo, relative_path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            path = self._directory / relative_path
            if error.errno in raw_io.DISK_FULL:
                raise raw_io.disk_full(path, info.nbytes, error) from error
            raise CheckpointError(
                f"{path}: tensor {info.name!r} cannot be written: {error.strerror or error}"
            ) from error

    def _open(self, relative: Path) -> tuple[int, bool]:
        with self._lock:
            if self._closed:
                raise ValueError(f"{self._directory}: its writer is closed")
            if relative not in self._files:
                path = self._directory / relative
                try:
                    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                except OSError as error:
                    raise CheckpointError(f"{path}: cannot be opened: {error.strerror}") from error
                self._files[relative] = (fd, raw_io.can_map_for_writing(fd))
            return self._files[relative]

    def _note_written(
        self, fd: int, info: TensorInfo, tensor: torch.Tensor, start: tuple[int, ...], full: tuple[int, ...]
    ) -> None:
        writeback = self._writeback
        # Of the ranks that fill the same rows, the one with the last columns starts the writeback: pages
        # written back before their last piece arrives would be written twice.
        if writeback is None or (len(full) > 1 and start[1] + tensor.shape[1] < full[1]):
            return
        row = info.nbytes // full[0] if full else info.nbytes
        rows = (start[0], tensor.shape[0]) if full else (0, 1)
        writeback.note(fd, info.offset + rows[0] * row, rows[1] * row)


def _shape_in_torch(info: TensorInfo) -> tuple[int, ...]:
    return (*info.shape[:-1], info.shape[-1] // 2) if info.dtype == "F4" and info.shape else info.shape


def _check_piece(info: TensorInfo, tensor: torch.Tensor, start: tuple[int, ...], full: tuple[int, ...]) -> None:
    if dtype_name(tensor.dtype) != info.dtype or tensor.device.type != "cpu":
        raise ValueError(
            f"tensor {info.name!r} is planned as {info.dtype}, the piece is {tensor.dtype} on {tensor.device}"
        )
    shape = tuple(tensor.shape)
    fits = len(start) == len(full) == len(shape) and all(
        0 <= begin <= size - length for begin, length, size in zip(start, shape, full, strict=True)
    )
    if not fits:
        raise ValueError(
            f"tensor {info.name!r} has shape {list(full)}, "
            f"a piece of shape {list(shape)} at {list(start)} is outside it"
        )


_Placed = tuple["torch.Tensor", tuple[int, ...]]


def _side_by_side(pieces: Sequence[_Placed]) -> list[list[_Placed]]:
    """Group pieces of the same rows, each group ordered by column."""
    groups: dict[tuple[int, ...], list[_Placed]] = {}
    for number, (tensor, start) in enumerate(pieces):
        key = (start[0], tensor.shape[0]) if len(start) > 1 and tensor.numel() else (-1, number)
        groups.setdefault(key, []).append((tensor, start))
    return [sorted(group, key=lambda placed: placed[1]) for group in groups.values()]


def _columns(group: Sequence[_Placed], full: tuple[int, ...]) -> list[np.ndarray] | None:
    """The memory of pieces that side by side make up whole rows, as uint8 ``[rows, segment]`` each; else None."""
    if len(group) == 1:
        return None
    at = 0
    columns = []
    for tensor, start in group:
        if start[1] != at or tensor.shape[2:] != full[2:]:
            return None
        column = raw_io.row_bytes(tensor, 1)
        if column is None or column.shape[1] >= raw_io.WIDE_SEGMENT:
            return None
        columns.append(column)
        at += tensor.shape[1]
    return columns if at == full[1] else None


class _Writeback:
    """A thread that starts the writing of finished pages, a few MiB behind the writer."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._ranges: list[tuple[int, int, int]] = []
        self._pending = 0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="modelexport-writeback", daemon=True)
        self._thread.start()

    def note(self, fd: int, offset: int, length: int) -> None:
        with self._condition:
            last = self._ranges[-1] if self._ranges else None
            if last is not None and last[0] == fd and last[1] + last[2] == offset:
                self._ranges[-1] = (fd, last[1], last[2] + length)
            else:
                self._ranges.append((fd, offset, length))
            self._pending += length
            if self._pending >= _WRITEBACK_BYTES:
                self._condition.notify()

    def stop(self) -> None:
        with self._condition:
            self._stopping = True
            self._condition.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._condition:
                while not self._stopping and self._pending < _WRITEBACK_BYTES:
                    self._condition.wait()
                ranges, self._ranges, self._pending = self._ranges, [], 0
                stopping = self._stopping
            for fd, offset, length in ranges:
                raw_io.begin_writeback(fd, offset, length)
            if stopping:
                return
