"""Places where a gather cannot work, launchers in a special state, and a crowd in which everything must work."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from multiprocessing import forkserver
from pathlib import Path

import pytest

from modelexport.distributed.supervision.failures import ECHO, OWN, Failure, root_cause
from modelexport.distributed.supervision.heartbeat import Heart
from modelexport.distributed.supervision.phase_board import PhaseBoard, new_board_file
from modelexport.distributed.supervision.status import RankStatus
from modelexport.distributed.transport.link import LostPeerError
from tests.distributed import _failure_targets as targets
from tests.distributed._failure_helpers import AT_ONCE, Outcome, leaving_nothing, provoke, psutil, run_well, warm_up
from tests.distributed._gather_targets import run_ranks
from tests.distributed._launch_helpers import ROOT, alive, finish, start_program, wait_until
from tests.helpers.marks import few

pytestmark = pytest.mark.timeout(120)
MEETING, FIRST_LAYER, FATAL_LAYER = "meeting the other ranks", "handing over layer 0", "handing over layer 1"


@pytest.fixture(scope="module", autouse=True)
def warm_launcher() -> None:
    warm_up()


# --- workspaces that are none --------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", few([2, 4], 4))
def test_a_rank_that_sees_another_directory_says_so(world: int, tmp_path: Path) -> None:
    shared, other = tmp_path / "shared", tmp_path / "other"
    shared.mkdir()
    with leaving_nothing(shared):
        outcome = provoke("nothing", "sender", world, shared, seconds=1.0, other=other)
    assert outcome.phase == MEETING
    assert f"sees another workspace than rank {targets.ORDER[world][0]}: in {other}" in outcome.summary
    assert f"made in {shared}; all ranks must see one directory" in outcome.summary
    assert outcome.user_error
    assert outcome.seconds < AT_ONCE
    assert not other.exists(), "made by a rank that had lost its way"


def test_a_workspace_that_was_closed_again_is_not_mistaken_for_another(tmp_path: Path) -> None:
    first, late = run_ranks(targets.come_too_late, 2, tmp_path / "ranks", str(tmp_path / "workspace"))
    assert first.startswith("TypeError")
    assert late.startswith("LostPeerError: rank 0, which collects, had closed")
    assert late.endswith("before rank 1 came")


@pytest.mark.parametrize("role", ["sender", "first"])
@pytest.mark.parametrize("below", ["", "workspace"])
def test_a_workspace_that_is_a_file(role: str, below: str, tmp_path: Path) -> None:
    shared, file = tmp_path / "shared", tmp_path / "file"
    shared.mkdir()
    file.write_text("not a directory")
    with leaving_nothing(shared):
        outcome = provoke("nothing", role, 4, shared, other=file / below)
    assert outcome.phase == MEETING
    assert str(file) in outcome.summary
    assert outcome.user_error
    assert outcome.seconds < AT_ONCE
    assert file.read_text() == "not a directory"


def test_a_workspace_that_does_not_exist_is_made(tmp_path: Path) -> None:
    path = tmp_path / "not" / "yet"
    with leaving_nothing(path):
        run_well(path)
    assert path.is_dir()


# --- full and read-only file systems, in a mount namespace of their own ---------------------------------------------

MOUNT = """
set -e
mount -t tmpfs -o size=4m none "$1/small"
mount -t tmpfs -o size=48m none "$1/full"
mount --bind "$1/shared" "$1/frozen"
mount -o remount,ro,bind "$1/frozen"
"""


def in_small_places(folder: str, world: int) -> None:
    """What the program in the namespace does; prints each outcome."""
    root = Path(folder)
    os.environ["SMALL_SHARED_MEMORY"] = f"{root}/small"
    full, shared, frozen = root / "full", root / "shared", root / "frozen"
    warm_up()
    found = {}
    with leaving_nothing(root / "small", full, shared):
        found["small shm"] = provoke("has little shared memory", "sender", world, None)
        found["full workspace"] = provoke("writes more than fits", "sender", world, full)
        found["read-only sender"] = provoke("nothing", "sender", world, shared, other=frozen)
        found["read-only first"] = provoke("nothing", "first", world, frozen)
    print(json.dumps({name: asdict(outcome) for name, outcome in found.items()}))


def unshare() -> list[str]:
    """A command that gives another command a mount namespace; skips the test where nobody may have one."""
    why = "there is no unshare program"
    if shutil.which("unshare"):
        for command in (["unshare", "--mount"], ["unshare", "--map-root-user", "--mount"]):
            probe = [*command, "mount", "-t", "tmpfs", "-o", "size=1m", "none", "/mnt"]
            done = subprocess.run(probe, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                return command
            why = done.stderr.strip()
    pytest.skip(f"cannot mount a small file system here: {why}")


@pytest.mark.parametrize("world", few([4, 2], 4))
def test_full_and_read_only_file_systems(world: int, tmp_path: Path) -> None:
    for name in ("small", "full", "shared", "frozen"):
        (tmp_path / name).mkdir()
    code = "import sys; from tests.distributed.test_failure_places import in_small_places as run; "
    code += f"run(sys.argv[1], {world})"
    program = subprocess.run(
        [*unshare(), "sh", "-c", MOUNT + 'exec "$2" -c "$3" "$1"', "sh", str(tmp_path), sys.executable, code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert program.returncode == 0, program.stderr
    found = {name: Outcome(**fields) for name, fields in json.loads(program.stdout.splitlines()[-1]).items()}
    assert len(found) == 4
    for name, outcome in found.items():
        print(f"| {name} | rank {outcome.rank} | {outcome.seconds:.2f} | {outcome.summary}")
        assert outcome.seconds < AT_ONCE
        if name.startswith("small"):
            assert outcome.phase == FIRST_LAYER
            assert "gather buffers: No space left on device in" in outcome.summary
            assert "bytes are free; make room there (for a container: --shm-size)" in outcome.summary
        elif name.startswith("full"):
            assert outcome.phase == FATAL_LAYER
            assert "cannot write the 74" in outcome.summary
            assert "No space left on device (" in outcome.summary
            assert "bytes are free there); make room, or give a larger workspace" in outcome.summary
        else:
            assert outcome.phase == MEETING
            assert "cannot write into the workspace" in outcome.summary
            assert "Read-only file system" in outcome.summary
    assert list((tmp_path / "shared").iterdir()) == []


# --- launchers ------------------------------------------------------------------------------------------------------

NOTEBOOK = """
import os, sys, torch
from modelexport.distributed.launch import MultiprocessConfig, launch_subprocesses
from tests.distributed._failure_targets import hand_over
torch.set_num_threads(4)
matrix = torch.randn(700, 700)
before = len(os.listdir("/proc/self/task"))
for _ in range(3):
    matrix = matrix @ matrix / 700
assert len(os.listdir("/proc/self/task")) >= before + 3, "no pool of threads was started"
for fault in sys.argv[2:]:
    print(fault, flush=True)
    launch_subprocesses(hand_over, MultiprocessConfig(world_size=4), None, 0, fault, 2, sys.argv[1], 60.0)
"""


def test_a_warm_launcher_and_what_a_killed_one_leaves(tmp_path: Path) -> None:
    """A notebook that has multiplied matrices launches ranks, and again, and is killed meanwhile."""
    path = tmp_path / "workspace"
    with leaving_nothing(path):
        program = start_program(NOTEBOOK, str(path), "nothing", "hangs", OMP_NUM_THREADS="4")
        try:
            assert program.stdout is not None
            assert [program.stdout.readline() for _ in range(2)] == ["nothing\n", "hangs\n"]
            # The last layer, which nobody reads while rank 2 hangs.
            wait_until(lambda: all(list(path.rglob(f"rank-0000{rank}.00000003.json")) for rank in (0, 3)))
            family = [program.pid, *(process.pid for process in psutil.Process(program.pid).children(recursive=True))]
            for number in (signal.SIGSTOP, signal.SIGKILL):  # all at once: no rank may notice, and clear up
                for pid in reversed(family):
                    os.kill(pid, number)
            wait_until(lambda: not any(map(alive, family)))
        finally:
            program.kill()
            program.communicate()
        assert len(list(path.glob("run-*"))) == 1, "nobody is left to clear up; the next run does"
        run_well(path)


@pytest.mark.parametrize("launches", few([8, 20], 8))
def test_launches_from_several_threads(launches: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each changes this process's environment for a moment, which must not be seen after.

    And each start looks after all of multiprocessing's children: a rank's exit status must reach its own launcher.
    """
    path, before, read = tmp_path / "workspace", dict(os.environ), forkserver.read_signed

    def read_slowly(fd: int) -> int:
        time.sleep(0.02)
        return read(fd)

    monkeypatch.setattr(forkserver, "read_signed", read_slowly)
    with leaving_nothing(path), ThreadPoolExecutor(4) as pool:
        for launch in [pool.submit(run_well, path) for _ in range(launches)]:
            launch.result()
    assert dict(os.environ) == before


def test_an_error_counts_from_when_it_was_raised() -> None:
    """A rank that gives up hangs up before it reports, and then its peers fail too: theirs must not seem the first."""
    launcher, rank = socket.socketpair()
    error = LostPeerError("rank 2 did not come", [2])
    after = time.monotonic()
    with launcher, rank:
        board = new_board_file("test")
        RankStatus(rank, board).fail(error)
        os.close(board)
        message = json.loads(launcher.recv(1 << 16))
    assert message["time"] == error.raised_at <= after
    assert message["blamed"] == [2]


def test_a_rank_that_cannot_speak_with_its_launcher_leaves_the_reason_on_its_board(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class BrokenChannel:
        def sendall(self, line: bytes) -> None:
            raise OSError(errno.ENOBUFS, "No buffer space available")

    def end(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", end)
    board = new_board_file("test")
    with pytest.raises(SystemExit, match="1"):
        RankStatus(BrokenChannel(), os.dup(board)).send({"type": "up"})  # type: ignore[arg-type]
    launchers = PhaseBoard(board)
    assert launchers.read().text == "speaking with its launcher (No buffer space available)"
    launchers.close()


def test_echoes_lead_to_the_rank_at_their_end() -> None:
    """Rank 0 found no room at rank 1, which waited for rank 2, which waited for rank 3, which says nothing."""
    echo = Failure(0, 1.0, ECHO, "", "no room", blamed=[1], indirect=True)
    waited = Failure(1, 1.1, ECHO, "", "nothing came", blamed=[2])
    chain = [echo, waited, replace(waited, rank=2, time=1.2, blamed=[3])]
    assert root_cause(chain).blamed == [3]
    told = replace(echo, rank=2, time=0.9)  # blames rank 1, which blames it
    assert root_cause([echo, waited, told]) is waited
    assert root_cause([echo, told]).blamed == [1]
    assert root_cause([echo, replace(waited, blamed=[0])]).rank == 1
    assert root_cause([*chain, Failure(3, 9.0, OWN, "", "disk full")]).rank == 3


# --- nothing goes wrong ---------------------------------------------------------------------------------------------

JOB = """
import sys
from modelexport.distributed.launch import MultiprocessConfig, launch_subprocesses, prestart
from tests.distributed._failure_targets import gather_everything_twice
prestart(("torch", "modelexport.distributed.gather"))
config = MultiprocessConfig(world_size=2, on_event=lambda rank, event: print(rank, flush=True))
launch_subprocesses(gather_everything_twice, config, None, 0, sys.argv[1])
"""


@pytest.mark.extended
def test_two_jobs_at_once_among_left_overs_carry_everything(tmp_path: Path) -> None:
    """Both in one workspace, in which a dead run, a living one and one of another machine have files of such names."""
    path = tmp_path / "workspace"
    ended = subprocess.Popen(["true"])
    ended.wait()
    for name, pid in {"dead": ended.pid, "living": os.getpid(), "remote": 1}.items():
        directory = path / f"run-{name}"
        heart = Heart(directory, 0)
        heart.stop()
        state = json.loads((directory / "rank-00000.alive").read_text())
        state |= {"pid": pid, "doing": "wrote payload 1"} | ({"machine": "elsewhere"} if name == "remote" else {})
        (directory / "rank-00000.alive").write_text(json.dumps(state))
        for rank in range(4):
            (directory / f"rank-0000{rank}.00000001.safetensors").write_bytes(b"old")
            (directory / f"rank-0000{rank}.00000001.json").write_text("{}")
    with leaving_nothing():
        # torch warns of one dtype: that it can do little with it.
        environment = {"PYTHONWARNINGS": "ignore:ComplexHalf support:UserWarning"}
        programs = [start_program(JOB, str(path), **environment) for _ in range(2)]
        for output, errors in [finish(program) for program in programs]:
            assert sorted(output.split()) == ["0", "1"]
            assert errors == ""
    assert sorted(directory.name for directory in path.iterdir()) == ["run-living", "run-remote"]
    assert [len(list(directory.iterdir())) for directory in path.iterdir()] == [9, 9]
