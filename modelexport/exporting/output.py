"""Writes the layers that ranks emit into the checkpoint, in one of three ways, and records what was written.

- ``shm``: every rank's layer goes to the first rank through shared memory, which writes it all.
- ``nfs``: the same, through files in a workspace.
- ``direct``: each rank writes its own pieces; only their checksums go to the first rank. A weight that is cut along its
  columns is the exception: its pieces would be thousands of short segments each, ten times slower to write than
  whole rows. They meet at one rank, another one for each such weight, which writes them as rows: in shared memory,
  or through the workspace where the ranks are on several machines.

The bytes are the same in each case. Whatever way it went, a checksum of each piece, taken where the piece was in
memory, goes into the journal, and the audit compares it with what lies in the file. So do the errors that rounding has
made: the source need not be read a second time, and what was found is what was written where the checksums agree.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor

from modelexport.checkpoints.safetensors.file import Layout, Writer
from modelexport.checkpoints.staging import Staging
from modelexport.distributed import collectives, gather, ranks
from modelexport.distributed.launch import phase, report
from modelexport.distributed.transport.messages import LIST, OBJECT, read_message
from modelexport.exporting.plan import ExportStep, TensorTask, full_name
from modelexport.inspection.verify.items import WrittenPiece
from modelexport.layers import LayerConfig, TensorShard
from modelexport.system.tensor_memory import tensor_bytes


class LayerWriter(Protocol):
    """Takes the layers that a rank emits.

    Attributes:
        records: step id -> what is kept of it, with the ``note`` that :meth:`step` was given.
        wants_errors: whether the errors of rounding are kept, too.
    """

    records: dict[str, dict[str, Any]]
    wants_errors: bool

    def wants_shared(self, task: TensorTask) -> bool:
        """Returns whether the outputs of a task should lie in shared memory, because another rank will write them."""

    def step(self, step: ExportStep, layer: LayerConfig, note: dict[str, Any] | None = None) -> None:
        """Takes one step's layer."""

    def gathered(self, payload: Any, first: int = 0) -> AbstractContextManager[list[Any]]:
        """``payload`` of every rank, on rank ``first``."""

    def flush(self) -> None:
        """Waits until what was taken is safe."""

    def share_records(self) -> dict[str, dict[str, Any]]:
        """Every rank gets the first rank's record of all steps."""

    def close(self) -> None:
        """Ends it."""


class ShardWriter:
    """Writes one rank's layers into the checkpoint. Used by one thread at a time.

    Attributes:
        records: the journal's record of every finished step; complete on the first rank only.
    """

    wants_errors = True

    def __init__(
        self,
        layout: Layout,
        staging: Staging,
        transport: str,
        workspace: str | None,
        records: dict[str, dict[str, Any]],
    ) -> None:
        self.world = collectives.get_world_size()
        self.records = records
        self._layout = layout
        self._staging = staging
        self._writer = Writer(layout, staging.directory)
        self._writer.start_writeback()
        self._direct = transport == "direct" or self.world == 1
        self._workspace = workspace
        self._shares_all = transport == "shm" and self.world > 1
        self._turn = 0
        self._ranks = list(range(self.world))
        gather.connect(self._ranks, None, self._workspace)

    def wants_shared(self, task: TensorTask) -> bool:
        """Returns whether the outputs of ``task`` should lie in shared memory, because another rank will write them."""
        return self._shares_all or (self._meets(task) and self._workspace is None)

    def _meets(self, task: TensorTask) -> bool:
        return self._direct and self.world > 1 and task.cut.dim == 1

    def gathered(self, payload: Any, first: int = 0) -> AbstractContextManager[list[Any]]:
        """``payload`` of every rank, on rank ``first``."""
        order = self._ranks[first:] + self._ranks[:first]
        return gather.get_configs_parallel(payload, order, None, self._workspace)

    def step(self, step: ExportStep, layer: LayerConfig, note: dict[str, Any] | None = None) -> None:
        """Bring one step's layer, as this rank emits it, into the checkpoint.

        Args:
            note: what the journal keeps of the step besides; the first rank's counts.

        Raises:
            CheckpointError: the disk is full or fails.
            GatherError: another rank is gone.
        """
        if not self._direct:
            with self.gathered(layer) as parts:
                if parts:
                    self._record(step, self._write(parts), [_errors(part) for part in parts], note)
            return
        meeting = dict.fromkeys(task.path for task in step.tasks if self._meets(task))
        pieces = self._write([_without(layer, meeting)])
        for owner, paths in self._owners(meeting):
            with self.gathered(replace(layer, modules={path: layer.modules[path] for path in paths}), owner) as parts:
                pieces += self._write(parts)
        # As one string: thousands of small lists would travel one by one.
        with self.gathered(json.dumps({"pieces": pieces, "errors": _errors(layer)})) as texts:
            if texts:
                sender, fields = f"what a rank says of its part of {step.id}", {"pieces": LIST, "errors": OBJECT}
                parts = [read_message(text, sender, fields) for text in texts]
                found = [piece for part in parts for piece in part["pieces"]]
                self._record(step, found, [part["errors"] for part in parts], note)

    def _owners(self, meeting: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
        """The ranks at which modules meet, in turn, and what meets there."""
        found: dict[int, list[str]] = {}
        for path in meeting:
            found.setdefault(self._turn, []).append(path)
            self._turn = (self._turn + 1) % self.world
        yield from found.items()

    def _record(
        self,
        step: ExportStep,
        pieces: list[WrittenPiece],
        errors: Sequence[Mapping[str, Sequence[float]]],
        note: dict[str, Any] | None,
    ) -> None:
        """First rank: the step is in the files."""
        entry: dict[str, Any] = {"pieces": pieces, "errors": _summed(errors)}
        if note is not None:
            entry["note"] = note
        self.records[step.id] = entry
        self._staging.record(step.id, entry)
        report({"kind": "step", "step": step.id, "bytes": step.output_bytes})

    def _write(self, parts: Sequence[LayerConfig]) -> list[WrittenPiece]:
        """Write the parts' shards at their places.

        They are not merged in memory first: the writer joins what lies side by side on its way into the file.
        """
        shards: dict[str, list[TensorShard]] = {}
        for layer in parts:
            for path, module in layer.modules.items():
                for name, shard in module.tensors.items():
                    shards.setdefault(layer.tensor_name(path, name), []).append(shard)
        pieces = []
        for name, found in shards.items():
            placed = []
            for shard in found:
                assert shard.data is not None
                data = self._layout.settled(name, shard.data)
                placed.append((data, shard.offset))
                pieces.append(WrittenPiece(name, shard.offset, shard.shape, _crc32(data)))
            self._writer.write_pieces(name, placed)
        return pieces

    def flush(self) -> None:
        """Wait until the disk has what the ranks wrote.

        Raises:
            CheckpointError: the disk refused it.
        """
        self._writer.sync()

    def share_records(self) -> dict[str, dict[str, Any]]:
        """Every rank gets the first rank's record of all steps."""
        phase("waiting for the other ranks to finish writing", waiting=True)
        if self.world == 1:
            return self.records
        text = ranks.compute_and_broadcast(lambda: json.dumps(self.records))
        return read_message(text, "rank 0's record of the steps", {}, blamed=[0])

    def close(self) -> None:
        """Close the weight files."""
        self._writer.close()


def _without(layer: LayerConfig, paths: Container[str]) -> LayerConfig:
    return replace(layer, modules={path: m for path, m in layer.modules.items() if path not in paths})


def _errors(layer: LayerConfig) -> dict[str, list[float]]:
    """Module -> noise and signal of what this rank has rounded of it."""
    return {
        full_name(layer.name, path): [module.noise, module.signal]
        for path, module in layer.modules.items()
        if module.noise is not None and module.signal is not None
    }


def _summed(parts: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """The ranks' errors together. A row that is cut is added part by part, and so with another last bit than the whole
    one: of decibels with two decimals that shows once in 10^12 linears."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: [math.fsum(part[name][i] for part in parts if name in part) for i in range(2)] for name in names}


def _crc32(tensor: Tensor) -> int:
    return zlib.crc32(tensor_bytes(tensor.contiguous()).data)
