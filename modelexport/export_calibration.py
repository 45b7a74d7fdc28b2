"""The activations of an export's source: which text it is run over, and what its linears and its KV cache then see."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelexport.checkpoints.safetensors_file import Checkpoint, Reader
from modelexport.distributed.launch import phase
from modelexport.quantization.calibration import Ranges, observe, token_batches_from


@dataclass(frozen=True)
class Samples:
    """The text to calibrate with.

    Attributes:
        path: text, or JSON lines; None: the text that comes with the package.
        tokenizer: the directory that holds the model's.
        count, length: samples, and tokens in each.
        seed: by which the samples are drawn.
    """

    path: str | None
    tokenizer: Path
    count: int
    length: int
    seed: int


def calibrate(source: Checkpoint, reader: Reader, samples: Samples, threads: int | None = None) -> dict[str, Any]:
    """Run the source over the samples, one decoder layer in memory at a time; :class:`Ranges` as JSON.

    Raises:
        CheckpointError: an activation overflows, or there is too little text.
        PlanError: transformers has no such model.
    """
    config = source.config or {}
    tokens = token_batches_from(
        samples.path,
        samples.tokenizer,
        vocabulary=config["vocab_size"],
        samples=samples.count,
        length=samples.length,
        seed=samples.seed,
    )

    def progress(done: int, layers: int) -> None:
        phase(f"calibrating: layer {done} of {layers}")

    names = source.infos.keys()
    ranges: Ranges = observe(
        config, names, lambda name: reader.read(source.infos[name]), tokens, threads=threads, progress=progress
    )
    return ranges.as_json()
