"""The products of the inputs of each block of a weight, to which number formats fit their scales: ``fits_products``."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["of_sample", "of_squares"]

_LEAST = 2.0**-10
"""What an input counts that no token has touched, in the mean of all."""


def of_sample(sample: Tensor, blocks: int) -> Tensor:
    """Returns the mean products of each block's inputs: float32 ``[blocks, width, width]``, positive definite.

    Of few tokens they say more of these than of the inputs: what is not on the diagonal then counts less.

    Args:
        sample: float32 ``[tokens, blocks * width]``.
        blocks: of a row.
    """
    parts = sample.double().unflatten(1, (blocks, -1)).transpose(0, 1)
    tokens, width = parts.shape[1:]
    products = parts.transpose(1, 2) @ parts
    held = torch.eye(width, dtype=torch.float64, device=sample.device)
    return _firm(products * (held + (1 - held) * (tokens / (tokens + width))))


def of_squares(squares: Tensor, blocks: int) -> Tensor:
    """Returns the same, but for what is not on the diagonal: for rounding whose errors make up for each other.

    Args:
        squares: float32 ``[blocks * width]``, the sum of each input's squares.
        blocks: of a row.
    """
    return _firm(squares.view(blocks, -1).double().diag_embed())


def _firm(products: Tensor) -> Tensor:
    """As float32 means that a fit can divide by: what no token has touched counts a little."""
    size = products.diagonal(dim1=1, dim2=2).mean()
    held = torch.eye(products.shape[1], dtype=torch.float64, device=products.device)
    return (products / torch.where(size > 0, size, 1.0) + held * _LEAST).float()
