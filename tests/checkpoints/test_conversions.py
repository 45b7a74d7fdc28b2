"""Numbers that lie in a file as float32, computed from a tensor's: what comes back, whatever goes in."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from modelexport.checkpoints.safetensors.conversions import Conversion, Function
from modelexport.checkpoints.safetensors.file import torch_dtype
from modelexport.errors import CheckpointError

DTYPES = ("BF16", "F16", "F32")


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32 if values.dtype == torch.float32 else torch.int16)


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_every_number_of_16_bits_comes_back(dtype: str) -> None:
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch_dtype(dtype))
    every = every[~every.isnan()]
    conversion = Conversion(dtype)
    stored = conversion.encode(every)
    assert np.array_equal(stored, every.float().numpy())
    assert conversion.holds(stored)
    assert torch.equal(bits(conversion.settled(every)), bits(every))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", ["one more", "minus exp"])
@given(st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=20))
def test_what_is_settled_is_what_the_file_gives_back(dtype: str, function: Function, numbers: list[float]) -> None:
    values, conversion = torch.tensor(numbers).to(torch_dtype(dtype)), Conversion(dtype, function)
    settled = conversion.settled(values)
    stored = conversion.encode(settled)
    assert conversion.holds(stored)
    back = torch.from_numpy(conversion.decode(stored).view(np.int16 if dtype != "F32" else np.int32))
    assert torch.equal(back, bits(settled))
    near = 2.0**-20 if function == "one more" else 2.0**-12
    difference = (settled.double() - values.double()).abs()
    assert bool((difference <= near * (1 + values.double().abs())).all())


def test_norms_of_usual_size_are_exact() -> None:
    values = torch.cat([torch.linspace(-3, 3, 1001), torch.linspace(0.01, 0.02, 100)]).bfloat16()
    values = values[values.abs() > 2.0**-15]
    conversion = Conversion("BF16", "one more")
    assert torch.equal(conversion.settled(values), values)
    assert np.array_equal(conversion.encode(values), (1 + values.float()).numpy())


def test_a_float32_model_s_numbers_are_no_narrow_one_s() -> None:
    stored = np.array([1.0, 1.5, 1.0 + 2.0**-20], np.float32)
    assert Conversion("BF16").holds(stored[:2])
    assert not Conversion("BF16").holds(stored)
    assert not Conversion("F16").holds(np.array([1e6], np.float32))


def test_integers_of_64_bits_come_back() -> None:
    values, conversion = torch.tensor([0, -7, 2**31 - 1, -(2**31)]), Conversion("I64")
    stored = conversion.encode(values)
    assert stored.dtype == np.int32
    assert conversion.decode(stored.view(np.float32)).tolist() == values.tolist()
    assert conversion.encode(values.numpy().view(np.float64)).tolist() == values.tolist()


def test_integers_that_32_bits_do_not_hold_are_refused() -> None:
    with pytest.raises(CheckpointError, match="an integer is 2147483648, and the file holds those from -2147483648"):
        Conversion("I64").encode(torch.tensor([1, 2**31]))
