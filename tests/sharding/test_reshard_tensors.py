"""Tensors in ranks, from any sharding to any other."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from modelexport.sharding.boxes import Box, intersect, uncovered, volume
from modelexport.sharding.moves import Holding, plan_moves
from modelexport.sharding.reshard import reshard
from modelexport.sharding.tensor import ShardedTensor, ShardId
from tests.distributed._gather_targets import run_ranks
from tests.sharding import _reshard_targets as targets

pytestmark = pytest.mark.timeout(120)


@given(st.integers(0, 10**6))
def test_each_rank_gets_what_it_lacks_once_from_one_who_has_it(seed: int) -> None:
    chance = random.Random(seed)
    world, shape = chance.randint(1, 5), tuple(chance.randint(1, 8) for _ in range(chance.randint(0, 3)))
    held: list[list[Box]] = [[] for _ in range(world)]
    for box in targets.random_grid(chance, shape):
        for place in chance.sample(range(world), chance.randint(1, world)):
            held[place].append(box)
    for place in range(world):  # some that overlap the grid
        box = targets.random_box(chance, shape)
        if chance.random() < 0.3 and box not in held[place]:
            held[place].append(box)
    wanted = [sorted({targets.random_box(chance, shape) for _ in range(chance.randint(0, 3))}) for _ in range(world)]
    moves = plan_moves(*([[Holding("w", box, torch.int16, shape) for box in boxes] for boxes in side]
                         for side in (held, wanted)), range(world))  # fmt: skip
    for place in range(world):
        received = [move.box for move in moves if place in move.targets]
        for wish in wanted[place]:
            assert uncovered(wish, [*held[place], *received]) == []
        for index, box in enumerate(received):
            assert all(intersect(box, other) is None for other in [*received[:index], *held[place]]), "nothing twice"
            assert uncovered(box, wanted[place]) == [], "nothing that nobody asked for"
    for move in moves:
        assert move.held in held[move.source]
        assert uncovered(move.box, [move.held]) == []
        assert move.source not in move.targets
        assert move.nbytes == 2 * volume(move.box)
    assert len({(move.box, target) for move in moves for target in move.targets}) == sum(
        len(move.targets) for move in moves
    )


def test_senders_share_the_work() -> None:
    """Four ranks hold everything, four nothing: each of the first sends a quarter."""
    shards = [Holding(f"w{number}", ((0, 8),), torch.int8, (8,)) for number in range(16)]
    moves = plan_moves([shards] * 4 + [[]] * 4, [[]] * 4 + [shards] * 4, range(8))
    assert [sum(move.source == place for move in moves) for place in range(4)] == [4] * 4
    assert all(move.targets == (4, 5, 6, 7) for move in moves)


def test_any_cut_of_any_dtype_to_any_other(tmp_path: Path) -> None:
    results = run_ranks(targets.reshard_at_random, 4, tmp_path / "ranks", 5)
    assert all(sum(amounts) > 0 for amounts in results)


def test_there_and_back_is_bit_identical(tmp_path: Path) -> None:
    first, *others = run_ranks(targets.round_trip, 4, tmp_path / "ranks")
    assert first[0] == first[1]
    assert all(len(found) == 1 for found in others), "the others have nothing left"


def test_shared_memory_serves_batch_after_batch(tmp_path: Path) -> None:
    for reserved, copied in run_ranks(targets.bounded_batches, 2, tmp_path / "ranks"):
        assert copied == 16 << 20
        assert reserved <= 4 << 20, "a batch that is placed, and two that are not acknowledged"


def test_errors_are_the_same_on_every_rank(tmp_path: Path) -> None:
    results = run_ranks(targets.wrong_reshards, 2, tmp_path / "ranks")
    assert results[0] == results[1]
    expected = {
        "algorithm": "there is no exchange algorithm 'shared_memori'; did you mean 'shared_memory'?",
        "missing": "rank 0 wants [0:4, 0:6] of tensor 'w', but no rank holds [2:4, 0:6] of it",
        "unknown": "rank 1 wants [0:4, 0:6] of tensor 'v', but no rank holds [0:4, 0:6]",
        "dtype": "tensor 'w' is torch.float32 on rank 0 and torch.int8 on rank 1",
        "shape": "tensor 'w' has the global shape [4, 6] on rank 0 and [5, 6] on rank 1",
        "beyond": "rank 1 holds [3:5, 0:6] of tensor 'w', whose global shape is [4, 6]",
        "twice": "rank 1: held has [2:4, 0:6] of tensor 'w' twice",
        "wanted twice": "rank 1: wanted has [0:4, 0:6] of tensor 'w' twice",
        "no data": "must be ShardedTensors with data",
        "meta": "held has shard 'w' at [2, 0] of shape [2, 6] without dense data (torch.strided on meta)",
        "no place": "has no global_offset",
        "not an id": "held has the id 'w'",
        "other shape": "a tensor of shape [4, 6] for shard 'w' at [0, 0] of shape [2, 6]",
    }
    assert results[0].pop("then") == "torch.Size([4, 6])"
    assert results[0].keys() == expected.keys()
    for name, text in expected.items():
        assert results[0][name].startswith("UsageError: reshard: "), name
        assert text in results[0][name], name


def test_a_process_by_itself_cuts_and_joins() -> None:
    full = torch.arange(24).view(4, 6)
    halves = [
        ShardedTensor.part("w", full[:, :3], (4, 6), (0, 0)),
        ShardedTensor.part("w", full[:, 3:], (4, 6), (0, 3)),
    ]
    middle = ShardedTensor("w", full.dtype, (2, 4), (4, 6), (1, 1))
    empty = ShardedTensor("w", full.dtype, (0, 6), (4, 6), (4, 0))
    own = ShardedTensor("w", full.dtype, (4, 2), (4, 6), (0, 4))
    result = reshard(halves, [middle, empty, own])
    assert [result[shard.id].tolist() for shard in (middle, empty, own)] == [
        full[1:3, 1:5].tolist(), [], full[:, 4:].tolist()
    ]  # fmt: skip
    assert all(tensor.is_contiguous() for tensor in result.values())
    assert result[own.id].untyped_storage().data_ptr() != full.untyped_storage().data_ptr()
    shared = reshard({shard.id: shard.data for shard in halves}, [own], share=True)[ShardId("w", (0, 4), (4, 2))]
    assert shared.untyped_storage().data_ptr() == full.untyped_storage().data_ptr()
