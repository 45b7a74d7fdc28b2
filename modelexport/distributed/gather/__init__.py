"""Gathers of every rank's configs (trees with tensors), or of single tensors, at the first rank.

Over shared memory the first rank reads the other ranks' tensors where they lie; nothing is copied on its side, and
nothing on theirs for tensors made by :func:`modelexport.distributed.transport.memory.shared_empty`. With a workspace
path the same payloads go through a directory that all ranks see (ranks on several hosts).

Senders do not wait for the first rank. They keep at most ``MODELEXPORT_GATHER_BUFFERS`` (default 4) payloads that
it has not consumed, and wait for room beyond that. The ranks meet once for each ``(ranks, group)``, through the
process group's store (:func:`connect` does it ahead of time); after that a gather uses no collective, so it may run
in a background thread. One thread at a time may gather over the same ``(ranks, group)``; give another thread its
own group.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from multiprocessing import util as _mp_util
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from modelexport.distributed.gather.workspace_channel import WorkspaceChannel
from modelexport.distributed.rendezvous import links as _rendezvous
from modelexport.distributed.supervision.status import phase_scope
from modelexport.distributed.transport import payload as _payload
from modelexport.distributed.transport import tree as _tree
from modelexport.distributed.transport.receiving import Delivery, ReceivingLink, receive_from_all
from modelexport.distributed.transport.sending import SendingLink
from modelexport.distributed.workspace import NFSWorkspace
from modelexport.errors import GatherError

__all__ = [
    "NFSWorkspace",
    "close",
    "connect",
    "drain",
    "get_configs_parallel",
    "get_tensors_parallel",
    "set_timeout",
]

_DEFAULT_SECONDS = 1800.0
_timeout: float | None = None


def set_timeout(seconds: float | None) -> None:
    """Sets the seconds that a gather waits for another rank.

    None restores the default: the environment's ``MODELEXPORT_GATHER_TIMEOUT``, else the process group's own.
    """
    global _timeout
    if seconds is not None and not seconds > 0:
        raise ValueError(f"a gather's time-out must be a positive number of seconds, got {seconds}")
    _timeout = seconds


def _seconds() -> float:
    if _timeout is not None:
        return _timeout
    text = os.environ.get("MODELEXPORT_GATHER_TIMEOUT")
    if text:
        return float(text)
    if dist.is_initialized():
        return float(_rendezvous.default_store().timeout.total_seconds())
    return _DEFAULT_SECONDS


def _buffers() -> int:
    text = os.environ.get("MODELEXPORT_GATHER_BUFFERS", "4")
    if not text.isdigit() or int(text) < 1:
        raise GatherError(f"MODELEXPORT_GATHER_BUFFERS is {text!r}; it must be a whole number of at least 1")
    return int(text)


class _Channel(Protocol):
    """The channel of the payloads of one (ranks, group)."""

    def send(self, config: Any, seconds: float) -> None: ...

    def receive(self, seconds: float) -> tuple[list[Any], Any]:
        """The other ranks' configs (None for nothing) in order, and what :meth:`finish` wants."""

    def finish(self, ticket: Any) -> None: ...

    def drain(self, seconds: float) -> None: ...

    def close(self) -> None: ...


class _SharedMemoryChannel:
    def __init__(self, ranks: Sequence[int], group: dist.ProcessGroup | None, me: int, seconds: float) -> None:
        self._seq = 0
        self._sender: SendingLink | None = None
        self._links: list[ReceivingLink] = []
        key = _rendezvous.group_key(ranks, group)
        if me == ranks[0]:
            self._links = _rendezvous.collect_links(key, ranks, seconds)
        else:
            self._sender = _rendezvous.connect_to_first(key, ranks, me, _buffers(), seconds)

    def send(self, config: Any, seconds: float) -> None:
        assert self._sender is not None
        seq, self._seq = self._seq, self._seq + 1
        try:
            payload = None if config is None else _payload.pack(config)
            self._sender.send(seq, payload, seconds)
        except BaseException as error:
            # The first rank is waiting for this payload: let it fail now, with our reason.
            self._sender.send_failure(seq, f"{type(error).__name__}: {error}")
            raise

    def receive(self, seconds: float) -> tuple[list[Any], list[tuple[ReceivingLink, Delivery]]]:
        seq, self._seq = self._seq, self._seq + 1
        receive_from_all(self._links, seq, seconds)
        opened = [(link, *link.open(seq)) for link in self._links]
        return [config for _, _, config in opened], [(link, delivery) for link, delivery, _ in opened]

    def finish(self, ticket: list[tuple[ReceivingLink, Delivery]]) -> None:
        for link, delivery in ticket:
            link.finish(delivery)

    def drain(self, seconds: float) -> None:
        if self._sender is not None:
            self._sender.drain(seconds)

    def close(self) -> None:
        for link in self._links:
            link.close()
        if self._sender is not None:
            self._sender.abandon()  # the first rank may keep tensors that lie in this process's memory

    def forget(self) -> None:
        """Closes the descriptors in a forked child, without sending or receiving."""
        for link in [*self._links, *([self._sender] if self._sender else [])]:
            link.close()


_channels: dict[tuple[Any, ...], _Channel] = {}
_lock = threading.Lock()


def _my_rank(ranks: Sequence[int]) -> int:
    """This process's global rank, after checking ``ranks``."""
    if not ranks or len(set(ranks)) != len(ranks):
        raise GatherError(f"ranks must be a list of different ranks, got {list(ranks)}")
    if not dist.is_initialized():
        if len(ranks) > 1:
            raise GatherError(
                f"cannot gather from ranks {list(ranks)}: there is no process group, so this process is the whole "
                "world; call torch.distributed.init_process_group first, or start the ranks with a launcher"
            )
        return ranks[0]
    if min(ranks) < 0 or max(ranks) >= dist.get_world_size():
        raise GatherError(f"ranks {list(ranks)} are not all in the world of {dist.get_world_size()} ranks")
    return dist.get_rank()


def _channel(
    ranks: Sequence[int], group: dist.ProcessGroup | None, me: int, workspace_path: Path | str | None
) -> _Channel:
    path = os.path.abspath(workspace_path) if workspace_path is not None else None
    name = group.group_name if group is not None else "world"
    # The store stands for the process group: channels of one that was destroyed are never found again.
    key = (weakref.ref(_rendezvous.default_store()), name, tuple(ranks), path)
    with _lock:
        channel = _channels.get(key)
    if channel is None:
        # Not under the lock: another thread may be connecting other ranks meanwhile.
        if path is None:
            channel = _SharedMemoryChannel(ranks, group, me, _seconds())
        else:
            channel = WorkspaceChannel(path, ranks, group, me, _buffers(), _seconds())
        with _lock:
            if not _channels:
                # multiprocessing's children leave without running atexit, but run its finalizers, which also run at
                # any other exit. Registered only now: a child forgets those that a forkserver registered.
                _mp_util.Finalize(None, close, exitpriority=10)
            _channels[key] = channel
    return channel


def _drop(channel: _Channel | None) -> None:
    """Closes a channel after a failed gather; the close tells the ranks that still use it."""
    if channel is None:
        return
    with _lock:
        for key in [key for key, value in _channels.items() if value is channel]:
            del _channels[key]
    with suppress(GatherError, OSError):  # what brought us here is the error to be seen
        channel.close()


def connect(
    ranks: Sequence[int], group: dist.ProcessGroup | None = None, workspace_path: Path | str | None = None
) -> None:
    """Connects ``ranks`` now instead of in their first gather; called by each of them, ranks outside may too.

    Raises:
        GatherError: a rank did not come in time, or cannot reach the first rank.
    """
    me = _my_rank(ranks)
    if len(ranks) > 1 and me in ranks:
        _channel(ranks, group, me, workspace_path)


@contextmanager
def get_configs_parallel(
    config: Any,
    ranks: Sequence[int],
    group: dist.ProcessGroup | None = None,
    workspace_path: Path | str | None = None,
) -> Iterator[list[Any]]:
    """Gathers the configs of ``ranks`` at the first of them, inside a ``with``.

    Args:
        config: a tree of registered dataclasses, containers and scalars with tensors of any dtype and shape as
            leaves (see :mod:`modelexport.distributed.transport.tree`), or None for "nothing from this rank".
        ranks: global ranks; the first one gets the configs. A rank outside takes no part.
        group: keeps gathers of the same ranks apart; no collective runs on it.
        workspace_path: a directory that all ranks see; None gathers through shared memory.

    Yields:
        On the first rank the configs in the order of ``ranks``, without the Nones; on the others ``[]``. Its own
        config's tensors are its own; those of other ranks are views of their memory (over shared memory) and of
        reused buffers (through a workspace). The list is emptied at the end of the ``with``. A tensor that is kept
        longer keeps its bytes: its memory is not used again until the tensor goes.

    Raises:
        GatherError: a rank ended, failed or did not come in time (it says which and why), memory does not suffice,
            or there is no process group and ``ranks`` has more than one rank.
        TypeError: the config holds something that cannot travel.
    """
    me = _my_rank(ranks)
    if me not in ranks:
        yield []
        return
    channel = _channel(ranks, group, me, workspace_path) if len(ranks) > 1 else None
    if me != ranks[0]:
        assert channel is not None
        _attempt(channel, lambda: channel.send(config, _seconds()))
        yield []
        return
    # Through the codec too, so that what cannot travel fails on one rank as it would on many.
    own = [] if config is None else [_attempt(channel, lambda: _tree.restore(*_tree.split(config)))]
    if channel is None:
        yield own
        return
    others, ticket = _attempt(channel, lambda: channel.receive(_seconds()))
    gathered = own + [other for other in others if other is not None]
    del others, own
    try:
        yield gathered
    finally:
        gathered.clear()
        channel.finish(ticket)


@contextmanager
def get_tensors_parallel(
    tensor: torch.Tensor | None,
    ranks: Sequence[int],
    group: dist.ProcessGroup | None = None,
    *,
    workspace_path: Path | str | None = None,
) -> Iterator[list[torch.Tensor]]:
    """Gathers one tensor of each rank at the first of ``ranks``; shapes and dtypes may differ between ranks.

    Otherwise as :func:`get_configs_parallel`.
    """
    if tensor is not None and not isinstance(tensor, torch.Tensor):
        raise TypeError(f"get_tensors_parallel takes a tensor or None, got {type(tensor).__name__}")
    with get_configs_parallel(tensor, ranks, group, workspace_path) as tensors:
        yield tensors


def _attempt(channel: _Channel | None, action: Callable[[], Any]) -> Any:
    try:
        return action()
    except BaseException as error:
        # The ranks no longer agree on which payload comes next. A rank that leaves for another's sake is none that
        # others wait for, however long it takes to leave.
        lost = getattr(error, "peer_failure", False)
        with phase_scope("leaving a gather that failed", waiting=True) if lost else nullcontext():
            _drop(channel)
        raise


def drain() -> None:
    """Waits until the first ranks have consumed everything this process has sent.

    After it, tensors that were sent may be written to again.

    Raises:
        GatherError: a first rank ended, or has not consumed in time.
    """
    with _lock:
        channels = list(_channels.values())
    deadline = time.monotonic() + _seconds()
    for channel in channels:
        _attempt(channel, partial(channel.drain, max(0.001, deadline - time.monotonic())))


def close() -> None:
    """Ends all connections and workspaces of this process; a later gather makes new ones. Runs at exit by itself."""
    with _lock:
        channels = list(_channels.values())
        _channels.clear()
    for channel in channels:
        channel.close()


def _forget_after_fork() -> None:
    # A child that held our sockets open would hide our end from the other ranks.
    global _lock
    _lock = threading.Lock()
    for channel in _channels.values():
        if isinstance(channel, _SharedMemoryChannel):
            channel.forget()
    _channels.clear()


os.register_at_fork(after_in_child=_forget_after_fork)
