"""The first command after an installation: what it must not import, and the seconds that it prints."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import modelexport


def imported(*arguments: str, cwd: Path) -> set[str]:
    """Returns the packages that a command imports in any of its processes."""
    result = subprocess.run(
        [sys.executable, "-m", "modelexport", *arguments],
        env={**os.environ, "PYTHONPATH": str(Path(modelexport.__file__).parents[1]), "PYTHONPROFILEIMPORTTIME": "1"},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    lines = (line.rpartition("|") for line in result.stderr.splitlines() if line.startswith("import time:"))
    return {name.strip().partition(".")[0] for _, _, name in lines}


@pytest.mark.parametrize("command", ["--help", "--version", "inspect --help"])
def test_help_imports_nothing_heavy(command: str, tmp_path: Path) -> None:
    assert not imported(*command.split(), cwd=tmp_path) & {"torch", "numpy", "transformers", "numba", "yaml"}


@pytest.mark.timeout(180)
def test_the_demo_export_compiles_nothing_and_imports_no_transformers(tmp_path: Path) -> None:
    found = imported("--tp", "2", "--out", "ckpt", cwd=tmp_path)
    assert "torch" in found
    assert not found & {"transformers", "numba", "llvmlite", "accelerate", "sympy"}


def test_seconds_are_counted_from_the_start_of_the_process() -> None:
    program = (
        "import time; time.sleep(0.5); from modelexport.system.startup import process_seconds; print(process_seconds())"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(modelexport.__file__).parents[1])}
    began = time.perf_counter()
    seconds = float(subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True).stdout)
    assert 0.5 <= seconds <= time.perf_counter() - began + 0.02  # the system counts in hundredths
