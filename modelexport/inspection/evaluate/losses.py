"""Losses over windows of a text, and what is made of them: perplexity, differences, standard errors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from modelexport.errors import UsageError

__all__ = ["Comparison", "Perplexity", "Windows", "comparison_of", "cut_windows", "perplexity_of"]


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

    @property
    def standard_error(self) -> float:
        """Of ``loss``, over windows; NaN for one."""
        return _mean_and_error(self.window_losses)[1]


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


@dataclass(frozen=True)
class Windows:
    """Windows of a text that do not overlap.

    Attributes:
        inputs, targets: int64 ``[windows, window]``: tokens, and what each is followed by.
        in_text: how many windows the whole text has.
    """

    inputs: Tensor
    targets: Tensor
    in_text: int


def cut_windows(token_ids: Tensor, window: int = 256, max_windows: int | None = None) -> Windows:
    """Cut a text, int64 ``[tokens]``, into windows; the last tokens may be left over.

    Args:
        window: tokens of context. A shorter text is one shorter window.
        max_windows: take this many, spread evenly over the text, rather than all.

    Raises:
        UsageError: fewer than two tokens, or a number that is none.
    """
    for name, value in (("window", window), ("max_windows", max_windows)):
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
    return Windows(inputs, targets, count)


def comparison_of(
    reference_losses: Sequence[float], losses: Sequence[float], divergences: Sequence[float], width: int
) -> Comparison:
    """Of the windows' losses and divergences; ``width``: tokens of a window."""
    differences = [a - b for a, b in zip(losses, reference_losses, strict=True)]
    kl, kl_error = _mean_and_error(divergences)
    difference, difference_error = _mean_and_error(differences)
    return Comparison(
        reference=perplexity_of(reference_losses, width),
        model=perplexity_of(losses, width),
        mean_kl=kl,
        kl_standard_error=kl_error,
        loss_difference=difference,
        loss_standard_error=difference_error,
    )


def perplexity_of(losses: Sequence[float], width: int) -> Perplexity:
    """Of the windows' losses; ``width``: tokens of a window."""
    loss = math.fsum(losses) / len(losses)
    # A broken model's loss can be beyond what exp() takes.
    return Perplexity(loss, math.exp(loss) if loss < 700 else math.inf, len(losses) * width, tuple(losses))


def _mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, math.nan
    variance = math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)
    return mean, math.sqrt(variance / len(values))
