"""A resharding by several processes: each has its share of every step.

``direct``: a process writes what it has read wherever it belongs. Otherwise each file has one writer (two machines
must not write into one file of a network file system), and what others have read for it is exchanged first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelexport.checkpoints.safetensors.file import Layout, TensorInfo, torch_dtype
from modelexport.checkpoints.staging import Staging
from modelexport.distributed import collectives, gather, ranks
from modelexport.distributed.launch import phase, report
from modelexport.distributed.transport import memory
from modelexport.models.target_plan import places
from modelexport.resharding.moves import Resharding, ReshardJob, all_of
from modelexport.resharding.plan import ReshardStep, Unit, deal
from modelexport.sharding.boxes import Box, extent, intersect, offset
from modelexport.sharding.exchange import ExchangeReport
from modelexport.sharding.reshard import reshard
from modelexport.sharding.tensor import ShardedTensor


def run_rank(job: ReshardJob) -> None:
    """Entry point of a process; rank 0 reports the result."""
    with Staging.join(job.out) as staging, RankResharding(job, staging, threads=torch.get_num_threads()) as work:
        work.run()
        work.finish()


class RankResharding(Resharding):
    """One of several processes' part."""

    def __init__(self, job: ReshardJob, staging: Staging, *, threads: int) -> None:
        self.rank, self.world = collectives.get_rank(), collectives.get_world_size()
        self.everyone = list(range(self.world))
        self.sent = 0
        super().__init__(job, staging, threads=threads)
        gather.set_timeout(job.timeout)
        if not job.spread:
            gather.connect(self.everyone)

    def __exit__(self, *exception: object) -> None:
        gather.set_timeout(None)
        super().__exit__(*exception)

    def written_here(self) -> Layout:
        """With an exchange, the files that this process writes: they are dealt out."""
        if self.job.exchange == "direct":
            return self.job.layout
        files = self.job.layout.files
        owners = dict(zip([Path(f.name) for f in files], deal([f.size for f in files], self.world), strict=True))
        mine = {
            name: tuple(place for place in places(self.job.layout, info) if owners[place.path] == self.rank)
            for name, info in self.job.layout.infos.items()
        }
        return replace(self.job.layout, placements=mine)

    def share(self, units: Sequence[Unit]) -> list[Unit]:
        """Of some units, those that this process reads: each is read by one."""
        owners = deal([unit.nbytes for unit in units], self.world)
        return [unit for unit, owner in zip(units, owners, strict=True) if owner == self.rank]

    def begin(self, step: ReshardStep) -> list[Future[Any]]:
        """Begin to move this process's share; or exchange it, and begin to write what its files need."""
        if self.job.exchange == "direct":
            return super().begin(step)
        held = [_shard(unit.info, unit.box, self._read_to_share(unit)) for unit in self.share(step.units)]
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
        return [self.pool.submit(self.writer.write_box, s.key, s.box, received[s.id]) for s in wanted]

    def settle(self, step: ReshardStep, moving: Iterable[Future[Any]]) -> None:
        """Wait until this process's share of a step is in the files; the first one notes when all are."""
        all_of(moving)
        if self.job.spread:
            phase(f"waiting for the other ranks' share of {step.id}", waiting=True)
            ranks.barrier()
            if self.rank == 0:
                self.note(step)
            return
        with gather.get_configs_parallel({"step": step.id}, self.everyone) as parts:
            if parts:
                self.note(step)

    def wait_for_all(self) -> None:
        """Until all processes have written."""
        phase("waiting for the other ranks to finish writing", waiting=True)
        ranks.barrier()

    def report_result(self) -> None:
        """The first process tells what all have sent."""
        totals = ranks.gather_from_all_ranks(lambda: self.sent)
        if totals is not None:
            report({"kind": "result", "bytes_sent": sum(totals)})

    def _read_to_share(self, unit: Unit) -> Tensor:
        """As :meth:`read`, into memory that another process of this machine can map."""
        allocate = torch.empty if self.job.spread else memory.shared_empty
        read = allocate(extent(unit.box), dtype=torch_dtype(unit.info.dtype))
        self.reader.read_box(unit.info, unit.box, read)
        self.check_replicas(unit, read)
        return read


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
