"""How fast every number format's kernels are, beside the plain torch reference, compressed-tensors and a memcpy.

    python tests/benchmarks/bench_kernels.py [--threads 2] [--rows 4096] [--cols 4096] [--only int8 fp8] [--repeat 7]

GB/s of source bytes (2 per bfloat16 weight) by the wall clock, the best of several runs, everything in one run and with
the same number of threads: ours, torch's own in the reference (the same arithmetic in plain torch, a block of rows at a
time) and in compressed-tensors' compressor (given its scales: it does not look for them), and memcpy of the weight,
in turns with ours. "/memcpy" and "/theirs" are ours divided by those. "mse" searches the scales. All write into memory
that has been written before, but for theirs. Peaks are of memory that quantising takes besides the weight (and, of
ours, the result). Last, what importing the kernels costs when they are compiled and when they come from numba's cache.
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
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
from torch import Tensor

from modelexport.quantization import formats, kernels
from modelexport.quantization.formats.base import NumberFormat
from tests.benchmarks._measuring import add_write_option, written

COLUMNS = ("memcpy", "quantise", "/memcpy", "torch", "theirs", "/theirs", "mse", "torch", "dequant.", "error")
PEAKS = ("peak MiB", "theirs")


def best(repeat: int, *works: Callable[[], object]) -> list[float]:
    """Of each, the shortest of ``repeat`` runs, in seconds, taken in turns; one more comes first, for the caches."""
    shortest = [float("inf")] * len(works)
    for work in works:
        work()
    for _ in range(repeat):
        for number, work in enumerate(works):
            began = time.perf_counter()
            work()
            shortest[number] = min(shortest[number], time.perf_counter() - began)
    return shortest


def memcpy(weight: Tensor, copy: Tensor, threads: int) -> Callable[[], object]:
    """Copies a tensor's bytes, a part per thread."""
    source, target = (tensor.view(torch.uint8).view(-1).numpy() for tensor in (weight, copy))
    pool, cuts = ThreadPoolExecutor(threads), [len(source) * part // threads for part in range(threads + 1)]
    parts = [(target[start:stop], source[start:stop]) for start, stop in pairwise(cuts)]
    return lambda: list(pool.map(lambda part: np.copyto(*part), parts))


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

    def __init__(self, weight: Tensor, threads: int, repeat: int) -> None:
        self.weight, self.repeat = weight, repeat
        self.size, self.target = weight.numel() * weight.element_size(), torch.empty_like(weight)
        self.copy = memcpy(weight, self.target, threads)

    def rates(self, repeat: int, *works: Callable[[], object]) -> list[float]:
        """GB/s of the weight's bytes."""
        return [self.size / seconds / 1e9 for seconds in best(repeat, *works)]

    def reference(self, *works: Callable[[], object]) -> list[float]:
        """The same with the plain torch kernels, once."""
        os.environ["MODELEXPORT_KERNELS"] = "reference"
        try:
            return self.rates(1, *works)
        finally:
            del os.environ["MODELEXPORT_KERNELS"]

    def row(self, name: str) -> str:
        """A format's line of the table."""
        plain, searching, weight = formats.get(name), formats.get(name, observer="mse"), self.weight
        inputs = 3.0 if plain.has_static_inputs else None
        stored, searched = (number_format.quantise(weight, inputs=inputs) for number_format in (plain, searching))

        def quantise() -> object:
            return plain.quantise(weight, inputs=inputs, out=stored)

        def search() -> object:
            return searching.quantise(weight, inputs=inputs, out=searched)

        copied, ours, error, dequantised = self.rates(
            self.repeat,
            self.copy,
            quantise,
            lambda: plain.squared_error(weight, stored),
            lambda: plain._dequantise(stored, self.target),
        )
        figures = [f"{copied:.1f}", f"{ours:.1f}", f"{ours / copied:.2f}"]
        if plain.quantised:
            compress = their_compressor(plain, weight, stored)
            torchs, torchs_search = self.reference(quantise, search)
            theirs, mse = self.rates(2, compress, search)
            figures += [f"{torchs:.2f}", f"{theirs:.2f}", f"{ours / theirs:.0f}", f"{mse:.2f}", f"{torchs_search:.3f}"]
            peaks = [f"{peak(quantise):.0f}", f"{peak(compress):.0f}"]
        else:
            figures += [f"{self.reference(quantise)[0]:.2f}", *"----"]
            peaks = [f"{peak(quantise):.0f}", "-"]
        figures += [f"{dequantised:.1f}", f"{error:.1f}", *peaks]
        return f"{name:13}" + "".join(f"{figure:>9}" for figure in figures)


def bench_import() -> None:
    """Seconds to import the kernels in a fresh process (torch and numba already imported)."""
    code = (
        "import time, torch, numba\n"
        "from modelexport.quantization import formats\n"
        "import modelexport.quantization.formats.base\n"
        "for name, observer in (('int8', 'amax'), ('int4-asym', 'amax'), ('fp8-block', 'amax'), ('int8', 'mse'),"
        " ('nvfp4', 'amax')):\n"
        "    w = time.perf_counter(); c = time.process_time()\n"
        "    formats.load_kernels(name, observer)\n"
        "    w, c = time.perf_counter() - w, time.process_time() - c\n"
        "    print(f'{name} {observer}: {w:.2f} s ({c:.2f} s CPU)', end='; ')"
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--cols", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=1, help="threads of kernels, torch and memcpy (default: 1)")
    parser.add_argument("--repeat", type=int, default=7, help="runs of which the best counts (default: 7)")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--only", nargs="+", choices=formats.names(), default=formats.names(), metavar="FORMAT")
    add_write_option(parser)
    arguments = parser.parse_args()
    with written(__file__, arguments.write):
        measure(arguments)


def measure(arguments: argparse.Namespace) -> None:
    """Prints the table, and what importing costs."""
    torch.set_num_threads(arguments.threads)
    kernels.set_threads(arguments.threads)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(arguments.rows, arguments.cols, generator=generator).to(getattr(torch, arguments.dtype))
    bench = Bench(weight, arguments.threads, arguments.repeat)
    print(f"{kernels.backend()}, torch {torch.__version__}, {arguments.threads} thread(s); GB/s of source bytes")
    (amax,) = bench.rates(arguments.repeat, lambda: kernels.row_amax(weight))
    print(f"{list(weight.shape)} {arguments.dtype}, {bench.size / 2**20:.0f} MiB: row_amax {amax:.1f}")
    print(" " * 13 + "".join(f"{column:>9}" for column in (*COLUMNS, *PEAKS)))
    for name in arguments.only:
        print(bench.row(name), flush=True)
    bench_import()


if __name__ == "__main__":
    main()
