"""Seconds of what ranks do together, as their number grows, and a line fitted to them.

    python tests/benchmarks/bench_ranks.py [--ranks 2 4 8 16 32 64] [--repeats 5]

All ranks are processes of this machine, one thread each; counted is the time from a barrier until the last rank has
left, the median of the repeats:

* meeting: ``ranks.barrier`` and ``ranks.compute_and_broadcast`` of a small object, beside gloo's barrier.
* configs: a layer's config of 20 linears from every rank to the first (``get_configs_parallel``).
* tensors: 64 MiB, of which every rank has its part, to the first (``get_tensors_parallel``, shared memory).
* exchange: 64 MiB in 256 shards, each of which another rank needs than has it (``exchange_by_distribution``).

The line is a + b n, by least squares of relative errors. Where more ranks run than there are cores, b is what the cores
take for one rank after the other: an upper bound for machines of their own.
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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist

from modelexport.distributed import gather, ranks
from modelexport.sharding.exchange import ShardDistribution, exchange_by_distribution
from modelexport.sharding.tensor import ShardedTensor
from tests.benchmarks._measuring import add_write_option, written

MIB = 1 << 20
TOTAL, SHARDS = 64 * MIB, 256
LARGE = 1024
"""Ranks for which the line is read."""


def config(rank: int) -> dict[str, object]:
    """A layer's config, as one rank has it."""
    linears = {f"linear{n}": {"shape": [4096, 4096], "rows": [rank, rank + 1], "format": "int4"} for n in range(20)}
    return {"layer": "model.layers.0", "linears": linears}


def shifted(world: int) -> ShardDistribution:
    """Shards of which each is on one rank and needed by the next."""
    shape = (TOTAL // SHARDS // 2,)
    shards = {shard.id: shard for shard in (
        ShardedTensor(f"part.{number}", torch.bfloat16, shape, shape, (0,)) for number in range(SHARDS)
    )}  # fmt: skip
    owner = {shard: number % world for number, shard in enumerate(shards)}
    users = {shard: sorted({rank, (rank + 1) % world}) for shard, rank in owner.items()}
    return ShardDistribution(owner, set(shards), shards, users)


def steps(rank: int, world: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yields what is measured."""
    everybody = list(range(world))
    yield "gloo's barrier", dist.barrier
    yield "barrier", ranks.barrier
    yield "agreement", lambda: ranks.compute_and_broadcast(lambda: {"found": True})

    def configs() -> None:
        with gather.get_configs_parallel(config(rank), everybody, None, None) as found:
            assert len(found) == (world if rank == 0 else 0)

    yield "configs", configs
    part = torch.full((TOTAL // world,), rank, dtype=torch.uint8)

    def tensors() -> None:
        with gather.get_tensors_parallel(part, everybody) as found:
            assert rank or sum(len(each) for each in found) == TOTAL // world * world

    yield "tensors", tensors
    distribution = shifted(world)
    mine = [shard for shard, owner in distribution.main_rank_for_shard.items() if owner == rank]
    loaded = {shard: torch.ones(shard.local_shape, dtype=torch.bfloat16) for shard in mine}
    missing = {
        shard: metadata
        for shard, metadata in distribution.shard_to_metadata.items()
        if shard not in loaded and rank in distribution.all_ranks_for_shard[shard]
    }

    def exchange() -> None:
        found = exchange_by_distribution(loaded, missing, distribution, None, "auto")
        assert missing.keys() <= found.keys()

    yield "exchange", exchange


def run(rank: int, world: int, folder: str, repeats: int) -> None:
    """One rank; the first one writes the medians."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    medians = {}
    for name, step in steps(rank, world):
        times = []
        for _ in range(repeats + 1):
            dist.barrier()
            start = time.perf_counter()
            step()
            dist.barrier()  # the last has left
            times.append(time.perf_counter() - start)
        medians[name] = statistics.median(times[1:])
    gather.close()
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(medians))
    dist.barrier()
    dist.destroy_process_group()


def job(world: int, repeats: int) -> dict[str, float]:
    """Seconds of each step on so many ranks."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "modelexport.distributed.gather", "modelexport.sharding.exchange"])
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=run, args=(rank, world, folder, repeats)) for rank in range(world)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise SystemExit(f"a rank failed: {[process.exitcode for process in processes]}")
        result: dict[str, float] = json.loads(Path(folder, "result.json").read_text())
        return result


def line(counts: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """a, b of a + b n with the least sum of squared relative errors, neither negative."""
    y = torch.tensor(seconds, dtype=torch.float64)
    n = torch.tensor(counts, dtype=torch.float64)
    rows = torch.stack([1 / y, n / y], dim=1)
    a, b = torch.linalg.lstsq(rows, torch.ones(len(y), 1, dtype=torch.float64)).solution.flatten().tolist()
    if a < 0:
        a, b = 0.0, float((n / y).sum() / (n / y).square().sum())
    elif b < 0:
        a, b = float((1 / y).sum() / (1 / y).square().sum()), 0.0
    return a, b


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64])
    parser.add_argument("--repeats", type=int, default=5)
    add_write_option(parser)
    args = parser.parse_args()
    with written(__file__, args.write):
        results = {world: job(world, args.repeats) for world in args.ranks}
        print(f"ms, on {os.cpu_count()} cores; the last columns: a line a + b n, and what it says of {LARGE:,} ranks\n")
        print(f"| | {' | '.join(str(world) for world in args.ranks)} | a | b | {LARGE:,} |")
        print("| --- " * (len(args.ranks) + 4) + "|")
        for name in results[args.ranks[0]]:
            seconds = [results[world][name] for world in args.ranks]
            a, b = line(args.ranks, seconds)
            cells = [*(f"{each * 1e3:.1f}" for each in seconds), f"{a * 1e3:.1f}", f"{b * 1e3:.2f}"]
            print(f"| {name} | {' | '.join(cells)} | {(a + b * LARGE) * 1e3:,.0f} |", flush=True)


if __name__ == "__main__":
    main()
