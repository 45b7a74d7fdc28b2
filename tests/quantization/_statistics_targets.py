"""What the rank processes of test_statistics run."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from modelexport.distributed import collectives
from modelexport.distributed.launch import report
from modelexport.quantization.calibration.statistics import Collector

WANTS = ("amax", "mean", "sample", "histogram", "hessian")


def batches(features: int, tokens: tuple[int, ...] = (512, 0, 512, 300), seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scale = torch.linspace(-6, 3, features).exp2()
    return [torch.randn(count, features, generator=generator) * scale for count in tokens]


def digest(*tensors: Tensor) -> str:
    return hashlib.sha256(b"".join(tensor.contiguous().numpy().tobytes() for tensor in tensors)).hexdigest()


def gather(widths: tuple[int, ...]) -> None:
    """Each Hessian whole on one rank after the other; reports the hashes of what each holds."""
    torch.set_num_threads(1)
    rank, world = collectives.get_rank(), collectives.get_world_size()
    for number, features in enumerate(widths):
        collector = Collector(features, WANTS, rank, world)
        for batch in batches(features):
            collector.add(batch)
        found = collector.finish()
        whole = found.hessian.whole(number % world)
        assert (whole is not None) == (rank == number % world)
        report(
            {
                "features": features,
                "panels": sorted(found.hessian.panels),
                "small": digest(found.amax, found.mean, found.sample, found.histogram),
                "whole": None if whole is None else digest(whole),
            }
        )
