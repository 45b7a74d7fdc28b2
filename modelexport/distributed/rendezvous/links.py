"""Connections between ranks, made through the process group's store before the first gather, without a collective.

The first rank listens on an abstract Unix socket (no file; its name is random) and puts the name and a secret into
the store. The others connect, and each side checks that the other runs as the same user. From then on the gather
needs only its own sockets, so it may run in a background thread while collectives run on the same group.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import json
import os
import re
import secrets
import select
import socket
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from modelexport.distributed.transport.link import Link, peer_pid
from modelexport.distributed.transport.mailbox import StoreGoneError, asked
from modelexport.distributed.transport.messages import (
    ANY,
    TEXT,
    Kind,
    LostPeerError,
    check_fields,
    read_message,
    utf8,
)
from modelexport.distributed.transport.receiving import ReceivingLink
from modelexport.distributed.transport.sending import SendingLink
from modelexport.errors import GatherError
from modelexport.system.limits import advice

__all__ = [
    "agree",
    "collect_links",
    "connect_to_first",
    "default_store",
    "group_key",
    "host",
    "leave_note",
    "noted",
    "run_id",
]

_SOCKET = re.compile(r"[\w-]{1,100}", re.ASCII)
_NAME = Kind("the name of a socket", lambda value: isinstance(value, str) and bool(_SOCKET.fullmatch(value)))
_MEETING_PLACE = {"name": _NAME, "token": TEXT, "host": TEXT}
_generations: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
_run_ids: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
_process_run_id = secrets.token_hex(8)


def default_store() -> Any:
    """The key-value store that the process group was initialised with."""
    return dist.distributed_c10d._get_default_store()


def group_key(ranks: Sequence[int], group: dist.ProcessGroup | None) -> str:
    """A fresh store key for a rendezvous of ``ranks``: the same on each of them, another each time."""
    name = group.group_name if group is not None else "world"
    key = f"modelexport/gather/{name}/{'-'.join(map(str, ranks))}"
    counters = _generations.setdefault(default_store(), {})
    return f"{key}/{next(counters.setdefault(key, itertools.count()))}"


def _wait_for_key(store: Any, key: str, deadline: float, what: str, blamed: Sequence[int] = ()) -> bytes:
    # Polled, not store.wait(): that would hold the store's lock against other threads of this process.
    pause = 0.0005
    while True:
        try:
            if asked(store.check, [key]):
                return bytes(asked(store.get, key))
        except RuntimeError as error:
            raise LostPeerError(f"the process group's store is gone: {error}") from error
        if time.monotonic() > deadline:
            raise LostPeerError(f"{what} in time; is that rank in the same gather, with the same ranks?", blamed)
        time.sleep(pause)
        pause = min(pause * 1.5, 0.05)


def agree(key: str, ranks: Sequence[int], me: int, make: Callable[[], Any], seconds: float) -> Any:
    """Returns a JSON-able value that the first of ``ranks`` makes, on all of them.

    Raises:
        LostPeerError: on the others, if making it failed there or took longer than ``seconds``.
    """
    store, first = default_store(), ranks[0]
    if me == first:
        try:
            value = make()
        except BaseException as error:
            with contextlib.suppress(StoreGoneError):
                asked(store.set, key, json.dumps({"error": str(error)}))
            raise
        asked(store.set, key, json.dumps({"value": value}))
        return value
    deadline = time.monotonic() + seconds
    what = f"rank {first} did not start its gather of ranks {list(ranks)}"
    return _from_first(_wait_for_key(store, key, deadline, what, [first]), ranks, {})["value"]


def _from_first(text: bytes, ranks: Sequence[int], needed: Mapping[str, Kind]) -> dict[str, Any]:
    """The message that the first of ``ranks`` has put into the store for the others.

    Args:
        needed: the kinds of the fields that it has to have; none: a "value".

    Raises:
        LostPeerError: it has failed, or that is no message of it.
    """
    first, sender = ranks[0], f"what rank {ranks[0]} has left for ranks {list(ranks)} in the process group's store"
    found = read_message(text, sender, {}, {"error": TEXT}, blamed=[first])
    if "error" in found:
        raise LostPeerError(f"rank {first} gave up meeting ranks {list(ranks)}: {found['error']}", [first])
    return check_fields(found, sender, needed or {"value": ANY}, blamed=[first])


def leave_note(key: str) -> None:
    """Leaves a note for ranks that come later (see :func:`noted`); does nothing where the process group has ended."""
    with contextlib.suppress(RuntimeError, ValueError):
        default_store().set(key, "")


def noted(key: str) -> bool:
    """Returns whether a rank has left a note under ``key``."""
    try:
        return bool(default_store().check([key]))
    except RuntimeError as error:
        raise LostPeerError(f"the process group's store is gone: {error}") from error


def run_id(seconds: float) -> str:
    """One id for all ranks of this run, another for another run; without a group, one for this process."""
    if not dist.is_initialized():
        return os.environ.get("MODELEXPORT_RUN_ID") or _process_run_id
    store = default_store()
    if store not in _run_ids:
        key = "modelexport/run"
        if asked(store.add, f"{key}/first", 1) == 1:
            asked(store.set, key, secrets.token_hex(8))
        deadline = time.monotonic() + seconds
        _run_ids[store] = _wait_for_key(store, key, deadline, "no rank made a run id").decode()
    return _run_ids[store]


def host() -> str:
    """The name of this machine for messages."""
    return f"{socket.gethostname()} (network namespace {os.stat('/proc/self/ns/net').st_ino})"


def collect_links(key: str, ranks: Sequence[int], seconds: float) -> list[ReceivingLink]:
    """Waits, on the first rank, until all the others have connected."""
    store = default_store()
    deadline = time.monotonic() + seconds
    token = secrets.token_hex(16)
    links: dict[int, ReceivingLink] = {}
    pending: dict[int, Link] = {}  # connected, not yet known which rank they are
    with _socket() as listener:
        name = f"modelexport-{secrets.token_hex(16)}"
        listener.bind(f"\0{name}")
        listener.listen(len(ranks))
        listener.setblocking(False)
        asked(store.set, key, json.dumps({"name": name, "token": token, "host": host()}))
        poller = select.poll()
        poller.register(listener, select.POLLIN)
        try:
            while len(links) < len(ranks) - 1:
                missing = [rank for rank in ranks[1:] if rank not in links]
                if time.monotonic() > deadline:
                    raise LostPeerError(
                        f"waited {seconds:g} s for ranks {list(ranks[1:])} to connect; connected: {sorted(links)}; "
                        f"missing: {missing}, which did not start the same gather on this host",
                        missing,
                    )
                for fd, _ in poller.poll(100):
                    if fd == listener.fileno():
                        accepted = _accept(listener)
                        pending[accepted.sock.fileno()] = accepted
                        poller.register(accepted.sock, select.POLLIN)
                    else:
                        poller.unregister(fd)
                        _greet(pending.pop(fd), token, missing, links)
                for rank in missing:
                    if asked(store.check, [f"{key}/failed/{rank}"]):
                        raise LostPeerError(asked(store.get, f"{key}/failed/{rank}").decode(), [rank])
            asked(store.delete_key, key)
        except BaseException as error:
            with contextlib.suppress(StoreGoneError):
                asked(store.set, key, json.dumps({"error": str(error)}))  # for those who have not come yet
            for link in links.values():
                link.close()
            raise
        finally:
            for accepted in pending.values():
                accepted.close()
    return [links[rank] for rank in ranks[1:]]


def _socket() -> socket.socket:
    try:
        return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError as error:
        raise GatherError(f"no socket to meet the other ranks: {error}{advice(error)}") from error


def _accept(listener: socket.socket) -> Link:
    sock, _ = listener.accept()
    return Link(sock, -1)


def _greet(accepted: Link, token: str, missing: list[int], links: dict[int, ReceivingLink]) -> None:
    """Reads the rank of an accepted connection; closes one that does not know the secret."""
    hello: Any = None
    if peer_pid(accepted.sock)[1] == os.geteuid():
        with contextlib.suppress(LostPeerError):
            received = accepted.read()
            hello = received[0] if received is not None else None
    rank = hello.get("rank") if isinstance(hello, dict) else None
    if rank not in missing or not hmac.compare_digest(utf8(hello.get("token")), token.encode()):
        accepted.close()
        return
    missing.remove(rank)
    links[rank] = ReceivingLink(accepted.sock, rank)
    links[rank].post({"kind": "welcome"})


def connect_to_first(key: str, ranks: Sequence[int], me: int, limit: int, seconds: float) -> SendingLink:
    """Connects, on any other rank, to the first one."""
    store = default_store()
    first, deadline = ranks[0], time.monotonic() + seconds
    what = f"rank {first} did not start its gather of ranks {list(ranks)}"
    info = _from_first(_wait_for_key(store, key, deadline, what, [first]), ranks, _MEETING_PLACE)
    sock = _socket()
    try:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        sock.connect(f"\0{info['name']}")
        uid = peer_pid(sock)[1]
        if uid != os.geteuid():
            raise PermissionError(f"it runs as user {uid}, this rank as {os.geteuid()}")
        link = SendingLink(sock, first, limit)
        if not link.greet(info["token"], me, deadline - time.monotonic()):
            link.close()
            raise ConnectionError("it did not answer")
    except OSError as error:
        sock.close()
        text = (
            f"rank {me} on {host()} cannot reach rank {first} on {info['host']}: {error}; ranks that do not share a "
            "host gather through a directory that all can see (workspace_path, --gather nfs --workspace DIR)"
        )
        asked(store.set, f"{key}/failed/{me}", text)
        raise GatherError(text) from error
    return link
