"""Launching: results, every way in which a rank can fail, and that nothing stays behind."""

from __future__ import annotations

import functools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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

pytestmark = pytest.mark.timeout(90)
ROOT = Path(__file__).parents[2]
WORLDS = (2, 4)


class Events(list):
    """An on_event that keeps what it gets, and knows the ranks' processes."""

    def __call__(self, rank: int, event: dict) -> None:
        self.append((rank, event))

    def pids(self) -> list[int]:
        return [event["pid"] for _, event in self]


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def launch(func: Callable, world_size: int, *args: Any, **config: Any) -> Events:
    events = Events()
    cfg = MultiprocessConfig(world_size=world_size, on_event=events, **config)
    launch_subprocesses(func, cfg, None, 0, *args)
    return events


def failing(func: Callable, world_size: int, *args: Any, **config: Any) -> tuple[RankFailedError, Events]:
    """Launches what must fail; nothing but the error may be left."""
    events = Events()
    cfg = MultiprocessConfig(world_size=world_size, on_event=events, **config)
    with pytest.raises(RankFailedError) as caught:
        launch_subprocesses(func, cfg, None, 0, *args)
    pids = events.pids()
    assert len(pids) == world_size
    wait_until(lambda: not any(map(alive, pids)))
    return caught.value, events


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


@pytest.mark.parametrize("world_size", WORLDS)
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


@pytest.mark.parametrize("how", ["hang", "SIGSTOP"])
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
    assert (error.rank, error.phase) == (0, "waiting for peers")
    assert "meanwhile rank 1: step" in error.summary


def test_when_all_wait_the_one_that_waits_longest_is_named() -> None:
    error, _ = failing(targets.all_wait, 2, timeout=1.5)
    assert (error.rank, error.phase) == (0, "expecting a message")
    assert "every rank waits for others" in error.summary


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
    error, _ = failing(targets.fail, 2, "SIGKILL", 1, launch_method="spawn")
    assert error.rank == 1


def test_fork_is_refused_once_there_are_threads() -> None:
    import threading

    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        with pytest.raises(UsageError, match=r"this process has \d+ threads"):
            launch(targets.describe, 2, launch_method="fork")
    finally:
        done.set()
        thread.join()


# --- programs of their own -------------------------------------------------------------------------


def start_program(code: str, *args: str, file: Path | None = None, **env: str) -> subprocess.Popen:
    command = [sys.executable, "-c", code] if file is None else [sys.executable, str(file)]
    if file is not None:
        file.write_text(code)
    environ = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    return subprocess.Popen(
        [*command, *args], env=environ, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def finish(program: subprocess.Popen, status: int = 0) -> tuple[str, str]:
    try:
        out, err = program.communicate(timeout=60)
    finally:
        program.kill()
    assert program.returncode == status, err
    return out, err


def test_fork_in_a_cold_process() -> None:
    code = """
from modelexport.distributed.launch import MultiprocessConfig, launch_subprocesses
def work(word):
    import torch, torch.distributed as dist
    from modelexport.distributed.launch import report
    total = torch.ones(1)
    dist.all_reduce(total)
    report({"word": word, "sum": float(total)})
cfg = MultiprocessConfig(world_size=2, launch_method="fork", on_event=lambda rank, event: print(event))
launch_subprocesses(work, cfg, None, 0, "from a prompt")
"""
    out, err = finish(start_program(code))
    assert out.splitlines() == ["{'word': 'from a prompt', 'sum': 2.0}"] * 2
    assert err == ""


def test_the_launcher_does_without_torch() -> None:
    code = """
import sys
from modelexport.distributed.launch import MultiprocessConfig, launch_subprocesses, prestart
prestart()
from modelexport.errors import UsageError
cfg = MultiprocessConfig(world_size=2, preload=("torch", "no_such_module"), on_event=lambda rank, event: None)
launch_subprocesses(print, cfg, None, 0, "printed by a rank")
assert "torch" not in sys.modules
"""
    out, err = finish(start_program(code))
    assert out == "printed by a rank\n" * 2
    assert err == ""


def test_a_script_without_a_guard_gets_a_hint(tmp_path: Path) -> None:
    code = """
from modelexport.distributed.launch import MultiprocessConfig, launch_subprocesses
launch_subprocesses(print, MultiprocessConfig(world_size=2))
"""
    _, err = finish(start_program(code, file=tmp_path / "script.py"), status=1)
    assert "if __name__ == '__main__':" in err.splitlines()[-1]


def test_a_preload_module_that_breaks_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken_module.py").write_text("raise ValueError('broken at import')\n")
    code = """
from modelexport.distributed.launch import MultiprocessConfig, launch_subprocesses
launch_subprocesses(print, MultiprocessConfig(world_size=2, preload=("broken_module",)))
"""
    _, err = finish(start_program(code, PYTHONPATH=f"{ROOT}:{tmp_path}"), status=1)
    assert "broken at import" in err
    assert "preload modules (broken_module)" in err.splitlines()[-1]


LAUNCH_AND_HANG = """
import sys
from modelexport.distributed.launch import MultiprocessConfig, launch_subprocesses
from tests.distributed._launch_targets import hang_forever
launch_subprocesses(hang_forever, MultiprocessConfig(world_size=2, launch_method=sys.argv[3]), None, 0, *sys.argv[1:3])
"""


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[Callable[[str, str], tuple[subprocess.Popen, list[int]]]]:
    """Starts a program whose ranks hang; gives it and the ids of all its processes' descendants."""
    started: list[subprocess.Popen] = []

    def start(how: str, method: str) -> tuple[subprocess.Popen, list[int]]:
        program = start_program(LAUNCH_AND_HANG, str(tmp_path), how, method)
        started.append(program)
        files = [tmp_path / "0", tmp_path / "1"]
        wait_until(lambda: program.poll() is not None or all(file.exists() for file in files), 60)
        time.sleep(0.3)  # until both are where they hang
        pids = descendants(program.pid)
        assert {int(file.read_text()) for file in files} <= set(pids)
        return program, pids

    yield start
    for program in started:
        program.kill()
        program.communicate()


def descendants(pid: int) -> list[int]:
    """Processes below ``pid``: ranks, fork server, resource tracker."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(") ")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            parents[int(entry.name)] = int(fields[1])
    found = [pid]
    for ancestor in found:
        found += [child for child, parent in parents.items() if parent == ancestor]
    return found[1:]


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
@pytest.mark.parametrize("how", ["hang", "hang with the interpreter", "SIGSTOP"])
def test_no_process_survives_a_killed_launcher(how: str, method: str, hanging: Callable) -> None:
    program, pids = hanging(how, method)
    assert len(pids) >= 3
    program.kill()
    program.wait()
    wait_until(lambda: not any(map(alive, pids)))


def test_ctrl_c_ends_the_ranks(hanging: Callable) -> None:
    program, pids = hanging("hang", "forkserver")
    program.send_signal(signal.SIGINT)
    _, err = finish(program, status=-signal.SIGINT)
    assert err.splitlines()[-1] == "KeyboardInterrupt"
    assert err.count("Traceback") == 1
    wait_until(lambda: not any(map(alive, pids)))


def test_two_launchers_share_a_world() -> None:
    code = """
import sys
from modelexport.distributed.launch import MultiprocessConfig, launch_subprocesses
from tests.distributed._launch_targets import describe
def on_event(rank, event):
    print(rank, event["sum"], event["variables"]["LOCAL_RANK"], flush=True)
cfg = MultiprocessConfig(world_size=4, local_world_size=2, master_port=int(sys.argv[2]), on_event=on_event)
launch_subprocesses(describe, cfg, None, int(sys.argv[1]))
"""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    programs = [start_program(code, offset, port) for offset in ("0", "2")]
    outputs = [finish(program) for program in programs]
    assert sorted(outputs[0][0].splitlines()) == ["0 6 0", "1 6 1"]
    assert sorted(outputs[1][0].splitlines()) == ["2 6 0", "3 6 1"]
    assert [err for _, err in outputs] == ["", ""]


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


def test_a_target_from_a_prompt() -> None:
    code = """
from modelexport.distributed.launch import MultiprocessConfig, launch_subprocesses
def work():
    pass
launch_subprocesses(work, MultiprocessConfig(world_size=2))
"""
    _, err = finish(start_program(code), status=1)
    assert "work cannot be sent to the rank processes" in err.splitlines()[-1]
    assert "Put it in a module" in err.splitlines()[-1]


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
