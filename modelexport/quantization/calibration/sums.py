"""Products of cut weights, tile by tile, and what ranks tell each other for them.

See :mod:`~modelexport.quantization.calibration.cut` for why. Every rank of the job calls the same of these functions in
the same order; alone, nothing is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from modelexport.distributed import collectives
from modelexport.quantization.calibration.cut import ForwardCut, ForwardShard, Range, nodes, over_tree
from modelexport.quantization.calibration.exchange import Exchange
from modelexport.quantization.calibration.products import product

__all__ = ["ForwardRanks", "column_product"]


def column_product(x: Tensor, weight: Tensor, tiles: Sequence[Range]) -> Tensor:
    """``x @ weight.T`` by tiles of the output features. ``[tokens, in_features]`` -> ``[tokens, out_features]``."""
    if len(tiles) < 2:
        return product(x, weight)
    out = x.new_empty(x.shape[0], weight.shape[0])
    for start, stop in tiles:
        product(x, weight[start:stop], out=out[:, start:stop])
    return out


class ForwardRanks:
    """All ranks' parts in the forward pass, known to each of them.

    Args:
        cut: this rank's.
        alone: whether no other rank has a part.

    Attributes:
        kv_heads: see :class:`ForwardCut`; of this rank.
    """

    def __init__(self, cut: ForwardCut, *, alone: bool = False) -> None:
        self.rank, self.world = (0, 1) if alone else (collectives.get_rank(), collectives.get_world_size())
        self._cut, self.kv_heads = cut, cut.kv_heads
        rows = {path: share for path, share in cut.shares.items() if share.dim == 1}
        mine = {
            "spans": {path: share.spans if share.tiles else () for path, share in rows.items()},
            "numbers": {path: share.numbers for path, share in rows.items()},
            "kv_heads": cut.kv_heads,
        }
        self._exchange = Exchange() if self.world > 1 else None
        self._all: list[Any] = [mine] if self._exchange is None else self._exchange.objects(mine)

    def product(self, x: Tensor, weight: Tensor, path: str, share: ForwardShard) -> Tensor:
        """``x @ weight.T`` over the input features of all ranks. ``[tokens, held]`` -> ``[tokens, out_features]``."""
        if share.dim != 1:
            return column_product(x, weight, share.tiles if share.dim == 0 else ())

        def of_tile(node: Range) -> Tensor | None:
            if node[1] - node[0] > 1:
                return None
            start, stop = share.tiles[node[0] - first]
            return product(x[:, start:stop], weight[:, start:stop])

        first = share.numbers[0] if share.numbers else 0
        own = nodes(first, first + len(share.numbers), share.count)
        values = [over_tree(node, of_tile, Tensor.add_) for node in own]
        if self._exchange is None:
            [value] = values
            return value
        every = [nodes(n[0], n[-1] + 1, share.count) if n else [] for n in self._numbers(path)]
        size = x.shape[0] * weight.shape[0]
        parts = self._exchange.gather(values, [len(each) * size for each in every], x)
        known = {
            node: piece.view(x.shape[0], weight.shape[0])
            for part, each in zip(parts, every, strict=True)
            for node, piece in zip(each, part.split(size), strict=False)
        }
        total = over_tree((0, share.count), known.get, torch.add)
        return total.clone() if (0, share.count) in known else total

    def whole_input(self, x: Tensor, path: str, share: ForwardShard) -> Tensor:
        """The input features of all ranks. ``[tokens, held]`` -> ``[tokens, in_features]``; ``x`` where it is whole."""
        if share.dim != 1 or self._exchange is None:
            return x
        spans = [[(a, b) for a, b in each["spans"][path]] for each in self._all]
        return self._assemble(x, spans)

    def whole_heads(self, x: Tensor) -> Tensor:
        """The key/value heads of all ranks. ``[tokens, heads held, head_dim]`` -> ``[tokens, heads * head_dim]``."""
        heads = [each["kv_heads"] for each in self._all]
        if self._exchange is None or None in heads:
            return x.flatten(1)
        return self._assemble(x.flatten(1), [[(a * x.shape[2], b * x.shape[2])] for a, b in heads])

    def own_columns(self, whole: Tensor, share: ForwardShard) -> Tensor:
        """The columns that :meth:`whole_input` was made of."""
        if share.dim != 1 or self._exchange is None:
            return whole
        return torch.cat([whole[:, start:stop] for start, stop in share.spans], dim=1)

    def _numbers(self, path: str) -> list[Sequence[int]]:
        return [each["numbers"][path] for each in self._all]

    def _assemble(self, x: Tensor, spans: Sequence[Sequence[Range]]) -> Tensor:
        """Columns of all ranks in their places; those of several ranks are the same in each."""
        assert self._exchange is not None
        widths = [sum(stop - start for start, stop in each) for each in spans]
        parts = self._exchange.gather([x] if widths[self.rank] else [], [x.shape[0] * width for width in widths], x)
        out = x.new_empty(x.shape[0], max(stop for each in spans for _, stop in each))
        for part, width, each in zip(parts, widths, spans, strict=True):
            columns = part.view(x.shape[0], width)
            for start, stop in each:
                out[:, start:stop], columns = columns[:, : stop - start], columns[:, stop - start :]
        return out

    def close(self) -> None:
        """Gives back what was shared with other ranks."""
        if self._exchange is not None:
            self._exchange.close()
