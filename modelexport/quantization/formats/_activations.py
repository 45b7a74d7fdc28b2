"""The rounding of a linear's inputs to int8 or e4m3, as engines do it: with dynamic scales, or with a stored one."""

from __future__ import annotations

import torch
from torch import Tensor

from modelexport.quantization.kernels import scales

LIMITS = {torch.int8: 127.0, torch.float8_e4m3fn: scales.FP8_MAX}
"""The magnitude onto which the largest input is laid."""


def dynamic(x: Tensor, storage: torch.dtype, group: int | None = None) -> Tensor:
    """Rounds each token (the last dim), or each ``group`` of it, with a scale of its own, amax / limit in float32.

    That is what vLLM's dynamic kernels compute, but for the order of a multiplication and a division. The last group of
    a token may be shorter.
    """
    if not x.numel():
        return x.clone()
    limit, cols = LIMITS[storage], x.shape[-1]
    width = group or cols
    wide = torch.nn.functional.pad(x.float(), (0, -cols % width)).unflatten(-1, (-1, width))
    amax = wide.abs().amax(dim=-1, keepdim=True)
    scale = amax / amax.new_full((1,), limit)
    scale = torch.where(amax == 0, torch.ones_like(scale), scale.clamp(min=2.0**-126))
    return (_rounded(wide / scale, storage, -limit) * scale).flatten(-2)[..., :cols].to(x.dtype)


def static(x: Tensor, scale: Tensor, storage: torch.dtype) -> Tensor:
    """Rounds with the stored scale ``[1]``, in float32; what lies beyond its range is clamped."""
    wide, step = x.float(), scale.to(x.device).float().reshape(1)
    lowest = -128.0 if storage == torch.int8 else -LIMITS[storage]
    return (_rounded(wide / step, storage, lowest) * step).to(x.dtype)


def static_scale(amax: float, storage: torch.dtype) -> float:
    """The scale stored for inputs whose largest magnitude is ``amax``: amax / limit, in float32; 1 for none.

    At least 2^-24, the smallest float16, so that it is not stored as zero.
    """
    if amax == 0.0:
        return 1.0
    scale = torch.tensor([amax], dtype=torch.float32) / torch.tensor([LIMITS[storage]])
    return max(float(scale), 2.0**-24)


def _rounded(ratio: Tensor, storage: torch.dtype, lowest: float) -> Tensor:
    ratio = ratio.clamp(lowest, LIMITS[storage])
    return ratio.round() if storage == torch.int8 else ratio.to(storage).float()
