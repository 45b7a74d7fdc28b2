"""A model of which one decoder layer at a time is in memory, and batches of samples that go through it.

transformers' own modules compute: the model is built without storage from config.json, each layer is filled from the
checkpoint when its turn comes and emptied after. What its linears and its attention are given is seen by watching
``F.linear`` and ``F.scaled_dot_product_attention`` while the layer runs, so that experts whose weights transformers
stacks into one parameter are seen like any other linear.

Samples go through a layer in batches of a fixed size, each on one thread; more threads are more batches at once. So
results depend on nothing but weights and tokens (and on what the processor's matrix product does). float32 is the
default; where a processor multiplies bfloat16 itself, that is several times faster and takes half the memory.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from modelexport.errors import CheckpointError, PlanError

__all__ = ["DYNAMIC", "LayerRunner", "Watch", "greater", "largest_of"]

DYNAMIC = "choose a number format that needs no calibration (such as --quant fp8 or int8), and no --kv-cache"
"""What else to do where a model cannot be calibrated."""

_Names = tuple[tuple[str, ...], ...]
"""The checkpoint's tensors that one of the model's is made of: for each expert (or once), those that it has."""

_BATCH_TOKENS = 512  # enough for a matrix product to run at full speed on a thread, few enough to occupy many threads
_EXPERT = re.compile(r"(.+)\.experts\.(\d+)\.(\w+)\.weight")
_STACKED = re.compile(r"(.+)\.experts\.(gate_up_proj|down_proj)")
_PARTS = {"gate_up_proj": (("gate_proj", "w1"), ("up_proj", "w3")), "down_proj": (("down_proj", "w2"),)}
"""transformers' stacked parameter -> the linears that an expert has on disk in its stead, by any of their names."""


class Watch(TorchFunctionMode):
    """Sees what a layer's linears and its attention are given, and keeps the largest magnitudes.

    Attributes:
        inputs: linear -> largest magnitude; those that were not called are missing.
        keys, values: of all attention calls; None before the first.
    """

    def __init__(self, linears: Mapping[int, tuple[str, ...]], rotary: int | None = None) -> None:
        super().__init__()
        self.linears = linears
        self.rotary = rotary  # of latent attention: the last so many columns of a key are what the cache holds of it
        self.inputs: dict[str, float] = {}
        self.keys: float | None = None
        self.values: float | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Called by torch in place of every function of its own."""
        if func is functional.linear:
            return self._linear(*args, **(kwargs or {}))
        if func is functional.scaled_dot_product_attention:
            return self._attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        names = self.linears.get(weight.data_ptr(), ())
        if names and input.numel():
            largest = largest_of(input)
            for name in names:
                self.inputs[name] = greater(self.inputs.get(name), largest)
        # Stacked experts are kept as stored, or they would take twice the memory.
        return functional.linear(input, weight.to(input.dtype), bias)

    def _attention(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        cached = key if self.rotary is None else key[..., key.shape[-1] - self.rotary :]
        self.keys = greater(self.keys, largest_of(cached))
        self.values = greater(self.values, largest_of(value))
        return functional.scaled_dot_product_attention(query, key, value, *args, **kwargs)

    def merge(self, other: Watch) -> None:
        """Take what another has seen of the same layer."""
        for name, largest in other.inputs.items():
            self.inputs[name] = greater(self.inputs.get(name), largest)
        if other.keys is not None and other.values is not None:
            self.keys, self.values = greater(self.keys, other.keys), greater(self.values, other.values)


class LayerRunner:
    """The samples on their way through a model: :meth:`filled` a layer, :meth:`run` it, and so on to the last.

    A context manager: torch's thread count is set while it is open. Arguments as for :func:`observe`.

    Attributes:
        layers: transformers' decoder layers, without storage except within :meth:`filled`.
        hidden: each batch's input of the next layer, ``[samples, length, hidden]`` in ``dtype``.
        head_name: the output embedding's module; None where there is none.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        names: Collection[str],
        read: Callable[[str], Tensor],
        tokens: Tensor,
        *,
        threads: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.names, self.read, self.dtype = names, read, dtype
        self.model = _build(config)
        modules = {module: name for name, module in self.model.named_modules()}
        stack = getattr(self.model.base_model, "layers", None)
        if not isinstance(stack, nn.ModuleList):
            kind = type(self.model).__name__
            raise PlanError(f"calibration finds no decoder layers in transformers' {kind}: {DYNAMIC}")
        self.layers: list[Any] = list(stack)
        self.prefix = modules[stack]
        self.head_name = modules.get(self.model.get_output_embeddings())
        self.rotary = config.get("qk_rope_head_dim") if config.get("kv_lora_rank") else None
        self.batches = tokens.split(max(1, _BATCH_TOKENS // tokens.shape[1]))
        self.threads = min(len(self.batches), threads or _cores())
        self.hidden: list[Tensor] = []
        self._calls: dict[tuple[int, ...], list[tuple[tuple[Any, ...], dict[str, Any]]]] = {}

    def __enter__(self) -> LayerRunner:
        self._threads_before = torch.get_num_threads()
        torch.set_num_threads(1)  # of one operation, in this thread and in those of the pool, which begin after it
        self._pool = ThreadPoolExecutor(self.threads)
        try:
            with self._around():
                self.hidden = [self._through(batch, None) for batch in self.batches]
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        torch.set_num_threads(self._threads_before)

    @contextmanager
    def filled(self, index: int) -> Iterator[dict[int, tuple[str, ...]]]:
        """Layer ``index`` with its weights; gives the linears that lie at each address."""
        layer, prefix = self.layers[index], f"{self.prefix}.{index}."
        empty = layer.state_dict()
        sources = _sources(empty, prefix, self.names)
        missing = [key for key in empty if key not in sources]
        if missing:
            raise _unknown(self.model, prefix + missing[0])
        state = {key: self._read(names, empty[key], as_stored=empty[key].dim() == 3) for key, names in sources.items()}
        layer.load_state_dict(state, assign=True)
        try:
            yield _linears(layer, sources)
        finally:
            layer.load_state_dict(empty, assign=True)

    def run(self, index: int, linears: Mapping[int, tuple[str, ...]]) -> Watch:
        """All samples through layer ``index``, which is filled; its outputs become ``hidden``."""

        def one(number: int) -> Watch:
            hidden = self.hidden[number]
            args, kwargs = self._calls[tuple(hidden.shape)][index]
            with torch.inference_mode(), Watch(linears, self.rotary) as watch:
                out = self.layers[index](hidden, *args, **kwargs)
            self.hidden[number] = out[0] if isinstance(out, tuple) else out
            return watch

        first, *others = self._pool.map(one, range(len(self.batches)))
        for watch in others:
            first.merge(watch)
        return first

    def head_input(self) -> float:
        """The largest magnitude of what the output embedding is given, after the last layer has run."""
        with self._around():
            outputs = map(self._through, self.batches, self.hidden)
            return max(map(largest_of, outputs), key=lambda x: math.inf if math.isnan(x) else x)

    @contextmanager
    def _around(self) -> Iterator[None]:
        """The model with its embedding and its final norm, but without its layers."""
        inside = tuple(f"{name}." for name in (self.prefix, self.head_name) if name is not None)
        empty = {key: value for key, value in self.model.state_dict().items() if not key.startswith(inside)}
        missing = [key for key in empty if key not in self.names]
        if missing:
            raise _unknown(self.model, missing[0])
        # An embedding is only looked up in: as stored, it takes half the memory.
        embedding = self.model.get_input_embeddings()
        state = {
            key: self._read(((key,),), value, as_stored=value.shape == embedding.weight.shape)
            for key, value in empty.items()
        }
        hook = embedding.register_forward_hook(lambda module, inputs, out: out.to(self.dtype))
        self.model.load_state_dict(state, strict=False, assign=True)
        try:
            yield
        finally:
            hook.remove()
            self.model.load_state_dict(empty, strict=False, assign=True)

    def _through(self, batch: Tensor, result: Tensor | None) -> Tensor:
        """The first layer's input for a batch; or, given the last layer's output, what the model makes of that."""
        calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        seen: list[Tensor] = []

        def note(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            seen.append(hidden_states)
            calls.append((args, kwargs))
            return hidden_states if result is None else result

        for layer in self.layers:
            layer.forward = note
        try:
            with torch.inference_mode():
                out: Tensor = self.model.base_model(input_ids=batch, use_cache=False).last_hidden_state
        finally:
            for layer in self.layers:
                del layer.forward
        if result is not None:
            return out
        self._calls.setdefault(tuple(seen[0].shape), calls)
        return seen[0]

    def _read(self, names: _Names, empty: Tensor, *, as_stored: bool) -> Tensor:
        """One of the model's tensors from those of the checkpoint: each expert's, one below the other."""
        if len(names) == 1 and len(names[0]) == 1:
            value = self.read(names[0][0])
            if value.shape != empty.shape:
                raise _misshapen(names[0][0], value.shape, empty.shape)
            return value if as_stored or not value.is_floating_point() else value.to(self.dtype)
        out: Tensor | None = None
        for expert, parts in enumerate(names):
            row = 0
            for name in parts:
                value = self.read(name)
                wanted = (empty.shape[1] // len(parts), *empty.shape[2:])
                if value.shape != wanted:
                    raise _misshapen(name, value.shape, wanted)
                out = torch.empty(empty.shape, dtype=value.dtype) if out is None else out
                out[expert, row : row + len(value)] = value
                row += len(value)
        assert out is not None, "no expert"
        return out


def _build(config: Mapping[str, Any]) -> Any:
    """transformers' model without storage. By its class for the ``model_type``: no code but its own can come in."""
    from accelerate import init_empty_weights
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    kind = config.get("model_type")
    if kind not in CONFIG_MAPPING:
        raise PlanError(f"calibration runs transformers' models, which know no model_type {kind!r}: {DYNAMIC}")
    plain = {key: value for key, value in config.items() if key not in ("quantization_config", "auto_map")}
    parsed = CONFIG_MAPPING[kind].from_dict(plain)
    parsed._experts_implementation = "eager"  # which calls F.linear, expert by expert
    try:
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(parsed, attn_implementation="sdpa")
    except ValueError as error:
        raise PlanError(f"calibration cannot build transformers' model for {kind!r}: {error}; {DYNAMIC}") from error
    return model.eval()


def _sources(empty: Mapping[str, Tensor], prefix: str, names: Collection[str]) -> dict[str, _Names]:
    """Of which of the checkpoint's tensors each of a layer's is made; what cannot be found is left out.

    transformers may stack a layer's experts and rename what they are in: "block_sparse_moe" on disk is its "mlp".
    """
    own = {name.removeprefix(prefix) for name in names if name.startswith(prefix)}
    found: dict[str, _Names] = {key: ((prefix + key,),) for key in empty if key in own}
    experts: dict[str, dict[tuple[int, str], str]] = {}
    for name in own:
        if match := _EXPERT.fullmatch(name):
            experts.setdefault(match[1], {})[int(match[2]), match[3]] = prefix + name
    if len(experts) != 1:
        return found
    ((theirs, linears),) = experts.items()
    for key in empty:
        match = _STACKED.fullmatch(key)
        if key in found or match is None:
            continue
        stacked = tuple(
            tuple(linears[expert, name] for part in _PARTS[match[2]] for name in part if (expert, name) in linears)
            for expert in range(empty[key].shape[0])
        )
        if all(len(parts) == len(_PARTS[match[2]]) for parts in stacked):
            found[key] = stacked
        for other in empty:
            renamed = theirs + other.removeprefix(match[1])
            if other not in found and other.startswith(f"{match[1]}.") and renamed in own:
                found[other] = ((prefix + renamed,),)
    return found


def _linears(layer: nn.Module, sources: Mapping[str, _Names]) -> dict[int, tuple[str, ...]]:
    """Address of a weight -> the linears, by their names on disk, that it is."""
    plain = {f"{name}.weight" for name, module in layer.named_modules() if isinstance(module, nn.Linear)}
    found = {}
    for key, names in sources.items():
        if key in plain:
            found[layer.get_parameter(key).data_ptr()] = names[0]
        elif _STACKED.fullmatch(key):
            for expert, weight in enumerate(layer.get_parameter(key)):
                found[weight.data_ptr()] = names[expert if len(names) > 1 else 0]
    return {address: tuple(name.removesuffix(".weight") for name in names) for address, names in found.items()}


def _unknown(model: Any, name: str) -> PlanError:
    kind = type(model).__name__
    return PlanError(f"calibration: transformers' {kind} has {name}, which the checkpoint has not: {DYNAMIC}")


def _misshapen(name: str, shape: Any, wanted: Any) -> CheckpointError:
    return CheckpointError(f"{name} is {list(shape)}, but config.json's model has {list(wanted)} there")


def largest_of(x: Tensor) -> float:
    """The largest magnitude in a tensor that is not empty; NaN if there is one."""
    low, high = torch.aminmax(x)
    return greater(abs(low.item()), abs(high.item()))


def greater(a: float | None, b: float) -> float:
    """The greater of two magnitudes; NaN if either is."""
    return b if a is None or b > a or math.isnan(b) else a


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
