"""Ctrl-C while a module is imported: what is imported is whole, and the interrupt is not lost. How a process ends."""

from __future__ import annotations

import gc
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import modelexport
from modelexport.system.startup import without_collector

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
    result = _run(PROGRAM, str(tmp_path))
    assert (result.stdout, result.stderr) == ("whole\nimported\ninterrupted\nat once\n", "")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed: it prints nothing")
def test_a_process_that_imported_triton_ends_without_a_word() -> None:
    program = (
        "import triton\nfrom modelexport.system.startup import exempt_everything\nexempt_everything()\nprint('done')"
    )
    result = _run(program, *filter(None, [os.environ.get("PYTHONPATH")]))
    assert (result.stdout, result.stderr) == ("done\n", "")


def _run(program: str, *paths: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((*paths, str(Path(modelexport.__file__).parent.parent)))},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_what_is_made_without_the_collector_is_old_when_it_is_turned_on() -> None:
    """As young objects they would be walked at once."""
    with without_collector():
        made = [[] for _ in range(10_000)]
        assert not gc.isenabled()
    assert gc.isenabled()
    young = {id(each) for each in gc.get_objects(generation=0)}
    assert not young.intersection(map(id, made))
