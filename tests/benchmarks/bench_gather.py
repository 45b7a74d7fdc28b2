"""GB/s to the first rank, against torch.distributed.gather on gloo in the same run.

    python tests/benchmarks/bench_gather.py [--ranks 4] [--mb 64 512] [--workspace DIR] [--repeats N]

Each rank passes one payload of so many MB (16 tensors); counted are the bytes that the first rank gets from all
ranks, its own included, divided by the wall time of one gather, from entering it on all ranks (after a barrier)
until the first rank has left it and the senders' buffers are free again. The median of the repeats is shown, after
one warm-up gather, and the warm-up's time too ("first"), which fills fresh pages.

"reads nothing": the first rank only gets the tensors. "reads all": it sums every byte (as int64).

The memory columns are the first rank's own, in MB, growth from before the first to after the last gather:
anonymous (``Pss_Anon``), shared (``Pss_Shmem``: its share of pages it has mapped), and ``Private_Dirty``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist

from modelexport.distributed import gather
from modelexport.distributed.transport import memory
from tests.benchmarks._measuring import add_write_option, written

TENSORS = 16
MB = 1 << 20


def own_memory() -> dict[str, float]:
    wanted = ("Pss_Anon", "Pss_Shmem", "Private_Dirty")
    lines = (line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines())
    return {line[0][:-1]: int(line[1]) / 1024 for line in lines if line[0][:-1] in wanted}


def touch(tensors: list[torch.Tensor]) -> int:
    return sum(int(tensor.sum()) for tensor in tensors)


def fill(rank: int, nbytes: int, empty: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
    pieces = [empty((nbytes // TENSORS // 8,), torch.int64) for _ in range(TENSORS)]
    for index, piece in enumerate(pieces):
        piece.fill_(rank * 1000 + index)
    return pieces


def through_gather(rank: int, world: int, payload: list[torch.Tensor], workspace: str | None, read: bool) -> None:
    with gather.get_configs_parallel(payload, list(range(world)), None, workspace) as configs:
        assert len(configs) == (world if rank == 0 else 0)
        if read and rank == 0:
            expected = sum(r * 1000 + i for r in range(world) for i in range(TENSORS)) * payload[0].numel()
            assert sum(touch(config) for config in configs) == expected
            del expected
    gather.drain()


def through_gloo(rank: int, world: int, payload: torch.Tensor, into: list[torch.Tensor] | None, read: bool) -> None:
    dist.gather(payload, into, dst=0)
    if read and into is not None:
        touch(into)


def measure(step: Callable[[], None], repeats: int) -> tuple[float, float]:
    """(first, median of the others), in seconds, as the first rank sees it."""
    times = []
    for _ in range(repeats + 1):
        dist.barrier()
        start = time.perf_counter()
        step()
        dist.barrier()  # all are done: costs about 0.1 ms on these machines, and is in every row
        times.append(time.perf_counter() - start)
    return times[0], statistics.median(times[1:])


def run(rank: int, world: int, folder: str, nbytes: int, kind: str, read: bool, repeats: int, workspace: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    if kind == "gloo":
        tensor = torch.cat(fill(rank, nbytes, lambda shape, dtype: torch.empty(shape, dtype=dtype)))
        into = [torch.empty_like(tensor) for _ in range(world)] if rank == 0 else None

        def step() -> None:
            through_gloo(rank, world, tensor, into, read)
    else:
        empty = memory.shared_empty if kind == "arena" else lambda shape, dtype: torch.empty(shape, dtype=dtype)
        payload = fill(rank, nbytes, empty)
        path = workspace if kind == "nfs" else None
        gather.connect(list(range(world)), None, path)

        def step() -> None:
            through_gather(rank, world, payload, path, read)

    before = own_memory()
    first, median = measure(step, repeats)
    after = own_memory()
    gather.close()
    if rank == 0:
        grown = {name: after[name] - before[name] for name in before}
        Path(folder, "result.json").write_text(json.dumps({"first": first, "median": median, **grown}))
    dist.destroy_process_group()


def job(world: int, *args: Any) -> dict[str, float]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "modelexport.distributed.gather"])
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=run, args=(rank, world, folder, *args)) for rank in range(world)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise SystemExit(f"a rank failed: {[process.exitcode for process in ranks]}")
        result: dict[str, float] = json.loads(Path(folder, "result.json").read_text())
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--mb", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--workspace", help="directory for the NFS rows (default: a temporary one)")
    parser.add_argument("--repeats", type=int, default=5)
    add_write_option(parser)
    args = parser.parse_args()
    with written(__file__, args.write):
        measure_all(args)


def measure_all(args: argparse.Namespace) -> None:
    kinds = {
        "gloo": "torch.distributed.gather",
        "arena": "shm, from the arena",
        "copied": "shm, ordinary",
        "nfs": "nfs",
    }
    print(f"{args.ranks} ranks on {os.cpu_count()} cores, torch {torch.__version__}, one thread a rank")
    print(f"{'MB a rank':>9}  {'transport':24} {'reads':7} {'first ms':>9} {'then ms':>9} {'GB/s':>8} {'x gloo':>7}"
          f"  {'anon':>6} {'shmem':>6} {'dirty':>6}")  # fmt: skip
    for size in args.mb:
        for read in (False, True):
            gloo = 0.0
            for kind, label in kinds.items():
                with tempfile.TemporaryDirectory(dir=args.workspace) as workspace:
                    repeats = min(args.repeats, 2) if kind == "nfs" and size > 100 else args.repeats
                    result = job(args.ranks, size * MB, kind, read, repeats, workspace)
                    assert not list(Path(workspace).iterdir()), "the workspace was not cleared"
                rate = args.ranks * size * MB / result["median"] / 1e9
                gloo = gloo or rate
                print(
                    f"{size:9}  {label:24} {'all' if read else 'nothing':7} {result['first'] * 1e3:9.1f} "
                    f"{result['median'] * 1e3:9.2f} {rate:8.2f} {rate / gloo:7.1f}  {result['Pss_Anon']:6.0f} "
                    f"{result['Pss_Shmem']:6.0f} {result['Private_Dirty']:6.0f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
