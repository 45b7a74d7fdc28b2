"""Connections to the store's port are watched by the kernel, also those that others have opened; no others are."""

from __future__ import annotations

import socket
import sys

import pytest

from modelexport.distributed.launch.store_connections import StoreConnections

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="descriptors are listed in /proc")


def test_connections_to_the_stores_port_end_where_nothing_is_acknowledged() -> None:
    with socket.create_server(("127.0.0.1", 0)) as store, socket.create_server(("127.0.0.1", 0)) as other:
        with StoreConnections(store.getsockname()[1]):
            ours, elsewhere = (socket.create_connection(listener.getsockname()) for listener in (store, other))
        with ours, elsewhere:
            assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000
            assert elsewhere.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 0
