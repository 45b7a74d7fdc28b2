"""Run in an environment of its own with vLLM: python vllm_configs.py FILE. Imports nothing of ours.

FILE is JSON: case -> {"config": quantization_config, "shape": [out, in], "modules": names}. One JSON line comes out:
case -> {"method": vLLM's name for it, "tensors": suffix -> [dtype, shape] of the parameters that it makes for such a
linear, "kept": the modules of those that it leaves unquantised, "kv_cache": what it makes of the KV cache}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.layers.quantization.fp8 import (
    create_fp8_input_scale,
    create_fp8_scale_parameter,
    create_fp8_weight_parameter,
)
from vllm.model_executor.layers.quantization.modelopt import ACT, LINEAR_ALGOS, SCHEME_FOR, WEIGHT, Shapes, resolve
from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped
from vllm.model_executor.parameter import BlockQuantScaleParameter, PerTensorScaleParameter


def method_of(config: dict[str, Any]) -> str:
    """As its ModelConfig finds it: the methods that claim other methods' checkpoints are asked first."""
    for name in ("modelopt", "modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed"):
        claimed = get_quantization_config(name).override_quantization_method(config, None, hf_config=None)
        if claimed is not None:
            return str(claimed)
    return str(config["quant_method"])


def modelopt_parameters(config: Any, algo: str, shape: list[int]) -> dict[str, torch.Tensor]:
    owner = getattr(config, LINEAR_ALGOS[algo][1]) if config.get_name() == "modelopt_mixed" else config
    spec, context, _ = resolve(algo, owner, "model.layers.0.mlp.up_proj")
    layer = torch.nn.Module()
    shapes = Shapes([shape[0]], shape[1], torch.bfloat16)
    for key, role in ((spec.weight, WEIGHT), (spec.activation, ACT)):
        if key is not None:
            SCHEME_FOR[key].create_weights(layer, role, context, shapes, None)
    return dict(layer.named_parameters())


def fp8_parameters(config: Any, shape: list[int]) -> dict[str, torch.Tensor]:
    """What Fp8LinearMethod.create_weights registers, without the kernel that it then chooses."""
    block = config.weight_block_size
    kind = PerTensorScaleParameter if block is None else BlockQuantScaleParameter
    made = {
        "weight": create_fp8_weight_parameter(shape[0], shape[1], None),
        "weight_scale" if block is None else "weight_scale_inv": create_fp8_scale_parameter(
            kind, [shape[0]], shape[1], block, None
        ),
    }
    if config.activation_scheme == "static":
        made["input_scale"] = create_fp8_input_scale([shape[0]], None)
    return made


def described(case: dict[str, Any]) -> dict[str, Any]:
    method = method_of(case["config"])
    config = get_quantization_config(method).from_config(case["config"])
    config.packed_modules_mapping = {}
    if method == "fp8":
        parameters = fp8_parameters(config, case["shape"])
        kept = [name for name in case["modules"] if is_layer_skipped(name, config.ignored_layers)]
    else:
        kept = [name for name in case["modules"] if config.is_layer_excluded(name)]
        algo = getattr(config, "quant_method", None)
        if method == "modelopt_mixed":
            found = {name: config._resolve_quant_algo(name) for name in case["modules"]}
            kept = [name for name in case["modules"] if name in kept or found[name] is None]
            algo = found[next(name for name in case["modules"] if name not in kept)]
        parameters = modelopt_parameters(config, algo, case["shape"])
    return {
        "method": method,
        "tensors": {name: [str(tensor.dtype), list(tensor.shape)] for name, tensor in parameters.items()},
        "kept": kept,
        "kv_cache": getattr(config, "kv_cache_quant_method", getattr(config, "kv_cache_quant_algo", None)),
    }


def main(path: Path) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    parallel_state._TP = SimpleNamespace(rank_in_group=0, world_size=1)  # parameters ask which shard they hold
    with set_current_vllm_config(VllmConfig()):
        answers = {name: described(case) for name, case in json.loads(path.read_text()).items()}
    print("VLLM " + json.dumps(answers), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
