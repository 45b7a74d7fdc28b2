"""What test_triton.py has Triton's interpreter run, in processes that have imported this before anything of Triton."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # read once, by what triton.jit decorates

import torch
import triton
from torch import Tensor

from modelexport.quantization import formats, kernels
from modelexport.quantization.kernels import (
    feedback_reference,
    feedback_triton,
    microscaling_reference,
    microscaling_triton,
    reference,
)
from modelexport.quantization.kernels import triton as plain
from tests.quantization._weights import DTYPES, as_view, quantise, random_weight, raw, same_bytes

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


def computed(
    name: str, group: int | None, observer: str, weight: Tensor, scale_dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """Everything that the kernels compute of a weight."""
    number_format = formats.get(name, group_size=group, observer=observer, scale_dtype=scale_dtype)
    stored = quantise(number_format, weight)
    values = {str(wide): number_format.dequantise(stored, dtype=wide) for wide in DTYPES}
    return {**stored, **values, "errors": number_format.squared_error(weight, stored)}


def a_format(
    name: str, group: int | None, observer: str, dtype: torch.dtype, rows: int, cols: int, other_scales: bool = False
) -> None:
    """A number format has the reference's bytes, errors and values, also of rows that lie apart or across."""
    weight = random_weight(rows, cols, dtype, 1)
    scale_dtype = None if not other_scales else torch.float32 if dtype != torch.float32 else DTYPES[1]
    given = (name, group, observer)
    os.environ["MODELEXPORT_KERNELS"] = "reference"
    expected = computed(*given, weight, scale_dtype)
    os.environ["MODELEXPORT_KERNELS"] = "triton"
    assert kernels.of(weight) is plain
    assert kernels.of(weight, "microscaling_") is microscaling_triton
    for source in (as_view(weight), weight.t().contiguous().t()) if rows > 1 else (weight,):
        found = computed(*given, source, scale_dtype)
        assert same_bytes(found, expected), [
            key for key in found if not same_bytes({"": found[key]}, {"": expected[key]})
        ]


def short_blocks(dtype: torch.dtype) -> None:
    """``quantise_blocks`` whose last rows and columns are fewer than a block's, with and without given magnitudes."""
    weight = random_weight(9, 11, dtype)
    for amax in (None, torch.rand(3, 3, generator=torch.Generator().manual_seed(0)) + 0.5):
        found = []
        for module in (plain, reference):
            q, scale = torch.zeros(9, 11, dtype=E4M3), torch.zeros(3, 3, dtype=dtype)
            assert module.quantise_blocks(weight, 4, amax, q, scale, 448.0) == -1
            found.append({"q": q, "scale": scale})
        assert same_bytes(*found)


def bad_rows() -> None:
    """NaN or Inf in a weight, or a given magnitude that is not finite: the row that the reference says."""
    for places in ([(5, 3)], [(7, 0), (2, 9)], [(0, 10)], []):
        weight = torch.ones(9, 12)
        for number, place in enumerate(places):
            weight[place] = (torch.nan, -torch.inf)[number % 2]
        for given in (None, 1, 6):
            rows, blocks, groups = torch.ones(9), torch.ones(3, 3), torch.ones(9, 3)
            if given is not None:
                rows[given] = blocks[given // 3, 1] = groups[given, 2] = torch.inf
            found = []
            for module in (plain, reference):
                q, scale = torch.empty(9, 12, dtype=torch.int8), torch.empty(9, 3)
                words = torch.empty(9, 2, dtype=torch.int32)
                pairs, shared = torch.empty(9, 6, dtype=torch.uint8), torch.empty(9, 3, dtype=torch.uint8)
                microscaling = microscaling_triton if module is plain else microscaling_reference
                found.append(
                    [
                        module.quantise_rows(weight, None if given is None else rows, q, scale[:, :1], 127.0),
                        module.quantise_groups(weight, 4, words, scale, 7.5, amax=None if given is None else groups),
                        module.quantise_blocks(
                            weight, 4, None if given is None else blocks, q.view(E4M3), scale[:3], 448.0
                        ),
                        microscaling.quantise(weight, pairs, shared, None, 254, False),
                    ]
                )
            assert found[0] == found[1], (places, given, found)


def order_of_sums() -> None:
    """Errors are added in the reference's order; in another, these have other bits."""
    weight = torch.randn(6, 515, generator=torch.Generator().manual_seed(2))
    weight *= 2.0 ** torch.arange(515).remainder(40)
    backwards, *found = (torch.empty(6, 2, dtype=torch.float64) for _ in range(3))
    reference.squared_error(weight.flip(1), torch.zeros_like(weight), None, backwards)
    for module, out in zip((plain, reference), found, strict=True):
        module.squared_error(weight, torch.zeros_like(weight), None, out)
    assert torch.equal(raw(found[0]), raw(found[1]))
    assert not torch.equal(raw(backwards), raw(found[1]))


def any_bits(dtype: torch.dtype, seed: int) -> None:
    """Rows of arbitrary finite bits: denormals, the largest, both zeros; each storage, searched and not."""
    generator = torch.Generator().manual_seed(seed)
    width = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}[dtype]
    info = torch.iinfo(width)
    weight = torch.randint(info.min, info.max, (2, 64), generator=generator, dtype=width).view(dtype)
    weight = torch.where(torch.isfinite(weight), weight, torch.zeros_like(weight))
    for name, group in (("int8", None), ("fp8", None), ("int4-asym", 32), ("mxfp8", None), ("mxfp4-wo", None)):
        found = []
        for chosen in ("reference", "triton"):
            os.environ["MODELEXPORT_KERNELS"] = chosen
            found.append(computed(name, group, "mse" if seed % 2 else "amax", weight, None))
        assert same_bytes(*found), name
