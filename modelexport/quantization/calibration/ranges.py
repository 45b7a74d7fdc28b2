"""Runs a model over calibration text and tells how large the magnitudes are that pass through it.

They decide bytes of the checkpoint (static scales of activations and of the KV cache), so they depend on nothing but
the weights and the tokens: see :mod:`~modelexport.quantization.calibration.layers`, which has one decoder layer in
memory at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from modelexport.errors import ValuesError
from modelexport.quantization.calibration import static_ranges
from modelexport.quantization.calibration.cut import ForwardCut, ForwardShard, general
from modelexport.quantization.calibration.layers import DYNAMIC, LayerRunner, Observed
from modelexport.quantization.calibration.static_ranges import Ranges
from modelexport.quantization.calibration.statistics import InputStatistics
from modelexport.quantization.calibration.text import LENGTH, SAMPLES, token_batches_from
from modelexport.quantization.calibration.towers import EmbeddedSample
from modelexport.quantization.formats.base import NumberFormat
from modelexport.quantization.kv_caches import CacheFormat

__all__ = ["LENGTH", "SAMPLES", "observe", "token_batches_from"]


def observe(
    config: Mapping[str, Any],
    names: Collection[str],
    read: Callable[[str, ForwardShard], Tensor],
    tokens: Tensor,
    *,
    embedded: Sequence[EmbeddedSample] = (),
    cut: ForwardCut | None = None,
    threads: int | None = None,
    dtype: torch.dtype = torch.float32,
    method: str = "max",
    formats: Mapping[str, NumberFormat | None] | None = None,
    all_experts: bool = False,
    device: str | torch.device = "cpu",
    memory: int | None = None,
    experts_apart: bool = False,
    derived: bool = False,
    cache: CacheFormat | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Ranges:
    """Measures the magnitudes that static scales are to cover: of every linear's inputs, every layer's keys and values.

    All ranks of the job call it together, each with its own ``read`` and ``cut``; all get the same.

    Args:
        config: config.json of an unquantised model.
        names: every tensor of the checkpoint.
        read: this rank's part of one of them, in any floating-point dtype: see :class:`LayerRunner`.
        tokens: int64 ``[samples, length]``, see :func:`token_batches_from`.
        embedded: samples behind these that begin with embeddings, see :class:`LayerRunner`.
        cut: this rank's part of the layers.
        threads: batches in flight at once; by default one for each core that this process may use. The result does
            not depend on it.
        dtype: of the arithmetic.
        method: how that is chosen, see :mod:`~modelexport.quantization.calibration.static_ranges`. Only where a scale
            is stored: the inputs of other linears, and of the output embedding, have their largest magnitude.
        formats: linear -> what its weight is written in.
        all_experts: every expert sees every token, whichever the router chose for it.
        device: what computes.
        memory: bytes of hidden states to keep in memory; None for all.
        experts_apart, derived: see :class:`LayerRunner`.
        cache: that keys and values have static scales for.
        progress: called with (layers done, layers in all).

    Raises:
        PlanError: transformers has no such model, or not with these tensors; its routers cannot choose all experts; a
            layer has static scales, and text does not pass through it.
        CheckpointError: a linear, or an attention, is given NaN or Inf.
    """
    ranges = Ranges({}, {}, {}, (), tokens.shape[0], tokens.shape[1])
    unseen: list[str] = []
    chosen = {name: each for name, each in (formats or {}).items() if each is not None and each.has_static_inputs}
    with LayerRunner(
        config,
        names,
        read,
        tokens,
        embedded=embedded,
        cut=cut,
        threads=threads,
        dtype=dtype,
        device=device,
        memory=memory,
        stacked_as_stored=True,
        experts_apart=experts_apart,
        derived=derived,
    ) as runner:
        for index in range(len(runner.layers)):
            with runner.filled(index) as layer:
                if cache is not None or not chosen.keys().isdisjoint(layer.linears):
                    runner.check_ranges(index)
                observed = runner.observe(
                    layer,
                    static_ranges.wants(method),
                    all_experts=all_experts,
                    advance=not all_experts,
                    by_head=cache is not None and cache.by_head,
                )
                if all_experts:
                    runner.advance(layer)
            linears = [name for name in layer.linears if name not in layer.routers]
            del layer  # or it would keep its weights while the next one is filled
            inputs = _of_all_experts(observed.inputs, linears, unseen)
            _check_all_finite(index, inputs, observed)
            ranges.inputs.update(_reaches(inputs, method, chosen))
            if observed.keys:
                ranges.keys[index] = static_ranges.choose_cache(observed.keys, method, cache)
                ranges.values[index] = static_ranges.choose_cache(observed.values, method, cache)
            del observed, inputs
            if progress is not None:
                progress(index + 1, len(runner.layers))
        if runner.head_name is not None:
            ranges.inputs[runner.head_name] = runner.head_input()
            _check_finite(ranges.inputs[runner.head_name], f"the inputs of {runner.head_name}")
    return replace(ranges, unseen=tuple(unseen))


def _reaches(
    inputs: Mapping[str, InputStatistics], method: str, chosen: Mapping[str, NumberFormat]
) -> dict[str, float]:
    """The magnitude that each linear's static scale covers; the largest one where it has no such scale."""
    known: dict[tuple[int, NumberFormat], float] = {}
    reaches = {}
    for name, found in inputs.items():
        if name not in chosen:
            reaches[name] = _largest(found)
            continue
        key = (id(found), chosen[name])  # linears that are given the same share their statistics
        if key not in known:
            known[key] = static_ranges.choose(found, method, chosen[name])
        reaches[name] = known[key]
    return reaches


def _of_all_experts(
    inputs: Mapping[str, InputStatistics], linears: Sequence[str], unseen: list[str]
) -> dict[str, InputStatistics]:
    """``inputs`` of the linears, with those of all of a layer's experts together for each of these."""
    found = {name: inputs[name] for name in linears if name in inputs}
    experts: dict[str, list[str]] = {}
    for name in linears:
        if (together := general(name)) != name:
            experts.setdefault(together, []).append(name)
    for siblings in experts.values():
        seen = [inputs[name] for name in siblings if name in inputs]
        unseen += [name for name in siblings if name not in inputs]
        if seen:
            found.update(dict.fromkeys(siblings, static_ranges.together(seen)))
    return found


def _check_all_finite(index: int, inputs: Mapping[str, InputStatistics], observed: Observed) -> None:
    seen = [(f"the inputs of {name}", found) for name, found in inputs.items()]
    # In the order of their computation, so that the first that is not finite is the nearest to the cause.
    both = (("keys", observed.keys), ("values", observed.values))
    seen[1:1] = [(f"the {what} of layer {index}", found) for what, parts in both for found in parts]
    for what, found in seen:
        _check_finite(_largest(found), what)


def _largest(statistics: InputStatistics) -> float:
    assert statistics.amax is not None
    return statistics.amax.amax().item()


def _check_finite(value: float, what: str) -> None:
    if not math.isfinite(value):
        raise ValuesError(
            f"{what} are not finite on the calibration text: there is NaN or Inf in a weight before it, or it "
            f"overflows. Check the model, or {DYNAMIC}"
        )
