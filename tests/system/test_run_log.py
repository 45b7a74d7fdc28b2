"""The file that a run's processes append lines to."""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from modelexport.errors import UsageError
from modelexport.system.run_log import LogFile, RunLog, check_log, in_layer


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_many(file: LogFile, rank: int) -> None:
    log = RunLog(file, rank, beats=False)
    for number in range(200):
        log.write("x" * 900, layer=str(number))
    log.close()


def test_lines_of_several_processes_and_threads_stay_whole(tmp_path: Path) -> None:
    file = LogFile.begin(str(tmp_path / "log"))
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=write_many, args=(file, rank)) for rank in (0, 1)]
    for process in processes:
        process.start()
    threads = [threading.Thread(target=write_many, args=(file, rank)) for rank in (2, 3)]
    for thread in threads:
        thread.start()
    for process in processes:
        process.join(30)
    for thread in threads:
        thread.join(30)
    found = lines_of(tmp_path / "log")
    for rank in range(4):
        assert [line["layer"] for line in found if line["rank"] == rank] == [str(n) for n in range(200)]


def test_a_line_is_short_enough_to_be_appended_whole(tmp_path: Path) -> None:
    log = RunLog(LogFile.begin(str(tmp_path / "log")), 0, beats=False)
    log.write("\U0001f600" * 5000, layer="l" * 5000)
    log.close()
    assert [len(line) < 4096 for line in (tmp_path / "log").read_bytes().splitlines()] == [True]


def test_a_line_has_the_layer_that_its_thread_is_in(tmp_path: Path) -> None:
    log = RunLog(LogFile.begin(str(tmp_path / "log")), 0, beats=False)
    in_layer("model.layers.3", log.write, "quantising")
    log.write("flushing")
    log.close()
    assert [line["layer"] for line in lines_of(tmp_path / "log")] == ["model.layers.3", None]


def test_processes_that_begin_later_have_the_same_zero(tmp_path: Path) -> None:
    file = LogFile.begin(str(tmp_path / "log"))
    log = RunLog(LogFile(file.path, file.began - 100.0), 0, beats=False)
    log.write("late")
    log.close()
    assert lines_of(tmp_path / "log")[0]["seconds"] == pytest.approx(100.0, abs=5.0)


def test_a_full_disk_ends_the_log_and_not_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    log = RunLog(LogFile.begin("/dev/full"), 0, beats=False)
    log.write("one")
    log.write("two")
    log.close()
    message = "modelexport: --log /dev/full: No space left on device: the log ends here, the run goes on\n"
    assert capsys.readouterr().err == message


def test_a_line_that_is_cut_is_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, path = os.write, tmp_path / "log"
    log = RunLog(LogFile.begin(str(path)), 0, beats=False)
    log.write("one")
    monkeypatch.setattr(os, "write", lambda fd, line: write(fd, line[:20]))
    log.write("two")
    monkeypatch.undo()
    log.write("three")
    log.close()
    whole, cut = path.read_bytes().splitlines()
    assert json.loads(whole)["phase"] == "one"
    assert len(cut) == 20


def test_a_log_that_cannot_be_is_refused_before_the_run(tmp_path: Path) -> None:
    for path, out, reason in [
        (tmp_path, None, "is a directory"),
        (tmp_path / "none" / "log", None, "there is no directory"),
        (tmp_path / "ckpt" / "log", tmp_path / "ckpt", "which is to hold the checkpoint alone"),
    ]:
        with pytest.raises(UsageError, match=reason):
            check_log(str(path), None if out is None else str(out))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="cannot be written: No such device or address"):
        check_log(str(tmp_path / "pipe"), None)
