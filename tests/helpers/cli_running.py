"""Running the command line: in this process, and as a user does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from modelexport import cli


def fails(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 2) -> str:
    """The one line on stderr; nothing is on stdout."""
    assert cli.main(list(arguments)) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("modelexport: ")
    assert err.endswith("\n")
    assert "Traceback" not in err
    return err


def shell(*arguments: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    """``python -m modelexport`` as a user runs it, from the source tree unless ``cwd``."""
    root = Path(cli.__file__).parent.parent
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return subprocess.run(
        [sys.executable, "-m", "modelexport", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path, **env},
    )


def listing(directory: Path) -> list[tuple[str, int, int]]:
    """Path, size and time of everything below: equal as long as nothing was touched."""
    return sorted((str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in directory.rglob("*"))
