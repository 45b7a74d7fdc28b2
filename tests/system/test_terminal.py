"""What becomes of the program's output where stdout or stderr is closed, full, or knows ASCII only."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from modelexport.errors import OutputError
from modelexport.exporting import export
from modelexport.system import terminal
from tests.exporting.test_export import digests
from tests.helpers.marks import few


class Full(io.StringIO):
    """A stream on a full disk."""

    def flush(self) -> None:
        raise OSError(28, "No space left on device")


def run_with_closed(descriptors: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """The program with descriptors closed by a shell; what it writes to the others is captured."""
    closed = " ".join(f"{each}{'<' if each == '0' else '>'}&-" for each in descriptors)
    command = [sys.executable, "-m", "modelexport", *map(str, arguments)]
    return subprocess.run(
        ["/bin/sh", "-c", f'exec "$@" {closed}', "sh", *command],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_closed_descriptors_are_not_given_to_weight_files(tmp_path: Path) -> None:
    """With ranks, which inherit them: an export writes the same files, and says nothing."""
    done = run_with_closed("012", "--tp", 2, "--out", tmp_path / "closed", "--no-evaluate")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    export(out=str(tmp_path / "open"), evaluate=False, quiet=True)
    assert digests(tmp_path / "closed") == digests(tmp_path / "open")


@pytest.mark.parametrize(("descriptors", "status"), few([("1", 0), ("2", 0), ("012", 0)], ("012", 0)))
def test_a_closed_stream_changes_no_status(descriptors: str, status: int) -> None:
    assert run_with_closed(descriptors, "formats", "fp8").returncode == status


def test_a_result_that_cannot_be_printed_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Full())
    with pytest.raises(OutputError, match="the result could not be printed on stdout: No space left on device"):
        terminal.show("a result")


def test_what_is_complete_stands_though_its_summary_cannot_be_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", Full())
    terminal.show("a summary", stands="ckpt is complete")
    assert capsys.readouterr().err == (
        "modelexport: ckpt is complete; its summary could not be printed on stdout: No space left on device\n"
    )


def test_a_full_disk_is_no_traceback_as_the_interpreter_ends() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "modelexport", "--version"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr == "modelexport: the result could not be printed on stdout: No space left on device\n"


@pytest.mark.parametrize(
    ("encoding", "text", "printed"),
    [
        ("ascii", "a \u2018word\u2019", "a \\u2018word\\u2019\n"),
        ("utf-8", "a \u2018word\u2019", "a \u2018word\u2019\n"),
        ("utf-8", os.fsdecode(b"\xff.safetensors"), "\\udcff.safetensors\n"),
        ("utf-8", "two\nlines \x1b[31m\x00\x9b", "two\nlines \\x1b[31m\\x00\\x9b\n"),
    ],
    ids=["ascii", "utf-8", "a path that is not UTF-8", "control characters"],
)
def test_what_a_stream_cannot_show_is_escaped(
    monkeypatch: pytest.MonkeyPatch, encoding: str, text: str, printed: str
) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding))
    terminal.show(text)
    assert raw.getvalue().decode(encoding) == printed


def test_without_streams_nothing_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a process that never had any, where ``print(file=None)`` would print on stdout."""
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", None)
        terminal.note("a line")
        with terminal.progress_bar(quiet=False, total=1) as bar:
            bar.update(1)
        terminal.flush()
    assert capsys.readouterr() == ("", "")


def test_json_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    value = {"name": "\x1b\x7f\x00\n\u2028"}
    terminal.show(json.dumps(value))
    assert json.loads(capsys.readouterr().out) == value
