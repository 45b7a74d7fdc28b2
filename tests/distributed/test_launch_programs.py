"""Launching from programs of their own: cold, killed, interrupted, without a guard, several launchers, torchrun."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.distributed._launch_helpers import ROOT, alive, finish, start_program, wait_until
from tests.helpers.marks import few

pytestmark = pytest.mark.timeout(120)


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


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
    assert out.count("printed by a rank") == 2  # two processes may interleave within a line
    assert out.replace("printed by a rank", "") == "\n\n"
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


def test_what_is_preloaded_may_be_a_call(tmp_path: Path) -> None:
    (tmp_path / "prepared.py").write_text("said = []\ndef say(*words): said.extend(words)\n")
    code = """
from modelexport.distributed.launch import MultiprocessConfig, launch_subprocesses
def work():
    import prepared
    assert prepared.said == ["one", "two"]
if __name__ == "__main__":
    launch_subprocesses(work, MultiprocessConfig(world_size=2, preload=("prepared:say:one:two",)))
"""
    path = f"{ROOT}:{tmp_path}"
    assert finish(start_program(code, file=tmp_path / "script.py", PYTHONPATH=path)) == ("", "")


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


@pytest.mark.parametrize("method", few(["forkserver", "spawn"], "forkserver"))
@pytest.mark.parametrize("how", few(["hang", "hang with the interpreter", "SIGSTOP"], "hang with the interpreter"))
def test_no_process_survives_a_killed_launcher(how: str, method: str, hanging: Callable) -> None:
    program, pids = hanging(how, method)
    assert len(pids) >= 3
    program.kill()
    program.wait()
    wait_until(lambda: not any(map(alive, pids)))


@pytest.mark.parametrize("unread", [b"", b"{}"])
def test_a_rank_ends_when_its_launcher_hangs_up(unread: bytes) -> None:
    code = """
import socket, sys, threading
from modelexport.distributed.supervision.phase_board import new_board_file
from modelexport.distributed.supervision.status import RankStatus
launcher, rank = socket.socketpair()
RankStatus(rank, new_board_file("test")).start()
launcher.recv(4096)
rank.send(sys.argv[1].encode())  # what a launcher leaves unread resets the connection
launcher.close()
threading.Event().wait(60)
"""
    assert finish(start_program(code, unread.decode()), status=113) == ("", "")


def test_ctrl_c_ends_the_ranks(hanging: Callable) -> None:
    program, pids = hanging("hang", "forkserver")
    program.send_signal(signal.SIGINT)
    _, err = finish(program, status=-signal.SIGINT)
    assert err.splitlines()[-1] == "KeyboardInterrupt"
    assert err.count("Traceback") == 1
    wait_until(lambda: not any(map(alive, pids)))


@pytest.mark.extended
def test_two_launchers_share_a_world_and_a_failure() -> None:
    code = """
import sys
from modelexport.distributed.launch import MultiprocessConfig, launch_subprocesses
from tests.distributed._launch_targets import describe, fail
def on_event(rank, event):
    print(rank, event["sum"], event["variables"]["LOCAL_RANK"], flush=True)
ports = map(int, sys.argv[2:])
cfg = MultiprocessConfig(world_size=4, local_world_size=2, master_port=next(ports), on_event=on_event)
launch_subprocesses(describe, cfg, None, int(sys.argv[1]))
cfg = MultiprocessConfig(world_size=4, local_world_size=2, master_port=next(ports))
launch_subprocesses(fail, cfg, None, int(sys.argv[1]), "raise", 3)
"""
    ports = [free_port(), free_port()]
    programs = [start_program(code, offset, *ports) for offset in ("0", "2")]
    outputs = [finish(program, status=1) for program in programs]
    assert sorted(outputs[0][0].splitlines()) == ["0 6 0", "1 6 1"]
    assert sorted(outputs[1][0].splitlines()) == ["2 6 0", "3 6 1"]
    for _, errors in outputs:  # the launcher that did not start rank 3 knows as well
        assert errors.startswith("Traceback")
        assert "RankFailedError: rank 3 failed while the fatal step: KeyError: 'two'" in errors


@pytest.fixture
def under_torchrun(tmp_path: Path) -> Callable[[str], subprocess.Popen]:
    """Starts two ranks by torchrun, whose program launches as many ranks as one says."""
    script = tmp_path / "script.py"
    script.write_text("""
import sys
import torch.distributed as dist
from modelexport.distributed.launch import MultiprocessConfig, get_grid, launch_subprocesses, report
def work(word):
    report({"goes": "nowhere"})
    total = dist.get_rank() * 10 + get_grid().mp.rank
    with open(f"{sys.argv[1]}/{dist.get_rank()}", "w") as file:
        file.write(f"{word} {dist.get_world_size()} {get_grid().mp.world_size} {total}")
cfg = MultiprocessConfig(model_parallelism=2, world_size=int(sys.argv[2]))
launch_subprocesses(work, cfg, None, 0, "hello")
""")
    torchrun = "import sys; from torch.distributed.run import main; sys.exit(main())"
    arguments = ["--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", free_port()]
    return lambda ranks: start_program(torchrun, *arguments, str(script), str(tmp_path), ranks)


def test_torchrun_as_the_launcher(tmp_path: Path, under_torchrun: Callable) -> None:
    finish(under_torchrun("2"))
    assert [(tmp_path / name).read_text() for name in "01"] == ["hello 2 2 0", "hello 2 2 11"]


@pytest.mark.extended  # fast, for an export: tests/jobs/test_hosts.py
def test_torchrun_with_another_number_of_ranks(under_torchrun: Callable) -> None:
    _, err = finish(under_torchrun("3"), status=1)
    assert "3 ranks are asked for, but the launcher of this process started 2" in err
