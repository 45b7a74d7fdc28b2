"""Read back what an export wrote: checksums of every piece, a hash of every tensor, the error of every linear.

Runs in the ranks, each on its share of the modules, in chunks of rows that fit the cache; the same code with
one rank serves ``verify``. Sums run along a row first and then over rows, so that the figures do not
depend on how many ranks looked.
"""

from __future__ import annotations

import hashlib
import math
import re
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from modelexport.checkpoints import raw_io
from modelexport.checkpoints.safetensors.file import Checkpoint, Reader, TensorInfo, torch_dtype
from modelexport.inspection.verify import requantised
from modelexport.inspection.verify.items import AuditItem, ModuleCheck, WrittenPiece
from modelexport.quantization import kernels
from modelexport.sharding.plan import scale_range
from modelexport.system.tensor_memory import ReusableBuffer, tensor_bytes

CHUNK_BYTES = 4 << 20
# One-byte floats: all of these bits set is NaN (or, for e5m2, Inf).
_NOT_A_NUMBER = {torch.float8_e4m3fn: 0x7F, torch.float8_e5m2: 0x7C}


@dataclass
class AuditChunk:
    """Some rows of a module.

    Attributes:
        rows: of the weight.
        tensors: name within the module -> its part that belongs to these rows.
        spans: for those not read before, the rows of their own that ``tensors`` holds; None for a scalar.
        original: the source's rows, or None.
    """

    rows: tuple[int, int]
    tensors: dict[str, Tensor]
    spans: dict[str, tuple[int, int] | None]
    original: Tensor | None


def run_audit(
    items: Sequence[AuditItem],
    written: Checkpoint,
    source: Checkpoint | None,
    pieces: Mapping[str, Sequence[WrittenPiece]],
    *,
    threads: int = 1,
    thorough: bool = False,
    progress: Callable[[str], None] = lambda name: None,
    advance: Callable[[int], None] = lambda nbytes: None,
) -> list[ModuleCheck]:
    """Check every item; ``pieces`` maps a tensor's full name to what was written of it (or nothing).

    Args:
        thorough: look also for NaN, Inf and scales that are not positive, and round the source again to learn
            the error that it must have.
        progress: told the name of each module that is begun, from any of the threads.
        advance: told the bytes of each module that was checked, likewise.

    Raises:
        CheckpointError: a file ends early or cannot be read.
    """
    with ExitStack() as stack:
        out_reader = stack.enter_context(Reader(written))
        source_reader = None if source is None else stack.enter_context(Reader(source))

        def check(item: AuditItem) -> ModuleCheck:
            progress(item.name)
            chunks = read_chunks(item, out_reader, source_reader)
            checked = _check(item, chunks, pieces, thorough, maxima.get(item.shared))
            advance(item.nbytes)
            return checked

        maxima = requantised.shared_maxima(items, source, threads) if thorough else {}

        if threads <= 1 or len(items) <= 1:
            return [check(item) for item in items]
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(check, items))


def check_written(item: AuditItem, reader: Reader, pieces: Mapping[str, Sequence[WrittenPiece]]) -> ModuleCheck:
    """Checks one item, as :func:`run_audit` does where there is no source.

    Raises:
        CheckpointError: a file ends early or cannot be read.
    """
    return _check(item, read_chunks(item, reader, None), pieces, False)


class _Scratch(threading.local):
    """This thread's buffers, by name."""

    def __init__(self) -> None:
        self._buffers: dict[str, ReusableBuffer] = {}

    def take(self, name: str, info: TensorInfo, rows: tuple[int, int] | None) -> Tensor | None:
        """Room for some rows of a tensor; None for a scalar, which may be read into memory of its own."""
        if rows is None or info.dtype.startswith("F4"):
            return None
        dtype, shape = torch_dtype(info.dtype), (rows[1] - rows[0], *info.shape[1:])
        nbytes = math.prod(shape) * dtype.itemsize
        buffer = self._buffers.setdefault(name, ReusableBuffer())
        buffer.reserve(max(nbytes, CHUNK_BYTES))
        return buffer.take(shape, dtype)


_scratch = _Scratch()


def read_chunks(item: AuditItem, out_reader: Reader, source_reader: Reader | None) -> Iterator[AuditChunk]:
    """Read a module's tensors, and its source, in pieces of a few MB, each byte once.

    A chunk's tensors are valid until the next one of this thread is asked for.
    """
    weight = item.source or max(item.tensors.values(), key=lambda info: info.nbytes)
    kept: dict[str, Tensor] = {}
    for rows in _row_chunks(weight, item.rows_together):
        chunk = AuditChunk(rows, dict(kept), {}, None)
        for key, info in item.tensors.items():
            if key in kept:
                continue
            span = _rows_of(item, key, info, weight, rows)
            if span is None:  # does not vary with the rows
                span = (0, info.shape[0]) if info.shape else None
                kept[key] = out_reader.read(info, rows=span)
            if key in kept:
                chunk.tensors[key] = kept[key]
            else:
                chunk.tensors[key] = out_reader.read(info, rows=span, out=_scratch.take(key, info, span))
            chunk.spans[key] = span
        if item.source is not None and source_reader is not None:
            span = rows if item.source.shape else None
            room = _scratch.take("source of it", item.source, span)
            chunk.original = source_reader.read(item.source, rows=span, out=room)
        yield chunk


def _check(
    item: AuditItem,
    chunks: Iterator[AuditChunk],
    pieces: Mapping[str, Sequence[WrittenPiece]],
    thorough: bool,
    amax: Tensor | None = None,
) -> ModuleCheck:
    hashes = {key: hashlib.sha256() for key in item.tensors}
    written = {key: pieces.get(info.name, ()) for key, info in item.tensors.items()}
    crcs = {key: [0] * len(parts) for key, parts in written.items()}
    errors: list[Tensor] = []
    nearest: list[Tensor] = []
    unlike: Counter[str] = Counter()
    faults: Counter[tuple[str, str]] = Counter()
    identical: bool | None = None
    for chunk in chunks:
        for key, span in chunk.spans.items():
            data = chunk.tensors[key].contiguous()
            hashes[key].update(tensor_bytes(data).data)
            for number, piece in enumerate(written[key]):
                part = _part(piece, data, span)
                if part is not None:
                    crcs[key][number] = zlib.crc32(tensor_bytes(part).data, crcs[key][number])
            if thorough:
                faults.update({(key, what): count for what, count in value_faults(key, data).items()})
        if chunk.original is None:
            continue
        if item.number_format is None:
            equal = all(_same(tensor, chunk.original) for tensor in chunk.tensors.values())
            identical = equal and identical is not False
            continue
        native = item.native(chunk.tensors, chunk.rows)
        errors.append(item.number_format.squared_error(chunk.original, native))
        if thorough:
            rounded = requantised.nearest(item.number_format, chunk.original, native, amax, item.name)
            nearest.append(item.number_format.squared_error(chunk.original, rounded))
            unlike.update(requantised.unlike(rounded, native))
    damaged = tuple(
        f"{item.tensors[key].name} at {list(piece.offset)}, shape {list(piece.shape)}"
        for key in sorted(item.tensors)
        for piece, crc in zip(written[key], crcs[key], strict=True)
        if piece.crc32 != crc
    )
    noise, signal = _sums(errors)
    return ModuleCheck(
        item.name,
        {item.tensors[key].name: digest.hexdigest() for key, digest in sorted(hashes.items())},
        noise,
        signal,
        damaged,
        nearest_noise=_sums(nearest)[0],
        unlike=unlike if nearest else None,
        identical=identical,
        faults=tuple(f"{item.tensors[key].name} holds {n:,} {what}" for (key, what), n in sorted(faults.items())),
    )


_SCALE = re.compile(r"(?:weight|input|output|[qkv])_(?:global_)?scale|scales$|scaling_factor")
"""Names of scales that methods of quantisation store; parameters of models may be called scales too."""


def value_faults(key: str, data: Tensor) -> dict[str, int]:
    """Values that a tensor called ``key`` within its module must not hold -> their number; empty if there are none."""
    code_mask = _NOT_A_NUMBER.get(data.dtype)
    if code_mask is not None:
        codes = data.view(torch.uint8) & code_mask
        bad = data.numel() > 0 and int(codes.max()) == code_mask
        return {"NaN": int((codes == code_mask).sum())} if bad else {}
    if not data.dtype.is_floating_point or data.dtype.itemsize < 2 or not data.numel():
        return {}
    counts = {}
    wide = data.dtype == torch.float64
    amax = data if wide else kernels.row_amax(data.view(data.shape[0] if data.dim() > 1 else 1, -1))
    if not bool(torch.isfinite(amax).all()):
        counts = {"NaN": int(data.isnan().sum()), "Inf": int(data.isinf().sum())}
    if _SCALE.match(key):
        counts["values that are zero or less, though it is a scale"] = int((data <= 0).sum())
    return {what: count for what, count in counts.items() if count}


def _sums(rows: list[Tensor]) -> tuple[float | None, float | None]:
    if not rows:
        return None, None
    table = torch.cat(rows)
    return math.fsum(table[:, 0].tolist()), math.fsum(table[:, 1].tolist())


def _same(a: Tensor, b: Tensor) -> bool:
    return (a.dtype, a.shape) == (b.dtype, b.shape) and raw_io.same_bytes(a, b)


def _row_chunks(weight: TensorInfo, together: int | None) -> Iterator[tuple[int, int]]:
    rows = weight.shape[0] if weight.shape else 1
    if together is None:
        together = max(1, rows)
    step = max(1, CHUNK_BYTES // max(1, weight.nbytes // max(1, rows)) // together) * together
    for start in range(0, max(rows, 1), step):
        yield start, min(start + step, rows)


def _rows_of(
    item: AuditItem, key: str, info: TensorInfo, weight: TensorInfo, rows: tuple[int, int]
) -> tuple[int, int] | None:
    """Rows of tensor ``key`` that belong to the weight's ``rows``; None where it does not vary with them."""
    if item.number_format is None or item.source is None or key not in item.axes:
        same = info.shape[:1] == weight.shape[:1]
        return rows if same and info.shape else None
    axes = item.axes[key]
    if item.rows_together is None:
        return None
    axis = axes[0] if axes else None
    return None if axis is None or axis[0] != 0 else scale_range(rows, axis[1], info.shape[0])


def _part(piece: WrittenPiece, data: Tensor, span: tuple[int, int] | None) -> Tensor | None:
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
