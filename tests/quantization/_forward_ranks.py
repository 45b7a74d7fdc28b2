"""What the ranks of the tests of the calibration's forward pass run. Each target returns something JSON can hold."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelexport.checkpoints.safetensors.file import Reader, open_checkpoint
from modelexport.distributed import collectives
from modelexport.distributed.launch import MultiprocessConfig, launch_subprocesses, report
from modelexport.exporting.calibrated.forward import forward_cut
from modelexport.models.architecture import family_of, read_dimensions
from modelexport.quantization.calibration import exchange as calibration_exchange
from modelexport.quantization.calibration.cut import ForwardShard
from modelexport.quantization.calibration.layers import LayerRunner, Observed
from modelexport.quantization.calibration.statistics import InputStatistics

WANTS = frozenset({"amax", "mean", "sample", "histogram", "hessian"})


def forward_reader(read: Callable[[str], Tensor]) -> Callable[[str, ForwardShard], Tensor]:
    """A rank's part of the tensors that ``read`` gives whole."""

    def part(name: str, share: ForwardShard) -> Tensor:
        whole = read(name)
        if share.dim is None:
            return whole
        return torch.cat([whole.narrow(share.dim, start, stop - start) for start, stop in share.spans], share.dim)

    return part


def digest(*tensors: Tensor | None) -> str:
    """Of the bits of some tensors."""
    found = hashlib.sha256()
    for tensor in tensors:
        if tensor is not None:
            found.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def of_statistics(found: InputStatistics) -> str:
    """Of all of them; all ranks call it together."""
    hessian = found.hessian.whole(0) if found.hessian is not None else None
    return digest(found.amax, found.mean, found.sample, found.histogram, hessian)


def rounded(x: Tensor) -> Tensor:
    """As int8 by token: depends on the whole of each."""
    scale = x.abs().amax(dim=-1, keepdim=True) / 127
    return (x / scale).round() * scale


def run_all(directories: list[str], all_experts: bool = False, one_host: bool = True) -> list[dict[str, Any]]:
    """:func:`run_through` of several models; as on several hosts, if asked."""
    if not one_host:
        setattr(calibration_exchange, "host_identity", lambda: f"host {collectives.get_rank()}")  # noqa: B010
    return [run_through(directory, all_experts=all_experts) for directory in directories]


def run_through(directory: str, samples: int = 5, length: int = 120, *, all_experts: bool = False) -> dict[str, Any]:
    """Digests of the hidden states after every layer, and of all statistics, of this rank."""
    found: dict[str, Any] = {}
    with opened(directory, samples, length) as runner, runner:
        for index in range(len(runner.layers)):
            with runner.filled(index) as layer:
                observed = runner.observe(layer, WANTS, all_experts=all_experts)
                assert set(observed.tokens) == set(layer.linears)
                found |= _of_observed(observed, index)
                runner.advance(layer, dict.fromkeys(layer.linears[::2], rounded) if index == 1 else {})
            found[f"hidden {index}"] = digest(*runner.hidden)
        found["head"] = runner.head_input()
    return found


@contextmanager
def opened(
    checkpoint_directory: str | Path,
    samples: int = 5,
    length: int = 120,
    reads: list[tuple[str, ForwardShard]] | None = None,
    **settings: Any,
) -> Iterator[LayerRunner]:
    """A runner of a checkpoint with this rank's cut, not entered yet. What it reads is noted in ``reads``."""
    checkpoint = open_checkpoint(Path(checkpoint_directory))
    assert checkpoint.config is not None
    family = family_of(checkpoint.config)
    dimensions = read_dimensions(checkpoint.config, family)
    cut = forward_cut(family, dimensions, collectives.get_rank(), collectives.get_world_size())
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(dimensions.vocab, (samples, length), generator=generator)
    with Reader(checkpoint) as reader:
        part = forward_reader(lambda name: reader.read(checkpoint.infos[name]))

        def read(name: str, share: ForwardShard) -> Tensor:
            if reads is not None:
                reads.append((name, share))
            return part(name, share)

        yield LayerRunner(checkpoint.config, checkpoint.infos, read, tokens, **{"cut": cut, **settings})


def _of_observed(observed: Observed, index: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    told: dict[int, str] = {}
    for name, statistics in observed.inputs.items():
        if id(statistics) not in told:
            told[id(statistics)] = of_statistics(statistics)
        found[name] = [told[id(statistics)], observed.tokens[name]]
    for name, cached in (("keys", observed.keys), ("values", observed.values)):
        if cached:
            found[f"{name} {index}"] = [of_statistics(each) for each in cached]
    return found


def reporting(target: Callable[..., Any], *args: Any) -> None:
    """A rank: tells the launcher what ``target`` returns."""
    report({"kind": "result", "value": target(*args)})


def on_ranks(target: Callable[..., Any], world: int, *args: Any, models: Sequence[str] = ("llama",)) -> list[Any]:
    """``target(*args)`` on ``world`` ranks, which have transformers' modules of these models; their results by rank."""
    found: dict[int, Any] = {}

    def keep(rank: int, event: dict[str, Any]) -> None:
        if event.get("kind") == "result":
            found[rank] = event["value"]

    preload = (
        "torch",
        "safetensors",
        "accelerate",
        *(f"transformers.models.{name}.modeling_{name}" for name in models),
    )
    config = MultiprocessConfig(world_size=world, on_event=keep, preload=preload, timeout=240)
    launch_subprocesses(reporting, config, None, 0, target, *args)
    return [found[rank] for rank in range(world)]
