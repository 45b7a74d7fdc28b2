"""Launching: results, every way in which a rank can fail, and that nothing stays behind."""

from __future__ import annotations

import functools
import os
import socket
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from modelexport.distributed.launch import (
    MultiprocessConfig,
    init_and_run,
    launch_subprocesses,
    prestart,
    report,
)
from modelexport.errors import RankFailedError, UsageError
from tests.distributed import _launch_targets as targets
from tests.distributed._launch_helpers import Events, alive, failing, launch, wait_until
from tests.helpers.marks import few

pytestmark = pytest.mark.timeout(90)
WORLDS = (2, 4)


@pytest.mark.parametrize("world_size", WORLDS)
def test_ranks_run_and_report(
    world_size: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    prestart()
    monkeypatch.setenv("MODELEXPORT_TEST_MARKER", "set after the fork server started")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.chdir(tmp_path)
    order: list[str] = []
    events = Events()
    cfg = MultiprocessConfig(world_size=world_size, on_event=events)
    launch_subprocesses(targets.describe, cfg, lambda: order.append("setup"), 0, "hello", number=5)
    assert order == ["setup"]
    assert cfg.local_world_size == world_size
    assert sorted(rank for rank, _ in events) == list(range(world_size))
    assert len({event["pid"] for _, event in events} | {os.getpid()}) == world_size + 1
    for rank, event in events:
        assert event["rank"] == rank
        assert event["sum"] == sum(range(world_size))
        assert (event["word"], event["number"]) == ("hello", 5)
        assert event["marker"] == "set after the fork server started"
        assert event["path"] == os.environ.get("PYTHONPATH")
        assert event["threads"] == 3
        assert event["policy"] == "PASSIVE"
        assert event["cwd"] == str(tmp_path)
        assert event["variables"] == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(cfg.master_port),
        }
    assert not any(map(alive, events.pids()))
    assert "RANK" not in os.environ
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")


def test_all_events_arrive_in_order() -> None:
    events = launch(targets.many_events, 2, 2000)
    for rank in (0, 1):
        assert [event["i"] for r, event in events if r == rank] == list(range(2000))
    assert events[0][1]["text"] == "\u00e9\n" * 50


def test_a_config_can_be_used_again_and_its_port_is_kept_free_of_races() -> None:
    events = Events()
    cfg = MultiprocessConfig(world_size=2, on_event=events)
    MultiprocessConfig.resolve(cfg)
    with socket.socket() as thief:  # takes the port between resolve and launch
        thief.bind(("127.0.0.1", cfg.master_port))
        thief.listen()
        launch_subprocesses(targets.describe, cfg)
        assert cfg.master_port != thief.getsockname()[1]
    launch_subprocesses(targets.describe, cfg)
    assert len(events) == 4


def test_a_port_that_was_asked_for_and_is_taken() -> None:
    with socket.socket() as thief:
        thief.bind(("127.0.0.1", 0))
        thief.listen()
        port = thief.getsockname()[1]
        with pytest.raises(UsageError, match=f"port {port} is not free"):
            launch(targets.describe, 2, master_port=port)


@pytest.mark.parametrize("init_method", ["tcp", "file"])
def test_other_rendezvous_methods(init_method: str, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"tcp://127.0.0.1:{port}" if init_method == "tcp" else f"file://{tmp_path}/store"
    assert len(launch(targets.describe, 2, init_method=url)) == 2


EXPECTED = {
    "raise": ("KeyError: 'two'", 'numbers["two"]'),
    "user error": ("size 10 is not divisible by 3; use 5", "_raise_user_error"),
    "exit 0": ("ended with exit status 0, but without having finished", None),
    "sys.exit": ("SystemExit: 0", "sys.exit(0)"),
    "exit 3": ("exit status 3 and left no error message", None),
    "SIGKILL": ("killed by SIGKILL; unless somebody sent that, the machine ran out of memory", None),
    "SIGTERM": ("killed by SIGTERM", None),
    "SIGSEGV": ("killed by SIGSEGV", "string_at"),
    "SIGSTOP": ("its process is stopped (SIGSTOP or a debugger)", None),
    "hang": ("no progress for", "in _sleep"),
    "hang with the interpreter": ("no progress for", "in _hold_the_interpreter"),
    "hang in a thread": ("no progress for", "in work"),
}


@pytest.mark.parametrize("world_size", few(WORLDS, 4))
@pytest.mark.parametrize("how", EXPECTED)
def test_the_rank_that_failed_is_named(how: str, world_size: int) -> None:
    culprit = world_size - 1
    quick = how.startswith(("hang", "SIGSTOP"))
    error, _ = failing(targets.fail, world_size, how, culprit, timeout=1.5 if quick else 60.0)
    summary, trace = EXPECTED[how]
    assert error.rank == culprit
    assert error.phase == "the fatal step"
    assert summary in error.summary
    assert trace is None or trace in error.rank_traceback
    assert str(error).startswith(f"rank {culprit} failed while the fatal step: {error.summary}")
    assert error.user_error == (how == "user error")
    assert error.exit_status == (2 if how == "user error" else 1)
    assert "rank_main.py" not in error.rank_traceback or how.startswith("hang") or how == "SIGSEGV"


@pytest.mark.parametrize("how", few(["hang", "SIGSTOP"], "hang"))
def test_a_hung_rank_is_found_without_phases(how: str) -> None:
    error, _ = failing(targets.fail_without_phases, 4, how, 2, timeout=1.5)
    assert error.rank == 2
    assert error.phase == "running fail_without_phases"


def test_a_handled_error_leaves_no_trace_in_the_phase() -> None:
    error, _ = failing(targets.fail, 2, "raise after handling", 0)
    assert (error.rank, error.phase, error.user_error) == (0, "the fatal step", True)
    assert error.summary == "the file is truncated"


def test_peers_that_disguise_the_loss_are_not_blamed() -> None:
    error, _ = failing(targets.peers_disguise_the_loss, 4)
    assert (error.rank, error.phase) == (1, "dying")
    assert "SIGKILL" in error.summary


def test_a_rank_that_is_busy_but_never_comes() -> None:
    error, _ = failing(targets.busy_but_absent, 2, timeout=1.5)
    assert error.rank == 1
    assert error.phase.startswith("step ")
    assert "rank 0 gave up waiting" in error.summary


def test_when_all_wait_the_one_that_waits_longest_is_named() -> None:
    error, _ = failing(targets.all_wait, 2, timeout=1.5)
    assert (error.rank, error.phase) == (0, "expecting a message")
    assert "every rank waits for others" in error.summary


@pytest.mark.extended
def test_ranks_that_ignore_sigterm_are_killed_and_reaped() -> None:
    error, events = failing(targets.resist, 2, 1)
    assert (error.rank, error.summary) == (1, "ValueError: enough")
    assert len(events) == 2


def test_an_error_in_on_event_ends_the_ranks() -> None:
    pids: list[int] = []

    def on_event(rank: int, event: dict) -> None:
        pids.append(event["pid"])
        if len(pids) == 2:
            raise ZeroDivisionError("in the launcher")

    cfg = MultiprocessConfig(world_size=2, on_event=on_event)
    with pytest.raises(ZeroDivisionError):
        launch_subprocesses(targets.fail, cfg, None, 0, "hang", 0)
    assert len(pids) == 2
    wait_until(lambda: not any(map(alive, pids)))


def test_a_rank_cannot_launch() -> None:
    with pytest.raises(RankFailedError, match="a rank process cannot launch ranks") as caught:
        launch(targets.launch_again, 2)
    assert caught.value.user_error


def test_a_warm_parent_can_launch() -> None:
    matrix = torch.randn(600, 600)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert (matrix @ matrix).shape == (600, 600)  # starts OpenMP's pool, which a plain fork does not survive
        assert len(launch(targets.describe, 2)) == 2
    finally:
        torch.set_num_threads(threads)


def test_spawn() -> None:
    events = launch(targets.describe, 2, launch_method="spawn")
    assert [event["sum"] for _, event in events] == [1, 1]


@pytest.mark.extended  # fast, by the fork server: test_the_rank_that_failed_is_named
def test_a_rank_that_failed_after_spawn() -> None:
    error, _ = failing(targets.fail, 2, "SIGKILL", 1, launch_method="spawn")
    assert error.rank == 1


def test_fork_is_refused_once_there_are_threads() -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        with pytest.raises(UsageError, match=r"this process has \d+ threads"):
            launch(targets.describe, 2, launch_method="fork")
    finally:
        done.set()
        thread.join()


# --- what cannot be sent ---------------------------------------------------------------------------


def test_a_target_that_cannot_be_imported() -> None:
    def inner() -> None:
        pass

    for func in (lambda: None, inner, functools.partial(inner)):
        with pytest.raises(UsageError, match="Put it in a module"):
            launch(func, 2)


def test_an_argument_that_cannot_be_sent() -> None:
    with pytest.raises(UsageError, match=r"argument 1 of describe, of type generator, cannot be sent"):
        launch(targets.describe, 2, "x", (i for i in range(3)))


# --- world size 1 ----------------------------------------------------------------------------------


def test_one_rank_runs_in_this_process() -> None:
    events = Events()
    cfg = MultiprocessConfig(world_size=1, on_event=events)
    before = dict(os.environ)
    with pytest.raises(RankFailedError) as caught:
        launch_subprocesses(targets.local_only, cfg)
    assert events == [(0, {"pid": os.getpid(), "world_size": 1, "sum": [1, 2]})]
    error = caught.value
    assert (error.rank, error.phase, error.summary) == (0, "the fatal step", "ValueError: alone")
    assert isinstance(error.__cause__, ValueError)
    assert dict(os.environ) == before
    assert not dist.is_initialized()
    launch_subprocesses(targets.describe, cfg, None, 0, "again")
    assert events[-1][1]["word"] == "again"


def test_sys_exit_with_one_rank() -> None:
    with pytest.raises(RankFailedError, match="SystemExit: 4"):
        launch_subprocesses(targets.exit_alone, MultiprocessConfig(world_size=1))


def test_events_outside_a_launch_go_nowhere() -> None:
    report({"anything": 1})
    with pytest.raises(TypeError):
        report({"not JSON": object()})


def test_init_and_run_needs_a_rank() -> None:
    with pytest.raises(UsageError, match=r"cfg.rank is -1, with 2 ranks"):
        init_and_run(targets.describe, MultiprocessConfig(world_size=2))
