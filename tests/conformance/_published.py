"""Tiny models with the config.json keys, and in the layout, that their publishers chose and transformers does not save.

transformers saves what its own classes read. Engines also read keys of the publishers' files, and do not load a model
without them. Data, and one function that adds them to a tiny checkpoint.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from tests.helpers.tiny_models import tiny_checkpoint

_CORRECTED = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
_LFM2 = {
    "block_auto_adjust_ff_dim": False,
    "block_dim": 128,
    "block_ff_dim": 256,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 1,
    "conv_dim": 128,
}

# model type -> keys of config.json, those of a part of the model as a dict
KEYS: dict[str, dict[str, Any]] = {
    "afmoe": {"score_func": "sigmoid", "route_norm": True, "route_scale": 1.0},
    "deepseek_v3": _CORRECTED,
    "deepseek_v32": _CORRECTED,
    "glm4_moe": {"head_dim": 32},
    "glm4_moe_lite": {"first_k_dense_replace": 1, **_CORRECTED},
    "glm4v_moe": {"text_config": {"head_dim": 32, "use_qk_norm": False}},
    "glm_moe_dsa": _CORRECTED,
    "hy_v3": {"first_k_dense_replace": 1, "expert_hidden_dim": 128},
    "lfm2": _LFM2,
    "longcat_flash": {"mla_scale_q_lora": True, "mla_scale_kv_lora": True, "zero_expert_type": "identity"},
    "minimax_m2": {"rotary_dim": 16, "scoring_func": "sigmoid", "use_routing_bias": True},
    "qwen3_vl_moe": {"text_config": {"norm_topk_prob": True}},
}


# model type -> pattern of the tensors whose last two dims are published in the other order
SWAPPED = {"qwen3_vl_moe": re.compile(r"\.mlp\.experts\.")}


def published_checkpoint(model_type: str, directory: Path) -> Path:
    """A copy of the tiny checkpoint of that type in ``directory``, with its publishers' keys; returns ``directory``."""
    shutil.copytree(tiny_checkpoint(model_type), directory)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    for key, value in KEYS.get(model_type, {}).items():
        config[key] = {**config[key], **value} if isinstance(value, dict) else value
    path.write_text(json.dumps(config, indent=2))
    if model_type in SWAPPED:
        from safetensors.torch import load_file, save_file

        weights = directory / "model.safetensors"
        tensors = {
            name: tensor.transpose(-1, -2).contiguous() if SWAPPED[model_type].search(name) else tensor
            for name, tensor in load_file(weights).items()
        }
        save_file(tensors, weights, metadata={"format": "pt"})
    return directory
