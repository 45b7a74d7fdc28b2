"""What one process of a resharding does: read its share of every step, put it where it belongs, compare.

``direct``: a process writes what it has read wherever it belongs. Otherwise each file has one writer (two machines
must not write into one file of a network file system), and what others have read for it is exchanged first.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelexport.checkpoints import raw_io
from modelexport.checkpoints.placement import Placement
from modelexport.checkpoints.replicas import odd_replica
from modelexport.checkpoints.safetensors_file import Checkpoint, Layout, Reader, TensorInfo, Writer, torch_dtype
from modelexport.checkpoints.staging import Staging
from modelexport.contents.opening import open_model
from modelexport.contents.targets import places
from modelexport.distributed import collectives, gather, memory, ranks
from modelexport.distributed.launch import phase, report
from modelexport.errors import CheckpointError
from modelexport.reshard_plan import UNIT_BYTES, Step, Unit, deal
from modelexport.sharding.boxes import Box, extent, intersect, offset, relative, slices
from modelexport.sharding.exchange import ExchangeReport
from modelexport.sharding.reshard import reshard
from modelexport.sharding.tensor import ShardedTensor


@dataclass(frozen=True)
class ReshardJob:
    """All that a process is told.

    Attributes:
        config: path of the config.json that was given for the source, or None.
        exchange: ``direct``, or an algorithm of :mod:`modelexport.sharding.exchange`.
        done: journal of an earlier run of the same resharding: step id -> its record.
        spread: the processes are on several machines.
    """

    source: Checkpoint
    steps: list[Step]
    layout: Layout
    out: Path
    exchange: str
    spread: bool
    timeout: float
    done: dict[str, dict[str, Any]]


def run_rank(job: ReshardJob) -> None:
    """Entry point of a process; rank 0 reports the result."""
    with Staging.join(job.out) as staging, _Resharding(job, staging) as work:
        work.run()
        work.finish()


class _Buffers(threading.local):
    """This thread's memory, reused: touching fresh pages costs more than the copy."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        nbytes = dtype.itemsize
        for size in shape:
            nbytes *= size
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < nbytes:
            buffer = self._buffers[name] = torch.empty(max(nbytes, UNIT_BYTES), dtype=torch.uint8)
        return buffer[:nbytes].view(dtype).view(shape)


class _Resharding:
    """One process's part."""

    def __init__(self, job: ReshardJob, staging: Staging) -> None:
        self.job, self.staging = job, staging
        self.rank, self.world = collectives.get_rank(), collectives.get_world_size()
        self.everyone = list(range(self.world))
        self.reader = Reader(job.source)
        self.layout = job.layout if job.exchange == "direct" else self._owned()
        self.writer = Writer(self.layout, staging.directory)
        self.writer.start_writeback()
        self.pool = ThreadPoolExecutor(torch.get_num_threads())
        self.buffers = _Buffers()
        self.sent = 0
        gather.set_timeout(job.timeout)
        if not job.spread:
            gather.connect(self.everyone)

    def __enter__(self) -> _Resharding:
        return self

    def __exit__(self, *exception: object) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)
        self.reader.close()
        self.writer.close()

    def run(self) -> None:
        """Move every step that is not done yet; while one is on its way, the next is begun."""
        behind: tuple[Step, list[Future[Any]]] | None = None
        for step in [step for step in self.job.steps if step.id not in self.job.done]:
            phase(f"moving {step.id}")
            mine = self._mine(step.units)
            if self.job.exchange == "direct":
                moving = [self.pool.submit(self._move, unit) for unit in mine]
            else:
                moving = self._exchange(step, mine)
            if behind is not None:
                self._settle(*behind)
            behind = (step, moving)
        if behind is not None:
            self._settle(*behind)

    def finish(self) -> None:
        """Reopen what was written and compare it with the source, every place of every byte; report."""
        phase("flushing weight files to disk")
        self.writer.sync()
        phase("waiting for the other ranks to finish writing", waiting=True)
        ranks.barrier()
        written = open_model(self.staging.directory)
        _same_tensors(self.job.steps, written)
        units = self._mine([unit for step in self.job.steps for unit in step.units])
        phase("comparing what was written with the source")
        with Reader(written) as reader:
            _all(self.pool.submit(self._compare, unit, written, reader) for unit in units)
        totals = ranks.gather_from_all_ranks(lambda: self.sent)
        if totals is not None:
            report({"kind": "result", "bytes_sent": sum(totals)})

    # ------------------------------------------------------------------ parts

    def _mine(self, units: Sequence[Unit]) -> list[Unit]:
        owners = deal([unit.nbytes for unit in units], self.world)
        return [unit for unit, owner in zip(units, owners, strict=True) if owner == self.rank]

    def _owned(self) -> Layout:
        """The layout without the files that other processes write."""
        files = self.job.layout.files
        owners = dict(zip([Path(f.name) for f in files], deal([f.size for f in files], self.world), strict=True))
        mine = {
            name: tuple(place for place in places(self.job.layout, info) if owners[place.path] == self.rank)
            for name, info in self.job.layout.infos.items()
        }
        self.owners = owners
        return replace(self.job.layout, placements=mine)

    def _read(self, unit: Unit) -> Tensor:
        shape = extent(unit.box)
        out = self.buffers.take("source", shape, torch_dtype(unit.info.dtype))
        return self.reader.read(unit.info, rows=unit.rows, out=out)

    def _move(self, unit: Unit) -> None:
        read = self._read(unit)
        self._check_replicas(unit, read)
        self.writer.write(unit.info.name, read, offset=offset(unit.box))

    def _check_replicas(self, unit: Unit, read: Tensor) -> None:
        """The source's: which of two that differ is right, nobody knows."""
        text = odd_replica(self.job.source, self.reader, unit.info, unit.box, read)
        if text is not None:
            raise CheckpointError(f"{text}: {unit.info.name}; are its files of different runs? Nothing was published")

    def _exchange(self, step: Step, mine: Sequence[Unit]) -> list[Future[Any]]:
        """Read this process's share, get what its files need, and begin to write it."""
        held = [_shard(unit.info, unit.box, self._read_to_share(unit)) for unit in mine]
        boxes: dict[tuple[str, Box], TensorInfo] = {}
        for unit in step.units:
            for place in self.layout.placements[unit.info.name]:
                shared = intersect(unit.box, place.box)
                if shared is not None:
                    boxes[unit.info.name, shared] = unit.info
        wanted = [_shard(info, box, None) for (_, box), info in boxes.items()]
        phase(f"exchanging {step.id}", waiting=True)
        cost = ExchangeReport()
        received = reshard(held, wanted, algorithm=self.job.exchange, share=True, report=cost)
        self.sent += cost.sent + cost.mapped
        phase(f"writing {step.id}")
        return [
            self.pool.submit(self.writer.write, shard.key, received[shard.id], offset=shard.global_offset)
            for shard in wanted
        ]

    def _read_to_share(self, unit: Unit) -> Tensor:
        """As :meth:`_read`, into memory that another process of this machine can map."""
        dtype = torch_dtype(unit.info.dtype)
        out = None if self.job.spread else memory.shared_empty(extent(unit.box), dtype)
        read = self.reader.read(unit.info, rows=unit.rows, out=out)
        self._check_replicas(unit, read)
        return read

    def _settle(self, step: Step, moving: Iterable[Future[Any]]) -> None:
        """Wait until this process's share of the step is in the files; the first one notes when all are."""
        _all(moving)
        if self.job.spread:
            phase(f"waiting for the other ranks' share of {step.id}", waiting=True)
            ranks.barrier()
            self._note(step)
            return
        with gather.get_configs_parallel({"step": step.id}, self.everyone) as parts:
            if parts:
                self._note(step)

    def _note(self, step: Step) -> None:
        if self.rank == 0:
            self.staging.record(step.id, {"bytes": step.nbytes})
            report({"kind": "step", "step": step.id, "bytes": step.nbytes})

    def _compare(self, unit: Unit, written: Checkpoint, reader: Reader) -> None:
        expected = self._read(unit)
        info = written.infos[unit.info.name]
        for place in _places(written, info):
            shared = intersect(unit.box, place.box)
            if shared is None:
                continue
            found = self.buffers.take("written", extent(shared), expected.dtype)
            reader.read_place(info, place, shared, found)
            part = expected[slices(relative(shared, unit.box))]
            if not raw_io.same_bytes(found, part):
                raise CheckpointError(
                    f"{place.path.name}: {info.name} {list(offset(shared))} + {list(extent(shared))} read back differs "
                    f"from {self.job.source.directory}: the storage or the memory is at fault, or the source was "
                    f"written to meanwhile; remove {self.staging.directory.parent} and run the same command again"
                )


def _shard(info: TensorInfo, box: Box, data: Tensor | None) -> ShardedTensor:
    return ShardedTensor(
        key=info.name,
        dtype=torch_dtype(info.dtype),
        local_shape=extent(box),
        global_shape=info.shape,
        global_offset=offset(box),
        replica_id=0,
        data=data,
    )


def _places(checkpoint: Checkpoint, info: TensorInfo) -> tuple[Placement, ...]:
    return places(Layout((), checkpoint.infos, checkpoint.placements), info)


def _same_tensors(steps: Iterable[Step], written: Checkpoint) -> None:
    for info in (unit.info for step in steps for unit in step.units):
        name, found = info.name, written.infos.get(info.name)
        if found is None or (found.dtype, found.shape) != (info.dtype, info.shape):
            state = "is missing" if found is None else f"is {found.dtype} {list(found.shape)}"
            raise CheckpointError(f"read back: {name} {state}; {info.dtype} {list(info.shape)} was to be written")


def _all(futures: Iterable[Future[Any]]) -> None:
    """Wait for all; the first error is raised at once."""
    for future in list(futures):
        future.result()
