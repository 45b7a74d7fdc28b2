"""Ctrl-C while a module is imported: what is imported is whole, and the interrupt is not lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import modelexport

PROGRAM = """
import signal, time
from modelexport.system.startup import interrupt_no_import
interrupt_no_import()
try:
    import package
    print("imported", flush=True)
    time.sleep(30)
except KeyboardInterrupt:
    print("interrupted")
try:
    signal.raise_signal(signal.SIGINT)
    print("too late")
except KeyboardInterrupt:
    print("at once")
"""


def test_an_import_is_not_interrupted(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("from package import part\n")
    (tmp_path / "package" / "part.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\nprint('whole')\n")
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(modelexport.__file__).parent.parent}"},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert (result.stdout, result.stderr) == ("whole\nimported\ninterrupted\nat once\n", "")
