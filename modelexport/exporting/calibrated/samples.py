"""The activations of an export's source: which text it is run over, and what its linears and its KV cache then see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from modelexport.checkpoints.safetensors.file import Checkpoint, Reader
from modelexport.distributed import collectives, ranks
from modelexport.distributed.launch import phase
from modelexport.exporting.calibrated.forward import forward_cut
from modelexport.exporting.plan import ExportPlan
from modelexport.quantization.calibration.cut import Share
from modelexport.quantization.calibration.ranges import Ranges, observe, token_batches_from

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Samples:
    """The text to calibrate with.

    Attributes:
        path: text, or JSON lines; None: the text that comes with the package.
        tokenizer: the directory that holds the model's.
        count, length: samples, and tokens in each.
        seed: by which the samples are drawn.
        algorithms: names of those that the samples are for.
        ranges: what static scales reach: ``max``, ``percentile`` or ``mse``.
        all_experts: whether an expert's statistics are of all tokens, not of those routed to it.
        memory: bytes of hidden states that are kept in memory; None: all.
    """

    path: str | None
    tokenizer: Path
    count: int
    length: int
    seed: int
    algorithms: tuple[str, ...] = ()
    ranges: str = "max"
    all_experts: bool = False
    memory: int | None = None


def tokens_of(source: Checkpoint, samples: Samples) -> Tensor:
    """The samples' tokens, int64 ``[samples, length]``.

    Raises:
        UsageError: there is too little text, or no tokenizer.
    """
    return token_batches_from(
        samples.path,
        samples.tokenizer,
        vocabulary=(source.config or {})["vocab_size"],
        samples=samples.count,
        length=samples.length,
        seed=samples.seed,
    )


def shared_tokens(source: Checkpoint, samples: Samples) -> Tensor:
    """:func:`tokens_of`, by the first rank for all."""

    def reading_the_samples() -> Tensor:
        return tokens_of(source, samples)

    if collectives.get_world_size() == 1:  # without a meeting, whose errors begin with who failed in what
        return reading_the_samples()
    return ranks.compute_and_broadcast(reading_the_samples)


def forward_reader(source: Checkpoint, reader: Reader) -> Callable[[str, Share], Tensor]:
    """Reads what a rank's forward pass holds of a tensor: the spans of its share, joined."""
    import torch

    def read(name: str, share: Share) -> Tensor:
        info = source.infos[name]
        if share.dim is None:
            return reader.read(info)
        spans = [span for span in share.spans if span[1] > span[0]]
        parts = [reader.read(info, rows=span) if share.dim == 0 else reader.read(info, cols=span) for span in spans]
        return parts[0] if len(parts) == 1 else torch.cat(parts, share.dim)

    return read


def calibrate(source: Checkpoint, plan: ExportPlan, reader: Reader, samples: Samples) -> Ranges:
    """Run the source over the samples, one decoder layer in memory at a time, on all ranks together.

    Raises:
        CheckpointError: an activation overflows, or there is too little text.
        PlanError: transformers has no such model.
    """
    tokens = shared_tokens(source, samples)
    rank, world = collectives.get_rank(), collectives.get_world_size()

    def progress(done: int, layers: int) -> None:
        phase(f"calibrating: layer {done} of {layers}")

    return observe(
        source.config or {},
        source.infos.keys(),
        forward_reader(source, reader),
        tokens,
        cut=forward_cut(plan.family, plan.dimensions, rank, world),
        method=samples.ranges,
        formats=plan.formats(),
        all_experts=samples.all_experts,
        memory=samples.memory,
        derived=plan.family.is_derived,
        progress=progress,
    )
