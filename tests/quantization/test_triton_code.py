"""What Triton's kernels are compiled to: each product, sum and division rounded once, as IEEE says; without a GPU."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from tests.helpers.marks import few
from tests.helpers.warm import run_warm

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed: nothing is compiled"
)
CODE = "tests.quantization._triton_code"
TARGETS = ("sm_90", "sm_80", "gfx942")
WORK = ("round_back", "round_back_otherwise", "plain_formats", "scale_searches", "shared_exponents")


def _check(work: str, target: str, cache: Path, instead: str = "") -> str:
    """Compiles in a process where Triton does not interpret; returns what it says of code that is not exact."""
    code = f"from {CODE} import check\ncheck({target!r}, {work!r}{instead})"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = run_warm("-c", code, imported=CODE, env={**environment, "TRITON_CACHE_DIR": str(cache)})
    return done.stderr[-2000:] if done.returncode else ""


@pytest.mark.parametrize("target", few(TARGETS, "sm_90"))
@pytest.mark.parametrize("work", few(WORK, "round_back"))
def test_compiled_kernels_round_as_written(work: str, target: str, tmp_path: Path) -> None:
    assert not _check(work, target, tmp_path)


def test_a_fused_multiply_add_is_noticed(tmp_path: Path) -> None:
    assert "round_back_kernel: ['fma" in _check("round_back", "sm_80", tmp_path, ", enable_fp_fusion=True")
