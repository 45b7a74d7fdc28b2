"""Products of a sample and a weight whose every element is the same to the bit, however ranks cut the weight's rows.

A matrix product may depend on its shape: so a rank's rows are multiplied in tiles of :data:`TILE` rows that begin at
multiples of it in the whole weight, and what another rank has of a tile is zeros here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

TILE = 128
"""Rows; a multiple of all that number formats hold together along them (blocks of 128, packed zero points of 8)."""


@dataclass(frozen=True)
class Tile:
    """One of a rank's tiles.

    Attributes:
        number: of the tile, in the whole weight.
        rows: of the rank's weight.
        within: which rows of the tile these are.
    """

    number: int
    rows: slice
    within: slice

    def filled(self, weight: Tensor) -> Tensor:
        """The tile as ``[TILE, columns]``: new memory, or where the rank has all of it the weight's own."""
        if self.within == slice(0, TILE):
            return weight[self.rows]
        out = weight.new_zeros(TILE, weight.shape[1])
        out[self.within] = weight[self.rows]
        return out


def tiles_of(rows: tuple[int, int]) -> Iterator[Tile]:
    """The tiles that cover these rows of a whole weight."""
    start, stop = rows
    for first in range(start // TILE * TILE, stop, TILE):
        low, high = max(first, start), min(first + TILE, stop)
        yield Tile(first // TILE, slice(low - start, high - start), slice(low - first, high - first))


def squares(difference: Tensor, tile: Tile) -> Tensor:
    """float64 ``[rows of the tile]``: sums of squares over the tokens of ``[TILE, tokens]``, each row by itself."""
    return difference.double().square_().sum(dim=1)[tile.within]


@contextmanager
def one_thread_an_operation() -> Iterator[None]:
    """As bits depend on it. Threads of the kernels' pool work on different rows."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
