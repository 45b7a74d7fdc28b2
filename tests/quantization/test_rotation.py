"""The rotation of single tensors, from plain data: against matrix products, and the same bits for every rectangle."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from modelexport.quantization.algorithms import get
from modelexport.quantization.algorithms import rotation as module
from modelexport.quantization.algorithms.rotation import Balance, Change, Range, Rotation, Turn, balanced

HIDDEN, HEAD, HEADS = 48, 16, 6
RESIDUAL = Turn("residual", HIDDEN, (0, HIDDEN))
VALUES = Turn("values", HEAD, (0, HEADS * HEAD))
LAST = Turn("values", HEAD, (40, 40 + 2 * HEAD))  # the values of a linear that queries and keys share, not aligned

CHANGES = {
    "a reader with a norm": Change("w", (100, HIDDEN), norm="n", inputs=RESIDUAL),
    "a writer": Change("w", (HIDDEN, 100), outputs=RESIDUAL),
    "values": Change("w", (HEADS * HEAD, HIDDEN), norm="n", outputs=VALUES, inputs=RESIDUAL),
    "the output projection": Change("w", (HIDDEN, HEADS * HEAD), outputs=RESIDUAL, inputs=VALUES),
    "queries, keys and values in one": Change("w", (40 + 2 * HEAD + 3, HIDDEN), "n", LAST, RESIDUAL),
    "reads and writes": Change("w", (HIDDEN, HIDDEN), norm="n", outputs=RESIDUAL, inputs=RESIDUAL),
    "a bias": Change("w", (HIDDEN, 1), outputs=RESIDUAL),
}


def rotation(seed: int = 0) -> Rotation:
    return Rotation(seed=seed)


def rectangle(change: Change, weight: Tensor, norm: Tensor, rows: Range, cols: Range, dtype: torch.dtype) -> Tensor:
    out = torch.full((rows[1] - rows[0], cols[1] - cols[0]), torch.nan, dtype=dtype)

    def read(rows: Range, cols: Range) -> Tensor:
        return weight[rows[0] : rows[1], cols[0] : cols[1]]

    rotation().rectangle(change, rows, cols, read, out, (None, norm if change.norm else None))
    return out


def tensors(change: Change, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(change.shape, generator=generator).to(dtype)
    return weight, (1 + torch.rand(change.shape[1], generator=generator)).to(dtype)


def as_matrix(turn: Turn | None, size: int) -> Tensor:
    """What vectors as rows are multiplied by, float64."""
    whole = torch.eye(size, dtype=torch.float64)
    if turn is not None:
        block = rotation().matrix(turn).rotate(torch.eye(turn.order), 1).double()
        for start in range(*turn.span, turn.order):
            whole[start : start + turn.order, start : start + turn.order] = block
    return whole


@pytest.mark.parametrize("name", CHANGES)
def test_it_is_a_product_of_matrices(name: str) -> None:
    change = CHANGES[name]
    weight, norm = tensors(change)
    found = rectangle(change, weight, norm, (0, change.shape[0]), (0, change.shape[1]), torch.float32)
    expected = weight.double() * (norm.double() if change.norm else 1)
    expected = as_matrix(change.outputs, change.shape[0]).T @ expected @ as_matrix(change.inputs, change.shape[1])
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(CHANGES)),
    source=st.sampled_from([torch.float32, torch.bfloat16]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    slab=st.sampled_from([1, 500, 1 << 22]),
    data=st.data(),
)
def test_every_rectangle_is_a_part_of_the_whole(
    name: str, source: torch.dtype, dtype: torch.dtype, slab: int, data: st.DataObject
) -> None:
    change = CHANGES[name]
    weight, norm = tensors(change, source)
    spans = []
    for size in change.shape:
        start = data.draw(st.integers(0, size))
        spans.append((start, data.draw(st.integers(start, size))))
    rows, cols = spans
    whole = rectangle(change, weight, norm, (0, change.shape[0]), (0, change.shape[1]), dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_SLAB", slab)
        part = rectangle(change, weight, norm, rows, cols, dtype)
    assert torch.equal(part, whole[rows[0] : rows[1], cols[0] : cols[1]])


def test_the_source_is_not_written_to() -> None:
    for change in CHANGES.values():
        weight, norm = tensors(change)
        before = weight.clone()
        rectangle(change, weight, norm, (0, change.shape[0]), (0, change.shape[1]), torch.float32)
        assert torch.equal(weight, before)


def test_matrices_differ_by_what_they_are_for() -> None:
    """A head as wide as the residual stream does not get that one's signs; another seed has others."""
    residual, values = (rotation().matrix(Turn(what, 64, (0, 64))).signs for what in ("residual", "values"))
    assert not torch.equal(residual, values)
    assert not torch.equal(residual, rotation(1).matrix(Turn("residual", 64, (0, 64))).signs)


def test_it_is_found_by_its_name() -> None:
    assert get("rotation") is Rotation
    assert Rotation.kind == "rotate"


# ------------------------------------------------------------------------------ balance


def test_what_is_balanced_is_equally_large_within_a_factor_of_two() -> None:
    generator = torch.Generator().manual_seed(0)
    given, read = (torch.exp(8 * torch.randn(1000, generator=generator)) for _ in range(2))
    divisors = balanced(given, read)
    mantissa, _ = torch.frexp(divisors)
    assert torch.equal(mantissa, torch.full((1000,), 0.5)), "powers of two"
    ratio = (given / divisors**2) / (read * divisors**2)
    assert ratio.max() / ratio.min() <= 16, "squares of squares: a quarter of the exponent is rounded to whole numbers"
    assert (divisors < 1).sum() <= 500
    assert (divisors > 1).sum() <= 500


def test_what_is_equal_already_stays_as_it_is() -> None:
    given = torch.linspace(1.0, 1.5, 64)
    assert torch.equal(balanced(given, torch.ones(64)), torch.ones(64))
    assert torch.equal(balanced(1e6 * given, torch.ones(64)), torch.ones(64)), "what all have in common does not count"


def test_features_that_are_nothing_stay_as_they_are() -> None:
    given, read = torch.ones(6), torch.ones(6)
    given[1], given[2], read[3], read[4] = 0.0, torch.inf, 0.0, torch.nan
    given[5] = 256.0
    assert balanced(given, read).tolist() == [1, 1, 1, 1, 1, 4]
    assert balanced(torch.zeros(3), torch.ones(3)).tolist() == [1, 1, 1]


def test_heads_that_share_values_are_balanced_together() -> None:
    balance = Balance("v", (0, 4), None, ("o",), unit=2)
    assert balance.of_columns(torch.tensor([1.0, 2.0, 3.0, 4.0]), 8).tolist() == [1, 2, 1, 2, 3, 4, 3, 4]
    whole = Balance("up", (0, 4), None, ("down",), unit=4)
    assert whole.of_columns(torch.tensor([1.0, 2.0, 3.0, 4.0]), 4).tolist() == [1, 2, 3, 4]
