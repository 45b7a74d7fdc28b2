"""Which kernels run, in how many threads, from which cache: never what they compute."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import modelexport
from modelexport.errors import UsageError
from modelexport.quantization import formats, kernels
from tests.quantization._weights import FORMATS, random_weight, same_bytes

PACKAGE = Path(modelexport.__file__).parent


@pytest.fixture
def restored_threads():
    yield
    kernels.set_threads(1)


def _run(code: str, **environment: str) -> str:
    """Runs code in a fresh interpreter that sees the package; what it printed."""
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent), **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_the_environment_forces_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELEXPORT_KERNELS", "reference")
    assert kernels.backend() == ("reference", "MODELEXPORT_KERNELS=reference")
    monkeypatch.setenv("MODELEXPORT_KERNELS", "fused")
    assert kernels.backend().name == "fused"
    monkeypatch.setenv("MODELEXPORT_KERNELS", "quick")
    with pytest.raises(UsageError, match="'quick': set it to 'reference' or 'fused'"):
        kernels.backend()
    monkeypatch.delenv("MODELEXPORT_KERNELS")
    assert str(kernels.backend()).startswith("fused kernels (CPU tensors, numba ")


def test_forced_kernels_give_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_weight(40, 384, torch.bfloat16)
    for name, group in FORMATS:
        number_format = formats.get(name, group_size=group)
        stored = []
        for forced in ("fused", "reference"):
            monkeypatch.setenv("MODELEXPORT_KERNELS", forced)
            stored.append(number_format.quantise(weight))
        assert same_bytes(*stored)


def test_without_numba_the_reference_runs_and_says_so() -> None:
    code = """
        import sys
        sys.modules["numba"] = None
        import torch
        from modelexport.errors import UsageError
        from modelexport.quantization import formats, kernels
        print(kernels.backend())
        stored = formats.get("int4").quantise(torch.full((2, 128), 7.5))
        print(stored["weight_scale"][0].item(), "modelexport.quantization.kernels.compiled" in sys.modules)
        import os
        os.environ["MODELEXPORT_KERNELS"] = "fused"
        try:
            kernels.backend()
        except UsageError as error:
            print(error)
    """
    first, second, third = _run(code).splitlines()
    assert first.startswith("reference kernels (numba cannot be imported: ")
    assert second == "1.0 False"
    assert third.startswith("MODELEXPORT_KERNELS=fused, but numba cannot be imported")


def test_importing_the_fused_kernels_starts_no_thread() -> None:
    """So that a process may import them and then fork."""
    code = """
        import os
        import torch, numba  # what they start themselves does not count
        before = len(os.listdir("/proc/self/task"))
        import modelexport.quantization.kernels.fused
        print(len(os.listdir("/proc/self/task")) - before)
    """
    assert _run(code) == "0"


def test_names_of_formats_need_neither_torch_nor_numba() -> None:
    code = """
        import sys
        from modelexport.quantization import formats
        print(formats.names(), sorted({"torch", "numba", "numpy"} & set(sys.modules)))
    """
    assert _run(code) == "['fp8', 'int4', 'int8', 'none'] []"


_KERNEL = """
from modelexport.quantization.kernels.compiled import _jit

@_jit("int64(int64)")
def doubled(value):
    return 2 * value
"""

_COMPILED_OR_LOADED = """
    import sys
    sys.path.insert(0, "DIRECTORY")
    from kernel_of_a_test import doubled
    stats = doubled.stats
    print(doubled(21), sum(stats.cache_hits.values()), sum(stats.cache_misses.values()), stats.cache_path)
"""


def _compiled_or_loaded(directory: Path, **environment: str) -> str:
    """A kernel like ours in a package that is as good as unwritable (also for root, whom no mode stops)."""
    directory.mkdir(exist_ok=True)
    (directory / "kernel_of_a_test.py").write_text(_KERNEL)
    (directory / "__pycache__").write_text("a file where numba would make its directory")
    code = _COMPILED_OR_LOADED.replace("DIRECTORY", str(directory))
    return _run(code, PYTHONDONTWRITEBYTECODE="1", **environment)


def test_the_cache_goes_to_the_user_where_the_package_cannot_be_written(tmp_path: Path) -> None:
    package, cache = tmp_path / "site", str(tmp_path / "cache")
    assert _compiled_or_loaded(package, XDG_CACHE_HOME=cache).startswith(f"42 0 1 {cache}")
    assert _compiled_or_loaded(package, XDG_CACHE_HOME=cache).startswith(f"42 1 0 {cache}")

    (torn,) = Path(cache).rglob("kernel_of_a_test.doubled-*.nbi")
    torn.write_bytes(torn.read_bytes()[:-20])
    assert _compiled_or_loaded(package, XDG_CACHE_HOME=cache) == "42 0 1 None"  # compiled anew, kept nowhere


def test_kernels_compile_where_no_cache_can_be_had(tmp_path: Path) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("")
    assert _compiled_or_loaded(tmp_path / "site", XDG_CACHE_HOME=str(blocked)) == "42 0 1 None"


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_threads_change_no_byte(threads: int, restored_threads: None) -> None:
    weight = random_weight(1030, 1024, torch.bfloat16)
    for name, group in FORMATS:
        number_format = formats.get(name, group_size=group)
        kernels.set_threads(1)
        alone = number_format.quantise(weight)
        errors = number_format.squared_error(weight, alone)
        values = number_format.dequantise(alone)
        kernels.set_threads(threads)
        assert same_bytes(number_format.quantise(weight), alone)
        assert torch.equal(number_format.squared_error(weight, alone), errors)
        assert torch.equal(number_format.dequantise(alone), values)
        assert torch.equal(number_format.row_amax(weight), weight.float().abs().amax(dim=1))


def test_threads_find_the_first_bad_row(restored_threads: None) -> None:
    weight = random_weight(1030, 1024, torch.bfloat16)
    weight[700, 3] = float("nan")
    weight[1000, 3] = float("nan")
    out = torch.empty_like(weight)
    kernels.set_threads(4)
    assert kernels.copy_finite(weight, out) == 700


def test_callers_in_many_threads_share_the_pool(restored_threads: None) -> None:
    kernels.set_threads(3)
    number_format = formats.get("int8")
    weights = [random_weight(600, 1024, torch.bfloat16, seed) for seed in range(6)]
    expected = [number_format.quantise(weight) for weight in weights]
    with ThreadPoolExecutor(6) as callers:
        stored = list(callers.map(number_format.quantise, weights))
    assert all(same_bytes(one, other) for one, other in zip(stored, expected, strict=True))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_makes_its_own_pool() -> None:
    code = """
        import os, torch, warnings
        from modelexport.quantization import formats, kernels
        warnings.simplefilter("ignore")  # forking with threads, which is the point
        torch.set_num_threads(1)
        kernels.set_threads(2)
        weight = torch.ones(1024, 1024, dtype=torch.bfloat16)
        formats.get("int8").quantise(weight)
        child = os.fork()
        if child == 0:
            stored = formats.get("int8").quantise(weight)
            os._exit(0 if bool((stored["weight"] == 127).all()) else 1)
        print(os.waitpid(child, 0)[1])
    """
    assert _run(code, OMP_NUM_THREADS="1") == "0"


def test_threads_must_be_one_or_more() -> None:
    with pytest.raises(ValueError, match="is 0; it must be at least 1"):
        kernels.set_threads(0)
