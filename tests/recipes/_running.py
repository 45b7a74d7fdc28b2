"""Runs the scripts of recipes/ as their users do: in this process, which has imported torch, or in a new one."""

from __future__ import annotations

import json
import os
import random
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from modelexport import cli

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"


def run_here(script: str, *arguments: str) -> int:
    """``python recipes/SCRIPT ARGUMENTS`` in this process; the exit status."""

    def end() -> None:  # cli.run() without what it does to a process that ends
        sys.exit(cli.main())

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(RECIPES))
        patch.setattr(sys, "argv", [str(RECIPES / script), *arguments])
        patch.setattr(cli, "run", end)
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(RECIPES / script), run_name="__main__")
    return int(ended.value.code or 0)


def run_apart(*command: str, timeout: float = 120, **env: str) -> subprocess.CompletedProcess[str]:
    """A command in a new process, from the repository's root; ``python`` is this one."""
    words = [sys.executable if word == "python" else word for word in command]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", **env}
    return subprocess.run(
        words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )


def token_lines(path: Path, *, vocab: int = 200, samples: int = 8, length: int = 48) -> Path:
    """Calibration text for models without a tokenizer: lines with ``input_ids``."""
    chance = random.Random(0)
    rows = [{"input_ids": [chance.randrange(3, vocab) for _ in range(length)]} for _ in range(samples)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path
