"""autoround: weights are rounded up or down as signed gradients of their layer's output error say.

"Optimize Weight Rounding via Signed Gradient Descent for the Quantization of LLMs" (Cheng et al., 2023), known as
SignRound, and by the name of the authors' program.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from modelexport.errors import UsageError
from modelexport.quantization.algorithms.base import CalibratedLinear, LayerGradients, Rounding, Want
from modelexport.settings import setting

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ALGORITHM", "AutoRound", "AutoRoundSettings"]

_CHECKS = 5
"""How often it is looked how far the outputs are from their aims, on the way."""
_CHECKED = 16
"""Batches of samples by which that is judged, spread over all."""


@dataclass(frozen=True, kw_only=True)
class AutoRoundSettings:
    """The settings of :class:`AutoRound`."""

    steps: int = setting(200, "steps down the gradients of each layer", metavar="N")
    batch_size: int = setting(2, "samples of each step", metavar="N")
    rate: float = setting(
        0.0, "the first step's size, in distances between two numbers (default: 1 / steps)", metavar="R"
    )

    def __post_init__(self) -> None:
        for name, value in (("steps", self.steps), ("batch-size", self.batch_size)):
            if value < 1:
                raise UsageError(f"--autoround-{name} {value}: at least 1 is needed")
        if not 0 <= self.rate <= 1:
            raise UsageError(
                f"--autoround-rate {self.rate:g}: a number from 0 to 1 is needed, e.g. --autoround-rate 0.005"
            )


class AutoRound(Rounding):
    """Rounding that minimises the squared error of a layer's outputs, by signed gradient descent.

    A weight w is rounded as w + v d, d being the distance between the numbers that the format has around w, and v from
    -0.5 to 0.5. From 0 on, each step moves every v by the same amount, against the sign of the gradient that the
    squared error of the decoder layer's outputs has on some samples; steps grow smaller, to 0. The outputs are to be
    those of the unrounded model, on what comes out of the rounded layers before. Rounding counts as having the gradient
    1, for weights within the grid and for activations. After each fifth of the steps the error over a part of the
    samples is taken, and the weights of the least are those that count: where a few inputs are far larger than the
    others, as in large models, it falls to a half of what rounding to nearest has, and rises beyond that once offsets
    of near 0.5 round the weights of these inputs away.

    Scales are the number format's own, searched for with observer "mse", and stay. Mean KL to the demo model, int4 in
    groups of 128, 64 windows of 256 held-out tokens, after 64 samples of 256 tokens: 0.0189 (to nearest 0.0530, gptq
    0.0234; auto-round 0.16, which learns scales, too, 0.0189). Steps of 8 samples, as auto-round takes, gave 0.0191 in
    three times the time. By these, on 32 windows (0.0189): scales that are learnt along with v 0.0195, beginning with
    gptq's weights 0.0191 (0.0203 after 60 steps), and v from -1 to 1 0.0198.
    """

    name: ClassVar[str] = "autoround"
    description: ClassVar[str] = "rounded up or down as signed gradients of each layer's output error say; takes long"
    Settings = AutoRoundSettings
    wants: ClassVar[frozenset[Want]] = frozenset()
    observer: ClassVar[str] = "mse"
    compensates: ClassVar[bool] = True
    uses_grid: ClassVar[bool] = True
    learns: ClassVar[bool] = True

    def learn(self, linears: Sequence[CalibratedLinear], layer: LayerGradients) -> Mapping[str, dict[str, Tensor]]:
        """See the base. Linears to which no sample comes are rounded to nearest."""
        learnt = {linear.name: _Offsets(linear) for linear in linears}
        steps, first = self.settings.steps, self.settings.rate or 1 / self.settings.steps
        nearest = least = self._distance(layer, learnt, moved=False)
        for step, numbers in zip(range(steps), self._batches(layer), strict=False):
            _, gradients = layer.at(lambda name: learnt[name].values(), numbers)
            for name, gradient in gradients.items():
                learnt[name].descend(gradient, first * (1 - step / steps))
            if (step + 1) * _CHECKS // steps > step * _CHECKS // steps:
                distance = self._distance(layer, learnt)
                if distance < least:
                    least = distance
                    for each in learnt.values():
                        each.store()
        if least == nearest:
            self.notes.update(dict.fromkeys(learnt, "steps made its layer's outputs no better: rounded to nearest"))
        return {name: each.native for name, each in learnt.items()}

    @staticmethod
    def _distance(layer: LayerGradients, learnt: Mapping[str, _Offsets], *, moved: bool = True) -> float:
        """The squared distance over some batches, always the same; ``moved``: of weights with what is added to them."""
        numbers = range(0, layer.batches, -(-layer.batches // _CHECKED))
        return layer.distance(lambda name: learnt[name].values(moved=moved), numbers)

    def _batches(self, layer: LayerGradients) -> Iterator[list[int]]:
        """Yields the batches of each step: all of them once, in an order drawn anew each time."""
        import torch

        generator = torch.Generator().manual_seed(self.seed)
        count = min(layer.batches, max(1, self.settings.batch_size // layer.batch_samples))
        while True:
            order = torch.randperm(layer.batches, generator=generator).tolist()
            for start in range(0, layer.batches - count + 1, count):
                yield order[start : start + count]


class _Offsets:
    """The offsets that are added to the rows of a weight before they are rounded.

    Attributes:
        native: the native tensors, rounded to nearest until they are stored anew; their scales stay.
        offset: float32 ``[rows, in_features]``, from -0.5 to 0.5, in distances between two numbers of the grid.
    """

    def __init__(self, linear: CalibratedLinear) -> None:
        import torch

        from modelexport.quantization import kernels

        assert linear.number_format is not None
        self._number_format, self._weight = linear.number_format, linear.weight
        self.native = linear.rounded()
        self.offset = torch.zeros(self._weight.shape, device=self._weight.device)  # rows one after the other
        self._grid = self._number_format.grid(self.native)
        # On the CPU in one pass; other devices, and Triton's interpreter, go the way of plain torch.
        self._at_once = self._weight.device.type == "cpu" and kernels.backend().name != "triton"
        grid, zero = self._grid, None if self._grid.zero is None else self._grid.zero.contiguous()
        self._steps = (grid.step.contiguous(), zero, grid.columns, grid.storage, grid.low, grid.high)

    def values(self, *, moved: bool = True) -> Tensor:
        """Returns the values that the rows are rounded to, with what is added to them or without."""
        from modelexport.quantization import kernels

        if not self._at_once or not moved:
            return self._grid.nearest(self._moved() if moved else self._weight)
        values = self._weight.new_empty(self._weight.shape)
        kernels.nearest_moved(self._weight, self.offset, *self._steps, values)
        return values

    def _moved(self) -> Tensor:
        return self._weight + self.offset * self._grid.spacing(self._weight)

    def descend(self, gradient: Tensor, rate: float) -> None:
        """Moves the offsets of what is not beyond the grid, by the signs of the weights' gradients: those of the
        offsets are these, times distances."""
        from modelexport.quantization import kernels

        if self._at_once:
            kernels.descend(self._weight, self.offset, gradient, *self._steps, rate)
            return
        self.offset.sub_(gradient.sign() * self._grid.within(self._moved()), alpha=rate).clamp_(-0.5, 0.5)

    def store(self) -> None:
        """Puts what the rows are rounded to now into the native tensors."""
        self._number_format.store(self._moved(), self.native)


ALGORITHM = AutoRound
