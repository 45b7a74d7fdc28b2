"""Rotation: the model in other coordinates, in which no feature stands out (QuaRot, Ashkboos et al., 2024).

What layers hand each other (the residual stream) is rotated by one orthogonal matrix R: those that write it multiply
their outputs by R^T, those that read it their inputs by R. A norm without a weight of its own does not change by that,
so norms' weights are first multiplied into the linears that read them. Within attention, each head's values are
rotated by a matrix of their own, which the output projection takes back. Both are wholly in the weights, as what
SpinQuant (Liu et al., 2024) names R1 and R2: engines have nothing to know. The function stays the same, but for the
rounding of what is stored in the model's dtype.

What one linear gives to another (v to o, up to down) is balanced before: each feature is divided by a power of two and
its reader's column multiplied by it, so that both are equally large (as in cross-layer equalisation, Nagel et al.,
2019). A rotation spreads the error of the largest feature over all of a head, also over small ones whose columns are
large; and what lies between up and down cannot be rotated, since an engine would have to take part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from modelexport.quantization.algorithms.base import Algorithm, Kind, RankGroup

if TYPE_CHECKING:
    from torch import Tensor

    from modelexport.quantization.hadamard import Hadamard

__all__ = ["ALGORITHM", "Balance", "Change", "Factors", "Rotation", "Turn", "balanced"]

Range = tuple[int, int]
Factors = tuple["Tensor | None", "Tensor | None"]

_SLAB = 1 << 22  # numbers at a time: what a tensor takes beside its result


@dataclass(frozen=True)
class Turn:
    """A rotation along one dim of a tensor.

    Attributes:
        what: ``residual`` or ``values``: by which of the matrices.
        order: of the matrix; each block of so many features is a vector of its own.
        span: the features that are rotated, a whole number of blocks; others stay.
    """

    what: str
    order: int
    span: Range

    def grown(self, asked: Range) -> Range:
        """The smallest range that contains ``asked`` and whole blocks only."""
        start, stop = asked
        first, last = self.span
        if first < start < last:
            start = first + (start - first) // self.order * self.order
        if first < stop < last:
            stop = first - (first - stop) // self.order * self.order
        return start, stop


@dataclass(frozen=True)
class Balance:
    """Features that are made equally large in the weight that gives them and in those that read them.

    Attributes:
        source: the weight that gives them, as its rows of ``span``.
        norm: by whose weight the columns of that are multiplied, as of a :class:`Change`.
        readers: the weights that read them.
        unit: features of a head; a reader's columns are heads, so many of them for each of the source's as there are
            more columns than features.
    """

    source: str
    span: Range
    norm: str | None
    readers: tuple[str, ...]
    unit: int

    def of_columns(self, values: Tensor, cols: int) -> Tensor:
        """``[features]`` as the columns of a reader have them, ``[cols]``."""
        repeats = cols // len(values)
        return values.view(-1, 1, self.unit).expand(-1, repeats, -1).reshape(cols)


def balanced(given: Tensor, read: Tensor) -> Tensor:
    """Returns the divisors of features: float32 ``[features]``, powers of two, half of them <= 1 and half >= 1.

    Args:
        given, read: the sum of squares of each feature's row, and of the columns that read it, ``[features]``.
    """
    import torch

    mantissa, exponent = torch.frexp(given.double() / read.double())
    usable = (mantissa > 0) & mantissa.isfinite()  # a feature that is always 0, or that nobody reads, stays as it is
    # The fourth root of the ratio, rounded: of log2 = exponent - 0.5 +- 0.5.
    power = (2 * exponent.long() + 3).div(8, rounding_mode="floor")
    if usable.any():
        power = power - power[usable].median()  # what is common to all would only set them off against their siblings
    return torch.ldexp(torch.ones(len(given)), torch.where(usable, power, 0).clamp(-60, 60))


@dataclass(frozen=True)
class Change:
    """The operations that make a tensor of the rotated model of one of the source's.

    Attributes:
        source: the source's tensor.
        shape: of both.
        norm: the norm's weight by which its columns are multiplied first, ``[in_features]``.
        outputs, inputs: the rotation along dim 0, and along dim 1.
        ones: whether it is a norm's weight that others have taken in.
        gives, takes: the balance of features that are its rows, and that are its columns.
    """

    source: str
    shape: tuple[int, ...]
    norm: str | None = None
    outputs: Turn | None = None
    inputs: Turn | None = None
    ones: bool = False
    gives: Balance | None = None
    takes: Balance | None = None


class Rotation(Algorithm):
    """Gives any rectangle of a rotated tensor, always the same bits."""

    name: ClassVar[str] = "rotation"
    description: ClassVar[str] = "Hadamard rotation of the residual stream and of each head's values"
    kind: ClassVar[Kind] = "rotate"

    def __init__(self, settings: Any = None, ranks: RankGroup | None = None, *, seed: int = 0) -> None:
        super().__init__(settings, ranks, seed=seed)
        self._matrices: dict[tuple[str, int], Hadamard] = {}

    def matrix(self, turn: Turn) -> Hadamard:
        """The matrix of a turn: the same for every tensor and on every rank."""
        from modelexport.quantization.hadamard import Hadamard

        key = (turn.what, turn.order)
        if key not in self._matrices:
            self._matrices[key] = Hadamard(turn.order, self.seed, turn.what)
        return self._matrices[key]

    def rectangle(
        self,
        change: Change,
        rows: Range,
        cols: Range,
        read: Callable[[Range, Range], Tensor],
        out: Tensor,
        factors: Factors = (None, None),
    ) -> None:
        """Fill ``out`` (``[rows, cols]``, rounded to its dtype) with a rectangle of the rotated tensor.

        Args:
            change: of a matrix, or of a bias, which is one column.
            read: a rectangle of the source's tensor by its rows and columns, in any floating-point dtype.
            factors: what its rows, and its columns, are multiplied by before: ``[out_features]``, ``[in_features]``.
        """
        units = [1 if turn is None else turn.order for turn in (change.outputs, change.inputs)]
        # Along the dim of the larger blocks everything is needed at once; the other one is worked off slab by slab.
        dim = 0 if units[0] <= units[1] else 1
        asked = [rows, cols]
        across = max(1, asked[1 - dim][1] - asked[1 - dim][0], units[1 - dim])
        step = max(1, _SLAB // across // units[dim]) * units[dim]
        begin, end = asked[dim]
        for start in range(begin, end, step):
            asked[dim] = (start, min(start + step, end))
            part = slice(start - begin, asked[dim][1] - begin)
            slab = self._slab(change, asked[0], asked[1], read, factors)
            (out[part] if dim == 0 else out[:, part]).copy_(slab)

    def _slab(
        self, change: Change, rows: Range, cols: Range, read: Callable[[Range, Range], Tensor], factors: Factors
    ) -> Tensor:
        import torch

        whole = [
            span if turn is None else turn.grown(span) for turn, span in ((change.outputs, rows), (change.inputs, cols))
        ]
        values = read(whole[0], whole[1]).to(torch.float32, copy=True)
        for dim, factor in enumerate(factors):
            if factor is not None:
                part = factor[whole[dim][0] : whole[dim][1]].to(torch.float32)
                values *= part.unsqueeze(1 - dim)
        for dim, turn in ((1, change.inputs), (0, change.outputs)):
            if turn is None:
                continue
            first, last = max(whole[dim][0], turn.span[0]), min(whole[dim][1], turn.span[1])
            if first < last:
                values = self._turned(values, turn, dim, (first - whole[dim][0], last - whole[dim][0]))
        return values[
            rows[0] - whole[0][0] : rows[1] - whole[0][0],
            cols[0] - whole[1][0] : cols[1] - whole[1][0],
        ]

    def _turned(self, values: Tensor, turn: Turn, dim: int, span: Range) -> Tensor:
        part = values.narrow(dim, span[0], span[1] - span[0])
        rotated = self.matrix(turn).rotate(part, dim)
        if part.shape == values.shape:
            return rotated
        part.copy_(rotated)
        return values


ALGORITHM = Rotation
