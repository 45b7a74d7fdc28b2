"""The search for the scale with the least squared error, for both kinds of kernels.

What is tried is :func:`.scales.shrinks` of the largest magnitude; of equal errors the larger scale wins. The errors are
:func:`.reference.search_errors`'s, added where a scale reaches over several rows in an order of their number alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from modelexport.quantization import kernels
from modelexport.quantization.kernels import reference
from modelexport.quantization.kernels.scales import TRIED, shrinks

_BLOCK_ELEMENTS = 1 << 18


def sum_in_halves(errors: Tensor) -> Tensor:
    """Sum over the first dim: filled up with zeros to a power of two, the second half is added to the first."""
    count = 1 << max(0, errors.shape[0] - 1).bit_length()
    total = torch.nn.functional.pad(errors, (0, 0) * (errors.dim() - 1) + (0, count - errors.shape[0]))
    while total.shape[0] > 1:
        half = total.shape[0] // 2
        total = total[:half] + total[half:]
    return total[0]


def best(amax: Tensor, errors: Tensor, bits: int) -> Tensor:
    """``amax`` (``[...]``, or ``[..., 2]``) shrunken to where ``errors`` (``[..., TRIED]``) are least."""
    factor = shrinks(bits).to(amax.device)[errors.argmin(dim=-1)]
    return amax * (factor if amax.dim() < errors.dim() else factor.unsqueeze(-1))


def search(
    weight: Tensor,
    group: int,
    storage: torch.dtype,
    scale_dtype: torch.dtype,
    limit: float,
    *,
    bits: int = 8,
    affine: bool = False,
    amax: Tensor | None = None,
) -> Tensor:
    """The ``amax`` for :func:`.reference.quantise_groups` with which each group has the least squared error.

    float32 ``[rows, cols / group]`` (``[rows, cols / group, 2]`` where ``affine``, with zero points). ``amax``, of the
    same shape, replaces the groups' own. For the others see :func:`.reference.search_errors`.
    """
    rows, cols = weight.shape
    groups = cols // group if cols else 0
    shape = (rows, groups, 2) if affine else (rows, groups)
    found = torch.empty(shape, dtype=torch.float32, device=weight.device)

    def work(part: slice) -> None:
        step = max(1, _BLOCK_ELEMENTS // cols)
        for start in range(part.start, part.stop, step):
            block = slice(start, min(part.stop, start + step))
            values = weight[block].reshape(-1, group)
            module = kernels.of(values)
            own = module.row_extremes(values) if affine else module.row_amax(values)
            if amax is not None:
                own = amax[block].reshape(own.shape)
            errors = errors_of(values, own, storage, scale_dtype, limit, bits)
            found[block] = best(own, errors, bits).view(found[block].shape)

    if groups:
        kernels.split_rows(weight, work)
    return found


def chosen(
    weight: Tensor, group: int, choice: Tensor, bits: int, *, affine: bool = False, amax: Tensor | None = None
) -> Tensor:
    """As :func:`search`, with what each group is to take by its number among those tried: ``choice``, integers
    ``[rows, cols / group]``."""
    if amax is None:
        values = weight.reshape(-1, group)
        own = kernels.row_extremes(values) if affine else kernels.row_amax(values)
        amax = own.view(*choice.shape, *own.shape[1:])
    factor = shrinks(bits).to(amax.device)[choice.long()]
    return amax * (factor.unsqueeze(-1) if affine else factor)


def choose(
    values: Tensor, products: Tensor, scale_dtype: torch.dtype, limit: float, bits: int, *, affine: bool = False
) -> Tensor:
    """See :func:`.products_reference.choose`; on one thread."""
    from modelexport.quantization.kernels import products_reference

    rows, (blocks, group, _) = len(values), products.shape
    flat = values.reshape(-1, group)
    own = kernels.row_extremes(flat) if affine else kernels.row_amax(flat)
    amax = own.view(rows, blocks, *own.shape[1:])
    by_block = values.unflatten(1, (blocks, group))
    step, zero = reference.tried_scales(amax, affine, torch.int8, scale_dtype, limit, bits, values.dtype)
    integers = products_reference.integers(by_block, step, zero, bits)
    moved, aimed = (part.transpose(0, 1) @ products for part in (integers, by_block))
    module = kernels.of(values, "products_", at_once=True)
    found: Tensor = module.choose(values, group, amax, products, moved, aimed, scale_dtype, limit, bits)
    return found


def errors_of(
    weight: Tensor, amax: Tensor, storage: torch.dtype, scale_dtype: torch.dtype, limit: float, bits: int
) -> Tensor:
    """:func:`.reference.search_errors` as a new tensor, on one thread."""
    errors = torch.empty(weight.shape[0], TRIED, dtype=torch.float64, device=weight.device)
    tried = shrinks(bits).to(weight.device)
    kernels.of(weight).search_errors(weight, amax, storage, scale_dtype, limit, tried, errors, bits=bits)
    return errors


def search_rows(
    weight: Tensor, amax: Tensor, storage: torch.dtype, scale_dtype: torch.dtype, limit: float, bits: int = 8
) -> Tensor:
    """Each row's squared errors, float64 ``[rows, TRIED]``, for the scales that follow from one ``amax`` (``[1]``)."""
    errors = torch.empty(weight.shape[0], TRIED, dtype=torch.float64, device=weight.device)

    def work(part: slice) -> None:
        values = weight[part]
        errors[part] = errors_of(values, amax.expand(values.shape[0]), storage, scale_dtype, limit, bits)

    kernels.split_rows(weight, work)
    return errors


def search_blocks(
    weight: Tensor, side: int, storage: torch.dtype, scale_dtype: torch.dtype, limit: float, bits: int = 8
) -> Tensor:
    """The ``amax`` for :func:`.reference.quantise_blocks` with the least squared error: float32, one for each block."""
    rows, cols = weight.shape
    across = -(-cols // side)
    found = torch.empty(-(-rows // side), across, dtype=torch.float32, device=weight.device)

    def work(part: slice) -> None:
        for start in range(part.start, part.stop, side):
            values = weight[start : min(part.stop, start + side)]
            values = torch.nn.functional.pad(values, (0, -cols % side)).reshape(-1, side)
            own = kernels.of(values).row_amax(values).view(-1, across).amax(dim=0)
            shared = own.expand(values.shape[0] // across, across).reshape(-1)
            errors = errors_of(values, shared, storage, scale_dtype, limit, bits)
            found[start // side] = best(own, sum_in_halves(errors.view(-1, across, TRIED)), bits)

    if found.numel():
        kernels.split_rows(weight, work, side)
    return found
