"""This process as a rank of a job in master-worker mode: its process group, rpc beside it, and how both end."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from typing import Any
from urllib.parse import urlparse

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from modelexport.distributed.collectives import operations
from modelexport.distributed.collectives.master_worker.rpc_session import start_rpc, stop_rpc
from modelexport.distributed.collectives.master_worker.serving import new_session
from modelexport.distributed.environment import interface_towards
from modelexport.distributed.listening import bind_towards
from modelexport.distributed.rendezvous.links import default_store

_LEAVE_SECONDS = 30.0  # for the other ranks to have left as well
_INTERFACES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


class RankSession:
    """Joins the job; leaves it by :meth:`end`.

    Args:
        backend, init_method: as in ``collectives.init_process_group``.
        place: its arguments world_size, rank and group_name.
        seconds: limit of every wait for other ranks.

    Raises:
        RuntimeError: the process group or rpc cannot be started; nothing is left of either.
    """

    def __init__(self, backend: str, init_method: str, place: dict[str, Any], seconds: float) -> None:
        self.seconds = seconds
        self.lifelines = new_session()
        self._rpc = False
        self._store: Store | None = None
        self._environment = {name: os.environ.get(name) for name in _INTERFACES}
        _choose_interface(init_method)
        try:
            operations.init_process_group(backend, init_method, timeout=seconds, **place)
            # A store that outlives this session may hold another's keys.
            number = torch.tensor(secrets.randbits(62))
            operations.broadcast(number, 0, check=False)
            self._token = int(number).to_bytes(8, "big")
            self._store = PrefixStore(f"modelexport/session/{self._token.hex()}", default_store())
            foreign = init_method == "env://" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            self._host = None if foreign else _host(init_method)
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
            if self.world_size > 1:
                start_rpc(self._store, self.rank, self.world_size, seconds)
                self._rpc = True
        except BaseException:
            self.end(together=False)
            raise

    def hang_up(self) -> None:
        """Ends rpc without a word to the others."""
        if self._rpc:
            self._rpc = False
            stop_rpc(graceful=False, seconds=0.0)

    def end(self, *, together: bool) -> None:
        """Leaves; nothing is initialised afterwards.

        Args:
            together: all ranks do so, and each returns when the others cannot be in its way any more.
        """
        try:
            if together and self._rpc:
                self._rpc = False
                stop_rpc(graceful=True, seconds=_LEAVE_SECONDS)
            self.hang_up()
        finally:
            if dist.is_initialized():
                operations.destroy_process_group()
            for name, value in self._environment.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
        if together and self._store is not None and self.world_size > 1:
            # (The other ranks, or the store, have ended before their time: there is nothing to wait for.)
            with contextlib.suppress(RuntimeError, OSError):
                self._leave(self._host) if self._host else self._leave_foreign_store()
        self._store = None

    def _leave(self, host: str) -> None:
        """Rank 0 hosts the store, so it goes last, and the others return when the store has gone.

        Otherwise a worker that starts again at the same address could meet the old store.
        """
        assert self._store is not None
        if self.rank:
            port = int(self._store.get("door"))
            with socket.create_connection((host, port), _LEAVE_SECONDS) as connection:
                connection.sendall(self._token)
                connection.recv(1)  # returns when rank 0 closes the connection
            return
        with contextlib.ExitStack() as waiting:
            with bind_towards(host, 0) as door:
                door.listen(self.world_size)
                door.settimeout(_LEAVE_SECONDS)
                self._store.set("door", str(door.getsockname()[1]))
                missing = self.world_size - 1
                while missing:
                    connection = waiting.enter_context(door.accept()[0])
                    connection.settimeout(_LEAVE_SECONDS)
                    missing -= connection.recv(len(self._token), socket.MSG_WAITALL) == self._token
            self._store = None  # the last reference: torch closes what it listens on

    def _leave_foreign_store(self) -> None:
        """A file, or a store that torchrun's agent hosts. Rank 0 goes last all the same."""
        store, deadline = self._store, time.monotonic() + _LEAVE_SECONDS
        assert store is not None
        if self.rank:
            store.add("gone", 1)
            while not store.check(["over"]) and time.monotonic() < deadline:
                time.sleep(0.005)
        else:
            while store.add("gone", 0) < self.world_size - 1 and time.monotonic() < deadline:
                time.sleep(0.005)
            store.set("over", "")


def _host(init_method: str) -> str | None:
    """Rank 0's machine; None where the ranks meet in a file."""
    parts = urlparse(init_method)
    return os.environ.get("MASTER_ADDR") if parts.scheme == "env" else parts.hostname


def _choose_interface(init_method: str) -> None:
    """Lets gloo and rpc use the interface by which the ranks meet (left alone they look this machine's name up)."""
    host = _host(init_method)
    interface = interface_towards(host, local=False) if host else None
    if interface is not None:
        for name in _INTERFACES:
            os.environ.setdefault(name, interface)
