"""Log-likelihoods of continuations, each behind its own context, by a checkpoint that runs layer by layer.

What multiple-choice tasks and perplexities of documents are made of. Contexts of similar lengths share a batch, filled
up behind their ends, where causal models do not look; only the tokens of the continuations go through the head. All
that is asked for goes through the layers at once, as long as its hidden states fit in :data:`PASS_BYTES`; in several
passes, each of which reads the checkpoint, where they do not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from modelexport.checkpoints.safetensors.file import Checkpoint
from modelexport.inspection.evaluate.models import PlainTensors
from modelexport.inspection.evaluate.streaming import Progress, through_layers, token_losses
from modelexport.models.architecture import language_config
from modelexport.quantization.calibration.layers import BATCH_TOKENS

__all__ = ["PASS_BYTES", "ContinuationScorer"]

PASS_BYTES = 2 << 30
"""Of the hidden states of one pass through the layers."""

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class ContinuationScorer:
    """A checkpoint, and how it is run.

    Attributes:
        checkpoint: quantised or not, of any format; linears are decoded and their inputs rounded as engines do.
        dtype: of weights and arithmetic.
        device: what computes.
        threads: see :func:`~modelexport.inspection.evaluate.streaming.through_layers`.
        progress: called with (layers done, layers in all).
    """

    checkpoint: Checkpoint
    dtype: torch.dtype
    device: torch.device
    threads: int | None = None
    progress: Progress | None = None

    def scores(self, requests: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[tuple[float, bool]]:
        """Returns the log-likelihood of each continuation, in nats, and whether greedy decoding would give it.

        Args:
            requests: the tokens of a context, at least one, and those behind it; nothing behind it is certain.

        Raises:
            CheckpointError: the checkpoint is damaged, not whole, or cannot be decoded.
            PlanError: transformers has no such model.
        """
        # Choices of one token have the same tokens before them, and so have some contexts: each runs once.
        asked: dict[Tokens, list[tuple[int, Tokens]]] = {}
        for number, (context, behind) in enumerate(requests):
            if behind:
                asked.setdefault((*context, *behind)[:-1], []).append((number, tuple(behind)))
        passes = list(self._passes(sorted(asked, key=len, reverse=True)))
        found: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        for done, inputs in enumerate(passes):
            wanted = [(row, number, behind) for row, ids in enumerate(inputs) for number, behind in asked[ids]]
            for (_, number, _), score in zip(wanted, self._run(inputs, wanted, done, len(passes)), strict=True):
                found[number] = score
        return found

    def _passes(self, inputs: Sequence[Tokens]) -> Iterator[list[Tokens]]:
        """Yields the inputs, longest first, as many at a time as fit in memory."""
        config = language_config(self.checkpoint.config or {}, self.checkpoint.infos)
        most = PASS_BYTES // (int(config.get("hidden_size") or 1) * self.dtype.itemsize)
        start = 0
        while start < len(inputs):
            stop = start + max(1, most // len(inputs[start]))
            yield list(inputs[start:stop])
            start = stop

    def _run(
        self, inputs: Sequence[Tokens], wanted: Sequence[tuple[int, int, Tokens]], done: int, passes: int
    ) -> list[tuple[float, bool]]:
        """The score of each (row of ``inputs``, number, continuation)."""

        def progress(layer: int, layers: int) -> None:
            if self.progress is not None:
                self.progress(done * layers + layer, passes * layers)

        batches = list(_batches(inputs))
        with PlainTensors(self.checkpoint) as tensors:
            outputs = through_layers(
                tensors, batches, dtype=self.dtype, device=self.device, threads=self.threads, progress=progress
            )
            hidden = iter(row for batch in outputs.hidden for row in batch)
            rows = [row[: len(ids)] for row, ids in zip(hidden, inputs, strict=True)]
            parts = [rows[row][-len(behind) :] for row, _, behind in wanted]
            targets = torch.tensor([token for _, _, behind in wanted for token in behind], dtype=torch.int64)
            outputs.hidden = list(torch.cat(parts)[None].split(BATCH_TOKENS, dim=1))
            losses, top = token_losses(outputs, targets[None].split(BATCH_TOKENS, dim=1), threads=self.threads)
        lengths = [len(behind) for _, _, behind in wanted]
        return [
            (-float(loss.sum()), bool(greedy.all()))
            for loss, greedy in zip(losses.split(lengths), top.split(lengths), strict=True)
        ]


def _batches(inputs: Sequence[Tokens]) -> Iterator[Tensor]:
    """Yields inputs, longest first, as int64 ``[inputs, length of the first]``, filled up with their last tokens."""
    start = 0
    while start < len(inputs):
        length = len(inputs[start])
        stop = start + max(1, BATCH_TOKENS // length)
        yield torch.tensor([[*ids, *ids[-1:] * (length - len(ids))] for ids in inputs[start:stop]], dtype=torch.int64)
        start = stop
