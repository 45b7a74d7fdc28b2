"""A rank that quantises decoder layers one by one while samples run through them.

For each layer, all ranks together: transformers' own module is filled with this rank's shard, samples run through it,
and what its linears are given is looked at; algorithms fold scales from one module into the next; weights are re-cut
from what the forward pass needs (heads, columns of o and down) to whole rows, rounded, put back, and the samples run
through the layer once more: what comes out, made by quantised layers, is what the next layer is quantised for. Then the
layer's tensors go the way of every export's.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

from modelexport.checkpoints.safetensors.file import Reader
from modelexport.checkpoints.safetensors.reader import begin_reading
from modelexport.distributed import ranks
from modelexport.distributed.launch import current_phase, phase, report
from modelexport.errors import CheckpointError
from modelexport.exporting.calibrated.device_memory import memory_of
from modelexport.exporting.calibrated.forward import batch_tokens, layer_cut
from modelexport.exporting.calibrated.layer import CalibratedLayer, QuantisedLayer
from modelexport.exporting.calibrated.rotation import RotatedReader
from modelexport.exporting.calibrated.samples import forward_reader, shared_samples
from modelexport.exporting.extents import step_extents
from modelexport.exporting.output import LayerWriter
from modelexport.exporting.plan import ExportStep
from modelexport.exporting.rank import Quantised, RankExport, RankJob, Shards, in_shared_memory
from modelexport.layers import LayerConfig
from modelexport.models.architecture import language_config
from modelexport.models.in_memory import is_gathered
from modelexport.quantization import algorithms
from modelexport.quantization.algorithms.base import Algorithm, Folding, Rounding
from modelexport.quantization.algorithms.rotation import Rotation
from modelexport.quantization.calibration.layers import LayerRunner
from modelexport.quantization.calibration.static_ranges import Ranges
from modelexport.system.allocator import return_freed_memory
from modelexport.system.startup import without_collector


class CalibratedExport(RankExport):
    """A rank that quantises decoder layers one by one, on samples; see the module."""

    rotated: RotatedReader | None = None

    def __init__(self, job: RankJob, writer: LayerWriter, beside: Path | None = None, *, alone: bool = False) -> None:
        super().__init__(job, writer, beside, alone=alone)
        self.open = ExitStack()
        stages = [self._algorithm(name) for name in job.recipe.algorithms]
        self.foldings = [stage for stage in stages if isinstance(stage, Folding)]
        self.rounding = cast("Rounding", self._algorithm(job.recipe.rounding.name))
        self.decoder = [step for step in job.plan.steps if step.index is not None]
        # Where nothing makes up for the errors of the layers before, they need not be seen: KL is the same (int4 of the
        # demo model 0.0363 both ways, q2_k of llama.cpp's 0.189 for 0.192), and every layer runs once.
        self.runs_once = not (
            self.foldings
            or self.rounding.compensates
            or job.plan.needs_ranges
            or job.plan.kv_cache is not None
            or job.recipe.calib_experts == "all"
        )

    def _algorithm(self, name: str) -> Algorithm:
        recipe = self.job.recipe
        return algorithms.get(name)(recipe.settings_of(name), seed=recipe.calib_seed)

    def __exit__(self, *exception: object) -> None:
        self.open.close()
        super().__exit__(*exception)

    # ------------------------------------------------------------ begin

    def open_reader(self) -> Reader:
        """Reads the source; or the rotated model, as if it lay there."""
        rotations = self.job.recipe.of_kind("rotate")
        if not rotations:
            return super().open_reader()
        rotation = cast("Rotation", self._algorithm(rotations[0].name))
        self.rotated = RotatedReader(self.job.source, rotation, quantised=self.job.plan.formats().keys())
        return cast("Reader", self.rotated)

    def begin(self) -> None:
        """Samples and runner, at the first layer that is not done."""
        job = self.job
        phase("preparing the calibration samples")
        config = language_config(job.source.config or {}, job.source.infos)
        memory = memory_of(self.device, job.plan, job.recipe, config)
        self.rounding.rows_at_once = memory.rows_at_once
        samples = shared_samples(job.source, job.recipe, job.tokenizer, self.reader)
        self.samples = samples.facts
        self.ranges = Ranges({}, {}, {})
        with without_collector():  # transformers is imported here
            self.runner = LayerRunner(
                config,
                job.source.infos.keys(),
                forward_reader(job.source, self.reader),
                samples.windows,
                embedded=samples.embedded,
                cut=layer_cut(job.plan, self.rank, learns=self.rounding.learns),
                device=self.device,
                progress=self._batch,
                memory=job.recipe.calib_memory,
                directory=None if self.beside is None else self.beside.parent,
                experts_apart=memory.experts_apart,
                compared="cross" in self.rounding.wants or self.rounding.learns,
                derived=job.plan.family.is_derived,
                batch_tokens=batch_tokens(learns=self.rounding.learns),
            )
        left = [step.index for step in self.decoder if step.id not in job.done]
        self.first = left[0] if left else len(self.decoder)
        if self.first and left and not self._restored(self.first):
            # Without what went into that layer all are run again; those that are written stay as they are, and what
            # is made of them would be the same.
            self.first = 0
            done = [step for step in self.steps if step.index is None]
            self.steps = sorted([*done, *self.decoder], key=job.plan.steps.index)
        if left:
            phase("reading the embeddings of the calibration samples")
            self.open.enter_context(self.runner)

    def _restored(self, index: int) -> bool:
        """Returns whether the samples go on from the states that an earlier run kept: on all ranks, or on none."""
        path = self._kept(index)
        if not ranks.compute_and_broadcast(path.is_file):
            return False
        if self.runner.restore(path) is None:
            raise CheckpointError(f"{path} is seen by rank 0, but not by this one: is the directory not shared?")
        return True

    @staticmethod
    def _batch(done: int, batches: int) -> None:
        """Says how far the samples are: also that this rank does not hang."""
        phase(f"{current_phase().partition(' (batch')[0]} (batch {done} of {batches})")

    def _kept(self, index: int) -> Path:
        """The file that keeps the inputs of a layer, for a run that resumes this one."""
        assert self.beside is not None
        return self.beside / f"{index}.safetensors"

    # ------------------------------------------------------------ layers

    def read(self, step: ExportStep) -> Shards:
        """Of a decoder layer nothing: the runner reads what its forward pass needs."""
        if step.index is None:
            return super().read(step)
        self.await_source(step)
        if not is_gathered(self.job.source):  # while the layer before it is calibrated
            begin_reading(step_extents(self.job.source, step, None))
        return Shards({}, {}, self.sources.get())

    def quantise(self, step: ExportStep, shards: Shards) -> Quantised:
        """See the base; a decoder layer is quantised with samples running through it."""
        if step.index is None:
            return super().quantise(step, shards)
        made = self._calibrated(step)
        return_freed_memory()  # the layer's and the samples', before the next one is read
        layer = LayerConfig(step.layer, step.index)
        for number, task in enumerate(step.tasks):
            module = self.module_of(layer, task)
            if task.cached is not None:
                self.emit(module, task, self.cache_scale(step, task))
            elif number in made.native:
                native = {name: value.cpu() for name, value in made.native[number].items()}
                box = task.owned_box(self.rank)
                assert box is not None
                rows, columns = ((stop - start) for start, stop in box)
                self.emit(module, task, self.encoded(task, native, (rows, columns)))
                module.noise, module.signal = made.errors.get(number, (None, None))
            elif number in made.plain:
                plain = made.plain[number].cpu()
                if self.writer.wants_shared(task):
                    plain = in_shared_memory(plain)
                self.emit(module, task, {task.outputs[0].name: plain})
        return Quantised(layer, [(self.sources, shards.slot)], made.report.as_json())

    def _calibrated(self, step: ExportStep) -> QuantisedLayer:
        """All of the layer's tensors that this rank emits; the samples are moved on to the next layer."""
        index = step.index
        assert index is not None
        with self.runner.filled(index) as filled:
            more = index + 1 < len(self.decoder)
            advance = self.runs_once and more
            layer = CalibratedLayer(self.job, step, self.runner, filled, self.scales, self.rank, advance=advance)
            for folding in self.foldings:
                layer.fold(folding)
            made = layer.round(self.rounding)
            if more and not advance:
                phase(f"{step.id}: samples through the quantised layer")
                self.runner.advance(filled, made.activations, cache=made.cache)
        self.ranges.keys.update(made.keys)
        self.ranges.values.update(made.values)
        if self.rank == 0:
            report({"kind": "working", "text": f"{step.id} {self.rounding.name} error {made.report.mean:.2e}"})
            self._keep(index + 1)
        return made

    def _keep(self, index: int) -> None:
        """Keep what goes into a layer until the one before it, which is being written meanwhile, is done."""
        if index >= len(self.decoder) or self.beside is None:
            return
        try:
            self.beside.mkdir(exist_ok=True)
            self.runner.save(self._kept(index), index)
            for old in self.beside.glob(f"{index - 3}.*"):
                old.unlink(missing_ok=True)
        except OSError as error:
            raise CheckpointError(f"{self.beside}: cannot be written: {error.strerror or error}") from error

    def write_step(self, step: ExportStep, quantised: Quantised) -> None:
        """See the base; what an earlier run has written stays."""
        if step.id not in self.job.done:
            super().write_step(step, quantised)
            return
        for queue, slot in quantised.slots:
            queue.put(slot)

    # ------------------------------------------------------------ finish

    def changed(self, records: Mapping[str, Any]) -> set[str]:
        """See the base."""
        linears = self.job.plan.formats()
        found = {name for record in records.values() for name in record.get("note", {}).get("changed", ())}
        for name in () if self.rotated is None else self.rotated.changes:
            module = name.removesuffix(".weight")
            found.add(module if module in linears else name)
        return found

    def calibration(self) -> dict[str, Any]:
        """See the base; with what was found of every layer."""
        notes = [self.writer.records[step.id]["note"] for step in self.decoder]
        joined = {key: {name: x for note in notes for name, x in note[key].items()} for key in ("before", "after")}
        return {
            **self.samples,
            "unseen_experts": [name for note in notes for name in note["unseen"]],
            "notes": {name: text for note in notes for name, text in note["notes"].items()},
            "rare_experts": {name: count for note in notes for name, count in note["rare"].items()},
            "changed": sorted(self.changed(self.writer.records)),
            "output_error": joined,
        }
