"""Run windows of a text through a checkpoint of which one decoder layer at a time is in memory.

transformers' own modules compute, see :mod:`~modelexport.quantization.calibration.layers`; a quantised linear is
decoded when its layer's turn comes, and its inputs are rounded as engines round them by watching ``F.linear``, so that
experts which transformers stacks into one parameter are seen like any other linear. The head is read and multiplied in
chunks of the vocabulary, all windows with each, and losses and divergences are added up from chunk to chunk: no logits
of a whole window are ever in memory, nor is the head. Keys and values are rounded to FP8 by the checkpoint's scales.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from modelexport.distributed.environment import cores
from modelexport.errors import CheckpointError, PlanError
from modelexport.inspection.evaluate.models import PlainTensors
from modelexport.inspection.evaluate.plain_llama import WholeOutputs
from modelexport.models.architecture import declared_family, language_config
from modelexport.quantization import devices
from modelexport.quantization.calibration.cut import ForwardShard
from modelexport.quantization.calibration.layers import DYNAMIC, LayerRunner
from modelexport.quantization.calibration.model import body, running
from modelexport.quantization.calibration.products import linear

__all__ = ["Measured", "Outputs", "measure", "through_layers", "token_losses", "workers"]

Progress = Callable[[int, int], None]

_CPU = torch.device(devices.CPU)
_CHUNK_LOGITS = 1 << 20
"""Logits of one batch of windows at a time, of each model: 4 MB in float32."""
_CHUNK_WEIGHTS = 1 << 23
"""Elements of the head that are in memory at a time, 32 MB in float32."""


class Outputs:
    """The outputs of a checkpoint's last layer, and its head: logits of a chunk of windows at a time.

    Attributes:
        hidden: each batch's final hidden states, ``[windows, length, hidden]`` in ``dtype``, in the host's memory.
        vocabulary: rows of the head.
        device: where logits are computed.
    """

    def __init__(self, tensors: PlainTensors, runner: LayerRunner, hidden: list[Tensor], dtype: torch.dtype) -> None:
        self.device = runner.device
        model, memory = runner.model, _tied_to(runner.model) or f"{runner.head_name}.weight"
        weight = runner.on_disk.get(memory, memory)
        head = weight.removesuffix(".weight")
        self.hidden, self.dtype, self._derived = hidden, dtype, runner.derived
        self._tensors, self._model = tensors, model
        wanted = tuple(model.get_output_embeddings().weight.shape)
        where = tensors.checkpoint.directory
        if weight not in tensors.names:
            raise CheckpointError(f"{where}: {weight} is missing")
        if tensors.shape(weight) != wanted:
            raise CheckpointError(f"{where}: {weight} is {list(tensors.shape(weight))}, config.json makes it {wanted}")
        self.vocabulary = wanted[0]
        self._head, self._weight = head, weight
        self._bias = _bias_of(runner, tensors)
        tensors.check_all_read(but=(weight, *((self._bias,) if self._bias is not None else ())))
        # A quantised head is decoded once; one that is stored as it is, is read in chunks.
        self._decoded = tensors.read(self._weight) if tensors.is_decoded(self._weight) else None
        for inner in (body(model), model.get_decoder()):  # whichever of them the model's forward pass calls
            if inner is not model:
                inner.forward = lambda *_, inputs_embeds, **__: _Hidden(inputs_embeds)
        output = model.get_output_embeddings()  # whose dtype models ask for, and round what it is given to
        output.weight = torch.nn.Parameter(torch.empty(wanted, dtype=dtype, device="meta"), requires_grad=False)

    def select(self, start: int, stop: int) -> None:
        """Read rows ``[start, stop)`` of the head: :meth:`logits` are of these from now on."""
        share = ForwardShard(0, ((start, stop),))
        weight = self._tensors.read(self._weight, share) if self._decoded is None else self._decoded[start:stop]
        weight = weight.to(self.device, self.dtype)
        bias = None if self._bias is None else self._tensors.read(self._bias, share).to(self.device, self.dtype)
        rounded = self._tensors.activations.get(self._head)

        def head(hidden: Tensor) -> Tensor:
            return linear(hidden if rounded is None else rounded(hidden), weight, bias)

        self._model.get_output_embeddings().forward = head

    def logits(self, batch: int) -> Tensor:
        """Of a batch's tokens, float32 ``[tokens, rows selected]`` on the device; thread-safe.

        By the model's own forward pass around its layers and its head, which may scale or cap them.
        """
        what = "what comes behind its layers does not run by itself"
        with (
            _in_words(self._tensors),
            running(self._model, derived=self._derived, what=what),
            torch.inference_mode(),
        ):
            out: Tensor = self._model(inputs_embeds=self.hidden[batch].to(self.device), use_cache=False).logits
        return out.flatten(0, -2).float()


def _bias_of(runner: LayerRunner, tensors: PlainTensors) -> str | None:
    """The name of the head's bias in the checkpoint; None where the model has none.

    Raises:
        CheckpointError: the model has one, the checkpoint has not.
    """
    if runner.model.get_output_embeddings().bias is None:
        return None
    memory = f"{runner.head_name}.bias"
    tied = getattr(runner.model, "all_tied_weights_keys", None) or {}
    for name in (memory, tied.get(memory), *(key for key, other in tied.items() if other == memory)):
        if name is not None and (found := runner.on_disk.get(name, name)) in tensors.names:
            return found
    raise CheckpointError(f"{tensors.checkpoint.directory}: {memory} is missing")


def _tied_to(model: Any) -> str | None:
    """The embedding's weight, where that is the head too."""
    if not getattr(model.config, "tie_word_embeddings", False):
        return None
    return next(f"{name}.weight" for name, module in model.named_modules() if module is model.get_input_embeddings())


class _Hidden:
    """The output of a model without its head, as far as heads read it."""

    def __init__(self, last_hidden_state: Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getattr__(self, name: str) -> None:
        """Nothing else was kept."""
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]


def through_layers(
    tensors: PlainTensors,
    windows: Tensor | Sequence[Tensor],
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device = _CPU,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Outputs:
    """Run windows through all layers of a checkpoint, one in memory at a time.

    Args:
        tensors: the checkpoint's.
        windows: token ids, int64 ``[windows, length]``; or batches of that shape, each of its own length.
        dtype: of weights and arithmetic.
        device: what computes.
        threads: batches of windows in flight at once; by default one for each core that this process may use, one on
            other devices.
        progress: called with (layers done, layers in all).

    Raises:
        PlanError: transformers has no such model.
        CheckpointError: a tensor is missing, left over, of another shape, or cannot be decoded.
    """
    config = tensors.checkpoint.config
    where = tensors.checkpoint.directory
    if config is None:
        raise CheckpointError(f"{where} has no config.json, so that it is no model: give --config PATH")
    derived = declared_family(config.get("model_type")) is None
    with (
        _in_words(tensors),
        LayerRunner(
            language_config(config, tensors.names),
            set(tensors.names),
            tensors.read,
            windows,
            threads=threads,
            dtype=dtype,
            device=device,
            derived=derived,
        ) as runner,
    ):
        if runner.head_name is None:
            raise PlanError(f"transformers' {type(runner.model).__name__} has no output embedding")
        for index in range(len(runner.layers)):
            with runner.filled(index) as layer:
                cache = tensors.cache_rounding(f"{runner.layers_on_disk}.{index}.")
                runner.advance(layer, tensors.activations, cache=cache)
                del layer  # holds its weights, which would stay while the next one is filled
            if progress is not None:
                progress(index + 1, len(runner.layers))
        with running(runner.model, derived=derived):
            hidden = [x.to(devices.CPU, dtype) for x in runner.outputs()]
        return Outputs(tensors, runner, hidden, dtype)


@contextmanager
def _in_words(tensors: PlainTensors) -> Iterator[None]:
    """The message of an error, without the advice that is for calibration."""
    try:
        yield
    except PlanError as error:
        where, text = f"{tensors.checkpoint.directory} cannot be evaluated: ", str(error)
        if text.startswith(where):
            raise
        raise PlanError(where + text.removesuffix(DYNAMIC).rstrip(" :;")) from error


@dataclass(frozen=True)
class Measured:
    """Losses and divergences of models on the same windows, in nats and in the host's memory.

    Attributes:
        losses: of each model, in the order given: means over each window's tokens, float64 ``[windows]``.
        divergences: KL(first || second) of each token, float64 ``[windows, length]``; None for one model.
        same_top: whether both expect the same next token most, bool ``[windows, length]``; None for one model.
    """

    losses: tuple[Tensor, ...]
    divergences: Tensor | None
    same_top: Tensor | None


def measure(models: Sequence[Outputs | WholeOutputs], targets: Tensor, *, threads: int | None = None) -> Measured:
    """The losses of one model, or of two with their divergence, chunk of the vocabulary by chunk.

    Args:
        models: one, or the reference and another; of the same windows and vocabulary.
        targets: int64 ``[windows, length]``, what each token is followed by.
    """
    parts = targets.split([len(hidden) for hidden in models[0].hidden])
    sums = _added_up(models, parts, threads)
    shape = (targets.shape[0], targets.shape[1])
    losses = tuple(_joined([batch.loss(number) for batch in sums], shape).mean(-1) for number in range(len(models)))
    if len(models) == 1:
        return Measured(losses, None, None)
    divergences = _joined([batch.divergence() for batch in sums], shape)
    return Measured(losses, divergences, _joined([batch.same_top() for batch in sums], shape) & ~divergences.isnan())


def token_losses(model: Outputs, targets: Sequence[Tensor], *, threads: int | None = None) -> tuple[Tensor, Tensor]:
    """The loss of each token by one model, and whether it expects that token most.

    Args:
        model: whose ``hidden`` may be those of any tokens.
        targets: of each of its batches, int64 ``[windows, length]``: what each token is followed by.

    Returns:
        The loss of each token, float64 ``[tokens]``; and whether it is the one that the model expects most, bool.
    """
    sums = _added_up([model], targets, threads)
    return torch.cat([batch.loss(0).cpu() for batch in sums]), torch.cat([batch.is_top().cpu() for batch in sums])


def _added_up(models: Sequence[Outputs | WholeOutputs], parts: Sequence[Tensor], threads: int | None) -> list[_Sums]:
    """The sums of each batch over the whole vocabulary; ``parts``: the targets of each."""
    first = models[0]
    sums = [_Sums(len(models), part.flatten().to(first.device)) for part in parts]
    most = max(part.numel() for part in parts)
    step = max(1, min(_CHUNK_LOGITS // most, _CHUNK_WEIGHTS // first.hidden[0].shape[-1]))
    at_once = threads or (cores() if first.device == _CPU else 1)  # a GPU is busy with one batch
    with workers(min(len(parts), at_once)) as pool, devices.deterministic(first.device):
        for start in range(0, first.vocabulary, step):
            for model in models:
                model.select(start, min(first.vocabulary, start + step))

            def one(batch: int, start: int = start) -> None:
                sums[batch].add(start, [model.logits(batch) for model in models])

            list(pool.map(one, range(len(parts))))
    return sums


def _joined(tokens: Sequence[Tensor], shape: tuple[int, int]) -> Tensor:
    """The values of each batch's tokens as one tensor ``[windows, length]`` in the host's memory."""
    return torch.cat([each.cpu() for each in tokens]).view(shape)


class _Sums:
    """Of a batch's tokens: what their losses and divergences are made of, as far as the vocabulary has been seen.

    Exponentials are taken relative to the largest logit so far, and what was added up before is rescaled as that grows.
    """

    def __init__(self, models: int, targets: Tensor) -> None:
        self.targets = targets
        tokens, device = len(targets), targets.device
        zeros = partial(torch.zeros, tokens, dtype=torch.float64, device=device)
        self.largest = [torch.full((tokens,), -torch.inf, device=device) for _ in range(models)]
        self.top = [torch.zeros(tokens, dtype=torch.int64, device=device) for _ in range(models)]
        self.exponentials = [zeros() for _ in range(models)]
        self.chosen = [zeros() for _ in range(models)]
        self.differences = zeros()  # of the logits, weighted by the first's exp()

    def add(self, start: int, logits: Sequence[Tensor]) -> None:
        """Logits ``[tokens, rows]`` of each model, for the rows of the vocabulary from ``start``."""
        rows = logits[0].shape[-1]
        inside = (self.targets >= start) & (self.targets < start + rows)
        column = (self.targets - start).clamp(0, rows - 1)[:, None]
        for number, values in enumerate(logits):
            highest, place = values.max(-1)
            # Of equal ones the first, as argmax has it, in whatever chunks the vocabulary comes.
            self.top[number] = torch.where(highest > self.largest[number], place + start, self.top[number])
            largest = torch.maximum(self.largest[number], highest)
            shrunk = (self.largest[number] - largest).double().exp()
            weights = (values - largest[:, None]).exp_()
            self.exponentials[number] = self.exponentials[number] * shrunk + weights.sum(-1)
            self.chosen[number] += torch.where(inside, values.gather(-1, column)[:, 0], 0.0)
            if number == 0 and len(logits) > 1:
                self.differences = self.differences * shrunk + weights.mul_(values - logits[1]).sum(-1)
            self.largest[number] = largest

    def _normaliser(self, number: int) -> Tensor:
        return self.largest[number] + self.exponentials[number].log()

    def loss(self, number: int) -> Tensor:
        """Negative log-likelihood of each target, float64 ``[tokens]``."""
        return self._normaliser(number) - self.chosen[number]

    def is_top(self) -> Tensor:
        """Returns whether the first expects the target most, bool ``[tokens]``."""
        return self.top[0] == self.targets

    def same_top(self) -> Tensor:
        """Returns whether the first and the second expect the same token most, bool ``[tokens]``."""
        return self.top[0] == self.top[1]

    def divergence(self) -> Tensor:
        """KL(first || second) of each token, float64 ``[tokens]``."""
        expected = self.differences / self.exponentials[0]
        return expected + (self._normaliser(1) - self._normaliser(0))


@contextmanager
def workers(count: int) -> Iterator[Executor]:
    """Runs a body with threads whose operations take one core each."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield pool
    finally:
        torch.set_num_threads(before)
