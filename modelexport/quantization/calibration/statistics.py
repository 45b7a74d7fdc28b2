"""Statistics of linears' inputs while samples run through a layer; their size does not grow with the samples.

Every statistic is gathered batch by batch in the order of the batches, from whole inputs (ranks that hold a part of one
put it together first), so that it is the same to the bit on any number of ranks. See :class:`InputStatistics`.

Only the Hessian is work worth sharing: its columns are cut into panels that depend on the number of features alone, and
each rank computes some of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from modelexport.distributed import collectives
from modelexport.quantization.calibration.products import add_product, transposed

__all__ = [
    "BINS",
    "SAMPLE",
    "THINNED",
    "Collector",
    "Cross",
    "Hessian",
    "InputStatistics",
    "nbytes",
    "owners",
    "panel_edges",
    "thinned",
]

SAMPLE = 512
"""Tokens of :attr:`InputStatistics.sample`."""
THINNED = 128
"""Tokens of :func:`thinned`: enough for two digits of an error, and to choose between scales (awq)."""
BINS = 1 << 15
"""Of :attr:`InputStatistics.histogram`: bin n counts magnitudes whose bfloat16 (rounded towards 0) has the bits n."""

_WANTS = frozenset({"amax", "mean", "sample", "histogram", "hessian", "cross"})
_PANELS = 16  # enough for as many ranks, and so that the unequal panels of a triangle can be dealt out evenly
_NARROWEST = 64  # below that a matrix product is slow
_ALIGNED = 16  # float32 numbers in 64 bytes: a product's bits may depend on how its operands lie in cache lines


@dataclass
class InputStatistics:
    """Of what one or several linears are given. What was not asked for is None.

    Attributes:
        features: ``in_features``.
        tokens: how many were seen.
        amax: float32 ``[features]``, largest magnitudes.
        mean: float32 ``[features]``, mean magnitudes.
        sample: float32 ``[n, features]``: up to :data:`SAMPLE` tokens, spread evenly over those that came.
        histogram: int64 ``[BINS]``, of magnitudes.
        hessian: the sum of x x^T over the tokens; ranks hold parts of it.
        cross: the sum of (r - x) x^T over the tokens whose reference r is known: what the unrounded model gives there.
        finite: whether no NaN or Inf came, whatever was asked for.
    """

    features: int
    tokens: int = 0
    amax: Tensor | None = None
    mean: Tensor | None = None
    sample: Tensor | None = None
    histogram: Tensor | None = None
    hessian: Hessian | None = None
    cross: Cross | None = None
    finite: bool = True


@dataclass
class Panels:
    """A matrix ``[features, features]`` in float32, in panels of columns, some of them on each rank.

    Attributes:
        features: ``in_features``.
        panels: this rank's, by their first column. Which ones: :func:`owners`.
    """

    features: int
    panels: dict[int, Tensor] = field(default_factory=dict)

    def whole(self, rank: int, device: torch.device | None = None) -> Tensor | None:
        """The full matrix, new memory, on that rank; None on the others, which take part.

        Args:
            rank: who gets it.
            device: where it is to be; None: where this rank's panels are.

        All ranks call it for the same matrices in the same order. It ends when the panels have been handed over, so
        where several ranks are to have one each, let them gather all before the first computes with its own.

        Without a process group nothing is sent, and this rank holds all panels, wherever they were cut.
        """
        world = collectives.get_world_size()
        device = self._device() if device is None else device
        if world == 1:
            return self._assembled(sorted(self.panels.items()), device)
        edges = panel_edges(self.features)
        owner = dict(zip(edges[:-1], owners(self.features, world), strict=True))
        if collectives.get_rank() == rank:
            return self._assembled(self._received(edges, owner, rank), device)
        sent = [collectives.isend(self.panels[start], rank) for start in sorted(self.panels)]
        for request in sent:
            assert request is not None, "this rank does not belong to the job"
            request.wait()
        return None

    def _received(self, edges: list[int], owner: dict[int, int], rank: int) -> Iterator[tuple[int, Tensor]]:
        """All panels in order, each of which may be overwritten by the next."""
        sizes = [(start, self.rows(stop), stop - start) for start, stop in pairwise(edges)]
        largest = max((rows * columns for _, rows, columns in sizes), default=0)
        scratch = torch.empty(largest, device=self._device())  # fresh pages for each would take longer than the sending
        for start, rows, columns in sizes:
            panel = self.panels.get(start)
            if panel is None:
                panel = scratch[: rows * columns].view(rows, columns)
                collectives.recv(panel, owner[start])
            else:
                assert owner[start] == rank, "panels were made for another number of ranks"
            yield start, panel

    def _device(self) -> torch.device | None:
        return next((panel.device for panel in self.panels.values()), None)

    def rows(self, stop: int) -> int:
        """The rows that the panel of the columns up to ``stop`` has."""
        raise NotImplementedError

    def _assembled(self, panels: Iterable[tuple[int, Tensor]], device: torch.device | None) -> Tensor:
        raise NotImplementedError


class Hessian(Panels):
    """The sum of x x^T over tokens. Only the upper triangle is held: of the panel of columns ``start .. stop``, the
    rows ``0 .. stop``."""

    def rows(self, stop: int) -> int:
        """See the base."""
        return stop

    def _assembled(self, panels: Iterable[tuple[int, Tensor]], device: torch.device | None) -> Tensor:
        out = torch.empty(self.features, self.features, device=device)
        for start, panel in panels:
            stop = panel.shape[0]
            out[:stop, start:stop] = panel
            out[start:stop, :start] = panel[:start].T
            # The product may have rounded the two halves of the square on the diagonal differently.
            square = panel[start:].triu()
            out[start:stop, start:stop] = square + square.triu(1).T
        return out


class Cross(Panels):
    """The sum of (r - x) x^T over tokens: see :class:`InputStatistics`."""

    def rows(self, stop: int) -> int:
        """See the base."""
        return self.features

    def _assembled(self, panels: Iterable[tuple[int, Tensor]], device: torch.device | None) -> Tensor:
        out = torch.empty(self.features, self.features, device=device)
        for start, panel in panels:
            out[:, start : start + panel.shape[1]] = panel
        return out


def thinned(sample: Tensor) -> Tensor:
    """Returns some of a sample's tokens, spread evenly: of ``[tokens, features]``, at most :data:`THINNED`."""
    count = min(THINNED, len(sample))
    return sample[torch.arange(count) * len(sample) // max(1, count)]


def panel_edges(features: int) -> list[int]:
    """Returns the cuts of a Hessian's columns: 0, ..., ``features``; the same for any number of ranks."""
    width = max(_NARROWEST, -(-features // _PANELS))
    width += -width % _ALIGNED
    return [*range(0, features, width), features]


def owners(features: int, world: int) -> list[int]:
    """For each panel, in the order of the columns, the rank that computes it: each gets about the same work."""
    edges = panel_edges(features)
    load = [0] * world
    found = [0] * (len(edges) - 1)
    # The panels on the right are the longest: dealing them out first evens out what is left.
    for number in reversed(range(len(found))):
        rank = min(range(world), key=lambda r: (load[r], r))
        load[rank] += edges[number + 1] * (edges[number + 1] - edges[number])
        found[number] = rank
    return found


def nbytes(features: int, wants: Collection[str], rank: int = 0, world: int = 1, *, at_rest: bool = False) -> int:
    """Returns the bytes of the statistics of one input on a rank's device, while they are gathered.

    Args:
        features, wants, rank, world, at_rest: see :class:`Collector`.
    """
    found = 4 * features  # amax is always taken
    found += 12 * features if "mean" in wants else 0
    found += 8 * BINS if "histogram" in wants else 0
    if at_rest:
        return found
    found += 4 * SAMPLE * features if "sample" in wants else 0
    dealt = zip(pairwise(panel_edges(features)), owners(features, world), strict=True)
    spans = [span for span, owner in dealt if owner == rank]
    found += sum(4 * stop * (stop - start) for start, stop in spans) if "hessian" in wants else 0
    found += sum(4 * features * (stop - start) for start, stop in spans) if "cross" in wants else 0
    return found


def widest_panel(features: int) -> int:
    """Returns the bytes of the largest panel of a Hessian."""
    return max((4 * stop * (stop - start) for start, stop in pairwise(panel_edges(features))), default=0)


class Collector:
    """Gathers the statistics of one input: :meth:`add` its batches in order, then :meth:`finish`.

    Args:
        features: ``in_features``.
        wants: names of the attributes of :class:`InputStatistics` to gather.
        rank, world: whose panels of the Hessian to compute, see :func:`owners`; all else every rank gathers.
        pool: computes panels next to each other; None: one after the other. Its threads, like the caller's, must run
            each of torch's operations on one thread, or the bits depend on the machine. :meth:`add` must not be called
            from within it.
        at_rest: keep what is large, the sample and the Hessian, in the host's memory: it comes to the device where it
            is added to, a panel at a time.
    """

    def __init__(
        self,
        features: int,
        wants: Collection[str],
        rank: int = 0,
        world: int = 1,
        pool: Executor | None = None,
        *,
        at_rest: bool = False,
    ) -> None:
        if unknown := sorted(set(wants) - _WANTS):
            raise ValueError(f"no statistic {unknown[0]!r}; there are {', '.join(sorted(_WANTS))}")
        if not 0 <= rank < world:
            raise ValueError(f"rank {rank} of {world}")
        self.features, self.wants, self.pool, self.at_rest = features, frozenset(wants), pool, at_rest
        self.tokens = 0
        edges = panel_edges(features)
        dealt = zip(pairwise(edges), owners(features, world), strict=True)
        self._spans = [span for span, owner in dealt if owner == rank]
        self._step, self._kept = 1, 0  # of the sample: every so many tokens, and how many there are
        self._amax: Tensor | None = None

    def _begin(self, device: torch.device) -> None:
        """Makes the tensors, as ordinary ones also where batches come in inference mode."""
        with torch.inference_mode(False):
            self._amax = torch.zeros(self.features, device=device)
            self._sum = torch.zeros(self.features if "mean" in self.wants else 0, dtype=torch.float64, device=device)
            large = torch.device("cpu") if self.at_rest else device
            self._sample = torch.zeros(SAMPLE if "sample" in self.wants else 0, self.features, device=large)
            self._histogram = torch.zeros(BINS if "histogram" in self.wants else 0, dtype=torch.int64, device=device)
            spans = self._spans if "hessian" in self.wants else []
            self._panels = {start: torch.zeros(stop, stop - start, device=large) for start, stop in spans}
            spans = self._spans if "cross" in self.wants else []
            self._crossed = {start: torch.zeros(self.features, stop - start, device=large) for start, stop in spans}

    @torch.no_grad()
    def add(self, x: Tensor, reference: Tensor | None = None) -> None:
        """The next batch.

        Args:
            x: float32 ``[tokens, features]``: the whole input, the same on every rank; no token at all is fine.
            reference: likewise, what the unrounded model gives there; None where that is not known.

        Raises:
            ValueError: another dtype or shape.
        """
        if x.dtype != torch.float32 or x.dim() != 2 or x.shape[1] != self.features:
            wanted = f"torch.float32 [tokens, {self.features}]"
            raise ValueError(f"a batch of {x.dtype} {list(x.shape)} came, where {wanted} was expected")
        if self._amax is None:
            self._begin(x.device)
        if not x.shape[0]:
            return
        x = x.contiguous()
        if x.data_ptr() % (4 * _ALIGNED):
            x = x.clone()
        self._add_elementwise(x)
        self._add_to_sample(x)
        self.tokens += x.shape[0]

        by_feature = transposed(x) if self._panels or self._crossed else x

        def multiply(item: tuple[int, Tensor]) -> None:
            start, panel = item
            stop = panel.shape[0]
            with torch.no_grad():  # which is a setting of each thread
                sums = panel.to(x.device)
                add_product(sums, by_feature[:stop], by_feature[start:stop])
                if sums is not panel:
                    panel.copy_(sums)

        _each(self.pool, multiply, self._panels.items())
        if reference is None or not self._crossed:
            return
        apart = (reference - x).t().contiguous()

        def cross(item: tuple[int, Tensor]) -> None:
            start, panel = item
            with torch.no_grad():
                sums = panel.to(x.device)
                add_product(sums, apart, by_feature[start : start + panel.shape[1]])
                if sums is not panel:
                    panel.copy_(sums)

        _each(self.pool, cross, self._crossed.items())

    def _add_elementwise(self, x: Tensor) -> None:
        magnitudes = x.abs()
        assert self._amax is not None
        torch.maximum(self._amax, magnitudes.amax(dim=0), out=self._amax)
        if self._sum.numel():
            self._sum += magnitudes.sum(dim=0, dtype=torch.float64)
        if self._histogram.numel():
            bins = magnitudes.view(torch.int32) >> 16
            self._histogram += torch.bincount(bins.flatten(), minlength=BINS)

    def _add_to_sample(self, x: Tensor) -> None:
        """Keeps every ``_step``-th token of all; when these become too many, every second of them."""
        if not self._sample.shape[0]:
            return
        while True:
            chosen = x[-self.tokens % self._step :: self._step]
            if self._kept + chosen.shape[0] <= SAMPLE:
                break
            rest = self._sample[: self._kept : 2].clone()
            self._kept, self._step = rest.shape[0], self._step * 2
            self._sample[: self._kept] = rest
        self._sample[self._kept : self._kept + chosen.shape[0]] = chosen
        self._kept += chosen.shape[0]

    @property
    def finite(self) -> bool:
        """True as long as no NaN or Inf has come, whatever was asked for."""
        return self._amax is None or bool(torch.isfinite(self._amax).all())

    @torch.no_grad()
    def finish(self) -> InputStatistics:
        """Returns the statistics asked for, of all inputs; zeros where none came. Nothing can be added after it."""
        if self._amax is None:
            self._begin(torch.device("cpu"))
        with torch.inference_mode(False):
            sample, self._sample = self._sample[: self._kept].clone(), self._sample[:0].clone()
            return InputStatistics(
                self.features,
                self.tokens,
                amax=self._amax if "amax" in self.wants else None,
                mean=(self._sum / max(1, self.tokens)).float() if "mean" in self.wants else None,
                sample=sample if "sample" in self.wants else None,
                histogram=self._histogram if "histogram" in self.wants else None,
                hessian=Hessian(self.features, self._panels) if "hessian" in self.wants else None,
                cross=Cross(self.features, self._crossed) if "cross" in self.wants else None,
                finite=self.finite,
            )


def _each(
    pool: Executor | None, work: Callable[[tuple[int, Tensor]], None], items: Collection[tuple[int, Tensor]]
) -> None:
    """``work`` on every item; the costly ones, which come last, first."""
    ordered = reversed(list(items))
    for _ in map(work, ordered) if pool is None else pool.map(work, ordered):
        pass
