"""Run in an environment of its own with nvidia-modelopt: python modelopt_oracle.py DIR. Imports nothing of ours.

In DIR are ours.safetensors ("case/suffix", and "case/value" of int4), ours.json (case -> quant_algo and side file) and
source/ (a tiny model). Out come theirs.safetensors ("case/value": dequantised by modelopt's own classes, or for int4
"case/weight": modelopt's packing of the value), theirs.json (case -> what modelopt makes of the side file) and
exported/CONFIG/ (the model by modelopt's own export), whose linears are dequantised in exported/CONFIG.safetensors;
and cached/CONFIG/, in FP8 with the scales of a KV cache.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format
from modelopt.torch.export.quant_utils import pack_int4_in_uint8
from modelopt.torch.quantization.qtensor import FP8QTensor, INT8QTensor, MXFP4QTensor, MXFP8QTensor, NVFP4QTensor
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

CONFIGS = (
    "FP8_DEFAULT_CFG",
    "FP8_PER_CHANNEL_PER_TOKEN_CFG",
    "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG",
    "INT8_DEFAULT_CFG",
    "INT8_WEIGHT_ONLY_CFG",
    "INT4_AWQ_CFG",
    "NVFP4_DEFAULT_CFG",
    "W4A16_NVFP4_CFG",
    "MXFP8_DEFAULT_CFG",
    "MXFP4_DEFAULT_CFG",
    "INT8_SMOOTHQUANT_CFG",
    "W4A8_AWQ_BETA_CFG",
    "W4A8_NVFP4_FP8_CFG",
    "W4A8_MXFP4_FP8_CFG",
)


CACHES = ("FP8_KV_CFG", "NVFP4_KV_CFG")


def dequantised(algo: str, tensors: dict[str, Tensor]) -> Tensor | None:
    """float32 by modelopt's own classes; None for int4, of which it reads no exported form."""
    weight, scale = tensors["weight"], tensors["weight_scale"]
    name = algo.upper()
    if weight.dtype == torch.uint8:
        shape = torch.Size((weight.shape[0], weight.shape[1] * 2))
        if "MXFP4" in name:
            return MXFP4QTensor(shape, torch.float32, weight).dequantize(scale=scale, block_sizes={-1: 32})
        if "NVFP4" not in name:
            return None
        return NVFP4QTensor(shape, torch.float32, weight).dequantize(
            scale=scale, double_scale=tensors["weight_scale_2"], block_sizes={-1: shape[1] // scale.shape[1]}
        )
    if name == "MXFP8":
        return MXFP8QTensor(weight.shape, torch.float32, weight).dequantize(scale=scale)
    if scale.dim() == 4:
        blocks = {-1: 128, -2: 128}
        return FP8QTensor(weight.shape, torch.float32, weight).dequantize(scale=scale[:, 0, :, 0], block_sizes=blocks)
    kind = INT8QTensor if weight.dtype == torch.int8 else FP8QTensor
    return kind(weight.shape, torch.float32, weight).dequantize(scale=scale[:, None] if scale.dim() else scale)


def grouped(flat: dict[str, Tensor], separator: str) -> dict[str, dict[str, Tensor]]:
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in flat.items():
        module, _, suffix = name.rpartition(separator)
        found.setdefault(module, {})[suffix] = tensor
    return found


def answer(root: Path) -> None:
    cases = json.loads((root / "ours.json").read_text())
    values, configs = {}, {}
    for case, tensors in grouped(load_file(root / "ours.safetensors"), "/").items():
        value = dequantised(cases[case]["quant_algo"], tensors)
        if value is not None:
            values[f"{case}/value"] = value
        else:
            scale = tensors["weight_scale"]
            size = tensors["value"].shape[1] // scale.shape[1]
            values[f"{case}/weight"] = pack_int4_in_uint8(tensors["value"], scale, size)
    for case, said in cases.items():
        configs[case] = convert_hf_quant_config_format(said["side"])
    save_file({name: value.contiguous() for name, value in values.items()}, root / "theirs.safetensors")
    (root / "theirs.json").write_text(json.dumps(configs))


def export(root: Path) -> None:
    for name in CONFIGS:
        model = AutoModelForCausalLM.from_pretrained(root / "source", dtype=torch.bfloat16).eval()
        ids = torch.arange(64)[None]
        target = root / "exported" / name
        with torch.inference_mode():
            mtq.quantize(model, getattr(mtq, name), lambda quantised: quantised(ids))  # noqa: B023
            export_hf_checkpoint(model, export_dir=str(target))
        algo = json.loads((target / "hf_quant_config.json").read_text())["quantization"]["quant_algo"]
        values = {}
        for module, tensors in grouped(load_file(target / "model.safetensors"), ".").items():
            if "weight_scale" in tensors:
                value = dequantised(algo, tensors)
                if value is not None:
                    values[module] = value.contiguous()
        save_file(values, root / "exported" / f"{name}.safetensors")


def export_caches(root: Path) -> None:
    for name in CACHES:
        model = AutoModelForCausalLM.from_pretrained(root / "source", dtype=torch.float32).eval()
        ids = torch.arange(64)[None]
        both = [*mtq.FP8_DEFAULT_CFG["quant_cfg"], *getattr(mtq, name)["quant_cfg"]]
        with torch.inference_mode():
            mtq.quantize(model, {**mtq.FP8_DEFAULT_CFG, "quant_cfg": both}, lambda quantised: quantised(ids))  # noqa: B023
            export_hf_checkpoint(model, export_dir=str(root / "cached" / name))


if __name__ == "__main__":
    answer(Path(sys.argv[1]))
    export(Path(sys.argv[1]))
    export_caches(Path(sys.argv[1]))
    print("MODELOPT DONE", flush=True)
