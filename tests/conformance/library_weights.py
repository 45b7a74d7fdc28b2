"""Run inside an environment that holds bitsandbytes and hqq: quantises a weight by each of them, and decodes it.

usage: python library_weights.py FILE

Writes, as safetensors, for each kind of numbers ``KIND/SUFFIX``, a tensor that the library saves, and ``KIND/decoded``,
the weight that it makes of them.
"""

from __future__ import annotations

import sys

import bitsandbytes as bnb
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from hqq.core.quantize import Quantizer
from safetensors.torch import save_file

SHAPE = (96, 128)


def main() -> None:
    weight = torch.randn(SHAPE, generator=torch.Generator().manual_seed(2)).bfloat16()
    found: dict[str, torch.Tensor] = {}
    for kind in ("nf4", "fp4"):
        for nested in (False, True):
            packed, state = quantize_4bit(weight, blocksize=64, compress_statistics=nested, quant_type=kind)
            stored = {"weight": packed, **{f"weight.{key}": value for key, value in state.as_dict(packed=True).items()}}
            name = f"{kind}{'-nested' if nested else ''}"
            found |= {f"{name}/{suffix}": tensor for suffix, tensor in stored.items()}
            found[f"{name}/decoded"] = dequantize_4bit(packed, state).bfloat16()
    codes, largest, _ = bnb.functional.int8_vectorwise_quant(weight.half())
    found |= {"int8/weight": codes, "int8/SCB": largest.float()}
    found["int8/decoded"] = bnb.functional.int8_vectorwise_dequant(codes, largest).bfloat16()
    for bits in (8, 4, 2):
        settings = {"nbits": bits, "group_size": 64, "axis": 1}
        packed, meta = Quantizer.quantize(weight, device="cpu", compute_dtype=torch.bfloat16, **settings)
        found |= {f"hqq{bits}/W_q": packed, f"hqq{bits}/scale": meta["scale"], f"hqq{bits}/zero": meta["zero"]}
        numbers = {**settings, "shape": list(SHAPE)}
        found |= {f"hqq{bits}/{name}": torch.tensor(value) for name, value in numbers.items()}
        found[f"hqq{bits}/decoded"] = Quantizer.dequantize(packed, meta).bfloat16()
    save_file({name: tensor.contiguous() for name, tensor in found.items()}, sys.argv[1])


if __name__ == "__main__":
    main()
