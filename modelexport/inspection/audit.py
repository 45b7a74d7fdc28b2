"""Read back what an export wrote: checksums of every piece, a hash of every tensor, the error of every linear.

Runs in the ranks, each on its share of the modules, in chunks of rows that fit the cache; the same code with
one rank serves ``verify``. Sums run along a row first and then over rows, so that the figures do not
depend on how many ranks looked.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from modelexport.checkpoints.safetensors_file import Checkpoint, Reader, TensorInfo
from modelexport.errors import CheckpointError
from modelexport.sharding.plan import scale_range

if TYPE_CHECKING:
    from modelexport.quantization.formats import NumberFormat

CHUNK_BYTES = 4 << 20


@dataclass(frozen=True)
class Piece:
    """A rectangle of a tensor as a rank wrote it, and the CRC-32 of its bytes in row-major order."""

    name: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    crc32: int

    def as_json(self) -> list[Any]:
        """A JSON-able form; ``Piece.from_json`` is its inverse."""
        return [self.name, list(self.offset), list(self.shape), self.crc32]

    @classmethod
    def from_json(cls, value: Sequence[Any]) -> Piece:
        """Inverse of :meth:`as_json`."""
        name, offset, shape, crc = value
        return cls(name, tuple(offset), tuple(shape), crc)


@dataclass(frozen=True)
class Item:
    """What is audited together: one module's written tensors and the weight they were made from.

    Attributes:
        tensors: name within the module -> where it lies in the checkpoint.
        source: the unquantised weight, or None where only hashes are wanted.
        number_format: decodes ``tensors``; None for a module that was passed through.
    """

    name: str
    tensors: Mapping[str, TensorInfo]
    source: TensorInfo | None
    number_format: NumberFormat | None


@dataclass(frozen=True)
class ModuleCheck:
    """Result for one module.

    Attributes:
        sha256: full tensor name -> SHA-256 of its bytes as they lie in the file.
        noise, signal: sums over the weight of (w - dequantised)^2 and w^2; None if not compared.
        damaged: pieces whose bytes are not those that were written.
    """

    name: str
    sha256: dict[str, str]
    noise: float | None
    signal: float | None
    damaged: tuple[str, ...]

    @property
    def sqnr_db(self) -> float | None:
        """Signal to quantisation noise in dB; infinite where nothing was lost, None if not compared."""
        if self.noise is None or self.signal is None:
            return None
        if self.noise == 0:
            return math.inf
        return 10 * math.log10(self.signal / self.noise) if self.signal > 0 else -math.inf


def run_audit(
    items: Sequence[Item],
    written: Checkpoint,
    source: Checkpoint | None,
    pieces: Mapping[str, Sequence[Piece]],
    *,
    threads: int = 1,
) -> list[ModuleCheck]:
    """Check every item; ``pieces`` maps a tensor's full name to what was written of it (or nothing).

    Raises:
        CheckpointError: a file ends early or cannot be read.
    """
    out_reader = Reader(written)
    source_reader = Reader(source) if source is not None else None
    try:
        if threads <= 1 or len(items) <= 1:
            return [_check(item, out_reader, source_reader, pieces) for item in items]
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(lambda item: _check(item, out_reader, source_reader, pieces), items))
    finally:
        out_reader.close()
        if source_reader is not None:
            source_reader.close()


def share(items: Iterable[Item], rank: int, world: int) -> list[Item]:
    """This rank's items: the largest first, each to the rank with the least to do so far."""

    def cost(item: Item) -> int:
        return sum(info.nbytes for info in item.tensors.values()) + (item.source.nbytes if item.source else 0)

    loads = [0] * world
    mine = []
    for item in sorted(items, key=lambda item: (-cost(item), item.name)):
        chosen = loads.index(min(loads))
        loads[chosen] += cost(item)
        if chosen == rank:
            mine.append(item)
    return mine


def _check(
    item: Item, out_reader: Reader, source_reader: Reader | None, pieces: Mapping[str, Sequence[Piece]]
) -> ModuleCheck:
    names = {info.name for info in item.tensors.values()}
    hashes = {name: hashlib.sha256() for name in names}
    crcs = {name: [0] * len(pieces.get(name, ())) for name in names}
    weight = item.source or max(item.tensors.values(), key=lambda info: info.nbytes)
    errors: list[Tensor] = []
    for rows in _row_chunks(weight):
        chunk: dict[str, Tensor] = {}
        for key, info in item.tensors.items():
            span = _rows_of(item, key, info, weight, rows)
            if span is None:  # does not vary with the rows: read once
                span = (0, info.shape[0]) if info.shape else None
                chunk[key] = out_reader.read(info, rows=span)
                if rows[0] > 0:
                    continue
            else:
                chunk[key] = out_reader.read(info, rows=span)
            data = chunk[key].contiguous()
            hashes[info.name].update(_bytes(data))
            for number, piece in enumerate(pieces.get(info.name, ())):
                part = _part(piece, data, span)
                if part is not None:
                    crcs[info.name][number] = zlib.crc32(_bytes(part), crcs[info.name][number])
        if item.number_format is not None and item.source is not None and source_reader is not None:
            original = source_reader.read(item.source, rows=rows)
            errors.append(item.number_format.squared_error(original, chunk))
    damaged = tuple(
        f"{name} at {list(piece.offset)}, shape {list(piece.shape)}"
        for name in sorted(names)
        for piece, crc in zip(pieces.get(name, ()), crcs[name], strict=True)
        if piece.crc32 != crc
    )
    noise = signal = None
    if errors:
        sums = torch.cat(errors)
        noise, signal = math.fsum(sums[:, 0].tolist()), math.fsum(sums[:, 1].tolist())
    digests = {name: digest.hexdigest() for name, digest in sorted(hashes.items())}
    return ModuleCheck(item.name, digests, noise, signal, damaged)


def _row_chunks(weight: TensorInfo) -> Iterator[tuple[int, int]]:
    rows = weight.shape[0] if weight.shape else 1
    step = max(1, CHUNK_BYTES // max(1, weight.nbytes // max(1, rows)))
    for start in range(0, max(rows, 1), step):
        yield start, min(start + step, rows)


def _rows_of(
    item: Item, key: str, info: TensorInfo, weight: TensorInfo, rows: tuple[int, int]
) -> tuple[int, int] | None:
    """Rows of tensor ``key`` that belong to the weight's ``rows``; None where it does not vary with them."""
    if item.number_format is None or key == "bias":
        same = info.shape[:1] == weight.shape[:1]
        return rows if same and info.shape else None
    from modelexport.checkpoints.safetensors_file import torch_dtype

    shape = weight.shape[0], weight.shape[1]
    for spec in item.number_format.specs(shape, torch_dtype(weight.dtype)):
        if spec.suffix == key:
            unit = spec.units[0] if spec.units else None
            return None if unit is None else scale_range(rows, unit, spec.shape[0])
    raise CheckpointError(f"{info.name}: format {item.number_format.name} stores no tensor '{key}'")


def _part(piece: Piece, data: Tensor, span: tuple[int, int] | None) -> Tensor | None:
    """The part of ``data`` (rows ``span`` of a tensor) that lies in ``piece``, or None."""
    if span is None:
        return data
    start, stop = max(span[0], piece.offset[0]), min(span[1], piece.offset[0] + piece.shape[0])
    if start >= stop:
        return None
    part = data[start - span[0] : stop - span[0]]
    for dim in range(1, data.dim()):
        part = part.narrow(dim, piece.offset[dim], piece.shape[dim])
    return part.contiguous()


def _bytes(tensor: Tensor) -> Any:
    return tensor.view(-1).view(torch.uint8).numpy() if tensor.numel() else b""
