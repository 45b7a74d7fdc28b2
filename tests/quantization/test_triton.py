"""Triton's kernels against the reference, bit for bit, through Triton's interpreter: there need be no GPU."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

from modelexport.quantization import formats
from tests.helpers.marks import extended, few
from tests.helpers.warm import run_warm
from tests.quantization._weights import DTYPES, FORMATS, widths

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


SEARCHED = (("int4-asym", 32), ("fp8", None), ("nvfp4", None))


@pytest.mark.parametrize("dtype", few(DTYPES, torch.bfloat16))
@pytest.mark.parametrize(("name", "group"), [pair if pair[1] in (None, 32) else extended(*pair) for pair in FORMATS])
def test_formats(name: str, group: int | None, dtype: torch.dtype) -> None:
    unit = widths(formats.get(name, group_size=group))
    _check("a_format", repr(name), group, "'amax'", dtype, 3, 37 if unit == 1 else unit)


@pytest.mark.parametrize("dtype", few(DTYPES, torch.bfloat16))
@pytest.mark.parametrize(("name", "group"), few(FORMATS, *SEARCHED))
def test_searches(name: str, group: int | None, dtype: torch.dtype) -> None:
    unit = widths(formats.get(name, group_size=group))
    _check("a_format", repr(name), group, "'mse'", dtype, 1, 37 if unit == 1 else unit)


@pytest.mark.extended
@pytest.mark.parametrize("observer", ["amax", "mse"])
@pytest.mark.parametrize(("name", "group"), FORMATS)
def test_formats_of_odd_shapes(name: str, group: int | None, observer: str) -> None:
    """Rows and columns that are no multiple of a program's, several programs along a row, scales of another dtype."""
    unit = widths(formats.get(name, group_size=group))
    shapes = [(9, 301), (1, 1)] if unit == 1 else [(9, 3 * unit), (1, 17 * unit)]
    for shape in [*shapes, (130, 130)] if name == "fp8-block" else shapes:
        _check("a_format", repr(name), group, repr(observer), "torch.bfloat16", *shape, True)


@pytest.mark.parametrize("dtype", few(DTYPES, torch.float16))
def test_short_blocks(dtype: torch.dtype) -> None:
    _check("short_blocks", dtype)


def test_bad_rows() -> None:
    _check("bad_rows")


def test_the_order_of_sums() -> None:
    _check("order_of_sums")


@pytest.mark.extended
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(6))
def test_any_bits(dtype: torch.dtype, seed: int) -> None:
    _check("any_bits", dtype, seed)
