"""Rendezvous of all ranks of the process group: each contributes a value, and all get the same outcome.

A rendezvous uses the process group's store and no collective, so it is the same with every back end, costs no device,
and can say who has not come. Each has a number; every rank counts by itself, so all must go through the same
ones in the same order. For number n each rank writes its contribution (a value or a failure, and which call it is in)
to ``n/from/<rank>``. Rank 0 waits for all of them and offers an outcome under ``n/outcome``. Others may offer one too:
a rank that failed while rank 0 or others keep it waiting, a rank whose time is up. Only the first offer counts,
whoever made it, so that all ranks agree on what happened, and go on to the same next rendezvous.

A rank deletes its contribution once it has read the outcome, and rank 0 stays until the others have: it often hosts
the store, and may end right after. A rendezvous held inside another one's function has a number within the outer one's
(``7/0``), and those who wait in it look at the outer one's outcome as well.

A failure outside a rendezvous (:func:`announced`) is offered as the outcome of the next one.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal

from modelexport.distributed.supervision.failures import ECHO, OWN
from modelexport.distributed.supervision.outcomes import (
    Outcome,
    RefusalError,
    checked,
    describe,
    difference,
    error_of,
    is_known,
    mark,
)
from modelexport.distributed.supervision.status import phase_scope
from modelexport.distributed.transport.mailbox import (
    Mailbox,
    StoreGoneError,
    decode,
    encode,
    join,
    message,
    parse,
    separate,
)
from modelexport.distributed.transport.messages import OBJECT, TEXT, LostPeerError, check_fields
from modelexport.errors import UsageError

__all__ = ["Rendezvous", "announced", "group_position", "only_here", "position"]

_SETTLE = (0.1, 0.4, 0.4)  # seconds that a failed rank leaves to rank 0, by the failure's level: echoes yield
_READ_VALUE, _READ_FAILURE = 5.0, 0.5  # seconds that rank 0 stays for the others to read an outcome


def group_position() -> tuple[int, int] | None:
    """This process's global rank and the number of ranks, or None without a process group. Imports nothing."""
    # Where torch.distributed is not even loaded there is no group, and to ask must not cost its import.
    dist = sys.modules.get("torch.distributed")
    if dist is None or not getattr(dist, "is_available", bool)() or not dist.is_initialized():
        return None
    return dist.get_rank(), dist.get_world_size()


def position() -> tuple[int, int]:
    """As :func:`group_position`; without a process group this process is rank 0 of 1."""
    return group_position() or (0, 1)


class _RendezvousState:
    """This process's state of the rendezvous over one process group's store."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.open: list[int] = []  # the rendezvous that this rank is in, outermost first
        self.next = [0]  # the next number, in the world and inside each open rendezvous
        self.only_here = ""  # what this rank runs that others do not
        self.stale_keys: list[str] = []  # to be deleted when all ranks are known to be past it
        self.lock = threading.RLock()

    def path(self, depth: int, number: int) -> str:
        return "/".join([self.prefix, *map(str, [*self.open[:depth], number])])

    def next_path(self) -> str:
        return self.path(len(self.open), self.next[-1])

    def begin(self) -> tuple[str, list[str]]:
        """The path of a new rendezvous, and those of the rendezvous around it."""
        path = self.next_path()
        around = [self.path(depth, number) for depth, number in enumerate(self.open)]
        self.open.append(self.next[-1])
        self.next[-1] += 1
        self.next.append(0)
        return path, around

    def end(self) -> None:
        self.open.pop()
        self.next.pop()


_states: weakref.WeakKeyDictionary[Any, _RendezvousState] = weakref.WeakKeyDictionary()


def _group(rank: int) -> tuple[Any, _RendezvousState]:
    """The process group's store, and the state that goes with it."""
    from modelexport.distributed.rendezvous.links import default_store

    store = default_store()
    state = _states.get(store)
    if state is None:
        # A group made anew over the same store must not read what the former one has left.
        generation = Mailbox(store).count(f"modelexport/ranks/joined/{rank}")
        state = _states[store] = _RendezvousState(f"modelexport/ranks/{generation}")
    return store, state


class Rendezvous:
    """One rendezvous, from the call's first check to the outcome::

        with Rendezvous("barrier", timeout) as rendezvous:
            rendezvous.check()
            rendezvous.barrier()

    An error that arises inside before the outcome is this rank's failure, and becomes every rank's error.

    Args:
        call: the public function, for messages, and to notice that ranks are in different ones.
        timeout: seconds to wait for the others; None for the process group's time-out.
        detail: arguments that must be the same on every rank.
    """

    def __init__(self, call: str, timeout: float | None, detail: str = "") -> None:
        self.call = f"{call}({detail})"
        self._timeout = timeout
        self._settled = self._contributed = False
        self._path = ""
        self._mine: list[str] = []  # the keys of this rank's contribution
        self._past_keys: list[str] = []  # the stale keys that are to be deleted once all have contributed here

    def __enter__(self) -> Rendezvous:
        self.rank, self.world_size = position()
        if self.world_size == 1:
            return self
        self._store, self._state = _group(self.rank)
        if not self._state.lock.acquire(blocking=False):
            raise UsageError(f"{self.call} was called while another thread is in such a call; use one thread at a time")
        if self._state.only_here:
            self._state.lock.release()
            raise UsageError(
                f"{self.call} was called inside {self._state.only_here}, where the other ranks do not call it; "
                "call it outside, on every rank"
            )
        self._box = Mailbox(self._store)
        self._path, around = self._state.begin()
        self._outcomes = [f"{path}/outcome" for path in [self._path, *around]]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        assert error is not None or self._settled
        try:
            if error is not None and not self._settled and not isinstance(error, StoreGoneError):
                self._fail(error)
        finally:
            if self.world_size > 1:
                self._state.end()
                self._state.lock.release()
        if error is not None:
            _announce(error, self.call)
        return False

    # What the calls are made of.

    def check(self, *, rank: int = 0, world_size: int | None = None) -> None:
        """Refuses arguments that do not fit the group."""
        if self._timeout is not None and not self._timeout > 0:
            self.refuse(f"timeout must be a positive number of seconds, got {self._timeout}")
        if world_size is not None and world_size != self.world_size:
            has = f"the process group has {self.world_size}" if self.world_size > 1 else "this process is alone, as 1"
            self.refuse(f"world_size is {world_size}, but {has}; leave it out, or start {world_size} ranks")
        if not 0 <= rank < self.world_size:
            self.refuse(
                f"rank is {rank}, but there are {self.world_size} ranks; name one of 0 to {self.world_size - 1}"
            )

    def refuse(self, reason: str) -> None:
        """Raises UsageError, on every rank once they have met."""
        raise RefusalError(f"{self.call} on rank {self.rank}: {reason}")

    def compute(self, fn: Callable[..., Any], *args: Any, only_on: int | None = None) -> bytes:
        """The value of ``fn(*args)`` as bytes. ``only_on``: the one rank that runs it."""
        if only_on is not None and only_on != self.rank:
            return b""
        name = getattr(fn, "__name__", type(fn).__name__)
        alone = contextlib.nullcontext() if only_on is None else only_here(f"{name}, run by rank {only_on} only")
        with phase_scope(f"running {name} for {self.call}"), alone:
            return encode(fn(*args))

    def barrier(self) -> None:
        """Waits for all ranks."""
        self._settle(b"", lambda values: b"")

    def share(self, value: bytes, rank: int) -> Any:
        """The value of ``rank``, on every rank."""
        return decode(self._settle(value, lambda values: values[rank]))

    def collect(self, value: bytes, rank: int) -> list[Any] | None:
        """All values in rank order on ``rank``, None elsewhere."""
        place = f"{self._path}/values"
        gathered: list[bytes] = []

        def publish(values: list[bytes]) -> bytes:
            # Not in the outcome, which every rank reads.
            if rank == self.rank:
                gathered.extend(values)
            else:
                self._state.stale_keys += self._box.put(place, join(values))
            return b""

        def fetch() -> None:
            if rank == self.rank and not gathered:
                gathered.extend(separate(self._box.get([place])[0]))

        self._settle(value, publish, fetch)
        return [decode(part) for part in gathered] if rank == self.rank else None

    def reduce(self, value: bytes, fn: Callable[[list[Any]], Any]) -> Any:
        """``fn`` of all values in rank order, computed by rank 0, on every rank."""
        return decode(self._settle(value, lambda values: self.compute(fn, list(map(decode, values)), only_on=0)))

    # How the ranks come to one outcome.

    def _settle(
        self, value: bytes, decide: Callable[[list[bytes]], bytes], read: Callable[[], None] | None = None
    ) -> bytes:
        """Contributes ``value``; returns what ``decide`` makes of all ranks' values on rank 0.

        ``read`` runs on every rank once that is known, while rank 0 is sure to be there still.
        """
        if self.world_size == 1:
            result = decide([value])
            self._settled = True
            return result
        self._contribute({}, value)
        found = self._wait() or self._offer(self._decide(decide))
        outcome, result = self._conclude(found, read)
        if outcome["kind"] != "value":
            raise error_of(outcome, self.rank)
        return result

    def _fail(self, error: BaseException) -> None:
        """Makes ``error`` known as this rank's failure; raises what every rank then raises."""
        outcome = describe(error, self.call, self.rank)
        if self.world_size > 1:
            try:
                outcome = self._report_failure(outcome, at_once=not isinstance(error, Exception))
            except StoreGoneError:
                return  # it is this rank's own failure that counts
        self._settled = True
        if outcome["kind"] == "value":
            return  # settled before this rank failed; the next rendezvous tells
        if isinstance(error, Exception):
            raise error_of(outcome, self.rank) from error
        mark(error, outcome)  # Ctrl-C and the like stay what they are

    def _report_failure(self, failure: Outcome, *, at_once: bool) -> Outcome:
        if self._contributed or at_once:
            found = self._offer(message(failure))
        else:
            self._contribute({"failure": failure}, b"")
            found = self._wait(failure) or self._offer(self._decide(None))
        return self._conclude(found)[0]

    def _contribute(self, more: Outcome, value: bytes) -> None:
        self._contributed = True
        self._past_keys = list(self._state.stale_keys)
        self._mine = self._box.put(f"{self._path}/from/{self.rank}", message({"call": self.call, **more}, value))

    def _wait(self, failure: Outcome | None = None) -> bytes:
        """The outcome's message, or b"" on rank 0 if it is to decide, as all have come."""
        everybody = [f"{self._path}/from/{rank}" for rank in range(self.world_size)]
        limit = _SETTLE[failure["level"]] if failure else self._timeout or self._store.timeout.total_seconds()
        longest = 0.02 + 0.0002 * self.world_size  # between two looks, so that many ranks do not flood the store
        began = time.monotonic()
        with phase_scope(f"waiting for the other ranks in {self.call}", waiting=True):
            while True:
                for outcome in self._outcomes:
                    found = self._box.peek(outcome)
                    if found is not None:
                        return found
                if self.rank == 0 and self._box.has(everybody):
                    return b""
                waited = time.monotonic() - began
                if waited > limit:
                    return self._offer(message(failure or self._absence(limit)))
                # Polled, not store.wait(): that would hold the store's lock against other threads of this process.
                time.sleep(min(longest, 0.0002 + waited / 8))

    def _offer(self, outcome: bytes) -> bytes:
        found, keys = self._box.offer(self._outcomes[0], outcome)
        self._state.stale_keys += keys[1:]
        return found

    def _decide(self, decide: Callable[[list[bytes]], bytes] | None) -> bytes:
        """Rank 0, when all have contributed: the outcome's message."""
        found = self._box.get([f"{self._path}/from/{rank}" for rank in range(self.world_size)])
        parts = [_contribution(data, rank) for rank, data in enumerate(found)]
        failures = [header["failure"] for header, _ in parts if "failure" in header]
        if failures:
            first = min(failures, key=lambda failure: (failure["level"], failure["rank"]))
            others = len({failure["rank"] for failure in failures}) - 1
            return message({**first, "others": max(others, first.get("others", 0))})
        confusion = difference({rank: header["call"] for rank, (header, _) in enumerate(parts)})
        if confusion:
            return message({"kind": "usage", "level": OWN, "rank": 0, "summary": confusion})
        assert decide is not None
        return message({"kind": "value"}, decide([value for _, value in parts]))

    def _absence(self, seconds: float) -> Outcome:
        """Makes the outcome of a rank that has waited for too long."""
        found = [self._box.peek(f"{self._path}/from/{rank}") for rank in range(self.world_size)]
        calls = {rank: _contribution(data, rank)[0]["call"] for rank, data in enumerate(found) if data is not None}
        missing = [rank for rank in range(self.world_size) if rank not in calls]
        if missing:
            reason = f"missing: {missing}, not yet in that call or still busy with its function"
        else:
            reason = "all have come, but rank 0 has not answered"
        text = f"rank {self.rank} waited {seconds:g} s in {self.call}; came: {list(calls)}; {reason}"
        summary = "; ".join(filter(None, [text, difference(calls)]))
        blamed = missing or [0]
        return {"kind": "missing", "level": ECHO, "rank": blamed[0], "blamed": blamed, "summary": summary}

    def _conclude(self, found: bytes, read: Callable[[], None] | None = None) -> tuple[Outcome, bytes]:
        """Takes note of the outcome, and leaves the store tidy; returns the outcome and the value with it."""
        outcome, value = parse(found)
        checked(outcome)
        stale_keys = self._state.stale_keys
        self._settled = True
        if outcome["kind"] != "value":
            # Nothing is deleted: a rank that comes late looks at it.
            with contextlib.suppress(StoreGoneError):
                stale_keys += [*self._mine, *self._box.put(f"{self._path}/from/{self.rank}/read", b"yes")]
            if self.rank == 0:
                stale_keys.append(self._outcomes[0])
                _stay(self._box, self._path, self.world_size, _READ_FAILURE)
            return outcome, value
        if read is not None:
            read()
        # All have contributed, so all have left the earlier rendezvous.
        tidy = self._box.delete([*self._mine, *self._past_keys])
        del stale_keys[: len(self._past_keys)]
        if self.rank == 0:
            stale_keys.append(self._outcomes[0])
            if tidy and _stay(self._box, self._path, self.world_size, _READ_VALUE):
                self._box.delete(stale_keys)
                stale_keys.clear()
        return outcome, value


def _contribution(data: bytes, rank: int) -> tuple[dict[str, Any], bytes]:
    """(header, value) of what a rank has contributed.

    Raises:
        LostPeerError: it is no contribution.
    """
    header, value = parse(data)
    check_fields(header, f"the contribution of rank {rank}", {"call": TEXT}, {"failure": OBJECT}, blamed=[rank])
    if "failure" in header and checked(header["failure"])["kind"] == "value":
        raise LostPeerError(f"the failure of rank {rank} is of the kind 'value'", [rank])
    return header, value


def _stay(box: Mailbox, path: str, world_size: int, seconds: float) -> bool:
    """Waits on rank 0, for ``seconds`` at most, until the other ranks have read the outcome of a rendezvous."""
    deadline = time.monotonic() + seconds
    with contextlib.suppress(StoreGoneError):
        for place in (f"{path}/from/{rank}" for rank in range(1, world_size)):
            while box.has([place]) and not box.has([f"{place}/read"]):
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.001)
    return True


@contextmanager
def only_here(what: str) -> Iterator[None]:
    """Marks code that some ranks run and others do not: a rendezvous inside raises UsageError."""
    rank, world_size = position()
    if world_size == 1:
        yield
        return
    state = _group(rank)[1]
    former, state.only_here = state.only_here, what
    try:
        yield
    finally:
        state.only_here = former


@contextmanager
def announced(what: str) -> Iterator[None]:
    """Makes all ranks raise an error of the body at their next rendezvous; here it is raised as it is."""
    try:
        with phase_scope(f"running {what}"):
            yield
    except BaseException as error:
        _announce(error, what)
        raise


def _announce(error: BaseException, what: str) -> None:
    rank, world_size = position()
    if world_size == 1 or isinstance(error, StoreGoneError) or is_known(error):
        return  # nobody to tell, or all know
    # Where the store is gone nobody can be told, and this error counts, not that.
    with contextlib.suppress(StoreGoneError):
        store, state = _group(rank)
        box, path = Mailbox(store), state.next_path()
        box.offer(f"{path}/outcome", message(describe(error, what, rank)))
        if rank == 0:
            _stay(box, path, world_size, _READ_FAILURE)
