"""What the rank processes of test_gptq run, and the linears that they share."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from modelexport.distributed import collectives
from modelexport.distributed.launch import report
from modelexport.quantization import formats
from modelexport.quantization.algorithms.base import CalibratedLinear
from modelexport.quantization.algorithms.gptq import Gptq
from modelexport.quantization.calibration.cut import ROWS
from modelexport.quantization.calibration.statistics import Collector, InputStatistics

FEATURES, OUT = 384, (320, 128)


def weights() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(rows, FEATURES, generator=generator) * 0.02 for rows in OUT]


def inputs(features: int = FEATURES, tokens: int = 1024, seed: int = 0) -> Tensor:
    """Correlated, of very different energies, in no order."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, features, generator=generator)
    x = x + 0.7 * x.roll(1, dims=1) + torch.randn(tokens, 1, generator=generator)
    return x * torch.linspace(-4, 2, features).exp2()[torch.randperm(features, generator=generator)]


def statistics(x: Tensor, rank: int = 0, world: int = 1) -> InputStatistics:
    collector = Collector(x.shape[1], ("hessian",), rank, world)
    for batch in x.split(512):
        collector.add(batch)
    return collector.finish()


def digest(tensors: list[Tensor]) -> str:
    return hashlib.sha256(
        b"".join(tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors)
    ).hexdigest()


def dealt(rows: int, rank: int, world: int) -> tuple[int, int]:
    """A rank's rows of so many, in whole chunks."""
    chunks = -(-rows // ROWS)
    return min(rows, chunks * rank // world * ROWS), min(rows, chunks * (rank + 1) // world * ROWS)


def linears(number_format: str, seed: int, rank: int = 0, world: int = 1) -> list[CalibratedLinear]:
    """A rank's rows of two weights that are given the same."""
    given, found = statistics(inputs(seed=seed), rank, world), []
    for number, weight in enumerate(weights()):
        start, stop = dealt(len(weight), rank, world)
        chosen = formats.get(number_format, observer="mse", scale_dtype=torch.bfloat16)
        amax = chosen.amax(weight) if chosen.scale_granularity == "tensor" else None
        rows = weight[start:stop]
        found.append(
            CalibratedLinear(str(number), "role", chosen, rows, (start, stop), tuple(weight.shape), given, amax)
        )
    return found


def values(linear: CalibratedLinear, stored: dict[str, Tensor], start: int, stop: int) -> str:
    """A hash of what some of the whole weight's rows were rounded to."""
    first = linear.rows[0]
    return digest([linear.number_format.dequantise(stored)[start - first : stop - first]])


def quantise(*number_formats: str) -> None:
    """Both weights in each format, the ranks making the factors in turn; reports hashes of the rows."""
    torch.set_num_threads(1)
    rank, world = collectives.get_rank(), collectives.get_world_size()
    gptq, found = Gptq(), []
    for seed, number_format in enumerate(number_formats):
        mine = linears(number_format, seed, rank, world)
        stored = gptq.quantise(mine)
        found += [values(one, stored[one.name], *one.rows) if one.weight.shape[0] else "" for one in mine]
    report({"found": found})
