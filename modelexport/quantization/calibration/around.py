"""The shell of a model's decoder layers: the embedding that makes the first one's input, and the final norm.

transformers' own model runs, with something else in place of its layers. That also tells what it calls each layer with:
see :mod:`~modelexport.quantization.calibration.arguments`. Of tables that tokens are looked up in only the rows of the
tokens at hand are ever in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from modelexport.errors import ModelExportError, PlanError
from modelexport.quantization.calibration.arguments import Given, HandedOver, LayerCalls, marked, replaced, values
from modelexport.quantization.calibration.cut import WHOLE, ForwardShard
from modelexport.quantization.calibration.model import DYNAMIC, OF_MODELS, body, misshapen, unknown

__all__ = ["Batch", "FirstInput", "ModelShell", "tokens_of"]

_LARGE_TABLE = 1 << 24
"""Numbers of a table beside the embedding from which on only the rows that are looked up are read."""


Batch = Tensor | Mapping[str, Any]
"""Token ids, int64 ``[samples, length]``; or the arguments of the forward pass, with ``inputs_embeds`` instead."""
_Read = Callable[[str, ForwardShard, tuple[int, ...]], Tensor]


@dataclass(frozen=True)
class FirstInput:
    """The beginning of a batch's way through the layers.

    Attributes:
        hidden: the first layer's input.
        given: tensors beside it that depend on the batch, by the numbers of :class:`Given`.
    """

    hidden: Tensor
    given: Mapping[int, Tensor]


@dataclass
class _Seen:
    """The calls of all layers by one run of what surrounds them.

    Attributes:
        hidden: the first one's input.
        calls: the other arguments of each.
        changed: layer -> the output of the one before it, and what it was given in its stead.
        out: what the model made of the last one's output.
    """

    hidden: Tensor
    calls: LayerCalls
    changed: dict[int, tuple[Tensor, Tensor]]
    out: Tensor


class ModelShell:
    """A model without its layers. Arguments as :class:`~modelexport.quantization.calibration.layers.LayerRunner` has.

    Args:
        layers: the decoder layers.
        inside: names of the modules that are not filled: the layers, the output embedding.

    Attributes:
        shapes: of each batch's hidden states, once :meth:`learn` was called.
        calls: batch -> further arguments of each layer, with :class:`Given` and :class:`HandedOver` where batches have
            their own.
        added: batch -> layer -> what is added to the output of the one before it, as a :class:`Given`.
        given: how many tensors each batch has of its own, at most.
        hands_over: whether layers are given a mapping to hand something to later ones in.
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
        self.tables = {
            f"{name}.weight": module
            for name, module in model.named_modules()
            if isinstance(module, nn.Embedding)
            and module is not self.embedding
            and f"{name}.weight" in self.empty
            and module.weight.numel() >= _LARGE_TABLE
        }
        self.shapes: list[tuple[int, ...]] = []
        self.calls: list[LayerCalls] = []
        self.added: list[dict[int, Given]] = []
        self.given, self.hands_over = 0, False
        self.returns: int | None = None

    def first_inputs(self, batches: Sequence[Batch], learnt: Callable[[], None] = lambda: None) -> Iterator[FirstInput]:
        """Yields what each batch begins with.

        Args:
            learnt: called when :meth:`learn` is done, if it was not before.

        Raises:
            PlanError: the checkpoint lacks a tensor, or layers hand each other more than this can keep.
            CheckpointError: one has another shape than config.json says.
        """
        with self.filled(_looked_up_in(batches)):
            if not self.shapes:
                self._learn(batches)
                learnt()
            for number, batch in enumerate(batches):
                seen = self._through(batch, None)
                template = (self.calls[number], self.added[number])
                yield FirstInput(seen.hidden, dict(values(template, self._told(batch, seen, template))))

    def learn(self, batches: Sequence[Batch]) -> None:
        """Find the attributes, without reading anything where batches have nothing of their own. Errors as
        :meth:`first_inputs`."""
        tokens = _looked_up_in(batches)
        with self.filled(tokens, read=_pattern):
            self._learn(batches)
        if self.given:
            with self.filled(tokens):
                self._learn(batches)

    def _learn(self, batches: Sequence[Batch]) -> None:
        known: dict[tuple[int, ...], tuple[tuple[int, ...], Any]] = {}
        tokens = _looked_up_in(batches)
        self.shapes, self.calls, self.added, self.given = [], [], [], 0
        for batch in batches:
            if not isinstance(batch, Tensor):  # no other is known to have the same
                self._note(*self._template(batch, None))
                continue
            shape = tuple(batch.shape)
            if shape not in known:
                others = tokens[(torch.searchsorted(tokens, batch) + 1) % len(tokens)]
                known[shape] = self._template(batch, others)
            self._note(*known[shape])

    def _template(self, batch: Batch, others: Tensor | None) -> tuple[tuple[int, ...], Any]:
        """The shape of a batch's hidden states, and what layers are told by it, see :func:`marked`."""
        seen = self._through(batch, None)
        told, other = (seen.calls, self._added(batch, seen)), None
        if others is not None:
            unlike = self._through(others, None)
            other = (unlike.calls, self._added(others, unlike))
        template, count = marked(told, other)
        self.given = max(self.given, count)
        replaced(template, (HandedOver,), self._note_mapping)
        return tuple(seen.hidden.shape), template

    def _note(self, shape: tuple[int, ...], template: Any) -> None:
        calls, added = template
        self.shapes.append(shape)
        self.calls.append(calls)
        self.added.append(added)

    def _note_mapping(self, mapping: HandedOver) -> HandedOver:
        self.hands_over = True
        return mapping

    def _told(self, batch: Batch, seen: _Seen, template: tuple[Any, Any]) -> tuple[Any, Any]:
        return seen.calls, self._added(batch, seen) if template[1] else {}

    def _added(self, batch: Batch, seen: _Seen) -> dict[int, Tensor]:
        """Layer -> what is added to the output of the one before it, exactly: what it is given where that was zero.

        Raises:
            ValueError: outputs are changed in another way than by an addition.
        """
        if not seen.changed:
            return {}
        zeros = self._through(batch, torch.zeros_like(seen.hidden))
        for index, (before, after) in seen.changed.items():
            if index not in zeros.changed or not torch.equal(before + zeros.changed[index][1], after):
                raise ValueError("what a layer gives is changed before the next one gets it")
        return {index: zeros.changed[index][1] for index in seen.changed}

    def outputs(self, batches: Sequence[Tensor], hidden: Sequence[Tensor]) -> Iterator[Tensor]:
        """Returns the output embedding's inputs, from the last layer's outputs. Errors as :meth:`first_inputs`."""
        with self.filled(_NONE):
            for number, batch in enumerate(batches):
                yield self._through(torch.zeros_like(batch), hidden[number]).out

    def _inputs(self, batch: Batch) -> dict[str, Any]:
        """The arguments of the model's forward pass."""
        if isinstance(batch, Tensor):
            return {"input_ids": batch.to(self.device)}

        def own(x: Tensor) -> Tensor:
            return x.to(self.device, self.dtype if x.is_floating_point() else x.dtype)

        return {key: replaced(value, (Tensor,), own) for key, value in batch.items()}

    @contextmanager
    def filled(self, tokens: Tensor, read: _Read | None = None) -> Iterator[None]:
        """With the embedding's rows of these tokens (one of zeros for none).

        Args:
            read: of a tensor's name, share, and shape, in place of the checkpoint's values.
        """
        read = read or (lambda key, share, _: self.read(key, share))
        missing = [key for key in self.empty if key not in self.names]
        if missing:
            raise unknown(self.model, missing[0])
        own = self._rows(read, self.embedding_key, tokens)
        apart = {self.embedding_key, *self.tables}
        state = {key: self._tensor(read, key) for key, empty in self.empty.items() if key not in apart}
        rows = tokens.to(self.device)
        # Tokens keep their numbers: a model may have other tables that it looks them up in.
        with ExitStack() as stack:
            stack.enter_context(_with_rows(self.embedding, own, lambda ids: (rows, own)))
            for key, table in self.tables.items():
                looked_up = partial(self._looked_up, read if tokens.numel() else None, key)
                stack.enter_context(_with_rows(table, self._rows(read, key, _NONE), looked_up))
            self.model.load_state_dict(state, strict=False, assign=True)
            try:
                yield
            finally:
                del state
                self.model.load_state_dict(
                    {key: empty for key, empty in self.empty.items() if key not in apart}, strict=False, assign=True
                )

    def _looked_up(self, read: _Read | None, key: str, ids: Tensor) -> tuple[Tensor, Tensor]:
        """A table's rows that are asked for, with their numbers; one of zeros where nothing is to be read."""
        if read is None:
            return _NONE.to(self.device), self._rows(_pattern, key, _NONE)
        numbers = torch.unique(ids).cpu()
        return numbers.to(self.device), self._rows(read, key, numbers)

    def _rows(self, read: _Read, key: str, numbers: Tensor) -> Tensor:
        """Rows of a table; one of zeros for none."""
        empty = self.empty[key]
        wanted = (max(1, numbers.numel()), *empty.shape[1:])
        if not numbers.numel():
            return torch.zeros(wanted, dtype=self.dtype, device=self.device)
        return self._value(read, key, ForwardShard(0, _runs(numbers.tolist())), wanted)

    def _tensor(self, read: _Read, key: str) -> Tensor:
        return self._value(read, key, WHOLE, tuple(self.empty[key].shape))

    def _value(self, read: _Read, key: str, share: ForwardShard, wanted: tuple[int, ...]) -> Tensor:
        value = read(key, share, wanted)
        if tuple(value.shape) != wanted:
            raise misshapen(key, value.shape, wanted)
        return value.to(self.device, self.dtype if value.is_floating_point() else value.dtype)

    def _through(self, batch: Batch, result: Tensor | None) -> _Seen:
        """Runs a batch, with ``result`` as the output of every layer; None: their inputs."""
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

    def _as_layers_do(self, batch: Batch, result: Tensor | None, returns: int) -> _Seen:
        calls: LayerCalls = {}
        changed: dict[int, tuple[Tensor, Tensor]] = {}
        seen: list[Tensor] = []
        given: list[Tensor] = []
        inputs = self._inputs(batch)
        tokens = batch if isinstance(batch, Tensor) else batch["inputs_embeds"][..., 0]
        usual = (*tokens.shape, self.model.config.hidden_size)

        def note(index: int, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            # Some number of times the tokens: models may keep several states of each, in any place among the dims.
            if hidden_states.numel() % torch.Size(usual).numel() or (seen and hidden_states.shape != seen[0].shape):
                wanted = list(seen[0].shape) if seen else list(usual)
                raise ValueError(f"a layer is given {list(hidden_states.shape)}, where {wanted} is usual")
            if any(each is _MORE for each in (*args, *kwargs.values())):
                kind = self.model.config.model_type
                raise PlanError(f"layers of a {kind} model hand more than hidden states to the next: {DYNAMIC}")
            if given and hidden_states is not given[-1] and not torch.equal(hidden_states, given[-1]):
                changed[index] = given[-1], hidden_states
            seen.append(hidden_states)
            calls[index] = (args, kwargs)
            out = hidden_states if result is None else result
            given.append(out)
            return (out, *(_MORE,) * (returns - 1)) if returns else out

        for index, layer in enumerate(self.layers):
            layer.forward = partial(note, index)
        try:
            with torch.inference_mode():
                out: Tensor = body(self.model)(**inputs, use_cache=False).last_hidden_state
        finally:
            for layer in self.layers:
                del layer.forward
        return _Seen(seen[0], calls, changed, out)


def _pattern(key: str, share: ForwardShard, shape: tuple[int, ...]) -> Tensor:
    """Numbers in place of a checkpoint's: rows for different tokens are different."""
    numbers = torch.arange(torch.Size(shape).numel(), dtype=torch.float32)
    return numbers.mul_(0.7).sin_().view(shape)


def tokens_of(batches: Sequence[Tensor]) -> Tensor:
    """The different tokens of batches, sorted."""
    return torch.unique(torch.cat([batch.flatten() for batch in batches])) if batches else _NONE


def _looked_up_in(batches: Sequence[Batch]) -> Tensor:
    """The different tokens that the embedding is asked for, sorted."""
    return tokens_of([batch for batch in batches if isinstance(batch, Tensor)])


_MORE = object()
"""What layers may return beside their hidden states."""
_RETURNS = (0, 3, 2)
"""What layers may return, until one has run."""
_NONE = torch.empty(0, dtype=torch.int64)


@contextmanager
def _with_rows(table: Any, first: Tensor, rows_of: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Within it, a table has some rows of its weight alone.

    Args:
        first: those that it has before anything was looked up.
        rows_of: of tokens, the sorted numbers of rows among which they are, and these rows.
    """
    padding, table.padding_idx = table.padding_idx, None  # may be none of the rows
    weight, looked_up = table.weight, table.forward
    table.weight = _parameter(first)

    def forward(ids: Tensor) -> Any:
        numbers, rows = rows_of(ids)
        # load_state_dict would compare the shapes.
        table.weight = _parameter(rows)
        return looked_up(torch.searchsorted(numbers, ids).clamp(0, max(0, len(numbers) - 1)))

    table.forward = forward
    try:
        yield
    finally:
        del table.forward
        table.padding_idx, table.weight = padding, weight


def _parameter(value: Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(value, requires_grad=False)


def _runs(numbers: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Sorted numbers as ranges."""
    if not numbers:
        return ()
    breaks = [0, *(place for place in range(1, len(numbers)) if numbers[place] != numbers[place - 1] + 1), len(numbers)]
    return tuple((numbers[start], numbers[stop - 1] + 1) for start, stop in pairwise(breaks))
