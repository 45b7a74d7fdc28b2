"""Which kernels run, in how many threads, from which cache: never what they compute."""

from __future__ import annotations

import os
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import modelexport
from modelexport.errors import UsageError
from modelexport.quantization import formats, kernels
from modelexport.quantization.kernels import compiled
from tests.helpers.warm import run_warm
from tests.quantization._weights import FORMATS, quantise, random_weight, same_bytes

PACKAGE = Path(modelexport.__file__).parent


@pytest.fixture
def restored_threads():
    yield
    kernels.set_threads(1)


def _run(code: str, imported: str = "torch", **environment: str) -> str:
    """Runs code in an interpreter that has imported one thing and sees the package; what it printed."""
    env = {**os.environ, "PYTHONPATH": str(PACKAGE.parent), **environment}
    result = run_warm("-c", textwrap.dedent(code), env=env, imported=imported)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_the_environment_forces_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELEXPORT_KERNELS", "reference")
    assert kernels.backend() == ("reference", "MODELEXPORT_KERNELS=reference")
    monkeypatch.setenv("MODELEXPORT_KERNELS", "fused")
    assert kernels.backend().name == "fused"
    monkeypatch.setenv("MODELEXPORT_KERNELS", "quick")
    with pytest.raises(UsageError, match="'quick': set it to 'reference', 'fused' or 'triton'"):
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
            stored.append(quantise(number_format, weight))
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


def test_the_kernels_of_other_devices() -> None:
    """Triton's on CUDA; without it, or where it cannot start, the reference, and why."""
    code = """
        import os, sys, types, warnings
        import torch
        from modelexport.errors import UsageError
        from modelexport.quantization import kernels

        def on(kind, forced="", **modules):
            os.environ["MODELEXPORT_KERNELS"] = forced
            sys.modules.update(modules)
            kernels._backend_on.cache_clear()
            try:
                return str(kernels.backend_on(kind))
            except UsageError as error:
                return str(error)

        class Driver:
            active = property(lambda self: 1 / 0)

        there, runtime = types.ModuleType("triton"), types.ModuleType("triton.runtime")
        there.__version__, runtime.driver, there.runtime = "3.0", types.SimpleNamespace(active=None), runtime
        runtime.driver.active = types.SimpleNamespace(get_current_target=lambda: "sm_90")
        modules = {"triton": there, "triton.runtime": runtime}
        for line in (on("cuda", **modules), on("fakegpu"), on("cuda", "reference"), on("cuda", "quick")):
            print(line)
        runtime.driver = Driver()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            print(on("cuda"))
            print(said[0].message)
        print(on("cuda", "triton"))
        print(on("cuda", triton=None))
        print(on("cuda", "triton"))
    """
    lines = _run(code).splitlines()
    starts = (
        "triton kernels (cuda tensors, triton 3.0)",
        "reference kernels (there are no others for fakegpu tensors)",
        "reference kernels (MODELEXPORT_KERNELS=reference)",
        "MODELEXPORT_KERNELS is 'quick': set it to",
        "reference kernels (triton cannot start: ",
        "plain torch kernels on cuda, which are slower: triton cannot start: ",
        "MODELEXPORT_KERNELS=triton, but triton cannot start: ",
        "reference kernels (triton cannot be imported: ",
        "MODELEXPORT_KERNELS=triton, but triton cannot be imported: ",
    )
    assert [line[: len(start)] for line, start in zip(lines, starts, strict=True)] == list(starts)


@pytest.mark.parametrize(
    ("interpreted", "said"), [("", "set TRITON_INTERPRET=1, too"), ("1", "triton cannot be imported")]
)
def test_cpu_tensors_take_tritons_kernels_by_its_interpreter_alone(interpreted: str, said: str) -> None:
    code = """
        import sys
        sys.modules["triton"] = None
        from modelexport.errors import UsageError
        from modelexport.quantization import kernels
        try:
            kernels.backend()
        except UsageError as error:
            print(error)
    """
    assert said in _run(code, MODELEXPORT_KERNELS="triton", TRITON_INTERPRET=interpreted)


def test_nothing_is_compiled_where_there_is_little_to_do() -> None:
    """Not before as many bytes as are little have gone through, nor where a job says that there will be no more."""
    code = """
        import sys, torch
        from modelexport.quantization import formats, kernels
        weight = torch.ones(kernels.LITTLE // 4096, 1024)
        rounded = []
        kernels.expect(kernels.LITTLE)
        while "numba" not in sys.modules:
            rounded.append(formats.get("int8").quantise(weight[:, :256]))
        print(kernels.LITTLE // 2 <= len(rounded) * weight.nbytes // 4 <= 8 * kernels.LITTLE)
        print(all(torch.equal(a, b) for a, b in zip(rounded[0].values(), rounded[-1].values())))
    """
    assert _run(code).split() == ["True", "True"]
    assert kernels.is_little(kernels.LITTLE)
    assert not kernels.is_little(kernels.LITTLE + 1)
    assert not kernels.is_little(None)


def test_a_large_job_begins_with_compiled_kernels() -> None:
    code = """
        import sys, torch
        from modelexport.quantization import formats, kernels
        kernels.expect(kernels.LITTLE + 1)
        formats.get("int8").quantise(torch.ones(2, 128))
        print("modelexport.quantization.kernels.fused" in sys.modules)
    """
    assert _run(code) == "True"


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


def test_what_is_preloaded_is_all_that_a_format_needs() -> None:
    """In one process for each: what ``load_kernels`` imports leaves nothing for a format's first use to import."""
    code = """
        import os, sys
        import torch
        import modelexport.quantization.kernels.fused
        from modelexport.quantization import formats, kernels
        cases = [("fp8", "amax"), ("int8", "mse"), ("int4-asym", "mse"), ("fp8-block", "amax"), ("nvfp4", "mse")]
        for name, observer in cases:
            child = os.fork()
            if child == 0:
                number_format = formats.get(name, observer=observer)
                formats.load_kernels(name, observer)
                before = set(sys.modules)
                weight = torch.ones(2, 128)
                stored = number_format.quantise(weight, inputs=1.0 if number_format.has_static_inputs else None)
                number_format.dequantise(stored), number_format.squared_error(weight, stored)
                new = [module for module in set(sys.modules) - before if "quantization.kernels" in module]
                further = {"compiled_" + part for part in ("affine", "blocks", "search")} - set(number_format.kernels)
                extra = {f"{kernels.__name__}.{part}" for part in further} & set(sys.modules)
                os.write(2, f"{name}: missing {new}, not needed {extra}".encode() if new or extra else b"")
                os._exit(bool(new or extra))
            assert os.waitpid(child, 0)[1] == 0, name
    """
    _run(code)


def test_names_of_formats_need_neither_torch_nor_numba() -> None:
    code = """
        import sys
        from modelexport.quantization import formats
        print(formats.names(), sorted({"torch", "numba", "numpy"} & set(sys.modules)))
    """
    assert _run(code, "json") == f"{formats.names()} []"


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


def _compiled_or_loaded(directory: Path, before: str = "", **environment: str) -> str:
    """A kernel like ours in a package that is as good as unwritable (also for root, whom no mode stops)."""
    directory.mkdir(exist_ok=True)
    (directory / "kernel_of_a_test.py").write_text(_KERNEL)
    (directory / "__pycache__").write_text("a file where numba would make its directory")
    code = before + _COMPILED_OR_LOADED.replace("DIRECTORY", str(directory)).replace("\n    ", "\n")
    return _run("import sys; sys.dont_write_bytecode = True\n" + code, "numba.extending", **environment)


def test_the_cache_goes_to_the_user_where_the_package_cannot_be_written(tmp_path: Path) -> None:
    package, cache = tmp_path / "site", str(tmp_path / "cache")
    assert _compiled_or_loaded(package, XDG_CACHE_HOME=cache).startswith(f"42 0 1 {cache}")
    assert _compiled_or_loaded(package, XDG_CACHE_HOME=cache).startswith(f"42 1 0 {cache}")

    (torn,) = Path(cache).rglob("kernel_of_a_test.doubled_*.nbi")
    torn.write_bytes(torn.read_bytes()[:-20])
    temporary = _private(tmp_path / "tmp")
    again = _compiled_or_loaded(package, XDG_CACHE_HOME=cache, TMPDIR=str(temporary))
    assert again.startswith(f"42 0 1 {temporary}")  # compiled anew, kept elsewhere


def test_a_change_of_any_file_of_kernels_invalidates_the_cache(tmp_path: Path) -> None:
    """numba sees only the file of the kernel itself; helpers are in others, whose content is in the kernel's name."""
    assert compiled.stamp_of(PACKAGE / "quantization" / "kernels") == compiled.STAMP
    source = tmp_path / "kernels"
    source.mkdir()
    for name in ("compiled.py", "compiled_search.py"):
        (source / name).write_text("one")
    stamps = [compiled.stamp_of(source)]
    (source / "compiled_search.py").write_text("two")
    stamps.append(compiled.stamp_of(source))
    (source / "compiled_search.py").rename(source / "compiled_blocks.py")
    stamps.append(compiled.stamp_of(source))
    (source / "microscaling_compiled.py").write_text("three")
    stamps.append(compiled.stamp_of(source))
    assert len(set(stamps)) == 4

    package, cache = tmp_path / "site", str(tmp_path / "cache")
    assert _compiled_or_loaded(package, XDG_CACHE_HOME=cache).startswith("42 0 1 ")
    changed = "from modelexport.quantization.kernels import compiled; compiled.STAMP = 'other'"
    assert _compiled_or_loaded(package, before=changed, XDG_CACHE_HOME=cache).startswith("42 0 1 ")
    assert _compiled_or_loaded(package, XDG_CACHE_HOME=cache).startswith("42 1 0 ")


def _private(directory: Path) -> Path:
    directory.mkdir(0o700)
    return directory


def _blocked(directory: Path) -> str:
    directory.write_text("")
    return str(directory)


def test_the_cache_is_temporary_where_the_user_has_none(tmp_path: Path) -> None:
    where = {"XDG_CACHE_HOME": _blocked(tmp_path / "blocked"), "TMPDIR": str(_private(tmp_path / "tmp"))}
    assert _compiled_or_loaded(tmp_path / "site", **where).startswith(f"42 0 1 {where['TMPDIR']}/modelexport-kernels-")
    assert _compiled_or_loaded(tmp_path / "site", **where).startswith("42 1 0 ")


@pytest.mark.parametrize("writable", ["tmp", "tmp/modelexport-kernels-{user}"])
def test_no_cache_is_loaded_that_others_can_write(tmp_path: Path, writable: str) -> None:
    """Kernels are compiled all the same."""
    where = {"XDG_CACHE_HOME": _blocked(tmp_path / "blocked"), "TMPDIR": str(_private(tmp_path / "tmp"))}
    open_to_all = tmp_path / writable.format(user=os.geteuid())
    open_to_all.mkdir(exist_ok=True)
    open_to_all.chmod(0o777)
    assert _compiled_or_loaded(tmp_path / "site", **where) == "42 0 1 None"


def test_threads_find_the_first_bad_row(restored_threads: None) -> None:
    weight = random_weight(1030, 1024, torch.bfloat16)
    weight[700, 3] = float("nan")
    weight[1000, 3] = float("nan")
    out = torch.empty_like(weight)
    kernels.set_threads(4)
    assert kernels.copy_finite(weight, out) == 700
    blocks, scale = torch.empty(1030, 1024, dtype=torch.float8_e4m3fn), torch.empty(9, 8, dtype=torch.bfloat16)
    assert kernels.quantise_blocks(weight, 128, None, blocks, scale, 448.0) == 700


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


def test_kernels_are_foretold_without_importing_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MODELEXPORT_KERNELS", raising=False)
    monkeypatch.setattr(kernels, "_backend", lambda forced: pytest.fail("imports numba"))
    assert kernels.backend(1 << 40, foretold=True).name == "fused"
    found = kernels.Backend("reference", "there is no numba")
    monkeypatch.setattr(kernels, "_backend", lambda forced: found)
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: None)
    assert kernels.backend(1 << 40, foretold=True) is found
