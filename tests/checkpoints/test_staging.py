"""The staging directory: all or nothing, one export at a time, and nothing lost to a kill."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from modelexport.checkpoints import raw_io, staging
from modelexport.checkpoints.staging import Staging, journal, locks, staging_directory
from modelexport.errors import CheckpointError, UsageError
from tests.checkpoints._samples import RECIPE, export, fill, interrupt, listing


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "ckpt"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "LOCK_WAIT", 0.2)


def test_the_target_appears_whole_and_nothing_else_stays(out: Path) -> None:
    with Staging.open(out, RECIPE) as stage:
        assert (stage.done, stage.resumed, stage.restarted) == ({}, False, False)
        assert stage.directory.parent == staging_directory(out)
        fill(stage)
        assert not out.exists()
        stage.publish()
    assert listing(out) == ["config.json", "deeper"]
    assert listing(out.parent) == ["ckpt"]


def test_parents_are_made_and_links_followed(tmp_path: Path) -> None:
    export(tmp_path / "a" / "b" / "ckpt")
    assert (tmp_path / "a" / "b" / "ckpt" / "config.json").read_text() == "new"
    (tmp_path / "link").symlink_to(tmp_path / "a" / "b")
    export(tmp_path / "link" / "other")
    assert listing(tmp_path / "a" / "b") == ["ckpt", "other"]
    (tmp_path / "target").symlink_to(tmp_path / "a" / "b" / "ckpt")
    export(tmp_path / "target", "newer", overwrite=True)
    assert (tmp_path / "target").is_symlink()
    assert (tmp_path / "a" / "b" / "ckpt" / "config.json").read_text() == "newer"


def test_an_existing_target_is_refused_before_anything_is_made(out: Path) -> None:
    export(out, "old")
    with pytest.raises(UsageError, match=r"exists already; .*--overwrite"):
        Staging.open(out, RECIPE)
    assert listing(out.parent) == ["ckpt"]


@pytest.mark.parametrize("swap", ["exchange", "two renames"])
def test_overwriting_swaps_the_directories(swap: str, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if swap == "two renames":
        monkeypatch.setattr(raw_io, "rename_exchange", lambda a, b: False)
        monkeypatch.setattr(raw_io, "rename_no_replace", lambda a, b: False)
    export(out, "old")
    (out / "only in the old one").touch()
    with Staging.open(out, RECIPE, overwrite=True) as stage:
        fill(stage)
        assert (out / "config.json").read_text() == "old"
        stage.publish()
    assert (out / "config.json").read_text() == "new"
    assert listing(out) == ["config.json", "deeper"]
    assert listing(out.parent) == ["ckpt"]


def test_overwrite_deletes_only_checkpoints(out: Path) -> None:
    out.mkdir()
    (out / "thesis.tex").touch()
    with pytest.raises(UsageError, match=r"holds no checkpoint but thesis\.tex"):
        Staging.open(out, RECIPE, overwrite=True)
    (out / "thesis.tex").unlink()
    export(out, overwrite=True)
    file = out.parent / "file"
    file.touch()
    with pytest.raises(UsageError, match="is not a directory"):
        Staging.open(file, RECIPE, overwrite=True)
    assert listing(out.parent) == ["ckpt", "file"]


@pytest.mark.parametrize("name", ["", "/", "x\0y", "n" * 300, "file/below"])
def test_targets_that_cannot_be(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="--out"):
        Staging.open(name, RECIPE)
    assert listing(tmp_path) == ["file"]


def test_an_unwritable_place(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *args: object, **kwargs: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(UsageError, match="cannot be made: Permission denied; choose another --out"):
        Staging.open(out, RECIPE)


def test_a_target_that_appears_meanwhile(out: Path) -> None:
    with Staging.open(out, RECIPE) as stage:
        fill(stage)
        stage.record("layer 0", {})
        out.mkdir()
        (out / "config.json").write_text("somebody else's")
        with pytest.raises(UsageError, match="exists already"):
            stage.publish()
    assert (out / "config.json").read_text() == "somebody else's"
    assert listing(out.parent) == [".ckpt.modelexport", "ckpt"]


def test_the_same_export_resumes(out: Path) -> None:
    interrupt(out, "layer 0", "layer 1")
    with Staging.open(out, dict(reversed(RECIPE.items()))) as stage:
        assert stage.resumed
        assert stage.done == {"layer 0": {"bytes": 7}, "layer 1": {"bytes": 7}}
        assert (stage.directory / "config.json").read_text() == "half"
        stage.record("layer 2", {"bytes": 3})
    with Staging.open(out, RECIPE) as stage:
        assert list(stage.done) == ["layer 0", "layer 1", "layer 2"]
        fill(stage)
        stage.publish()
    assert listing(out.parent) == ["ckpt"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_another_user_has_begun_is_not_taken_up(out: Path) -> None:
    """Its journal would vouch for weights of theirs."""
    interrupt(out, "a step")
    os.chown(staging_directory(out), 65534, 65534)
    with pytest.raises(UsageError, match=r"ckpt.modelexport belongs to user 65534, and this is user 0"):
        Staging.open(out, RECIPE)


def test_a_staging_directory_that_is_a_link_is_refused(tmp_path: Path, out: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    staging_directory(out).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="is no directory, or a link to one"):
        Staging.open(out, RECIPE)


def test_another_export_is_told_what_differs(out: Path) -> None:
    interrupt(out, "layer 0")
    other = {"quant": "int4", "model": {"sha256": "ab", "layers": 5}, "shards": [1, 2], "group_size": 128}
    for overwrite in (False, True):
        with pytest.raises(UsageError) as caught:
            Staging.open(out, other, overwrite=overwrite)
        lines = str(caught.value).splitlines()
        assert lines[1:4] == [
            "  group_size: (not given) then, 128 now",
            "  model.layers: 4 then, 5 now",
            '  quant: "fp8" then, "int4" now',
        ]
        assert f"rm -r {staging_directory(out)};" in lines[0]
    with Staging.open(out, RECIPE) as stage:
        assert list(stage.done) == ["layer 0"]


def test_an_export_that_did_nothing_leaves_nothing(out: Path) -> None:
    interrupt(out)
    assert listing(out.parent) == []


@pytest.mark.parametrize("damage", [b'{"step": "layer 1", "rec', b'{"step": 1', b"\0\0\0\0", b"[]\n", b"null"])
def test_a_torn_line_is_dropped(damage: bytes, out: Path) -> None:
    interrupt(out, "layer 0")
    path = staging_directory(out) / "journal.jsonl"
    with path.open("ab") as stream:
        stream.write(damage)
    with Staging.open(out, RECIPE) as stage:
        assert list(stage.done) == ["layer 0"]
        stage.record("layer 1", {"again": True})
    with Staging.open(out, RECIPE) as stage:
        assert stage.done == {"layer 0": {"bytes": 7}, "layer 1": {"again": True}}
    assert [json.loads(line).get("step") for line in path.read_text().splitlines()] == [None, "layer 0", "layer 1"]


def test_a_journal_cut_anywhere(out: Path) -> None:
    """Whatever prefix of the journal survives, the steps in it are whole and the export can go on."""
    interrupt(out, "layer 0", "layer 1", "layer 2")
    path = staging_directory(out) / "journal.jsonl"
    whole = path.read_bytes()
    for length in range(len(whole)):
        (staging_directory(out) / "ckpt").mkdir(exist_ok=True)
        path.write_bytes(whole[:length])
        with Staging.open(out, RECIPE) as stage:
            whole_steps = max(0, whole[:length].count(b"\n") - 1)
            assert list(stage.done) == ["layer 0", "layer 1", "layer 2"][:whole_steps]
            stage.record("layer 9", {})
            assert path.read_bytes().endswith(b'"layer 9","record":{}}\n')


def test_a_journal_spoilt_anywhere(out: Path) -> None:
    """Whichever byte of it changes, what is in the damaged line and behind it is done again."""
    interrupt(out, "layer 0", "layer 1")
    path = staging_directory(out) / "journal.jsonl"
    whole = path.read_bytes()
    for at in range(whole.index(b"\n") + 1, len(whole)):
        path.write_bytes(whole[:at] + bytes((whole[at] ^ 1,)) + whole[at + 1 :])
        with Staging.open(out, RECIPE) as stage:
            assert list(stage.done) == ["layer 0"][: whole[:at].count(b"\n") - 1]
            stage.record("layer 9", {})  # what has no step is tidied away


def test_after_another_boot_the_steps_do_not_count(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt(out, "layer 0")
    monkeypatch.setattr(journal, "boot_id", lambda: "another")
    with Staging.open(out, RECIPE) as stage:
        assert (stage.done, stage.resumed, stage.restarted) == ({}, False, True)
        assert listing(stage.directory) == []


def test_after_another_boot_of_one_of_several_machines_the_steps_do_not_count(out: Path) -> None:
    def opened(*boots: str) -> Staging:
        return Staging.open(out, RECIPE, boot=journal.boot_ids(boots))

    with opened("a", "b", "b") as stage:
        stage.record("layer 0", {})
    with opened("b", "a") as stage:
        assert stage.resumed
    with opened("a", "c") as stage:
        assert (stage.done, stage.restarted) == ({}, True)


def test_steps_without_their_files_do_not_count(out: Path) -> None:
    interrupt(out, "layer 0")
    (staging_directory(out) / "ckpt" / "config.json").unlink()
    (staging_directory(out) / "ckpt").rmdir()
    with Staging.open(out, RECIPE) as stage:
        assert stage.done == {}
        assert not stage.resumed


def test_no_room_for_the_journal(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    with Staging.open(out, RECIPE) as stage:
        stage.record("layer 0", {})
        room = [5]

        def write_what_fits(fd: int, data: bytes) -> int:
            if not room[0]:
                raise OSError(errno.ENOSPC, "No space left on device")
            room[0] -= (written := write(fd, data[: room[0]]))
            return written

        monkeypatch.setattr(os, "write", write_what_fits)
        with pytest.raises(CheckpointError, match=r"journal\.jsonl: no room for .* are free"):
            stage.record("layer 1", {})
        monkeypatch.undo()
        stage.record("layer 2", {})
    with Staging.open(out, RECIPE) as stage:
        assert list(stage.done) == ["layer 0", "layer 2"]


def test_ranks_join_record_and_hold_the_export(out: Path, impatient: None) -> None:
    with pytest.raises(CheckpointError, match="no export to join: No such file"):
        Staging.join(out)
    stage = Staging.open(out, RECIPE)
    first, second = Staging.join(out), Staging.join(out)
    assert first.directory == stage.directory
    first.record("layer 0", {"k": 1})
    stage.close()
    for rank in (first, second):
        with pytest.raises(UsageError, match=rf"another export to .* is running \(pid {os.getpid()}\)"):
            Staging.open(out, RECIPE)
        rank.close()
    with Staging.open(out, RECIPE) as again:
        assert again.done == {"layer 0": {"k": 1}}
        assert Staging.join(out).done == {"layer 0": {"k": 1}}


def test_two_exports_at_once(out: Path, impatient: None) -> None:
    with Staging.open(out, RECIPE) as stage:
        with pytest.raises(UsageError, match=rf"is running \(pid {os.getpid()}\); wait for it"):
            Staging.open(out, RECIPE)
        fill(stage)
        stage.publish()
    assert listing(out.parent) == ["ckpt"]


@pytest.mark.timeout(120)
def test_many_exports_begin_and_end_in_one_place(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock files come and go with their directory; no two exports are ever inside at once."""
    monkeypatch.setattr(staging, "LOCK_WAIT", 60.0)
    inside: list[int] = []
    overlaps: list[int] = []
    failures: list[BaseException] = []

    def run(number: int) -> None:
        try:
            for _ in range(8):
                with Staging.open(out, RECIPE, overwrite=True) as stage:
                    inside.append(number)
                    if len(inside) > 1:
                        overlaps.append(number)
                    fill(stage, str(number))
                    inside.remove(number)
                    if number % 2:
                        stage.publish()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=100)
    assert failures == []
    assert overlaps == []
    assert listing(out.parent) == ["ckpt"]


def test_everything_reaches_the_disk_before_the_rename(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    fsync, rename = os.fsync, raw_io.rename_no_replace

    def note_fsync(fd: int) -> None:
        events.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        fsync(fd)

    def note_rename(a: Path, b: Path) -> bool:
        events.append("RENAME")
        return rename(a, b)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(raw_io, "rename_no_replace", note_rename)
    export(out)
    before, after = events[: events.index("RENAME")], events[events.index("RENAME") + 1 :]
    assert sorted(before) == ["ckpt", "config.json", "deeper", "journal.jsonl", "notes.txt"]
    assert before[-1] == "journal.jsonl"
    assert before.index("notes.txt") < before.index("deeper") < before.index("ckpt")
    assert after == [out.parent.name]


def test_a_disk_that_refuses_keeps_the_target_away(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with Staging.open(out, RECIPE) as stage:
        fill(stage)
        stage.record("layer 0", {})
        monkeypatch.setattr(os, "fsync", refuse)
        with pytest.raises(CheckpointError, match="cannot be published: Input/output error"):
            stage.publish()
    assert not out.exists()
    monkeypatch.undo()
    with Staging.open(out, RECIPE) as stage:
        assert list(stage.done) == ["layer 0"]


def test_a_name_that_does_not_reach_the_disk_is_taken_back(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target is there where the export has succeeded, and only there."""
    fsync = os.fsync

    def refuse(fd: int) -> None:
        if os.path.samestat(os.fstat(fd), os.stat(out.parent)):
            raise OSError(errno.EIO, "Input/output error")
        fsync(fd)

    for overwrite in (False, True):
        with Staging.open(out, RECIPE, overwrite=overwrite) as stage:
            fill(stage)
            stage.record("layer 0", {})
            monkeypatch.setattr(os, "fsync", refuse)
            with pytest.raises(CheckpointError, match="cannot be published: Input/output error"):
                stage.publish()
            monkeypatch.setattr(os, "fsync", fsync)
        assert out.exists() == overwrite
        with Staging.open(out, RECIPE, overwrite=overwrite) as stage:
            assert list(stage.done) == ["layer 0"]
            stage.publish()
        assert os.listdir(out.parent) == [out.name]


def test_what_cannot_be_cleared_away_does_not_undo_an_export(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(home: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(locks, "remove", refuse)
        export(out)
    left = staging_directory(out)
    assert capsys.readouterr().err == f"{left} is of no more use, and cannot be removed: Input/output error\n"
    assert out.is_dir()
    with pytest.raises(UsageError, match="exists already"):
        Staging.open(out, RECIPE)
    assert not left.exists()


def test_a_small_file_that_a_kill_cut_off_is_not_published(out: Path) -> None:
    with Staging.open(out, RECIPE) as stage:
        stage.record("layer 0", {})
        (stage.directory / "deeper").mkdir()
        for directory in (stage.directory, stage.directory / "deeper"):
            (directory / ".modelexport-0123456789abcdef").write_bytes(b"half a fi")
    with Staging.open(out, RECIPE) as stage:
        assert stage.resumed
        assert [path.name for path in stage.directory.rglob("*")] == ["deeper"]


def test_a_line_of_the_journal_that_falls_short_is_completed(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    with Staging.open(out, RECIPE) as stage, monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, line: write(fd, line[:7]))
        stage.record("layer 0", {"note": 1})
    with Staging.open(out, RECIPE) as stage:
        assert stage.done == {"layer 0": {"note": 1}}


def test_the_locks_are_not_inherited(out: Path) -> None:
    own = "/proc/self/fd"
    listing = f"import os; print(*(os.path.realpath(f'{own}/{{fd}}') for fd in os.listdir('{own}')), sep='\\n')"
    with Staging.open(out, RECIPE):
        lock = str(staging_directory(out) / locks.LOCK)
        assert lock in [os.path.realpath(f"{own}/{fd}") for fd in os.listdir(own)]
        child = subprocess.run([sys.executable, "-c", listing], capture_output=True, text=True, timeout=60, check=True)
    assert lock not in child.stdout.splitlines()


def cut_off(out: Path, recipe: dict[str, Any], source: Path) -> None:
    """What a killed run leaves that had read ``source``."""
    with Staging.open(out, recipe, inputs=[source]) as stage:
        stage.record("layer 0", {})


def test_a_run_whose_source_has_changed_makes_way(tmp_path: Path) -> None:
    source = tmp_path / "model" / "model.safetensors"
    source.parent.mkdir()
    source.write_bytes(b"as it was")
    other, out = {**RECIPE, "quant": "another"}, tmp_path / "out"
    cut_off(out, RECIPE, source)
    with pytest.raises(UsageError, match="was interrupted"):
        Staging.open(out, other, inputs=[source])
    source.write_bytes(b"repaired!!")
    with Staging.open(out, other, inputs=[source]) as stage:
        assert (stage.done, stage.lost) == ({}, f"{source} has changed since")


def test_a_run_whose_source_is_gone_makes_way_but_not_where_its_disk_may_be_unmounted(tmp_path: Path) -> None:
    source = tmp_path / "model" / "model.safetensors"
    source.parent.mkdir()
    source.write_bytes(b"as it was")
    other, out = {**RECIPE, "quant": "another"}, tmp_path / "out"
    cut_off(out, RECIPE, source)
    source.unlink()
    with pytest.raises(UsageError, match="was interrupted"):
        Staging.open(out, other)
    (source.parent / "model-00001-of-00002.safetensors").touch()
    with Staging.open(out, other) as stage:
        assert stage.lost == f"{source} is no longer there"


def test_of_a_run_that_would_fail_again_nothing_stays(tmp_path: Path) -> None:
    stage = Staging.open(tmp_path / "out", RECIPE)
    stage.record("layer 0", {})
    stage.close(ended="a.weight holds NaN")
    assert os.listdir(tmp_path) == []


def test_a_run_that_would_fail_again_makes_way_where_its_ranks_outlived_it(tmp_path: Path) -> None:
    out = tmp_path / "out"
    stage = Staging.open(out, RECIPE)
    rank = Staging.join(out)
    stage.record("layer 0", {})
    stage.close(ended="a.weight holds NaN")
    assert os.listdir(tmp_path) == [".out.modelexport"]
    rank.close()
    with Staging.open(out, {**RECIPE, "quant": "another"}) as stage:
        assert stage.lost == "it failed, and would again: a.weight holds NaN"
