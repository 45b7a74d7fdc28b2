"""A KV cache in FP8, as engines keep it, for the plain Llama that is the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor


def e4m3(x: Tensor, *, towards_zero: bool) -> Tensor:
    """The nearest float8_e4m3fn, or the next towards zero, as float32."""
    code = x.clamp(-448, 448).to(torch.float8_e4m3fn)
    if towards_zero:
        beyond = code.float().abs() > x.abs()
        code = (code.view(torch.uint8) - beyond.to(torch.uint8)).view(torch.float8_e4m3fn)
    return code.float()


def round_kv_cache(monkeypatch: pytest.MonkeyPatch, directory: Path, *, towards_zero: bool = False) -> None:
    """Llamas with eager attention round keys (after the rotary embedding) and values by a checkpoint's scales."""
    from transformers.models.llama import modeling_llama

    tensors = load_file(directory / "model.safetensors")
    scales = {name.replace(".k_proj.", ".").replace(".v_proj.", "."): value for name, value in tensors.items()}
    plain = modeling_llama.eager_attention_forward

    def rounded(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        parts = []
        for x, part in ((key, "k"), (value, "v")):
            scale = scales[f"model.layers.{module.layer_idx}.self_attn.{part}_scale"].float()
            assert 0 < scale.min() <= scale.max() < 1
            if scale.numel() > 1:  # a number for each head, of which keys have been repeated for the queries
                scale = scale.repeat_interleave(x.shape[1] // len(scale), 0)
            parts.append((e4m3(x.float() / scale, towards_zero=towards_zero) * scale).to(x.dtype))
        return plain(module, query, *parts, *args, **kwargs)

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", rounded)
