"""Plain tensors of which each rank has a part, as DTensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from modelexport.distributed import ranks
from modelexport.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["as_sharded"]


def as_sharded(tensors: Mapping[str, Tensor], dims: Mapping[str, int]) -> dict[str, Tensor]:
    """The same tensors, those that are cut as DTensors over all ranks of the process group. Collective.

    Args:
        tensors: name -> this rank's part, or the whole. The same names on all ranks.
        dims: name of a tensor that is cut -> along which dim. Ranks hold parts of equal size in their order; where that
            does not come out even, the last ones less, as ``torch.chunk`` has it.

    Raises:
        UsageError: there is no process group, or the parts of a tensor do not fit.
    """
    import torch
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    if not ranks.is_distributed():
        raise UsageError("plan=... says how ranks have cut a model, and this process is none: leave it out")
    world, rank = distributed.get_world_size(), distributed.get_rank()
    shapes: list[dict[str, tuple[int, ...]]] = [{} for _ in range(world)]
    distributed.all_gather_object(shapes, {name: tuple(tensors[name].shape) for name in dims})
    mesh = init_device_mesh("cpu", (world,))
    found = dict(tensors)
    for name, dim in dims.items():
        parts = [each.get(name, ()) for each in shapes]
        total = sum(part[dim] for part in parts)
        sizes = [len(chunk) for chunk in torch.arange(total).chunk(world)]
        sizes += [0] * (world - len(sizes))
        others = {part[:dim] + part[dim + 1 :] for part in parts}
        if len(others) != 1 or [part[dim] for part in parts] != sizes:
            raise UsageError(
                f"plan: {name} is cut along dim {dim}, of which rank {rank} has {parts[rank][dim]} of {total}: ranks "
                f"hold {sizes}, as torch.chunk cuts, and agree in all other dims; their shapes are {parts}"
            )
        shape = torch.Size((*parts[0][:dim], total, *parts[0][dim + 1 :]))
        stride = torch.empty(shape, device="meta").stride()
        local = tensors[name].detach().cpu().contiguous()
        found[name] = DTensor.from_local(local, mesh, [Shard(dim)], run_check=False, shape=shape, stride=stride)
    return found
