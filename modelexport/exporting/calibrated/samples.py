"""The activations of an export's source: which text it is run over, and what its linears and its KV cache then see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelexport.checkpoints.safetensors.file import Checkpoint, Reader, torch_dtype
from modelexport.distributed import collectives, ranks
from modelexport.errors import UsageError
from modelexport.models.architecture import language_config
from modelexport.models.in_memory import gather_layers, is_gathered
from modelexport.models.tokenizers import tokenizer_of
from modelexport.quantization.calibration.cut import ForwardShard
from modelexport.quantization.calibration.images import ImageRow, image_rows, load_processor, processed
from modelexport.quantization.calibration.ranges import token_batches_from
from modelexport.quantization.calibration.text import TextShare, TokenizerFiles, file_of, shares
from modelexport.recipe import ExportRecipe

if TYPE_CHECKING:
    from torch import Tensor

    from modelexport.quantization.calibration.towers import EmbeddedSample


@dataclass(frozen=True)
class Samples:
    """The calibration samples.

    Attributes:
        windows: of text, int64 ``[samples, length]``; none of them where all samples show images. Those of several
            texts take turns, so that the first of them are of all.
        embedded: samples that show images, each of its own length; of several texts in turn, too.
    """

    windows: Tensor
    embedded: tuple[EmbeddedSample, ...] = ()

    @property
    def facts(self) -> dict[str, int]:
        """The numbers of them, and the length of the windows, for the record."""
        samples, length = self.windows.shape
        images = {"with_images": len(self.embedded)} if self.embedded else {}
        return {"samples": samples + len(self.embedded), "length": length, **images}

    def first(self, tokens: int) -> Samples:
        """The first of them, of about so many tokens; of samples with images as many as of windows at most."""
        if not self.embedded:
            return Samples(self.windows[: max(1, tokens // self.windows.shape[1])])
        part = tokens // 2 if len(self.windows) else tokens
        kept: list[EmbeddedSample] = []
        count = 0
        for sample in self.embedded:
            count += sample.tokens.numel()
            if kept and count > part:
                break
            kept.append(sample)
        return Samples(self.windows[: max(1, (tokens - part) // self.windows.shape[1])], tuple(kept))


def samples_of(source: Checkpoint, recipe: ExportRecipe, tokenizer: Path, reader: Reader) -> Samples:
    """The calibration samples: of each text rows that show images, and windows of all others for the rest of its share.

    Raises:
        UsageError: there is too little text, no tokenizer, or no processor.
        PlanError: the model cannot be run on images.
    """
    import torch

    windows, embedded = [], []
    place = tokenizer_of(source, tokenizer)
    for share in shares(recipe.calib, recipe.calib_samples):
        rows = _drawn(list(image_rows(file_of(share.text))), share.samples, recipe.calib_seed)
        embedded.append(_embedded(source, recipe, tokenizer, reader, share, rows) if rows else ())
        windows.append(_windows(source, recipe, place, share, len(rows)))
    order = _turns([len(each) for each in windows])
    mixed = torch.stack([windows[text][place] for text, place in order]) if order else windows[0]
    return Samples(mixed, tuple(embedded[text][place] for text, place in _turns([len(each) for each in embedded])))


def _turns(counts: Sequence[int]) -> list[tuple[int, int]]:
    """The samples of several texts, ``(text, place in it)``, each text's spread evenly over all."""
    spread = [((place + 0.5) / count, text, place) for text, count in enumerate(counts) for place in range(count)]
    return [(text, place) for _, text, place in sorted(spread)]


def _drawn(rows: list[ImageRow], wanted: int, seed: int) -> list[ImageRow]:
    """At most so many rows, in their order; the same ones for a seed."""
    import torch

    if len(rows) <= wanted:
        return rows
    places = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:wanted]
    return [rows[place] for place in places.sort().values.tolist()]


def _windows(
    source: Checkpoint, recipe: ExportRecipe, tokenizer: Path | TokenizerFiles, share: TextShare, images: int
) -> Tensor:
    import torch

    wanted = share.samples - images
    if wanted == 0:
        return torch.empty(0, recipe.calib_length, dtype=torch.int64)
    try:
        return token_batches_from(
            share.text,
            tokenizer,
            vocabulary=language_config(source.config or {}, source.infos)["vocab_size"],
            samples=wanted,
            length=recipe.calib_length,
            seed=recipe.calib_seed,
            share=share.samples / share.of,
        )
    except UsageError as error:
        if not images:
            raise
        raise UsageError(
            f"--calib {share.text}: {images} of {share.samples} samples are its rows with images, and its "
            f"text does not give the other {wanted}: ask for {images} (--calib-samples {images}), or add text; {error}"
        ) from error


def _embedded(
    source: Checkpoint, recipe: ExportRecipe, tokenizer: Path, reader: Reader, share: TextShare, rows: list[ImageRow]
) -> tuple[EmbeddedSample, ...]:
    from modelexport.quantization.calibration.towers import embedded

    if recipe.of_kind("rotate"):
        raise UsageError(
            f"--algorithm {recipe.algorithm} turns the hidden states, which images would come into as they are: leave "
            "out the rows with images, or choose another algorithm"
        )
    processor = load_processor(tokenizer, f"--calib {share.text}")
    dtype = torch_dtype(next(info.dtype for info in source.infos.values() if info.dtype in _TOWER_DTYPES))
    samples = [processed(processor, row) for row in rows]
    return tuple(embedded(source.config or {}, source.infos.keys(), forward_reader(source, reader), samples, dtype))


_TOWER_DTYPES = ("BF16", "F16", "F32")


def shared_samples(source: Checkpoint, recipe: ExportRecipe, tokenizer: Path, reader: Reader) -> Samples:
    """:func:`samples_of`, by the first rank for all."""

    def reading_the_samples() -> tuple[Tensor, list[tuple[Tensor, dict[str, Any]]]]:
        found = samples_of(source, recipe, tokenizer, reader)
        return found.windows, [(sample.tokens, dict(sample.inputs)) for sample in found.embedded]

    if collectives.get_world_size() == 1:  # without a meeting, whose errors begin with who failed in what
        return samples_of(source, recipe, tokenizer, reader)
    from modelexport.quantization.calibration.towers import EmbeddedSample

    windows, embedded = ranks.compute_and_broadcast(reading_the_samples)
    return Samples(windows, tuple(EmbeddedSample(tokens, inputs) for tokens, inputs in embedded))


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
