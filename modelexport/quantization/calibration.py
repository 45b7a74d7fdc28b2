"""Runs a model over calibration text and tells the largest magnitudes that passed through it.

They decide bytes of the checkpoint (static scales of activations and of the KV cache), so they depend on nothing but
the weights and the tokens: see :mod:`~modelexport.quantization.calibration_layers`, which has one decoder layer in
memory at a time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from modelexport.errors import CheckpointError
from modelexport.quantization.calibration_layers import DYNAMIC, LayerRunner, Watch, greater
from modelexport.quantization.calibration_text import LENGTH, SAMPLES, token_batches_from

__all__ = ["LENGTH", "SAMPLES", "Ranges", "observe", "token_batches_from"]

_ONE_OF_EXPERTS = re.compile(r"(.+\.experts\.)\d+(\..+)")


@dataclass(frozen=True)
class Ranges:
    """What passed through a model: largest magnitudes, finite and not negative.

    Attributes:
        inputs: linear, by its module's name in the checkpoint -> of its inputs. All experts of a layer have the same.
        keys, values: layer -> of what goes into its KV cache: keys after the rotary embedding, values as projected.
            With latent attention (DeepSeek) both are of the latent and of the rotary part, which share one cache.
        unseen: linears of experts that no token was routed to; their ``inputs`` are those of their siblings.
        samples, length: how much text it was.
    """

    inputs: dict[str, float]
    keys: dict[int, float]
    values: dict[int, float]
    unseen: tuple[str, ...] = ()
    samples: int = 0
    length: int = 0

    def as_json(self) -> dict[str, Any]:
        """A JSON-able form; :meth:`from_json` is its inverse."""
        return {
            "inputs": dict(self.inputs),
            "keys": {str(layer): value for layer, value in self.keys.items()},
            "values": {str(layer): value for layer, value in self.values.items()},
            "unseen": list(self.unseen),
            "samples": self.samples,
            "length": self.length,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Ranges:
        """From what :meth:`as_json` gave."""
        keys, values = ({int(layer): float(x) for layer, x in value[part].items()} for part in ("keys", "values"))
        inputs = {name: float(x) for name, x in value["inputs"].items()}
        return cls(inputs, keys, values, tuple(value["unseen"]), value["samples"], value["length"])


def observe(
    config: Mapping[str, Any],
    names: Collection[str],
    read: Callable[[str], Tensor],
    tokens: Tensor,
    *,
    threads: int | None = None,
    dtype: torch.dtype = torch.float32,
    progress: Callable[[int, int], None] | None = None,
) -> Ranges:
    """The largest magnitudes of every linear's inputs, and of every layer's keys and values.

    Args:
        config: config.json of an unquantised model.
        names: every tensor of the checkpoint.
        read: a tensor of it by name, on CPU, in any floating-point dtype.
        tokens: int64 ``[samples, length]``, see :func:`token_batches_from`.
        threads: batches in flight at once; by default one for each core that this process may use. The result does
            not depend on it.
        dtype: of the arithmetic.
        progress: called with (layers done, layers in all).

    Raises:
        PlanError: transformers has no such model, or not with these tensors.
        CheckpointError: a linear, or an attention, is given NaN or Inf.
    """
    inputs: dict[str, float] = {}
    keys: dict[int, float] = {}
    values: dict[int, float] = {}
    unseen: list[str] = []
    with LayerRunner(config, names, read, tokens, threads=threads, dtype=dtype) as runner:
        for index in range(len(runner.layers)):
            with runner.filled(index) as linears:
                watch = runner.run(index, linears)
            largest = _of_all_experts(watch.inputs, linears, unseen)
            seen = [(f"the inputs of {name}", value) for name, value in largest.items()]
            if watch.keys is not None:
                keys[index], values[index] = _cached(watch)
                # In the order of their computation, so that the first that is not finite is the nearest to the cause.
                seen[1:1] = [
                    (f"the keys of layer {index}", keys[index]),
                    (f"the values of layer {index}", values[index]),
                ]
            for what, value in seen:
                _check_finite(value, what)
            inputs.update(largest)
            if progress is not None:
                progress(index + 1, len(runner.layers))
        if runner.head_name is not None:
            inputs[runner.head_name] = runner.head_input()
            _check_finite(inputs[runner.head_name], f"the inputs of {runner.head_name}")
    return Ranges(inputs, keys, values, tuple(unseen), tokens.shape[0], tokens.shape[1])


def _of_all_experts(
    inputs: Mapping[str, float], linears: Mapping[int, tuple[str, ...]], unseen: list[str]
) -> dict[str, float]:
    """``inputs``, with the largest of a layer's experts for each of them."""
    found = dict(inputs)
    experts: dict[tuple[str, str], list[str]] = {}
    for name in dict.fromkeys(name for names in linears.values() for name in names):
        if match := _ONE_OF_EXPERTS.fullmatch(name):
            experts.setdefault((match[1], match[2]), []).append(name)
    for siblings in experts.values():
        seen = [inputs[name] for name in siblings if name in inputs]
        unseen += [name for name in siblings if name not in inputs]
        for value in seen[1:]:
            seen[0] = greater(seen[0], value)
        found.update((name, seen[0]) for name in siblings if seen)
    return found


def _cached(watch: Watch) -> tuple[float, float]:
    """What goes into the KV cache as keys, and as values."""
    assert watch.keys is not None
    assert watch.values is not None
    if watch.rotary is None:
        return watch.keys, watch.values
    latent = [largest for name, largest in watch.inputs.items() if name.endswith(".kv_b_proj")]
    both = max([watch.keys, *latent])
    return both, both


def _check_finite(value: float, what: str) -> None:
    if not math.isfinite(value):
        raise CheckpointError(
            f"{what} are not finite on the calibration text: there is NaN or Inf in a weight before it, or it "
            f"overflows. Check the model, or {DYNAMIC}"
        )
