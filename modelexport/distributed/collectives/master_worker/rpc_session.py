"""torch.distributed.rpc between the ranks of a process group, started over the group's own store and ended again.

No second address or port is needed, whatever the group's ``init_method`` was.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store, rpc  # type: ignore[attr-defined]
from torch.distributed.rendezvous import register_rendezvous_handler

_SCHEME = "modelexport-store"
# Posts only put work into a queue and replies come from the ranks' own threads, so few are needed; one would
# make a long deserialisation hold up the end of the other calls.
_THREADS = 2


class _DetachableStore(Store):
    """The process group's store as rpc sees it; :meth:`detach` lets go of the real one.

    torch keeps a process's first rpc agent, and with it the agent's store, for ever (a singleton of its
    remote references). With a plain TCPStore rank 0's port would then stay taken, with a FileStore the file.
    """

    def __init__(self) -> None:
        super().__init__()
        self._inner: Store | None = None

    def attach(self, store: Store) -> None:
        self._inner = store

    def detach(self) -> None:
        self._inner = None

    @property
    def real(self) -> Store:
        if self._inner is None:
            raise RuntimeError("this master-worker session has ended")
        return self._inner

    def set(self, key: str, value: Any) -> None:
        self.real.set(key, value)

    def get(self, key: str) -> bytes:
        return self.real.get(key)

    def add(self, key: str, amount: int) -> int:
        return self.real.add(key, amount)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return self.real.compare_set(key, expected, desired)

    def delete_key(self, key: str) -> bool:
        return self.real.delete_key(key)

    def check(self, keys: list[str]) -> bool:
        return self.real.check(keys)

    def num_keys(self) -> int:
        return self.real.num_keys()

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        if timeout is None:
            self.real.wait(keys)
        else:
            self.real.wait(keys, timeout)


# One for the life of the process: C++ may hold it longer than any Python reference would.
_store = _DetachableStore()
_place: tuple[int, int] = (0, 1)
_own_id: int | None = None


def _rendezvous(url: str, **_: Any) -> Iterator[tuple[Store, int, int]]:
    yield _store, *_place


register_rendezvous_handler(_SCHEME, _rendezvous)


def member_name(rank: int) -> str:
    """The name of a rank in rpc: ``master`` or ``worker3``."""
    return f"worker{rank}" if rank else "master"


def start_rpc(store: Store, rank: int, world_size: int, seconds: float) -> None:
    """Starts the rpc agent; returns when those of all ranks run.

    Args:
        store: the ranks' own; used until :func:`stop_rpc`.
        seconds: after which the others are given up.

    Raises:
        RuntimeError: rpc cannot start (see :func:`_agree_on_ids` for one reason of ours).
    """
    global _place
    _store.attach(PrefixStore("rpc", store))
    try:
        _place = _agree_on_ids(_store.real, rank, world_size), world_size
        options = rpc.TensorPipeRpcBackendOptions(
            rpc_timeout=seconds, init_method=f"{_SCHEME}://", num_worker_threads=_THREADS
        )
        with warnings.catch_warnings():
            # rpc itself uses the old form of a process group that this warning is about.
            warnings.filterwarnings("ignore", message="You are using a Backend .* as a ProcessGroup")
            rpc.init_rpc(member_name(rank), rank=_place[0], world_size=world_size, rpc_backend_options=options)
    except BaseException:
        _store.detach()
        raise


def stop_rpc(*, graceful: bool, seconds: float) -> None:
    """Ends the agent of this process. Graceful: together with all the others', within ``seconds``."""
    try:
        rpc.shutdown(graceful=graceful, timeout=seconds)
    finally:
        _store.detach()


def _agree_on_ids(store: Store, rank: int, world_size: int) -> int:
    """This rank's number in rpc: torch allows a process the same one as before only, whatever its rank is now."""
    global _own_id
    store.set(f"id/{rank}", "" if _own_id is None else str(_own_id))
    former = [store.get(f"id/{other}").decode() for other in range(world_size)]
    kept = [int(text) for text in former if text]
    if len(set(kept)) < len(kept) or any(number >= world_size for number in kept):
        raise RuntimeError(
            f"torch.distributed.rpc lets a process take part only under the number it first had, and those of these "
            f"{world_size} ranks are {kept}: start the ranks as new processes"
        )
    free = iter(number for number in range(world_size) if number not in kept)
    numbers = [int(text) if text else next(free) for text in former]
    _own_id = numbers[rank]
    return _own_id
