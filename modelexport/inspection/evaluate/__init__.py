"""The effect of quantisation on a model: perplexity, KL divergence from the source, and a sentence of each.

Perplexity alone moves little on a small model; the mean KL divergence of the next-token distributions and
the paired difference in loss (both models on the same tokens, so most of the noise between texts cancels)
tell formats apart.

Checkpoints run layer by layer (:func:`compare_checkpoints`), whatever their size; models that are in memory anyway as
they are (:func:`compare`); :func:`evaluate` runs a small Llama whole, without transformers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from modelexport.distributed.environment import cores
from modelexport.errors import CheckpointError, UsageError
from modelexport.inspection.evaluate.losses import (
    Comparison,
    Perplexity,
    Windows,
    comparison_of,
    cut_windows,
    perplexity_of,
)
from modelexport.inspection.evaluate.models import PlainTensors, load_dequantised, load_reference
from modelexport.inspection.evaluate.plain_llama import (
    FastTokenizer,
    PlainLlama,
    WholeOutputs,
    fast_tokenizer,
    plain_llama,
)
from modelexport.inspection.evaluate.streaming import Measured, Progress, measure, through_layers, workers
from modelexport.models.opening import open_model
from modelexport.quantization import devices
from modelexport.quantization.calibration.text import load_tokenizer

if TYPE_CHECKING:
    from modelexport.checkpoints.safetensors.file import Checkpoint

__all__ = [
    "DEMO_PROMPT",
    "Comparison",
    "Evaluation",
    "Perplexity",
    "Windows",
    "compare",
    "compare_checkpoints",
    "cut_windows",
    "evaluate",
    "generate_sentence",
    "load_dequantised",
    "load_reference",
    "mean_kl",
    "perplexity",
    "perplexity_of_checkpoint",
    "token_kl",
    "tokenise",
]

_CPU = torch.device(devices.CPU)
_LOGITS_PER_BATCH = 1 << 23
"""Logits of one forward pass (32 MB in float32), from which the batch size follows."""

DEMO_PROMPT = "The term \u2018hacker\u2019"
"""Of many tried, one where the demo model, quantised or not, finishes its sentence rather than go in circles."""


def mean_kl(reference_logits: Tensor, logits: Tensor) -> Tensor:
    """KL(reference || model) over tokens: logits ``[..., tokens, vocabulary]`` to float64 ``[...]``."""
    return token_kl(reference_logits, logits).mean(-1)


def token_kl(reference_logits: Tensor, logits: Tensor) -> Tensor:
    """KL(reference || model) of each token: logits ``[..., vocabulary]`` to float64 ``[...]``."""
    reference = torch.log_softmax(reference_logits.float(), dim=-1)
    divergence = (reference.exp() * (reference - torch.log_softmax(logits.float(), dim=-1))).sum(-1)
    return divergence.double()


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
    return perplexity_of(losses, inputs.shape[1])


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
    divergences: list[Tensor] = []
    same_top: list[Tensor] = []
    for inputs, targets in _windows(reference, token_ids, window, max_windows, batch):
        expected, got = _logits(reference, inputs), _logits(model, inputs)
        reference_losses += _window_losses(expected, targets).tolist()
        losses += _window_losses(got, targets).tolist()
        divergences.append(token_kl(expected, got))
        same_top.append(expected.argmax(-1) == got.argmax(-1))
    return comparison_of(reference_losses, losses, torch.cat(divergences).cpu(), torch.cat(same_top).cpu())


def perplexity_of_checkpoint(
    checkpoint: Checkpoint,
    windows: Windows,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device = _CPU,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Perplexity:
    """Loss of a checkpoint of which one decoder layer at a time is in memory.

    Args:
        checkpoint: quantised or not, of any format.
        dtype: of weights and arithmetic. float32 leaves only the quantisation's own error.
        device: what computes.
        threads: batches of windows in flight at once; by default one for each core that this process may use, one on
            other devices.
        progress: called with (layers done, layers in all).

    Raises:
        CheckpointError: it is damaged, not whole, or cannot be decoded.
        PlanError: transformers has no such model.
    """
    [losses] = _measure([checkpoint], windows, dtype, device, threads, progress).losses
    return perplexity_of(losses.tolist(), windows.inputs.shape[1])


def compare_checkpoints(
    reference: Checkpoint,
    checkpoint: Checkpoint,
    windows: Windows,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device = _CPU,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Both checkpoints over the same windows, one after the other; arguments as :func:`perplexity_of_checkpoint`.

    Raises:
        CheckpointError: one is damaged, not whole, or cannot be decoded; or their vocabularies differ.
        PlanError: transformers has no such model.
    """
    return _comparison(_measure([reference, checkpoint], windows, dtype, device, threads, progress))


def _comparison(found: Measured) -> Comparison:
    assert found.divergences is not None
    assert found.same_top is not None
    before, after = (losses.tolist() for losses in found.losses)
    return comparison_of(before, after, found.divergences, found.same_top)


def _measure(
    checkpoints: Sequence[Checkpoint],
    windows: Windows,
    dtype: torch.dtype,
    device: torch.device,
    threads: int | None,
    progress: Progress | None,
) -> Measured:
    with ExitStack() as stack:
        tensors = [stack.enter_context(PlainTensors(checkpoint)) for checkpoint in checkpoints]
        sizes = [each.vocabulary for each in tensors]
        if len(set(sizes)) > 1:
            raise CheckpointError(
                f"{checkpoints[1].directory} has a vocabulary of {sizes[1]:,}, {checkpoints[0].directory} one of "
                f"{sizes[0]:,}: what they predict cannot be compared; give the checkpoint that it was made from"
            )

        def done(number: int, layer: int, layers: int) -> None:
            if progress is not None:
                progress(number * layers + layer, len(tensors) * layers)

        outputs = []
        for number, each in enumerate(tensors):
            step = partial(done, number)
            found = through_layers(each, windows.inputs, dtype=dtype, device=device, threads=threads, progress=step)
            outputs.append(found)
        return measure(outputs, windows.targets, threads=threads)


def _windows(
    model: nn.Module, token_ids: Tensor, window: int, max_windows: int | None, batch: int | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of (inputs, targets), both int64 ``[batch, window]``."""
    if batch is not None and batch < 1:
        raise UsageError(f"batch is {batch}; it must be at least 1")
    cut = cut_windows(token_ids, window, max_windows)
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", None) or 1 << 15
    step = batch or max(1, _LOGITS_PER_BATCH // (vocabulary * cut.inputs.shape[1]))
    yield from zip(cut.inputs.split(step), cut.targets.split(step), strict=True)


def _logits(model: nn.Module, inputs: Tensor) -> Tensor:
    model.eval()
    with torch.inference_mode():
        logits: Tensor = model(input_ids=inputs, use_cache=False).logits
    return logits.float()


def _window_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """float64 ``[windows]``: mean loss of each."""
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return loss.view(targets.shape).double().mean(-1)


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
    device = getattr(model, "device", devices.CPU)  # modules of torch's own have none
    written: list[int] = []
    cache = None
    with torch.inference_mode():
        for _ in range(max_new_tokens):
            out = model(input_ids=ids.to(device), past_key_values=cache, use_cache=True)
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
        """The printed lines."""
        c = self.comparison
        part = f"{self.windows} of {self.windows_in_text} windows of {self.window} tokens"
        return [
            f"perplexity {c.reference.perplexity:.2f} -> {c.model.perplexity:.2f} (held-out text, {part})",
            f"loss {c.loss_difference:+.4f} +- {c.loss_standard_error:.4f}, KL {c.mean_kl:.4f} nats a token, "
            f"{c.worst_kl:.4f} in the worst 1 %; same top token {100 * c.same_top:.1f} %",
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
    device: torch.device = _CPU,
) -> Evaluation:
    """Compare an exported checkpoint with the model it was made from.

    Args:
        checkpoint_dir: what was exported (``hf`` format, quantised or not).
        source_dir: the unquantised source, with its tokenizer.
        text: held-out text, or its documents.
        prompt: what to continue; the default suits the demo model.
        window, max_windows: see :func:`perplexity`; ``None`` takes the whole text.
        dtype: of weights and arithmetic. float32 leaves only the quantisation's own error.
        device: what computes.

    Raises:
        CheckpointError: a checkpoint that cannot be read or decoded.
        UsageError: a text of fewer than two tokens.
    """
    small = _small(Path(source_dir), Path(checkpoint_dir), dtype, device)
    tokenizer: Any = load_tokenizer(Path(source_dir)) if small is None else small[0]
    windows = cut_windows(tokenise(tokenizer, text), window, max_windows)

    def sentence(model: Any) -> str:
        return generate_sentence(model, tokenizer, prompt, max_new_tokens)

    if small is None:
        opened = open_model(source_dir), open_model(checkpoint_dir)
        comparison = compare_checkpoints(*opened, windows, dtype=dtype, device=device)
        before = sentence(load_reference(source_dir, dtype=dtype).to(device))
        after = sentence(load_dequantised(checkpoint_dir, dtype=dtype).to(device))
    else:
        models = small[1:]
        with workers(cores()) as pool, devices.deterministic(device):
            outputs = [WholeOutputs(model, windows.inputs, pool) for model in models]
            before, after = pool.map(sentence, models)
        comparison = _comparison(measure(outputs, windows.targets))
    return Evaluation(
        comparison=comparison,
        windows=windows.inputs.shape[0],
        windows_in_text=windows.in_text,
        window=windows.inputs.shape[1],
        prompt=prompt,
        sentence_before=before,
        sentence_after=after,
    )


def _small(
    source: Path, checkpoint: Path, dtype: torch.dtype, device: torch.device
) -> tuple[FastTokenizer, PlainLlama, PlainLlama] | None:
    """The tokenizer and both models without transformers; None where that is not enough for one of them."""
    tokenizer, models = fast_tokenizer(source), []
    for directory in (source, checkpoint) if tokenizer is not None else ():
        with PlainTensors(open_model(directory)) as tensors:
            models.append(plain_llama(tensors, dtype, device))
    if tokenizer is None or models[0] is None or models[1] is None or models[0].vocabulary != models[1].vocabulary:
        return None
    return tokenizer, models[0], models[1]
