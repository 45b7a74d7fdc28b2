"""Losses over windows of a text, and what is made of them: perplexity, differences, standard errors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from modelexport.errors import UsageError

__all__ = ["PERCENTILES", "Comparison", "Perplexity", "Windows", "comparison_of", "cut_windows", "perplexity_of"]

PERCENTILES = ("50", "95", "99", "99.9")
"""Of the tokens' KL divergences, as other tools print them; text, since they are keys of JSON."""
_WORST = 100  # one token in so many


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
        same_top: part of the tokens after which both expect the same token most, from 0 to 1.
        same_top_standard_error: of ``same_top``, over windows.
        worst_kl: mean KL of the 1 % of tokens (at least one) where it is largest: averages hide these.
        kl_percentiles: percentile -> KL of a token, interpolated linearly, of :data:`PERCENTILES`.
        max_kl: the largest of any token.
    """

    reference: Perplexity
    model: Perplexity
    mean_kl: float
    kl_standard_error: float
    loss_difference: float
    loss_standard_error: float
    same_top: float
    same_top_standard_error: float
    worst_kl: float
    kl_percentiles: dict[str, float]
    max_kl: float


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
    reference_losses: Sequence[float], losses: Sequence[float], divergences: Tensor, same_top: Tensor
) -> Comparison:
    """Returns what is said of two models.

    Args:
        reference_losses, losses: the mean loss of each window.
        divergences: KL of each token, float64 ``[windows, window]`` in the host's memory.
        same_top: whether both models expect the same next token most, bool ``[windows, window]``.
    """
    width = divergences.shape[1]
    differences = [a - b for a, b in zip(losses, reference_losses, strict=True)]
    kl, kl_error = _mean_and_error(divergences.mean(-1).tolist())
    same, same_error = _mean_and_error(same_top.double().mean(-1).tolist())
    rising = divergences.flatten().sort().values
    difference, difference_error = _mean_and_error(differences)
    return Comparison(
        reference=perplexity_of(reference_losses, width),
        model=perplexity_of(losses, width),
        mean_kl=kl,
        kl_standard_error=kl_error,
        loss_difference=difference,
        loss_standard_error=difference_error,
        same_top=same,
        same_top_standard_error=same_error,
        worst_kl=rising[-math.ceil(len(rising) / _WORST) :].mean().item(),
        kl_percentiles={name: _percentile(rising, float(name)) for name in PERCENTILES},
        max_kl=rising[-1].item(),
    )


def _percentile(rising: Tensor, percent: float) -> float:
    """Returns a percentile of sorted values; torch.quantile takes 16 million of them at most."""
    place = percent / 100 * (len(rising) - 1)
    low, high = rising[math.floor(place)].item(), rising[math.ceil(place)].item()
    return low + (high - low) * (place - math.floor(place))


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
