"""The shell of a model's decoder layers: the embedding that makes the first one's input, and the final norm.

transformers' own model runs, with something else in place of its layers. That also tells what it calls each layer with
(positions, masks), which depends on nothing but a batch's shape. Of the embedding only the rows of the tokens at hand
are ever in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from modelexport.errors import ModelExportError, PlanError
from modelexport.quantization.calibration.cut import WHOLE, ForwardShard
from modelexport.quantization.calibration.model import DYNAMIC, OF_MODELS, body, misshapen, unknown

__all__ = ["Calls", "ModelShell"]

Calls = dict[tuple[int, ...], dict[int, tuple[tuple[Any, ...], dict[str, Any]]]]
"""Shape of a batch's hidden states -> further arguments of each layer, by its number; layers that text does not pass
through (they attend to images) are missing."""


class ModelShell:
    """A model without its layers. Arguments as :class:`~modelexport.quantization.calibration.layers.LayerRunner` has.

    Args:
        layers: the decoder layers.
        inside: names of the modules that are not filled: the layers, the output embedding.

    Attributes:
        returns: how many things layers return, of which their hidden states are the first; 0: these alone, in no tuple.
            None until one has run, or what surrounds them has been seen to expect several.
    """

    def __init__(
        self,
        model: Any,
        layers: Sequence[Any],
        inside: Sequence[str],
        names: Collection[str],
        read: Callable[[str, ForwardShard], Tensor],
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
        self.returns: int | None = None

    def first_inputs(self, batches: Sequence[Tensor]) -> Iterator[Tensor]:
        """Each batch's input of the first layer; ``calls`` is known afterwards.

        Raises:
            PlanError: the checkpoint lacks a tensor, or layers are given more than depends on a batch's shape.
            CheckpointError: one has another shape than config.json says.
        """
        tokens = torch.unique(torch.cat([batch.flatten() for batch in batches]))
        with self._filled(tokens):
            for batch in batches:
                known = bool(self.calls)
                seen, _ = self._through(batch, None)
                if not known:
                    self._check_calls(batch, tuple(seen.shape))
                yield seen

    def _check_calls(self, batch: Tensor, shape: tuple[int, ...]) -> None:
        """Refuse a model that tells its layers something of each batch: what is kept of the first is wrong for others.

        Raises:
            PlanError: it does.
        """
        calls = self.calls.pop(shape)
        self._through(batch.flip(-1), None)
        if not _equal(self.calls[shape], calls):
            kind = self.model.config.model_type
            raise PlanError(f"layers of a {kind} model are given more of the tokens than hidden states: {DYNAMIC}")

    def learn_calls(self, batches: Sequence[Tensor]) -> None:
        """``calls``, without reading anything."""
        with self._filled(None):
            for batch in batches:
                if (*batch.shape, self.model.config.hidden_size) not in self.calls:
                    self._through(torch.zeros_like(batch), None)

    def outputs(self, batches: Sequence[Tensor], hidden: Sequence[Tensor]) -> Iterator[Tensor]:
        """Returns the output embedding's inputs, from the last layer's outputs. Errors as :meth:`first_inputs`."""
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
        looked_up = self.embedding.forward
        rows = _NONE if tokens is None else tokens.to(self.device)
        # Tokens keep their numbers: a model may have other tables that it looks them up in.
        self.embedding.forward = lambda ids: looked_up(torch.searchsorted(rows, ids).clamp(0, max(0, len(rows) - 1)))
        self.model.load_state_dict(state, strict=False, assign=True)
        try:
            yield
        finally:
            del self.embedding.forward
            self.embedding.padding_idx, self.embedding.weight = padding, weight
            self.model.load_state_dict(self.empty, strict=False, assign=True)

    def _tensor(self, key: str, empty: Tensor, tokens: Tensor | None) -> Tensor:
        if key == self.embedding_key:
            rows = 1 if tokens is None or not tokens.numel() else tokens.numel()
            wanted, share = (
                (rows, *empty.shape[1:]),
                ForwardShard(0, _runs(tokens.tolist()) if tokens is not None else ()),
            )
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
        if self.returns is not None:
            return self._as_layers_do(batch, result, self.returns)
        first: Exception | None = None
        for count in _RETURNS:
            try:
                found = self._as_layers_do(batch, result, count)
            except OF_MODELS as error:
                if isinstance(error, ModelExportError):
                    raise
                first = first or error
            else:
                self.returns = count or None  # tensors can be taken for tuples, but not the other way round
                return found
        assert first is not None
        raise first

    def _as_layers_do(self, batch: Tensor, result: Tensor | None, returns: int) -> tuple[Tensor, Tensor]:
        calls: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        seen: list[Tensor] = []
        given: list[Tensor] = []
        wanted = (*batch.shape, self.model.config.hidden_size)

        def note(index: int, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            if hidden_states.shape != wanted:
                raise ValueError(f"a layer is given {list(hidden_states.shape)}, where {list(wanted)} is usual")
            if given and hidden_states is not given[-1] and not torch.equal(hidden_states, given[-1]):
                raise ValueError("what a layer gives is changed before the next one gets it")
            if any(each is _MORE for each in (*args, *kwargs.values())):
                kind = self.model.config.model_type
                raise PlanError(f"layers of a {kind} model hand more than hidden states to the next: {DYNAMIC}")
            seen.append(hidden_states)
            calls[index] = (args, kwargs)
            out = hidden_states if result is None else result
            given.append(out)
            return (out, *(_MORE,) * (returns - 1)) if returns else out

        for index, layer in enumerate(self.layers):
            layer.forward = partial(note, index)
        try:
            with torch.inference_mode():
                ids = batch.to(self.device)
                out: Tensor = body(self.model)(input_ids=ids, use_cache=False).last_hidden_state
        finally:
            for layer in self.layers:
                del layer.forward
        self.calls.setdefault(tuple(seen[0].shape), calls)
        return seen[0], out


_MORE = object()
"""What layers may return beside their hidden states."""
_RETURNS = (0, 3, 2)
"""What layers may return, until one has run."""
_NONE = torch.empty(0, dtype=torch.int64)


def _equal(one: Any, other: Any) -> bool:
    """Returns whether all tensors among arguments are the same."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(_equal(one[k], other[k]) for k in one)
    if isinstance(one, (tuple, list)):
        return isinstance(other, (tuple, list)) and len(one) == len(other) and all(map(_equal, one, other))
    return True


def _parameter(value: Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(value, requires_grad=False)


def _runs(numbers: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Sorted numbers as ranges."""
    if not numbers:
        return ()
    breaks = [0, *(place for place in range(1, len(numbers)) if numbers[place] != numbers[place - 1] + 1), len(numbers)]
    return tuple((numbers[start], numbers[stop - 1] + 1) for start, stop in pairwise(breaks))
