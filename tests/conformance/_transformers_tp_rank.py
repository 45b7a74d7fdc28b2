"""One rank of transformers' own tensor parallelism: loads checkpoints, saves what it holds of each parameter.

Run under torchrun: ``... -m tests.conformance._transformers_tp_rank OUT NAME=CHECKPOINT ...``; with ``ep-``
before a name its experts are not cut but dealt out. Without torchrun, RANKS comes before OUT: as many processes, with
torchrun's environment, forked where transformers is imported.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor


def load(checkpoint: str, experts: bool) -> Any:
    """The model, this rank's part of it."""
    from transformers import AutoModelForCausalLM

    settings: dict[str, Any] = {"tp_plan": "auto"}
    if experts:
        from transformers.distributed import DistributedConfig

        size = dist.get_world_size()
        settings = {"distributed_config": DistributedConfig(tp_size=size, ep_size=size)}
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, **settings)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone().contiguous()


def main(out: str, *models: str) -> None:
    """Write ``OUT/NAME-rank{N}.safetensors``: name in memory -> this rank's part, and the logits of a few tokens."""
    dist.init_process_group("gloo")
    for model_argument in models:
        name, checkpoint = model_argument.split("=", 1)
        model = load(checkpoint, name.startswith("ep-"))
        held = {parameter: local(value) for parameter, value in model.named_parameters(remove_duplicate=False)}
        with torch.no_grad():
            logits = model(torch.arange(1, 17)[None]).logits
        held["logits"] = logits.full_tensor() if isinstance(logits, DTensor) else logits
        save_file(held, Path(out) / f"{name}-rank{dist.get_rank()}.safetensors")
    dist.barrier()
    dist.destroy_process_group()


def as_rank(rank: int, ranks: int, port: int, *arguments: str) -> None:
    """:func:`main` in torchrun's environment."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ.update({name: str(number) for name, number in numbers.items()}, MASTER_ADDR="127.0.0.1")
    main(*arguments)


def fork(ranks: int, *arguments: str) -> int:
    """Returns 0 once as many ranks have done :func:`main`, 1 where one failed."""
    from transformers import AutoModelForCausalLM  # noqa: F401, before the fork

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=as_rank, args=(rank, ranks, port, *arguments)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return int(any(process.exitcode for process in processes))


if __name__ == "__main__":
    if "RANK" in os.environ:
        main(*sys.argv[1:])
    else:
        sys.exit(fork(int(sys.argv[1]), *sys.argv[2:]))
