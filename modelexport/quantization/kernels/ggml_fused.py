"""The fused kernels of ggml's blocks for CPU tensors: tensors in, :mod:`.ggml_compiled` loops.

Importing this module compiles every loop, see there; it starts no thread and runs no torch operation.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from modelexport.quantization.kernels import fused
from modelexport.quantization.kernels import ggml_compiled as compiled
from modelexport.quantization.kernels.ggml_reference import AT_ONCE, Metric, Search

if TYPE_CHECKING:
    from modelexport.quantization.ggml_layouts import BitField, BlockLayout

_NONE = np.empty(0, np.float32)


class _Tables(NamedTuple):
    """A layout as the loops take it."""

    levels: tuple[np.ndarray[Any, Any], ...]  # the levels, what lies between them, their distances
    places: np.ndarray[Any, Any]
    fields: tuple[np.ndarray[Any, Any], ...]
    flips: np.ndarray[Any, Any]


def _field(field: BitField | None) -> np.ndarray[Any, Any]:
    """int64 ``[runs, 6]``, see :func:`.ggml_compiled._put`: numbers whose bytes follow each other, with one shift."""
    runs: list[list[int]] = []
    within = 0
    for bits, places in zip(field.bits, field.places, strict=True) if field is not None else ():
        for number, (at, by) in enumerate(places):
            first, count, byte, shift, _, _ = runs[-1] if number else [0] * 6
            if number and (first + count, byte + count, shift) == (number, at, by):
                runs[-1][1] += 1
            else:
                runs.append([number, 1, at, by, within, 2**bits - 1])
        within += bits
    return np.array(runs, np.int64).reshape(-1, 6)


@cache
def _tables(layout: BlockLayout) -> _Tables:
    table = np.array(layout.levels, np.float32)
    middles, jumps = (table[1:] + table[:-1]) / 2, np.diff(table)
    fields = (layout.codes, layout.scales, layout.minima)
    dmin = -1 if layout.dmin is None else layout.dmin
    places = np.array([layout.d, dmin, layout.adds_minimum, layout.lowest_scale], np.int64)
    flips = np.array([0 if field is None else field.flipped for field in fields], np.int64)
    levels = (table, middles, jumps) if layout.levels else (_NONE, _NONE, _NONE)
    return _Tables(levels, places, tuple(map(_field, fields)), flips)


def quantise(weight: Tensor, metric: Metric, blocks: Tensor, layout: BlockLayout, search: Search) -> int:
    """See :func:`.ggml_reference.quantise`."""
    rows, cols = weight.shape
    tables = _tables(layout)
    low, high = map(float, layout.level_range)
    scales = (0.0, 0.0, 0.0)
    if layout.scales is not None:
        highest = layout.lowest_scale + layout.scales.highest
        scales = (layout.lowest_scale, highest, 1.0 / (layout.lowest_scale or layout.scales.highest))
    minima = (0.0, 0.0) if layout.minima is None else (layout.minima.highest, 1.0 / layout.minima.highest)
    fit = (int(layout.affine), int(layout.minima is None), np.array(search.steps, np.float32), *search[1:])
    shape = (layout.sub, layout.block // layout.sub, layout.nbytes)
    factor = _NONE if metric.factor is None else metric.factor.contiguous().view(-1).numpy()
    given = (factor, metric.ones.t().contiguous().view(-1).numpy(), metric.total.contiguous().numpy())
    chunk = max(1, AT_ONCE // max(1, cols * compiled.WIDTH)) * compiled.WIDTH
    for start in range(0, rows, chunk):
        values = weight[start : start + chunk].float().contiguous()
        finite = torch.isfinite(fused.row_amax(values))
        if not bool(finite.all()):
            return start + int((~finite).nonzero()[0, 0])
        out = torch.empty(values.numel() // layout.block * layout.nbytes, dtype=torch.uint8)
        compiled.quantise(
            *(values.view(-1).numpy(), len(values), cols, *given, *shape, low, high, *tables.levels, *fit),
            *(*scales, *minima, tables.places, *tables.fields, tables.flips, out.numpy()),
        )
        blocks[start : start + chunk] = out.view(len(values), -1, layout.nbytes)
    return -1


def dequantise(blocks: Tensor, out: Tensor, layout: BlockLayout) -> None:
    """See :func:`.ggml_reference.dequantise`."""
    rows, cols = out.shape
    tables, count = _tables(layout), layout.block // layout.sub
    chunk = max(1, AT_ONCE // max(1, cols))
    for start in range(0, rows, chunk):
        part = blocks[start : start + chunk].contiguous()
        to = out[start : start + chunk]
        whole = to.dtype == torch.float32 and to.is_contiguous()
        values = to if whole else torch.empty(to.shape, dtype=torch.float32)
        compiled.dequantise(
            *(part.view(-1).numpy(), part.shape[0] * part.shape[1], layout.sub, count, layout.nbytes),
            *(float(layout.lowest), tables.levels[0], tables.places, *tables.fields, tables.flips),
            values.view(-1).numpy(),
        )
        if not whole:
            to.copy_(values)
