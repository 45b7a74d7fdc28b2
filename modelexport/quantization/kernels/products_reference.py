"""The choice of scales by the products of a linear's inputs, in plain torch: what the fused kernel must match to the
bit."""

from __future__ import annotations

import torch
from torch import Tensor

from modelexport.quantization.kernels import reference
from modelexport.quantization.kernels.scales import TRIED, shrinks

__all__ = ["choose", "integers"]


def integers(values: Tensor, step: Tensor, zero: Tensor | None, bits: int) -> Tensor:
    """The integers of so many bits nearest to ``values / step`` (plus ``zero``, which is taken off again), as float32.

    Args:
        values: float32 ``[..., group]``.
        step, zero: float32 ``[...]``.
    """
    ratio = values / step.unsqueeze(-1)
    if zero is None:
        return reference._rounded(ratio, torch.int8, bits)
    return reference._rounded(ratio + zero.unsqueeze(-1), torch.int8, bits) - zero.unsqueeze(-1)


def choose(
    values: Tensor,
    group: int,
    amax: Tensor,
    products: Tensor,
    moved: Tensor,
    aimed: Tensor,
    scale_dtype: torch.dtype,
    limit: float,
    bits: int,
) -> Tensor:
    """Of the scales that a search tries, those with the least d G d^T: numbers, uint8 ``[rows, blocks]``.

    d is what rounding with a scale does to a block, s n - w, and G the products of its inputs. n G is taken over from
    one scale to the next: for each integer that has changed, from the first on, the change times its row of G is added.
    The error is the sum of d times (s n G - w G), added up as :func:`.reference.search_errors` adds squares. Of equal
    errors the largest scale's counts.

    Args:
        values: float32 ``[rows, blocks * group]``.
        amax: float32 ``[rows, blocks]``, or ``[rows, blocks, 2]`` for integers with zero points.
        products: G, float32 ``[blocks, group, group]``, symmetric.
        moved: n G with the first scale tried, float32 ``[blocks, rows, group]``; it is written to.
        aimed: w G, likewise.
        scale_dtype, limit, bits: see :func:`.reference.search_errors`.
    """
    rows, blocks = len(values), len(products)
    affine = amax.dim() == 3
    by_block = values.unflatten(1, (blocks, group))
    before: Tensor | None = None
    errors = []
    for number in range(TRIED):
        tried = amax * shrinks(bits)[number]
        step, zero = reference.tried_scales(tried, affine, torch.int8, scale_dtype, limit, bits, values.dtype)
        now = integers(by_block, step, zero, bits)
        if before is not None:
            change = (now - before).transpose(0, 1)
            for column in range(group):
                moved += change[:, :, column : column + 1] * products[:, column : column + 1]
        before = now
        apart = now * step.unsqueeze(-1) - by_block
        other = moved.transpose(0, 1) * step.unsqueeze(-1) - aimed.transpose(0, 1)
        found = (apart.double() * other.double()).reshape(rows * blocks, group)
        errors.append(reference.sum_of_lanes(found, reference.SEARCH_LANES))
    return torch.stack(errors).argmin(dim=0).to(torch.uint8).view(rows, blocks)
