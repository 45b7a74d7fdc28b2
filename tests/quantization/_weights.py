"""Weights for the tests here, every kind of row that has broken somebody's quantiser, and all formats in all sizes."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import strategies as st
from torch import Tensor

from modelexport.quantization import formats
from modelexport.quantization.formats.base import NumberFormat, TensorSpec
from modelexport.quantization.ggml_layouts import LAYOUTS

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BLOCKS = tuple(layout.number_format for layout in LAYOUTS.values())
"""The formats of llama.cpp's blocks, which have tests of their own."""
NAMES = tuple(name for name in formats.names() if name not in BLOCKS)
FORMATS = tuple((name, group) for name in NAMES for group in formats.get(name).group_sizes or (None,))
MICROSCALING = ("nvfp4", "nvfp4-wo", "mxfp4", "mxfp4-wo", "mxfp8")
PLAIN = tuple((name, group) for name, group in FORMATS if name not in MICROSCALING)
"""The formats of integers and of FP8 without shared exponents, and none at all."""


def random_weight(rows: int, cols: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Rows of very different sizes: zeros, single values, denormals, the largest finite, outliers, plain."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, cols, generator=generator)
    info = torch.finfo(dtype)
    kinds = [1.0, 0.02, 1e-3, info.tiny, info.tiny / 8, info.max / 16, 0.0, 37.0]
    weight *= torch.tensor([kinds[row % len(kinds)] for row in range(rows)]).unsqueeze(1)
    weight = weight.clamp(info.min, info.max).to(dtype)
    if rows > 2 and cols > 2:
        weight[1, cols // 2] = 8.0
        weight[2, 0] = -0.0
    return weight


def quantise(number_format: NumberFormat, weight: Tensor, **arguments: object) -> dict[str, Tensor]:
    """As the format does it, with inputs of at most 3 where it wants to know."""
    return number_format.quantise(weight, inputs=3.0 if number_format.has_static_inputs else None, **arguments)


def widths(number_format: NumberFormat) -> int:
    """What the columns must be a multiple of."""
    if number_format.group_size is not None and number_format.group_size > 0:
        return number_format.group_size
    return 32 if number_format.name in MICROSCALING else 1


def piece(spec: TensorSpec, whole: Tensor, rows: slice, cols: slice) -> Tensor:
    """The part of a stored tensor that covers these rows and columns of the weight."""
    index = []
    for axis in spec.axes:
        cut = slice(0) if axis is None else (rows, cols)[axis[0]]
        index.append(slice(None) if axis is None else slice(cut.start // axis[1], -(-cut.stop // axis[1])))
    return whole[tuple(index)]


def cuts(data: st.DataObject, size: int, unit: int) -> list[slice]:
    """The dim of that size in up to four uneven parts, cut on multiples of ``unit``; parts may be empty."""
    marks = data.draw(st.lists(st.integers(0, size // unit), max_size=3))
    edges = [0, *sorted(mark * unit for mark in marks), size]
    return [slice(start, stop) for start, stop in pairwise(edges)]


def steps(number_format: NumberFormat, stored: dict[str, Tensor]) -> Tensor:
    """The scale of every weight, float64 ``[rows, cols]``."""
    rows, cols = number_format.stored_shape(stored)
    scale = stored["weight_scale"]
    wide = 2.0 ** (scale.double() - 127) if scale.dtype == torch.uint8 else scale.double()
    if "weight_global_scale" in stored:
        wide = wide / stored["weight_global_scale"].double()
    wide = wide.reshape(1, 1) if wide.dim() == 1 else wide
    down, across = (128, 128) if number_format.name == "fp8-block" else (1, cols // wide.shape[1])
    if wide.shape[0] > 1 or down > 1:
        wide = wide.repeat_interleave(down, 0)[:rows]
    return wide.repeat_interleave(across, 1)[:, :cols].expand(rows, cols)


def zeros(number_format: NumberFormat, stored: dict[str, Tensor]) -> Tensor:
    """The zero point of every weight, float64, of such a shape that it can be added to ``[rows, cols]``."""
    if "weight_zero_point" not in stored:
        return torch.zeros(1, 1, dtype=torch.float64)
    (rows, cols), bits = number_format.stored_shape(stored), number_format.weight_bits
    words = stored["weight_zero_point"].long() & 0xFFFFFFFF
    fields = torch.stack([(words >> at) & (2**bits - 1) for at in range(0, 32, bits)], dim=1).flatten(0, 1)[:rows]
    return (fields - 2 ** (bits - 1)).double().repeat_interleave(cols // fields.shape[1], 1)


def bound(number_format: NumberFormat, stored: dict[str, Tensor], weight: Tensor) -> Tensor:
    """How far each value may be from the weight's: float64 ``[rows, cols]``.

    Half the distance to the next number of the format, or the distance from the largest (smallest) number where the
    weight is beyond that; and what rounding the quotient w / scale in float32 may add.
    """
    wide = weight.double()
    if number_format.name == "none":
        return torch.zeros_like(wide)
    step, zero = steps(number_format, stored), zeros(number_format, stored)
    if number_format.weight_arguments()["type"] == "int":
        half = 2.0 ** (number_format.weight_bits - 1)
        low, high, rounding = (-half - zero) * step, (half - 1 - zero) * step, 0.5 * step
    elif number_format.weight_bits == 8:  # e4m3: 3 bits after the point, denormals of 2^-9
        low, high, rounding = -448 * step, 448 * step, torch.maximum(wide.abs() / 16, step * 2.0**-10)
    else:  # e2m1: half of 0.5 up to 2, of 1 up to 4, of 2 up to 6
        low, high, rounding = -6 * step, 6 * step, torch.maximum(wide.abs() / 4, step * 0.25)
    beyond = torch.maximum(low - wide, wide - high)
    return torch.maximum(rounding, beyond) * (1 + 1e-6) + (wide.abs() + step * zero.abs()) * 2.0**-22


def as_view(weight: Tensor) -> Tensor:
    """The same values as a column slice of something wider (rows further apart than they are long)."""
    rows, cols = weight.shape
    wide = torch.full((rows, cols + 13), float("nan")).to(weight.dtype)
    wide[:, 5 : 5 + cols] = weight
    return wide[:, 5 : 5 + cols]


def raw(tensor: Tensor) -> Tensor:
    """A tensor's bytes, for comparing also NaN payloads and the sign of zero."""
    return tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def same_bytes(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """Whether two sets of stored tensors are equal to the byte."""
    return list(left) == list(right) and all(
        left[key].dtype == right[key].dtype
        and left[key].shape == right[key].shape
        and torch.equal(raw(left[key]), raw(right[key]))
        for key in left
    )
