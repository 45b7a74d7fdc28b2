"""MXFP4's values in other formats: as they were, where exponents allow it, to the bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from modelexport.errors import UsageError
from modelexport.quantization import formats

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
REACH = {"nvfp4-wo": 17, "fp8": 14, "fp8-block": 14}
"""How far the smallest exponent of a weight, row or block may lie below the largest."""


def mxfp4(exponents: torch.Tensor, *, largest: bool = False) -> torch.Tensor:
    """Values of MXFP4, bf16, of blocks with these exponents, ``[rows, columns / 32]``; ``largest``: a 6 in each 16."""
    generator = torch.Generator().manual_seed(7)
    codes = torch.randint(0, 16, (*exponents.shape, 32), generator=generator)
    if largest:
        codes[..., ::16] = 7
    values = E2M1[codes & 7] * (1 - 2 * (codes >> 3)) * torch.exp2(exponents.float()).unsqueeze(-1)
    return values.flatten(1).bfloat16()


@given(st.sampled_from(sorted(REACH)), st.integers(-60, 60), st.integers(0, 2**32))
def test_values_stay_where_exponents_lie_close_enough(name: str, highest: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = mxfp4(highest - torch.randint(0, REACH[name] + 1, (8, 8), generator=generator))
    stored = formats.get(name, observer="exact").quantise(weight)
    assert torch.equal(formats.get(name).dequantise(stored), weight.float())


def test_nvfp4_has_the_numbers_of_nvidias_cast() -> None:
    """ModelOpt 0.47: a global scale of 2^(k_max - 8), scales of 2^(k - k_max + 8), and e2m1 as it was."""
    exponents = torch.tensor([[-3, -8, 2, -15], [0, 1, -9, -5]])
    weight = mxfp4(exponents, largest=True)
    stored = formats.get("nvfp4-wo", observer="exact").quantise(weight)
    before = formats.get("mxfp4-wo").quantise(weight)
    assert float(1 / stored["weight_global_scale"]) == 2.0 ** (2 - 8)
    scales = torch.exp2(exponents - 2.0 + 8).repeat_interleave(2, dim=1)
    assert torch.equal(stored["weight_scale"].float(), scales)
    assert torch.equal(stored["weight_packed"], before["weight_packed"])


def test_a_part_is_stored_as_in_the_whole() -> None:
    weight = mxfp4(torch.tensor([[-1, -4, -2, -3], [0, -7, -6, -1]]))
    number_format = formats.get("nvfp4-wo", observer="exact")
    whole = number_format.quantise(weight)
    part = number_format.quantise(weight[:, 64:], amax=number_format.amax(weight))
    assert torch.equal(part["weight_packed"], whole["weight_packed"][:, 32:])
    assert torch.equal(part["weight_scale"].view(torch.uint8), whole["weight_scale"][:, 4:].view(torch.uint8))


@pytest.mark.parametrize("name", REACH)
def test_blocks_further_below_are_rounded_alone(name: str) -> None:
    exponents = torch.full((4, 8), 0)
    exponents[2, 5] = -REACH[name] - 3
    weight = mxfp4(exponents)
    found = formats.get(name).dequantise(formats.get(name, observer="exact").quantise(weight))
    wrong = (found != weight.float()).nonzero()
    assert wrong.numel()
    assert {(int(row), int(column) // 32) for row, column in wrong} == {(2, 5)}


def test_nothing_and_zeros() -> None:
    for name in REACH:
        number_format = formats.get(name, observer="exact")
        for shape in ((0, 128), (2, 128)):
            weight = torch.zeros(shape, dtype=torch.bfloat16)
            assert torch.equal(number_format.dequantise(number_format.quantise(weight)), weight.float())


def test_other_formats_have_no_such_scales() -> None:
    with pytest.raises(UsageError, match="int4 has no scales that are powers of two"):
        formats.get("int4", observer="exact")
