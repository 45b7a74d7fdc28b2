"""What the ranks of test_ranks run. Targets for launched ranks report what the test compares; others return it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from modelexport.distributed.launch import report
from modelexport.distributed.ranks import (
    barrier,
    compute_and_broadcast,
    gather_from_all_ranks,
    gather_scalar_from_all_ranks,
    is_main_process,
    reduce_and_broadcast,
    zero_first,
    zero_only,
)
from modelexport.distributed.rendezvous.links import default_store
from modelexport.distributed.transport.tree import register_config

VALUES: list[Any] = [
    16777217, 2**40 + 1, -(2**63) - 1, 0, 10**5000, 0.1, -0.0, 5e-324, float("inf"), float("-inf"), float("nan"), True,
    False, None, "", "text \u00e9\ud800\n", b"\x00\xff", [], (), {}, [1, [2.0, (True, None)]], (1,), {"$": "int"},
    {"a": {"b": [0.1, 2**40 + 1, {"c": (True, "x", None)}]}, 3: b"k", None: -1, (1, "t"): float("-inf")},
]  # fmt: skip
GATHERS = (gather_from_all_ranks, gather_scalar_from_all_ranks)


def same(one: Any, other: Any) -> bool:
    """Equal to the bit, types included, at every depth."""
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return same(list(one.items()), list(other.items()))
    if isinstance(one, float):
        return one.hex() == other.hex()
    return bool(one == other)


def place() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def caught(action: Callable[[], Any]) -> BaseException:
    """The error that ``action`` raises."""
    try:
        action()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def value_travels(value: Any) -> None:
    """``value``, wrapped so that each rank's is its own, through every helper."""
    rank, world = place()
    runs = []

    def make() -> tuple[int, Any]:
        runs.append(rank)
        return rank, value

    everyone = [(r, value) for r in range(world)]
    last = world - 1
    for source in {0, last}:
        assert same(compute_and_broadcast(make, source), (source, value))
        assert same(compute_and_broadcast(lambda: value, rank=source), value)
    assert len(runs) == (rank in {0, last})
    for gather in GATHERS:
        for receiver in {0, last}:
            assert same(gather(make, world, receiver), everyone if rank == receiver else None)
        assert same(gather(lambda: value), [value] * world if rank == 0 else None)
    seen = []

    def pick(values: list[Any]) -> Any:
        seen.append(rank)
        assert same(values, everyone)
        return values[-1][1]

    assert same(reduce_and_broadcast(make, pick, world), value)
    assert seen == ([0] if rank == 0 else [])


@register_config
@dataclass
class Note:
    text: str
    weight: torch.Tensor


def note_travels() -> None:
    """Dataclasses and tensors, and a value above the store's limit for one message."""
    rank, world = place()
    note = Note("w", torch.arange(6, dtype=torch.bfloat16).view(2, 3)[:, 1:])
    for received in compute_and_broadcast(lambda: [note, torch.tensor(rank), torch.empty(0, 2)], world - 1)[:1]:
        assert received.text == "w"
        assert received.weight.dtype is torch.bfloat16
        assert torch.equal(received.weight, note.weight)
        received.weight.zero_()  # its own memory
    large = bytes(9 << 20) + b"end"
    lists = gather_from_all_ranks(lambda: large, rank=world - 1)
    assert lists == ([large] * world if rank == world - 1 else None)
    assert compute_and_broadcast(lambda: large) == large


def order_is_kept() -> None:
    """barrier and zero_first, by a clock that all ranks of a machine share."""
    rank, world = place()
    time.sleep(0.05 * (world - rank))
    came = time.monotonic()
    barrier()
    left = time.monotonic()
    times = gather_from_all_ranks(lambda: (came, left))
    if times is not None:
        assert max(came for came, _ in times) <= min(left for _, left in times)
    for mains in ({0}, {world - 1}, set(range(0, world, 2)), set(), set(range(world))):
        with zero_first(rank in mains):
            began = time.monotonic()
            time.sleep(0.02)
            ended = time.monotonic()
        spans = gather_from_all_ranks(lambda span=(began, ended): span)
        if spans is not None and 0 < len(mains) < world:
            assert max(spans[r][1] for r in mains) <= min(spans[r][0] for r in range(world) if r not in mains)


class _Saver:
    @zero_only
    def save(self, path: str, *, times: int = 1) -> str:
        """Saves."""
        return path * times

    @classmethod
    @zero_only()
    def make(cls) -> type:
        return cls


def only_main_runs() -> None:
    rank, _ = place()
    assert is_main_process() == (rank == 0)
    assert _Saver().save("ab", times=2) == ("abab" if rank == 0 else None)
    assert (_Saver.save.__name__, _Saver.save.__doc__) == ("save", "Saves.")
    assert _Saver.make() is (_Saver if rank == 0 else None)
    only = zero_only()
    with only as outer, only as inner:
        assert outer is inner is (rank == 0)
        barrier()  # every rank runs the body, so it may


def everything_once() -> None:
    """All that works, on every rank; whatever does not raises here, and so in the test."""
    for value in VALUES:
        value_travels(value)
    note_travels()
    order_is_kept()
    only_main_runs()
    nested = gather_from_all_ranks(lambda: reduce_and_broadcast(lambda: place()[0], sum) + place()[0])
    world = place()[1]
    total = world * (world - 1) // 2
    assert nested == ([total + r for r in range(world)] if place()[0] == 0 else None)


def works() -> None:
    rank, world = place()
    before = keys_in_store() if world > 1 else 0
    everything_once()
    if world > 1:
        assert keys_in_store() == before
    report({"rank": rank, "pid": os.getpid()})


def keys_in_store() -> int:
    """How many keys the store holds when no rank is in a helper."""
    barrier()
    for _ in range(2):  # gloo's first barrier may leave keys of its own
        dist.barrier()
    keys = default_store().num_keys()
    dist.barrier()
    return keys
