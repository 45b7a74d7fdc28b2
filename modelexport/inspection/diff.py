"""``modelexport diff``: do two checkpoints hold the same model, whatever their formats and parallelisms?

The same tensors by name, of the same dtype and shape, equal to the bit; and in a sharded checkpoint all replicas of an
element equal too. Reads every byte of both once, in rows that fit the cache.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelexport.checkpoints import raw_io
from modelexport.checkpoints.replicas import CHUNK_BYTES, chunks, odd_replica
from modelexport.checkpoints.safetensors.file import Checkpoint, Reader
from modelexport.errors import CheckpointError, PlanError
from modelexport.models.language_part import part_as
from modelexport.models.opening import open_model
from modelexport.models.rules import left_out
from modelexport.models.stacked import apart_as
from modelexport.models.structure import described_as
from modelexport.models.ties import check_ties
from modelexport.system.dtypes import as_integers
from modelexport.system.small_files import has_file

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class TensorDifference:
    """One tensor that is not the same in both.

    Attributes:
        what: ``only in A``, ``only in B``, ``dtype``, ``shape``, ``values``, or ``replicas`` (of one checkpoint).
        text: what was found, in words.
        elements: how many differ; 0 where they could not be compared.
        first: index of the first element that differs, and its value in A and in B.
        largest: the largest difference of two values; None where they are not comparable (NaN, packed numbers).
    """

    tensor: str
    what: str
    text: str
    elements: int = 0
    first: tuple[int, ...] | None = None
    values: tuple[float, float] | None = None
    largest: float | None = None


@dataclass
class Diff:
    """Differences between two checkpoints, and what they have in common.

    Attributes:
        tensors, nbytes: that were compared, and their size in A.
        differences: in A's order of tensors.
        left_out: tensors of one of the two that are no part of the model -> what they are: buffers that engines compute
            themselves, a second copy of tied embeddings.
    """

    a: str
    b: str
    formats: tuple[str, str] = ("", "")
    tensors: int = 0
    nbytes: int = 0
    differences: list[TensorDifference] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        """True if they hold the same."""
        return not self.differences

    def as_json(self) -> dict[str, Any]:
        """JSON-able form, for ``--json``."""
        return {"equal": self.equal, **asdict(self)}


def diff_checkpoints(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    config: str | os.PathLike[str] | None = None,
    *,
    threads: int | None = None,
) -> Diff:
    """Compare two checkpoints; see the module's docstring.

    Args:
        config: the model's config.json, for whichever of the two has none of its own.
        threads: that read and compare side by side; None: one for every core this process may use.

    Raises:
        CheckpointError: one of them cannot be read, is not whole, or lacks a config.json.

    Example:
        ::

            >>> modelexport.diff("ckpt", "sharded").equal
            True
    """
    left, right = (_open(path, config) for path in (a, b))
    result = Diff(os.fspath(a), os.fspath(b), (left.format, right.format))
    left, right = described_as(left, right), described_as(right, left)
    left, right = apart_as(left, right), apart_as(right, left)
    left, right = part_as(left, right), part_as(right, left)
    common = []
    for name, info in left.infos.items():
        other = right.infos.get(name)
        if other is not None and other.shape != info.shape:
            text = f"shape {list(info.shape)} in {a}, {list(other.shape)} in {b}"
            result.differences.append(TensorDifference(name, "shape", text))
        elif other is not None:
            common.append(name)
    for side, path, mine, others in (("A", a, left, right), ("B", b, right, left)):
        alone = [name for name in mine.infos if name not in others.infos]
        spare = _no_part_of_the_model(mine) if alone else {}
        result.left_out |= {name: spare[name] for name in alone if name in spare}
        result.differences += [
            TensorDifference(name, f"only in {side}", f"only in {path}") for name in alone if name not in spare
        ]
    result.tensors = len(common)
    result.nbytes = sum(left.infos[name].nbytes for name in common)
    with Reader(left) as first, Reader(right) as second, _workers(threads) as pool:
        compare = _Comparison(left, right, first, second)
        for found in pool.map(compare, common):
            result.differences += found
    order = {name: number for number, name in enumerate(left.infos)}
    result.differences.sort(key=lambda found: order.get(found.tensor, len(order)))
    return result


def _open(directory: str | os.PathLike[str], config: str | os.PathLike[str] | None) -> Checkpoint:
    own = has_file(Path(directory), "config.json")
    return open_model(directory, None if own else config)


def _no_part_of_the_model(checkpoint: Checkpoint) -> dict[str, str]:
    """Returns tensors that no other checkpoint of the model needs -> the reason; a head is a copy only if equal."""
    try:
        check_ties(checkpoint)
        return left_out(checkpoint)
    except (CheckpointError, PlanError):  # no model that is known, or one that contradicts its config: all of it counts
        return {}


@contextmanager
def _workers(threads: int | None) -> Iterator[ThreadPoolExecutor]:
    """A pool for tensors; each of its threads computes with one thread."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads or len(os.sched_getaffinity(0))) as pool:
            yield pool
    finally:
        torch.set_num_threads(before)


class _Comparison:
    """Compares one tensor after another."""

    def __init__(self, left: Checkpoint, right: Checkpoint, first: Reader, second: Reader) -> None:
        self.sides = ((left, first), (right, second))

    def __call__(self, name: str) -> list[TensorDifference]:
        (left, first), (right, second) = self.sides
        info, other = left.infos[name], right.infos[name]
        differing, index, values, largest = 0, None, None, 0.0
        replicas: dict[str, TensorDifference] = {}
        for box in chunks(info, CHUNK_BYTES):
            rows = box[0] if box else None
            mine, theirs = first.read(info, rows=rows), second.read(other, rows=rows)
            for checkpoint, reader, read in ((left, first, mine), (right, second, theirs)):
                text = odd_replica(checkpoint, reader, checkpoint.infos[name], box, read)
                if text is not None:
                    replicas.setdefault(str(checkpoint.directory), TensorDifference(name, "replicas", text))
            if info.dtype == other.dtype and raw_io.same_bytes(mine, theirs):
                continue
            unequal, gap = _unequal(mine, theirs)
            count = int(unequal.sum())
            if count and index is None:
                where = [int(i) for i in unequal.nonzero()[0]]
                values = (_number(mine[tuple(where)]), _number(theirs[tuple(where)]))
                index = tuple(i + start for i, (start, _) in zip(where, box, strict=True))
            differing += count
            largest = math.nan if gap is None else max(largest, gap)
        found = list(replicas.values())
        if info.dtype != other.dtype:
            how = "the same values" if not differing else f"{differing:,} of {math.prod(info.shape):,} values differ"
            text = f"{info.dtype} in {left.directory}, {other.dtype} in {right.directory}; {how}"
            found.append(TensorDifference(name, "dtype", text, differing, index, values))
        elif differing:
            assert index is not None
            assert values is not None
            text = (
                f"{differing:,} of {math.prod(info.shape):,} elements differ, first {list(index)}: "
                f"{values[0]:g} in {left.directory}, {values[1]:g} in {right.directory}"
            )
            finite = None if math.isnan(largest) else largest
            found.append(TensorDifference(name, "values", text, differing, index, values, finite))
        return found


def _unequal(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, float | None]:
    """A mask of the elements that differ, and the largest difference; None where a value is no number.

    Of one dtype they differ by their bits; of two, by their values.
    """

    unequal = as_integers(a) != as_integers(b) if a.dtype == b.dtype else a.double() != b.double()
    if not bool(unequal.any()) or a.dtype.is_complex:
        return unequal, 0.0 if not bool(unequal.any()) else None
    gap = float((a[unequal].double() - b[unequal].double()).abs().max())
    return unequal, gap if math.isfinite(gap) else None


def _number(value: torch.Tensor) -> float:
    return float(value.abs() if value.is_complex() else value.double())
