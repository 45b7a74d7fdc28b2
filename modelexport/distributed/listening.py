"""Listening sockets of a job: on the interface that ``MASTER_ADDR`` names, and no other."""

from __future__ import annotations

import socket

from modelexport.system.terminal import note

__all__ = ["bind_towards"]


def bind_towards(address: str, port: int, *, reuse: bool = False) -> socket.socket:
    """A TCP socket bound to the interface that has an address; it does not listen yet.

    Where no interface of this machine has it (it is translated on the way here), the socket is bound to all of them,
    which a note on stderr says.

    Args:
        address: a host name, IPv4 or IPv6 address.
        port: 0 for one that is free.

    Raises:
        OSError: the port is taken, or the name leads nowhere.
    """
    places = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    here = next(((family, place) for family, *_, place in places if _is_here(family, place)), None)
    family, place = here or (places[0][0], ("", port))
    if here is None:
        note(
            f"modelexport: no interface of this machine has MASTER_ADDR {address}: rank 0 listens on all of them; set "
            "MASTER_ADDR to an address of this machine to have it listen on one"
        )
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        if reuse:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(place)
    except BaseException:
        bound.close()
        raise
    return bound


def _is_here(family: int, place: tuple) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((place[0], 0, *place[2:]))
    except OSError:
        return False
    return True
