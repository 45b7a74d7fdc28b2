"""Run by an interpreter that has Megatron-core: its own GPTModel saves a checkpoint, or loads one, on CPU.

``python _megatron_core.py save|load CHECKPOINT VALUES CONFIG``: CONFIG is JSON, GPTModel's arguments and ``world``, its
tensor-parallel ranks. ``save`` gives each rank's model random weights and leaves them in ``VALUES.<rank>``; ``load``
loads the checkpoint and leaves each rank's weights in ``VALUES.<rank>``, with a world of one also the logits.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import warnings

import torch

warnings.simplefilter("ignore")
if not torch.cuda.is_available():  # Megatron-core asks for the current device also where it computes on the CPU
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda *_: None


def rank_main(rank: int, mode: str, checkpoint: str, values: str, config: dict, store: str) -> None:
    from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
    from megatron.core.dist_checkpointing.validation import StrictHandling

    world = config["world"]
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    parallel_state.initialize_model_parallel(world)
    model = build(config)
    generator = torch.Generator().manual_seed(rank)
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 1.0, generator=generator)
    if mode == "save":
        os.makedirs(checkpoint, exist_ok=True)
        dist_checkpointing.save(model.sharded_state_dict(), checkpoint)
    else:
        wanted = model.sharded_state_dict(metadata=dist_checkpointing.load_content_metadata(checkpoint))
        found = dist_checkpointing.load(wanted, checkpoint, strict=StrictHandling[config["strict"]])
        model.load_state_dict(found, strict=False)
    state = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    if mode == "load" and world == 1:
        tokens = torch.arange(12).view(1, -1) * 7 % 128
        places = torch.arange(12).view(1, -1)
        mask = torch.ones(12, 12, dtype=torch.bool).triu(1)[None, None]
        tensor_parallel.get_cuda_rng_tracker().fork = lambda *_: contextlib.nullcontext()  # it wants CUDA's generators
        with torch.no_grad():
            state["logits"] = model.eval()(tokens, places, mask)
    torch.save(state, f"{values}.{rank}")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def build(config: dict) -> torch.nn.Module:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    settings = TransformerConfig(
        activation_func=torch.nn.functional.silu,
        gated_linear_unit=True,
        normalization="RMSNorm",
        use_cpu_initialization=True,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        tensor_model_parallel_size=config["world"],
        attention_dropout=0.0,
        hidden_dropout=0.0,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        **config["transformer"],
    )
    spec = get_gpt_layer_local_spec(num_experts=settings.num_moe_experts, normalization="RMSNorm")
    return GPTModel(settings, spec, **config["model"])


def main() -> None:
    mode, checkpoint, values, config = sys.argv[1:]
    parsed = json.loads(config)
    with tempfile.TemporaryDirectory() as directory:
        arguments = (mode, checkpoint, values, parsed, os.path.join(directory, "store"))
        if parsed["world"] == 1:
            rank_main(0, *arguments)
        else:
            torch.multiprocessing.spawn(rank_main, arguments, nprocs=parsed["world"])


if __name__ == "__main__":
    main()
