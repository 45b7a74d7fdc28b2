"""Every shard exchange algorithm on one set of shards; and the distribution of shards over ranks.

    python tests/benchmarks/bench_exchange.py [--ranks 4] [--repeats 5] [--skip-exchange] [--skip-distribution]

200 shards of 1 to 16 MiB, 312 MiB in all, bf16, spread over the ranks by ``distribute_shards_to_ranks``; "all": each
rank needs what the others loaded; "quarter": a quarter of these shards, another one for each rank.

GB/s are the bytes that all ranks needed, divided by the wall time from entering the exchange on all ranks (after a
barrier) until the last has left it: "first" in fresh processes, then the median of the repeats (buffers are reused).
"+read" is the median with a sum over all that was needed, as int64: what is mapped costs its page faults only there.
"sent" counts bytes on the wire, all ranks, each time a rank got them; "copied" those put into shared memory.

Memory is one rank's, the mean over ranks, in MB: "held" is the growth of Pss_Anon + Pss_Shmem (shared pages divided
among those that map them) from before the first exchange to after it, with the results; "peak" that of the largest
sample in another run, which is sampled and not timed. "from the arena": the shards were loaded into
``memory.shared_empty`` to begin with, and count as there before.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

import torch
import torch.distributed as dist
from _measuring import Run, Sampler, add_write_option, private_bytes, written

from modelexport.distributed.transport import memory
from modelexport.sharding.balance import lower_bound
from modelexport.sharding.exchange import (
    ExchangeReport,
    ShardDistribution,
    distribute_shards_to_ranks,
    exchange_by_distribution,
)
from modelexport.sharding.tensor import ShardedTensor, ShardId

MIB = 1 << 20
MIBS = [1] * 180 + [2] * 4 + [4] * 6 + [6] * 2 + [8] * 4 + [12] * 2 + [16] * 2
ROWS = ("broadcast", "gather_rounds", "gather_object", "p2p", "shared_memory", "from the arena", "auto")


def distribution_of(world: int, needs: str) -> ShardDistribution:
    sizes = list(MIBS)
    random.Random(0).shuffle(sizes)
    metadata = {}
    for number, size in enumerate(sizes):
        shape = (size * MIB // 2,)
        shard = ShardedTensor(f"layers.{number}.weight", torch.bfloat16, shape, shape, (0,))
        metadata[shard.id] = shard
    everybody = {shard: list(range(world)) for shard in metadata}
    main = distribute_shards_to_ranks(everybody, {i: s.nbytes for i, s in metadata.items()}, world, set())
    if needs == "quarter":
        everybody = {
            shard: sorted({main[shard], *(place for place in range(world) if (number + place) % 4 == 0)})
            for number, shard in enumerate(metadata)
        }
    return ShardDistribution(main, set(metadata), metadata, everybody)


def load(rank: int, distribution: ShardDistribution, *, arena: bool) -> dict[ShardId, torch.Tensor]:
    loaded = {}
    for number, (shard, shape) in enumerate((key, key.local_shape) for key in distribution.shard_to_metadata):
        if distribution.main_rank_for_shard[shard] == rank:
            loaded[shard] = (memory.shared_empty if arena else torch.empty)(shape, dtype=torch.bfloat16)
            loaded[shard].fill_(number % 128)
    return loaded


def run(rank: int, world: int, folder: str, row: str, needs: str, repeats: int, pause: float) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    distribution = distribution_of(world, needs)
    loaded = load(rank, distribution, arena=row == "from the arena")
    algorithm = "shared_memory" if row == "from the arena" else row
    unloaded = {
        key: distribution.shard_to_metadata[key]
        for key, ranks in distribution.all_ranks_for_shard.items()
        if rank in ranks and key not in loaded
    }
    result: dict[ShardId, torch.Tensor] = {}
    dist.barrier()
    before = private_bytes(os.getpid())
    times: list[float] = []
    reads: list[float] = []
    report = ExchangeReport()
    held = 0
    for _ in range(repeats + 1):
        result.clear()
        report = ExchangeReport()
        dist.barrier()
        start = time.perf_counter()
        result.update(exchange_by_distribution(loaded, unloaded, distribution, None, algorithm, report=report))
        dist.barrier()
        times.append(time.perf_counter() - start)
        for key in unloaded:
            result[key].view(torch.int64).sum()
        dist.barrier()
        reads.append(time.perf_counter() - start)
        if not held:
            held = private_bytes(os.getpid()) - before
            dist.barrier()
    check(result, distribution)
    time.sleep(pause)
    record = {"first": times[0], "median": statistics.median(times[1:] or times), "before": before, "held": held}
    record |= {"read": statistics.median(reads[1:] or reads), **vars(report)}
    Path(folder, f"result-{rank}.json").write_text(json.dumps(record))
    result.clear()
    dist.barrier()
    dist.destroy_process_group()


def check(result: dict[ShardId, torch.Tensor], distribution: ShardDistribution) -> None:
    for number, key in enumerate(distribution.shard_to_metadata):
        if key in result:
            assert bool((result[key] == number % 128).all()), key


def job(world: int, *args: Any) -> list[dict[str, Any]]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "modelexport.sharding.exchange"])
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=run, args=(rank, world, folder, *args)) for rank in range(world)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise SystemExit(f"a rank failed: {[process.exitcode for process in ranks]}")
        return [json.loads(Path(folder, f"result-{rank}.json").read_text()) for rank in range(world)]


def peak_of(world: int, row: str, needs: str) -> float:
    """The largest growth of a rank that a sampler saw in a run of its own, in bytes."""
    sampled = Run(0.0, 0.0, 0)
    sampler = Sampler(os.getpid())
    try:
        results = job(world, row, needs, 0, 0.1)
    finally:
        sampler.stop(sampled)
    return sampled.process_peak - min(result["before"] for result in results)


def exchanges(world: int, repeats: int) -> None:
    print(f"{len(MIBS)} shards, {sum(MIBS)} MiB, {world} ranks on {os.cpu_count()} cores, torch {torch.__version__}")
    print(
        f"{'needs':8} {'algorithm':15} {'first s':>8} {'then s':>7} {'GB/s':>6} {'x bcast':>7} {'+read s':>8}"
        f"  {'needed':>7} {'sent':>7} {'copied':>7}  {'held':>6} {'peak':>6}   (MB)"
    )
    for needs in ("all", "quarter"):
        reference = 0.0
        for row in ROWS:
            results = job(world, row, needs, repeats, 0.0)
            wall = max(result["median"] for result in results)
            reference = reference or wall
            needed, sent, copied = (
                sum(result[name] for result in results) / 1e6 for name in ("needed", "sent", "copied")
            )
            held = statistics.mean(result["held"] for result in results) / 1e6
            label = f"auto ({results[0]['algorithm']})"[:15] if row == "auto" else row
            print(
                f"{needs:8} {label:15} {max(result['first'] for result in results):8.2f} {wall:7.3f} "
                f"{needed / 1e3 / wall:6.2f} {reference / wall:7.2f} {max(r['read'] for r in results):8.3f}  "
                f"{needed:7.0f} {sent:7.0f} {copied:7.0f}  {held:6.0f} {peak_of(world, row, needs) / 1e6:6.0f}",
                flush=True,
            )


def distributions(count: int = 50_000, world: int = 64) -> None:
    print(f"\ndistribute_shards_to_ranks, {count} shards on {world} ranks; above the bound max(mean, largest shard)")
    print(f"{'held by':28} {'algorithm':10} {'seconds':>8} {'imbalance':>10}")
    random_ = random.Random(0)
    ids = [ShardId(f"layers.{i // 8}.part.{i % 8}", (i % 64 * 16, 0), (16, 64)) for i in range(count)]
    cases = {
        "all ranks": lambda i: list(range(world)),
        "3 ranks at random": lambda i: random_.sample(range(world), 3),
        "half of the ranks at random": lambda i: random_.sample(range(world), world // 2),
        "two neighbours": lambda i: [i % world, (i + 1) % world],
    }
    for name, holders in cases.items():
        sizes = {shard: random_.randint(1 << 10, 1 << 24) for shard in ids}
        ranks = {shard: holders(number) for number, shard in enumerate(ids)}
        for algorithm in ("greedy", "balanced"):
            show(name, ranks, sizes, world, algorithm)
    for few in (20, 40, 200):
        sizes = {shard: random_.randint(1 << 20, 1 << 24) for shard in ids[:few]}
        ranks = {shard: sorted(random_.sample(range(4), random_.randint(2, 4))) for shard in sizes}
        for algorithm in ("greedy", "balanced"):
            show(f"{few} shards on 2 to 4 of 4", ranks, sizes, 4, algorithm)


def show(name: str, ranks: Any, sizes: Any, world: int, algorithm: str) -> None:
    start = time.perf_counter()
    found = distribute_shards_to_ranks(ranks, sizes, world, set(), algorithm=algorithm)
    wall = time.perf_counter() - start
    loads = [0] * world
    for shard, rank in found.items():
        loads[rank] += sizes[shard]
    bound = lower_bound(list(sizes.values()), world)
    print(f"{name:28} {algorithm:10} {wall:8.3f} {max(loads) / bound - 1:10.4%}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--skip-exchange", action="store_true")
    parser.add_argument("--skip-distribution", action="store_true")
    add_write_option(parser)
    args = parser.parse_args()
    with written(__file__, args.write):
        if not args.skip_exchange:
            exchanges(args.ranks, args.repeats)
        if not args.skip_distribution:
            distributions()


if __name__ == "__main__":
    main()
