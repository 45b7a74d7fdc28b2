"""Run inside an environment that holds vLLM's CPU build, with modelexport on its path: an engine's model is refilled.

usage: python vllm_refill.py EXPORT SOURCE QUANT

Builds vLLM's model for EXPORT, once filled from its files and once from ``quantise()`` of SOURCE's tensors in memory,
and prints a line of JSON: how many parameters it has, and which of them differ.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import vllm_parameters


def main() -> None:
    export, source, quant = sys.argv[1:]
    os.environ.update(vllm_parameters.SETTINGS)
    import torch
    from safetensors.torch import load_file
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model_loader

    import modelexport

    vllm_parameters.replace_kernels()
    vllm_parameters.inspect_here()
    vllm_parameters.ask_no_device()
    vllm_parameters.start_distributed()
    weights = load_file(f"{source}/model.safetensors")
    config = json.loads(Path(source, "config.json").read_text())
    found = []
    for refilled in (False, True):
        model, own = vllm_parameters.built(export)
        for parameter in model.parameters():
            parameter.data.view(torch.uint8).fill_(vllm_parameters.UNTOUCHED)
        files = get_model_loader(own.load_config).get_all_weights(own.model_config, model)
        given = modelexport.quantise(model=weights, config=config, quant=quant)
        with set_current_vllm_config(own):
            model.load_weights(iter(given) if refilled else files)
        found.append({name: value.data.reshape(-1).view(torch.uint8) for name, value in model.named_parameters()})
    unlike = [name for name, value in found[0].items() if not torch.equal(value, found[1][name])]
    print("REFILLED " + json.dumps({"parameters": len(found[0]), "unlike": unlike}), flush=True)


if __name__ == "__main__":
    main()
