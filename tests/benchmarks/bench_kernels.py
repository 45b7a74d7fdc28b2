"""How fast every number format's kernels are, beside the plain torch reference, compressed-tensors and a memcpy.

    python tests/benchmarks/bench_kernels.py [--threads 2] [--rows 4096] [--cols 4096] [--only int8 fp8] [--repeat 7]

GB/s of source bytes (2 per bfloat16 weight) by the wall clock, the best of several runs, everything in one run and with
the same number of threads: ours, torch's own in the reference (the same arithmetic in plain torch, a block of rows at a
time) and in compressed-tensors' compressor (given its scales: it does not look for them), and memcpy. "/ memcpy" and
"/ theirs" are ours divided by those. "mse" searches the scales. Peaks are of memory that quantising takes besides the
weight and the result. Last, what importing the kernels costs when they are compiled and when they come from numba's
cache.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from torch import Tensor

from modelexport.quantization import formats, kernels
from modelexport.quantization.formats.base import NumberFormat

COLUMNS = (
    "quantise",
    "/memcpy",
    "torch",
    "theirs",
    "/theirs",
    "mse",
    "torch",
    "dequant.",
    "error",
    "peak MiB",
    "theirs",
)


def best(work: Callable[[], object], repeat: int) -> float:
    """The shortest of ``repeat`` runs, in seconds; one more comes first, for the caches."""
    work()
    shortest = float("inf")
    for _ in range(repeat):
        began = time.perf_counter()
        work()
        shortest = min(shortest, time.perf_counter() - began)
    return shortest


def memcpy(weight: Tensor, threads: int) -> Callable[[], object]:
    """Copies a tensor's bytes, a part per thread."""
    source, target = (memoryview(t.view(torch.uint8).numpy().reshape(-1)) for t in (weight, torch.empty_like(weight)))
    pool, cuts = ThreadPoolExecutor(threads), [len(source) * part // threads for part in range(threads + 1)]
    views = [
        (target[start:stop], source[start:stop]) for start, stop in zip(cuts[:-1], cuts[1:], strict=True)
    ]  # ctypes releases the interpreter's lock, slices of a memoryview do not
    return lambda: list(pool.map(lambda pair: _copy(*pair), views))


def _copy(target: memoryview, source: memoryview) -> None:
    torch.frombuffer(target, dtype=torch.uint8).copy_(torch.frombuffer(source, dtype=torch.uint8))


def peak(work: Callable[[], object]) -> float:
    """By how many MiB this process's memory grows at most while ``work`` runs, as Linux counts it."""
    work()
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    kept = work()
    grown = _status("VmHWM") - before
    del kept
    return grown / 1024


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key))


def their_compressor(number_format: NumberFormat, weight: Tensor, stored: dict[str, Tensor]) -> Callable[[], object]:
    """compressed-tensors quantising and packing the weight, with scales that it takes from ours."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    scheme = QuantizationScheme.model_validate(number_format.config_group())
    compressor = BaseCompressor.get_value_from_registry(number_format.checkpoint_format)
    state = {**compressor.decompress(dict(stored), scheme), "weight": weight}
    return lambda: compressor.compress(dict(state), scheme)


class Bench:
    """One weight, measured in every format."""

    def __init__(self, weight: Tensor, repeat: int) -> None:
        self.weight, self.repeat = weight, repeat
        self.size = weight.numel() * weight.element_size()

    def rate(self, work: Callable[[], object], repeat: int | None = None) -> float:
        """GB/s of the weight's bytes."""
        return self.size / best(work, repeat or self.repeat) / 1e9

    def reference(self, work: Callable[[], object]) -> float:
        """The same with the plain torch kernels, once."""
        os.environ["MODELEXPORT_KERNELS"] = "reference"
        try:
            return self.rate(work, 1)
        finally:
            del os.environ["MODELEXPORT_KERNELS"]

    def row(self, name: str, copied: float) -> str:
        """A format's line of the table."""
        plain, searching = formats.get(name), formats.get(name, observer="mse")
        inputs = 3.0 if plain.has_static_inputs else None
        stored = plain.quantise(self.weight, inputs=inputs)

        def quantise(number_format: NumberFormat = plain) -> object:
            return number_format.quantise(self.weight, inputs=inputs, out=stored)

        ours = self.rate(quantise)
        figures = [f"{ours:.2f}", f"{ours / copied:.2f}", f"{self.reference(quantise):.2f}"]
        theirs = their_peak = None
        if plain.quantised:
            compress = their_compressor(plain, self.weight, stored)
            theirs, their_peak = self.rate(compress, 1), peak(compress)
        figures += [f"{theirs:.2f}", f"{ours / theirs:.0f}"] if theirs else ["-", "-"]
        if plain.quantised:
            figures.append(f"{self.rate(lambda: quantise(searching), 2):.2f}")
            figures.append(f"{self.reference(lambda: quantise(searching)):.3f}")
        else:
            figures += ["-", "-"]
        quantise()
        figures.append(f"{self.rate(lambda: plain.dequantise(stored, dtype=self.weight.dtype), 3):.2f}")
        figures.append(f"{self.rate(lambda: plain.squared_error(self.weight, stored)):.2f}")
        figures += [f"{peak(quantise):.0f}", "-" if their_peak is None else f"{their_peak:.0f}"]
        return f"{name:13}" + "".join(f"{figure:>10}" for figure in figures)


def bench_import() -> None:
    """Seconds to import the kernels in a fresh process (torch and numba already imported)."""
    code = (
        "import importlib, time, torch, numba\n"
        "from modelexport.quantization import kernels\n"
        "for name, observer in (('int8', 'amax'), ('int4-asym', 'amax'), ('fp8-block', 'amax'), ('int8', 'mse'),"
        " ('nvfp4', 'amax')):\n"
        "    w = time.perf_counter(); c = time.process_time()\n"
        "    kernels.warm(name, observer)\n"
        "    print(f'{name} {observer}: {time.perf_counter() - w:.2f} s ({time.process_time() - c:.2f} s CPU)', end='; ')"
    )
    print("\nImporting what each needs further:")
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "NUMBA_CACHE_DIR": cache, "PYTHONPATH": str(ROOT)}
        for what in ("compiled", "from the cache"):
            done = subprocess.run(
                [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
            )
            print(f"  {what}: {done.stdout.strip().rstrip(';')}")


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--cols", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=1, help="threads of kernels, torch and memcpy (default: 1)")
    parser.add_argument("--repeat", type=int, default=7, help="runs of which the best counts (default: 7)")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--only", nargs="+", choices=formats.names(), default=formats.names(), metavar="FORMAT")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    kernels.set_threads(arguments.threads)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(arguments.rows, arguments.cols, generator=generator).to(getattr(torch, arguments.dtype))
    bench = Bench(weight, arguments.repeat)
    print(f"{kernels.backend()}, torch {torch.__version__}, {arguments.threads} thread(s); GB/s of source bytes")
    copied = bench.rate(memcpy(weight, arguments.threads), 3 * arguments.repeat)
    amax = bench.rate(lambda: kernels.row_amax(weight))
    print(
        f"{list(weight.shape)} {arguments.dtype}, {bench.size / 2**20:.0f} MiB: memcpy {copied:.1f}, row_amax {amax:.1f}"
    )
    print(" " * 13 + "".join(f"{column:>10}" for column in COLUMNS))
    for name in arguments.only:
        print(bench.row(name, copied), flush=True)
    bench_import()


if __name__ == "__main__":
    main()
