"""Seconds of each stage of an export, a GB of the source, beside the speed of what each stage is made of, in one run.

    python tests/benchmarks/bench_stages.py                             dense and experts, 2.5 GB, fp8 and int4
    python tests/benchmarks/bench_stages.py --gigabytes 16 --quant int4

The sources of bench_scale.py. Every export is one process with one thread for arithmetic (``--tp 1``), in which the
functions of the stages are timed: CPU seconds by the clock of the thread that calls them, and seconds by the wall's,
without those of stages that they call in turn. Reading, rounding, writing and reading back go on side by side, so that
the walls of stages add up to more than the whole; what no stage accounts for is records, and the interpreter between
calls.

Floors: the same machine's speed at the simplest program of the kind, in the same run: reading files from the page
cache into the same memory again (``pread``), writing memory into blocks that are reserved (``pwrite``), reading from
the disk past the cache and writing with ``fsync`` at the end, SHA-256, CRC-32, and copying from memory to memory.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from modelexport.checkpoints import raw_io
from modelexport.system.tables import table
from tests.benchmarks._measuring import add_write_option, written
from tests.benchmarks.bench_export import warm
from tests.benchmarks.bench_scale import KINDS, make_source

REPOSITORY = sys.path[0]
BLOCK = 64 << 20
"""Bytes that a floor works on: more than caches hold."""
STAGES = {
    "import, plan": "arithmetic",
    "read": "pages",
    "round": "arithmetic",
    "errors of rounding": "arithmetic",
    "CRC-32": "CRC-32",
    "write": "pages",
    "flush": "disk",
    "read back": "pages",
    "SHA-256": "SHA-256",
    "CRC-32 of it": "CRC-32",
}
"""Stages, in their order, and what bounds each."""


# ------------------------------------------------------------------------------------------------- one timed export


class Clock:
    """Adds up the seconds that threads spend in functions, without those of timed functions that they call."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}
        self._inside = threading.local()

    def time(self, owner: Any, name: str, stage: Callable[[], str]) -> None:
        """Replaces a function by itself, timed; ``stage`` says what it counts as now."""
        plain = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            stack = self._inside.__dict__.setdefault("stack", [])
            stack.append([0.0, 0.0])
            wall, cpu = time.perf_counter(), time.thread_time()
            try:
                return plain(*args, **kwargs)
            finally:
                spent = (time.perf_counter() - wall, time.thread_time() - cpu)
                below = stack.pop()
                own = self.seconds.setdefault(stage(), [0.0, 0.0])
                for i in (0, 1):
                    own[i] += spent[i] - below[i]
                    if stack:
                        stack[-1][i] += spent[i]

        setattr(owner, name, timed)


def timed_export(source: str, quant: str, out: str) -> dict[str, Any]:
    """Exports in this process; returns stage -> (wall, CPU) seconds."""
    began = time.perf_counter()
    import modelexport
    from modelexport.checkpoints.safetensors.reader import Reader
    from modelexport.checkpoints.safetensors.writer import Writer
    from modelexport.exporting import output, rank, run
    from modelexport.inspection.verify import audit
    from modelexport.quantization import formats

    clock, here = Clock(), threading.local()
    number_format = type(formats.get(quant))
    clock.time(Reader, "read", lambda: "read back" if hasattr(here, "checks") else "read")
    for name in ("error_sums", "error_sums_of"):
        clock.time(number_format, name, lambda: "errors of rounding")
    clock.time(rank.RankExport, "quantise", lambda: "round")
    clock.time(output, "_crc32", lambda: "CRC-32")
    clock.time(Writer, "write_pieces", lambda: "write")
    clock.time(output.ShardWriter, "flush", lambda: "flush")
    check = audit._check

    def checked(*args: Any, **kwargs: Any) -> Any:
        here.checks = True
        try:
            return check(*args, **kwargs)
        finally:
            del here.checks

    audit._check = checked  # type: ignore[assignment]
    audit.hashlib = _Timed(clock, hashlib, "sha256", "SHA-256")  # type: ignore[attr-defined]
    audit.zlib = _Timed(clock, zlib, "crc32", "CRC-32 of it")  # type: ignore[attr-defined]
    plain_job_of = run.job_of

    def job_of(*args: Any, **kwargs: Any) -> Any:
        clock.seconds["import, plan"] = [time.perf_counter() - began, time.process_time()]
        return plain_job_of(*args, **kwargs)

    run.job_of = job_of
    modelexport.export(model=source, quant=quant, out=out, evaluate=False, quiet=True)
    return {"stages": clock.seconds, "whole": [time.perf_counter() - began, time.process_time()]}


class _Timed:
    """A module, one function of which is timed; of ``hashlib`` what it returns is, where it takes bytes."""

    def __init__(self, clock: Clock, module: Any, name: str, stage: str) -> None:
        self._module = module
        if module is zlib:
            self.crc32 = zlib.crc32
            clock.time(self, name, lambda: stage)
        else:
            self._clock, self._stage = clock, stage

    def sha256(self) -> Any:
        """An object as ``hashlib.sha256()`` returns it, timed."""
        digest = _Digest()
        self._clock.time(digest, "update", lambda: self._stage)
        return digest


class _Digest:
    def __init__(self) -> None:
        digest = hashlib.sha256()
        self.update, self.hexdigest = digest.update, digest.hexdigest


# -------------------------------------------------------------------------------------------------------- the floors


def floors(scratch: Path, gigabytes: float) -> dict[str, float]:
    """GB/s of the simplest programs, of each the best of several runs."""
    block = memoryview(bytearray(os.urandom(BLOCK)))
    other = memoryview(bytearray(BLOCK))
    path = scratch / "floor"
    found: dict[str, float] = {}

    def best(name: str, work: Callable[[], object], times: int = 5, nbytes: int = BLOCK) -> None:
        took = []
        for _ in range(times):
            began = time.perf_counter()
            work()
            took.append(time.perf_counter() - began)
        found[name] = nbytes / min(took) / 1e9

    best("memory to memory", lambda: other.__setitem__(slice(None), block))
    best("SHA-256", lambda: hashlib.sha256(block))
    best("CRC-32", lambda: zlib.crc32(block))
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        raw_io.allocate(fd, BLOCK)
        took = []
        for _ in range(5):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            began = time.perf_counter()
            raw_io.write_exactly(fd, block, 0)
            took.append(time.perf_counter() - began)
            os.fsync(fd)
        found["page cache, write"] = BLOCK / min(took) / 1e9
        best("page cache, read", lambda: raw_io.read_exactly(fd, other, 0))
        size = int(min(4.0, max(1.0, gigabytes)) * 1e9) // BLOCK * BLOCK

        def write_all() -> None:
            for at in range(0, size, BLOCK):
                raw_io.write_exactly(fd, block, at)
            os.fsync(fd)

        raw_io.allocate(fd, size)
        best("disk, write and fsync", write_all, 2, size)
        direct, room = os.open(path, os.O_RDONLY | os.O_DIRECT), mmap.mmap(-1, BLOCK)
        try:
            best("disk, read", lambda: [os.preadv(direct, [room], at) for at in range(0, size, BLOCK)], 2, size)
        finally:
            os.close(direct)
    finally:
        os.close(fd)
        path.unlink()
    return found


# ---------------------------------------------------------------------------------------------------------- the report


def report(results: list[tuple[str, float, str, dict[str, Any]]], speeds: dict[str, float]) -> Iterator[str]:
    """Tables of stages, then of floors."""
    header = ("", *(f"{kind}, {quant}" for kind, _, quant, _ in results))
    rows = []
    for stage, bound in STAGES.items():
        cells = []
        for _, size, _, result in results:
            wall, cpu = result["stages"].get(stage, (0.0, 0.0))
            cells.append(f"{wall / size:.2f} / {cpu / size:.2f}")
        rows.append((f"{stage} ({bound})", *cells))
    rest, whole = [], []
    for _, size, _, result in results:
        cpu = result["whole"][1] - sum(cpu for _, cpu in result["stages"].values())
        rest.append(f"- / {cpu / size:.2f}")
        whole.append(f"{result['whole'][0] / size:.2f} / {result['whole'][1] / size:.2f}")
    yield "wall / CPU seconds a GB of the source"
    yield from table(header, [*rows, ("all else", *rest), ("the whole", *whole)])
    yield ""
    yield from table(("", "GB/s"), [(name, f"{speed:.2f}") for name, speed in speeds.items()])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.5, help="of sources")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--quant", nargs="+", default=["fp8", "int4"], metavar="NAME")
    parser.add_argument("--scratch", type=Path, help="where sources and targets go (default: a temporary directory)")
    parser.add_argument("--one", nargs=3, metavar=("SOURCE", "QUANT", "OUT"), help=argparse.SUPPRESS)
    add_write_option(parser)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(timed_export(*options.one)))
        return 0
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": REPOSITORY}
    results = []
    with tempfile.TemporaryDirectory(prefix="bench_stages.", dir=options.scratch) as temporary:
        scratch = Path(temporary)
        for kind in options.kinds:
            source, out = scratch / kind, scratch / "out"
            make_source(source, kind, options.gigabytes)
            size = sum(path.stat().st_size for path in source.glob("*.safetensors")) / 1e9
            for quant in options.quant:
                os.sync()
                if size * 3e9 < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):
                    warm(source)
                command = [sys.executable, __file__, "--one", str(source), quant, str(out)]
                done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
                results.append((kind, size, quant, json.loads(done.stdout.splitlines()[-1])))
                shutil.rmtree(out)
            shutil.rmtree(source)
        lines = list(report(results, floors(scratch, options.gigabytes)))
    with written(__file__, options.write):
        print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
