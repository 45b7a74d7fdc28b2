"""The errors of linears' outputs after quantisation, measured on some of the tokens that came to them.

``|| Q(x) Q(W)^T - x W^T ||^2 / || x W^T ||^2``, over the tokens and all outputs, with activations rounded where the
number format does. Rows are multiplied in chunks of a fixed size and added in their order, so that the figure is the
same on any number of ranks. Of a large weight some chunks, spread over it, are enough where values are made for the
figure alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from modelexport.distributed import collectives
from modelexport.quantization import kernels
from modelexport.quantization.algorithms.base import CalibratedLinear
from modelexport.quantization.calibration.cut import ROWS
from modelexport.quantization.calibration.statistics import thinned
from modelexport.quantization.formats.base import NumberFormat
from modelexport.quantization.kernels.searching import sum_in_halves

_EACH, _MANY = 4, 16
"""Of so many chunks one is looked at, of weights with at least so many."""


def some_rows(linear: CalibratedLinear) -> Tensor | None:
    """Returns the rows of this rank by which a weight's error can be told, int64; None: all, of weights with few rows
    or whose scales depend on others than a chunk's."""
    assert linear.number_format is not None
    if linear.shape[0] < _MANY * ROWS or linear.number_format.scale_granularity != "block":
        return None
    start, stop = linear.rows
    first = -(-start // (_EACH * ROWS)) * _EACH * ROWS
    chunks = [torch.arange(at, min(at + ROWS, stop)) for at in range(first, stop, _EACH * ROWS)]
    return torch.cat([torch.arange(0), *chunks]) - start


@dataclass
class OutputErrors:
    """The errors of a layer's linears; every rank adds its rows, and :meth:`ratios` adds the ranks'.

    Attributes:
        tables: linear -> the squares of the errors and of the outputs, float64 ``[rows, 2]``; the rows; and how many
            the whole weight has.
        parts: linears of which some rows are known.
    """

    tables: dict[str, tuple[Tensor, tuple[int, int], int]] = field(default_factory=dict)
    parts: set[str] = field(default_factory=set)

    def add(
        self,
        linear: CalibratedLinear,
        decoded: Tensor,
        outputs: OutputErrors | None = None,
        *,
        some: Tensor | None = None,
    ) -> None:
        """Note what ``decoded``, the values of this rank's rows after rounding, make of the linear's outputs.

        Args:
            outputs: those that have the squares of the outputs of the same weight; None: they are computed.
            some: the rows that ``decoded`` has, see :func:`some_rows`; None: all.
        """
        assert linear.number_format is not None
        if linear.inputs is None or linear.inputs.sample is None:
            return
        weight = linear.weight if some is None else linear.weight[some.to(linear.weight.device)]
        table = torch.zeros(len(weight), 2, dtype=torch.float64)
        x = thinned(linear.inputs.sample).to(weight.device)
        rounded = linear.number_format.fake_quantise_activations(x, input_tensors(linear.number_format, linear))
        known = None if outputs is None or linear.name in outputs.parts else outputs.tables[linear.name][0]

        def work(part: slice) -> None:
            for start in range(part.start, part.stop, ROWS):
                rows = slice(start, min(part.stop, start + ROWS))
                if rounded is x:
                    table[rows, 0] = _squares((decoded[rows] - weight[rows]) @ x.t())
                if rounded is not x or known is None:
                    right = weight[rows] @ x.t()
                    table[rows, 1] = _squares(right)
                if rounded is not x:
                    table[rows, 0] = _squares(decoded[rows] @ rounded.t() - right)

        if len(weight):
            kernels.split_rows(weight, work, ROWS)
            if known is not None and rounded is x:
                table[:, 1] = known[:, 1]
        if some is not None:
            self.parts.add(linear.name)
            table = torch.zeros(len(linear.weight), 2, dtype=torch.float64).index_copy_(0, some, table)
        self.tables[linear.name] = (table, linear.rows, linear.shape[0])

    def ratios(self) -> dict[str, float]:
        """Linear -> error, as a part of the output's own square. All ranks call it together, with the same linears."""
        if not self.tables:
            return {}
        whole = torch.zeros(sum(count for _, _, count in self.tables.values()), 2, dtype=torch.float64)
        at, places = 0, {}
        for name, (table, (start, stop), count) in self.tables.items():
            if stop > start:
                whole[at + start : at + stop] = table
            places[name] = slice(at, at + count)
            at += count
        if collectives.get_world_size() > 1:
            collectives.all_reduce(whole, op=collectives.reduce_op.SUM)  # each row is of one rank: exact
        found = {}
        for name, place in places.items():
            wrong, right = sum_in_halves(whole[place]).tolist()
            found[name] = float(f"{wrong / right:.4g}") if right else 0.0
        return found


def _squares(values: Tensor) -> Tensor:
    """The sum of each row's squares: float64 ``[rows]``."""
    return values.double().square_().sum(dim=1).cpu()


def input_tensors(number_format: NumberFormat, linear: CalibratedLinear) -> dict[str, Tensor]:
    """Returns the tensors that a number format stores of a linear's inputs; empty where none."""
    if not number_format.has_static_inputs:
        return {}
    assert linear.input_amax is not None, linear.name
    scale = number_format.input_scale(linear.input_amax)
    specs = number_format.specs(linear.shape, torch.float32)
    return {
        spec.suffix: torch.full(spec.shape, scale, dtype=spec.dtype)
        for spec in specs
        if spec.suffix.startswith("input_")
    }
