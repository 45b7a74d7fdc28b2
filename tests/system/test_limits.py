"""Limits of a process, however they are met: one sentence with the limit and what to type, and nothing left behind."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from modelexport import exporting as exporter
from modelexport.cli import main
from modelexport.distributed.supervision.failures import exception_message
from modelexport.errors import CheckpointError, LimitError
from modelexport.system.limits import advice, limit_error


def of(code: int, filename: str | None = None) -> OSError:
    return OSError(code, os.strerror(code), filename)


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """The limits of this process, as the program sees them: none but those that a test sets."""
    set_now: dict[int, int] = {}

    def limit_of(number: int) -> tuple[int, int]:
        return (set_now.get(number, resource.RLIM_INFINITY),) * 2

    monkeypatch.setattr(resource, "getrlimit", limit_of)
    return set_now


@pytest.mark.parametrize(
    ("error", "number", "limit", "words"),
    [
        (of(errno.EMFILE), resource.RLIMIT_NOFILE, 20, ["ulimit -n allows 20 ", "type ulimit -n 4096"]),
        (RuntimeError("gloo: socket: Too many open files"), resource.RLIMIT_NOFILE, 5000, ["type ulimit -n 20000"]),
        (MemoryError(), resource.RLIMIT_AS, 1200000 << 10, ["ulimit -v allows a process 1,200,000 kB"]),
        (MemoryError(), None, 0, ["memory ran out: ", " MB are free", "--calib-memory"]),
        (of(errno.ENOMEM), None, 0, ["memory ran out: "]),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 1 bytes"), None, 0, ["memory ran out: "]),
        (RuntimeError("std::bad_alloc"), None, 0, ["memory ran out: "]),
        (ImportError("libx.so: failed to map segment from shared object"), None, 0, ["memory ran out: "]),
        (OSError("Could not find/load shared object file"), resource.RLIMIT_AS, 1024, ["type ulimit -v unlimited"]),
        (RuntimeError("can't start new thread"), resource.RLIMIT_NPROC, 30, ["ulimit -u allows 30 in all"]),
        (
            of(errno.EFBIG, "a.safetensors"),
            resource.RLIMIT_FSIZE,
            4096,
            ["a.safetensors is too large: ", "4,096 b"],
        ),
        (of(errno.ENOSPC, "a"), None, 0, ["no room is left for a"]),
        (of(errno.EIO, "a"), None, 0, ["a cannot be read or written (input/output error)", "dmesg"]),
    ],
)
def test_each_limit_is_known(
    limits: dict[int, int], error: Exception, number: int | None, limit: int, words: list[str]
) -> None:
    if number is not None:
        limits[number] = limit
    text = str(limit_error(error))
    assert all(each in text for each in words), text
    assert "and run the same command again" in text


@pytest.mark.parametrize(
    "error",
    [
        ValueError("out of memory cards"),
        RuntimeError("CUDA out of memory"),
        RuntimeError("sizes do not match"),
        of(errno.EAGAIN),
        of(errno.ENOENT, "x"),
        OSError("Could not find/load shared object file"),
        CheckpointError("damaged"),
    ],
)
def test_other_errors_stay_what_they_are(limits: dict[int, int], error: Exception) -> None:
    assert limit_error(error) is None


def test_a_sentence_is_kept_and_the_limit_behind_it_is_added(limits: dict[int, int]) -> None:
    limits[resource.RLIMIT_NOFILE] = 20
    error = CheckpointError("a cannot be read")
    error.__cause__ = of(errno.EMFILE)
    assert str(limit_error(error)).startswith("a cannot be read; ulimit -n allows 20 at a time: ")
    named = CheckpointError(f"a cannot be read{advice(of(errno.EMFILE))}")
    named.__cause__ = of(errno.EMFILE)
    assert str(named) == "a cannot be read; raise ulimit -n (open files), which is 20"
    assert limit_error(named) is None


def test_a_full_disk_is_told_once() -> None:
    error = CheckpointError("no room for 3 bytes")
    error.__cause__ = of(errno.ENOSPC)
    assert limit_error(error) is None


def test_a_rank_and_the_command_line_tell_it_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    message = exception_message(MemoryError())
    assert message["user_error"]
    assert message["summary"].startswith("memory ran out: ")

    def export(recipe: object) -> None:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: not enough memory")

    monkeypatch.setattr(exporter, "export", export)
    assert main(["--dry-run"]) == LimitError.exit_status
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("modelexport: memory ran out: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(("limit", "words"), [("-n 20", "ulimit -n allows 20 at a time"), ("-v 400000", "400,000 kB")])
def test_a_limited_shell_gets_one_line_and_nothing_is_left(tmp_path: Path, limit: str, words: str) -> None:
    command = [sys.executable, "-m", "modelexport", "--tp", "4", "--no-evaluate", "--out", str(tmp_path / "out")]
    done = subprocess.run(
        ["/bin/sh", "-c", f'ulimit {limit}; exec "$@"', "sh", *command],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
