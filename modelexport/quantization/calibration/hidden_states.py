"""Batches of hidden states between two layers, and what goes with them: in memory, above a budget in a nameless file.

A file of them, for a run that is to be resumed, is a safetensors file: one tensor for each batch, in order, named by
its number, and the SHA-256 of all their bytes as the last one.
"""

from __future__ import annotations

import errno
import hashlib
import os
import tempfile
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from modelexport.errors import CheckpointError
from modelexport.system.dtypes import dtype_name
from modelexport.system.safetensors_header import encode_header, parse_header
from modelexport.system.small_files import open_regular

__all__ = ["CarriedTensors", "HiddenStates"]

_ONE_CALL = 1 << 28  # one call moves at most 2 GiB
_FORMAT = "modelexport hidden states 1"
_CHECKSUM = "sha256"


class HiddenStates(Sequence[Tensor]):
    """A list of tensors of known shapes. Different places may be read and written by several threads at once.

    Args:
        shapes: of each batch.
        dtype: of all.
        device: that they are given on. They are kept in the host's memory all the same, where there is more of it.
        memory: bytes of them to keep in memory, the first batches; None for all. The rest goes through the file.
        directory: where the file is; None for the system's for temporary files. It has no name there, and ends with
            this process.

    Raises:
        CheckpointError: there is no room for the file, or the disk fails; so do all methods.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        dtype: torch.dtype,
        device: torch.device,
        *,
        memory: int | None = None,
        directory: str | os.PathLike[str] | None = None,
    ) -> None:
        self._shapes, self._dtype, self._device = list(shapes), dtype, device
        sizes = [torch.Size(shape).numel() * dtype.itemsize for shape in self._shapes]
        self._kept: dict[int, Tensor] = {}
        self._places: dict[int, int] = {}
        kept = on_disk = 0
        for number, size in enumerate(sizes):
            kept += size
            if memory is not None and kept > memory:
                self._places[number] = on_disk
                on_disk += size
        self._file: IO[bytes] | None = None
        if on_disk:
            with _named_errors(directory):
                self._file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 - open as long as this
                os.posix_fallocate(self._file.fileno(), 0, on_disk)  # no room shows now, not after hours
        self.in_memory = sum(sizes) - on_disk
        """Bytes that are kept in memory."""

    def __len__(self) -> int:
        return len(self._shapes)

    def __getitem__(self, number: Any) -> Any:
        """Batch ``number``; new memory where it came from the file."""
        number = range(len(self))[number]  # IndexError ends loops
        if number not in self._places:
            return _to_device(self._kept[number], self._device)
        assert self._file is not None
        out = torch.empty(self._shapes[number], dtype=self._dtype)
        _read(self._file.fileno(), _bytes_of(out), self._places[number])
        return out.to(self._device)

    def __setitem__(self, number: int, value: Tensor) -> None:
        """Replaces a batch; one on the CPU that stays in memory is kept itself."""
        assert tuple(value.shape) == tuple(self._shapes[number])
        assert value.dtype == self._dtype
        if number not in self._places:
            self._kept[number] = _to_host(value, self._device)
            return
        assert self._file is not None
        _write(self._file.fileno(), _bytes_of(value), self._places[number])

    def close(self) -> None:
        """Let go of memory and file."""
        self._kept.clear()
        if self._file is not None:
            self._file.close()

    def save(self, path: str | os.PathLike[str], index: int) -> None:
        """Write all batches and a number; ``path`` has either its old content or the new one at any time.

        One process at a time.

        Raises:
            CheckpointError: there is no room, or no such directory, or the disk fails.
        """
        path = Path(path)
        header = self._header(index)
        temporary = path.with_name(f".{path.name}.part")  # one name: what a killed run left is written over
        try:
            with _named_errors(path.parent), open(temporary, "wb") as file:
                file.write(header)
                digest = hashlib.sha256()
                for number in range(len(self)):
                    data = _bytes_of(self[number])
                    digest.update(data)
                    file.write(data)
                file.write(digest.digest())
                file.flush()
                os.fsync(file.fileno())
            with _named_errors(path.parent):
                os.replace(temporary, path)
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)

    def restore(self, path: str | os.PathLike[str]) -> int | None:
        """Take all batches from a file; the number that they were saved with, or None where there is no such file.

        Raises:
            CheckpointError: the file holds something else, or is damaged. Batches may have been replaced.
        """
        path = Path(path)
        if not path.exists():
            return None
        with _named_errors(path.parent), open_regular(path) as file:
            expected = len(self._header(0))
            found = file.read(expected)
            index = _index_in(found)
            if index is None or found != self._header(index):
                raise CheckpointError(
                    f"{path} does not hold the hidden states of {len(self)} batches of {self._shapes[0]}: it is of "
                    "another run, or cut short; remove it and start again"
                )
            digest = hashlib.sha256()
            for number in range(len(self)):
                batch = torch.empty(self._shapes[number], dtype=self._dtype)
                view = _bytes_of(batch)
                if file.readinto(view) != view.nbytes:
                    raise _damaged(path)
                digest.update(view)
                self[number] = batch
            if file.read() != digest.digest():
                raise _damaged(path)
        return index

    def _header(self, index: int) -> bytes:
        """Of a safetensors file; as long for any index."""
        tensors: list[tuple[str, str, Sequence[int], int]] = [
            (str(number), dtype_name(self._dtype), shape, torch.Size(shape).numel() * self._dtype.itemsize)
            for number, shape in enumerate(self._shapes)
        ]
        tensors.append((_CHECKSUM, "U8", (32,), 32))
        return encode_header(tensors, {"format": _FORMAT, "index": f"{index:08d}"})


class CarriedTensors:
    """Tensors of any shapes and dtypes by their keys. Several threads may read and write at once.

    Args:
        device: that they are given on. They are kept as :class:`HiddenStates` has it.
        memory: bytes of them to keep in memory, the first ones; None for all. The rest goes through the file.
        directory: of the file, as :class:`HiddenStates` has it.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        memory: int | None = None,
        directory: str | os.PathLike[str] | None = None,
    ) -> None:
        self._device, self._memory, self._directory = device, memory, directory
        self._kept: dict[Hashable, Tensor] = {}
        self._places: dict[Hashable, tuple[int, torch.Size, torch.dtype]] = {}
        self._used = self._end = 0
        self._file: Any = None
        self._lock = threading.Lock()

    def __getitem__(self, key: Hashable) -> Tensor:
        """The tensor; new memory where it came from the file."""
        if key not in self._places:
            return _to_device(self._kept[key], self._device)
        place, shape, dtype = self._places[key]
        out = torch.empty(shape, dtype=dtype)
        _read(self._file.fileno(), _bytes_of(out), place)
        return out.to(self._device)

    def __setitem__(self, key: Hashable, value: Tensor) -> None:
        """Keeps or replaces one.

        Raises:
            OSError: there is no room for it in the file.
        """
        with self._lock:
            place = self._place(key, value)
        if place is not None:
            _write(self._file.fileno(), _bytes_of(value), place)

    def _place(self, key: Hashable, value: Tensor) -> int | None:
        """Its place in the file, to be written to; None where it was kept in memory."""
        size = value.nbytes
        if key in self._places:
            place, shape, dtype = self._places[key]
            if (shape, dtype) == (value.shape, value.dtype):
                return place
            del self._places[key]
        self._used -= self._kept[key].nbytes if key in self._kept else 0
        if self._memory is None or self._used + size <= self._memory:
            self._used += size
            # A view would keep all that it is a part of.
            self._kept[key] = _to_host(value.contiguous(), self._device)
            return None
        self._kept.pop(key, None)
        place, self._end = self._end, self._end + size
        with _named_errors(self._directory):
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self._directory)  # noqa: SIM115 - open as long as this
            if size:
                os.posix_fallocate(self._file.fileno(), place, size)
        self._places[key] = (place, value.shape, value.dtype)
        return place

    def close(self) -> None:
        """Let go of memory and file."""
        self._kept.clear()
        if self._file is not None:
            self._file.close()


def _to_host(value: Tensor, device: torch.device) -> Tensor:
    """The tensor in the host's memory; itself where it is there, and the device is not a GPU of CUDA.

    That copies to and from page-locked memory while the host goes on: it is read by :func:`_to_device`, in whose stream
    the copy is done before.
    """
    if device.type != "cuda":
        return value.cpu()
    return torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)


def _to_device(value: Tensor, device: torch.device) -> Tensor:
    return value.to(device, non_blocking=device.type == "cuda")


def _index_in(header: bytes) -> int | None:
    try:
        return int(parse_header(header[8:])[1]["index"])
    except (ValueError, KeyError):
        return None  # the caller says so


def _damaged(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} is damaged: its hidden states do not have the checksum that it holds; remove it and start again"
    )


def _bytes_of(value: Tensor) -> memoryview:
    """The bytes of a tensor; of one on the CPU in one piece, its own memory."""
    flat = value.detach().cpu().contiguous().view(-1)
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type] # before Python 3.12 the stubs say so


def _read(fd: int, view: memoryview, place: int) -> None:
    _move(fd, view, place, lambda chunk, at: os.preadv(fd, [chunk], at))


def _write(fd: int, view: memoryview, place: int) -> None:
    _move(fd, view, place, lambda chunk, at: os.pwrite(fd, chunk, at))


def _move(fd: int, view: memoryview, place: int, call: Callable[[memoryview, int], int]) -> None:
    done = 0
    with _named_errors(None):
        while done < view.nbytes:
            moved = call(view[done : done + _ONE_CALL], place + done)
            if moved == 0:
                raise OSError(errno.EIO, f"a file of hidden states ends after {done} of {view.nbytes} bytes")
            done += moved


@contextmanager
def _named_errors(directory: str | os.PathLike[str] | None) -> Iterator[None]:
    """Errors of the disk as one sentence."""
    try:
        yield
    except OSError as error:
        where = tempfile.gettempdir() if directory is None else os.fspath(directory)
        raise CheckpointError(
            f"{where}: hidden states cannot be kept or read there: {error.strerror or error}"
        ) from error
