"""A training run in small: the demo model on FSDP ranks for some steps, saved as torch's distributed checkpoint.

    python -m torch.distributed.run --nproc-per-node 2 recipes/_fsdp_run.py DIR [STEPS]

Nothing of modelexport's is in it but the model: DIR is what a run with FSDP2 leaves (``.metadata`` and a file for each
rank: the model's shards, the optimiser's state, the step). recipes/training_to_serving.py takes it from there.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer

from modelexport.assets import demo_documents, demo_model_path


def train(directory: str, steps: int, *, batch: int = 2, length: int = 64) -> None:
    """Some steps of AdamW on the demo model's calibration text, then the checkpoint; run by every rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=torch.bfloat16)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokenizer = AutoTokenizer.from_pretrained(demo_model_path())
    ids = torch.tensor(tokenizer("\n".join(demo_documents("calibration")[:8]), verbose=False)["input_ids"])
    for step in range(steps):
        start = (step * dist.get_world_size() + dist.get_rank()) * batch * length
        tokens = ids[start : start + batch * length].view(batch, length)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    weights, moments = get_state_dict(model, optimiser)
    save({"model": weights, "optimizer": moments, "step": torch.tensor(steps)}, checkpoint_id=directory)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 3)
    dist.destroy_process_group()
