"""Run by an interpreter with bitsandbytes (0.50) and hqq (0.2.8): a Llama quantised and decoded by these.

    python bitsandbytes_hqq_oracle.py KIND SOURCE TARGET

writes ``TARGET/stored``, a checkpoint, and ``TARGET/decoded.safetensors``, its linears' weights in bfloat16. HQQ
decodes in float32 here, from the scales that it stores; its own default, the model's dtype, rounds at each step.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Linear = tuple[dict[str, torch.Tensor], torch.Tensor]


def four_bits(weight: torch.Tensor, kind: str, *, nested: bool) -> Linear:
    """A linear of NF4 or FP4."""
    from bitsandbytes import functional

    packed, state = functional.quantize_4bit(weight, quant_type=kind, compress_statistics=nested)
    beside = {f"weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
    return {"weight": packed, **beside}, functional.dequantize_4bit(packed, state)


def eight_bits(weight: torch.Tensor) -> Linear:
    """A linear of LLM.int8()."""
    from bitsandbytes import functional

    numbers, largest, _ = functional.int8_vectorwise_quant(weight.half())
    stored = {"weight": numbers, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return stored, functional.int8_vectorwise_dequant(numbers, largest)


def hqq(weight: torch.Tensor, settings: dict[str, Any]) -> Linear:
    """A linear of HQQ."""
    from hqq.core.quantize import HQQLinear, Quantizer

    plain = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    plain.weight.data = weight.clone()
    made = HQQLinear(plain, settings, compute_dtype=torch.bfloat16, device="cpu")
    exact = {"compute_dtype": torch.float32, **{name: made.meta[name].float() for name in ("scale", "zero")}}
    stored = {name: tensor for name, tensor in made.state_dict().items() if tensor is not None}
    return stored, Quantizer.dequantize(made.W_q.data, {**made.meta, **exact})


def main(kind: str, source: Path, target: Path) -> None:
    """Writes both."""
    name, *words = kind.split("-")
    if name == "hqq":
        from hqq.core.quantize import BaseQuantizeConfig

        group = None if words[2] == "none" else int(words[2])
        settings = BaseQuantizeConfig(
            nbits=int(words[0]), axis=int(words[1]), group_size=group, view_as_float="float" in words
        )
        said = {"quant_method": "hqq", "quant_config": settings, "skip_modules": ["lm_head"]}
    else:
        bits = {"load_in_8bit" if name == "int8" else "load_in_4bit": True}
        said = {"quant_method": "bitsandbytes", **bits, "bnb_4bit_quant_type": name}
        said["bnb_4bit_use_double_quant"] = "nested" in words
    tensors, decoded = {}, {}
    for key, weight in load_file(source / "model.safetensors").items():
        if not key.endswith("_proj.weight"):
            tensors[key] = weight
            continue
        if name == "hqq":
            stored, found = hqq(weight, settings)
        else:
            stored, found = eight_bits(weight) if name == "int8" else four_bits(weight, name, nested="nested" in words)
        decoded[key] = found.to(torch.bfloat16).contiguous()
        tensors |= {key.removesuffix("weight") + suffix: tensor.contiguous() for suffix, tensor in stored.items()}
    (target / "stored").mkdir()
    config = json.loads((source / "config.json").read_text())
    (target / "stored" / "config.json").write_text(json.dumps({**config, "quantization_config": said}))
    save_file(tensors, target / "stored" / "model.safetensors", metadata={"format": "pt"})
    save_file(decoded, target / "decoded.safetensors")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
