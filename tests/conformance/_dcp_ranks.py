"""What the ranks of test_dcp_torch run: torch's own sharding, saving and loading. In a module that ranks can import."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.helpers.dcp_models import values_of
from tests.helpers.models import LlamaShape

SHAPE = LlamaShape(hidden=32, heads=4, kv_heads=2, intermediate=24, vocab=37, layers=3)


def placement(name: str) -> Any:
    """Tensor parallelism as torch users write it; norms are replicated."""
    if "norm" in name:
        return Replicate()
    return Shard(1) if name.endswith(("o_proj.weight", "down_proj.weight")) else Shard(0)


def save_tensor_parallel(directory: str) -> None:
    """A tp checkpoint of DTensors, 37 rows of vocabulary over the ranks, with an optimizer's state beside it."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    values = values_of(SHAPE)
    model = {name: distribute_tensor(value, mesh, [placement(name)]) for name, value in values.items()}
    moments = {name: distribute_tensor(value.float(), mesh, [placement(name)]) for name, value in values.items()}
    optim = {"state": {name: {"exp_avg": value, "step": torch.tensor(4.0)} for name, value in moments.items()}}
    torch_dcp.save({"model": model, "optim": optim, "step": 4}, checkpoint_id=directory)


def save_two_dims(directory: str) -> None:
    """Rows over two ranks, columns over two."""
    mesh = init_device_mesh("cpu", (2, 2))
    state = {
        name: distribute_tensor(value, mesh, [Shard(0), Shard(1) if value.dim() > 1 else Replicate()])
        for name, value in values_of(SHAPE).items()
    }
    torch_dcp.save(state, checkpoint_id=directory)


class Tree(torch.nn.Module):
    """Parameters under dotted names, as a model's own modules hold them."""

    def __init__(self, values: dict[str, torch.Tensor]) -> None:
        super().__init__()
        groups: dict[str, dict[str, torch.Tensor]] = {}
        for name, value in values.items():
            first, _, rest = name.partition(".")
            groups.setdefault(first, {})[rest] = value
        for first, inner in groups.items():
            if "" in inner:
                self.register_parameter(first, torch.nn.Parameter(inner[""], requires_grad=False))
            else:
                self.add_module(first, Tree(inner))


def save_fully_sharded(directory: str) -> None:
    """FSDP2 of a module with the model's names; ranks whose share of a tensor is empty included."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = Tree(values_of(SHAPE))
    for layer in model.model.layers.children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    torch_dcp.save({"model": model.state_dict()}, checkpoint_id=directory)


SAVED = {"tensor parallel": save_tensor_parallel, "two dims": save_two_dims, "fully sharded": save_fully_sharded}


def save_all(directory: str) -> None:
    """All of them, by one set of ranks."""
    for name, save in SAVED.items():
        save(f"{directory}/{name}")


def load_sharded(directory: str) -> None:
    """Loads into DTensors, whatever the sharding on disk, and compares with the model."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    values = values_of(SHAPE)
    state = {name: distribute_tensor(torch.zeros_like(v), mesh, [placement(name)]) for name, v in values.items()}
    torch_dcp.load(state, checkpoint_id=directory)
    for name, value in values.items():
        found = state[name]
        assert isinstance(found, DTensor)
        assert torch.equal(found.full_tensor(), value), name
