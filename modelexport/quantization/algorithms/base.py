"""The base classes of algorithms, which look at the inputs of a layer's linears, and change or round their weights.

A recipe names one algorithm or several joined by ``+`` (``rotation+smoothquant+gptq``); each is a file here with one
:class:`Algorithm`. Their work is of four kinds, always in this order: the whole model is *rotated*, formats are
*assigned*, scales are *folded* from modules into the linears that read them, weights are *rounded*. RankGroup quantise
whole rows of a weight (dim 0), and know all of what its linear is given; whatever is decided from several ranks' rows
is added up in the order of the rows, so that the outcome does not depend on the number of ranks.

``modelexport --help`` lists every algorithm and its settings, and must not import torch: neither this module nor an
algorithm's imports it at the top, but in the functions that compute.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from modelexport.quantization.calibration.statistics import InputStatistics
    from modelexport.quantization.formats.base import NumberFormat

__all__ = [
    "KINDS",
    "Algorithm",
    "CalibratedLinear",
    "Fold",
    "Folding",
    "LayerGradients",
    "NoSettings",
    "RankGroup",
    "Rounding",
]

Kind = Literal["rotate", "assign", "fold", "round"]
KINDS: tuple[Kind, ...] = ("rotate", "assign", "fold", "round")
"""In the order of their turns. Several algorithms that fold may be joined, and one of each other kind."""
Want = Literal["amax", "mean", "sample", "histogram", "hessian", "cross"]


@dataclass(frozen=True, kw_only=True)
class NoSettings:
    """The settings of an algorithm that has none."""


@dataclass
class CalibratedLinear:
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
        input_amax: largest magnitude of the inputs that a static scale is to cover, where the format stores one.
        device: that computes; None: the one that the weight is on, which otherwise may be in the host's memory, with
            the sample and the Hessian of its inputs: see :meth:`computing`.
    """

    name: str
    role: str
    number_format: NumberFormat | None
    weight: Tensor
    rows: tuple[int, int]
    shape: tuple[int, int]
    inputs: InputStatistics | None
    amax: Tensor | None = None
    input_amax: float | None = None
    device: torch.device | None = None

    def computing(self) -> CalibratedLinear:
        """Returns the linear with its weight on the device that computes with it: itself where it lies there. What is
        written to another's weight is not written to this one's."""
        if self.device is None or self.weight.device == self.device:
            return self
        return replace(self, weight=self.weight.to(self.device))

    def rounded(self, *, choice: Tensor | None = None, products: Tensor | None = None) -> dict[str, Tensor]:
        """Returns its rows, rounded to nearest by its number format: the native tensors.

        Args:
            choice: the numbers of the blocks' scales, see ``NumberFormat.quantise``; None: as the observer has them.
            products: of the blocks' inputs, likewise.

        Raises:
            CheckpointError: a weight holds NaN or Inf.
        """
        assert self.number_format is not None
        return self.number_format.quantise(
            self.weight,
            amax=self.amax,
            inputs=self.input_amax,
            global_shape=self.shape,
            choice=choice,
            products=products,
            name=self.name,
        )

    def nearest(self) -> Tensor:
        """Returns the values that :meth:`rounded` gives its rows, float32 ``[rows, in_features]``.

        Raises:
            CheckpointError: a weight holds NaN or Inf.
        """
        assert self.number_format is not None
        return self.number_format.nearest(self.weight, amax=self.amax, inputs=self.input_amax, name=self.name)


class RankGroup:
    """The ranks that share the work; sums and maxima that do not depend on how many there are."""

    def __init__(self) -> None:
        from modelexport.distributed import collectives

        self.rank, self.world = collectives.get_rank(), collectives.get_world_size()

    def largest(self, value: Tensor) -> Tensor:
        """Returns the elementwise maximum over the ranks; ``value`` is written to."""
        if self.world > 1:
            from modelexport.distributed import collectives

            collectives.all_reduce(value, op=collectives.reduce_op.MAX)
        return value

    def total(self, table: Tensor, rows: tuple[int, int], count: int) -> Tensor:
        """Returns the sum of ``table`` over all ``count`` rows of all ranks: float64 ``[...]``.

        ``table`` is of this rank's rows, ``[rows, ...]``. Rows are added in an order that depends on ``count`` alone.
        All ranks take part, also those without rows.
        """
        import torch

        from modelexport.distributed import collectives
        from modelexport.quantization.kernels.searching import sum_in_halves

        whole = torch.zeros(count, *table.shape[1:], dtype=torch.float64)
        whole[rows[0] : rows[1]] = table
        if self.world > 1:
            collectives.all_reduce(whole, op=collectives.reduce_op.SUM)  # each element is of one rank: exact
        return sum_in_halves(whole)

    def broadcast(self, value: Tensor, source: int) -> Tensor:
        """Writes ``value`` of rank ``source`` into that of the others, and returns it."""
        if self.world > 1:
            from modelexport.distributed import collectives

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
    linears: list[CalibratedLinear]
    columns: Tensor | None
    exact: bool
    features: int


class LayerGradients(ABC):
    """A layer as a function of its weights, and how far its outputs are from what they should be.

    Attributes:
        batches: how many there are of the samples.
        batch_samples: samples of each.
    """

    batches: int
    batch_samples: int

    @abstractmethod
    def at(self, values: Callable[[str], Tensor], numbers: Sequence[int]) -> tuple[float, Mapping[str, Tensor]]:
        """Returns the sum of the squared distances over some batches, and its gradients. All ranks call it together.

        Args:
            values: called with each linear's name, for its weight's rows of this rank: float32 ``[rows, in_features]``.
            numbers: of the batches.

        Returns:
            The distance, and linear -> gradient, of these rows, of those that the samples came to. The same numbers,
            whatever the number of ranks.
        """

    @abstractmethod
    def distance(self, values: Callable[[str], Tensor], numbers: Sequence[int]) -> float:
        """Returns the first of what :meth:`at` does, in a third of the time."""


class Algorithm(ABC):
    """Base of all; a module of this package, or of a plugin, has one, as ``ALGORITHM``.

    Attributes:
        name: as ``--algorithm`` has it.
        description: one line for people.
        kind: when its turn comes.
        Settings: a frozen dataclass whose fields are made by :func:`modelexport.settings.setting`, each with a default
            and a type that a recipe can hold (``str``, ``int``, ``float``, ``bool``), and whose ``__post_init__``
            raises a UsageError for values that cannot be. Each field is a flag and a recipe's key that begins with the
            algorithm's name: ``--gptq-damping``, ``gptq_damping``.
        wants: the statistics of the linears' inputs that it needs.
        needs_samples: whether samples run through the model for it.
        observer: how number formats choose scales under it, see :class:`NumberFormat`.
        compensates: whether it makes the error of a linear's outputs small at the cost of the weights' own.
        uses_grid: whether it rounds by itself to what ``NumberFormat.grid`` says can be stored.
        learns: whether it rounds by the gradients of a whole layer: :meth:`Rounding.learn` is called in place of
            :meth:`Rounding.quantise`, and each rank has all of the layer's weights.
        followed_by: the algorithm that rounds, where a recipe names this one that folds and none that rounds; "": rtn.
        in_words: the end of "quantised to int4, ...", where it is not "by" and its name.
    """

    name: ClassVar[str]
    description: ClassVar[str]
    kind: ClassVar[Kind]
    Settings: ClassVar[type[Any]] = NoSettings
    wants: ClassVar[frozenset[Want]] = frozenset()
    needs_samples: ClassVar[bool] = True
    observer: ClassVar[str] = "amax"
    compensates: ClassVar[bool] = False
    uses_grid: ClassVar[bool] = False
    followed_by: ClassVar[str] = ""
    in_words: ClassVar[str] = ""
    learns: ClassVar[bool] = False

    def __init__(self, settings: Any = None, ranks: RankGroup | None = None, *, seed: int = 0) -> None:
        """
        Args:
            settings: an instance of ``Settings``; None: the defaults.
            ranks: those that share the work; None: all of this job.
            seed: of what is random; ``--calib-seed``.
        """
        self.settings = self.Settings() if settings is None else settings
        self.wants = self.wanted(self.settings)  # type: ignore[misc]
        self.ranks = RankGroup() if ranks is None else ranks
        self.seed = seed

    @classmethod
    def wanted(cls, settings: Any) -> frozenset[Want]:
        """Returns the statistics of the linears' inputs that it needs with these settings."""
        return cls.wants

    @classmethod
    def refusal(cls, number_format: NumberFormat) -> str | None:
        """Returns why it cannot work with a number format; None where it can."""
        missing = number_format.without_grid if cls.uses_grid and number_format.quantised else ()
        if not missing:
            return None
        return (
            f"{cls.name} rounds to the values that a number format's grid has, and {number_format.name} "
            f"({type(number_format).__module__}) does not define {' and '.join(missing)}"
        )

    @classmethod
    def device_bytes(cls, rows: int, columns: int, rows_at_once: int | None, settings: Any) -> int:
        """Returns the bytes that it takes at most while it works on a linear, beside weight and statistics: for a bound
        on the memory of a device. 0 where that is no more than rounding the weight to nearest takes.

        Args:
            rows, columns: of the weight on this rank.
            rows_at_once: see :class:`Rounding`.
            settings: an instance of ``Settings``.
        """
        return 0


class Folding(Algorithm):
    """Moves scales from activations into weights."""

    kind: ClassVar[Kind] = "fold"

    @abstractmethod
    def scales(self, fold: Fold) -> Tensor | None:
        """Returns the divisors of the source's outputs: float32 ``[features]``, positive; None for nothing.

        The same on all ranks, which call it together. Powers of two where ``fold.exact``.
        """


class Rounding(Algorithm):
    """Rounds weights.

    Attributes:
        notes: linear -> what was out of the ordinary.
        rows_at_once: rows of a weight to work on at a time on a device whose memory is short, a multiple of
            :data:`~modelexport.quantization.calibration.cut.ROWS`; None for as many as are quickest.
    """

    kind: ClassVar[Kind] = "round"

    def __init__(self, settings: Any = None, ranks: RankGroup | None = None, *, seed: int = 0) -> None:
        super().__init__(settings, ranks, seed=seed)
        self.rows_at_once: int | None = None
        self.notes: dict[str, str] = {}

    def learn(self, linears: Sequence[CalibratedLinear], layer: LayerGradients) -> Mapping[str, dict[str, Tensor]]:
        """Returns what :meth:`quantise` does, for all quantised linears of a layer at once, where ``learns``."""
        raise NotImplementedError(f"{self.name} follows no gradients")

    def quantise(self, linears: Sequence[CalibratedLinear]) -> Mapping[str, dict[str, Tensor]]:
        """Returns the native tensors of each linear's rows on this rank: name -> suffix -> tensor.

        Rounds to nearest, unless a subclass does otherwise; called only for algorithms that need samples.

        Args:
            linears: all that are given the same (one ``inputs`` object), quantised ones only; ranks call it together,
                also those that have no rows of one (what they return for that is not looked at).

        Raises:
            CheckpointError: a weight holds NaN or Inf.
        """
        return {linear.name: linear.rounded() for linear in linears}
