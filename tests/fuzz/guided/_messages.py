"""The readers of messages: all that one process of a job gives another, by sockets, the store, files or memory."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import zlib
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from modelexport.checkpoints import hub_source
from modelexport.checkpoints.mirrors.fetching import Interrupted
from modelexport.checkpoints.mirrors.mirror import RemoteFile
from modelexport.distributed import environment
from modelexport.distributed.collectives import argument_check
from modelexport.distributed.collectives.master_worker.driving import Work
from modelexport.distributed.collectives.master_worker.remote_calls import Member
from modelexport.distributed.config import MultiprocessConfig
from modelexport.distributed.launch.supervisor import RankHandle, Supervisor
from modelexport.distributed.rendezvous import links
from modelexport.distributed.rendezvous.agreement import Rendezvous, _RendezvousState
from modelexport.distributed.supervision import watch_hub
from modelexport.distributed.supervision.heartbeat import condition, last_heartbeat, remove_gone, sweep_dead_runs
from modelexport.distributed.supervision.outcomes import error_of
from modelexport.distributed.supervision.phase_board import PAGE, PhaseBoard, new_board_file
from modelexport.distributed.supervision.watch import _place, _verdict
from modelexport.distributed.supervision.watch_hub import Hub, Lines
from modelexport.distributed.transport import mailbox, payload, tree
from modelexport.distributed.transport.link import Link
from modelexport.distributed.transport.mailbox import Mailbox
from modelexport.distributed.transport.receiving import ReceivingLink
from modelexport.distributed.transport.sending import SendingLink
from modelexport.distributed.workspace import NFSWorkspace, NotYetError
from modelexport.errors import ModelExportError, RankFailedError
from modelexport.quantization.calibration.exchange import Exchange
from modelexport.sharding import agreement
from modelexport.sharding.distribution import _SHARDS, from_record
from modelexport.sharding.exchange.algorithms import _IDS
from modelexport.sharding.exchange.shard_exchange import _FIELDS as SHARD_FIELDS
from modelexport.sharding.reshard import _FIELDS as RESHARD_FIELDS
from modelexport.sharding.reshard import _holdings
from modelexport.system.safetensors_header import header_length, parse_header
from tests.fuzz._mutations import Mutation, mutate_bytes, mutate_numbers
from tests.fuzz.guided._execution import Place, Reader
from tests.fuzz.guided._mutators import (
    files_in,
    framed,
    joined_files,
    json_lines,
    json_object,
    message,
    or_bytes,
    safetensors,
    several,
)
from tests.fuzz.guided._mutators import payload as payload_mutation

# ------------------------------------------------------------------ values


def _header(data: bytes, place: Place) -> None:
    length = header_length(data[:8], len(data))
    parse_header(data[8 : 8 + length], len(data))


def _tree(data: bytes, place: Place) -> None:
    tree.restore(data.decode("utf-8", "replace"), {"a": torch.zeros(2), "b.c": torch.zeros(3)})


class _Store(dict[str, bytes]):
    """As much of torch's store as messages need."""

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key, b"") for key in keys]

    def set(self, key: str, value: bytes) -> None:
        self[key] = value

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        if key not in self and not expected:
            self[key] = desired
        return self.get(key, expected)

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    def delete_key(self, key: str) -> bool:
        return self.pop(key, None) is not None


def _stored(data: bytes, place: Place) -> None:
    box = Mailbox(_Store(key=data))
    for found in (*box.get(["key"]), box.peek("key") or b""):
        mailbox.parse(found)


def _rendezvous(data: bytes, rank: int) -> Rendezvous:
    """A rank of two in a rendezvous, for which another has put these bytes into the store."""
    found = Rendezvous("call", 1.0)
    found.rank, found.world_size = rank, 2
    found._store = _Store()
    found._box, found._state = Mailbox(found._store), _RendezvousState("p")
    found._path, found._outcomes = "p/0", ["p/0/outcome"]
    found._contribute({}, mailbox.encode(None))
    found._box.put(f"p/0/from/{1 - rank}", data or b"\n")
    return found


def _contribution(data: bytes, place: Place) -> None:
    found = _rendezvous(data, 0)
    with contextlib.suppress(ModelExportError):
        found._absence(1.0)
    mailbox.parse(found._decide(lambda values: values[1]))


def _outcome(data: bytes, place: Place) -> None:
    outcome, value = _rendezvous(b"{}", 1)._conclude(data)
    if outcome["kind"] != "value":
        raise error_of(outcome, 1)
    mailbox.decode(value)


# ------------------------------------------------------------------ gathers


def _frames(data: bytes) -> Iterator[bytes]:
    at = 0
    while at + 2 <= len(data):
        (length,) = struct.unpack_from("<H", data, at)
        yield data[at + 2 : at + 2 + length]
        at += 2 + length


@cache
def _segment() -> int:
    """A segment of another rank, which holds a payload."""
    packed = payload.pack({"a": torch.arange(4), "b": [1, torch.zeros(0)], "c": torch.zeros(3, dtype=torch.bfloat16)})
    table = b"".join(struct.pack("<QQQ", 1 if entry.nbytes else 0, 2048, entry.nbytes) for entry in packed.entries)
    fd = os.memfd_create("fuzz")
    os.ftruncate(fd, 4096)
    os.pwrite(fd, table + packed.header, 0)
    return fd


def segment_messages() -> list[bytes]:
    """What a rank sends to announce its segment and that payload."""
    packed = payload.pack({"a": torch.arange(4), "b": [1, torch.zeros(0)], "c": torch.zeros(3, dtype=torch.bfloat16)})
    segment = {"kind": "segment", "number": 1, "size": 4096, "sealed": False}
    where = {"segment": 1, "offset": 0, "entries": len(packed.entries), "header": len(packed.header)}
    return [json.dumps(each).encode() for each in (segment, {"kind": "payload", "seq": 0, **where})]


def _send_frames(sock: socket.socket, data: bytes) -> None:
    for frame in list(_frames(data))[:20]:
        if b"segment" in frame and b"payload" not in frame:
            socket.send_fds(sock, [frame], [_segment()])
        elif frame:
            sock.send(frame)


def _to_first(data: bytes, place: Place) -> None:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link = ReceivingLink(here, 1)
    with there:
        try:
            _send_frames(there, data)
            link.pump()
            for seq in sorted(link.inbox):
                delivery, config = link.open(seq)
                del config
                link.finish(delivery)
            link.release_dropped()
        finally:
            link.close()


def _to_sender(data: bytes, place: Place) -> None:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link = SendingLink(here, 0, 2)
    with there:
        try:
            link.send(0, payload.pack({"a": torch.zeros(4), "b": torch.zeros(2)}), 1.0)
            _send_frames(there, data)
            link._process()
        finally:
            link.close()


def _hello(data: bytes, place: Place) -> None:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    found: dict[int, ReceivingLink] = {}
    with there, here:
        if data:
            there.send(data[:4096])
        links._greet(Link(here, -1), "secret", [1, 2], found)


def _meeting(data: bytes, place: Place) -> None:
    for read in (_place, lambda data: links._from_first(data, [0, 1], {})):
        with contextlib.suppress(ModelExportError):
            read(data)
    links._from_first(data, [0, 1], links._MEETING_PLACE)


@cache
def _workspace(directory: Path) -> NFSWorkspace:
    os.chmod(directory, 0o700)
    return NFSWorkspace(directory, run_id="r", rank=0, world_size=2)


_MANIFEST, _PAYLOAD = "run-r/rank-00001.00000001.json", "run-r/rank-00001.00000001.safetensors"


def _fetch(data: bytes, place: Place) -> None:
    workspace = _workspace(place.directory)
    for name, content in zip((_MANIFEST, _PAYLOAD), files_in(data, 2), strict=False):
        place.put(name, content)
    workspace.describe_missing(1, 1)
    workspace.fetch(1, 1)


def _with_checksum(data: bytes, rng: Random) -> bytes:
    """A manifest and a payload of which only one is changed, or whose size and checksum are those of the manifest."""
    contents = files_in(several(("a.json", "b.safetensors"))(data, rng), 2)
    if rng.random() < 0.7:
        manifest = json.loads(contents[0])
        manifest |= {"bytes": len(contents[1]), "crc32": zlib.crc32(contents[1])}
        manifest["header_bytes"] = min(len(contents[1]), 8 + int.from_bytes(contents[1][:8], "little"))
        contents[0] = json.dumps(manifest).encode()
    return joined_files(contents)


def _heartbeat(data: bytes, place: Place) -> None:
    directory = place.put("run-1/rank-00001.alive", data).parent
    last_heartbeat(directory, 1)
    condition(directory, 1)
    (place.directory / "run-2").mkdir(exist_ok=True)
    remove_gone(directory)
    sweep_dead_runs(place.directory, place.directory / "run-2")


# ------------------------------------------------------------------ supervision


def _nothing(*_: object) -> None:
    """In place of what only a connection over TCP takes."""


def _lines(data: bytes, receive: Callable[[socket.socket], object]) -> None:
    here, there = socket.socketpair()
    with here, there:
        there.send(data[:60_000] or b"\n")
        receive(here)


def _hub(data: bytes, place: Place) -> None:
    config = MultiprocessConfig()
    config.world_size = 2

    def receive(sock: socket.socket) -> None:
        listener, own = SimpleNamespace(), SimpleNamespace(sendall=lambda data: None)
        hub: Any = Hub(listener, own, "secret", config)  # type: ignore[arg-type]
        lines = Lines(sock)
        with mock.patch.object(watch_hub, "keep_alive", _nothing):
            member = hub._greet(sock, lines, lines.read())
            if member is not None:
                hub._decide()
                if member.failure is not None:
                    raise member.failure.error()

    _lines(data, receive)


def _watch(data: bytes, place: Place) -> None:
    def receive(sock: socket.socket) -> None:
        for found in Lines(sock).read() or []:
            if "cause" in found:
                str(_verdict(found["cause"]).error())

    _lines(data, receive)


def _launcher(data: bytes, place: Place) -> None:
    def receive(sock: socket.socket) -> None:
        sock.setblocking(False)
        process: Any = SimpleNamespace(sentinel=0, exitcode=None, pid=None)
        board: Any = SimpleNamespace(read=lambda: SimpleNamespace(text="", count=0))
        rank = RankHandle(0, process, sock, board)
        config = MultiprocessConfig(timeout=1.0)
        config.on_event = lambda rank, event: None
        config.world_size = config.local_world_size = 1
        supervisor = Supervisor([rank], config)
        with contextlib.closing(supervisor._selector):
            supervisor._receive(rank)
            if rank.failure is not None:
                supervisor._settled()
                raise rank.failure.error()

    _lines(data, receive)


@cache
def _board() -> PhaseBoard:
    return PhaseBoard(new_board_file("fuzz"))


def _phase(data: bytes, place: Place) -> None:
    board = _board()
    os.pwrite(board.fd, data[: PAGE + 4096].ljust(PAGE, b"\0"), 0)
    board.read()
    board.stacks()


# ------------------------------------------------------------------ collectives


def _team() -> Any:
    return SimpleNamespace(ranks=(0, 1), size=2, alone=False, position=0, carrier=lambda device: device)


def _said(data: bytes) -> Any:
    """Replaces the exchange of two ranks: the other one sends a length of 8 bytes and a text."""

    def exchange(mine: bytes, size: int, team: Any) -> list[bytes]:
        theirs = data if size == argument_check._FIRST_BYTES else data[8:]
        return [bytes(each[:size].ljust(size, b"\0")) for each in (mine, theirs)]

    return mock.patch.object(argument_check, "_exchange_blocks", exchange)


def _arguments(data: bytes, place: Place) -> None:
    if data[:1] != b"{":  # a length that is not right: memory is taken for it, up to a bound
        with _said(data), mock.patch.object(argument_check, "_MOST_BYTES", 1 << 20):
            argument_check.exchange_texts("x" * 600, _team())
        return
    said = _said(len(data).to_bytes(8, "little") + data)
    with said, argument_check.Agreement("broadcast", _team(), True) as call:
        call.declare(torch.zeros(2), source=0)
        call.exchanges([torch.zeros(1)] * 2, [torch.zeros(1)] * 2)


def _tensors(data: bytes, place: Place) -> None:
    def describe(record: dict[str, Any], fields: Any) -> list[dict[str, Any]]:
        return agreement.exchange_records("call", _team(), record, None, fields)

    text = data.decode("utf-8", "replace")
    with mock.patch.object(agreement, "exchange_texts", lambda mine, team: [mine, text]):
        if "shards" in text:
            for said in describe({"shards": []}, {"shards": _SHARDS}):
                list(map(from_record, said["shards"]))
        elif "ids" in text:
            describe({"ids": []}, {"ids": _IDS})
        elif "digest" in text:
            describe({"digest": "", "has": "0", "needs": "0"}, SHARD_FIELDS)
        else:
            for said in describe({"held": [], "wanted": []}, RESHARD_FIELDS):
                list(_holdings(said["held"]))


def _answer(data: bytes, place: Place) -> None:
    work = Work("call", [1])
    work.answered(1, data.decode("utf-8", "replace"), [])
    assert work.take(0.0), "an answer that is damaged is an outcome, too"


def _command(data: bytes, place: Place) -> None:
    text = data.decode("utf-8", "replace")
    if '"run"' not in text and "prepare" not in text and "make" not in text:  # these do what the master says
        Member().answer(text, [])


def _objects(data: bytes, place: Place) -> None:
    exchange: Any = Exchange.__new__(Exchange)
    exchange.world = 1
    part = torch.frombuffer(bytearray(data or b" "), dtype=torch.uint8)
    gathering = SimpleNamespace(all_gather=lambda lengths, mine: None)
    with mock.patch("modelexport.quantization.calibration.exchange.collectives", gathering):
        exchange._by_collective = lambda *_: [part]
        exchange.objects(1)


# ------------------------------------------------------------------ launchers and the hub


def _environment(data: bytes, place: Place) -> None:
    lines = data.decode("utf-8", "replace").split("\n")
    environ = {name: value for name, _, value in (line.partition("=") for line in lines)}
    environment._sizes_from(environ)
    environment._master_address(environ, one_machine=False)


def _hub_answer(data: bytes, place: Place) -> None:
    lines = (line.partition(": ") for line in data.decode("latin-1").split("\n"))
    headers = {name: value for name, _, value in lines}
    repository: Any = hub_source._Repository.__new__(hub_source._Repository)
    repository.model, repository.commit, repository._etags = "a/b", "c", {}
    repository._files = {"f": RemoteFile("f", 100, "e")}
    status = headers.get("status", "206")
    response = SimpleNamespace(status_code=int(status) if status in _STATUSES else 206, headers=headers)
    repository._accept("f", response, 10, 20, is_hub=True)


def _hub_header(data: bytes, place: Place) -> None:
    repository: Any = hub_source._Repository.__new__(hub_source._Repository)
    repository._bytes = lambda name, start, stop: data[start:stop]
    path = place.put("f", bytes(100))
    repository.fetch_header(path, len(data))
    hub_source._header_end(path)


_STATUSES = ("200", "206", "401", "404", "429", "500")


def _read(read: Callable[[bytes], object]) -> Callable[[bytes, Place], object]:
    return lambda data, place: read(data)


_NUMBERS = or_bytes(mutate_numbers)
_frame: Callable[[Mutation], Mutation] = partial(framed, "<H")

READERS = (
    Reader("payload-header", _read(payload.parse_header), payload_mutation),
    Reader("safetensors-header", _header, safetensors),
    Reader("tree", _tree, json_object),
    Reader("value", _read(mailbox.decode), payload_mutation),
    Reader("joined-values", _read(mailbox.separate), _NUMBERS),
    Reader("stored-message", _stored, message),
    Reader("contribution", _contribution, message),
    Reader("outcome", _outcome, message, (RankFailedError,)),
    Reader("to-first", _to_first, _frame(json_object)),
    Reader("to-sender", _to_sender, _frame(json_object)),
    Reader("hello", _hello, json_object),
    Reader("meeting", _meeting, json_object),
    Reader("workspace", _fetch, or_bytes(_with_checksum), (NotYetError,)),
    Reader("heartbeat", _heartbeat, json_object),
    Reader("hub-lines", _hub, json_lines, (RankFailedError,)),
    Reader("watch-lines", _watch, json_lines),
    Reader("launcher-lines", _launcher, json_lines, (RankFailedError,)),
    Reader("phase-board", _phase, _NUMBERS),
    Reader("arguments", _arguments, json_object),
    Reader("shard-records", _tensors, json_object),
    Reader("answer", _answer, json_object),
    Reader("command", _command, json_object),
    Reader("calibration-objects", _objects, json_object),
    Reader("environment", _environment, mutate_bytes),
    Reader("hub-header", _hub_header, safetensors),
    Reader("hub-answer", _hub_answer, mutate_bytes, (Interrupted,)),
)
