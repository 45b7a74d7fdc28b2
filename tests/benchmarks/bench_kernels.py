"""How fast the kernels are, beside plain torch and a memcpy of the same bytes, in one run and on one core.

    python tests/benchmarks/bench_kernels.py [--cols 2048 8192] [--megabytes 64] [--threads 2] [--dtype bfloat16]

GB/s of source bytes (2 per bfloat16 weight), the best of several runs. One core's figures are by the thread's CPU
time, so that a busy machine disturbs them little; with ``--threads`` they are by the wall clock. "plain torch" is
what one writes first: whole-tensor operations without blocks or fusing. Last, what importing the kernels costs
when they are compiled and when they come from numba's cache.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from torch import Tensor

from modelexport.quantization import formats, kernels
from modelexport.quantization.formats.base import NumberFormat

GOALS = {"int8": 6.0, "int4": 4.0, "fp8": 3.0}
ERROR_GOAL = 4.0


def best(work: Callable[[], object], clock: Callable[[], float], repeat: int) -> float:
    """The shortest of ``repeat`` runs, in seconds; one more comes first, for the caches."""
    work()
    shortest = float("inf")
    for _ in range(repeat):
        began = clock()
        work()
        shortest = min(shortest, clock() - began)
    return shortest


def plain_quantise(number_format: NumberFormat, weight: Tensor) -> list[Tensor]:
    """The format in whole-tensor torch operations."""
    if number_format.name == "none":
        return [weight.clone(), torch.isfinite(weight).all()]
    width = number_format.group_size or weight.shape[1]
    groups = weight.float().unflatten(1, (-1, width))
    limit = {"int8": 127.0, "fp8": 448.0, "int4": 7.5}[number_format.name]
    scale = (groups.abs().amax(-1, keepdim=True) / limit).to(weight.dtype)
    ratio = (groups / scale.float()).flatten(1)
    if number_format.name == "fp8":
        return [ratio.clamp(-448.0, 448.0).to(torch.float8_e4m3fn), scale]
    if number_format.name == "int8":
        return [ratio.round().clamp(-128.0, 127.0).to(torch.int8), scale]
    codes = ratio.round().clamp(-8.0, 7.0).to(torch.int32).add(8).unflatten(1, (-1, 8))
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    return [(codes << shifts).sum(-1).to(torch.int32), scale]


def plain_error(number_format: NumberFormat, weight: Tensor, stored: dict[str, Tensor]) -> Tensor:
    """sum((w - dequantised)^2) and sum(w^2) per row, in whole-tensor torch operations."""
    wide = weight.double()
    error = wide - number_format.dequantise(stored).double()
    return torch.stack([error.square().sum(1), wide.square().sum(1)], dim=1)


def bench_shape(cols: int, arguments: argparse.Namespace) -> None:
    """One table: every format on a weight of so many columns."""
    dtype = getattr(torch, arguments.dtype)
    rows = max(1, arguments.megabytes * 2**20 // (cols * dtype.itemsize))
    weight = torch.randn(rows, cols, generator=torch.Generator().manual_seed(0)).to(dtype)
    size = weight.numel() * weight.element_size()
    clock = time.thread_time if arguments.threads == 1 else time.perf_counter

    def rate(work: Callable[[], object], repeat: int = arguments.repeat) -> float:
        return size / best(work, clock, repeat) / 1e9

    target = torch.empty_like(weight)
    source, copy = (memoryview(tensor.view(torch.uint8).numpy().reshape(-1)) for tensor in (weight, target))
    amax, memcpy = rate(lambda: kernels.row_amax(weight)), rate(lambda: copy.__setitem__(slice(None), source))
    print(f"\n[{rows}, {cols}] {arguments.dtype}, {size / 2**20:.0f} MiB: memcpy {memcpy:.1f} GB/s, ", end="")
    print(f"row_amax {amax:.1f} GB/s")
    print(f"{'format':8}{'quantise':>10}{'torch':>8}{'goal':>6}{'error':>10}{'torch':>8}{'goal':>6}{'dequantise':>12}")
    for name in formats.names():
        number_format = formats.get(name)
        stored = number_format.quantise(weight)
        figures = (
            rate(lambda f=number_format, out=stored: f.quantise(weight, out=out)),
            rate(lambda f=number_format: plain_quantise(f, weight), 2),
            rate(lambda f=number_format, out=stored: f.squared_error(weight, out)),
            rate(lambda f=number_format, out=stored: plain_error(f, weight, out), 2),
            rate(lambda f=number_format, out=stored: f.dequantise(out, dtype=dtype), 2),
        )
        quantise, torch_quantise, error, torch_error, dequantise = (f"{figure:.2f}" for figure in figures)
        goal = f"{GOALS[name]:.0f}" if name in GOALS else "-"
        print(
            f"{name:8}{quantise:>10}{torch_quantise:>8}{goal:>6}{error:>10}{torch_error:>8}{ERROR_GOAL:>6.0f}"
            f"{dequantise:>12}"
        )


def bench_import() -> None:
    """Seconds to import the fused kernels in a fresh process (torch and numba already imported)."""
    code = (
        "import time, torch, numba; w = time.perf_counter(); c = time.process_time()\n"
        "import modelexport.quantization.kernels.fused\n"
        "print(f'{time.perf_counter() - w:.2f} s wall, {time.process_time() - c:.2f} s CPU')"
    )
    print()
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "NUMBA_CACHE_DIR": cache, "PYTHONPATH": str(ROOT)}
        for what in ("compiled", "from the cache"):
            done = subprocess.run(
                [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
            )
            print(f"import of the fused kernels, {what}: {done.stdout.strip()}")


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cols", type=int, nargs="+", default=[512, 2048, 8192, 14336])
    parser.add_argument("--megabytes", type=int, default=64, help="size of the weight (default: 64)")
    parser.add_argument("--threads", type=int, default=1, help="kernel threads (default: 1)")
    parser.add_argument("--repeat", type=int, default=10, help="runs of which the best counts (default: 10)")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    kernels.set_threads(arguments.threads)
    print(f"{kernels.backend()}, torch {torch.__version__}, {arguments.threads} thread(s); GB/s of source bytes")
    for cols in arguments.cols:
        bench_shape(cols, arguments)
    bench_import()


if __name__ == "__main__":
    main()
