"""The work of a resharding, by one process: read, write wherever it belongs, read back and compare.

Bytes move without a meaning here, so nothing of this needs torch; a resharding by a single process is done before torch
would be imported. :mod:`modelexport.resharding.rank` makes several processes share the work.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelexport.checkpoints import raw_io
from modelexport.checkpoints.replicas import odd_replica
from modelexport.checkpoints.safetensors.file import Checkpoint, Layout, Reader, Writer
from modelexport.checkpoints.safetensors.placement import itemsize
from modelexport.checkpoints.staging import Staging
from modelexport.distributed.launch import phase, report
from modelexport.errors import CheckpointError
from modelexport.jobs.progress import ReadBack
from modelexport.models.opening import open_model
from modelexport.models.target_plan import places
from modelexport.resharding.plan import UNIT_BYTES, ReshardStep, Unit
from modelexport.sharding.boxes import extent, intersect, offset, relative, slices
from modelexport.system.run_log import in_layer

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class ReshardJob:
    """All that a process is told.

    Attributes:
        exchange: ``direct``, or an algorithm of :mod:`modelexport.sharding.exchange`.
        done: journal of an earlier run of the same resharding: step id -> its record.
        spread: the processes are on several machines.
    """

    source: Checkpoint
    steps: list[ReshardStep]
    layout: Layout
    out: Path
    exchange: str
    spread: bool
    timeout: float
    done: dict[str, dict[str, Any]]


def run_alone(job: ReshardJob) -> None:
    """All of the work, in this process; the result is reported."""
    with Staging.join(job.out) as staging, Resharding(job, staging, threads=len(os.sched_getaffinity(0))) as work:
        work.run()
        work.finish()


class _Buffers(threading.local):
    """This thread's memory, reused: touching fresh pages costs more than the copy."""

    def __init__(self) -> None:
        self._buffers: dict[str, np.ndarray] = {}

    def take(self, name: str, shape: tuple[int, ...], size: int) -> np.ndarray:
        """Room for elements of ``size`` bytes."""
        nbytes = size * math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.size < nbytes:
            buffer = self._buffers[name] = raw_io.empty((max(nbytes, UNIT_BYTES),), 1)
        return buffer[:nbytes].view(raw_io.empty((0,), size).dtype).reshape(shape)


class Resharding:
    """One process's part; here it is all of it."""

    def __init__(self, job: ReshardJob, staging: Staging, *, threads: int) -> None:
        self.job, self.staging = job, staging
        self.reader = Reader(job.source)
        self.layout = self.written_here()
        self.writer = Writer(self.layout, staging.directory)
        self.writer.start_writeback()
        self.pool = ThreadPoolExecutor(threads)
        self.buffers = _Buffers()

    def __enter__(self) -> Resharding:
        return self

    def __exit__(self, *exception: object) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)
        self.reader.close()
        self.writer.close()

    def run(self) -> None:
        """Move every step that is not done yet; while one is on its way, the next is begun."""
        report({"kind": "begin", "threads": 1})
        behind: tuple[ReshardStep, list[Future[Any]]] | None = None
        for step in [step for step in self.job.steps if step.id not in self.job.done]:
            phase(f"moving {step.id}")
            moving = in_layer(step.id, self.begin, step)
            if behind is not None:
                self.settle(*behind)
            behind = (step, moving)
        if behind is not None:
            self.settle(*behind)

    def finish(self) -> None:
        """Reopen what was written and compare it with the source, every place of every byte; report."""
        phase("flushing weight files to disk")
        self.writer.sync()
        self.wait_for_all()
        written = open_model(self.staging.directory)
        _same_tensors(self.job.steps, written)
        units = self.share([unit for step in self.job.steps for unit in step.units])
        phase("comparing what was written with the source")
        with Reader(written) as reader:
            comparing = [self.pool.submit(self.compare, unit, written, reader) for unit in units]
            compared = ReadBack(sum(unit.nbytes for unit in units))
            for unit, future in zip(units, comparing, strict=True):
                future.result()
                compared.add(unit.nbytes)
        self.report_result()

    # -------------------------------------------------- what several processes do otherwise

    def written_here(self) -> Layout:
        """The layout, as far as this process writes it."""
        return self.job.layout

    def share(self, units: Sequence[Unit]) -> list[Unit]:
        """Of some units, those that this process reads."""
        return list(units)

    def begin(self, step: ReshardStep) -> list[Future[Any]]:
        """Begin to move this process's share of a step."""
        return [self.pool.submit(self.move, unit) for unit in self.share(step.units)]

    def settle(self, step: ReshardStep, moving: Iterable[Future[Any]]) -> None:
        """Wait until a step is in the files, and note it."""
        all_of(moving)
        self.note(step)

    def wait_for_all(self) -> None:
        """Until all processes have written."""

    def report_result(self) -> None:
        """Tell whoever started this."""
        report({"kind": "result", "bytes_sent": 0})

    # ------------------------------------------------------------------ parts

    def note(self, step: ReshardStep) -> None:
        """A step is in the files."""
        self.staging.record(step.id, {"bytes": step.nbytes})
        report({"kind": "step", "step": step.id, "bytes": step.nbytes})

    def read(self, unit: Unit) -> np.ndarray:
        """A unit's elements; valid until this thread reads the next."""
        out = self.buffers.take("source", extent(unit.box), itemsize(unit.info))
        self.reader.read_box(unit.info, unit.box, out)
        return self.layout.settled(unit.info.name, out)

    def move(self, unit: Unit) -> None:
        """Read a unit and write it wherever it belongs."""
        read = self.read(unit)
        self.check_replicas(unit, read)
        self.writer.write_box(unit.info.name, unit.box, read)

    def check_replicas(self, unit: Unit, read: raw_io.Array) -> None:
        """The source's: which of two that differ is right, nobody knows."""
        text = odd_replica(self.job.source, self.reader, unit.info, unit.box, read)
        if text is not None:
            raise CheckpointError(f"{text}: {unit.info.name}; are its files of different runs? Nothing was published")

    def compare(self, unit: Unit, written: Checkpoint, reader: Reader) -> None:
        """A unit as the source has it, with every place that it was written to."""
        expected = self.read(unit)
        info = written.infos[unit.info.name]
        for place in places(written, info):
            shared = intersect(unit.box, place.box)
            if shared is None:
                continue
            found = self.buffers.take("written", extent(shared), itemsize(info))
            reader.read_place(info, place, shared, found)
            part = expected if shared == unit.box else expected[slices(relative(shared, unit.box))]
            if not raw_io.same_bytes(found, part):
                raise CheckpointError(
                    f"{place.path.name}: {info.name} {list(offset(shared))} + {list(extent(shared))} read back differs "
                    f"from {self.job.source.directory}: the storage or the memory is at fault, or the source was "
                    f"written to meanwhile; remove {self.staging.directory.parent} and run the same command again"
                )


def _same_tensors(steps: Iterable[ReshardStep], written: Checkpoint) -> None:
    for info in (unit.info for step in steps for unit in step.units):
        name, found = info.name, written.infos.get(info.name)
        if found is None or (found.dtype, found.shape) != (info.dtype, info.shape):
            state = "is missing" if found is None else f"is {found.dtype} {list(found.shape)}"
            raise CheckpointError(f"read back: {name} {state}; {info.dtype} {list(info.shape)} was to be written")


def all_of(futures: Iterable[Future[Any]]) -> None:
    """Wait for all; the first error is raised at once."""
    for future in list(futures):
        future.result()
