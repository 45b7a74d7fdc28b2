"""Helpers for code that runs on every rank: who computes, who gets the result, who goes first.

Values come back exactly as they were sent, types included: integers of any size, float64 with NaN, infinities and
-0.0, bool, str, bytes, None, lists, tuples and dicts of them (tensors and registered dataclasses too, see
:mod:`modelexport.distributed.transport.tree`). They travel through the process group's store, so they should be small,
and behave the same with every back end.

Without a process group, or in one of a single rank, each helper does what it does on many ranks: values pass the
same codec, and errors are the same.

All ranks must call the same helpers in the same order, from one thread at a time. In every helper that waits:

* an exception in a function becomes ``RankFailedError`` on every rank, naming the rank that failed, within a second
  (on that rank raised from the exception itself). Where several failed it names the lowest of those that are no mere
  echo. KeyboardInterrupt and SystemExit stay what they are on their own rank. The helpers remain usable afterwards.
* ranks in different helpers, or with arguments that do not fit the group, get ``UsageError`` on every rank.
* a rank that does not come within ``timeout`` seconds (default: the process group's time-out) is named by a
  ``LostPeerError`` (a GatherError) on every rank, and on itself should it come later.

An exception that leaves a block of :func:`zero_first` or :func:`zero_only` where no rank waits for it is raised there
as it is, and by every rank (that one too) at the end of its next helper, in place of a result. Catch inside the block
what the other ranks need not know.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, ParamSpec, TypeVar, overload

from modelexport.distributed.rendezvous.agreement import Rendezvous, announced, group_position, only_here, position
from modelexport.distributed.supervision.status import phase_scope

__all__ = [
    "barrier",
    "compute_and_broadcast",
    "gather_from_all_ranks",
    "gather_scalar_from_all_ranks",
    "is_distributed",
    "is_main_process",
    "reduce_and_broadcast",
    "zero_first",
    "zero_only",
]

P = ParamSpec("P")
T = TypeVar("T")


def is_distributed() -> bool:
    """Returns whether this process is in a process group (of any size). Creates none, and imports nothing."""
    return group_position() is not None


def is_main_process() -> bool:
    """Returns whether this is global rank 0; True without a process group. Creates none, and imports nothing."""
    return position()[0] == 0


def barrier(*, timeout: float | None = None) -> None:
    """Waits until all ranks have come here; returns at once where there is one.

    It says nothing about work that a rank has given to its GPU.

    Args:
        timeout: seconds to wait for the others; None for the process group's time-out.

    Raises:
        RankFailedError, UsageError, LostPeerError: as the module says.
    """
    with Rendezvous("barrier", timeout) as rendezvous:
        rendezvous.check()
        rendezvous.barrier()


def compute_and_broadcast(fn: Callable[[], T], rank: int = 0, *, timeout: float | None = None) -> T:
    """The value of ``fn()`` on every rank, computed by ``rank`` only.

    Args:
        fn: runs on ``rank`` and nowhere else, so it must not call a helper that waits for the other ranks.
        rank: the same on every rank.
        timeout: seconds to wait for the others, ``fn`` included; None for the process group's time-out.

    Raises:
        RankFailedError, UsageError, LostPeerError: as the module says; a value that cannot travel is a failure.
    """
    with Rendezvous("compute_and_broadcast", timeout, f"rank={rank}") as rendezvous:
        rendezvous.check(rank=rank)
        result: T = rendezvous.share(rendezvous.compute(fn, only_on=rank), rank)
    return result


def gather_from_all_ranks(
    fn: Callable[[], T], world_size: int | None = None, rank: int = 0, *, timeout: float | None = None
) -> list[T] | None:
    """Runs ``fn()`` on every rank; the list of its values in rank order on ``rank``, None on the others.

    Args:
        fn: may return another type on each rank.
        world_size: the number of ranks if the caller wants that checked; None for what there are.
        rank: who gets the values, the same on every rank.
        timeout: seconds to wait for the others; None for the process group's time-out.

    Raises:
        RankFailedError, UsageError, LostPeerError: as the module says; a value that cannot travel is a failure.
    """
    return _gather("gather_from_all_ranks", fn, world_size, rank, timeout)


def gather_scalar_from_all_ranks(
    fn: Callable[[], T], world_size: int | None = None, rank: int = 0, *, timeout: float | None = None
) -> list[T] | None:
    """As :func:`gather_from_all_ranks`: scalars need no way of their own here to arrive exactly."""
    return _gather("gather_scalar_from_all_ranks", fn, world_size, rank, timeout)


def _gather(call: str, fn: Callable[[], T], world_size: int | None, rank: int, timeout: float | None) -> list[T] | None:
    with Rendezvous(call, timeout, f"rank={rank}") as rendezvous:
        rendezvous.check(rank=rank, world_size=world_size)
        result: list[T] | None = rendezvous.collect(rendezvous.compute(fn), rank)
    return result


def reduce_and_broadcast(
    fn1: Callable[[], Any],
    fn2: Callable[[list[Any]], T],
    world_size: int | None = None,
    *,
    timeout: float | None = None,
) -> T:
    """``fn2([value of fn1() on rank 0, on rank 1, ..])`` on every rank.

    Args:
        fn1: runs on every rank.
        fn2: runs on rank 0 only, so it must not call a helper that waits for the other ranks.
        world_size: the number of ranks if the caller wants that checked; None for what there are.
        timeout: seconds to wait for the others, ``fn2`` included; None for the process group's time-out.

    Raises:
        RankFailedError, UsageError, LostPeerError: as the module says; a value that cannot travel is a failure.
    """
    with Rendezvous("reduce_and_broadcast", timeout) as rendezvous:
        rendezvous.check(world_size=world_size)
        result: T = rendezvous.reduce(rendezvous.compute(fn1), fn2)
    return result


@contextmanager
def zero_first(is_main: bool, *, timeout: float | None = None) -> Iterator[None]:
    """The body runs first on the ranks with ``is_main`` true, then on the others.

    A main rank leaves the ``with`` when all main ranks have run the body and the others have come to it; if the body
    fails on a main rank, the others do not run theirs and all raise the same error. A failure in the body of another
    rank is raised there as it is, and by all ranks in their next helper.

    Args:
        is_main: any number of ranks, such as one per machine (or none: then all go at once).
            The body must not call a helper that waits for the other ranks where it is true.
        timeout: seconds to wait for the others, their body included; None for the process group's time-out.

    Raises:
        RankFailedError, UsageError, LostPeerError: as the module says.
    """
    with Rendezvous("zero_first", timeout) as rendezvous:
        rendezvous.check()
        if callable(is_main):
            rendezvous.refuse("is_main is a function; call it: zero_first(is_main_process())")
        if is_main:
            with (
                phase_scope(f"running the body of {rendezvous.call}"),
                only_here("the body of zero_first on a main rank"),
            ):
                yield
        rendezvous.barrier()
    if not is_main:
        with announced("the body of zero_first"):
            yield


class _ZeroOnly:
    """The context manager and decorator that ``zero_only()`` returns."""

    def __init__(self) -> None:
        self._blocks: list[AbstractContextManager[None]] = []

    def __call__(self, func: Callable[P, T]) -> Callable[P, T | None]:
        awaited = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
        if not callable(func) or any(test(func) for test in awaited):
            raise TypeError(
                f"zero_only cannot skip {func!r}: decorate a plain function (below @classmethod or @property), or use "
                "`with zero_only() as is_main:`"
            )

        @functools.wraps(func)
        def on_main_rank(*args: P.args, **kwargs: P.kwargs) -> T | None:
            if not is_main_process():
                return None
            what = f"{getattr(func, '__name__', 'a function')}, run by rank 0 only"
            with announced(what), only_here(what):
                return func(*args, **kwargs)

        return on_main_rank

    def __enter__(self) -> bool:
        block = announced("a block of zero_only")
        block.__enter__()
        self._blocks.append(block)
        return is_main_process()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._blocks.pop().__exit__(kind, error, trace)


@overload
def zero_only() -> _ZeroOnly:
    """For a ``with``, and for ``@zero_only()``."""


@overload
def zero_only(func: Callable[P, T]) -> Callable[P, T | None]:
    """For ``@zero_only``."""


def zero_only(func: Callable[..., Any] | None = None) -> Any:
    """For work of rank 0 alone. As a decorator (``@zero_only`` or ``@zero_only()``) the other ranks get None at once.

    ::

        @zero_only                          with zero_only() as is_main:
        def save(path): ...                     if is_main: ...

    A ``with`` cannot skip its body, so the body runs on every rank and must ask; it may call helpers that wait for
    the other ranks, on every rank. A decorated function must not, nor may it be a coroutine or a generator. Nobody
    waits at the end.

    Raises:
        TypeError: the decorated thing is not a plain function.
    """
    return _ZeroOnly() if func is None else _ZeroOnly()(func)
