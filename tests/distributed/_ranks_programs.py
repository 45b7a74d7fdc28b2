"""Random programs of rank helpers, run by threads that take themselves for ranks, and a model of what they do."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from modelexport.distributed.ranks import (
    barrier,
    compute_and_broadcast,
    gather_from_all_ranks,
    reduce_and_broadcast,
    zero_first,
    zero_only,
)
from modelexport.distributed.rendezvous import agreement
from modelexport.distributed.rendezvous import links as rendezvous
from modelexport.errors import RankFailedError

_me = threading.local()


def my_rank() -> int:
    return int(_me.rank)


class Oops(Exception):
    """What fails on purpose."""


@contextmanager
def ranks_in_threads(stores: Sequence[Any]) -> Iterator[Callable[[Callable[[int], Any]], list[Any]]]:
    """Yields ``run(target)``: the values, or errors, of ``target(rank)``, in a thread for each rank's store object."""
    world = len(stores)

    def main(rank: int, target: Callable[[int], Any], results: list[Any]) -> None:
        _me.rank = rank
        try:
            results[rank] = target(rank)
        except BaseException as error:
            results[rank] = error

    def run(target: Callable[[int], Any]) -> list[Any]:
        results: list[Any] = [None] * world
        threads = [threading.Thread(target=main, args=(r, target, results), daemon=True) for r in range(world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads), "they hang"
        return results

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "group_position", lambda: (_me.rank, world))
        patch.setattr(rendezvous, "default_store", lambda: stores[_me.rank])
        yield run


@dataclass(frozen=True)
class Step:
    """One helper: ``chosen`` rank or ranks of the call, the ranks whose function fails, whether fn2 does."""

    call: str
    chosen: frozenset[int]
    failing: frozenset[int]
    fn2_fails: bool = False


def random_steps(seed: int, world: int, count: int) -> list[Step]:
    source = random.Random(seed)

    def some(chance: float) -> frozenset[int]:
        return frozenset(rank for rank in range(world) if source.random() < chance)

    calls = ["barrier", "compute", "gather", "reduce", "first", "only", "nested"]
    steps = []
    for _ in range(count):
        call = source.choice(calls)
        chosen = some(0.4) if call == "first" else frozenset([source.randrange(world)])
        steps.append(Step(call, chosen, some(0.3) if source.random() < 0.5 else frozenset(), source.random() < 0.2))
    return steps


def perform(steps: list[Step], rank: int) -> list[Any]:
    """What each step gives on ``rank``: a value, ``"Oops"``, or ``{"rank": who failed, "text": ..}``."""
    source = random.Random(rank)
    results: list[Any] = []
    for step in steps:
        if source.random() < 0.2:
            time.sleep(source.random() * 0.01)
        try:
            results.append(_one(step, rank))
        except Oops:
            results.append("Oops")
        except RankFailedError as error:
            results.append({"rank": error.rank, "text": str(error)})
    return results


def _one(step: Step, rank: int) -> Any:
    def work() -> int:
        if rank in step.failing:
            raise Oops
        return rank

    def total(values: list[int]) -> int:
        if step.fn2_fails:
            raise Oops
        return sum(values)

    (any_chosen, *_) = [*step.chosen, 0]
    if step.call == "barrier":
        return barrier()
    if step.call == "compute":
        return compute_and_broadcast(work, any_chosen)
    if step.call == "gather":
        return gather_from_all_ranks(work, rank=any_chosen)
    if step.call == "reduce":
        return reduce_and_broadcast(work, total)
    if step.call == "nested":
        return gather_from_all_ranks(lambda: work() + reduce_and_broadcast(lambda: 1, sum))
    with zero_first(rank in step.chosen) if step.call == "first" else zero_only():
        return work()


def expected(steps: list[Step], world: int) -> list[tuple[str, Any]]:
    """For each step ``("failed", ranks that may be blamed)`` on all ranks, or ``("values", one for each rank)``."""
    plan: list[tuple[str, Any]] = []
    pending: frozenset[int] = frozenset()
    for step in steps:
        blamed, values, announced = _predict(step, world)
        if step.call == "only":
            pending |= announced
        elif pending:
            blamed, pending = pending, frozenset()
        elif not blamed:
            pending = announced
        plan.append(("failed", blamed) if blamed else ("values", values))
    return plan


def _predict(step: Step, world: int) -> tuple[frozenset[int], list[Any], frozenset[int]]:
    everyone = range(world)
    own = ["Oops" if rank in step.failing else rank for rank in everyone]
    if step.call == "only":
        return frozenset(), own, step.failing
    if step.call == "first":
        return step.failing & step.chosen, own, step.failing - step.chosen
    (chosen,) = step.chosen
    values = {
        "barrier": [None] * world,
        "compute": [chosen] * world,
        "gather": [list(everyone) if rank == chosen else None for rank in everyone],
        "reduce": [sum(everyone)] * world,
        "nested": [[rank + world for rank in everyone] if rank == 0 else None for rank in everyone],
    }[step.call]
    blamed = step.failing
    if step.call == "barrier":
        blamed = frozenset()
    elif step.call == "compute":
        blamed &= step.chosen
    elif step.call == "reduce" and not blamed and step.fn2_fails:
        blamed = frozenset([0])
    return blamed, values, frozenset()
