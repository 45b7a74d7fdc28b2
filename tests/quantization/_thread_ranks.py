"""Ranks of a test: threads of one process that hold different rows of the same weights."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from modelexport.quantization.algorithms.base import RankGroup

T = TypeVar("T")


class Rendezvous:
    """Where the ranks of a test leave what they have, and take what all have left."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.barrier = threading.Barrier(world, timeout=60)
        self.left: list[Any] = [None] * world

    def exchange(self, rank: int, value: Tensor) -> list[Tensor]:
        self.left[rank] = value.clone()
        self.barrier.wait()
        found = list(self.left)
        self.barrier.wait()
        return found


class ThreadRanks(RankGroup):
    """What :class:`RankGroup` does by collectives, between threads; the addition is the same."""

    def __init__(self, rank: int, rendezvous: Rendezvous) -> None:
        self.rank, self.world, self.rendezvous = rank, rendezvous.world, rendezvous

    def largest(self, value: Tensor) -> Tensor:
        return value.copy_(torch.stack(self.rendezvous.exchange(self.rank, value)).amax(dim=0))

    def total(self, table: Tensor, rows: tuple[int, int], count: int) -> Tensor:
        whole = torch.zeros(count, *table.shape[1:], dtype=torch.float64)
        whole[rows[0] : rows[1]] = table
        alone = RankGroup()
        return alone.total(torch.stack(self.rendezvous.exchange(self.rank, whole)).sum(dim=0), (0, count), count)


def run_ranks(cuts: Sequence[Any], work: Callable[[RankGroup, Any], T]) -> list[T]:
    """``work`` with each rank's part of something, all at the same time."""
    rendezvous = Rendezvous(len(cuts))

    def one(rank: int) -> T:
        try:
            return work(ThreadRanks(rank, rendezvous), cuts[rank])
        except BaseException:
            rendezvous.barrier.abort()
            raise

    with ThreadPoolExecutor(len(cuts)) as pool:
        return list(pool.map(one, range(len(cuts))))
