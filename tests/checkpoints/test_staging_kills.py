"""Exports that are killed: whatever the moment, the target is whole and the next export sorts out the rest."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from modelexport.checkpoints import staging
from modelexport.checkpoints.staging import Staging, staging_directory
from modelexport.errors import UsageError
from tests.checkpoints._samples import export, listing


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "ckpt"


PROCESS = """
import os, signal, sys, time
from pathlib import Path
from modelexport.checkpoints import raw_io, staging
from modelexport.checkpoints.staging import Staging
out, role = Path(sys.argv[1]), sys.argv[2]
recipe = {"quant": "fp8"}
def die(*args):
    os.kill(os.getpid(), signal.SIGKILL)
def ready():
    print("ready", flush=True)
if role == "launcher":
    stage = Staging.open(out, recipe)
    stage.record("layer 0", {})
    ready()
    time.sleep(60)
elif role == "rank":
    rank = Staging.join(out)
    ready()
    sys.stdin.read()
    time.sleep(0.5)
else:
    stage = Staging.open(out, recipe, overwrite=True)
    (stage.directory / "config.json").write_text("new")
    if role == "killed at once":
        die()
    stage.record("layer 0", {})
    if role == "killed before the rename":
        raw_io.rename_no_replace = die
    elif role == "killed after the rename":
        staging._empty = die
    elif role == "killed while cleaning up":
        staging.locks.remove = die
    elif role == "killed between two renames":
        raw_io.rename_exchange = raw_io.rename_no_replace = lambda a, b: False
        rename, calls = os.rename, []
        def once(*args):
            if calls:
                die()
            calls.append(args)
            rename(*args)
        os.rename = once
    stage.publish()
"""


@pytest.fixture
def start() -> Iterator[Any]:
    running: list[subprocess.Popen[str]] = []

    def begin(out: Path, role: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", PROCESS, str(out), role]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        running.append(process)
        return process

    yield begin
    for process in running:
        process.kill()
        process.communicate(timeout=20)


@pytest.mark.timeout(60)
def test_an_export_waits_for_the_ranks_of_a_killed_one(out: Path, start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = start(out, "launcher")
    assert launcher.stdout.readline() == "ready\n"
    rank = start(out, "rank")
    assert rank.stdout.readline() == "ready\n"
    monkeypatch.setattr(staging, "LOCK_WAIT", 0.2)
    with pytest.raises(UsageError, match=rf"is running \(pid {launcher.pid}\)"):
        Staging.open(out, {"quant": "fp8"})
    launcher.kill()
    launcher.wait(timeout=20)
    with pytest.raises(UsageError, match=rf"is running \(pid {rank.pid}\)"):
        Staging.open(out, {"quant": "fp8"})
    monkeypatch.setattr(staging, "LOCK_WAIT", 30.0)
    rank.stdin.close()  # it dies half a second later
    rank.stdin = None
    with Staging.open(out, {"quant": "fp8"}) as stage:
        assert list(stage.done) == ["layer 0"]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("role", "existing"),
    [
        ("killed before the rename", "nothing there"),
        ("killed before the rename", "overwriting"),
        ("killed after the rename", "nothing there"),
        ("killed after the rename", "overwriting"),
        ("killed while cleaning up", "nothing there"),
        ("killed while cleaning up", "overwriting"),
        ("killed between two renames", "overwriting"),
    ],
)
def test_a_kill_while_publishing(role: str, existing: str, out: Path, start: Any) -> None:
    """At every moment the target is the old one or the new one, whole, and the next export sorts out the rest."""
    if existing == "overwriting":
        export(out, "old")
    killed = start(out, role)
    assert killed.wait(timeout=50) == -signal.SIGKILL
    renamed = role in ("killed after the rename", "killed while cleaning up")
    if renamed:
        assert (out / "config.json").read_text() == "new"
        with pytest.raises(UsageError, match="exists already"):
            Staging.open(out, {"quant": "fp8"})
        assert listing(out.parent) == ["ckpt"]
        with Staging.open(out, {"quant": "another"}, overwrite=True) as stage:
            assert stage.done == {}
        assert (out / "config.json").read_text() == "new"
    else:
        if role == "killed before the rename" and existing == "overwriting":
            assert (out / "config.json").read_text() == "old"
        with Staging.open(out, {"quant": "fp8"}, overwrite=True) as stage:
            assert list(stage.done) == ["layer 0"]
            assert out.exists() == (existing == "overwriting")
            if existing == "overwriting":
                assert (out / "config.json").read_text() == "old"
            stage.publish()
        assert (out / "config.json").read_text() == "new"
    assert listing(out.parent) == ["ckpt"]


@pytest.mark.timeout(60)
def test_an_export_killed_before_its_first_step_is_in_nobodys_way(out: Path, start: Any) -> None:
    killed = start(out, "killed at once")
    assert killed.wait(timeout=50) == -signal.SIGKILL
    assert listing(staging_directory(out) / "ckpt") == ["config.json"]
    with Staging.open(out, {"quant": "another"}) as stage:
        assert not stage.resumed
        assert listing(stage.directory) == []


@pytest.mark.timeout(60)
def test_the_old_target_is_never_taken_for_the_new_one(out: Path, start: Any) -> None:
    """Killed after the swap, the staging directory holds what was replaced."""
    export(out, "old")
    killed = start(out, "killed after the rename")
    assert killed.wait(timeout=50) == -signal.SIGKILL
    out.rename(out.parent / "moved")
    with Staging.open(out, {"quant": "fp8"}) as stage:
        assert stage.done == {}
        assert listing(stage.directory) == []
    assert (out.parent / "moved" / "config.json").read_text() == "new"
