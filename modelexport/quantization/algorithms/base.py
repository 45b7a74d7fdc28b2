"""What a calibrated algorithm is: it looks at what a layer's linears are given, and changes or rounds their weights.

A recipe names one algorithm or several joined by ``+`` (``rotation+smoothquant+gptq``); each is a file here with one
:class:`Algorithm`. Their work is of four kinds, always in this order: the whole model is *rotated*, formats are
*assigned*, scales are *folded* from modules into the linears that read them, weights are *rounded*. Ranks quantise
whole rows of a weight (dim 0), and know all of what its linear is given; whatever is decided from several ranks' rows
is added up in the order of the rows, so that the outcome does not depend on the number of ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from modelexport.distributed import collectives
from modelexport.quantization.formats.base import NumberFormat
from modelexport.quantization.kernels.searching import sum_in_halves

if TYPE_CHECKING:
    from modelexport.quantization.calibration.statistics import InputStatistics

__all__ = ["Algorithm", "Fold", "Folding", "Linear", "Options", "Ranks", "Rounding"]

Kind = Literal["rotate", "assign", "fold", "round"]
Want = Literal["amax", "mean", "sample", "histogram", "hessian"]


@dataclass(frozen=True)
class Options:
    """The settings of algorithms, as the recipe has them.

    Attributes:
        alpha: smoothquant: how much of an outlier goes from the activations into the weights, 0 to 1.
        grid: awq: candidates tried.
        damping: gptq: what is added to the Hessian's diagonal, as a part of its mean.
        block: gptq: columns whose errors are handed on together.
        act_order: gptq: whether columns are rounded in the order of their inputs' energy (groups stay as they are).
        seed: rotation.
    """

    alpha: float = 0.5
    grid: int = 20
    damping: float = 0.01
    block: int = 128
    act_order: bool = True
    seed: int = 0


@dataclass
class Linear:
    """One linear of the layer at hand, as one rank sees it.

    Attributes:
        name: of its module in the checkpoint.
        role: of the family's, e.g. ``attention.q``.
        number_format: what its weight is written in; None where it is not quantised (a router).
        weight: float32 ``[rows, in_features]``: the rows that this rank quantises, with everything folded so far.
        rows: which of the whole weight's these are; an empty range where the rank has none.
        shape: of the whole weight, ``[out_features, in_features]``.
        inputs: what it was given; None where no token came to it (an expert). The same object for linears that are
            given the same.
        amax: what the format's widest scale depends on, agreed by all ranks; see ``NumberFormat.quantise``. Given to
            :meth:`Rounding.quantise` only, and None where the format needs none.
        reach: largest magnitude of the inputs that a static scale is to cover, where the format stores one.
    """

    name: str
    role: str
    number_format: NumberFormat | None
    weight: Tensor
    rows: tuple[int, int]
    shape: tuple[int, int]
    inputs: InputStatistics | None
    amax: Tensor | None = None
    reach: float | None = None

    def rounded(self) -> dict[str, Tensor]:
        """Its rows, rounded to nearest by its number format: the native tensors.

        Raises:
            CheckpointError: a weight holds NaN or Inf.
        """
        assert self.number_format is not None
        return self.number_format.quantise(
            self.weight, amax=self.amax, inputs=self.reach, global_shape=self.shape, name=self.name
        )


class Ranks:
    """This rank among those that share the work; sums and maxima that do not depend on how many these are."""

    def __init__(self) -> None:
        self.rank, self.world = collectives.get_rank(), collectives.get_world_size()

    def largest(self, value: Tensor) -> Tensor:
        """The elementwise maximum over the ranks; ``value`` is written to."""
        if self.world > 1:
            collectives.all_reduce(value, op=collectives.reduce_op.MAX)
        return value

    def total(self, table: Tensor, rows: tuple[int, int], count: int) -> Tensor:
        """The sum of ``table`` (``[rows, ...]``, this rank's) over all ``count`` rows of all ranks, float64 ``[...]``.

        Added in an order that depends on ``count`` alone. All ranks take part, also those without rows.
        """
        whole = torch.zeros(count, *table.shape[1:], dtype=torch.float64)
        whole[rows[0] : rows[1]] = table
        if self.world > 1:
            collectives.all_reduce(whole, op=collectives.reduce_op.SUM)  # each element is of one rank: exact
        return sum_in_halves(whole)

    def broadcast(self, value: Tensor, source: int) -> Tensor:
        """``value`` of rank ``source``, written into that of the others."""
        if self.world > 1:
            collectives.broadcast(value, source)
        return value


@dataclass
class Fold:
    """A module whose outputs may be divided by a number each, and the linears whose inputs are multiplied by them.

    Attributes:
        source: the module's name; a norm's, or a linear's.
        weight: float32 ``[features]``: a norm's weight; None for a linear.
        linears: those that read it; all of them, quantised or not.
        columns: int64 ``[in_features]``: which of the source's features each of their inputs is (heads that share keys
            and values read the same); None where they are one to one.
        exact: whether every number must be a power of two, since one of the readers stays in the model's dtype.
        features: of the source.
    """

    source: str
    weight: Tensor | None
    linears: list[Linear]
    columns: Tensor | None
    exact: bool
    features: int


class Algorithm(ABC):
    """Base of all; files in this package have one, as ``ALGORITHM``.

    Attributes:
        name: as ``--algorithm`` has it.
        description: one line for people.
        kind: when its turn comes.
        wants: which statistics of the linears' inputs it needs.
    """

    name: ClassVar[str]
    description: ClassVar[str]
    kind: ClassVar[Kind]
    wants: ClassVar[frozenset[Want]] = frozenset()

    def __init__(self, options: Options, ranks: Ranks) -> None:
        self.options, self.ranks = options, ranks


class Folding(Algorithm):
    """Moves scales from activations into weights; and may narrow what weights reach."""

    kind: ClassVar[Kind] = "fold"

    @abstractmethod
    def scales(self, fold: Fold) -> Tensor | None:
        """What the source's outputs are divided by: float32 ``[features]``, positive; None for nothing.

        The same on all ranks, which call it together. Powers of two where ``fold.exact``.
        """

    def clip(self, linear: Linear) -> Tensor | None:
        """A narrower range for each block of a weight's row: float32 ``[rows, blocks]`` of this rank; None for none.

        Blocks divide the columns equally. Called on all ranks after everything is folded, for quantised linears only;
        weights are then clamped to -range .. range before they are rounded.
        """
        return None


class Rounding(Algorithm):
    """Rounds weights."""

    kind: ClassVar[Kind] = "round"
    observer: ClassVar[str] = "amax"
    """Of the number formats that it works with, see :class:`NumberFormat`."""

    def __init__(self, options: Options, ranks: Ranks) -> None:
        super().__init__(options, ranks)
        self.notes: dict[str, str] = {}  # linear -> what was out of the ordinary

    @abstractmethod
    def quantise(self, linears: Sequence[Linear]) -> Mapping[str, dict[str, Tensor]]:
        """The native tensors of each linear's rows on this rank: name -> suffix -> tensor.

        Args:
            linears: all that are given the same (one ``inputs`` object), quantised ones only; ranks call it together,
                also those that have no rows of one (what they return for that is not looked at).

        Raises:
            CheckpointError: a weight holds NaN or Inf.
        """
