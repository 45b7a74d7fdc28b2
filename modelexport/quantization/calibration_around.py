"""What surrounds a model's decoder layers: the embedding that makes the first one's input, and the final norm.

transformers' own model runs, with something else in place of its layers. That also tells what it calls each layer with
(positions, masks), which depends on nothing but a batch's shape. Of the embedding only the rows of the tokens at hand
are ever in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from modelexport.quantization.calibration_cut import WHOLE, Share
from modelexport.quantization.calibration_model import misshapen, unknown

__all__ = ["Calls", "Surroundings"]

Calls = dict[tuple[int, ...], list[tuple[tuple[Any, ...], dict[str, Any]]]]
"""Shape of a batch's hidden states -> further arguments of each layer."""


class Surroundings:
    """A model without its layers. Arguments as :class:`~modelexport.quantization.calibration_layers.LayerRunner` has.

    Args:
        layers: the decoder layers.
        inside: names of the modules that are not filled: the layers, the output embedding.

    Attributes:
        in_tuples: whether layers return their hidden states as the first of several things, as far as any has run.
    """

    def __init__(
        self,
        model: Any,
        layers: Sequence[Any],
        inside: Sequence[str],
        names: Collection[str],
        read: Callable[[str, Share], Tensor],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.model, self.layers, self.names, self.read = model, layers, names, read
        self.dtype, self.device = dtype, device
        prefixes = tuple(f"{name}." for name in inside)
        self.empty = {key: value for key, value in model.state_dict().items() if not key.startswith(prefixes)}
        self.embedding = model.get_input_embeddings()
        place = next(name for name, module in model.named_modules() if module is self.embedding)
        self.embedding_key = f"{place}.weight"
        self.calls: Calls = {}
        self.in_tuples = False

    def first_inputs(self, batches: Sequence[Tensor]) -> Iterator[Tensor]:
        """Each batch's input of the first layer; ``calls`` is known afterwards.

        Raises:
            PlanError: the checkpoint lacks a tensor.
            CheckpointError: one has another shape than config.json says.
        """
        tokens = torch.unique(torch.cat([batch.flatten() for batch in batches]))
        with self._filled(tokens):
            for batch in batches:
                seen, _ = self._through(torch.searchsorted(tokens, batch), None)
                yield seen

    def learn_calls(self, batches: Sequence[Tensor]) -> None:
        """``calls``, without reading anything."""
        with self._filled(None):
            for batch in batches:
                if (*batch.shape, self.model.config.hidden_size) not in self.calls:
                    self._through(torch.zeros_like(batch), None)

    def outputs(self, batches: Sequence[Tensor], hidden: Sequence[Tensor]) -> Iterator[Tensor]:
        """What the output embedding is given, of the last layer's outputs. Errors as :meth:`first_inputs`."""
        with self._filled(_NONE):
            for number, batch in enumerate(batches):
                _, out = self._through(torch.zeros_like(batch), hidden[number])
                yield out

    @contextmanager
    def _filled(self, tokens: Tensor | None) -> Iterator[None]:
        """With the embedding's rows of these tokens (one of zeros for none); None: with zeros everywhere."""
        missing = [key for key in self.empty if key not in self.names]
        if missing:
            raise unknown(self.model, missing[0])
        state = {key: self._tensor(key, empty, tokens) for key, empty in self.empty.items()}
        padding, self.embedding.padding_idx = self.embedding.padding_idx, None  # may be none of the rows
        # load_state_dict would compare the shapes.
        weight, self.embedding.weight = self.embedding.weight, _parameter(state.pop(self.embedding_key))
        self.model.load_state_dict(state, strict=False, assign=True)
        try:
            yield
        finally:
            self.embedding.padding_idx, self.embedding.weight = padding, weight
            self.model.load_state_dict(self.empty, strict=False, assign=True)

    def _tensor(self, key: str, empty: Tensor, tokens: Tensor | None) -> Tensor:
        if key == self.embedding_key:
            rows = 1 if tokens is None or not tokens.numel() else tokens.numel()
            wanted, share = (rows, *empty.shape[1:]), Share(0, _runs(tokens.tolist()) if tokens is not None else ())
        else:
            wanted, share = tuple(empty.shape), WHOLE
        if tokens is None or (share.dim == 0 and not tokens.numel()):
            return torch.zeros(wanted, dtype=self.dtype, device=self.device)
        value = self.read(key, share)
        if tuple(value.shape) != wanted:
            raise misshapen(key, value.shape, wanted)
        return value.to(self.device, self.dtype if value.is_floating_point() else value.dtype)

    def _through(self, batch: Tensor, result: Tensor | None) -> tuple[Tensor, Tensor]:
        """The first layer's input for a batch, and what the model makes of ``result`` as the last layer's output."""
        calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        seen: list[Tensor] = []

        def note(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            seen.append(hidden_states)
            calls.append((args, kwargs))
            out = hidden_states if result is None else result
            return (out, None, None) if self.in_tuples else out

        for layer in self.layers:
            layer.forward = note
        try:
            with torch.inference_mode():
                ids = batch.to(self.device)
                out: Tensor = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        finally:
            for layer in self.layers:
                del layer.forward
        self.calls.setdefault(tuple(seen[0].shape), calls)
        return seen[0], out


_NONE = torch.empty(0, dtype=torch.int64)


def _parameter(value: Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(value, requires_grad=False)


def _runs(numbers: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Sorted numbers as ranges."""
    if not numbers:
        return ()
    breaks = [0, *(place for place in range(1, len(numbers)) if numbers[place] != numbers[place - 1] + 1), len(numbers)]
    return tuple((numbers[start], numbers[stop - 1] + 1) for start, stop in pairwise(breaks))
