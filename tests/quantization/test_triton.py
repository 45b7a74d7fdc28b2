"""Triton's kernels against the reference, bit for bit, through Triton's interpreter: there need be no GPU."""

from __future__ import annotations

import importlib.util
import os

import pytest

from tests.helpers.marks import few
from tests.helpers.warm import run_warm

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed: its interpreter runs nothing"
)
CASES = "tests.quantization._triton_cases"
STORAGES = [("int8", 8.0, False), ("int8", 128.0, True), ("float8_e4m3fn", 448.0, False), ("uint8", 6.0, False)]


def _check(case: str, *arguments: object) -> None:
    """Runs a case of _triton_cases.py in a process where Triton interprets."""
    code = f"import torch\nfrom {CASES} import {case}\n{case}({', '.join(map(str, arguments))})"
    done = run_warm("-c", code, imported=CASES, env={**os.environ, "TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("seed", few(range(8), 0))
@pytest.mark.parametrize(("storage", "half", "shifted"), STORAGES)
def test_rounding_with_feedback(storage: str, half: float, shifted: bool, seed: int) -> None:
    for columns, rows in ((1, 1), (3, 40), (33, 3)) if seed == 0 else ((1, 33), (32, 1), (68, 5), (9, 65)):
        _check("rounding_with_feedback", columns, rows, seed, f"torch.{storage}", half, shifted)
