"""A model of which one decoder layer at a time is in memory, and batches of samples that go through it.

transformers' own modules compute: the model is built without storage from config.json, with this rank's heads and
widths, and each layer is filled from the checkpoint when its turn comes and emptied after::

    with LayerRunner(config, names, read, tokens, cut=cut) as runner:
        for index in range(len(runner.layers)):
            with runner.filled(index) as layer:
                observed = runner.observe(layer, frozenset({"hessian"}))
                ...                     # write new values into layer.tensors
                runner.advance(layer)   # they make the next layer's inputs

Samples go through a layer in batches of a fixed size. Alone, a rank runs several at once, each on one thread, and then
adds their statistics in order; several ranks run one batch after the other, each its part. So results depend on nothing
but weights and tokens (and on what the processor's matrix product does): see
:mod:`~modelexport.quantization.calibration.cut`. float32 is the default; where a processor multiplies bfloat16 itself,
that is several times faster and takes half the memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelexport.distributed import collectives
from modelexport.distributed.environment import cores
from modelexport.errors import CheckpointError, PlanError
from modelexport.quantization import devices
from modelexport.quantization.calibration.arguments import Given, HandedOver, replaced
from modelexport.quantization.calibration.around import Batch, FirstInput, ModelShell
from modelexport.quantization.calibration.cut import ForwardCut, ForwardShard, general
from modelexport.quantization.calibration.filled import FilledLayer, Read, fill
from modelexport.quantization.calibration.hidden_states import CarriedTensors, HiddenStates
from modelexport.quantization.calibration.model import (
    DYNAMIC,
    TensorSource,
    build,
    choosing_all,
    decoder_layers,
    kv_heads,
    narrow,
    on_disk,
    running,
    sources,
    unknown,
)
from modelexport.quantization.calibration.statistics import Collector, InputStatistics
from modelexport.quantization.calibration.sums import ForwardRanks
from modelexport.quantization.calibration.towers import EmbeddedSample
from modelexport.quantization.calibration.watch import Activation, AllSeen, LayerInputs, ShardedProducts
from modelexport.quantization.kv_caches import CacheRounding
from modelexport.system.allocator import return_freed_memory

__all__ = ["BATCH_TOKENS", "DYNAMIC", "FilledLayer", "LayerRunner", "Observed", "Read"]

BATCH_TOKENS = 512  # enough for a matrix product to run at full speed on a thread, few enough to occupy many threads


@dataclass
class Observed:
    """The inputs of a layer's linears and of its attention.

    Attributes:
        inputs: linear -> statistics of its whole input, the same object for linears that were given the same tensor;
            those to which no token came are missing.
        tokens: linear -> how many tokens came.
        keys, values: of what goes into the KV cache: keys after the rotary embedding, values as projected. Those of all
            heads together, or of each. With latent attention both are the same, of the latent and of the rotary part,
            which share one cache. Empty without attention, or where only other statistics than ``amax`` and
            ``histogram`` were asked for.
    """

    inputs: dict[str, InputStatistics] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    keys: tuple[InputStatistics, ...] = ()
    values: tuple[InputStatistics, ...] = ()


@dataclass(frozen=True)
class _Kept:
    """The place of a tensor that is among the carried ones."""

    key: tuple[Any, ...]


class LayerRunner:
    """The samples on their way through a model: :meth:`filled` a layer, :meth:`advance` through it, and so on.

    A context manager, in which torch uses one thread for each operation. All ranks of the job use theirs together.

    Args:
        config: config.json of an unquantised language model.
        names: every tensor of the checkpoint, which may hold more than the language model.
        read: this rank's part of one of them (the spans of the share, joined along its dim), in any floating-point
            dtype. Biases are asked for with dim 0 where their linear is column-parallel, and else whole; of the
            embedding only the tokens' rows.
        tokens: int64 ``[samples, length]``; or batches of that shape, each of its own length.
        embedded: samples of one batch each behind these, which begin with embeddings.
        cut: this rank's part of the layers.
        threads: batches, or panels of a Hessian, at once; by default what cores there are for each rank.
        dtype: of the arithmetic.
        device: where layers and hidden states are.
        memory: bytes of hidden states to keep in memory; None for all. The rest goes through a file.
        directory: of that file.
        stacked_as_stored: experts that transformers stacks keep the dtype in which they are read.
        experts_apart: experts' weights, and the large statistics of what they are given, are in the host's memory, and
            come to the device one at a time.
        alone: whether other ranks, if there are any, have no part in it.
        compared: whether the samples go through the unrounded model besides, for the statistic ``cross``: twice the
            hidden states, and one more pass through each layer.
        derived: whether nobody has looked at how the model's layers run by themselves, see ``running``.
        batch_tokens: of those ``[samples, length]``, the tokens of a batch; at least one sample.
        progress: called with (batches done, batches in all) on the way through a layer.

    Raises:
        PlanError: transformers has no such model, or not with these tensors.

    Attributes:
        layers: transformers' decoder layers, without storage except within :meth:`filled`.
        hidden: each batch's input of the next layer, ``[samples, length, hidden]`` in ``dtype``, or as the model has
            it (``[states, samples, length, hidden]`` of Gemma 3n); the same on all ranks.
        head_name: the output embedding's module; None where there is none.
        on_disk: transformers' name of a tensor -> the checkpoint's, where that is another.
        layers_on_disk: the name of the list of decoder layers in the checkpoint.
        kv_heads: of each layer, where keys and values are cached by heads.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        names: Collection[str],
        read: Read,
        tokens: Tensor | Sequence[Tensor],
        *,
        embedded: Sequence[EmbeddedSample] = (),
        cut: ForwardCut | None = None,
        threads: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        memory: int | None = None,
        directory: str | os.PathLike[str] | None = None,
        stacked_as_stored: bool = False,
        experts_apart: bool = False,
        alone: bool = False,
        compared: bool = False,
        derived: bool = False,
        batch_tokens: int = BATCH_TOKENS,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.names, self.read, self.dtype, self.device = names, read, dtype, torch.device(device)
        self.cut, self.stacked_as_stored, self.derived = cut or ForwardCut(), stacked_as_stored, derived
        self.experts_apart = experts_apart
        self.model = build(config, self.cut.config)
        modules = {module: name for name, module in self.model.named_modules()}
        stack = decoder_layers(self.model)
        if stack is None:
            kind = type(self.model).__name__
            raise PlanError(f"calibration finds no decoder layers in transformers' {kind}: {DYNAMIC}")
        self.layers: list[Any] = list(stack)
        for layer in self.layers:
            narrow(layer, self.cut)
        self.prefix = modules[stack]
        self.head_name = modules.get(self.model.get_output_embeddings())
        latent = bool(config.get("kv_lora_rank"))
        self.rotary = config.get("qk_rope_head_dim") if latent else None
        self.kv_heads = [None if latent else kv_heads(self.model.config, index) for index in range(len(self.layers))]
        if not isinstance(tokens, Tensor):
            windows = tuple(tokens)
        else:
            windows = tokens.split(max(1, batch_tokens // tokens.shape[1])) if len(tokens) else ()
        self.batches = (*windows, *(sample.tokens for sample in embedded))
        self._begins: list[Batch] = [*windows, *(sample.inputs for sample in embedded)]
        self._by_itself, self._progress = alone, progress or (lambda done, all_: None)
        world = 1 if alone else collectives.get_world_size()
        on_cpu = self.device.type == devices.CPU
        self.threads = threads or (max(1, cores() // world) if on_cpu else 1)  # a GPU is busy with one batch
        self._memory, self._directory, self._compared = memory, directory, compared
        inside = [name for name in (self.prefix, self.head_name) if name is not None]
        self.on_disk, self.layers_on_disk = on_disk(self.model, self.prefix, names)
        self._around = ModelShell(
            self.model, self.layers, inside, {*names, *self.on_disk}, self._read_renamed, dtype, self.device
        )
        self._restored = False
        self.hidden: HiddenStates = HiddenStates([], dtype, self.device)
        self.reference: HiddenStates | None = None
        self._carried = CarriedTensors(self.device)
        self._called_once: dict[frozenset[str], bool] = {}  # linears of a layer, by their paths
        self._handed: list[dict[int, dict[Any, Any]]] = []  # batch -> mapping -> what is in it

    def _begin(self) -> None:
        """Make room for what goes from layer to layer, whose shapes are known now."""
        memory, shapes = self._memory, self._around.shapes
        left = memory
        self.hidden = HiddenStates(shapes, self.dtype, self.device, memory=left, directory=self._directory)
        left = None if left is None else max(0, left - self.hidden.in_memory)
        if self._compared:
            self.reference = HiddenStates(shapes, self.dtype, self.device, memory=left, directory=self._directory)
            left = None if left is None else max(0, left - self.reference.in_memory)
        self._carried = CarriedTensors(self.device, memory=left, directory=self._directory)
        self._handed = [{} for _ in shapes]

    def _room(self) -> HiddenStates:
        """Room for the states of all batches between two layers."""
        return HiddenStates(
            self._around.shapes, self.dtype, self.device, memory=self._memory, directory=self._directory
        )

    def _read_renamed(self, name: str, share: ForwardShard) -> Tensor:
        return self.read(self.on_disk.get(name, name), share)

    def __enter__(self) -> LayerRunner:
        self._threads_before = torch.get_num_threads()
        torch.set_num_threads(1)  # of one operation, in this thread and in those of the pool
        self._settings = ExitStack()
        self._settings.enter_context(devices.deterministic(self.device))
        self._pool = ThreadPoolExecutor(self.threads, initializer=torch.set_num_threads, initargs=(1,))
        self._together: ForwardRanks | None = None
        try:
            self._together = ForwardRanks(self.cut, alone=self._by_itself)
            with running(self.model, derived=self.derived):
                for number, first in enumerate(self._first_inputs()):
                    if not self._restored:
                        self.hidden[number] = first.hidden
                        if self.reference is not None:
                            self.reference[number] = first.hidden
                    for place, value in first.given.items():
                        self._carried[number, place] = value
            self._begins = []  # embeddings are no longer needed
        except BaseException:
            self.__exit__()
            raise
        return self

    def _first_inputs(self) -> Iterator[FirstInput]:
        """The beginning of each batch; none where a run is taken up and layers are given nothing but hidden states."""
        if self._restored and not self._around.given:
            return iter(())
        return self._around.first_inputs(self._begins, lambda: None if self._restored else self._begin())

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._settings.close()
        torch.set_num_threads(self._threads_before)
        if self._together is not None:
            self._together.close()
        self.hidden.close()
        if self.reference is not None:
            self.reference.close()
        self._carried.close()

    @property
    def is_latent(self) -> bool:
        """True where keys and values are kept as one latent, of which attention sees only what is made of it."""
        return self.rotary is not None

    @property
    def hands_over(self) -> bool:
        """True where layers hand later ones more than hidden states, in a mapping: keys and values that they share."""
        return self._around.hands_over

    def save(self, path: str | os.PathLike[str], index: int) -> None:
        """Write the hidden states, which are the inputs of layer ``index``: see :class:`HiddenStates`.

        They are the same on all ranks: one of them may write for all who see the file. Nothing is written once layers
        have handed over something else, which each rank may have its own part of: a run that resumes this one begins
        with the first layer again.
        """
        if any(self._handed):
            return
        if self.reference is not None:  # first: without it the other file means nothing
            self.reference.save(_beside(path), index)
        self.hidden.save(path, index)

    def restore(self, path: str | os.PathLike[str]) -> int | None:
        """Before the runner is entered: begin with what :meth:`save` wrote; the layer that comes next.

        None where there is no such file.

        Raises:
            CheckpointError: it is damaged, or of other samples.
            PlanError: as on entering.
        """
        if not os.path.exists(path) or (self._compared and not os.path.exists(_beside(path))):
            return None
        with running(self.model, derived=self.derived):
            self._around.learn(self._begins)
        self._begin()
        index = self.hidden.restore(path)
        if self.reference is not None and self.reference.restore(_beside(path)) != index:
            raise CheckpointError(f"{_beside(path)} is of another layer than {path}: remove both and start again")
        self._restored = index is not None
        return index

    @contextmanager
    def filled(self, index: int) -> Iterator[FilledLayer]:
        """Layer ``index`` with its weights.

        Raises:
            PlanError: the checkpoint lacks some of them.
            CheckpointError: some have another shape than config.json says.
        """
        module, prefix = self.layers[index], f"{self.layers_on_disk}.{index}."
        empty = module.state_dict()
        made_of = sources(module, prefix, self.names)
        memory = f"{self.prefix}.{index}."
        for key in empty:
            if key not in made_of and (name := self.on_disk.get(memory + key)) is not None:
                made_of[key] = (TensorSource(name),)
        missing = [key for key in empty if key not in made_of]
        if missing:
            raise unknown(self.model, memory + missing[0])
        state, layer = fill(
            module,
            index,
            prefix,
            made_of,
            self.read,
            cut=self.cut,
            dtype=self.dtype,
            device=self.device,
            stacked_as_stored=self.stacked_as_stored,
            experts_apart=self.experts_apart,
        )
        module.load_state_dict(state, assign=True)
        for part in module.modules():  # buffers that no checkpoint holds, such as Falcon-H1's multipliers
            for name in part._non_persistent_buffers_set:
                part._buffers[name] = None if (buffer := part._buffers[name]) is None else buffer.to(self.device)
        layer.find_products(module)
        try:
            yield layer
        finally:
            module.load_state_dict(empty, assign=True)

    def skips(self, index: int) -> bool:
        """Returns whether text does not pass through layer ``index``: it attends to images, of which there are none."""
        return not any(index in calls for calls in self._around.calls)

    def check_ranges(self, index: int) -> None:
        """Refuse a layer whose inputs, keys or values need a static scale, and that no sample passes through.

        Raises:
            PlanError: layer ``index`` is one.
        """
        if self.skips(index):
            raise PlanError(
                f"text does not pass through {self.layers_on_disk}.{index} of a {self.model.config.model_type} model, "
                f"which attends to images: no range of its inputs, keys or values can be measured; {DYNAMIC}"
            )

    def observe(
        self,
        layer: FilledLayer,
        wants: Collection[str],
        *,
        all_experts: bool = False,
        advance: bool = False,
        by_head: bool = False,
    ) -> Observed:
        """Run all samples through a layer to see what its linears get.

        Args:
            layer: a filled one.
            wants: which of the attributes of :class:`InputStatistics`. With ``cross``, the samples of the unrounded
                model pass the layer too, for which its weights must be unrounded: once for each layer.
            all_experts: every expert sees every token, whichever the router chose for it.
            advance: the outputs become ``hidden``, as :meth:`advance` has it; otherwise that stays what it is.
            by_head: keys and values have statistics for each head.

        Raises:
            PlanError: ``all_experts``, but this model's routers cannot be told to choose all.
        """
        assert not (all_experts and advance), "outputs of all experts are not the model's"
        wants = frozenset(wants)
        together = self._together
        assert together is not None, "the runner is not entered"
        collectors: dict[str, Collector] = {}  # by the first of the linears that share it
        owners: dict[str, str] = {}
        keys: dict[str, Collector] = {}  # by head
        values: dict[str, Collector] = {}
        cache_wants = wants & {"amax", "histogram"}
        pool = self._pool if self.device.type == devices.CPU else None

        def collect(
            found: dict[str, Collector], name: str, x: Tensor, wanted: frozenset[str], other: Tensor | None = None
        ) -> None:
            if name not in found:
                at_rest = self.experts_apart and general(name) != name
                found[name] = Collector(x.shape[1], wanted, together.rank, together.world, pool, at_rest=at_rest)
            found[name].add(x.float(), None if other is None else other.float())

        def take(number: int, seen: LayerInputs, compared: LayerInputs) -> None:
            unrounded = {names[0]: x for x, names in compared.inputs}
            for x, names in seen.inputs:
                # Of experts others may have been chosen: then there is nothing to compare.
                other = unrounded.get(names[0]) if len(x) == self.batches[number].numel() else None
                other = None if other is None or other.shape != x.shape else other
                collect(collectors, names[0], x, wants, other)
                for name in names:
                    assert owners.setdefault(name, names[0]) == names[0], "inputs are shared by other linears now"
            if seen.keys is not None and seen.values is not None and cache_wants:
                for found, x in ((keys, seen.keys), *([(values, seen.values)] if seen.values is not seen.keys else [])):
                    for head, part in enumerate(x.unbind(1) if by_head else [x.flatten(1)]):
                        collect(found, str(head), part, cache_wants)

        with choosing_all(self.layers[layer.index]) if all_experts else nullcontext():
            for number, both in enumerate(self._seen(layer, keep=advance, compare="cross" in wants)):
                take(number, *both)
                del both  # or its inputs would stay while the next batch runs
        done = {name: collector.finish() for name, collector in collectors.items()}
        cached = [tuple(collector.finish() for collector in found.values()) for found in (keys, values)]
        observed = Observed(
            {name: done[owners[name]] for name in layer.linears if name in owners},
            {name: done[owners[name]].tokens if name in owners else 0 for name in layer.linears},
            cached[0],
            cached[1] or cached[0],
        )
        if all_experts:
            self._check_all_seen(layer, observed)
        return observed

    def look(self, layer: FilledLayer, number: int = 0) -> tuple[Tensor, list[tuple[Tensor, list[str]]]]:
        """Run one batch through a layer, whose ``hidden`` stays what it is: what comes out, and each different input
        of its linears ``[tokens, in_features]`` with the names of those that it was given to."""
        seen = LayerInputs()
        out = self._run(layer, number, seen)
        return out, seen.inputs

    def advance(
        self,
        layer: FilledLayer,
        activations: Mapping[str, Activation] | None = None,
        *,
        cache: CacheRounding | None = None,
        trial: bool = False,
    ) -> None:
        """Run all samples through a layer; its outputs become ``hidden``.

        Args:
            layer: a filled one, with whatever its tensors hold now.
            activations: linear -> a function of its whole input ``[tokens, in_features]``, whose result (new memory) it
                is given instead.
            cache: rounds keys (after the rotary embedding) and values as an engine's cache does.
            trial: what the layer hands over to later ones beside its outputs (see :attr:`hands_over`) is forgotten.
        """

        def one(number: int) -> None:
            self.hidden[number] = self._run(layer, number, None, activations, cache=cache, keep=not trial)

        numbers = range(len(self.batches))
        at_once = self.threads > 1 and self._alone
        for done, _ in enumerate(self._pool.map(one, numbers) if at_once else map(one, numbers), 1):
            self._progress(done, len(numbers))

    def aim(self, layer: FilledLayer) -> HiddenStates:
        """Run all samples through a layer that is not rounded yet, for the outputs that :meth:`gradients` aim at.

        Where the runner has ``compared``, they are those of the unrounded model, and its inputs of the next layer.
        """
        unrounded = None if self.hands_over else self.reference
        aims = unrounded
        if aims is None:
            aims = self._room()

        def one(number: int) -> None:
            aims[number] = self._run(layer, number, None, states=unrounded)

        for done, _ in enumerate(self._each(one, range(len(self.batches))), 1):
            self._progress(done, len(self.batches))
        return aims

    def gradients(
        self,
        layer: FilledLayer,
        numbers: Sequence[int],
        aims: HiddenStates,
        linears: Collection[str],
        activations: Mapping[str, Activation] | None = None,
        *,
        cache: CacheRounding | None = None,
    ) -> Iterator[tuple[float, dict[str, Tensor]]]:
        """Yields of each batch the squared distance of a layer's outputs from their aims, and its gradients.

        Args:
            layer: a filled one, with the weights at which the gradients are taken.
            numbers: of the batches; each rank may have others.
            aims: see :meth:`aim`.
            linears: by whose weights; where there are none, only distances are computed.
            activations, cache: as for :meth:`advance`.

        Returns:
            In the order of ``numbers``: the distance, and linear -> gradient by its weight, float32 ``[out_features,
            in_features]``, of those that the batch came to.
        """
        assert not self.cut.shares, "a rank that has a part of the layer knows no gradients"

        def one(number: int) -> tuple[float, dict[str, Tensor]]:
            if not linears:
                out = self._run(layer, number, None, activations, cache=cache)
                return (out - aims[number]).square().sum().item(), {}
            leaves: dict[int, Tensor] = {}
            out = self._run(layer, number, None, activations, cache=cache, leaves=leaves)
            named = {address: [part for part in layer.products[address] if part.name in linears] for address in leaves}
            wanted = [address for address, parts in named.items() if parts]
            if not wanted:
                return 0.0, {}
            loss = (out - _ordinary(aims[number])).square().sum()
            found = torch.autograd.grad(loss, [leaves[address] for address in wanted], allow_unused=True)
            gradients = {
                part.name: gradient[part.rows]
                for address, gradient in zip(wanted, found, strict=True)
                for part in named[address]
                if gradient is not None
            }
            return loss.item(), gradients

        yield from self._each(one, numbers)

    def _each(self, work: Callable[[int], Any], numbers: Sequence[int]) -> Iterator[Any]:
        """Yields what a function makes of batches, in their order; as many at once as there are threads, which each
        rank has for itself."""
        if self.threads == 1:
            yield from map(work, numbers)
            return
        for start in range(0, len(numbers), self.threads):  # what has been made and not taken is bounded
            yield from self._pool.map(work, numbers[start : start + self.threads])

    def outputs(self) -> Iterator[Tensor]:
        """Yields the output embedding's inputs, batch by batch, after the last layer has run."""
        return self._around.outputs(self.batches, self.hidden)

    def head_input(self) -> float:
        """The largest magnitude in :meth:`outputs`; NaN if there is one."""
        return torch.stack([out.abs().amax() for out in self.outputs()]).amax().item()

    @property
    def _alone(self) -> bool:
        return self._together is not None and self._together.world == 1

    def _seen(
        self, layer: FilledLayer, *, keep: bool, compare: bool = False
    ) -> Iterator[tuple[LayerInputs, LayerInputs]]:
        """Yields the layer's inputs by each batch, in order, and those in the unrounded model, if these are wanted.
        Alone, ``threads`` batches run at once."""

        def one(number: int) -> tuple[LayerInputs, LayerInputs]:
            seen, unrounded = LayerInputs(), LayerInputs()
            out = self._run(layer, number, seen, keep=keep, only_seen=not keep)
            if keep:
                self.hidden[number] = out
            if compare and self.reference is not None and not self.hands_over:
                self.reference[number] = self._run(layer, number, unrounded, states=self.reference)
            return seen, unrounded

        at_once = self.threads if self._alone else 1
        for start in range(0, len(self.batches), at_once):
            wave = range(start, min(start + at_once, len(self.batches)))
            found = list(self._pool.map(one, wave)) if at_once > 1 else [one(number) for number in wave]
            found.reverse()
            while found:
                yield found.pop()  # not kept any longer
            return_freed_memory(seldom=True)  # or blocks of many sizes lie between each other, more by each wave
            self._progress(wave.stop, len(self.batches))

    def _run(
        self,
        layer: FilledLayer,
        number: int,
        seen: LayerInputs | None,
        activations: Mapping[str, Activation] | None = None,
        *,
        cache: CacheRounding | None = None,
        keep: bool = False,
        states: HiddenStates | None = None,
        leaves: dict[int, Tensor] | None = None,
        only_seen: bool = False,
    ) -> Tensor:
        """A batch's states after a layer, or before it where ``only_seen`` and nothing but ``seen`` was filled."""
        hidden = (self.hidden if states is None else states)[number]
        index, around = layer.index, self._around
        if index not in around.calls[number]:
            return hidden
        if (added := around.added[number].get(index)) is not None:
            hidden = hidden + self._carried[number, added.number]
        mappings: dict[int, Any] = {}
        args, kwargs = replaced(around.calls[number][index], (Given, HandedOver), partial(self._own, number, mappings))
        if leaves is not None:
            hidden = _ordinary(hidden)
            args, kwargs = replaced((args, kwargs), (Tensor,), _ordinary)
        assert self._together is not None
        paths = frozenset(part.path for parts in layer.products.values() for part in parts)
        watch = ShardedProducts(
            layer.products,
            self._together,
            activations=activations,
            seen=seen,
            leaves=leaves,
            kv_heads=self.kv_heads[index],
            rotary=self.rotary,
            cache=cache,
            only_seen=only_seen and self._called_once.get(paths, False),
        )
        with running(self.model, derived=self.derived):
            try:
                with torch.inference_mode() if leaves is None else torch.enable_grad(), watch:
                    out = self.layers[index](hidden, *args, **kwargs)
            except AllSeen:
                return hidden
            around.returns = len(out) if isinstance(out, (tuple, list)) else 0
            after: Tensor = out[0] if around.returns else out
            if after.shape != hidden.shape:
                raise ValueError(f"a layer gives {list(after.shape)} where it is given {list(hidden.shape)}")
        if seen is not None:
            # Whether layers of these linears end with the last of them, which calls each of them once.
            once = len(watch.calls) == len(layer.products) and set(watch.calls.values()) == {1}
            self._called_once[paths] = self._called_once.get(paths, True) and once
        if keep:
            self._keep(number, mappings)
        return after

    def _own(self, number: int, mappings: dict[int, Any], place: Given | HandedOver) -> Any:
        """A batch's own value of an argument; ``mappings`` get those that the layer may write to."""
        if isinstance(place, Given):
            return self._carried[number, place.number]
        if place.number not in mappings:
            mappings[place.number] = place.kind()
            for key, value in self._handed[number].get(place.number, {}).items():
                mappings[place.number][key] = replaced(value, (_Kept,), lambda kept: self._carried[kept.key])
        return mappings[place.number]

    def _keep(self, number: int, mappings: Mapping[int, Any]) -> None:
        """Keep what a layer has handed over to later ones."""
        for mapping, held in mappings.items():
            for key, value in held.items():
                parts: Iterator[int] = count()

                def kept(tensor: Tensor, mapping: int = mapping, key: Any = key, parts: Iterator[int] = parts) -> _Kept:
                    name = _Kept((number, mapping, key, next(parts)))
                    self._carried[name.key] = tensor
                    return name

                self._handed[number].setdefault(mapping, {})[key] = replaced(value, (Tensor,), kept)

    def _check_all_seen(self, layer: FilledLayer, observed: Observed) -> None:
        total = sum(batch.numel() for batch in self.batches)
        for name in layer.linears:
            if ".experts." in name and observed.tokens[name] != total:
                raise PlanError(
                    "calibration cannot show every token to every expert of transformers' "
                    f"{type(self.model).__name__}: {name} got {observed.tokens[name]} of {total}; leave that option out"
                )


def _ordinary(value: Tensor) -> Tensor:
    """A tensor that autograd may keep, which those of inference mode are not."""
    return value.clone() if value.is_inference() else value


def _beside(path: str | os.PathLike[str]) -> Path:
    """The file of the unrounded model's hidden states, beside the others'."""
    return Path(path).with_suffix(".unrounded.safetensors")
