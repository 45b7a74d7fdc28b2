"""A rank that looks at its own listening sockets, and lets strangers connect to them."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from pathlib import Path

import torch
import torch.distributed as dist

from modelexport.distributed import gather
from modelexport.distributed.launch import report

JUNK = (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 4096, bytes(64))


def listening() -> list[tuple[str, int]]:
    """(address, port) of every TCP socket that this process listens on."""
    own = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            own.add(os.readlink(f"/proc/self/fd/{fd}"))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                address, port = fields[1].split(":")
                words = bytes.fromhex(address)
                packed = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
                found.append((str(ipaddress.ip_address(packed)), int(port, 16)))
    return found


def meet_strangers() -> None:
    """Strangers connect to all that this rank listens on, send what they like, and stay; the work goes on."""
    with gather.get_configs_parallel({"rank": dist.get_rank()}, [0, 1]) as parts:
        assert len(parts) in (0, 2)
    places = listening()
    with contextlib.ExitStack() as strangers:
        for place in places:
            for junk in JUNK:
                stranger = strangers.enter_context(socket.create_connection(place, timeout=10))
                with contextlib.suppress(ConnectionError):
                    stranger.sendall(junk)
        dist.barrier()
        total = torch.tensor([float(dist.get_rank() + 1)])
        dist.all_reduce(total)
        with gather.get_configs_parallel({"rank": dist.get_rank()}, [1, 0]) as parts:
            assert len(parts) in (0, 2)
        dist.new_group([0, 1])  # makes new connections, through the store
    report({"listening": places, "total": float(total), "met in": os.environ["INIT_METHOD"]})
