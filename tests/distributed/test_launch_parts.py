"""The parts of launching: config, groups, grid, all_to_all, phases."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from modelexport.distributed.launch import (
    MultiprocessConfig,
    all_to_all,
    current_phase,
    default_backend,
    get_distributed_backend,
    get_grid,
    grid_coordinates,
    init_dist,
    init_process_group_from_backend,
    phase,
    phase_scope,
    set_distributed_backend,
)
from modelexport.distributed.launch.grid import grid_ranks
from modelexport.distributed.launch.supervisor import RankHandle, Supervisor
from modelexport.distributed.supervision import status
from modelexport.distributed.supervision.phase_board import PhaseBoard, new_board_file
from modelexport.errors import GatherError, UsageError
from tests.distributed import _launch_targets as targets
from tests.distributed._launch_helpers import launch

pytestmark = pytest.mark.timeout(90)


# --- config ----------------------------------------------------------------------------------------


def test_resolve_fills_in_what_is_missing_in_place() -> None:
    cfg = MultiprocessConfig()
    assert (cfg.rank, cfg.world_size, cfg.launch_method, cfg.master_addr) == (-1, "???", "forkserver", "127.0.0.1")
    assert MultiprocessConfig.resolve(cfg) is None
    expected = max(1, torch.cuda.device_count())
    assert (cfg.world_size, cfg.local_world_size) == (expected, expected)
    assert 0 < cfg.master_port < 65536
    given_values = MultiprocessConfig(world_size=6, local_world_size=2, master_port=1234)
    MultiprocessConfig.resolve(given_values)
    assert (given_values.local_world_size, given_values.master_port) == (2, 1234)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"world_size": 0}, "world_size must be a whole number of at least 1, not 0"),
        ({"world_size": True}, "world_size must be a whole number"),
        ({"world_size": 2, "local_world_size": 3}, "local_world_size 3 is larger than world_size 2"),
        ({"world_size": 6, "model_parallelism": 4}, "world_size 6 is not divisible by model_parallelism 4 x"),
        ({"world_size": 2, "launch_method": "thread"}, "'thread' is none of forkserver, spawn, fork"),
        ({"world_size": 2, "timeout": 0}, "timeout must be a positive number"),
        ({"world_size": 2, "master_port": 70000}, "master_port 70000"),
        ({"world_size": 4, "local_world_size": 2}, "give master_port"),
    ],
)
def test_resolve_refuses(config: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        MultiprocessConfig.resolve(MultiprocessConfig(**config))


def test_rank_offset_beyond_the_world() -> None:
    from modelexport.distributed.launch import launch_subprocesses

    cfg = MultiprocessConfig(world_size=4, local_world_size=2, master_port=1234)
    with pytest.raises(UsageError, match="ranks 3 to 4 are to start here, but world_size is 4"):
        launch_subprocesses(targets.describe, cfg, None, 3)


# --- back ends and groups --------------------------------------------------------------------------


def test_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_BACKEND", "")
    assert default_backend() == ("nccl" if torch.cuda.is_available() else "gloo")
    assert get_distributed_backend() == default_backend()
    set_distributed_backend("cpu:gloo,cuda:nccl")
    assert get_distributed_backend() == "cpu:gloo,cuda:nccl"
    with pytest.raises(UsageError, match=r"unknown back end 'glue'; known here: .*gloo"):
        set_distributed_backend("glue")


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment without a rank's place, to which what init_dist sets does not stick."""
    for name in targets.VARIABLES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("TP_SOCKET_IFNAME", "lo")


@pytest.mark.usefixtures("bare")
def test_a_process_by_itself_can_join_a_group_of_one() -> None:
    for join in (
        lambda: init_process_group_from_backend("gloo"),
        lambda: init_dist(0, 0, 1, 1, "127.0.0.1", 29500, "env://", "gloo", timeout=5.0),
    ):
        join()
        try:
            assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
            assert os.environ["LOCAL_WORLD_SIZE"] == "1"
            assert get_grid().dp.ranks == (0,)
            assert get_grid().mp.group is dist.group.WORLD
        finally:
            dist.destroy_process_group()
    with pytest.raises(UsageError, match=r"rank 2 of 2 \(local rank 0 of 1\) does not exist"):
        init_dist(2, 0, 2, 1, "127.0.0.1", 29500, "env://")


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5))
def test_the_grid_is_arange_viewed(mp: int, pp: int, dp: int) -> None:
    world = torch.arange(mp * pp * dp).view(dp, pp, mp)
    for rank in range(world.numel()):
        m, p, d = grid_coordinates(rank, mp, pp)
        assert world[d, p, m] == rank
        ranks = grid_ranks(rank, world.numel(), mp, pp)
        assert ranks == {
            "mp": tuple(world[d, p, :].tolist()),
            "pp": tuple(world[d, :, m].tolist()),
            "dp": tuple(world[:, p, m].tolist()),
        }


@pytest.mark.parametrize(
    ("rank", "message"),
    [
        (0, r"rank 1 of 2 did not come within 1 s: .*--timeout"),
        (1, r"rank 1 on \S+ did not reach rank 0 at 127\.0\.0\.1:"),
    ],
)
@pytest.mark.usefixtures("bare")
def test_ranks_that_do_not_come_are_named(rank: int, message: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(GatherError, match=message):
        init_dist(rank, 0, 2, 1, "127.0.0.1", port, "env://", "gloo", timeout=1.0)
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("mp", "pp"),
    [(2, 2), (4, 1), (1, 2), (1, 1)],
)
def test_groups_along_the_axes(mp: int, pp: int) -> None:
    events = launch(targets.grid_sums, 4, model_parallelism=mp, pipeline_parallelism=pp, model_parallel_backend="gloo")
    assert len(events) == 4
    for rank, event in events:
        ranks = grid_ranks(rank, 4, mp, pp)
        for axis, members in ranks.items():
            assert event[axis] == [members.index(rank), len(members), list(members), sum(members)]


def test_the_grid_without_a_group() -> None:
    grid = get_grid()
    assert [(g.rank, g.world_size, g.group) for g in (grid.mp, grid.pp, grid.dp)] == [(0, 1, None)] * 3


# --- all_to_all ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world_size", "mp"), [(2, 2), (4, 2)])
def test_all_to_all(world_size: int, mp: int) -> None:
    events = launch(targets.all_to_all_values, world_size, model_parallelism=mp)
    assert sorted(rank for rank, event in events if event["ok"]) == list(range(world_size))


def test_all_to_all_refuses_on_every_rank() -> None:
    events = launch(targets.all_to_all_errors, 2)
    for rank in (0, 1):
        messages = [event["error"] for r, event in events if r == rank]
        assert len(messages) == 4
        assert "rank 1: the input is a 0-dim tensor" in messages[0]
        assert "rank 1: dim 0 of the input has size 3 (shape (3, 2)), which is not divisible" in messages[1]
        assert "rank 1 brings shape (2, 3) and rank 0 brings (2, 2)" in messages[2]
        assert "rank 1 brings dtype int32 and rank 0 brings float32" in messages[3]


def test_all_to_all_by_oneself() -> None:
    source = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.equal(all_to_all(source, None), source)
    assert torch.autograd.gradcheck(lambda x: all_to_all(x, None), (source,))
    with pytest.raises(UsageError, match="0-dim"):
        all_to_all(torch.tensor(1.0), None)


# --- phases ----------------------------------------------------------------------------------------


@pytest.fixture
def fresh_status() -> Iterator[status.Status]:
    own = status.Status()
    former = status.use(own)
    yield own
    status.use(former)


def test_a_scope_restores_the_former_phase(fresh_status: status.Status) -> None:
    assert current_phase() == ""
    phase("outer")
    with phase_scope("inner", waiting=True):
        assert fresh_status.current() == ("inner", True)
        phase("innermost")
        assert fresh_status.current() == ("innermost", False)
    assert fresh_status.current() == ("outer", False)


def test_an_error_keeps_the_phase_where_it_arose(fresh_status: status.Status) -> None:
    with pytest.raises(ValueError, match="x") as caught, phase_scope("outer"), phase_scope("inner"):
        raise ValueError("x")
    assert status.phase_of_error(caught.value) == ("inner", False)
    wrapped = RuntimeError("y")
    wrapped.__cause__ = caught.value
    assert status.phase_of_error(wrapped) == ("inner", False)


def test_a_working_thread_speaks_for_a_waiting_main_thread(fresh_status: status.Status) -> None:
    entered, leave = threading.Event(), threading.Event()

    def work() -> None:
        with phase_scope("writing"):
            entered.set()
            leave.wait(30)

    thread = threading.Thread(target=work)
    thread.start()
    entered.wait(30)
    phase("quantising")
    assert fresh_status.current() == ("quantising", False)
    phase("waiting for the writer", waiting=True)
    assert fresh_status.current() == ("writing", False)
    leave.set()
    thread.join()
    assert fresh_status.current() == ("waiting for the writer", True)


def test_a_board_is_read_while_it_is_written() -> None:
    writer, stop = new_board_file("test"), threading.Event()
    board, reader = PhaseBoard(writer), PhaseBoard(os.dup(writer))
    texts = ["a" * 900, "\u00e9" * 10, "", "b" * 5000]

    def write() -> None:
        i = 0
        while not stop.is_set():
            board.write(texts[i % 4], i % 2 == 0)
            i += 1

    thread = threading.Thread(target=write)
    thread.start()
    try:
        counts = []
        for _ in range(3000):
            state = reader.read()
            assert state.text in [text[:984] for text in texts]
            counts.append(state.count)
    finally:
        stop.set()
        thread.join()
    assert counts == sorted(counts)
    board.beat(12345, True)
    assert (reader.read().resident_bytes, reader.read().waiting) == (12345, True)
    board.close()
    reader.close()


def test_bytes_that_move_tell_slowness_from_a_hang() -> None:
    """A layer on a slow disk has one phase for longer than the time-out; the message says what moved last, and when."""
    board = PhaseBoard(new_board_file("board"))
    mine, its = socket.socketpair()
    handle = RankHandle(3, cast(Any, SimpleNamespace(pid=None, exitcode=None)), mine, board)
    supervisor = Supervisor([handle], MultiprocessConfig(world_size=1, local_world_size=1, timeout=0.2))
    board.write("reading model.layers.7", False)

    def look(moved: int) -> None:
        time.sleep(0.05)
        board.beat(0, False, moved)
        supervisor._advance_clock()
        supervisor._find_hung()

    for moved in range(10):
        look(moved)
    assert handle.failure is None
    deadline = time.monotonic() + 10
    while handle.failure is None and time.monotonic() < deadline:
        look(9)
    assert handle.failure is not None
    assert (handle.failure.rank, handle.failure.phase) == (3, "reading model.layers.7")
    assert re.match(r"no progress for 0\.[2-9]\d* s \(time-out 0\.2 s\)", handle.failure.summary)
    board.close()
    mine.close()
    its.close()


def test_a_rank_that_cannot_be_let_go_has_failed() -> None:
    """It would wait for that until the time-out. One that has ended says by its exit status how."""

    class BrokenChannel:
        def __init__(self, code: int) -> None:
            self.code = code

        def send(self, line: bytes) -> None:
            raise OSError(self.code, os.strerror(self.code))

    board = PhaseBoard(new_board_file("board"))
    board.write("waiting for the other ranks to finish", True)
    for code, summary in ((errno.ENOBUFS, "its launcher cannot let it leave: No buffer space"), (errno.EPIPE, "")):
        handle = RankHandle(1, cast(Any, None), cast(Any, BrokenChannel(code)), board)
        handle.release()
        assert (handle.failure.summary if handle.failure else "").startswith(summary)
        assert (handle.failure is None) == (not summary)
    board.close()


def test_a_rank_without_a_board_tells_its_launcher_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(code: int) -> None:
        raise SystemExit(code)

    def no_memory(fd: int) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(status, "PhaseBoard", no_memory)
    launcher, rank = socket.socketpair()
    with launcher, rank:
        with pytest.raises(SystemExit, match="1"):
            status.RankStatus.opened(rank, 0)
        message = json.loads(launcher.recv(1 << 16))
    assert (message["type"], message["phase"]) == ("failed", "starting")
    assert message["summary"].startswith("memory ran out")


def test_no_status_file_is_left_behind() -> None:
    launch(targets.many_events, 2, 1)
    deadline = time.monotonic() + 10
    while board_files() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not board_files()
    fd = new_board_file("modelexport-rank-0")
    assert len(board_files()) == 1, "this is how they are told"
    os.close(fd)


def board_files() -> list[str]:
    """The boards that this process has open; others of its files come and go while it collects garbage."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [path for path in found if "modelexport-rank-" in path]
