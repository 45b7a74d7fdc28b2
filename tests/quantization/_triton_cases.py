"""What test_triton.py has Triton's interpreter run, in processes that have imported this before anything of Triton."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # read once, by what triton.jit decorates

import torch
import triton
from torch import Tensor

from modelexport.quantization.kernels import feedback_reference, feedback_triton
from tests.quantization._weights import raw

assert triton.knobs.runtime.interpret
E4M3 = torch.float8_e4m3fn


def linear_of(columns: int, rows: int, seed: int, storage: torch.dtype, half: float, shifted: bool) -> list[Tensor]:
    """Arguments of ``round_back`` up to the zero points: ties, both zeros, denormals, values far beyond the grid."""
    generator = torch.Generator().manual_seed(seed)
    scales = 1 + seed % 4
    exponents = torch.randint(-140, 20, (scales, rows), generator=generator)
    step = (torch.rand(scales, rows, generator=generator) + 1) * torch.exp2(exponents.float())
    zero = torch.randint(int(-half), int(half), (scales, rows), generator=generator).float()
    block_of = torch.randint(0, scales, (columns,), generator=generator)
    weight = torch.randn(columns, rows, generator=generator) * step[block_of] * 2.0 ** (seed % 12 - 3)
    carried = torch.randn(columns, rows, generator=generator) * step[block_of]
    factor = torch.randn(columns, columns, generator=generator)
    kinds = torch.randint(0, 8, (columns, rows), generator=generator)
    weight = torch.where(kinds == 0, 2.5 * step[block_of], torch.where(kinds == 1, -0.0, weight))
    carried = torch.where(kinds < 2, -0.0, carried)
    given = [weight, carried, factor.T if seed % 2 else factor, block_of, step]
    return [*given, zero] if shifted and storage == torch.int8 else given


def rounding_with_feedback(
    columns: int, rows: int, seed: int, storage: torch.dtype, half: float, shifted: bool
) -> None:
    """``round_back`` has the reference's bits, the sign of zero among them."""
    weight, carried, *how = linear_of(columns, rows, seed, storage, half, shifted)
    how = how if len(how) == 4 else [*how, None]
    found = []
    for module in (feedback_triton, feedback_reference):
        rounded = torch.full_like(weight, torch.nan)
        module.round_back(weight, carried.clone(), *how, storage, -half, half - 1, rounded)
        found.append(raw(rounded))
    assert torch.equal(*found), f"{int((found[0] != found[1]).sum())} bytes differ"
