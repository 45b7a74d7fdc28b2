"""One tensor-parallel rank: reads its shards, quantises them, writes them, checks what was written.

Three stages run side by side: while step i is quantised (main thread), step i+1 is read and step i-1 is written (one
thread each). What one rank alone has written is read back meanwhile, by one more. Slots bound the memory: two of them
hold source shards, two hold results, each as large as the rank's largest step, and they are reused, since touching
fresh pages costs more than the copy.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue
from typing import Any

import torch
from torch import Tensor

from modelexport.checkpoints.mirrors.mirror import mirror_of
from modelexport.checkpoints.safetensors.file import Checkpoint, Layout, Reader, torch_dtype
from modelexport.checkpoints.staging import Staging
from modelexport.distributed import collectives, gather
from modelexport.distributed.launch import phase, report
from modelexport.distributed.transport import memory
from modelexport.errors import CheckpointError, PlanError, ValuesError
from modelexport.exporting.audit import Audit
from modelexport.exporting.extents import step_extents
from modelexport.exporting.output import LayerWriter, ShardWriter
from modelexport.exporting.plan import ExportPlan, ExportStep, TensorTask, full_name
from modelexport.exporting.scales import ScaleAgreement, check_finite
from modelexport.layers import Box, LayerConfig, ModuleConfig, TensorShard
from modelexport.models.decoded import StoredLinear
from modelexport.models.in_memory import gather_layers, is_gathered
from modelexport.quantization import decoding, devices, formats, kernels
from modelexport.quantization.calibration.static_ranges import Ranges
from modelexport.quantization.kv_caches import CACHES
from modelexport.quantization.methods import ReadOnlyNumbers, WeightSlice, of_method
from modelexport.recipe import ExportRecipe
from modelexport.system.run_log import in_layer
from modelexport.system.startup import without_collector
from modelexport.system.tensor_memory import ReusableBuffer

SMALL_BYTES = 1 << 20  # tensors up to this size are copied rather than kept where they were read


@dataclass(frozen=True)
class RankJob:
    """The export as every rank is given it.

    Attributes:
        tokenizer: the directory that holds the model's.
        spread: whether the ranks are on several machines.
        done: journal of an earlier run of the same export: step id -> its record.
        read_back_along: as :attr:`PreparedExport.read_back_along`.
    """

    source: Checkpoint
    plan: ExportPlan
    layout: Layout
    recipe: ExportRecipe
    tokenizer: Path
    spread: bool
    done: dict[str, dict[str, Any]]
    read_back_along: bool = False

    @property
    def out(self) -> Path:
        """The target directory."""
        assert self.recipe.out is not None
        return Path(self.recipe.out)

    @property
    def workspace(self) -> str | None:
        """The directory in which ranks meet that do not meet in shared memory."""
        return self.recipe.workspace if self.recipe.transport == "nfs" or self.spread else None


@dataclass
class Shards:
    """A step's source shards (task number -> tensor) and the slot they lie in.

    ``stored`` has what is quantised in the source: task number -> suffix -> tensor. ``stacks`` has weights that are
    alike, as experts are, once more: their task numbers, and all of them in one matrix, one below the other.
    """

    tensors: dict[int, Tensor]
    stored: dict[int, dict[str, Tensor]]
    slot: ReusableBuffer
    stacks: list[tuple[list[int], Tensor]] = field(default_factory=list)


@dataclass
class Quantised:
    """A step's layer as this rank emits it, and the slots to give back when it has been written.

    ``note`` is what the journal keeps of it, on the first rank.
    """

    layer: LayerConfig
    slots: list[tuple[Queue[ReusableBuffer], ReusableBuffer]]
    note: dict[str, Any] | None = None


def buffers(count: int) -> Queue[ReusableBuffer]:
    """So many, in a queue to be taken from and given back to."""
    queue: Queue[ReusableBuffer] = Queue()
    for _ in range(count):
        queue.put(ReusableBuffer())
    return queue


def run_rank(job: RankJob, rank_class: type[RankExport]) -> None:
    """Entry point of a rank process; rank 0 reports the result (see :meth:`RankExport.finish`).

    Args:
        rank_class: the way in which a layer is quantised: data-free, or a subclass of
            :mod:`modelexport.exporting.calibrated`.
    """
    with ExitStack() as stack:
        if not (job.plan.calibrated or job.plan.needs_ranges):  # no model is made, and nothing that refers to itself
            stack.enter_context(without_collector())
        staging = stack.enter_context(Staging.join(job.out))
        writer = ShardWriter(job.layout, staging, job.recipe.transport, job.workspace, dict(job.done))
        export = stack.enter_context(rank_class(job, writer, staging.beside))
        export.audit = stack.enter_context(
            Audit(job.plan, job.layout, staging.directory, export.rank, export.world, along=job.read_back_along)
        )
        export.run()
        export.finish()


class RankExport:
    """One rank's part of an export, without data: weights are rounded by what they are themselves.

    Args:
        writer: takes the layers; it is closed with this.
        beside: the directory that keeps what a run needs that resumes this one; None: it is not resumed.
        alone: whether other ranks, if there are any, have no part in it.

    Attributes:
        audit: reads back what the writer has written; None: nothing is.
    """

    audit: Audit | None = None

    def __init__(self, job: RankJob, writer: LayerWriter, beside: Path | None = None, *, alone: bool = False) -> None:
        self.job, self.writer, self.beside = job, writer, beside
        self.rank, self.world = (0, 1) if alone else (collectives.get_rank(), collectives.get_world_size())
        self.local_rank = 0 if alone else int(os.environ.get("LOCAL_RANK", self.rank))
        self.device = devices.of_rank(job.recipe.device, self.local_rank)
        self.method = of_method(job.plan.method)
        self.ranges = Ranges({}, {}, {})
        self.is_native = self.method.METHOD == "compressed-tensors"
        self.plain = formats.get("none")
        self.reader = self.open_reader()
        self._room = ReusableBuffer()
        self.scales = ScaleAgreement(self.rank, self.world, self.plain, self._read_alone)
        self.mirror = mirror_of(job.source.directory)
        self.is_gathered = is_gathered(job.source)
        self.steps = [step for step in job.plan.steps if step.id not in job.done]
        self.sources = buffers(2)
        self.results = buffers(2)
        kernels.set_threads(torch.get_num_threads())
        kernels.expect(job.plan.source_bytes)
        gather.set_timeout(job.recipe.timeout)

    def open_reader(self) -> Reader:
        """Opens the reader of the source."""
        return Reader(self.job.source)

    def __enter__(self) -> RankExport:
        return self

    def __exit__(self, *exception: object) -> None:
        gather.set_timeout(None)
        self.reader.close()
        self.writer.close()

    def run(self) -> None:
        """Read, quantise and hand over every step that is not done yet."""
        self.begin()
        report({"kind": "begin", "threads": torch.get_num_threads()})
        for step in self.job.plan.steps:
            if step not in self.steps:
                self.passed(step)
        reading, writing = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        try:
            ahead: Future[Shards] | None = None
            behind: Future[None] | None = None
            for number, step in enumerate(self.steps):
                following = self.steps[number + 1] if number + 1 < len(self.steps) and not self.is_gathered else None
                ahead, behind = in_layer(step.id, self._run_step, step, following, ahead, behind, reading, writing)
            if behind is not None:
                phase("waiting for the last step to be written", waiting=True)
                behind.result()
        finally:
            # Not waited for: after an error the other stages may be blocked on peers that will not come.
            reading.shutdown(wait=False, cancel_futures=True)
            writing.shutdown(wait=False, cancel_futures=True)

    def _run_step(
        self,
        step: ExportStep,
        following: ExportStep | None,
        ahead: Future[Shards] | None,
        behind: Future[None] | None,
        reading: ThreadPoolExecutor,
        writing: ThreadPoolExecutor,
    ) -> tuple[Future[Shards] | None, Future[None]]:
        """Quantises a step while ``following`` is read and the one before is written; returns what still goes on."""
        phase(f"reading {step.id}")
        self.gather(step)
        shards = (ahead or reading.submit(in_layer, step.id, self.read, step)).result()
        ahead = None if following is None else reading.submit(in_layer, following.id, self.read, following)
        phase(f"quantising {step.id}")
        quantised = self.quantise(step, shards)
        self.passed(step)
        if behind is not None:
            phase(f"handing over the step before {step.id}", waiting=True)
            behind.result()
        return ahead, writing.submit(in_layer, step.id, self.write_step, step, quantised)

    def passed(self, step: ExportStep) -> None:
        """Says that this rank reads nothing more for a step, of a source that is fetched."""
        if self.mirror is not None:
            numbers = {each.id: number for number, each in enumerate(self.job.plan.steps)}
            self.mirror.passed(self.local_rank, numbers[step.id], len(numbers))

    def begin(self) -> None:
        """Called on all ranks before the first step."""

    # ------------------------------------------------------------------ read

    def gather(self, step: ExportStep) -> None:
        """Gathers the step's tensors, of a model that is in the memory of several ranks. Collective."""
        if self.is_gathered:
            gather_layers(self.job.source, [task.info.name for task in step.tasks])

    def await_source(self, step: ExportStep) -> None:
        """Waits until what the step reads is there, of a source that is fetched. Ranks that read other parts of it
        wait alike: they meet when the step is handed over."""
        if self.mirror is not None:
            ranks = [self.rank] if self.job.spread else range(self.world)
            self.mirror.wait(
                step_extents(self.job.source, step, None if self.job.plan.calibrated else ranks),
                lambda done, parts: phase(f"waiting for {step.id} from the hub ({done} of {parts} parts)"),
            )

    def read(self, step: ExportStep) -> Shards:
        """Read the shards of ``step`` that this rank owns, and nothing else."""
        self.await_source(step)
        slot = self.sources.get()
        boxes: dict[int, tuple[tuple[int, int], ...]] = {}
        whole: dict[int, StoredLinear] = {}
        for i, task in enumerate(step.tasks):
            box = task.owned_box(self.rank)
            if box is None or task.cached is not None:
                continue
            if task.stored is not None:
                whole[i] = task.stored
            else:
                boxes[i] = box
        dtypes = {i: torch_dtype(step.tasks[i].info.dtype) for i in boxes}
        infos = [info for stored in whole.values() for info in stored.tensors.values()]
        slot.reserve(
            sum(_padded(_extent(boxes[i]), dtypes[i]) for i in boxes)
            + sum(_padded(info.shape, torch_dtype(info.dtype)) for info in infos)
        )
        rooms: dict[int, Tensor] = {}
        stacks = []
        for members in self._alike(step, boxes):
            rows, columns = _extent(boxes[members[0]])
            stack = slot.take((rows * len(members), columns), dtypes[members[0]])
            stacks.append((members, stack))
            rooms.update(zip(members, stack.split(rows), strict=True))
        tensors = {}
        for i, box in boxes.items():
            task, room = step.tasks[i], rooms.get(i)
            if room is None:
                allocate = memory.shared_empty if self.writer.wants_shared(task) and not task.quantised else slot.take
                room = allocate(_extent(box), dtypes[i])
            tensors[i] = self.reader.read(
                task.info, rows=box[0] if box else None, cols=box[1] if len(box) > 1 else None, out=room
            )
        stored = {
            i: {
                suffix: self.reader.read(info, out=slot.take(info.shape, torch_dtype(info.dtype)))
                for suffix, info in linear.tensors.items()
            }
            for i, linear in whole.items()
        }
        return Shards(tensors, stored, slot, stacks)

    def _read_alone(self, task: TensorTask) -> Tensor:
        """Reads this rank's part of one task's weight, which is good until the next is read so."""
        box = task.owned_box(self.rank)
        assert box is not None
        extent, dtype = _extent(box), torch_dtype(task.info.dtype)
        self._room.reserve(_padded(extent, dtype))
        return self.reader.read(task.info, rows=box[0], cols=box[1], out=self._room.take(extent, dtype))

    def _alike(self, step: ExportStep, boxes: Mapping[int, Box]) -> list[list[int]]:
        """The tasks of which several can be quantised at once: for a small expert the calls take longer than the work
        does."""
        if not self.is_native or self.device.type != devices.CPU:
            return []
        groups: dict[tuple[object, ...], list[int]] = {}
        for i, box in boxes.items():
            task = step.tasks[i]
            if task.quantised and not self.writer.wants_shared(task):
                shared = task.shared_scale if task.reach == "tensor" else ""
                key = (id(task.number_format), task.info.shape, task.info.dtype, _extent(box), shared)
                groups.setdefault(key, []).append(i)
        found = []
        for members in groups.values():
            number_format, extent = step.tasks[members[0]].number_format, _extent(boxes[members[0]])
            assert number_format is not None
            if len(members) > 1 and all(extent) and number_format.stacks(extent):
                found.append(members)
        return found

    # -------------------------------------------------------------- quantise

    def quantise(self, step: ExportStep, shards: Shards) -> Quantised:
        """Quantise what this rank holds of ``step`` into the layer config that it emits."""
        amax = self.scales.agree(step, shards.tensors)
        slot = self.results.get()
        slot.reserve(sum(self._result_bytes(step.tasks[i], tensor) for i, tensor in shards.tensors.items()))
        layer = LayerConfig(step.layer, step.index)
        stacked: dict[int, tuple[dict[str, Tensor], tuple[float, float] | None]] = {}
        for members, weights in shards.stacks:
            own = [amax.get(i) for i in members]
            if all(each is own[0] for each in own):
                stacked.update(self._quantise_stack(step, members, weights, own[0], slot))
        kept_source = False
        for i, task in enumerate(step.tasks):
            module = self.module_of(layer, task)
            weight = shards.tensors.get(i)
            if task.cached is not None:
                tensors = self.cache_scale(step, task)
            elif i in shards.stored:
                tensors = self._recoded(task, shards.stored[i])
                kept_source = True  # what both methods encode alike is passed on where it was read
            elif weight is None:
                continue
            elif i in stacked:
                tensors, sums = stacked[i]
                if sums is not None:
                    module.noise, module.signal = sums
            elif task.quantised:
                tensors = self._quantise_linear(step, task, weight, amax.get(i), slot)
                if self.writer.wants_errors:
                    self._measure(module, task, weight, tensors)
            else:
                check_finite(self.plain, weight, task.info.name)
                if self._is_copied(task, weight):
                    weight = slot.take(tuple(weight.shape), weight.dtype).copy_(weight)
                elif not self.writer.wants_shared(task):
                    kept_source = True
                tensors = {task.outputs[0].name: weight}
            self.emit(module, task, tensors)
        slots = [(self.results, slot)]
        if kept_source:
            slots.append((self.sources, shards.slot))
        else:
            self.sources.put(shards.slot)
        return Quantised(layer, slots)

    def emit(self, module: ModuleConfig, task: TensorTask, tensors: Mapping[str, Tensor]) -> None:
        """Put what this rank has of a task's outputs into the layer that it hands over."""
        for out in task.outputs:
            box = task.output_box(out, self.rank)
            if box is not None:
                offset = tuple(start for start, _ in box)
                extent, data = _extent(box), tensors[out.name]
                if data.shape != extent:
                    data = data.reshape(extent)
                module.tensors[out.name] = TensorShard(out.dtype, out.shape, offset, extent, data)

    def encoded(self, task: TensorTask, native: dict[str, Tensor], shape: tuple[int, int]) -> dict[str, Tensor]:
        """Native tensors of this rank's part of a weight, of that shape, encoded by the target's method."""
        if self.is_native:
            return native
        box = task.owned_box(self.rank)
        assert box is not None
        assert task.number_format is not None
        encoded = self.method.encode(
            task.number_format, native, WeightSlice(task.full_shape, (box[0][0], box[1][0]), shape)
        )
        return {name: in_shared_memory(t) for name, t in encoded.items()} if self.writer.wants_shared(task) else encoded

    def _quantise_linear(
        self, step: ExportStep, task: TensorTask, weight: Tensor, amax: Tensor | None, slot: ReusableBuffer
    ) -> dict[str, Tensor]:
        number_format = task.number_format
        assert number_format is not None
        out = None
        if self.is_native:
            allocate = memory.shared_empty if self.writer.wants_shared(task) else slot.take
            specs = number_format.specs((weight.shape[0], weight.shape[1]), weight.dtype)
            out = {spec.suffix: allocate(spec.shape, spec.dtype) for spec in specs}
        inputs = None
        if number_format.has_static_inputs:
            inputs = self.ranges.inputs[full_name(step.layer, task.path)]
        given: dict[str, Any] = {"inputs": inputs, "global_shape": task.full_shape, "name": task.info.name}
        if self.device.type == devices.CPU:
            native = number_format.quantise(weight, amax=amax, out=out, **given)
        else:
            found = number_format.quantise(weight.to(self.device), amax=amax, **given)
            native = {name: value.cpu() if out is None else out[name].copy_(value) for name, value in found.items()}
        return self.encoded(task, native, (weight.shape[0], weight.shape[1]))

    def _quantise_stack(
        self, step: ExportStep, members: Sequence[int], weights: Tensor, amax: Tensor | None, slot: ReusableBuffer
    ) -> Iterator[tuple[int, tuple[dict[str, Tensor], tuple[float, float] | None]]]:
        """Quantises weights that lie one below the other; of each task its tensors, and its errors if they are kept."""
        task = step.tasks[members[0]]
        number_format = task.number_format
        assert number_format is not None
        specs = number_format.specs((weights.shape[0], weights.shape[1]), weights.dtype)
        out = {spec.suffix: slot.take(spec.shape, spec.dtype) for spec in specs}
        try:
            number_format.quantise(weights, amax=amax, out=out, global_shape=task.full_shape)
        except ValuesError:
            for i, weight in zip(members, weights.split(weights.shape[0] // len(members)), strict=True):
                number_format.quantise(weight, name=step.tasks[i].info.name)  # the culprit is named
            raise
        of_rows = {spec.suffix for spec in specs if spec.axes and spec.axes[0] is not None}
        parts = {
            suffix: tensor.split(tensor.shape[0] // len(members)) if suffix in of_rows else [tensor] * len(members)
            for suffix, tensor in out.items()
        }
        sums: Sequence[tuple[float, float] | None] = [None] * len(members)
        if self.writer.wants_errors:
            sums = number_format.error_sums_of(weights, out, len(members))
        for number, i in enumerate(members):
            yield i, ({suffix: part[number] for suffix, part in parts.items()}, sums[number])

    def _measure(self, module: ModuleConfig, task: TensorTask, weight: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Puts the errors of what was rounded into the layer that is handed over."""
        number_format, box = task.number_format, task.owned_box(self.rank)
        assert number_format is not None
        assert box is not None
        part = WeightSlice(task.full_shape, (box[0][0], box[1][0]), (weight.shape[0], weight.shape[1]))
        native = self.method.decode(number_format, tensors, part)
        module.noise, module.signal = number_format.error_sums(weight, native)

    def _recoded(self, task: TensorTask, stored: dict[str, Tensor]) -> dict[str, Tensor]:
        """A linear that is quantised in the source, its numbers encoded by the target's method."""
        linear = task.stored
        assert linear is not None
        assert not isinstance(linear.number_format, ReadOnlyNumbers), "the plan has refused it"
        try:
            decoding.check_stored(stored, task.full_shape)
            found = decoding.recode(linear.method, self.method, linear.number_format, stored, task.full_shape)
            found = {out.name: decoding.as_dtype(found[out.name], torch_dtype(out.dtype)) for out in task.outputs}
        except CheckpointError as error:  # of one among hundreds
            raise type(error)(f"{task.info.name.removesuffix('.weight')}: {error}") from error
        return {name: in_shared_memory(t) for name, t in found.items()} if self.writer.wants_shared(task) else found

    def cache_scale(self, step: ExportStep, task: TensorTask) -> dict[str, Tensor]:
        """The scales of a layer's cached keys or values, by what they reach."""
        assert step.index is not None
        assert self.job.plan.kv_cache is not None
        reached = (self.ranges.keys if task.cached == "k" else self.ranges.values).get(step.index)
        if reached is None:
            raise PlanError(
                f"{step.id} has no attention whose keys and values are cached, as other layers of the model have: "
                "leave out --kv-cache"
            )
        scales, [output] = CACHES[self.job.plan.kv_cache].scales(reached), task.outputs
        if scales.numel() != math.prod(output.shape):
            raise PlanError(
                f"{step.id} has {scales.numel()} key/value heads, and config.json says {math.prod(output.shape)}: "
                "engines read as many scales in each layer; choose --kv-cache fp8"
            )
        return {task.parameter: scales.reshape(output.shape)}

    def _is_copied(self, task: TensorTask, weight: Tensor) -> bool:
        """Returns whether a tensor that passes through is copied: a norm must not hold up a whole layer's buffer."""
        return not self.writer.wants_shared(task) and weight.nbytes <= SMALL_BYTES

    def _result_bytes(self, task: TensorTask, weight: Tensor) -> int:
        if not task.quantised:
            return _padded(tuple(weight.shape), weight.dtype) if self._is_copied(task, weight) else 0
        if self.writer.wants_shared(task) or not self.is_native:
            return 0
        assert task.number_format is not None
        specs = task.number_format.specs((weight.shape[0], weight.shape[1]), weight.dtype)
        return sum(_padded(spec.shape, spec.dtype) for spec in specs)

    def module_of(self, layer: LayerConfig, task: TensorTask) -> ModuleConfig:
        """The module of a task in the layer that is handed over; made where it is not there yet."""
        if task.path not in layer.modules:
            layer.modules[task.path] = self._module(task)
        return layer.modules[task.path]

    def _module(self, task: TensorTask) -> ModuleConfig:
        return ModuleConfig(
            kind=task.module.kind,
            role=task.module.role,
            partition=task.module.partition,
            global_shape=task.info.shape,
            local_shape=task.held_shape(self.rank),
            number_format=task.number_format.name if task.number_format is not None else "none",
            group_size=task.number_format.group_size if task.number_format is not None else None,
        )

    def changed(self, records: Mapping[str, Any]) -> set[str]:
        """Names of modules and tensors whose values are not the source's, rounded or not."""
        return set()

    def calibration(self) -> dict[str, Any] | None:
        """The part of the record on calibration; None where nothing was calibrated."""
        return None

    # --------------------------------------------------- write and finish

    def write_step(self, step: ExportStep, quantised: Quantised) -> None:
        """Get the step into the checkpoint, and its slots back into use."""
        try:
            self.writer.step(step, quantised.layer, quantised.note)
            if self.audit is not None:
                self.audit.written(step, self.writer.records)
        finally:  # also after an error, so that no stage waits for a slot for ever
            for queue, slot in quantised.slots:
                queue.put(slot)

    def finish(self) -> None:
        """Reopen the files, compare them with what was produced, and report."""
        assert self.audit is not None
        if self.job.spread:  # other machines see what has reached the disk, and not before
            phase("flushing weight files to disk")
            self.writer.flush()
        with ThreadPoolExecutor(1) as flushing:  # the disk works while the page cache is read back
            flushed = flushing.submit(self.writer.flush)
            records = self.writer.share_records()
            phase("reading back what was written")
            checks = self.audit.finish(self.job.source, records, self.changed(records))
            phase("flushing weight files to disk")
            flushed.result()
        with self.writer.gathered({"checks": checks}) as parts:
            if parts:
                merged = [check for part in parts for check in part["checks"]]
                report({"kind": "result", "checks": merged, "calibration": self.calibration()})


def _extent(box: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def _padded(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    nbytes = dtype.itemsize
    for size in shape:
        nbytes *= size
    return -(-nbytes // 64) * 64


def in_shared_memory(tensor: Tensor) -> Tensor:
    """A copy that other ranks of the machine can be shown."""
    return memory.shared_empty(tuple(tensor.shape), tensor.dtype).copy_(tensor)
