"""The ranks' watch over each other, where no launcher of ours sees all of them (torchrun, srun, several machines).

Each rank keeps a TCP connection to rank 0. It says there what it is doing; its failure, if it has one; and that it
has finished. The end of the connection before that is the end of its process. Rank 0 finds the root cause as a
launcher does (see failures) and tells all ranks, which raise it, so that a death on one machine ends the job on the
others within a second instead of at a time-out. No rank leaves before all have finished.

Messages are JSON lines::

    rank -> 0   {"rank": 3, "token": ".."}, {"phase": "..", "waiting": false}, {"failed": {..}}, {"finished": 1},
                {"leaves": "directory"}
    0 -> rank   {"cause": {..}}, {"released": 1}
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from modelexport.distributed.config import MultiprocessConfig, is_loopback
from modelexport.distributed.listening import bind_towards
from modelexport.distributed.supervision.failures import OWN, Failure, exception_message
from modelexport.distributed.supervision.heartbeat import remove_rank
from modelexport.distributed.supervision.interrupting import Interrupter
from modelexport.distributed.supervision.status import current_status, in_rank, phase_of_error, phase_scope
from modelexport.distributed.supervision.watch_hub import Hub, Lines, keep_alive
from modelexport.distributed.transport.messages import TEXT, TEXTS, WHOLE, LostPeerError, read_message
from modelexport.system.terminal import note

_KEY = "modelexport/watch"
_BEAT_SECONDS = 0.05  # between two looks at what this rank does: so old may be what is known of a rank that dies
_VERDICT_SECONDS = 5.0  # how long a failing rank waits to hear what the root cause is
_LAUNCHER_PATIENCE = 0.5  # how long SIGTERM waits for the cause to arrive
_GRACE_SECONDS = 3.0  # for the main thread to raise the cause by itself, when it may be inside native code


class PeerWatch:
    """One rank's part of the watch, made by every rank of the group once it has a store.

    Raises:
        LostPeerError: rank 0 cannot be reached.
    """

    def __init__(self, config: MultiprocessConfig, store: Any) -> None:
        self._rank = config.rank
        self._hub: Hub | None = None
        self._cause: Failure | None = None
        self._hub_is_gone = False
        self._released, self._judged, self._closed = threading.Event(), threading.Event(), threading.Event()
        self._send_lock = threading.Lock()
        if config.rank == 0:
            self._socket = self._open_hub(config, store)
        else:
            self._socket = _connect(config, store)
        self._socket.setblocking(True)
        self._lines = Lines(self._socket)
        # A launcher of ours sends SIGTERM when all is known and said; others do as soon as they see one rank end.
        self._interrupter = Interrupter(
            self._error, self._judged, on_sigterm=not in_rank(), patience=_LAUNCHER_PATIENCE
        )
        self._thread = threading.Thread(target=self._run, name="modelexport-watch", daemon=True)
        self._thread.start()

    def _open_hub(self, config: MultiprocessConfig, store: Any) -> socket.socket:
        token = secrets.token_hex(16)
        listener = _listen(config)
        mine, hubs = socket.socketpair()
        self._hub = Hub(listener, hubs, token, config)
        hosts = [config.master_addr] if is_loopback(config.master_addr) else [config.master_addr, socket.gethostname()]
        store.set(_KEY, json.dumps({"hosts": hosts, "port": listener.getsockname()[1], "token": token}))
        self._hub.start()
        return mine

    # ------------------------------------------------------------ for the main thread

    def fail(self, error: BaseException) -> BaseException:
        """Reports this rank's error; returns the exception to raise: ``error`` itself, or the job's root cause."""
        self._interrupter.raised = True
        if self._cause is None:
            text, _ = phase_of_error(error) or current_status().of_thread()
            fields = {"rank": self._rank, "phase": text, **exception_message(error)}
            self._send({"failed": fields})
            self._judged.wait(_VERDICT_SECONDS)
        cause = self._cause
        if cause is not None:
            self._remove_files()
        if cause is None or cause.rank == self._rank or getattr(error, "_modelexport_cause", None) is cause:
            return error
        return cause.error()

    def finish(self) -> None:
        """Reports that this rank's work is done, and waits until that of all ranks is.

        Raises:
            RankFailedError: another rank failed meanwhile.
        """
        with phase_scope("waiting for the other ranks to finish", waiting=True):
            self._send({"finished": 1})
            self._released.wait()
        error = self._error()
        if error is not None:
            raise error

    def close(self, *, wait: bool = True) -> None:
        """Stops watching. With ``wait`` rank 0 does so after the others."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()
        if self._hub is not None and wait:
            self._hub.join(_VERDICT_SECONDS)
        self._interrupter.close()

    # --------------------------------------------------------------- the thread

    def _run(self) -> None:
        said: Any = None
        registered: set[str] = set()
        arrivals = select.poll()
        arrivals.register(self._socket, select.POLLIN)
        while not self._closed.is_set():
            now = current_status().current()
            if now != said:
                said = now
                self._send({"phase": now[0], "waiting": now[1]})
            for directory in current_status().directories - registered:
                registered.add(directory)
                self._send({"leaves": directory})
            if self._interrupter.overdue(_GRACE_SECONDS):
                os._exit(128 + signal.SIGTERM)
            if not arrivals.poll(_BEAT_SECONDS * 1000):
                continue
            messages = self._lines.read()
            if messages is None:
                if not (self._closed.is_set() or self._released.is_set()):
                    gone = "its process ended, or its machine; no other rank can say more"
                    self._hub_is_gone = True
                    self._judge(Failure(0, time.monotonic(), OWN, "", gone))
                return
            for message in messages:
                if "cause" in message:
                    self._judge(_verdict(message["cause"]))
                elif "released" in message:
                    self._released.set()

    def _send(self, message: dict[str, Any]) -> None:
        # A connection that is gone is noticed by the thread, which reads from it.
        with contextlib.suppress(OSError), self._send_lock:
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def _judge(self, cause: Failure) -> None:
        """Makes the main thread raise the root cause; ends the process should it be stuck."""
        if self._cause is not None:
            return
        self._cause = cause
        self._judged.set()
        self._released.set()
        if self._interrupter.raised or self._closed.is_set():
            return
        self._interrupter.interrupt()
        if not self._closed.wait(_GRACE_SECONDS) and not self._interrupter.raised:
            note(f"modelexport: {cause.error()}")
            self._remove_files()
            os._exit(1)

    def _remove_files(self) -> None:
        """Removes what this rank left for others, who will not read it: the job has failed.

        Rank 0 does so for a rank that is gone. If that is rank 0, every rank does: were it only cut off, it would have
        given this rank up by now, as this one it.
        """
        for directory in map(Path, list(current_status().directories)):
            for rank in {self._rank, 0} if self._hub_is_gone else {self._rank}:
                remove_rank(directory, rank)

    def _error(self) -> BaseException | None:
        if self._cause is None:
            return None
        error = self._cause.error()
        error._modelexport_cause = self._cause  # type: ignore[attr-defined]
        return error


def _verdict(cause: Any) -> Failure:
    """The root cause that rank 0 has sent; rank 0 itself where that cannot be told."""
    try:
        return Failure.received(cause, "the root cause of which rank 0 tells", time=time.monotonic())
    except LostPeerError as error:
        return Failure(0, time.monotonic(), OWN, "", str(error))


def _listen(config: MultiprocessConfig) -> socket.socket:
    listener = bind_towards(config.master_addr, 0)
    listener.listen(config.world_size)
    return listener


def _place(text: bytes) -> dict[str, Any]:
    """The place where rank 0 listens, which it has put into the store.

    Raises:
        LostPeerError: it is none.
    """
    what = "the place in the process group's store where rank 0 watches the others"
    return read_message(text, what, {"hosts": TEXTS, "port": WHOLE, "token": TEXT}, blamed=[0])


def _connect(config: MultiprocessConfig, store: Any) -> socket.socket:
    store.wait([_KEY], timedelta(seconds=config.timeout))
    place = _place(store.get(_KEY))
    reasons = []
    for host in place["hosts"]:
        try:
            connection = socket.create_connection((host, place["port"]), timeout=min(60.0, config.timeout))
        except (OSError, OverflowError) as error:  # of a port above 65535
            reasons.append(f"{host}:{place['port']}: {error}")
            continue
        keep_alive(connection)
        connection.sendall(json.dumps({"rank": config.rank, "token": place["token"]}).encode() + b"\n")
        return connection
    raise LostPeerError(
        f"rank {config.rank} on {socket.gethostname()} cannot reach rank 0: {'; '.join(reasons)}; ranks of one job "
        "must reach each other over TCP: set MASTER_ADDR to an address of rank 0's machine that the others can reach"
    )
