"""What goes wrong in the ranks of test_ranks: every kind of failure and misuse, and ranks that come late or die."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from modelexport.distributed.launch import current_phase, phase_scope, report
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
from modelexport.distributed.rendezvous import agreement
from modelexport.distributed.rendezvous.links import default_store
from modelexport.errors import CheckpointError
from tests.distributed import _ranks_targets as targets
from tests.distributed._ranks_targets import caught, place

# What fails. Each function is called on every rank, and raises on each or leaves that to the next helper.


_flags: list[str] = []


def _flag(key: str) -> None:
    """Tells other ranks something, past the helpers."""
    _flags.append(key)
    default_store().set(key, "x")


def _raise(error: BaseException, when: bool = True) -> Any:
    if when:
        raise error
    return "fine"


def _zero_first_main(rank: int, culprit: int) -> None:
    with zero_first(rank == culprit):
        _raise(ValueError("in the body"))  # others would say so too, if theirs ran


def _zero_first_other(rank: int, culprit: int) -> None:
    assert culprit
    try:
        with zero_first(rank == 0):
            _raise(ValueError("in another body"), rank == culprit)
    except ValueError:
        assert rank == culprit
    barrier()


def _zero_only_block(rank: int, culprit: int) -> None:
    try:
        with zero_only():
            _raise(ValueError("in the block"), rank == culprit)
    except ValueError:
        assert rank == culprit
    compute_and_broadcast(lambda: 1)


def _zero_only_function(rank: int, culprit: int) -> None:
    try:
        zero_only(barrier)()
    except ValueError:
        assert rank == 0
    gather_from_all_ranks(lambda: 1)


def _slow_rank(rank: int, culprit: int) -> None:
    """The error reaches all the others while one rank is still at work: it waits for them to have it."""
    slow = 0 if culprit else 1
    key = f"slow/{culprit}/"
    others = [f"{key}{r}" for r in range(place()[1]) if r != slow]

    def work() -> None:
        _raise(ValueError("early"), rank == culprit)
        if rank == slow:
            default_store().wait(others, timedelta(seconds=30))

    try:
        gather_from_all_ranks(work)
    finally:
        _flag(f"{key}{rank}")


def _nested(rank: int, culprit: int) -> None:
    """The others wait in a helper inside their function when this rank's function fails."""
    gather_from_all_ranks(lambda: _raise(ValueError("outside"), rank == culprit) and barrier())


def _nested_failure(rank: int, culprit: int) -> None:
    inner = partial(compute_and_broadcast, lambda: _raise(ValueError("inside")), culprit)
    gather_from_all_ranks(inner)


def _within_a_phase(rank: int, culprit: int) -> None:
    def work() -> None:
        with phase_scope("quantising layer 3"):
            _raise(CheckpointError("it is damaged"), rank == culprit)

    reduce_and_broadcast(work, len)


def _exits(rank: int, culprit: int) -> None:
    compute_and_broadcast(lambda: sys.exit(3), culprit)


def _interrupted(rank: int, culprit: int) -> None:
    """A signal's exception ends one rank's wait; the last rank to come hears of that."""
    key = f"interrupted/{culprit}"
    if rank == culprit:
        former = signal.signal(signal.SIGALRM, lambda *_: _raise(KeyboardInterrupt()))
        threading.Thread(target=_interrupt_when_waiting).start()
        try:
            barrier()
        finally:
            signal.signal(signal.SIGALRM, former)
            _flag(key)
    if rank == (0 if culprit else 1):
        default_store().wait([key], timedelta(seconds=30))
    barrier()


def _interrupt_when_waiting() -> None:
    while "waiting for the other ranks in barrier()" not in current_phase():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGALRM)


def _patiently(action: Callable[[], Any]) -> None:
    """Where all ranks fail: however slow the machine, they have time to say so before one of them decides."""
    former, agreement._SETTLE = agreement._SETTLE, (20.0, 20.0, 20.0)
    try:
        action()
    finally:
        agreement._SETTLE = former


def _all_fail(rank: int, culprit: int) -> None:
    _patiently(lambda: gather_scalar_from_all_ranks(lambda: _raise(ValueError(f"bad {rank}"))))


def _echo(rank: int, culprit: int) -> None:
    error = ValueError("bad") if rank == culprit else ConnectionError("closed by peer")
    _patiently(lambda: reduce_and_broadcast(lambda: _raise(error), len))


def _helper_inside_main(rank: int, culprit: int) -> None:
    with zero_first(rank == culprit):
        barrier()


FAILURES: dict[str, Callable[[int, int], Any]] = {
    "compute": lambda rank, culprit: compute_and_broadcast(lambda: _raise(ValueError("bad")), culprit),
    "gather": lambda rank, culprit: gather_from_all_ranks(lambda: _raise(ValueError("bad"), rank == culprit)),
    "gather elsewhere": lambda rank, culprit: gather_from_all_ranks(
        lambda: _raise(ValueError("bad"), rank == culprit), None, 1
    ),
    "all": _all_fail,
    "echo": _echo,
    "fn2": lambda rank, culprit: reduce_and_broadcast(lambda: 1, lambda values: _raise(ValueError("bad"))),
    "unfit": lambda rank, culprit: gather_from_all_ranks(lambda: {"a": object() if rank == culprit else 1}),
    "unfit result": lambda rank, culprit: reduce_and_broadcast(lambda: 1, set),
    "not callable": lambda rank, culprit: gather_from_all_ranks(5 if rank == culprit else int),
    "zero_first main": _zero_first_main,
    "zero_first other": _zero_first_other,
    "zero_only block": _zero_only_block,
    "slow rank": _slow_rank,
    "nested": _nested,
    "nested failure": _nested_failure,
    "phase": _within_a_phase,
    "exit": _exits,
    "interrupt": _interrupted,
    "inside compute": lambda rank, culprit: compute_and_broadcast(barrier, culprit),
    "inside fn2": lambda rank, culprit: reduce_and_broadcast(int, lambda values: barrier()),
    "inside zero_only": _zero_only_function,
    "inside zero_first": _helper_inside_main,
}
ALWAYS_RANK_0 = ("all", "fn2", "unfit result", "inside fn2", "inside zero_only")
MISUSES: dict[str, Callable[[int, int], Any]] = {
    "world_size": lambda rank, culprit: gather_from_all_ranks(int, 7),
    "world_size of one": lambda rank, culprit: reduce_and_broadcast(int, sum, 7 if rank == culprit else None),
    "rank": lambda rank, culprit: compute_and_broadcast(int, -1),
    "timeout": lambda rank, culprit: barrier(timeout=0 if rank == culprit else None),
    "function": lambda rank, culprit: zero_first(is_main_process).__enter__(),
    "helpers": lambda rank, culprit: gather_from_all_ranks(int) if rank == culprit else barrier(),
    "arguments": lambda rank, culprit: compute_and_broadcast(int, int(rank == culprit)),
}


def _described(error: BaseException) -> dict[str, Any]:
    return {
        "type": type(error).__name__,
        "text": str(error),
        "rank": getattr(error, "rank", None),
        "cause": type(error.__cause__).__name__,
        "of_peer": getattr(error, "peer_failure", None),
        "blamed": list(getattr(error, "blamed", ())),
        "exit_status": getattr(error, "exit_status", None),
        "user_error": getattr(error, "user_error", None),
    }


def _still_usable() -> None:
    rank, world = place()
    assert reduce_and_broadcast(lambda: rank, list) == list(range(world))


def fails() -> None:
    """Every kind of failure and misuse on the first and the last rank, each followed by a helper that works."""
    rank, world = place()
    before = targets.keys_in_store()
    for kind, actions in (("failure", FAILURES), ("misuse", MISUSES)):
        for culprit in (0, world - 1):
            for name, action in actions.items():
                if name == "zero_first other" and culprit == 0:
                    continue  # that one is the main rank
                error = caught(partial(action, rank, culprit))
                _still_usable()
                report({"kind": kind, "name": name, "culprit": culprit, **_described(error)})
    for slow in (0, world - 1):
        report({"kind": "late", "name": "late", "culprit": slow, **_described(_late(slow))})
        _still_usable()
    for key in _flags:
        default_store().delete_key(key)
    assert targets.keys_in_store() == before


def _late(slow: int) -> BaseException:
    """One rank comes when the time of the others is up."""
    rank, world = place()
    keys = [f"late/{slow}/{r}" for r in range(world) if r != slow]
    if rank == slow:
        default_store().wait(keys, timedelta(seconds=30))
    error = caught(partial(barrier, timeout=1))
    _flag(f"late/{slow}/{rank}")
    return error


def dies(how: str) -> None:
    """The last rank dies in its function while the others wait for it."""
    rank, world = place()
    report({"pid": os.getpid()})
    barrier()

    def work() -> None:
        if rank == world - 1:
            if how == "raise":
                raise ZeroDivisionError("by this rank")
            os.kill(os.getpid(), signal.SIGKILL)

    with phase_scope("counting"):
        gather_from_all_ranks(work)


def dies_by_itself(rank: int) -> Any:
    """The same where no launcher looks after the ranks: a time-out names it."""
    barrier()
    if rank == 2:
        os._exit(0)
    error = caught(partial(barrier, timeout=1))
    return _described(error)


def plain(rank: int) -> bool:
    """Under torch.distributed alone, its file store and its time-out."""
    for value in targets.VALUES[:3] + targets.VALUES[-1:]:
        targets.value_travels(value)
    targets.order_is_kept()
    _late(1)
    _still_usable()
    return True


def host_leaves_first(rank: int, port: int) -> Any:
    """The rank that hosts the store ends right after a helper; the others are slow to read what it said."""
    _anew(rank, f"tcp://127.0.0.1:{port}", 3)
    if rank:
        # The pause between two looks at the store, and so the time in which rank 0 could be gone.
        agreement.time = _SlowTime()  # type: ignore[assignment]
    try:
        # Larger than what such a store takes at once.
        return len(compute_and_broadcast(lambda: bytes(9 << 20)))
    finally:
        if rank == 0:
            dist.destroy_process_group()


def host_fails_first(rank: int, port: int) -> Any:
    """The same with a failure of that rank."""
    _anew(rank, f"tcp://127.0.0.1:{port}", 3)
    error = caught(partial(gather_from_all_ranks, lambda: _raise(ValueError("bad"), rank == 0)))
    if rank == 0:
        dist.destroy_process_group()
    return _described(error)


class _SlowTime:
    monotonic = staticmethod(time.monotonic)

    @staticmethod
    def sleep(seconds: float) -> None:
        time.sleep(0.3)


def _anew(rank: int, method: str, world: int) -> None:
    dist.barrier()  # gloo: a rank may still be connecting when the first one is already here
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=world)


def store_dies(rank: int, port: int) -> Any:
    """The rank that hosts the store goes while others wait: that is said, not a time-out."""
    _anew(rank, f"tcp://127.0.0.1:{port}", 2)
    barrier()
    if rank == 0:
        os._exit(0)
    return _described(caught(barrier))


def groups_come_and_go(rank: int, folder: str) -> list[int]:
    """Each new group's helpers start anew, also after a failure."""
    seen: list[int] = []
    for number in range(3):
        _anew(rank, f"file://{folder}/store-{number}", 2)
        seen.append(compute_and_broadcast(lambda: len(seen)))
        caught(partial(compute_and_broadcast, lambda: _raise(ValueError("bad"))))
    return seen


def threads_are_told_apart(rank: int) -> list[str]:
    """Two threads of a rank at once: the second is refused, and the first goes on."""
    texts = []
    done = threading.Event()

    def second() -> None:
        texts.append(str(caught(barrier)))
        done.set()

    def work() -> int:
        if rank == 0:
            threading.Thread(target=second).start()
            assert done.wait(30)
        return rank

    assert gather_from_all_ranks(work) == ([0, 1] if rank == 0 else None)
    return texts
