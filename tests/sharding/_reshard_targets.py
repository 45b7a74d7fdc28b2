"""What the ranks of the resharding tests run. Each target returns something JSON can hold."""

from __future__ import annotations

import itertools
import random
from typing import Any

import torch
import torch.distributed as dist

from modelexport.distributed.transport import memory
from modelexport.sharding import reshard as reshard_module
from modelexport.sharding.exchange import ExchangeReport
from modelexport.sharding.reshard import reshard
from modelexport.sharding.tensor import ShardedTensor, ShardId
from tests.sharding._exchange_targets import DTYPES, digest, told, values

Box = tuple[tuple[int, int], ...]


def random_box(chance: random.Random, shape: tuple[int, ...]) -> Box:
    starts = [chance.randint(0, size - 1) for size in shape]
    return tuple((start, chance.randint(start + 1, size)) for start, size in zip(starts, shape, strict=True))


def random_grid(chance: random.Random, shape: tuple[int, ...]) -> list[Box]:
    """Boxes that tile a tensor."""
    boxes: list[Box] = [()]
    for size in shape:
        marks = sorted({0, size, *(chance.randint(0, size) for _ in range(chance.randint(0, 2)))})
        boxes = [(*box, cut) for box in boxes for cut in itertools.pairwise(marks)]
    return boxes


def shard_of(key: str, full: torch.Tensor, box: Box, *, data: bool) -> ShardedTensor:
    part = full[tuple(slice(start, stop) for start, stop in box)]
    offset = tuple(start for start, _ in box)
    # Strided where it has more than one dim.
    held = part.clone().t().contiguous().t() if part.dim() == 2 else part.clone()
    return ShardedTensor(key, full.dtype, tuple(part.shape), tuple(full.shape), offset, 0, held if data else None)


def reshard_at_random(rank: int, seeds: int) -> list[int]:
    """Tensors of all dtypes cut at random, replicated at random, wanted in random and overlapping boxes."""
    world, amounts = dist.get_world_size(), []
    for seed, algorithm, share in itertools.product(range(seeds), ("p2p", "shared_memory"), (False, True)):
        chance = random.Random(seed)
        held: list[list[ShardedTensor]] = [[] for _ in range(world)]
        wanted: list[list[ShardedTensor]] = [[] for _ in range(world)]
        full = {}
        for number in range(12):
            key, dtype = f"t{number}", DTYPES[(seed * 12 + number) % len(DTYPES)]
            shape = tuple(chance.randint(1, 9) for _ in range(chance.randint(0, 3)))
            full[key] = values(dtype, shape, number)
            for box in random_grid(chance, shape):
                for place in chance.sample(range(world), chance.randint(1, 2)):
                    held[place].append(shard_of(key, full[key], box, data=True))
            for place in range(world):
                boxes = {random_box(chance, shape) for _ in range(chance.randint(0, 3))}
                wanted[place] += [shard_of(key, full[key], box, data=False) for box in sorted(boxes)]
        before = [digest(shard.data) for shard in held[rank] if shard.data is not None]
        report = ExchangeReport()
        result = reshard(held[rank], wanted[rank], None, algorithm, share=share, report=report)
        assert list(result) == [shard.id for shard in wanted[rank]]
        for shard in wanted[rank]:
            expected = shard_of(shard.key, full[shard.key], shard.box, data=True).data
            assert expected is not None
            assert digest(result[shard.id]) == digest(expected), (shard, algorithm, share)
        assert before == [digest(shard.data) for shard in held[rank] if shard.data is not None]
        assert report.received + report.mapped == report.needed
        amounts.append(report.needed)
    return amounts


def cut(rank: int, parts: int, full: torch.Tensor, dim: int, *, data: bool) -> list[ShardedTensor]:
    """The rank's part of ``parts`` equal ones; nothing on ranks beyond."""
    if rank >= parts:
        return []
    size = full.shape[dim] // parts
    box = tuple((rank * size, (rank + 1) * size) if axis == dim else (0, n) for axis, n in enumerate(full.shape))
    return [shard_of("w", full, box, data=data)]


def round_trip(rank: int) -> list[str]:
    """1 -> 4 -> 2 -> 3 -> 1 ranks and other dims on the way, each from what the last gave; the last one's digest."""
    full = values(torch.bfloat16, (24, 36), 5)
    held: Any = cut(rank, 1, full, 0, data=True)
    for parts, dim in ((4, 0), (2, 1), (3, 0), (4, 1), (1, 0)):
        wanted = cut(rank, parts, full, dim, data=False)
        held = reshard(held, wanted, None, "auto")
    return [digest(tensor) for tensor in held.values()] + [digest(full)]


def bounded_batches(rank: int) -> list[int]:
    """Shared memory that serves batch after batch: (bytes reserved in this rank's arena, bytes copied into it)."""
    full = {f"w{number}": torch.full((1 << 16,), number) for number in range(64)}  # half a MiB each
    held = [ShardedTensor.whole(key, data) for number, (key, data) in enumerate(full.items()) if number % 2 == rank]
    wanted = [ShardedTensor.whole(key, data).without_data() for key, data in full.items()]
    report = ExchangeReport()
    before, reshard_module._BATCH_BYTES = reshard_module._BATCH_BYTES, 1 << 20
    try:
        result = reshard(held, wanted, None, "shared_memory", report=report)
    finally:
        reshard_module._BATCH_BYTES = before
    assert [int(tensor[-1]) for tensor in result.values()] == list(range(64))
    assert all(bool((tensor == tensor[0]).all()) for tensor in result.values())
    return [memory.arena().stats().reserved, report.copied]


def wrong_reshards(rank: int) -> dict[str, str]:
    one = rank == 1
    data = torch.zeros(4, 6)

    def part(rows: tuple[int, int], **changes: Any) -> ShardedTensor:
        tensor = changes.get("data", data[rows[0] : rows[1]])
        return ShardedTensor.part("w", tensor, changes.get("whole", (4, 6)), (rows[0], 0))

    top, bottom = part((0, 2)), part((2, 4))
    whole = [ShardedTensor("w", torch.float32, (4, 6), (4, 6), (0, 0))]
    half = top if rank == 0 else bottom
    unplaced = ShardedTensor("w", torch.float32, (2, 6), (4, 6), None)
    return {
        "algorithm": told(lambda: reshard([half], whole, None, "shared_memori")),
        "missing": told(lambda: reshard([top], whole)),
        "unknown": told(lambda: reshard([half], [*whole, ShardedTensor.whole("v", data)] if one else whole)),
        "dtype": told(lambda: reshard([half], [ShardedTensor("w", torch.int8, (4, 6), (4, 6), (0, 0))] if one else [])),
        "shape": told(
            lambda: reshard([half], [ShardedTensor("w", torch.float32, (4, 6), (5, 6), (0, 0))] if one else whole)
        ),
        "beyond": told(lambda: reshard({ShardId("w", (3, 0), (2, 6)): data[:2]} if one else [half], whole)),
        "twice": told(lambda: reshard([half, half] if one else [half], whole)),
        "wanted twice": told(lambda: reshard([half], whole * 2 if one else whole)),
        "no data": told(lambda: reshard([half.without_data()] if one else [half], whole)),
        "meta": told(lambda: reshard([part((2, 4), data=data[:2].to("meta"))] if one else [half], whole)),
        "no place": told(lambda: reshard([half], [unplaced] if one else whole)),
        "not an id": told(lambda: reshard({"w": data} if one else [half], whole)),
        "other shape": told(lambda: reshard({ShardId("w", (0, 0), (2, 6)): data} if one else [half], whole)),
        "then": str(reshard([half], whole)[whole[0].id].shape),
    }
