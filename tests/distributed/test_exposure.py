"""The sockets that a job listens on, and strangers who connect to them; see docs/security.md."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import threading
import time

import pytest

from modelexport.distributed.config import MultiprocessConfig
from modelexport.distributed.launch import launch_subprocesses
from modelexport.distributed.listening import bind_towards
from modelexport.distributed.supervision import watch_hub
from modelexport.distributed.supervision.watch_hub import Hub, Lines
from modelexport.errors import LimitError
from modelexport.jobs.progress import JobSteps, ProgressHandler
from modelexport.jobs.ranks import own_ranks
from modelexport.system.terminal import progress_bar
from tests.distributed import _exposure_targets as targets
from tests.distributed._launch_helpers import Events, launch
from tests.helpers.marks import extended

pytestmark = pytest.mark.timeout(120)


def handler() -> ProgressHandler:
    return ProgressHandler(JobSteps({}, ()), 2, progress_bar(quiet=True), None)


def check_met(events: Events) -> None:
    assert [event["total"] for _, event in events] == [3.0, 3.0]
    addresses = {address for _, event in events for address, _ in event["listening"]}
    assert all(ipaddress.ip_address(address).is_loopback for address in addresses), addresses


def test_ranks_of_a_job_listen_on_the_loopback_interface_and_strangers_do_not_stop_them() -> None:
    """Their store is no socket at all."""
    events = Events()
    with own_ranks(2, 60.0, ("torch",), handler(), None) as config:
        config.on_event = events
        launch_subprocesses(targets.meet_strangers, config, None, 0)
    check_met(events)
    assert {event["met in"].rpartition("/")[0] for _, event in events} == {f"file:///proc/{os.getpid()}/fd"}


def test_a_jobs_store_has_its_memory_before_ranks_write_to_it() -> None:
    """A write to it never fails: half an entry would keep torch's store reading for ever."""
    with own_ranks(2, 60.0, (), handler(), None) as config:
        status = os.stat(config.init_method.removeprefix("file://"))
    assert status.st_size == 0  # what is reserved is not read
    assert status.st_blocks * 512 >= 1 << 20


def test_without_memory_for_the_store_no_rank_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, size: int) -> bool:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("modelexport.jobs.ranks.reserve", full)
    said = r"store in which the ranks meet \(1,\d+,\d+ bytes: No space left on device\)"
    with pytest.raises(LimitError, match=said), own_ranks(2, 60.0, (), handler(), None):
        pass


@extended
def test_a_store_listens_where_master_addr_says_and_survives_junk() -> None:
    check_met(launch(targets.meet_strangers, 2))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_cannot_open_a_jobs_store() -> None:
    with own_ranks(2, 60.0, (), handler(), None) as config:
        path = config.init_method.removeprefix("file://")
        os.close(os.open(path, os.O_RDWR))
        child = os.fork()
        if child == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            try:
                os.open(path, os.O_RDWR)
            except PermissionError:
                os._exit(7)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_a_listener_is_bound_to_one_interface(capsys: pytest.CaptureFixture[str]) -> None:
    for address in ("127.0.0.1", "localhost"):
        with bind_towards(address, 0) as bound:
            assert ipaddress.ip_address(bound.getsockname()[0]).is_loopback
    assert capsys.readouterr().err == ""


def test_an_address_that_is_translated_on_the_way_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with bind_towards("192.0.2.1", 0) as bound:  # set aside for documentation: no interface has it
        assert bound.getsockname()[0] == "0.0.0.0"
    assert "no interface of this machine has MASTER_ADDR 192.0.2.1" in capsys.readouterr().err


def test_a_crowd_of_strangers_takes_no_descriptors_from_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections that do not introduce themselves are few at any time: the oldest is hung up on."""
    monkeypatch.setattr(watch_hub, "MOST_STRANGERS", 8)
    listener = socket.create_server(("127.0.0.1", 0))
    own, hubs = socket.socketpair()
    hub = Hub(listener, hubs, "secret", MultiprocessConfig(world_size=2))
    hub.start()
    crowd = [socket.create_connection(listener.getsockname(), timeout=10) for _ in range(40)]
    assert crowd[0].recv(1) == b""
    with socket.create_connection(listener.getsockname(), timeout=10) as rank:
        rank.sendall(b'{"rank": 1, ')  # in two pieces
        time.sleep(0.05)
        rank.sendall(b'"token": "secret"}\n{"finished": 1}\n')
        own.sendall(b'{"finished": 1}\n')
        assert Lines(rank).read() == [{"released": 1}]
    own.close()
    for stranger in crowd:
        stranger.close()
    hub.join(10)
    assert not any(thread.name == "modelexport-watch-hub" for thread in threading.enumerate())
