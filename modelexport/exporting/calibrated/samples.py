"""The activations of an export's source: which text it is run over, and what its linears and its KV cache then see."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from modelexport.checkpoints.safetensors.file import Checkpoint, Reader
from modelexport.distributed import collectives, ranks
from modelexport.models.architecture import language_config
from modelexport.models.in_memory import gather_layers, is_gathered
from modelexport.quantization.calibration.cut import ForwardShard
from modelexport.quantization.calibration.ranges import token_batches_from
from modelexport.recipe import ExportRecipe

if TYPE_CHECKING:
    from torch import Tensor


def tokens_of(source: Checkpoint, recipe: ExportRecipe, tokenizer: Path) -> Tensor:
    """The tokens of the calibration samples, int64 ``[samples, length]``.

    Raises:
        UsageError: there is too little text, or no tokenizer.
    """
    return token_batches_from(
        recipe.calib,
        tokenizer,
        vocabulary=language_config(source.config or {}, source.infos)["vocab_size"],
        samples=recipe.calib_samples,
        length=recipe.calib_length,
        seed=recipe.calib_seed,
    )


def shared_tokens(source: Checkpoint, recipe: ExportRecipe, tokenizer: Path) -> Tensor:
    """:func:`tokens_of`, by the first rank for all."""

    def reading_the_samples() -> Tensor:
        return tokens_of(source, recipe, tokenizer)

    if collectives.get_world_size() == 1:  # without a meeting, whose errors begin with who failed in what
        return reading_the_samples()
    return ranks.compute_and_broadcast(reading_the_samples)


def forward_reader(source: Checkpoint, reader: Reader) -> Callable[[str, ForwardShard], Tensor]:
    """Reads what a rank's forward pass holds of a tensor: the spans of its share, joined."""
    import torch

    sharded = is_gathered(source)

    def read(name: str, share: ForwardShard) -> Tensor:
        if sharded:  # all ranks read something of each tensor, in the same order
            gather_layers(source, [name])
        info = source.infos[name]
        if share.dim is None:
            return reader.read(info)
        spans = [span for span in share.spans if span[1] > span[0]]
        parts = [reader.read(info, rows=span) if share.dim == 0 else reader.read(info, cols=span) for span in spans]
        return parts[0] if len(parts) == 1 else torch.cat(parts, share.dim)

    return read
