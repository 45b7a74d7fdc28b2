"""A rank that rounds to nearest with static scales: samples run through the source before the first layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from modelexport.checkpoints.safetensors.file import Reader
from modelexport.distributed import collectives
from modelexport.distributed.launch import phase, report
from modelexport.exporting.calibrated.device_memory import memory_of
from modelexport.exporting.calibrated.forward import forward_cut
from modelexport.exporting.calibrated.samples import Samples, forward_reader, shared_samples
from modelexport.exporting.rank import RankExport, RankJob
from modelexport.models.architecture import language_config
from modelexport.quantization.calibration.ranges import observe
from modelexport.quantization.calibration.static_ranges import Ranges
from modelexport.quantization.kv_caches import CACHES

if TYPE_CHECKING:
    import torch


class StaticScaleExport(RankExport):
    """A data-free export but for the scales of activations and of the KV cache."""

    def begin(self) -> None:
        """See the base; the magnitudes of activations."""
        phase("calibrating: the magnitudes of activations")
        job = self.job
        samples = shared_samples(job.source, job.recipe, job.tokenizer, self.reader)
        self.samples = samples.facts
        self.ranges = calibrate(job, self.reader, samples, self.device)

    def calibration(self) -> dict[str, Any]:
        """See the base."""
        return {**self.samples, "unseen_experts": list(self.ranges.unseen)}


def calibrate(job: RankJob, reader: Reader, samples: Samples, device: torch.device) -> Ranges:
    """Run the source over the samples, one decoder layer in memory at a time, on all ranks together.

    Raises:
        CheckpointError: an activation overflows.
        PlanError: transformers has no such model.
    """
    source, plan, recipe = job.source, job.plan, job.recipe
    rank, world = collectives.get_rank(), collectives.get_world_size()
    config = language_config(source.config or {}, source.infos)
    memory = memory_of(device, plan, recipe, config)

    def progress(done: int, layers: int) -> None:
        phase(f"calibrating: layer {done} of {layers}")
        if rank == 0:
            report({"kind": "pass", "done": done, "layers": layers})

    return observe(
        config,
        source.infos.keys(),
        forward_reader(source, reader),
        samples.windows,
        embedded=samples.embedded,
        cut=forward_cut(plan.family, plan.dimensions, rank, world),
        method=recipe.calib_range,
        formats=plan.formats(),
        all_experts=recipe.calib_experts == "all",
        device=device,
        memory=recipe.calib_memory,
        experts_apart=memory.experts_apart,
        derived=plan.family.is_derived,
        cache=None if plan.kv_cache is None else CACHES[plan.kv_cache],
        progress=progress,
    )
