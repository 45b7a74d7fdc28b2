"""autoround: what is learnt from gradients, on layers of one linear whose gradients are known."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from torch import Tensor

from modelexport.quantization import formats
from modelexport.quantization.algorithms.autoround import AutoRound
from modelexport.quantization.algorithms.base import CalibratedLinear, LayerGradients


class OneLinear(LayerGradients):
    """y = x W^T, on batches of inputs that lie along a few directions."""

    def __init__(self, weight: Tensor, batches: int = 4) -> None:
        generator = torch.Generator().manual_seed(3)
        mixing = torch.randn(8, weight.shape[1], generator=generator)
        self.inputs = [torch.randn(32, 8, generator=generator) @ mixing for _ in range(batches)]
        self.weight, self.batches, self.batch_samples = weight, batches, 2
        self.asked: list[list[int]] = []

    def at(self, values: Callable[[str], Tensor], numbers: Sequence[int]) -> tuple[float, Mapping[str, Tensor]]:
        self.asked.append(list(numbers))
        wrong = values("a") - self.weight
        outputs = [(x @ wrong.t(), x) for x in (self.inputs[number] for number in numbers)]
        gradient = torch.stack([2 * y.t() @ x for y, x in outputs]).sum(0)
        return sum(float(y.square().sum()) for y, _ in outputs), {"a": gradient}

    def distance(self, values: Callable[[str], Tensor], numbers: Sequence[int]) -> float:
        return self.at(values, numbers)[0]

    def error(self, native: dict[str, Tensor], number_format: formats.NumberFormat) -> float:
        distance, _ = self.at(lambda _: number_format.dequantise(native), range(self.batches))
        return distance


def linear(quant: str, name: str = "a") -> CalibratedLinear:
    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(1))
    kind, _, group = quant.partition(":")
    size = int(group) if group else None
    number_format = formats.get(kind, group_size=size, observer="mse", scale_dtype=torch.bfloat16)
    return CalibratedLinear(name, "mlp.up", number_format, weight, (0, 48), (48, 64), None)


@pytest.mark.parametrize("quant", ["int4:32", "int4-asym:32", "int8-wo:32", "nvfp4-wo", "mxfp4-wo", "fp8"])
def test_outputs_are_nearer_than_those_of_rounding_to_nearest(quant: str) -> None:
    given = linear(quant)
    assert given.number_format is not None
    layer = OneLinear(given.weight)
    found = AutoRound(AutoRound.Settings(steps=60)).learn([given], layer)["a"]
    assert layer.error(found, given.number_format) < 0.8 * layer.error(given.rounded(), given.number_format)
    nearest = given.rounded()
    assert {key for key in found if not torch.equal(found[key], nearest[key])} <= {"weight_packed", "weight"}


def test_every_batch_has_its_turn() -> None:
    given = linear("int8-wo:32")
    layer = OneLinear(given.weight, batches=6)
    AutoRound(AutoRound.Settings(steps=6, batch_size=4)).learn([given], layer)
    steps = [numbers for numbers in layer.asked if len(numbers) < 6]  # between them all are asked for the distance
    assert [len(numbers) for numbers in steps] == [2] * 6
    rounds = [[number for asked in part for number in asked] for part in (steps[:3], steps[3:])]
    assert [sorted(each) for each in rounds] == [list(range(6))] * 2
    assert steps[:3] != steps[3:]


def test_what_no_sample_comes_to_is_rounded_to_nearest() -> None:
    given, other = linear("int8-wo:32"), linear("int8-wo:32", "an expert")
    found = AutoRound(AutoRound.Settings(steps=2)).learn([given, other], OneLinear(given.weight))["an expert"]
    assert all(torch.equal(found[key], value) for key, value in other.rounded().items())


def test_steps_that_lead_nowhere_are_taken_back() -> None:
    given = linear("int4:32")
    layer = OneLinear(given.weight)
    rounding = AutoRound(AutoRound.Settings(steps=2, rate=1.0))
    found = rounding.learn([given], layer)["a"]
    assert all(torch.equal(found[key], value) for key, value in given.rounded().items())
    assert "no better" in rounding.notes["a"]


class Scripted(OneLinear):
    """Has distances that are written down, and keeps the weights that each was asked of."""

    def __init__(self, weight: Tensor, distances: Sequence[float]) -> None:
        super().__init__(weight)
        self._distances, self.seen = iter(distances), list[Tensor]()

    def distance(self, values: Callable[[str], Tensor], numbers: Sequence[int]) -> float:
        self.seen.append(values("a").clone())
        return next(self._distances)


def test_the_best_of_the_way_is_what_counts() -> None:
    given = linear("int4:32")
    assert given.number_format is not None
    layer = Scripted(given.weight, [10.0, 7.0, 5.0, 6.0, 8.0, 12.0])
    found = AutoRound(AutoRound.Settings(steps=10, rate=0.1)).learn([given], layer)["a"]
    kept = [torch.equal(given.number_format.dequantise(found), values) for values in layer.seen]
    assert kept == [False, False, True, False, False, False]
