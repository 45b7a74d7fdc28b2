"""The random orthogonal transform: orthogonal at every order, flat, the same bits whatever stands beside a vector."""

from __future__ import annotations

import hashlib
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modelexport.quantization.hadamard import Hadamard


def matrix(order: int, seed: int = 0) -> torch.Tensor:
    return Hadamard(order, seed).rotate(torch.eye(order), 1)


@pytest.mark.parametrize("order", [1, 2, 3, 7, 64, 80, 96, 128, 192, 320, 1536])
def test_it_is_orthogonal_and_flat(order: int) -> None:
    found = matrix(order).double()
    torch.testing.assert_close(found @ found.T, torch.eye(order, dtype=torch.float64), rtol=0, atol=1e-6)
    limit = 1.0 if order & (order - 1) == 0 else math.sqrt(2)
    assert found.abs().max().item() <= limit / math.sqrt(order) * (1 + 1e-6)


def test_orders_that_are_powers_of_two_are_hadamard_matrices() -> None:
    """Against Sylvester's construction, spelt out with a matrix product."""
    sylvester = torch.ones(1, 1)
    for _ in range(6):
        sylvester = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), sylvester)
    signs = Hadamard(64).signs
    assert set(signs.tolist()) == {-1.0, 1.0}
    torch.testing.assert_close(matrix(64), signs.unsqueeze(1) * sylvester / 8, rtol=0, atol=0)


def test_both_dims_are_the_same_rotation_and_it_can_be_taken_back() -> None:
    values = torch.randn(192, 40, generator=torch.Generator().manual_seed(1))
    transform = Hadamard(96, 3)
    columns = transform.rotate(values, 0)
    assert torch.equal(columns, transform.rotate(values.t(), 1).t())
    whole = torch.block_diag(matrix(96, 3), matrix(96, 3))
    torch.testing.assert_close(columns, whole.T @ values, rtol=0, atol=2e-5)
    torch.testing.assert_close(whole @ columns, values, rtol=0, atol=2e-5)


def test_outliers_are_spread() -> None:
    values = torch.zeros(1, 4096)
    values[0, 17] = 64.0
    assert Hadamard(4096).rotate(values, 1).abs().max().item() == 1.0


def test_seeds_and_purposes_give_other_signs() -> None:
    signs = [Hadamard(256, seed, purpose).signs for seed in (0, 1) for purpose in ("a", "b")]
    for i, one in enumerate(signs):
        assert 80 < (one > 0).sum() < 176  # 6 standard deviations
        assert not any(torch.equal(one, other) for other in signs[:i])
    # A checkpoint made by one release must be made again by the next.
    digest = hashlib.sha256(bytes((Hadamard(4096, 7, "residual").signs > 0).tolist())).hexdigest()
    assert digest == "bc529eb6060a863d16a68afc36638ba43888de0353ec015c3a7e63e045b4654b"


@settings(max_examples=40, deadline=None)
@given(
    order=st.sampled_from([1, 3, 4, 16, 24, 80]),
    blocks=st.integers(1, 3),
    others=st.integers(1, 70),
    dim=st.sampled_from([0, 1]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    data=st.data(),
)
def test_bits_do_not_depend_on_neighbours(
    order: int, blocks: int, others: int, dim: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    shape = (order * blocks, others) if dim == 0 else (others, order * blocks)
    values = torch.randn(shape, generator=torch.Generator().manual_seed(order + others)).to(dtype)
    transform = Hadamard(order, 5)
    whole = transform.rotate(values, dim)
    assert whole.dtype == torch.float32
    assert whole.is_contiguous()
    start = data.draw(st.integers(0, others - 1))
    stop = data.draw(st.integers(start + 1, others))
    block = data.draw(st.integers(0, blocks - 1))
    part = values.narrow(1 - dim, start, stop - start).narrow(dim, block * order, order)
    expected = whole.narrow(1 - dim, start, stop - start).narrow(dim, block * order, order)
    assert torch.equal(transform.rotate(part, dim), expected)


def test_large_matrices_go_through_in_chunks_with_the_same_bits() -> None:
    values = torch.randn(300, 1280, generator=torch.Generator().manual_seed(2))
    transform = Hadamard(1280)
    whole = transform.rotate(values, 1)
    for row in (0, 101, 102, 299):
        assert torch.equal(transform.rotate(values[row : row + 1], 1)[0], whole[row])


def test_nothing_to_rotate() -> None:
    assert Hadamard(64).rotate(torch.empty(0, 128), 1).shape == (0, 128)
    assert Hadamard(64).rotate(torch.empty(64, 0), 0).shape == (64, 0)
