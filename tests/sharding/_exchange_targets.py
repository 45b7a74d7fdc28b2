"""What the ranks of the exchange tests run. Each target returns something JSON can hold."""

from __future__ import annotations

import gc
import hashlib
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from modelexport.distributed import collectives
from modelexport.distributed.collectives.groups import members
from modelexport.distributed.delivery import pairwise, shared_mesh
from modelexport.distributed.delivery.pairwise import as_flat_bytes
from modelexport.distributed.transport import memory
from modelexport.errors import GatherError, UsageError
from modelexport.sharding.exchange import (
    ExchangeReport,
    ShardDistribution,
    determine_main_replica_uniform_distribution,
    exchange_by_distribution,
    exchange_loaded_objects_gather_object,
    exchange_loaded_tensors_broadcast,
    exchange_loaded_tensors_gather_object,
    exchange_loaded_tensors_gather_rounds,
    shard_exchange,
)
from modelexport.sharding.tensor import ShardedTensor, ShardId
from modelexport.system.dtypes import as_integers

ALGORITHMS = ("broadcast", "gather_rounds", "gather_object", "p2p", "shared_memory", "auto")
_NAMES = (
    "float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz",
    "float8_e8m0fnu", "float4_e2m1fn_x2", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "bool", "complex64", "complex128",
)  # fmt: skip
DTYPES = [getattr(torch, name) for name in _NAMES if hasattr(torch, name)]


def digest(tensor: torch.Tensor) -> str:
    """What a tensor is: dtype, shape and bytes."""
    data = as_flat_bytes(as_integers(tensor), torch.device("cpu")).numpy().tobytes() if tensor.numel() else b""
    return hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode() + data).hexdigest()


def values(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Any bytes, but for bool."""
    generator = torch.Generator().manual_seed(seed)
    count = dtype.itemsize
    for size in shape:
        count *= size
    data = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), generator=generator, dtype=torch.uint8)
    return data.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)


def everything() -> dict[ShardId, torch.Tensor]:
    """Shards of every dtype, of unequal shapes, without dims and without elements, several of each key."""
    shards = {}
    for index, dtype in enumerate(DTYPES):
        name = str(dtype).removeprefix("torch.")
        for part, rows in enumerate((3, 1 + index % 4, 0)):
            shards[ShardId(name, (10 * part, 0), (rows, 4))] = values(dtype, (rows, 4), 100 * index + part)
        shards[ShardId(f"{name}.scalar", (), ())] = values(dtype, (), index)
    shards[ShardId("small", (0,), (5,))] = torch.arange(5)
    shards[ShardId("small", (0,), (6,))] = torch.arange(6) + 10  # the same offset, another size
    shards[ShardId("large", (0,), (3 << 18,))] = values(torch.float64, (3 << 18,), 1)
    shards[ShardId("strided", (0, 0), (6, 8))] = torch.arange(96).view(8, 12).t()[::2]
    shards[ShardId("conjugate", (0,), (2,))] = torch.tensor([1 + 2j, 3 - 1j]).conj()
    shards[ShardId("trained", (0,), (2,))] = torch.nn.Parameter(torch.tensor([1.5, -2.0]))
    return shards


def described(shard_id: ShardId, tensor: torch.Tensor, main: bool) -> ShardedTensor:
    whole = tuple(100 for _ in shard_id.local_shape) if shard_id.key != "large" else shard_id.local_shape
    return ShardedTensor(
        shard_id.key, tensor.dtype, shard_id.local_shape, whole, shard_id.global_offset, (0, 0 if main else 1)
    )


def scenario(
    needs: Callable[[int, int], bool],
) -> tuple[dict[ShardId, torch.Tensor], dict[ShardId, ShardedTensor], ShardDistribution, dict[ShardId, torch.Tensor]]:
    """(loaded, unloaded, distribution, all): rank r has shard number i in its state dict if ``needs(i, r)``."""
    world, rank = dist.get_world_size(), dist.get_rank()
    shards = everything()
    state: dict[str, Any] = {"layers": [], "step": 3}
    for number, (shard_id, tensor) in enumerate(shards.items()):
        mains = [place for place in range(world) if needs(number, place)]
        if rank in mains:
            state["layers"].append({"shard": described(shard_id, tensor, rank == mains[0])})
    distribution = determine_main_replica_uniform_distribution(state, None)
    assert distribution is not None
    mine = {shard["shard"].id: shard["shard"] for shard in state["layers"]}
    loaded = {key: shards[key] for key in mine if distribution.main_rank_for_shard[key] == rank}
    return loaded, {key: shard for key, shard in mine.items() if key not in loaded}, distribution, shards


def exchange_everything(rank: int) -> dict[str, Any]:
    """Every algorithm, all needing all and each needing some; the reports of the last."""
    reports = {}
    for needs in (lambda number, place: True, lambda number, place: (number + place) % 3 != 0 or number % 4 == place):
        loaded, unloaded, distribution, shards = scenario(needs)
        own = torch.full((2,), rank)
        for algorithm in ALGORITHMS:
            report = ExchangeReport()
            result = exchange_by_distribution(
                {**loaded, "own": own}, unloaded, distribution, None, algorithm, report=report
            )
            assert result.pop("own") is own
            assert result.keys() == loaded.keys() | unloaded.keys(), algorithm
            assert all(result[key] is tensor for key, tensor in loaded.items())
            wrong = [str(key) for key in unloaded if digest(result[key]) != digest(shards[key])]
            assert not wrong, (algorithm, wrong)
            assert report.needed == sum(shard.nbytes for shard in unloaded.values())
            reports[algorithm] = vars(report)
            del result
        for function in (
            exchange_loaded_tensors_gather_rounds,
            exchange_loaded_tensors_gather_object,
            exchange_loaded_tensors_broadcast,
        ):
            result = function(loaded, unloaded, distribution)
            assert {key: digest(tensor) for key, tensor in result.items()} == {
                key: digest(shards[key]) for key in [*loaded, *unloaded]
            }
    for name, value in (("IN_FLIGHT_BYTES", 1000), ("PACKED_BYTES", 60), ("ALONE_BYTES", 30)):
        setattr(pairwise, name, value)  # many messages, few at a time
    result = exchange_by_distribution(loaded, unloaded, distribution, None, "p2p")
    assert [str(key) for key in unloaded if digest(result[key]) != digest(shards[key])] == []
    return reports


def told(action: Callable[[], Any]) -> str:
    """The error of a call that must fail."""
    try:
        action()
    except (UsageError, GatherError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def wrong_exchanges(rank: int) -> dict[str, str]:
    """Something is wrong on one rank or two; what each rank is told. The group stays usable."""
    ids = [ShardId("a", (0,), (4,)), ShardId("b", (0,), (6,)), ShardId("c", (0,), (2,))]
    shards = {key: ShardedTensor(key.key, torch.float32, key.local_shape, key.local_shape, (0,)) for key in ids}
    right = ShardDistribution(dict(zip(ids, range(3), strict=True)), set(ids), shards, {key: [0, 1, 2] for key in ids})
    other = right._replace(main_rank_for_shard={ids[0]: 1, ids[1]: 1, ids[2]: 2})

    def run(distribution: Any = right, algorithm: str = "broadcast", **changes: Any) -> Any:
        loaded = {ids[rank]: torch.full(ids[rank].local_shape, float(rank)), **changes.get("loaded", {})}
        for key in changes.get("lost", ()):
            loaded.pop(key, None)
        wanted = {**{key: shard for key, shard in shards.items() if key not in loaded}, **changes.get("wanted", {})}
        return exchange_by_distribution(loaded, wanted, distribution, None, algorithm)

    zero, one, two = rank == 0, rank == 1, rank == 2
    stray = ShardedTensor("stray", torch.int8, (1,), (1,), (0,))
    found = {
        "unknown algorithm": told(lambda: run(algorithm="brodcast" if one else "broadcast")),
        "other algorithm": told(lambda: run(algorithm="p2p" if two else "broadcast")),
        "no distribution": told(lambda: run(None if two else right)),
        "other distribution": told(lambda: run(other if two else right)),
        "other group": told(lambda: run(right._replace(main_rank_for_shard={ids[0]: 7}))),
        "undescribed": told(lambda: run(right._replace(shard_to_metadata={}))),
        "duplicate": told(lambda: run(loaded={ids[0]: torch.zeros(4)} if two else {})),
        "not loaded": told(lambda: run(lost=ids[:1])),
        "shape": told(lambda: run(loaded={ids[0]: torch.zeros(5)} if zero else {})),
        "dtype": told(lambda: run(loaded={ids[1]: torch.zeros(6).int()} if one else {})),
        "no tensor": told(lambda: run(loaded={ids[1]: 3} if one else {})),
        "meta": told(lambda: run(loaded={ids[1]: torch.zeros(6, device="meta")} if one else {})),
        "sparse": told(lambda: run(loaded={ids[1]: torch.zeros(6).to_sparse()} if one else {})),
        "wanted otherwise": told(
            lambda: run(wanted={ids[0]: ShardedTensor("a", torch.int8, (4,), (4,), (0,))} if one else {})
        ),
        "not in the group": told(lambda: run(wanted={stray.id: stray} if two else {})),
        "other calls": told(
            (lambda: exchange_loaded_tensors_broadcast({}, {}, right)) if one else (lambda: run(lost=ids, wanted={}))
        ),
    }
    for algorithm in ALGORITHMS:
        assert {key.key: tensor.tolist()[:1] for key, tensor in run(algorithm=algorithm).items()} == {
            "a": [0.0], "b": [1.0], "c": [2.0]
        }  # fmt: skip
    return found


def wrong_descriptions(rank: int) -> dict[str, str]:
    def shard(key: str, dtype: torch.dtype = torch.float32, size: int = 4, whole: int = 8) -> ShardedTensor:
        return ShardedTensor(key, dtype, (size,), (whole,), (0,), rank)

    def agree(*shards: ShardedTensor, **how: Any) -> str:
        return told(lambda: determine_main_replica_uniform_distribution({"all": shards}, None, **how))

    one = rank == 1
    return {
        "twice": agree(shard("w"), *([shard("w")] if one else [])),
        "dtype": agree(shard("w", torch.int8 if one else torch.float32)),
        "whole": agree(shard("w", whole=9 if one else 8)),
        "how": agree(shard("w"), ignore_groups=one),
        "algorithm": agree(shard("w"), algorithm="gready"),
    }


def distributions(rank: int) -> list[Any]:
    """What two groups of two agree on: the main replicas of "a" and "b" are in the first, that of "c" in the other."""
    groups = [collectives.new_group([1, 0]), collectives.new_group([2, 3])]
    group, first = groups[rank // 2], rank < 2
    state = {
        "a": ShardedTensor("a", torch.int8, (3,), (3,), (0,), (0, 0) if rank == 0 else (0, 1 + rank)),
        "inner": [ShardedTensor("b", torch.int8, (5,), (5,), (0,), 0 if rank == 1 else 1), "no tensor", None],
        "c": (ShardedTensor("c", torch.int8, (2,), (2,), (0,), int(first), torch.zeros(2, dtype=torch.int8)),),
    }
    found = []
    for ignore_groups in (False, True):
        made = determine_main_replica_uniform_distribution(state, group, ignore_groups)
        assert made is not None
        assert all(shard.data is None for shard in made.shard_to_metadata.values())
        main = [[key.key, place] for key, place in made.main_rank_for_shard.items()]
        everywhere = sorted([key.key, places] for key, places in made.all_ranks_for_shard.items())
        found.append([main, sorted(key.key for key in made.shards_in_this_group), everywhere])
    return found


def exchange_in_groups(rank: int) -> bool:
    """Two groups at once, one of them in another order than torch's; every algorithm."""
    groups = [collectives.new_group([2, 0]), collectives.new_group([1, 3])]
    group = groups[rank % 2]
    place = group.ranks.index(rank)
    shards = {
        ShardId(f"w{rank % 2}", (number,), (1 + number,)): torch.arange(1 + number) + 10 * rank % 2
        for number in range(5)
    }
    state = {"all": [ShardedTensor(key.key, torch.int64, key.local_shape, (100,), key.global_offset) for key in shards]}
    made = determine_main_replica_uniform_distribution(state, group, True)
    assert made is not None
    loaded = {key: shards[key] for key, main in made.main_rank_for_shard.items() if main == place}
    assert 0 < len(loaded) < 5
    rest = {shard.id: shard for shard in state["all"] if shard.id not in loaded}
    for algorithm in ALGORITHMS:
        result = exchange_by_distribution(loaded, rest, made, group, algorithm)
        assert {key: tensor.tolist() for key, tensor in result.items()} == {
            key: tensor.tolist() for key, tensor in shards.items()
        }
    return True


def one_shard(nbytes: int = 1 << 20) -> tuple[ShardId, dict[ShardId, ShardedTensor], ShardDistribution]:
    """A shard that rank 0 loads and all need."""
    shard = ShardedTensor("w", torch.uint8, (nbytes,), (nbytes,), (0,))
    world = list(range(dist.get_world_size()))
    return (
        shard.id,
        {shard.id: shard},
        ShardDistribution({shard.id: 0}, {shard.id}, {shard.id: shard}, {shard.id: world}),
    )


def shared(tensor: torch.Tensor | None, nbytes: int = 1 << 20, **options: Any) -> torch.Tensor:
    """The shard through shared memory; ``tensor`` on rank 0."""
    key, wanted, distribution = one_shard(nbytes)
    loaded = {} if tensor is None else {key: tensor}
    return exchange_by_distribution(loaded, wanted, distribution, None, "shared_memory", **options)[key]


def lifetimes(rank: int) -> dict[str, Any]:
    """What becomes of memory that receivers keep, and drop, over exchanges, and after the ranks have hung up."""
    mine = torch.full((1 << 20,), 7, dtype=torch.uint8) if rank == 0 else None
    kept = shared(mine)
    reserved = []
    for number in range(8):  # receivers drop what they get: the same pages serve again
        if mine is not None:
            mine.fill_(100 + number)
        assert int(shared(mine)[-1]) == 100 + number
        reserved.append(memory.arena().stats().reserved)
    assert kept is mine or bool((kept == 7).all()), "a kept tensor keeps its bytes"
    arena = memory.shared_empty(1 << 20, torch.uint8).fill_(1) if rank == 0 else None
    report = ExchangeReport()
    mapped = shared(arena, report=report)
    assert report.copied == 0
    dist.barrier()
    if arena is not None:
        arena.fill_(2)
    dist.barrier()
    seen = int(mapped[0])
    shared_mesh.forget(members(None))
    if rank == 0:
        for _ in range(16):
            memory.shared_empty(1 << 20, torch.uint8).fill_(3)
    dist.barrier()
    assert kept is mine or bool((kept == 7).all()), "also after the links have ended"
    del kept, mapped, arena
    gc.collect()
    last = int(shared(None if mine is None else mine.fill_(9))[0])  # they meet anew
    return {"reserved": reserved, "seen": seen, "last": last}


def no_memory(rank: int) -> list[str]:
    """Rank 0 cannot place its shard; then it can."""
    mine = torch.full((1 << 20,), 7, dtype=torch.uint8) if rank == 0 else None
    assert int(shared(mine)[0]) == 7
    real = memory.shared_empty

    def full(*_: Any) -> torch.Tensor:
        raise GatherError("no room for 1048576 more bytes")

    memory.shared_empty = full if rank == 0 else real
    try:
        text = told(lambda: shared(mine))
    finally:
        memory.shared_empty = real
    return [text, str(int(shared(mine)[0]))]


def dies(rank: int, algorithm: str) -> dict[str, Any]:
    """Rank 1's process ends while the others wait for its shard."""
    shards = {key: torch.full((1 << 20,), key, dtype=torch.uint8) for key in range(3)}
    described = {key: ShardedTensor(str(key), torch.uint8, (1 << 20,), (1 << 20,), (0,)) for key in shards}
    made = ShardDistribution({key: key for key in shards}, set(shards), described, {key: [0, 1, 2] for key in shards})
    rest = {key: shard for key, shard in described.items() if key != rank}
    if rank == 1:
        shard_exchange.as_integers = lambda tensor: os._exit(3)
    began = time.monotonic()
    try:
        exchange_by_distribution({rank: shards[rank]}, rest, made, None, algorithm)
    except RuntimeError as error:  # GatherError is one
        return {"text": str(error), "seconds": time.monotonic() - began}
    return {"text": "nothing was raised"}


def objects(rank: int) -> list[Any]:
    own = {
        ShardId("rng", (rank,), (1,)): {"state": torch.arange(rank + 1), "step": 2**70 + rank},
        ("plain", rank): [None],
    }
    found = exchange_loaded_objects_gather_object(own)
    assert all(found[key] is value for key, value in own.items())
    assert found[ShardId("rng", (1,), (1,))]["state"].tolist() == [0, 1]
    assert all(type(key) is (ShardId if key[0] == "rng" else tuple) for key in found)
    shown = sorted([str(tuple(key)), value["step"] if "rng" in key else value] for key, value in found.items())
    return [
        shown,
        told(lambda: exchange_loaded_objects_gather_object({"same": 1} if rank != 1 else {"other": 1})),
        told(lambda: exchange_loaded_objects_gather_object({"x": object() if rank == 2 else 1} if rank else {})),
    ]


def one_group_after_another(rank: int, folder: str) -> bool:
    """The links end with the process group, and what was kept stays; the next group has links of its own."""
    mine = torch.full((1 << 20,), 7, dtype=torch.uint8) if rank == 0 else None
    kept = shared(mine)
    for number in range(2):
        dist.destroy_process_group()
        gc.collect()
        assert len(shared_mesh._known) == 0
        store = f"file://{folder}/again{number}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
        if mine is not None:
            mine = torch.full((1 << 20,), 8 + number, dtype=torch.uint8)
        assert int(shared(mine)[0]) == 8 + number
    return bool((kept == 7).all())
