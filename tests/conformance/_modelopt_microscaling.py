"""Run with a Python that has nvidia-modelopt: what its tensors make of weights that were quantised here.

Takes a directory of ``<case>.<format>.safetensors`` and writes ``<case>.<format>.theirs.safetensors`` beside each:
``read``, the stored weight as theirs reads it; ``packed``, the source as theirs stores it by the same scales (where it
takes scales); ``own``, ``own_scale``, ``own_factor`` and ``own_read``, what it makes of the source by itself.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from modelopt.torch.quantization.qtensor.mxfp4_tensor import MXFP4QTensor
from modelopt.torch.quantization.qtensor.mxfp8_tensor import MXFP8QTensor
from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor
from safetensors.torch import load_file, save_file
from torch import Tensor


def nvfp4(source: Tensor, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Its double scale is the reciprocal of compressed-tensors' divisor."""
    factor, scale = 1.0 / given["weight_global_scale"], given["weight_scale"]
    sizes = {-1: 16}
    ours = NVFP4QTensor(source.shape, torch.float32, given["weight_packed"])
    packed, _, _ = NVFP4QTensor.quantize(source.clone(), 16, scale, factor)
    own, own_scale, own_factor = NVFP4QTensor.quantize(source.clone(), 16)
    return {
        "read": ours.dequantize(torch.float32, scale=scale, double_scale=factor, block_sizes=sizes),
        "packed": packed._quantized_data,
        "own": own._quantized_data,
        "own_scale": own_scale,
        "own_factor": own_factor,
        "own_read": own.dequantize(torch.float32, scale=own_scale, double_scale=own_factor, block_sizes=sizes),
    }


def mxfp4(source: Tensor, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """It takes no scales: its own are chosen by another rule, and ties go to zero."""
    sizes = {-1: 32}
    ours = MXFP4QTensor(source.shape, torch.float32, given["weight_packed"])
    own, own_scale = MXFP4QTensor.quantize(source.clone(), 32)
    return {
        "read": ours.dequantize(torch.float32, scale=given["weight_scale"], block_sizes=sizes),
        "own": own._quantized_data,
        "own_scale": own_scale,
        "own_read": own.dequantize(torch.float32, scale=own_scale, block_sizes=sizes),
    }


def mxfp8(source: Tensor, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Its own scales are chosen by another rule."""
    ours = MXFP8QTensor(source.shape, torch.float32, given["weight"])
    own, own_scale = MXFP8QTensor.quantize(source.clone())
    return {
        "read": ours.dequantize(torch.float32, scale=given["weight_scale"]),
        "packed": MXFP8QTensor.quantize_with_scale(source, given["weight_scale"]).view(torch.uint8),
        "own": own._quantized_data.view(torch.uint8),
        "own_scale": own_scale,
        "own_read": own.dequantize(torch.float32, scale=own_scale),
    }


def main() -> None:
    kinds = {"nvfp4-wo": nvfp4, "mxfp4-wo": mxfp4, "mxfp8": mxfp8}
    for path in sorted(Path(sys.argv[1]).glob("*.safetensors")):
        case, name = path.stem.split(".")
        tensors = load_file(path)
        found = kinds[name](tensors.pop("source"), tensors)
        save_file({key: value.contiguous() for key, value in found.items()}, path.with_stem(f"{case}.{name}.theirs"))


if __name__ == "__main__":
    main()
