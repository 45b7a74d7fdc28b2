"""One rank of transformers' own tensor parallelism: loads checkpoints, saves what it holds of each parameter.

Run under torchrun: ``... -m tests.conformance._transformers_tp_rank OUT NAME=CHECKPOINT ...``; with ``ep-``
before a name its experts are not cut but dealt out.
"""

from __future__ import annotations

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


if __name__ == "__main__":
    main(*sys.argv[1:])
