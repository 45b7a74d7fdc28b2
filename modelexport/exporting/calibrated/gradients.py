"""The gradients of a layer, of which several ranks compute some batches each: the same on any number of them.

Every rank has the layer whole, and runs its part of the batches of a step through it and back. A batch's gradients are
the same wherever it runs. They are added up as a binary tree over the batches has it, whoever has them; each rank adds
up its own rows only. Then all tell each other what their rows are rounded to now.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from torch import Tensor

from modelexport.distributed import collectives
from modelexport.quantization.algorithms.base import LayerGradients
from modelexport.quantization.calibration.cut import Range, even_ranges, nodes, over_tree
from modelexport.quantization.calibration.exchange import Exchange
from modelexport.quantization.calibration.layers import FilledLayer, LayerRunner
from modelexport.quantization.calibration.watch import Activation
from modelexport.quantization.kv_caches import CacheRounding

__all__ = ["SharedGradients"]

Gradients = dict[str, Tensor]


class SharedGradients(LayerGradients):
    """See the module. A context manager; after it the layer's weights are what they were.

    Args:
        runner: with the samples ahead of the layer.
        layer: a filled one, with unrounded weights.
        weights: linear -> its weight's rows of this rank, unrounded; views of the layer's own memory.
        rows: linear -> which rows each rank has.
        activations: linear -> what rounds its inputs.
        cache: what rounds keys and values.

    Attributes:
        unrounded: linear -> its weight's rows, in memory that the layer does not write to.
    """

    def __init__(
        self,
        runner: LayerRunner,
        layer: FilledLayer,
        weights: Mapping[str, Tensor],
        rows: Mapping[str, Sequence[Range]],
        activations: Mapping[str, Activation],
        cache: CacheRounding | None = None,
    ) -> None:
        self.rank, self.world = collectives.get_rank(), collectives.get_world_size()
        self._runner, self._layer, self._rows = runner, layer, rows
        self._activations, self._cache = activations, cache
        self.unrounded = {name: weight.clone() for name, weight in weights.items()}
        self.batches, self.batch_samples = len(runner.batches), max(len(batch) for batch in runner.batches)

    def __enter__(self) -> SharedGradients:
        self._aims = self._runner.aim(self._layer)
        self._exchange = Exchange() if self.world > 1 else None
        return self

    def __exit__(self, *_: object) -> None:
        self._put(self.unrounded.__getitem__)
        if self._exchange is not None:
            self._exchange.close()

    def at(self, values: Callable[[str], Tensor], numbers: Sequence[int]) -> tuple[float, Gradients]:
        """See the base."""
        own, shares = self._nodes(values, numbers, self._rows)
        if self._exchange is None:
            [(distance, gradients)] = own
            return distance, gradients
        every = self._exchange.objects([[distance, [name in each for name in self._rows]] for distance, each in own])
        places = [nodes(*share, len(numbers)) for share in shares]
        distance = _total([[told[0] for told in each] for each in every], places, len(numbers))
        return distance, self._own_rows(own, [[told[1] for told in each] for each in every], places, len(numbers))

    def distance(self, values: Callable[[str], Tensor], numbers: Sequence[int]) -> float:
        """See the base."""
        own, shares = self._nodes(values, numbers, ())
        distances = [distance for distance, _ in own]
        every = [distances] if self._exchange is None else self._exchange.objects(distances)
        return _total(every, [nodes(*share, len(numbers)) for share in shares], len(numbers))

    def _nodes(
        self, values: Callable[[str], Tensor], numbers: Sequence[int], linears: Collection[str]
    ) -> tuple[list[tuple[float, Gradients]], list[Range]]:
        """The nodes of the tree over some batches that this rank computes, and each rank's range of them."""
        self._put(values)
        count = len(numbers)
        shares = even_ranges(count, self.world)
        first, stop = shares[self.rank]
        found = self._runner.gradients(
            self._layer, numbers[first:stop], self._aims, linears, self._activations, cache=self._cache
        )

        def batch(node: Range) -> tuple[float, Gradients] | None:
            return next(found) if node[1] - node[0] == 1 else None

        return [over_tree(node, batch, _added) for node in nodes(first, stop, count)], shares

    def _own_rows(
        self,
        own: Sequence[tuple[float, Gradients]],
        every: Sequence[Sequence[Sequence[bool]]],
        places: Sequence[Sequence[Range]],
        count: int,
    ) -> Gradients:
        """The sum over all ranks' nodes of the tree, of this rank's rows."""
        assert self._exchange is not None
        gradients: Gradients = {}
        for place, (name, spans) in enumerate(self._rows.items()):
            weight = self._layer.tensors[f"{name}.weight"]
            having = [[has[place] for has in each] for each in every]
            if not any(map(any, having)):
                continue
            values = [each[name] for _, each in own if name in each]
            parts = self._exchange.gather(values, [sum(has) * weight.numel() for has in having], weight)
            start, stop = spans[self.rank]
            known: dict[Range, Tensor] = {}
            for part, has, each in zip(parts, having, places, strict=True):
                wholes = iter(part.view(-1, *weight.shape))
                for node, there in zip(each, has, strict=True):
                    known[node] = next(wholes)[start:stop] if there else weight.new_zeros(())
            gradients[name] = over_tree((0, count), known.get, Tensor.add).expand(stop - start, -1).clone()
        return gradients

    def _put(self, values: Callable[[str], Tensor]) -> None:
        """Makes the ranks' rows the layer's weights."""
        for name, spans in self._rows.items():
            weight = self._layer.tensors[f"{name}.weight"]
            if self._exchange is None:
                weight.copy_(values(name))
                continue
            sizes = [(stop - start) * weight.shape[1] for start, stop in spans]
            parts = self._exchange.gather([values(name)] if sizes[self.rank] else [], sizes, weight)
            for (start, stop), part in zip(spans, parts, strict=True):
                weight[start:stop] = part.view(-1, weight.shape[1])


def _total(every: Sequence[Sequence[float]], places: Sequence[Sequence[Range]], count: int) -> float:
    """The sum over all ranks' nodes of the tree."""
    known = {node: x for xs, at in zip(every, places, strict=True) for node, x in zip(at, xs, strict=True)}
    return over_tree((0, count), known.get, lambda one, two: one + two)


def _added(one: tuple[float, Gradients], two: tuple[float, Gradients]) -> tuple[float, Gradients]:
    """The sum of two nodes of the tree, in the memory of the first. What did not come to a linear adds nothing."""
    distance, gradients = one
    for name, value in two[1].items():
        gradients[name] = gradients[name].add_(value) if name in gradients else value
    return distance + two[0], gradients
