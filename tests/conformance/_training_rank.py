"""What the ranks of test_training_to_serving run: a checkpoint as a training run with torch leaves it."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor


def save_as_training_would(source: str, directory: str) -> None:
    """The model in ``source`` as DTensors over all ranks, columns and rows cut as Megatron-LM cuts them."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {}
    for name, value in load_file(f"{source}/model.safetensors").items():
        row_parallel = name.endswith(("o_proj.weight", "down_proj.weight"))
        cut = Replicate() if value.dim() < 2 else Shard(1) if row_parallel else Shard(0)
        state[name] = distribute_tensor(value, mesh, [cut])
    torch_dcp.save({"model": state, "step": torch.tensor(1000)}, checkpoint_id=directory)
