"""gptq: columns are rounded one after the other, each such that it makes up for the errors of those before it.

"GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers" (Frantar et al., 2022).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from modelexport.errors import CheckpointError, UsageError
from modelexport.quantization.algorithms.base import CalibratedLinear, RankGroup, Rounding, Want
from modelexport.settings import setting

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from modelexport.quantization.algorithms._gptq_rounding import ColumnPlan
    from modelexport.quantization.calibration.statistics import InputStatistics

__all__ = ["ALGORITHM", "Gptq", "GptqSettings"]


@dataclass(frozen=True, kw_only=True)
class GptqSettings:
    """The settings of :class:`Gptq`."""

    damping: float = setting(
        0.0,
        "added to the Hessian's diagonal, as a part of its geometric mean; 0: twice the input features over the tokens",
        metavar="D",
    )
    block_size: int = setting(128, "columns whose errors are handed on together", metavar="N")
    act_order: bool = setting(True, "columns in the order of their inputs' energy")
    asymmetry: float = setting(
        0.0,
        "share of the errors of earlier layers that a linear makes up for; 0.5 is best, and takes longer",
        metavar="A",
    )

    def __post_init__(self) -> None:
        if not 0 <= self.damping < 1:
            raise UsageError(
                f"--gptq-damping {self.damping:g}: a number below 1 is needed, e.g. --gptq-damping 0.01; 0 for as much "
                "as the tokens want"
            )
        if not 0 <= self.asymmetry <= 1:
            raise UsageError(
                f"--gptq-asymmetry {self.asymmetry:g}: a number from 0 to 1 is needed, e.g. --gptq-asymmetry 0.5"
            )
        if self.block_size < 1:
            raise UsageError(f"--gptq-block-size {self.block_size}: at least 1 is needed, e.g. --gptq-block-size 128")


_TIMES = 2.0
"""Of the input features over the tokens: the damping."""


class Gptq(Rounding):
    """Rounding that minimises the squared error of a linear's output on calibration samples, column by column.

    With H the sum of x x^T over the inputs, row w of a weight rounded to q makes the error (w - q) H (w - q)^T. Let
    H = L L^T, L lower triangular. From the last column c to the first, q[c] is what the grid of the number format has
    nearest to ``w[c] + (sum over p > c of L[p, c] (w[p] - q[p])) / L[c, c]``: that is GPTQ's step without an inverse,
    also known as Babai's nearest plane. Columns of which the inputs are all zero are rounded to nearest by it.

    Scales are the number format's own, searched for with observer "mse", and stay: a column keeps its group's, in
    whatever order columns are rounded. The blocks of llama.cpp are fitted with H's diagonal: those that have a minimum
    have no level at 0 otherwise, which the small weights of large inputs need (the demo model made hard, q4_k_m: 0.0221
    for 1.756; the others are as they were). Mean KL to the demo model, 32 windows of 256 held-out tokens, after
    64 samples of 256 tokens:

    ====================  =======  =======  =======
    number format         nearest  "mse"    gptq
    ====================  =======  =======  =======
    int4, groups of 128   0.0523   0.0449   0.0229
    int4, groups of 32    0.0384   0.0324   0.0177
    int4, whole rows      0.0617   0.0502   0.0253
    int4-asym             0.0438   0.0387   0.0198
    int3, groups of 128   0.2590   0.1829   0.0952
    nvfp4-wo              0.0384   0.0282   0.0156
    ====================  =======  =======  =======

    Of int4 in groups of 128, scales by the largest magnitude give 0.0266, columns in their own order 0.0240, 32 samples
    0.0230 and 128 samples 0.0224.

    What is damped is H + d g I, g being the geometric mean of H's diagonal: with the arithmetic one, outliers' columns
    drown the others (the demo model made hard: 0.0842 for 0.0635). d is twice the features over the tokens, about what
    products of so few tokens differ from those of all text by, as a part of themselves: with 2,048 tokens 0.0262
    (0.0278 with d = 0.01), with 512 0.0346 (0.0646). A part of each element of the diagonal in place of g is as good
    for outliers, and 4 % worse on a small Gemma 3. Not worth their time or their lines
    were scales whose errors are weighted by H's diagonal (0.0229) or by L's (0.0232; what follows is against that),
    scales fitted to the integers by least squares and a second pass (0.0226), and a pass of coordinate descent
    (0.0227).

    Attributes:
        notes: linear -> what was out of the ordinary.
    """

    name: ClassVar[str] = "gptq"
    description: ClassVar[str] = "columns rounded one by one, each making up for the errors of those before (Hessian)"
    Settings = GptqSettings
    wants: ClassVar[frozenset[Want]] = frozenset({"hessian"})
    observer: ClassVar[str] = "mse"
    compensates: ClassVar[bool] = True
    uses_grid: ClassVar[bool] = True

    def __init__(self, settings: Any = None, ranks: RankGroup | None = None, *, seed: int = 0) -> None:
        super().__init__(settings, ranks, seed=seed)
        self._turn = 0

    @classmethod
    def wanted(cls, settings: Any) -> frozenset[Want]:
        """See the base."""
        return cls.wants | {"cross"} if settings.asymmetry else cls.wants

    def quantise(self, linears: Sequence[CalibratedLinear]) -> Mapping[str, dict[str, Tensor]]:
        """See the base. Linears without inputs are rounded to nearest, with a note.

        Raises:
            CheckpointError: also for inputs whose Hessian is not finite.
        """
        from modelexport.quantization.algorithms._gptq_rounding import made_up, round_rows
        from modelexport.quantization.algorithms._tiles import one_thread_an_operation

        inputs = linears[0].inputs
        assert all(linear.inputs is inputs for linear in linears), "linears that are given different inputs"
        rounded: dict[str, dict[str, Tensor]] = {}
        if inputs is None:
            self._note(linears, "no input came to it: rounded to nearest")
            return {linear.name: linear.rounded() for linear in linears}
        with one_thread_an_operation():
            plan = self._plan(inputs, linears)
            cross = None if plan is None else self._cross(inputs, linears[0].weight.device)
            for linear in linears:
                if plan is None or not linear.weight.numel():
                    rounded[linear.name] = linear.rounded()
                    continue
                if cross is not None:
                    weight = made_up(linear.weight, linear.rows[0], plan, cross, self.settings.asymmetry)
                    linear = replace(linear, weight=weight)
                rounded[linear.name] = linear.rounded(products=_fitted_to(linear, plan.squares))
                round_rows(linear, plan, rounded[linear.name], self.rows_at_once)
        return rounded

    def _cross(self, inputs: InputStatistics, device: torch.device) -> Tensor | None:
        """The sum over tokens of what earlier layers have left, on all ranks; None where it is not known."""
        import torch

        if inputs.cross is None:
            return None
        source = (self._turn - 1) % self.ranks.world
        matrix = inputs.cross.whole(source, device)
        if matrix is None:
            matrix = torch.empty(inputs.features, inputs.features, device=device)
        return self.ranks.broadcast(matrix, source)

    @classmethod
    def device_bytes(cls, rows: int, columns: int, rows_at_once: int | None, settings: Any) -> int:
        """See the base: the Hessian, in which its factor is made, the rows that are rounded and their errors."""
        from modelexport.quantization.calibration.cut import ROWS

        # Of the rows: their columns, what these are rounded to, the errors, some of these once more, and the result.
        at_once = rows if rows_at_once is None else min(rows, rows_at_once)
        compared = columns + rows + 4 * ROWS if settings.asymmetry else 0
        return 4 * columns * (columns + rows + 4 * at_once + 2 * ROWS + compared)

    def _note(self, linears: Sequence[CalibratedLinear], note: str) -> None:
        self.notes.update((linear.name, note) for linear in linears)

    def _plan(self, inputs: InputStatistics, linears: Sequence[CalibratedLinear]) -> ColumnPlan | None:
        """Made by one rank, in turn, and given to all; None where the inputs are all zero."""
        import torch

        from modelexport.quantization.algorithms._factor import factorise, permute
        from modelexport.quantization.algorithms._gptq_rounding import ColumnPlan

        assert inputs.hessian is not None, "gptq wants Hessians"
        source, self._turn = self._turn % self.ranks.world, self._turn + 1
        asked = self.settings.damping or _TIMES * inputs.features / max(1, inputs.tokens)
        matrix = inputs.hessian.whole(source, linears[0].weight.device)
        head = torch.zeros(inputs.features + 1)
        if matrix is not None:
            head[1:] = diagonal = matrix.diagonal().clone()
            if bool(torch.isfinite(diagonal).all()) and bool((diagonal > 0).any()):
                permute(matrix, self._order(diagonal))
                head[0] = factorise(matrix, asked)
        self.ranks.broadcast(head, source)
        damping, diagonal = float(head[0]), head[1:]
        if damping < 0 or not bool(torch.isfinite(diagonal).all()):
            names = ", ".join(linear.name for linear in linears)
            raise CheckpointError(
                f"{names}: the Hessian of the inputs on the calibration text is not finite, or has no factor however "
                f"much it is damped: check the model, or export it with another --algorithm"
            )
        if damping == 0:
            self._note(linears, "its inputs are all zero: rounded to nearest")
            return None
        if damping > 2 * asked:
            self._note(linears, f"damping {damping:g}: the Hessian has no factor with {asked:g}")
        if matrix is None:
            matrix = torch.empty(inputs.features, inputs.features, device=linears[0].weight.device)
        self.ranks.broadcast(matrix, source)
        return ColumnPlan(self._order(diagonal), diagonal, matrix, self.settings.block_size)

    def _order(self, diagonal: Tensor) -> Tensor:
        import torch

        from modelexport.quantization.algorithms._factor import ascending

        if self.settings.act_order:
            return ascending(diagonal)
        return torch.arange(diagonal.numel() - 1, -1, -1)


def _fitted_to(linear: CalibratedLinear, squares: Tensor) -> Tensor | None:
    """The products that the scales of a linear's blocks are fitted to, of which each input's own count alone: errors of
    different columns make up for each other. None where scales are not fitted."""
    from modelexport.quantization.algorithms import _products

    number_format = linear.number_format
    assert number_format is not None
    if not number_format.fits_products:
        return None
    return _products.of_squares(squares.to(linear.weight.device), number_format.blocks(linear.shape[1]))


ALGORITHM = Gptq
