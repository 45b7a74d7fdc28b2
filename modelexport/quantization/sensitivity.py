"""The sensitivity of a model to each number format in each group of its linears, all else being as it was.

What :mod:`~modelexport.quantization.algorithms.autoquant` chooses by. The error of a group and a format is measured

``kl``
    at the end: the mean KL divergence of the next-token distributions, nats. Every group and format has hidden states
    of its own on the way from its layer to the head, so the cost grows with the square of the layers.
``output``
    behind its layer: the squared error of the layer's output hidden states, as a part of their own square. One pass
    through one layer for each group and format.

On the demo model both come to nearly the same choice. Mean KL on held-out text (32 windows of 256; standard errors are
about 2 %) with int4, fp8 and none to choose from; all int4 (4.13 bits) has 0.0525, all fp8 (8.05 bits) 0.0060:

====  ======  ==========  ============================  ===================
bits  ``kl``  ``output``  at random, of 8: mean (best)  fp8 in first layers
====  ======  ==========  ============================  ===================
4.5   0.0432  0.0432      0.0490 (0.0455)               0.0453
5     0.0337  0.0338      0.0413 (0.0381)               0.0371
6     0.0220  0.0225      0.0378 (0.0311)               0.0224
====  ======  ==========  ============================  ===================

Errors relative to what a layer *adds* to the hidden states mislead: 0.0493, 0.0402, 0.0305.

Where the KV cache is rounded, it is rounded in every trial, and a group's error is what comes on top of that of the
cache alone. That one is the same whatever is chosen, and is told apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from modelexport.errors import PlanError, ValuesError
from modelexport.quantization.algorithms import autoquant
from modelexport.quantization.calibration import static_ranges
from modelexport.quantization.calibration.cut import WHOLE, ForwardShard

if TYPE_CHECKING:
    from modelexport.quantization.calibration.layers import FilledLayer, LayerRunner, Observed
    from modelexport.quantization.formats.base import NumberFormat
    from modelexport.quantization.kv_caches import CacheFormat, CacheRounding

__all__ = ["MEASURES", "TOKENS", "Assigned", "Sensitivities", "affordable", "assign", "measure", "stored_bits"]

MEASURES = ("kl", "output")
TOKENS = 4096
"""Of samples, enough to tell groups apart: give the runner no more."""

_KL_OPERATIONS = 2e13  # some minutes on a few cores
_KL_BYTES = 1 << 30
_CACHE = ("", "")  # in place of a group and a candidate
_ROWS = 128  # tokens whose logits are in memory at once

Groups = Sequence[Sequence[Sequence[str]]]
"""For each decoder layer its groups: linears that have one format, by their modules' names."""
Shapes = Mapping[str, tuple[int, int]]


@dataclass(frozen=True)
class Sensitivities:
    """Errors, see the module.

    Attributes:
        by: one of :data:`MEASURES`.
        errors: first linear of a group -> candidate -> error; 0 for what is not quantised. Candidates that do not fit a
            linear of the group are missing.
        cache: the error of a rounded KV cache, with nothing else quantised.
    """

    by: str
    errors: dict[str, dict[str, float]]
    cache: float = 0.0


@dataclass(frozen=True)
class Assigned:
    """The number formats that autoquant has chosen.

    Attributes:
        quant: as ``--quant`` would say it.
        formats: linear -> candidate.
        bits: bits per weight of all these linears, scales included.
        error: the sum of the errors of what was chosen and of the cache, see :class:`Sensitivities`.
        front: (bits, error) of the best choices for other budgets, the smallest first.
        uniform: candidate that fits every linear -> (bits, error) of all linears in it.
        sensitivities: what it was chosen by.
    """

    quant: str
    formats: dict[str, str]
    bits: float
    error: float
    front: list[tuple[float, float]]
    uniform: dict[str, tuple[float, float]]
    sensitivities: Sensitivities

    def recorded(self) -> dict[str, Any]:
        """Returns the figures that modelexport.json keeps, to six digits; the formats are in its recipe."""
        return {
            "by": self.sensitivities.by,
            "bits": _short(self.bits),
            "error": _short(self.error),
            "cache": _short(self.sensitivities.cache),
            "front": [[_short(bits), _short(error)] for bits, error in self.front],
            "uniform": {name: [_short(bits), _short(error)] for name, (bits, error) in self.uniform.items()},
        }


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def assign(
    runner: LayerRunner,
    groups: Groups,
    shapes: Shapes,
    candidates: Mapping[str, NumberFormat],
    budgets: Sequence[float],
    dtype: torch.dtype,
    *,
    by: str | None = None,
    method: str = "max",
    cache: CacheFormat | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Assigned]:
    """Choose a format for every group, within each of some budgets: measure once, then solve.

    Args:
        runner: entered, at its first layer; at its end after it. In a job of several ranks all of them call this
            together, each with its own, and get the same to the bit; each rounds whole weights, a group at a time.
        groups: see :data:`Groups`; every linear that may be quantised, once.
        shapes: linear -> ``(out_features, in_features)`` of the whole.
        candidates: as ``--quant`` has it (``int4:64``) -> number format.
        budgets: bits per weight over all linears in ``groups``.
        dtype: of the source's weights, in which scales are stored that have no dtype of their own.
        by, method, cache, progress: see :func:`measure`.

    Raises:
        PlanError: no choice is within the budget; no candidate fits a linear.
        CheckpointError: a weight, or a hidden state, is not finite.
    """
    flat = [group for layer in groups for group in layer]
    weights = {group[0]: sum(math.prod(shapes[name]) for name in group) for group in flat}
    bits = {
        group[0]: {
            name: sum(stored_bits(found, shapes[x], dtype) for x in group) / weights[group[0]]
            for name, found in _fitting(group, shapes, candidates).items()
        }
        for group in flat
    }
    # Before the time is spent.
    for budget in budgets:
        autoquant.choose({group: dict.fromkeys(own, 0.0) for group, own in bits.items()}, weights, bits, budget)
    found = measure(runner, groups, shapes, candidates, by=by, method=method, cache=cache, progress=progress)
    everywhere = [name for name in candidates if all(name in own for own in bits.values())]
    uniform = {name: _totals(dict.fromkeys(weights, name), found, weights, bits) for name in everywhere}
    front = [(size, error + found.cache) for size, error in autoquant.front(found.errors, weights, bits)]
    made = []
    for budget in budgets:
        chosen = autoquant.choose(found.errors, weights, bits, budget)
        formats = {name: chosen[group[0]] for group in flat for name in group}
        spent, error = _totals(chosen, found, weights, bits)
        quant = autoquant.patterns(formats, runner.layers_on_disk)
        made.append(Assigned(quant, formats, spent, error, front, uniform, found))
    return made


def _totals(
    chosen: Mapping[str, str],
    found: Sensitivities,
    weights: Mapping[str, int],
    bits: Mapping[str, Mapping[str, float]],
) -> tuple[float, float]:
    """Bits per weight, and error, of a format for each group."""
    size = math.fsum(bits[group][name] * weights[group] for group, name in chosen.items())
    errors = [found.errors[group][name] for group, name in chosen.items()]
    return size / sum(weights.values()), math.fsum([found.cache, *errors])


def stored_bits(number_format: NumberFormat, shape: tuple[int, int], dtype: torch.dtype) -> int:
    """The bits of a linear, but for tensors of a fixed size, such as its shape: with these, the format that takes 8.125
    bits of a large model would be beyond a budget of 8.125 in a small one."""
    return sum(8 * spec.nbytes for spec in number_format.specs(shape, dtype) if any(spec.axes))


def measure(
    runner: LayerRunner,
    groups: Groups,
    shapes: Shapes,
    candidates: Mapping[str, NumberFormat],
    *,
    by: str | None = None,
    method: str = "max",
    cache: CacheFormat | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Sensitivities:
    """The error of every group in every candidate; weights are rounded to nearest, activations as engines do it.

    Args:
        by: one of :data:`MEASURES`; None: ``kl`` where it is :func:`affordable`, else ``output``.
        method: of static ranges, see :mod:`~modelexport.quantization.calibration.static_ranges`.
        cache: of the KV cache, by which keys and values are rounded in every trial, with scales that cover those of the
            unrounded model; None: they are not rounded.
        progress: called with (layers done, layers in all).
        runner, groups, shapes, candidates: see :func:`assign`.

    Raises:
        PlanError: no candidate fits a linear.
        CheckpointError: a weight, or a hidden state, is not finite.
    """
    if by is None:
        by = "kl" if affordable(runner, groups, shapes, candidates) else "output"
    assert by in MEASURES
    errors: dict[str, dict[str, float]] = {}
    streams: dict[tuple[str, str], list[Tensor]] = {}  # of layers before: group, candidate -> hidden states
    cached = list(runner.hidden)  # in kl: of the model with nothing but its cache rounded
    of_cache: list[float] = []
    for index, own in enumerate(groups):
        with runner.filled(index) as layer:
            before = list(runner.hidden)
            trial = _Trial(runner, layer, method, cache)
            streams = {key: trial.through(states) for key, states in streams.items()}
            after = trial.through(before, trial=False)
            energy = _squares(after)
            if not math.isfinite(energy):
                raise ValuesError(
                    f"the outputs of layer {index} are not finite on the calibration text: there is NaN or Inf in a "
                    "weight before it, or it overflows; check the model, or give --quant instead of autoquant"
                )
            given = cached if by == "kl" else before
            cached = after if cache is None else trial.through(given)
            of_cache.append(_squares(cached, after) / energy if energy and cache is not None else 0.0)
            for group in own:
                table = errors.setdefault(group[0], {})
                for name, number_format in _fitting(group, shapes, candidates).items():
                    table[name] = 0.0
                    if not number_format.quantised:
                        continue
                    states = trial.run(group, number_format, given)
                    if by == "kl":
                        streams[group[0], name] = states
                    elif energy:
                        table[name] = _squares(states, after) / energy - of_cache[-1]
            _give(runner, after)
        del layer, trial  # or they would keep the layer's weights while the next one is filled
        if progress is not None:
            progress(index + 1, len(groups))
    if by == "output":
        return Sensitivities(by, errors, math.fsum(of_cache))
    if cache is not None:
        streams[_CACHE] = cached
    found = _divergences(runner, streams)
    of_all = found.pop(_CACHE, 0.0)
    for (first, name), value in found.items():
        errors[first][name] = value - of_all
    return Sensitivities(by, errors, of_all)


def affordable(runner: LayerRunner, groups: Groups, shapes: Shapes, candidates: Mapping[str, NumberFormat]) -> bool:
    """Returns whether measuring the KL divergence takes minutes, not hours, and its hidden states little memory."""
    tokens = sum(batch.numel() for batch in runner.batches)
    sizes = [sum(math.prod(shapes[name]) for group in layer for name in group) for layer in groups]
    trials = [
        sum(found.quantised for group in layer for found in _fitting(group, shapes, candidates).values())
        for layer in groups
    ]
    config = runner.model.config
    head = sum(trials) * config.vocab_size * config.hidden_size
    layers = sum(count * sum(sizes[index:]) for index, count in enumerate(trials))
    memory = sum(trials) * tokens * config.hidden_size * runner.dtype.itemsize
    # Of keys and values that later layers share there is one set, the model's: no other stream goes with them.
    return (
        not runner.hands_over
        and runner.head_name is not None
        and 2 * tokens * (layers + head) <= _KL_OPERATIONS
        and memory <= _KL_BYTES
    )


class _Trial:
    """A filled layer of which one group at a time is quantised."""

    def __init__(self, runner: LayerRunner, layer: FilledLayer, method: str, cache: CacheFormat | None) -> None:
        self.runner, self.layer, self.method, self.cache = runner, layer, method, cache
        self._observed: Observed | None = None
        self._rounding = self._cache_rounding()

    def through(
        self,
        states: Sequence[Tensor],
        activations: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
        *,
        trial: bool = True,
    ) -> list[Tensor]:
        """Returns what the layer makes of hidden states; the runner has them before and after. A trial's cache is
        rounded."""
        _give(self.runner, states)
        self.runner.advance(self.layer, activations, cache=self._rounding if trial else None, trial=trial)
        found = list(self.runner.hidden)
        _give(self.runner, states)
        return found

    def run(self, group: Sequence[str], number_format: NumberFormat, before: Sequence[Tensor]) -> list[Tensor]:
        """Returns the layer's outputs for ``before``; its weights are then what they were."""
        activations: dict[str, Callable[[Tensor], Tensor]] = {}
        dynamic = partial(number_format.fake_quantise_activations, tensors={})
        rounds_inputs = number_format.input_arguments() is not None
        for siblings in _siblings(group):
            for name, native in self._quantised(siblings, group, number_format):
                held = self.layer.tensors[f"{name}.weight"]
                held.copy_(_part(number_format.dequantise(native), self.layer.share(name)))
                if number_format.has_static_inputs:
                    small = {suffix: value for suffix, value in native.items() if suffix.startswith("input_")}
                    activations[name] = partial(number_format.fake_quantise_activations, tensors=small)
                elif rounds_inputs:
                    activations[name] = dynamic
        try:
            return self.through(before, activations)
        finally:
            # Read again rather than kept: all experts of a layer are gigabytes.
            for name in group:
                held = self.layer.tensors[f"{name}.weight"]
                held.copy_(self.runner.read(f"{name}.weight", self.layer.share(name)))

    def _quantised(
        self, siblings: Sequence[str], group: Sequence[str], number_format: NumberFormat
    ) -> Iterator[tuple[str, dict[str, Tensor]]]:
        weights = {name: self._read(name) for name in siblings}
        shared = None
        if number_format.scale_granularity == "tensor" and not number_format.searches_whole:
            shared = torch.stack([number_format.amax(weight) for weight in weights.values()]).amax(dim=0)
        for name, weight in weights.items():
            reach = self._reach(name, group, number_format) if number_format.has_static_inputs else None
            yield name, number_format.quantise(weight, amax=shared, inputs=reach, name=f"{name}.weight")

    def _read(self, name: str) -> Tensor:
        return self.runner.read(f"{name}.weight", WHOLE).to(self.runner.device)

    def _reach(self, name: str, group: Sequence[str], number_format: NumberFormat) -> float:
        inputs = self._seen().inputs
        # Experts have one range together, also those that no token came to.
        names = [x for x in group if ".experts." in x and _role(x) == _role(name)] or [name]
        parts = list({id(inputs[x]): inputs[x] for x in names if x in inputs}.values())
        return static_ranges.choose(static_ranges.together(parts), self.method, number_format) if parts else 0.0

    def _cache_rounding(self) -> CacheRounding | None:
        """Returns the rounding of keys and values by the scales that calibration would find for them (``layer.py``)."""
        if self.cache is None or self.runner.is_latent or not (seen := self._seen()).keys:
            return None
        keys, values = (static_ranges.choose_cache(of, self.method, self.cache) for of in (seen.keys, seen.values))
        return self.cache.rounding(keys, values)

    def _seen(self) -> Observed:
        if self._observed is None:
            by_head = self.cache is not None and self.cache.by_head
            self._observed = self.runner.observe(self.layer, static_ranges.wants(self.method), by_head=by_head)
        return self._observed


def _part(whole: Tensor, share: ForwardShard) -> Tensor:
    """The part of a weight that a rank's forward pass holds."""
    if share.dim is None:
        return whole
    return torch.cat([whole.narrow(share.dim, start, stop - start) for start, stop in share.spans], share.dim)


def _divergences(runner: LayerRunner, streams: dict[tuple[str, str], list[Tensor]]) -> dict[tuple[str, str], float]:
    """The mean KL divergence of each from the model as it is, whose last hidden states the runner has.

    ``streams`` is emptied: two sets of so many hidden states would be a lot.
    """
    head = _head(runner)
    last = list(runner.hidden)
    right = list(runner.outputs())
    wrong = {}
    for key in list(streams):
        _give(runner, streams.pop(key))
        wrong[key] = list(runner.outputs())
    _give(runner, last)

    def of_rows(chunk: tuple[int, int]) -> list[float]:
        batch, start = chunk
        with torch.inference_mode():
            reference = _log_probabilities(right[batch], start, head)
            probabilities = reference.exp()
            return [
                float((probabilities * (reference - _log_probabilities(states[batch], start, head))).sum().double())
                for states in wrong.values()
            ]

    tokens = [batch.numel() for batch in runner.batches]
    chunks = [(number, start) for number, count in enumerate(tokens) for start in range(0, count, _ROWS)]
    with ThreadPoolExecutor(runner.threads) as pool:
        sums = list(pool.map(of_rows, chunks))
    return {key: max(0.0, math.fsum(row[place] for row in sums) / sum(tokens)) for place, key in enumerate(wrong)}


def _log_probabilities(states: Tensor, start: int, head: Tensor) -> Tensor:
    return torch.log_softmax((states.flatten(0, 1)[start : start + _ROWS] @ head.t()).float(), dim=-1)


def _head(runner: LayerRunner) -> Tensor:
    """The output embedding's weight ``[vocabulary, hidden]``; the input's where they are tied."""
    name = f"{runner.head_name}.weight"
    if runner.on_disk.get(name, name) not in runner.names:
        embedding = runner.model.get_input_embeddings()
        name = next(f"{name}.weight" for name, module in runner.model.named_modules() if module is embedding)
    return runner.read(runner.on_disk.get(name, name), WHOLE).to(runner.device, runner.dtype)


def _give(runner: LayerRunner, states: Sequence[Tensor]) -> None:
    for number, batch in enumerate(states):
        runner.hidden[number] = batch


def _squares(states: Sequence[Tensor], others: Sequence[Tensor] | None = None) -> float:
    """The sum of the squares of all, or of the differences; batch by batch, and in them token by token."""
    found = []
    for number, batch in enumerate(states):
        wide = batch.double() if others is None else batch.double() - others[number].double()
        found.append(wide.square().sum(dim=-1).flatten().tolist())
    return math.fsum(value for batch in found for value in batch)


def _fitting(group: Sequence[str], shapes: Shapes, candidates: Mapping[str, NumberFormat]) -> dict[str, NumberFormat]:
    """The candidates that all linears of a group can be written in."""
    found = {}
    refused: PlanError | None = None
    for name, number_format in candidates.items():
        try:
            for linear in group:
                number_format.check_shape(linear, shapes[linear])
        except PlanError as error:
            refused = refused or error
        else:
            found[name] = number_format
    if not found:
        assert refused is not None, "no candidate at all"
        raise refused
    return found


def _siblings(group: Sequence[str]) -> list[list[str]]:
    """Linears of one module, which engines fuse: of each expert its own."""
    found: dict[str, list[str]] = {}
    for name in group:
        found.setdefault(name.rpartition(".")[0], []).append(name)
    return list(found.values())


def _role(name: str) -> str:
    return name.rpartition(".")[2]
