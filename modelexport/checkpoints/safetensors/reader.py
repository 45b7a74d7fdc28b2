"""Open a directory of safetensors files as one checkpoint, and read slices of its tensors lazily."""

from __future__ import annotations

import os
import re
import shlex
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from modelexport.checkpoints import raw_io
from modelexport.checkpoints.mirrors.mirror import Extent, mirror_of
from modelexport.checkpoints.safetensors.header import Header, TensorInfo, read_header
from modelexport.checkpoints.safetensors.placement import Placement, runs, whole_place
from modelexport.errors import CheckpointError, quoted
from modelexport.sharding.boxes import Box, relative, slices, tile, uncovered, whole
from modelexport.system.dtypes import dtype_bits, torch_dtype
from modelexport.system.small_files import LARGEST_CONFIG, open_regular, read_json

if TYPE_CHECKING:
    import torch

    from modelexport.checkpoints.raw_io import Array

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_NOT_A_MODELS = ("adapter_model.safetensors",)
_CONSOLIDATED = "consolidated"
_PART = re.compile(r"^(?P<stem>.*)-(?P<part>\d+)-of-(?P<parts>\d+)(?P<suffix>\.\w+)$")


class ComputedTensor(Protocol):
    """A tensor that lies nowhere, and is computed from others of the checkpoint as it is read. Can be pickled."""

    @property
    def sources(self) -> Collection[TensorInfo]:
        """The tensors that it is computed from."""

    def read(
        self, reader: Reader, rows: tuple[int, int], cols: tuple[int, int], out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Rows and columns of it, ``[rows, cols]``, in its dtype.

        Of a tensor of another number of dims: rows along dim 0 and columns along dim 1, where it has these.

        Args:
            out: memory of the shape of what is returned, which may be filled and returned; or left as it is.

        Raises:
            CheckpointError: a file cannot be read, or its values mean nothing.
        """


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint, headers read and checked, no data read.

    Attributes:
        directory: where it lies.
        infos: every tensor by name, files in the order of their names, tensors in the order of their data.
        config: ``config.json``, or None where there is none.
        headers: each safetensors file's header, by the file's path.
        placements: for tensors that lie in several arrays, or in a part of one, where their rectangles are; their
            ``infos`` then tell the whole tensor's dtype, shape and size, but no single place.
        format: the checkpoint format, as ``--format`` spells it.
        left_out: what else the files hold, which is no part of the model -> what it is.
        computed: tensors of ``infos`` that are computed from what lies in the files.
        notes: what to know of how it is read, a line each.
    """

    directory: Path
    infos: dict[str, TensorInfo]
    config: dict[str, Any] | None
    headers: dict[Path, Header]
    placements: Mapping[str, tuple[Placement, ...]] = field(default_factory=dict)
    format: str = "hf"
    left_out: Mapping[str, str] = field(default_factory=dict)
    computed: Mapping[str, ComputedTensor] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def files(self) -> list[Path]:
        """Every file that holds a tensor, each once, sorted."""
        placed = {place.path for places in self.placements.values() for place in places}
        stored = [info for name, info in self.infos.items() if name not in self.computed]
        stored += [info for tensor in self.computed.values() for info in tensor.sources]
        return sorted(placed | {info.path for info in stored if info.name not in self.placements})


def open_checkpoint(directory: str | os.PathLike[str]) -> Checkpoint:
    """Find a checkpoint's files, by its index where it has one, and check every header.

    Args:
        directory: holds ``model.safetensors.index.json`` and its shards, or ``model.safetensors``, or any
            safetensors files.

    Raises:
        CheckpointError: no safetensors there, an index that is damaged, points outside or disagrees with the
            files, a damaged file; names file and tensor.
    """
    directory = Path(directory)
    if not directory.is_dir():
        what = "is not a directory" if directory.exists() else "does not exist"
        raise CheckpointError(f"{directory}: {what}; a directory with safetensors files is needed")
    config = read_json(directory / "config.json", largest=LARGEST_CONFIG) if _lists(directory, "config.json") else None
    index = directory / INDEX_NAME
    weight_map = read_index(index) if _lists(directory, INDEX_NAME) else None
    if weight_map is not None:
        names = sorted(set(weight_map.values()))
        if SINGLE_NAME not in names and _lists(directory, SINGLE_NAME):
            raise CheckpointError(
                f"{directory}: has both {SINGLE_NAME} and {INDEX_NAME}, which does not mention it; "
                "remove the one that is stale"
            )
    else:
        names = _names_without_index(directory)
    headers = {directory / name: _read_part(directory / name, weight_map) for name in names}
    infos: dict[str, TensorInfo] = {}
    for header in headers.values():
        for name, info in header.infos.items():
            if name in infos:
                raise CheckpointError(f"tensor {quoted(name)} is in two files: {infos[name].path} and {info.path}")
            infos[name] = info
    if weight_map is not None:
        _check_index(index, weight_map, infos)
    return Checkpoint(directory, infos, config, headers)


def _lists(directory: Path, name: str) -> bool:
    # A dangling link counts as there: opening it then says what is wrong with it.
    return os.path.lexists(directory / name)


def read_index(path: Path) -> dict[str, str]:
    """The files of tensors, by the index of a checkpoint: name -> name of a file in the same directory.

    Raises:
        CheckpointError: it is damaged, or points outside of the directory.
    """
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{path}: has no weight_map from tensor names to files")
    for name, file in weight_map.items():
        # A plain name only: that keeps out "../", absolute paths and directories that are links elsewhere.
        if not isinstance(file, str) or file in ("", ".", "..") or any(c in file for c in "/\\\0"):
            raise CheckpointError(
                f"{path}: tensor {quoted(name)} is in {quoted(file)}, which is not the name of a file in that directory"
            )
    return weight_map


def _names_without_index(directory: Path) -> list[str]:
    if _lists(directory, SINGLE_NAME):
        return [SINGLE_NAME]
    listing = sorted(os.listdir(directory))
    names = [name for name in listing if name.endswith(".safetensors") and name not in _NOT_A_MODELS]
    # Mistral publishes its own layout beside Hugging Face's: the same numbers by other names.
    names = [name for name in names if not name.startswith(_CONSOLIDATED)] or names
    if names:
        check_parts(directory, names)
        return names
    if "adapter_config.json" in listing:
        raise CheckpointError(
            f"{directory}: holds an adapter, and not the model that it was trained on: give the model's directory, and "
            f"--adapter {shlex.quote(str(directory))}"
        )
    pickled = [name for name in listing if name.endswith(_PICKLED)]
    if pickled:
        here, there = shlex.quote(str(directory)), shlex.quote(f"{directory}-safetensors")
        raise CheckpointError(
            f"{directory}: holds its weights only as pickles ({', '.join(pickled[:3])}) of other names than "
            "pytorch_model.bin, which can run code when they are loaded and are refused. If you trust them, convert "
            "them: python -c 'import sys; from transformers import AutoModelForCausalLM as M; "
            f'M.from_pretrained(sys.argv[1], dtype="auto").save_pretrained(sys.argv[2])\' {here} {there}'
        )
    found = ", ".join(listing[:8]) or "nothing"
    raise CheckpointError(f"{directory}: holds no safetensors file; found {found}")


def check_parts(directory: Path, names: Collection[str]) -> None:
    """Check that all parts are there: without an index only their own count can tell that one was not copied along.

    Raises:
        CheckpointError: one is missing.
    """
    for name in names:
        match = _PART.match(name)
        if match is None or len(match["parts"]) > 9:
            continue
        width, parts = len(match["part"]), int(match["parts"])
        for part in range(1, parts + 1):
            wanted = f"{match['stem']}-{part:0{width}d}-of-{match['parts']}{match['suffix']}"
            if wanted not in names:
                raise CheckpointError(f"{directory}: {wanted} is missing ({name} says there are {parts})")


def _read_part(path: Path, weight_map: dict[str, str] | None) -> Header:
    if weight_map is not None and not os.path.lexists(path):
        tensors = [name for name, file in weight_map.items() if file == path.name]
        raise CheckpointError(
            f"{path}: missing; {INDEX_NAME} keeps {len(tensors)} tensors in it, the first {tensors[0]!r}"
        )
    return read_header(path)


def _check_index(index: Path, weight_map: dict[str, str], infos: dict[str, TensorInfo]) -> None:
    for name, file in weight_map.items():
        info = infos.get(name)
        if info is None or info.path.name != file:
            where = f"it is in {info.path.name}" if info is not None else "it is not there"
            raise CheckpointError(f"{index}: tensor {quoted(name)} should be in {file}, but {where}")
    for name, info in infos.items():
        if name not in weight_map:
            raise CheckpointError(f"{info.path}: tensor {quoted(name)} is not in {INDEX_NAME}")


class Reader:
    """Reads tensors of a checkpoint, or rectangles of them, and nothing else of it. Thread-safe.

    Rows go straight into the caller's memory with one positional read. Columns are copied row by row out of a
    mapping of at most a few MiB, so that memory stays bounded by what the caller gives.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._mirror = mirror_of(checkpoint.directory)
        self._fds: dict[Path, int] = {}
        self._lock = threading.Lock()
        self._closed = False

    def read(
        self,
        info: TensorInfo,
        *,
        rows: tuple[int, int] | None = None,
        cols: tuple[int, int] | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Read a tensor, or rows ``[start, end)`` of dim 0 and columns ``[start, end)`` of dim 1 of it.

        Args:
            info: which tensor.
            rows: part of dim 0; all of it where None.
            cols: part of dim 1 (in elements, for ``F4`` too); all of it where None.
            out: filled and returned; a CPU tensor of the slice's shape and dtype whose rows are contiguous (so
                a slice of a larger tensor along dim 0 or 1 will do). Reuse it: memory touched for the first
                time costs more than the copy.

        Returns:
            The slice, in torch's dtype and shape (``F4``: the last dim halved, as ``float4_e2m1fn_x2``).

        Raises:
            CheckpointError: the file cannot be read or has become shorter; torch lacks the dtype.
            ValueError: a slice outside the tensor, or an ``out`` that does not fit.
        """
        computed = self._checkpoint.computed.get(info.name)
        if computed is None:
            return self.read_stored(info, rows=rows, cols=cols, out=out)
        asked = zip((*info.shape, 1, 1), (rows, cols), strict=False)
        spans = [(0, size) if span is None else span for size, span in asked]
        found = computed.read(self, spans[0], spans[1], out)
        return found if out is None or found is out else out.copy_(found)

    def read_stored(
        self,
        info: TensorInfo,
        *,
        rows: tuple[int, int] | None = None,
        cols: tuple[int, int] | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As :meth:`read`, of what lies in the files, though a computed tensor may have its name."""
        import torch

        places = self._checkpoint.placements.get(info.name)
        shape, offset, pitch = _rectangle(info, rows, cols)
        dtype = torch_dtype(info.dtype)
        if out is None:
            out = torch.empty(shape, dtype=dtype)
        elif tuple(out.shape) != shape or out.dtype != dtype or out.device.type != "cpu":
            raise ValueError(
                f"tensor {quoted(info.name)}: the slice is {dtype} {list(shape)} on the CPU, "
                f"out is {out.dtype} {list(out.shape)} on {out.device}"
            )
        if places is not None:
            self._gather(info, places, _box(info, rows, cols), out)
            return out
        memory = raw_io.row_bytes(out, 1 if len(shape) > 1 else 0)
        if memory is None:
            raise ValueError(
                f"tensor {quoted(info.name)}: the rows of out must be contiguous, its strides are {out.stride()}"
            )
        self._fill(info.name, info.path, memory, offset, pitch)
        return out

    def read_box(self, info: TensorInfo, box: Box, out: Array) -> None:
        """Read the rectangle ``box`` of a tensor into memory of any kind: a CPU tensor or a numpy array.

        Args:
            out: of the rectangle's shape, with elements as large as the tensor's.

        Raises:
            CheckpointError: the file cannot be read or has become shorter, or no file holds a part of it.
        """
        if info.name in self._checkpoint.computed:
            self._compute(info, box, out)
            return
        places = self._checkpoint.placements.get(info.name)
        self._gather(info, (whole_place(info),) if places is None else places, box, out)

    def _compute(self, info: TensorInfo, box: Box, out: Array) -> None:
        """Fill memory with the rectangle of a computed tensor, byte by byte."""
        import torch

        found = self.read(info, rows=box[0] if box else None, cols=box[1] if len(box) > 1 else None)
        found = found[(slice(None), slice(None), *slices(box[2:]))] if len(box) > 2 else found
        held = out.view(torch.uint8) if isinstance(out, torch.Tensor) else torch.from_numpy(out.view("u1"))
        held.copy_(found.contiguous().view(torch.uint8))

    def read_place(self, info: TensorInfo, place: Placement, box: Box, out: Array) -> None:
        """Read the rectangle ``box`` of a tensor from one of its places, even where it lies in others too.

        Raises:
            CheckpointError: the file cannot be read or has become shorter.
        """
        if 0 in out.shape:
            return
        if place.conversion is not None:
            self._convert(info, place, box, out)
        else:
            for memory, begin, pitch in runs(out, place.begin(box), place.strides):
                self._fill(info.name, place.path, memory, begin, pitch)

    def _convert(self, info: TensorInfo, place: Placement, box: Box, out: Array) -> None:
        """Fill memory with numbers that are computed from those of a place."""
        import numpy as np

        assert place.conversion is not None
        stored = np.empty(out.shape, np.float32)
        for memory, begin, pitch in runs(stored, place.begin(box), place.strides):
            self._fill(info.name, place.path, memory, begin, pitch)
        found = place.conversion.decode(stored)
        if isinstance(out, np.ndarray):
            out[...] = found.view(out.dtype)
        else:
            import torch

            same = torch.from_numpy(found.view({2: np.int16, 4: np.int32, 8: np.int64}[found.itemsize]))
            out.copy_(same.view(out.dtype))

    def _gather(self, info: TensorInfo, places: tuple[Placement, ...], box: Box, out: Array) -> None:
        """Bring a rectangle together from the places that it lies in."""
        covers = [place.box for place in places]
        if 0 in out.shape:
            return
        missing = uncovered(box, covers)
        if missing:
            raise CheckpointError(
                f"{self._checkpoint.directory}: tensor {quoted(info.name)} of shape {list(info.shape)} is not whole: "
                f"no file holds its part {_ranges(missing[0])}"
            )
        for number, part in tile(box, covers):
            self.read_place(info, places[number], part, out if part == box else out[slices(relative(part, box))])

    def _fill(self, name: str, path: Path, memory: Any, offset: int, pitch: int) -> None:
        def read() -> int:
            return raw_io.read_rows(self._fd(path), memory, offset, pitch)

        try:
            if self._mirror is None:
                got = read()
            else:
                stop = offset + (memory.shape[0] - 1) * pitch + memory.shape[1] if memory.size else offset
                got = self._mirror.read(path, offset, stop, read)
        except OSError as error:
            raise CheckpointError(f"{path}: tensor {quoted(name)} cannot be read: {error.strerror or error}") from error
        if got != memory.size:
            raise CheckpointError(
                f"{path}: tensor {quoted(name)}: {memory.size:,} bytes expected, {got:,} found; "
                "the file was cut short while it was being read"
            )

    def close(self) -> None:
        """Close every file. Reading afterwards is an error."""
        with self._lock:
            self._closed = True
            while self._fds:
                os.close(self._fds.popitem()[1])

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _fd(self, path: Path) -> int:
        with self._lock:
            if self._closed:
                raise ValueError(f"{self._checkpoint.directory}: its reader is closed")
            fd = self._fds.get(path)
            if fd is None:
                try:
                    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                except OSError as error:
                    raise CheckpointError(f"{path}: cannot be opened: {error.strerror}") from error
                self._fds[path] = fd
            return fd


def extents(checkpoint: Checkpoint, info: TensorInfo, rows: tuple[int, int] | None = None) -> Iterator[Extent]:
    """The parts of files that a tensor is read from.

    Args:
        rows: of dim 0, where only these are; of a tensor that lies in one place.
    """
    computed = checkpoint.computed.get(info.name)
    for source in (info,) if computed is None else computed.sources:
        places = checkpoint.placements.get(source.name)
        for place in places or ():
            reach = sum((stop - start - 1) * step for (start, stop), step in zip(place.box, place.strides, strict=True))
            yield place.path, place.offset, place.offset + reach + min((*place.strides, source.nbytes))
        if places is None:
            start, stop = (0, source.nbytes)
            if rows is not None and computed is None and source.shape and source.shape[0]:
                start, stop = (row * source.nbytes // source.shape[0] for row in rows)
            yield source.path, source.offset + start, source.offset + stop


def begin_reading(parts: Iterable[Extent]) -> None:
    """Asks the kernel to bring parts of files into its cache, without waiting for them."""
    for path, start, stop in parts:
        if hasattr(os, "posix_fadvise"):
            with suppress(OSError, CheckpointError), open_regular(path) as file:  # whoever reads it says what is wrong
                os.posix_fadvise(file.fileno(), start, stop - start, os.POSIX_FADV_WILLNEED)


def _rectangle(
    info: TensorInfo, rows: tuple[int, int] | None, cols: tuple[int, int] | None
) -> tuple[tuple[int, ...], int, int]:
    """torch's shape of a slice, the file offset of its first byte, and the bytes from one row to the next."""
    shape, bits = list(info.shape), dtype_bits(info.dtype)
    starts = [0, 0]
    for dim, part in enumerate((rows, cols)):
        if part is None:
            continue
        if dim >= len(shape) or not 0 <= part[0] <= part[1] <= shape[dim]:
            raise ValueError(f"tensor {quoted(info.name)}: {part} of dim {dim} is outside its shape {list(info.shape)}")
        starts[dim], shape[dim] = part[0], part[1] - part[0]
    row_bits = _share(8 * info.nbytes, info.shape, 0)
    start_bits = starts[0] * row_bits + starts[1] * _share(row_bits, info.shape, 1)
    if bits < 8 and shape and (shape[-1] % 2 or start_bits % 8):
        raise ValueError(
            f"tensor {quoted(info.name)}: {info.dtype} can only be cut between whole bytes, asked {rows}, {cols}"
        )
    if bits == 4 and shape:
        shape[-1] //= 2
    return tuple(shape), info.offset + start_bits // 8, row_bits // 8


def _box(info: TensorInfo, rows: tuple[int, int] | None, cols: tuple[int, int] | None) -> Box:
    box = list(whole(info.shape))
    for dim, part in enumerate((rows, cols)):
        if part is not None:
            box[dim] = part
    return tuple(box)


def _ranges(box: Box) -> str:
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]"


def _share(bits: int, shape: tuple[int, ...], dim: int) -> int:
    """Bits of one of the ``shape[dim]`` parts of something that takes ``bits``."""
    return bits // shape[dim] if dim < len(shape) and shape[dim] else 0
