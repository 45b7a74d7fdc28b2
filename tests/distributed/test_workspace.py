"""The NFS workspace: what is published, what is read, and what is said about what is not there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from modelexport.distributed.gather import NFSWorkspace
from modelexport.distributed.supervision import heartbeat
from modelexport.distributed.transport import whole_files
from modelexport.distributed.workspace import CorruptError, NotYetError
from modelexport.errors import GatherError, UsageError
from tests.distributed import _gather_targets as targets
from tests.distributed._gather_targets import run_ranks

pytestmark = pytest.mark.timeout(120)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    with NFSWorkspace(tmp_path) as workspace, NFSWorkspace(tmp_path, rank=1, world_size=2) as other:
        assert workspace.is_initialized
        assert other.read_configs_and_weights_from_rank(0) == (None, None)
        workspace.write_configs_and_weights({"layers": [1, None], 3: (4,)}, {"w": torch.arange(3).to(torch.bfloat16)})
        for reader in (other, workspace):
            config, weights = reader.read_configs_and_weights_from_rank(0)
            assert config == {"layers": [1, None], 3: (4,)}
            assert weights is not None
            assert weights["w"].dtype == torch.bfloat16
            assert weights["w"].tolist() == [0, 1, 2]
        workspace.write_configs_and_weights({"second": True}, {})
        assert other.read_configs_and_weights_from_rank(0) == ({"second": True}, {})
        assert other.read_configs_and_weights_from_rank(1) == (None, None)
        assert weights["w"].tolist() == [0, 1, 2]
        assert len(workspace.published()) == 1
    assert list(tmp_path.iterdir()) == []


def test_without_a_path() -> None:
    workspace = NFSWorkspace()
    assert not workspace.is_initialized
    with pytest.raises(GatherError, match="workspace_path"):
        workspace.write_configs_and_weights({}, {})
    with pytest.raises(GatherError, match="workspace_path"):
        workspace.read_configs_and_weights_from_rank(0)
    workspace.close()


def test_across_ranks(tmp_path: Path) -> None:
    path = tmp_path / "workspace"
    results = run_ranks(targets.workspace_api, 3, tmp_path / "ranks", str(path))
    expected = [[2, rank, [rank + 2] * 3] for rank in range(3)]
    assert results == [expected] * 3
    assert list(path.iterdir()) == []


def test_another_run_is_not_read_and_not_touched(tmp_path: Path) -> None:
    with NFSWorkspace(tmp_path, run_id="old", rank=1) as old:
        old.write_configs_and_weights({"old": 1}, {"w": torch.ones(1)})
        with NFSWorkspace(tmp_path, run_id="new", rank=0) as new:
            assert new.read_configs_and_weights_from_rank(1) == (None, None)
            text = new.describe_missing(1, 1)
            assert "missing; it wrote in run-old, which is another run" in text
            assert "no heartbeat" in text
        assert old.read_configs_and_weights_from_rank(1)[0] == {"old": 1}
    with pytest.raises(UsageError, match="run id"):
        NFSWorkspace(tmp_path, run_id="../outside")


def test_files_are_safetensors_with_a_manifest_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    safetensors_torch = pytest.importorskip("safetensors.torch")
    renamed: list[str] = []
    rename = os.rename
    monkeypatch.setattr(os, "rename", lambda a, b: (renamed.append(Path(b).name), rename(a, b)))
    with NFSWorkspace(tmp_path, run_id="r") as workspace:
        workspace.publish(7, {"w": torch.arange(5)})
        assert renamed == ["rank-00000.00000007.safetensors", "rank-00000.00000007.json"]
        manifest = json.loads((workspace.directory / renamed[1]).read_text())
        assert manifest["tensors"] == {"w": ["int64", [5]]}
        assert (manifest["run"], manifest["sequence"], manifest["rank"]) == ("r", 7, 0)
        assert manifest["bytes"] == (workspace.directory / renamed[0]).stat().st_size
        assert safetensors_torch.load_file(workspace.directory / renamed[0])["w"].tolist() == [0, 1, 2, 3, 4]
        workspace.remove(0, 7)


def test_damage_is_told_apart(tmp_path: Path) -> None:
    with NFSWorkspace(tmp_path) as workspace:
        with pytest.raises(NotYetError, match="missing"):
            workspace.fetch(0, 1)
        workspace.publish(1, {"w": torch.zeros(1000)})
        data = workspace.directory / "rank-00000.00000001.safetensors"
        manifest = workspace.directory / "rank-00000.00000001.json"
        good, text = data.read_bytes(), manifest.read_text()

        data.write_bytes(good[:-100])
        with pytest.raises(NotYetError, match=f"{len(good) - 100} of {len(good)} bytes") as caught:
            workspace.fetch(0, 1)
        assert not isinstance(caught.value, CorruptError)
        for spoilt in (good[:-1] + b"\x01", b"\xff" + good[1:], good[:20] + b"\xff" + good[21:]):
            data.write_bytes(spoilt)
            with pytest.raises(CorruptError):
                workspace.fetch(0, 1)
        assert "corrupt" in workspace.describe_missing(0, 1)
        data.unlink()
        assert "its payload is not" in workspace.describe_missing(0, 1)
        data.write_bytes(good)
        for spoilt in (text[:-5], text.replace('"sequence": 1', '"sequence": 2'), '{"a": 1}', "\0" * 100):
            manifest.write_text(spoilt)
            with pytest.raises(CorruptError):
                workspace.fetch(0, 1)
        manifest.unlink()
        assert "its manifest is missing" in workspace.describe_missing(0, 1)
        data.rename(workspace.directory / ".rank-00000.00000001.safetensors.ab.tmp")
        assert f"incomplete, {len(good)} bytes are written" in workspace.describe_missing(0, 1)
        (workspace.directory / ".rank-00000.00000001.safetensors.ab.tmp").unlink()


def test_a_state_that_stays_corrupt_is_an_error(tmp_path: Path) -> None:
    with NFSWorkspace(tmp_path) as workspace:
        workspace.write_configs_and_weights({}, {"w": torch.zeros(1000)})
        data = workspace.directory / "rank-00000.00000001.safetensors"
        data.write_bytes(data.read_bytes()[:-1] + b"\x01")
        with pytest.raises(GatherError, match=r"CRC-32 .* its manifest says"):
            workspace.read_configs_and_weights_from_rank(0)


def test_a_published_failure_reaches_the_reader(tmp_path: Path) -> None:
    with NFSWorkspace(tmp_path, rank=3) as workspace:
        workspace.publish_failure(1, "ValueError: 5 is not 6")
        with pytest.raises(GatherError, match="rank 3 could not hand over its payload 1: ValueError: 5 is not 6"):
            workspace.fetch(3, 1)
        workspace.remove(3, 1)


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(GatherError, match=r"cannot write the 4000 bytes of .*: .*No space left"):
        whole_files.write_whole(tmp_path, "name", [torch.zeros(1000)])
    assert list(tmp_path.iterdir()) == []


def test_short_writes_and_strided_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:7]))
    tensor = torch.arange(24).view(4, 6).t()
    whole_files.write_whole(tmp_path, "name", [b"head", tensor, torch.empty(0)])
    assert (tmp_path / "name").read_bytes() == b"head" + bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())


def test_the_directory_may_vanish_while_another_rank_opens_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, calls = heartbeat.Heart._write, []

    def vanish(self: heartbeat.Heart) -> None:
        calls.append(1)
        if len(calls) == 1:
            (tmp_path / "run").rmdir()
        write(self)

    monkeypatch.setattr(heartbeat.Heart, "_write", vanish)
    heart = heartbeat.Heart(tmp_path / "run", 0)
    assert len(calls) == 2
    assert "opened the workspace" in heartbeat.last_heartbeat(tmp_path / "run", 0)
    assert heartbeat.condition(tmp_path / "run", 0) == "living"
    heart.stop()
    assert heartbeat.condition(tmp_path / "run", 0) == "closed"
    heartbeat.remove_rank(tmp_path / "run", 0)
    assert heartbeat.condition(tmp_path / "run", 0) == "absent"


def test_a_workspace_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot write into the workspace"):
        NFSWorkspace(tmp_path / "file")


def test_a_run_directory_that_others_may_write_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "run-known"
    directory.mkdir()
    directory.chmod(0o777)
    with pytest.raises(UsageError, match=r"run-known may be written by other users \(its permissions are 777\)"):
        NFSWorkspace(tmp_path, run_id="known")
    assert list(directory.iterdir()) == []
    directory.rmdir()
    directory.symlink_to(tmp_path)
    with pytest.raises(UsageError, match="is no directory, or a link to one"):
        NFSWorkspace(tmp_path, run_id="known")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_another_users_run_directory_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "run-known"
    directory.mkdir(0o700)
    os.chown(directory, 65534, 65534)
    with pytest.raises(UsageError, match="run-known belongs to user 65534, and this is user 0"):
        NFSWorkspace(tmp_path, run_id="known")


@pytest.mark.parametrize("kind", ["json", "safetensors"])
def test_files_that_another_user_could_have_written_are_not_read(tmp_path: Path, kind: str) -> None:
    with NFSWorkspace(tmp_path) as workspace:
        workspace.write_configs_and_weights({}, {"w": torch.zeros(9)})
        path = workspace.directory / f"rank-00000.00000001.{kind}"
        path.chmod(0o666)
        with pytest.raises(GatherError, match=rf"{kind} may be written by other users"):
            workspace.read_configs_and_weights_from_rank(0)
        path.chmod(0o600)
        kept = path.rename(tmp_path / "kept")
        path.symlink_to(kept)
        with pytest.raises(GatherError, match=rf"{kind} is a link"):
            workspace.read_configs_and_weights_from_rank(0)
        path.unlink()
        kept.rename(path)
        workspace.read_configs_and_weights_from_rank(0)
        if os.geteuid() == 0:
            os.chown(path, 65534, 65534)
            with pytest.raises(GatherError, match=rf"{kind} belongs to user 65534"):
                workspace.read_configs_and_weights_from_rank(0)


def test_what_ranks_exchange_is_for_this_user_alone(tmp_path: Path) -> None:
    former = os.umask(0)
    try:
        with NFSWorkspace(tmp_path) as workspace:
            workspace.write_configs_and_weights({}, {"w": torch.zeros(9)})
            found = [workspace.directory, *workspace.directory.iterdir()]
            assert all(not path.stat().st_mode & 0o077 for path in found)
            assert len(found) == 4
    finally:
        os.umask(former)


def test_a_run_whose_heartbeat_was_lost_is_swept_after_a_day(tmp_path: Path) -> None:
    """The machine lost power before the file's bytes were on the disk."""
    own, lost = tmp_path / "run-own", tmp_path / "run-lost"
    for directory in (own, lost):
        directory.mkdir(mode=0o700)
        (directory / "rank-00000.alive").write_bytes(bytes(1024))
    heartbeat.sweep_dead_runs(tmp_path, own)
    assert lost.exists()
    os.utime(lost / "rank-00000.alive", (0, time.time() - 86_500))
    heartbeat.sweep_dead_runs(tmp_path, own)
    assert not lost.exists()


def test_killed_runs_are_swept_and_living_ones_are_not(tmp_path: Path) -> None:
    script = (
        "import sys, time, torch; from modelexport.distributed.gather import NFSWorkspace\n"
        "w = NFSWorkspace(sys.argv[1], run_id=sys.argv[2]); w.write_configs_and_weights({}, {'w': torch.ones(9)})\n"
        "print('ready', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path), "doomed"],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        own, doomed = tmp_path / "run-own", tmp_path / "run-doomed"
        (tmp_path / "run-unknown").mkdir()
        heartbeat.sweep_dead_runs(tmp_path, own)
        assert doomed.exists()
        assert heartbeat.condition(doomed, 0) == "living"
        process.send_signal(signal.SIGKILL)
        deadline = time.monotonic() + 30
        while heartbeat.condition(doomed, 0) != "dead":  # before it is waited for
            assert time.monotonic() < deadline
            time.sleep(0.01)
        heartbeat.sweep_dead_runs(tmp_path, own)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["run-unknown"]
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
