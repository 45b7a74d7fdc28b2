"""Quantised copies of small models, written with the safetensors package rather than our writer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from modelexport.checkpoints.formats import hf
from modelexport.quantization import formats
from modelexport.quantization.formats.base import NumberFormat
from modelexport.quantization.methods.base import ModelQuantization
from modelexport.quantization.methods.compressed_tensors import quantization_files

REACH = 12.0
"""Largest magnitude that static scales of inputs are made for."""


def is_linear(name: str) -> bool:
    """Whether a tensor is the weight of a linear that gets quantised."""
    kept = ("norm.weight", "embed_tokens.weight", "lm_head.weight", "gate.weight")
    return name.endswith(".weight") and not name.endswith(kept)


def save_quantised(source: Path, directory: Path, quant: str) -> Path:
    """All linears of a checkpoint of one file in a number format, its head and its routers not."""
    number_format = formats.get(quant)
    tensors: dict[str, Tensor] = {}
    linears: dict[str, NumberFormat] = {}
    kept = []
    for name, weight in load_file(source / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if is_linear(name):
            parts = number_format.quantise(weight, inputs=REACH if number_format.has_static_inputs else None)
            tensors.update({f"{module}.{suffix}": part for suffix, part in parts.items()})
            linears[module] = number_format
        else:
            tensors[name] = weight
            kept += [module] if name.endswith(("gate.weight", "lm_head.weight")) else []
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    quantization = quantization_files(ModelQuantization(linears, [*kept, "lm_head"])).config
    content = (source / "config.json").read_bytes()
    (directory / "config.json").write_bytes(hf.config_bytes(content, quantization))
    return directory


def save_decoded(source: Path, quantised: Path, directory: Path, quant: str) -> Path:
    """The weights that a quantised checkpoint stands for, in float32, as a plain checkpoint."""
    number_format = formats.get(quant)
    stored = load_file(quantised / "model.safetensors")
    tensors: dict[str, Tensor] = {}
    for name in load_file(source / "model.safetensors"):
        module = name.removesuffix("weight")
        if is_linear(name):
            parts = {key.removeprefix(module): part for key, part in stored.items() if key.startswith(module)}
            tensors[name] = number_format.dequantise(parts)
        else:
            tensors[name] = stored[name].float()
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
    return directory


def with_cache_scales(source: Path, directory: Path, scales: Mapping[str, float | list[float]]) -> Path:
    """A copy of a checkpoint whose keys and values engines keep in FP8; ``layers.0.self_attn.k_scale`` -> a scale, or
    that of each head."""
    shutil.copytree(source, directory)
    tensors = load_file(source / "model.safetensors")
    by_head = any(isinstance(scale, list) for scale in scales.values())
    shape = (-1, 1, 1) if by_head else (1,)
    tensors.update({f"model.{name}": torch.tensor(scale).reshape(shape) for name, scale in scales.items()})
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    strategy = "attn_head" if by_head else "tensor"
    scheme = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False}
    config["quantization_config"]["kv_cache_scheme"] = scheme
    (directory / "config.json").write_text(json.dumps(config))
    return directory
