"""The number formats of llama.cpp's blocks: their bytes by hand, fits, parts, kernels, importance, grids."""

from __future__ import annotations

import struct

import pytest
import torch
from torch import Tensor

from modelexport.errors import PlanError, ValuesError
from modelexport.quantization import formats, kernels
from modelexport.quantization.formats._ggml import BlockFormat, IntegerBlockFormat
from modelexport.quantization.ggml_layouts import LAYOUTS
from modelexport.quantization.kernels import ggml_reference

NAMES = [layout.number_format for layout in LAYOUTS.values()]
INTEGERS = [name for name in NAMES if not name.startswith("iq")]
OBSERVERS = ("amax", "mse")


def block_format(name: str, observer: str = "amax") -> BlockFormat:
    found = formats.get(name, observer=observer)
    assert isinstance(found, BlockFormat)
    return found


def weights(rows: int = 9, cols: int = 512, seed: int = 0) -> Tensor:
    """Heavy tails, zeros, constants of either sign, tiny and huge rows."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, cols, generator=generator)
    weight *= torch.rand(rows, cols, generator=generator) + torch.rand(rows, 1, generator=generator) ** 4 * 3
    if rows > 8:
        weight[1, :256] = 0
        weight[2], weight[3, :32] = 0.75, -0.25
        weight[4] *= 1e-6
        weight[5] *= 1e7
        weight[6] *= 1e30
        weight[7, 5] = 90.0
    return weight


def products(form: BlockFormat, cols: int = 512) -> Tensor:
    """Of inputs that go together, and of which some are much larger than others."""
    generator, width = torch.Generator().manual_seed(7), form.layout.sub
    inputs = torch.randn(256, cols, generator=generator) * (torch.rand(cols, generator=generator) ** 3 + 0.05)
    inputs = (inputs + inputs.roll(1, 1)).unflatten(1, (-1, width)).transpose(0, 1)
    return inputs.transpose(1, 2) @ inputs / 256


def error(form: BlockFormat, weight: Tensor, stored: dict[str, Tensor], metric: Tensor | None = None) -> float:
    apart = form.dequantise(stored).double() - weight.double()
    if metric is None:
        return float(apart.square().sum())
    parts = apart.unflatten(1, (-1, metric.shape[1]))
    return float(torch.einsum("rbi,bij,rbj->", parts, metric.double(), parts))


# ------------------------------------------------------------------ bytes


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_bit_of_a_block_belongs_to_one_number(name: str) -> None:
    layout = LAYOUTS[name]
    taken = [0] * (8 * layout.nbytes)
    for field in filter(None, (layout.codes, layout.scales, layout.minima)):
        for bits, places in zip(field.bits, field.places, strict=True):
            for byte, shift in places:
                assert shift + bits <= 8
                for bit in range(shift, shift + bits):
                    taken[8 * byte + bit] += 1
    for at in filter(lambda each: each is not None, (layout.d, layout.dmin)):
        for bit in range(8 * at, 8 * at + 16):
            taken[bit] += 1
    assert set(taken) == {1}
    assert len(layout.codes.places[0]) == layout.block


def made(name: str, halves: dict[int, float], octets: dict[int, int]) -> list[float]:
    """The weights of one block with these float16 numbers and bytes; the others are 0."""
    layout = LAYOUTS[name]
    raw = bytearray(layout.nbytes)
    for at, value in halves.items():
        struct.pack_into("<e", raw, at, value)
    for at, value in octets.items():
        raw[at] = value
    out = torch.empty(1, layout.block)
    ggml_reference.dequantise(torch.tensor([[list(raw)]], dtype=torch.uint8), out, layout)
    return out[0].tolist()


def test_blocks_of_32_by_hand() -> None:
    assert made("Q4_0", {0: 0.5}, {2: 0x91})[:17:16] == [0.5 * (1 - 8), 0.5 * (9 - 8)]
    assert made("Q4_1", {0: 0.5, 2: -3.0}, {4: 0x91})[:17:16] == [0.5 * 1 - 3, 0.5 * 9 - 3]
    five = made("Q5_0", {0: 0.25}, {2: 0x01, 4: 0x01, 6: 0x92})  # the fifth bits of weights 0 and 16
    assert five[:17:16] == [0.25 * (18 - 16), 0.25 * (25 - 16)]
    five = made("Q5_1", {0: 0.25, 2: 1.5}, {4: 0x01, 8: 0x92})
    assert five[:17:16] == [0.25 * 18 + 1.5, 0.25 * 9 + 1.5]
    assert made("Q8_0", {0: 0.125}, {2: 0xFF, 3: 0x7F})[:3] == [-0.125, 127 * 0.125, 0.0]
    assert made("IQ4_NL", {0: 2.0}, {2: 0xF7})[:17:16] == [2.0 * -10, 2.0 * 113]


def test_blocks_of_256_by_hand() -> None:
    four = {
        4: 3 | 0x80,
        8: 2 | 0x40,
        12: 0x5A,
    }  # scale 0 is 3, minimum 0 is 2; scale 4 is 2 * 16 + 10, minimum 4 16 + 5
    found = made("Q4_K", {0: 0.5, 2: 0.25}, {**four, 16: 0x0F, 16 + 64: 0x07})
    assert found[0] == 0.5 * 3 * 15 - 0.25 * 2
    assert found[128] == 0.5 * 42 * 7 - 0.25 * 21
    found = made("Q5_K", {0: 0.5, 2: 0.25}, {**four, 16: 0x11, 48: 0x0F, 48 + 64: 0x07})
    assert found[0] == 0.5 * 3 * 31 - 0.25 * 2
    assert found[128] == 0.5 * 42 * 23 - 0.25 * 21
    found = made("Q2_K", {80: 0.5, 82: 0.25}, {0: 0x73, 2: 0x15, 16: 0b1011})  # weights 0 and 32
    assert (found[0], found[32]) == (0.5 * 3 * 3 - 0.25 * 7, 0.5 * 5 * 2 - 0.25)
    # Scale 0 is 0b10_0101 - 32 = 5; the third bit set is no 4 to take off.
    found = made("Q3_K", {108: 0.5}, {96: 0x05, 104: 0b10, 32: 0b0110, 0: 0b01})
    assert (found[0], found[1]) == (0.5 * 5 * 2, 0.5 * 5 * -4)
    found = made("Q6_K", {208: 0.5}, {0: 0x21, 128: 0b11, 192: 0xFE, 196: 3})  # weights 0 and 64
    assert (found[0], found[64]) == (0.5 * -2 * (49 - 32), 0.5 * 3 * (2 - 32))
    found = made("IQ4_XS", {0: 0.5}, {2: 0b1100, 4: 0x30, 8: 0x0F, 24: 0x80})  # scales 0 - 32 and 51 - 32
    assert (found[0], found[48]) == (0.5 * -32 * 113, 0.5 * 19 * 1)


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_a_block_says_is_written_as_it_was_read(name: str) -> None:
    """Every field, with all of its numbers."""
    layout = LAYOUTS[name]
    raw = torch.randint(0, 256, (64, layout.nbytes), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    blocks = torch.zeros(raw.shape, dtype=torch.int32)
    for field in filter(None, (layout.codes, layout.scales, layout.minima)):
        ggml_reference.pack(ggml_reference.unpack(raw, field), field, blocks)
    for at in filter(lambda each: each is not None, (layout.d, layout.dmin)):
        blocks[:, at : at + 2] = raw[:, at : at + 2].int()
    assert torch.equal(blocks, raw.int())


# ------------------------------------------------------------------ fits


@pytest.mark.parametrize("name", NAMES)
def test_the_fit_does_better_than_the_plain_rule_and_products_of_inputs_better_still(name: str) -> None:
    weight = weights(5, seed=2)
    plain, fitted = block_format(name), block_format(name, "mse")
    least = fitted.quantise(weight)
    assert error(fitted, weight, least) < error(plain, weight, plain.quantise(weight))
    metric = products(fitted)
    weighted = fitted.quantise(weight, products=metric)
    assert error(fitted, weight, weighted, metric) < error(fitted, weight, least, metric)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("observer", OBSERVERS)
def test_zeros_and_constants_are_held(name: str, observer: str) -> None:
    """Zeros as they are, constants to the precision of scales in 16 bits or of the format's own."""
    form, weight = block_format(name, observer), torch.zeros(4, 256)
    weight[1], weight[2] = 0.75, -0.25
    values = form.dequantise(form.quantise(weight))
    assert torch.equal(values[[0, 3]], weight[[0, 3]])
    coarse = 0.34 if name == "q2-k" and observer == "amax" else 0.05
    assert float((values[1:3] / weight[1:3] - 1).abs().max()) < coarse


@pytest.mark.parametrize("name", ["q4-k", "q6-k", "q5-1", "iq4-xs"])
def test_parts_and_threads_make_up_the_whole(name: str) -> None:
    form, weight = block_format(name, "mse"), weights(80, 1024)
    metric = products(form, 1024)
    whole = form.quantise(weight, products=metric)["weight"]
    unit = form.alignment[1]
    kernels.set_threads(3)
    try:
        assert torch.equal(form.quantise(weight, products=metric)["weight"], whole)
    finally:
        kernels.set_threads(1)
    part = form.quantise(weight[7:70, 512:768])["weight"]
    assert torch.equal(form.quantise(weight)["weight"][7:70, 512 // unit : 768 // unit], part)


def test_what_it_cannot_hold_is_refused() -> None:
    weight = weights(20)
    weight[13, 4] = torch.inf
    with pytest.raises(ValuesError, match="1 Inf among 10240 values, the first at row 13, column 4"):
        block_format("q4-k", "mse").quantise(weight)
    with pytest.raises(PlanError, match=r"in_features 288 is not divisible by 256.*q4-k.*q5-0"):
        block_format("q4-k").quantise(torch.zeros(2, 288))
    with pytest.raises(PlanError, match="in_features 40 is not divisible by 32"):
        block_format("q8-0").quantise(torch.zeros(2, 40))


# ------------------------------------------------------------------ kernels


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("how", ["amax", "mse", "products"])
def test_fused_kernels_give_the_same_bits(name: str, how: str) -> None:
    pytest.importorskip("numba")
    from modelexport.quantization.formats._ggml import _search
    from modelexport.quantization.kernels import ggml_fused

    form, weight = block_format(name), weights(67)
    factor = torch.linalg.cholesky(products(form), upper=True) if how == "products" else None
    metric = ggml_reference.Metric.of(factor, weight.shape[1], form.layout.sub, weight.device)
    given = (form.layout, _search(form.block_type, "amax" if how == "amax" else "mse"))
    found = []
    for module in (ggml_reference, ggml_fused):
        blocks = form.quantise(torch.zeros_like(weight))["weight"]
        assert module.quantise(weight, metric, blocks, *given) == -1
        found.append(blocks)
    assert torch.equal(*found)
    values = [torch.empty_like(weight) for _ in found]
    ggml_reference.dequantise(found[0], values[0], form.layout)
    ggml_fused.dequantise(found[0], values[1], form.layout)
    assert torch.equal(*values)
    assert ggml_fused.quantise(torch.full_like(weight, torch.nan), metric, found[0], *given) == 0


# ------------------------------------------------------------------ grids


@pytest.mark.parametrize("name", INTEGERS)
def test_the_grid_has_the_values_that_are_stored(name: str) -> None:
    form = block_format(name, "mse")
    assert isinstance(form, IntegerBlockFormat)
    weight = weights(5)
    stored = form.quantise(weight)
    values, grid = form.dequantise(stored), form.grid(stored)
    assert float(((grid.nearest(values) - values).abs() / weight.abs().amax(dim=1, keepdim=True)).max()) < 1e-6
    other = {"weight": stored["weight"].clone()}
    form.store(torch.zeros_like(weight), other)
    assert not torch.equal(other["weight"], stored["weight"])
    form.store(values, other)
    assert torch.equal(form.dequantise(other), values)


def test_a_table_of_levels_has_no_grid() -> None:
    assert block_format("iq4-nl").without_grid == ("grid", "_put")
