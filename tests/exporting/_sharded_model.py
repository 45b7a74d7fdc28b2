"""One rank that holds a part of a model, as DTensors, and exports it; run by test_in_memory.py.

usage: python -m tests.exporting._sharded_model SOURCE OUT HOW SETTINGS, with torchrun's variables
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import modelexport

PLAN = {
    **dict.fromkeys(("self_attn.q_proj", "mlp.gate_proj", "mlp.up_proj"), ColwiseParallel()),
    **dict.fromkeys(("self_attn.o_proj", "mlp.down_proj"), RowwiseParallel()),
}


def sharded(model: Any, how: str) -> Any:
    """The model with parts of its tensors on each rank: by FSDP2, or on a mesh of two dims. (transformers' own way,
    "auto", is taken as a model is loaded.)"""
    world = distributed.get_world_size()
    layers = getattr(model.model, "language_model", model.model).layers
    if how == "fsdp":
        mesh = init_device_mesh("cpu", (world,))
        for module in (*layers, model):
            fully_shard(module, mesh=mesh)
        return model
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("data", "tensor"))
    for layer in layers:
        parallelize_module(layer, mesh["tensor"], PLAN)
        fully_shard(layer, mesh=mesh["data"])
    return model


def plain(model: Any, settings: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """This rank's parts of the tensors, and the settings with the plan by which they were cut."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    dims = {"*.q_proj.weight": "colwise", "*.up_proj.weight": 0, "*.down_proj.weight": "rowwise"}
    dims.update(settings.pop("more", {}))
    held = {}
    for name, tensor in model.state_dict().items():
        dim = next((d for pattern, d in dims.items() if pattern.strip("*") in name), None)
        number = {"colwise": 0, "rowwise": 1}.get(dim, dim)
        held[name] = tensor if number is None else tensor.chunk(world, number)[rank].clone()
    held.pop("lm_head.weight") if model.config.tie_word_embeddings else None
    return held, {
        **settings,
        "config": model.config.to_dict() | {"architectures": [type(model).__name__]},
        "plan": dims,
    }


def main() -> None:
    source, out, how, settings = sys.argv[1:]
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    [architecture] = json.loads(Path(source, "config.json").read_text())["architectures"]
    kind = getattr(transformers, architecture)
    given: dict[str, Any] = {}
    if how == "auto":
        model = kind.from_pretrained(source, dtype=torch.bfloat16, tp_plan="auto")
    elif how == "plain":
        model, given = plain(kind.from_pretrained(source, dtype=torch.bfloat16), json.loads(settings))
        settings = "{}"
    else:
        model = sharded(kind.from_pretrained(source, dtype=torch.bfloat16), how)
    if how != "plain":
        assert sum(isinstance(tensor, DTensor) for tensor in model.state_dict().values()) >= 10
    try:
        if settings.startswith("quantise "):
            tensors = dict(modelexport.quantise(model=model, **json.loads(settings.removeprefix("quantise "))))
            save_file(tensors, f"{out}-{distributed.get_rank()}.safetensors")
        else:
            tp = distributed.get_world_size()
            modelexport.export(model=model, tp=tp, out=out, quiet=True, **given, **json.loads(settings))
    except modelexport.UsageError as error:
        print(f"REFUSED {error}")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
