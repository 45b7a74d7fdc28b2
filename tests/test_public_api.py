"""``import modelexport``: quick, typed, and every function with an example that runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import modelexport
from tests.helpers.hub_server import TOKEN, running_hub

FUNCTIONS = ("export", "convert", "reshard", "inspect", "verify", "diff", "evaluate", "report", "push")

EXAMPLES = """
import doctest, sys
import modelexport

runner, names = doctest.DocTestRunner(), {"modelexport": modelexport}
for name in sys.argv[1:]:
    test = doctest.DocTestParser().get_doctest(getattr(modelexport, name).__doc__, names, name, None, None)
    assert test.examples, f"{name} has no example"
    runner.run(test, clear_globs=False)
    names = test.globs
sys.exit(runner.failures)
"""


def test_it_imports_nothing_heavy() -> None:
    program = "import sys, modelexport\nprint([name for name in sys.modules if name.startswith('modelexport.')])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


def test_every_name_is_there_and_documented() -> None:
    assert set(FUNCTIONS) < set(modelexport.__all__) <= set(dir(modelexport))
    assert all(getattr(modelexport, name).__doc__ for name in modelexport.__all__)
    with pytest.raises(AttributeError, match="no attribute 'exprot'"):
        modelexport.exprot  # noqa: B018


def test_the_examples(tmp_path: Path) -> None:
    with running_hub() as server:
        own = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
        hub = {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "hf"), "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}
        done = subprocess.run(
            [sys.executable, "-c", EXAMPLES, *FUNCTIONS],
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
            cwd=tmp_path,
            env={
                **own,
                **hub,
                "NO_PROXY": "127.0.0.1",
                "PYTHONPATH": str(Path(modelexport.__file__).parents[1]),
            },
        )
    assert done.returncode == 0, done.stdout + done.stderr
