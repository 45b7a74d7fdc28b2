"""The triangular factor of a Hessian, made in the memory of the Hessian itself."""

from __future__ import annotations

import torch
from torch import Tensor

from modelexport.quantization import kernels

__all__ = ["ascending", "factorise", "permute"]

_PANEL, _TILE = 256, 512
_RAISES = 4


def ascending(diagonal: Tensor) -> Tensor:
    """Columns by their energy, the least first, equal ones from the last to the first: int64 ``[features]``."""
    return diagonal.argsort(descending=True, stable=True).flip(0)


def permute(matrix: Tensor, order: Tensor) -> None:
    """``matrix[order][:, order]`` of a square matrix, in its place."""
    panels, order = range(0, matrix.shape[0], _PANEL), order.to(matrix.device)

    def rows(part: slice) -> None:
        for start in panels[part]:
            own = matrix[start : start + _PANEL]
            own.copy_(own.index_select(1, order))

    def columns(part: slice) -> None:
        for start in panels[part]:
            own = matrix[:, start : start + _PANEL]
            own.copy_(own.index_select(0, order))

    kernels.split(len(panels), rows, matrix)
    kernels.split(len(panels), columns, matrix)


def factorise(hessian: Tensor, damping: float) -> float:
    """Puts L of H + damping * g I = L L^T in the lower triangle; what is above it stays H's.

    g is the geometric mean of what H's diagonal has above 0: a few columns of large inputs make the arithmetic one so
    large that it drowns all others.

    Returns the damping; ten times that, up to four times over, where no smaller one makes the matrix positive definite
    in float32. -1 where none does.

    Args:
        hessian: float32 ``[features, features]``, symmetric, its diagonal not all 0.
    """
    size = hessian.shape[0]
    diagonal = hessian.diagonal().clone()
    mean = diagonal[diagonal > 0].double().log().mean().exp()
    for _ in range(_RAISES + 1):
        hessian.diagonal().copy_(diagonal + (damping * mean).float())
        if _cholesky(hessian):
            return damping
        for start in range(0, size, _PANEL):
            stop = min(size, start + _PANEL)
            hessian[start:stop, :start] = hessian[:start, start:stop].t()
            block = hessian[start:stop, start:stop]
            block.copy_(block.triu() + block.triu(1).t())
        damping *= 10.0
    return -1.0


def _cholesky(matrix: Tensor) -> bool:
    """The factor in the place of the lower triangle, panel by panel; whether the matrix is positive definite.

    Each product is of a fixed number of rows: bits depend on the matrix alone.
    """
    size = matrix.shape[0]
    for start in range(0, size, _PANEL):
        stop = min(size, start + _PANEL)
        done = matrix[start:stop, :start]
        block = matrix[start:stop, start:stop]
        factor, info = torch.linalg.cholesky_ex(block - done @ done.t())
        if int(info) != 0 or not bool(torch.isfinite(factor).all()):
            return False
        block.copy_(factor + block.triu(1))
        _below(matrix[stop:], done, factor, start)
    return True


def _below(matrix: Tensor, done: Tensor, factor: Tensor, start: int) -> None:
    """The factor's columns from ``start`` on, in the rows below those of a panel (``done``) whose factor is known."""
    columns = slice(start, start + factor.shape[0])

    def work(part: slice) -> None:
        for top in range(part.start, part.stop, _TILE):
            rows = matrix[top : min(part.stop, top + _TILE)]
            rest = rows[:, columns] - rows[:, :start] @ done.t()
            rows[:, columns] = torch.linalg.solve_triangular(factor.t(), rest, upper=True, left=False)

    if matrix.shape[0]:
        kernels.split_rows(matrix, work, _TILE)
