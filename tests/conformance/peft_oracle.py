"""Run inside an environment that holds PEFT: adapters with random numbers, and the weights of PEFT's own merge.

usage: python peft_oracle.py MODEL OUT

For each case below: OUT/CASE has the adapters (several where the case has several), and OUT/CASE.safetensors the
weights that PEFT's ``merge_and_unload`` gives in float32, by the names of the model in memory.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASES: dict[str, list[dict[str, Any]]] = {
    "lora": [{"target_modules": ALL, "r": 4, "lora_alpha": 12}],
    "rslora": [{"target_modules": ALL, "r": 4, "lora_alpha": 6, "use_rslora": True}],
    "dora": [{"target_modules": ALL, "r": 4, "lora_alpha": 8, "use_dora": True}],
    "saved": [{"target_modules": ["q_proj"], "r": 2, "modules_to_save": ["norm", "lm_head"]}],
    "patterns": [
        {
            "target_modules": ALL,
            "r": 4,
            "lora_alpha": 8,
            "rank_pattern": {"down_proj": 2, r"layers\.0\.self_attn\.q_proj": 8},
            "alpha_pattern": {"up_proj": 3},
        }
    ],
    "embedding": [{"target_modules": ["embed_tokens", "lm_head", "up_proj"], "r": 4}],
    "bias": [{"target_modules": ["q_proj", "o_proj"], "r": 4, "lora_bias": True, "bias": "lora_only"}],
    "several": [
        {"target_modules": ALL, "r": 4},
        {"target_modules": ["q_proj", "down_proj"], "r": 2, "use_rslora": True},
    ],
}
WEIGHTS = (0.7, -0.3)


def main() -> None:
    source, out = map(Path, sys.argv[1:])
    for case, configs in CASES.items():
        torch.manual_seed(len(case))
        base = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        names = [f"adapter{number}" for number in range(len(configs))]
        model = get_peft_model(base, LoraConfig(**configs[0]), adapter_name=names[0])
        for name, config in zip(names[1:], configs[1:], strict=True):
            model.add_adapter(name, LoraConfig(**config))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_magnitude" in name:
                    parameter.mul_(1 + 0.1 * torch.rand_like(parameter))
                elif "lora_" in name or "modules_to_save" in name:
                    parameter.add_(0.05 * torch.randn_like(parameter))
        model.save_pretrained(out / case)
        if len(names) > 1:
            model.base_model.set_adapter(names)
            for weight, name in zip(WEIGHTS, names, strict=True):
                scale(model, name, weight)
            merged = model.merge_and_unload(adapter_names=names)
        else:
            merged = model.merge_and_unload()
        tensors = {name: value.contiguous().clone() for name, value in merged.state_dict().items()}
        save_file(tensors, out / f"{case}.safetensors")
    print(json.dumps(list(CASES)))


def scale(model: Any, adapter: str, weight: float) -> None:
    """Multiplies what an adapter adds."""
    for module in model.modules():
        scaling = getattr(module, "scaling", None)  # of an attention a number
        if isinstance(scaling, dict) and adapter in scaling:
            scaling[adapter] *= weight


if __name__ == "__main__":
    main()
