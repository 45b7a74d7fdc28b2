"""Ctrl-C while numpy or torch is imported: what is imported is whole, and the interrupt is not lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import modelexport

PROGRAM = """
import signal, sys, time
from modelexport.startup import interrupt_no_import
interrupt_no_import()
try:
    import {name}
    print("imported", flush=True)
    time.sleep(30)
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize(
    ("name", "printed"),
    [("torch", "whole\nimported\ninterrupted\n"), ("another", "interrupted\n")],
)
def test_an_import_of_torch_is_not_interrupted(tmp_path: Path, name: str, printed: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text(f"from {name} import part\n")
    (tmp_path / name / "part.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\nprint('whole')\n")
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(name=name)],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(modelexport.__file__).parent.parent}"},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert (result.stdout, result.stderr) == (printed, "")
