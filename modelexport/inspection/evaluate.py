"""What quantisation did to a model: perplexity, KL divergence to the source, and a sentence of each.

Perplexity alone moves little on a small model; the mean KL divergence of the next-token distributions and
the paired difference in loss (both models on the same tokens, so most of the noise between texts cancels)
tell formats apart.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from modelexport.errors import UsageError
from modelexport.inspection.models import load_dequantised, load_reference

__all__ = [
    "DEMO_PROMPT",
    "Comparison",
    "Evaluation",
    "Perplexity",
    "compare",
    "evaluate",
    "generate_sentence",
    "load_dequantised",
    "load_reference",
    "mean_kl",
    "perplexity",
    "tokenise",
]

_LOGITS_PER_BATCH = 1 << 23
"""Logits of one forward pass (32 MB in float32), from which the batch size follows."""

DEMO_PROMPT = "The term \u2018hacker\u2019"
"""Of many tried, one where the demo model, quantised or not, finishes its sentence rather than go in circles."""


@dataclass(frozen=True)
class Perplexity:
    """Loss of one model over windows of a text.

    Attributes:
        loss: mean negative log-likelihood, nats a token.
        perplexity: exp(loss).
        tokens: tokens predicted.
        window_losses: mean loss of each window, in the order of the text.
    """

    loss: float
    perplexity: float
    tokens: int
    window_losses: tuple[float, ...]


@dataclass(frozen=True)
class Comparison:
    """A model against its reference, on the same tokens.

    Attributes:
        reference, model: each one's loss.
        mean_kl: mean over tokens of KL(reference || model) of the next-token distributions, nats.
        kl_standard_error: of ``mean_kl``, over windows.
        loss_difference: model's loss minus reference's, nats a token.
        loss_standard_error: of ``loss_difference``, from the windows' paired differences; NaN for one window.
    """

    reference: Perplexity
    model: Perplexity
    mean_kl: float
    kl_standard_error: float
    loss_difference: float
    loss_standard_error: float


def mean_kl(reference_logits: Tensor, logits: Tensor) -> Tensor:
    """KL(reference || model) over tokens: logits ``[..., tokens, vocabulary]`` to float64 ``[...]``."""
    reference = torch.log_softmax(reference_logits.float(), dim=-1)
    divergence = (reference.exp() * (reference - torch.log_softmax(logits.float(), dim=-1))).sum(-1)
    return divergence.double().mean(-1)


def perplexity(
    model: nn.Module,
    token_ids: Tensor,
    *,
    window: int = 256,
    max_windows: int | None = None,
    batch: int | None = None,
) -> Perplexity:
    """Loss over windows that do not overlap; every token of a window predicts the one after it.

    Args:
        model: a causal language model as transformers makes them; put into eval mode.
        token_ids: int64 ``[tokens]``.
        window: tokens of context. A shorter text is one shorter window.
        max_windows: take this many, spread evenly over the text, rather than all.
        batch: windows in one forward pass; by default as many as keep the logits small.

    Raises:
        UsageError: fewer than two tokens.
    """
    losses = []
    for inputs, targets in _windows(model, token_ids, window, max_windows, batch):
        losses += _window_losses(_logits(model, inputs), targets).tolist()
    return _perplexity(losses, inputs.shape[1])


def compare(
    reference: nn.Module,
    model: nn.Module,
    token_ids: Tensor,
    *,
    window: int = 256,
    max_windows: int | None = None,
    batch: int | None = None,
) -> Comparison:
    """One pass of both models over the same windows; arguments as for :func:`perplexity`."""
    reference_losses: list[float] = []
    losses: list[float] = []
    divergences: list[float] = []
    for inputs, targets in _windows(reference, token_ids, window, max_windows, batch):
        expected, got = _logits(reference, inputs), _logits(model, inputs)
        reference_losses += _window_losses(expected, targets).tolist()
        losses += _window_losses(got, targets).tolist()
        divergences += mean_kl(expected, got).tolist()
    differences = [a - b for a, b in zip(losses, reference_losses, strict=True)]
    kl, kl_error = _mean_and_error(divergences)
    difference, difference_error = _mean_and_error(differences)
    width = inputs.shape[1]
    return Comparison(
        reference=_perplexity(reference_losses, width),
        model=_perplexity(losses, width),
        mean_kl=kl,
        kl_standard_error=kl_error,
        loss_difference=difference,
        loss_standard_error=difference_error,
    )


def _windows(
    model: nn.Module, token_ids: Tensor, window: int, max_windows: int | None, batch: int | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of (inputs, targets), both int64 ``[batch, window]``."""
    for name, value in (("window", window), ("max_windows", max_windows), ("batch", batch)):
        if value is not None and value < 1:
            raise UsageError(f"{name} is {value}; it must be at least 1")
    if len(token_ids) < 2:
        raise UsageError(f"the text has {len(token_ids)} tokens; at least 2 are needed to measure a loss")
    window = min(window, len(token_ids) - 1)
    count = (len(token_ids) - 1) // window
    inputs = token_ids[: count * window].view(count, window)
    targets = token_ids[1 : count * window + 1].view(count, window)
    if max_windows is not None and max_windows < count:
        chosen = torch.arange(max_windows) * count // max_windows
        inputs, targets = inputs[chosen], targets[chosen]
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", None) or 1 << 15
    step = batch or max(1, _LOGITS_PER_BATCH // (vocabulary * window))
    yield from zip(inputs.split(step), targets.split(step), strict=True)


def _logits(model: nn.Module, inputs: Tensor) -> Tensor:
    model.eval()
    with torch.inference_mode():
        logits: Tensor = model(input_ids=inputs, use_cache=False).logits
    return logits.float()


def _window_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """float64 ``[windows]``: mean loss of each."""
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return loss.view(targets.shape).double().mean(-1)


def _perplexity(losses: Sequence[float], width: int) -> Perplexity:
    loss = math.fsum(losses) / len(losses)
    # A broken model's loss can be beyond what exp() takes.
    return Perplexity(loss, math.exp(loss) if loss < 700 else math.inf, len(losses) * width, tuple(losses))


def _mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, math.nan
    variance = math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)
    return mean, math.sqrt(variance / len(values))


def tokenise(tokenizer: Any, text: str | Sequence[str]) -> Tensor:
    """int64 ``[tokens]``: one text, or documents in a row, the beginning-of-text token before each.

    A tokenizer without such a token (or end-of-text in its stead) gets nothing between documents.
    """
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    prefix = [] if start is None else [start]
    documents = [text] if isinstance(text, str) else list(text)
    ids: list[int] = []
    for document in documents:
        # verbose=False: that the text exceeds the model's context is why it is cut into windows.
        ids += prefix + tokenizer.encode(document, add_special_tokens=False, verbose=False)
    return torch.tensor(ids, dtype=torch.int64)


def generate_sentence(model: nn.Module, tokenizer: Any, prompt: str, max_new_tokens: int = 48) -> str:
    """The prompt continued greedily to the end of its sentence (or ``max_new_tokens``); deterministic."""
    ids = tokenise(tokenizer, prompt)[None]
    model.eval()
    written: list[int] = []
    cache = None
    with torch.inference_mode():
        for _ in range(max_new_tokens):
            out = model(input_ids=ids, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            ids = out.logits[:, -1:].float().argmax(-1)
            if ids.item() == tokenizer.eos_token_id:
                break
            written.append(int(ids.item()))
            text = tokenizer.decode(written)
            end = re.search("[.!?][\u201d\u2019\"')]*(?=\\s)", text)
            if end:
                return prompt + text[: end.end()]
    return prompt + tokenizer.decode(written)


@dataclass(frozen=True)
class Evaluation:
    """A checkpoint against its source on a text.

    Attributes:
        comparison: losses, KL and their standard errors; ``reference`` is the source.
        windows, windows_in_text, window: how many windows of how many tokens were looked at, of how many.
        prompt: what both sentences begin with.
        sentence_before, sentence_after: greedy continuations by source and checkpoint.
    """

    comparison: Comparison
    windows: int
    windows_in_text: int
    window: int
    prompt: str
    sentence_before: str
    sentence_after: str

    def as_json(self) -> dict[str, Any]:
        """A JSON-able form, without the losses of each window."""
        value = asdict(self)
        for side in ("reference", "model"):
            del value["comparison"][side]["window_losses"]
        return value

    def lines(self) -> list[str]:
        """What to print, a line each."""
        c = self.comparison
        part = f"{self.windows} of {self.windows_in_text} windows of {self.window} tokens"
        return [
            f"perplexity {c.reference.perplexity:.2f} -> {c.model.perplexity:.2f} (held-out text, {part})",
            f"loss {c.loss_difference:+.4f} +- {c.loss_standard_error:.4f}, KL {c.mean_kl:.4f} nats a token",
            f"before: {_one_line(self.sentence_before)}",
            f"after:  {_one_line(self.sentence_after)}",
        ]


def _one_line(text: str) -> str:
    return " ".join(text.split())


def evaluate(
    checkpoint_dir: str | Path,
    source_dir: str | Path,
    text: str | Sequence[str],
    *,
    prompt: str = DEMO_PROMPT,
    window: int = 256,
    max_windows: int | None = 64,
    max_new_tokens: int = 48,
    dtype: torch.dtype = torch.float32,
) -> Evaluation:
    """Compare an exported checkpoint with the model it was made from.

    Args:
        checkpoint_dir: what was exported (``hf`` format, quantised or not).
        source_dir: the unquantised source, with its tokenizer.
        text: held-out text, or its documents.
        prompt: what to continue; the default suits the demo model.
        window, max_windows: see :func:`perplexity`; ``None`` takes the whole text.
        dtype: of weights and arithmetic. float32 leaves only the quantisation's own error.

    Raises:
        CheckpointError: a checkpoint that cannot be read or decoded.
        UsageError: a text of fewer than two tokens.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(source_dir), local_files_only=True, trust_remote_code=False)
    token_ids = tokenise(tokenizer, text)
    reference = load_reference(source_dir, dtype=dtype)
    model = load_dequantised(checkpoint_dir, dtype=dtype)
    comparison = compare(reference, model, token_ids, window=window, max_windows=max_windows)
    windows = len(comparison.model.window_losses)
    used = comparison.model.tokens // windows
    return Evaluation(
        comparison=comparison,
        windows=windows,
        windows_in_text=(len(token_ids) - 1) // used,
        window=used,
        prompt=prompt,
        sentence_before=generate_sentence(reference, tokenizer, prompt, max_new_tokens),
        sentence_after=generate_sentence(model, tokenizer, prompt, max_new_tokens),
    )
