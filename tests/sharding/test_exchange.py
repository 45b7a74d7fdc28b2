"""Exchanging loaded shards between ranks, over gloo: every algorithm, every dtype, and what goes wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from modelexport.errors import UsageError
from modelexport.sharding.exchange import (
    _get_empty_tensor_for_exchange,
    determine_main_replica_uniform_distribution,
    exchange_by_distribution,
    exchange_loaded_objects_gather_object,
    is_float8tensor,
)
from modelexport.sharding.tensor import ShardedTensor
from tests.distributed._gather_targets import run_ranks
from tests.sharding import _exchange_targets as targets

pytestmark = pytest.mark.timeout(120)


def test_every_algorithm_gives_the_same_and_p2p_sends_what_is_needed(tmp_path: Path) -> None:
    results = run_ranks(targets.exchange_everything, 4, tmp_path / "ranks")
    total = {
        name: {field: sum(result[name][field] for result in results) for field in ("needed", "sent", "received")}
        for name in targets.ALGORITHMS
    }
    needed = total["p2p"]["needed"]
    assert total["p2p"] == {"needed": needed, "sent": needed, "received": needed}
    for result in results:
        assert result["p2p"]["received"] == result["p2p"]["needed"]
        assert result["shared_memory"]["mapped"] == result["shared_memory"]["needed"]
        assert result["auto"]["algorithm"] == "shared_memory"
    assert total["shared_memory"]["sent"] == 0
    assert sum(result["shared_memory"]["copied"] for result in results) < needed, "once, whoever wants it"
    for name in ("broadcast", "gather_rounds", "gather_object"):
        assert total[name]["sent"] > needed, "some of which nobody asked for"
        assert total[name]["needed"] == needed


def test_errors_are_the_same_on_every_rank(tmp_path: Path) -> None:
    results = run_ranks(targets.wrong_exchanges, 3, tmp_path / "ranks")
    assert results[0] == results[1] == results[2]
    expected = {
        "unknown algorithm": "rank 1: there is no exchange algorithm 'brodcast'; did you mean 'broadcast'?",
        "other algorithm": "rank 2 asks for the algorithm 'p2p' and rank 0 for 'broadcast'",
        "no distribution": "rank 2: there is no shard distribution",
        "other distribution": "ranks 0 and 2 have different distributions",
        "other group": "'a' at [0] of shape [4] to rank 7, but the group has 3 ranks",
        "undescribed": "does not describe shard 'a'",
        "duplicate": "shard 'a' at [0] of shape [4] was loaded by ranks [0, 2]; only rank 0 has it to load",
        "not loaded": "rank 0 needs shard 'a' at [0] of shape [4], which rank 0 was to load; nobody has loaded it",
        "shape": "rank 0: shard 'a' at [0] of shape [4] was loaded as torch.float32 of shape [5]",
        "dtype": "rank 1: shard 'b' at [0] of shape [6] was loaded as torch.int32",
        "no tensor": "is loaded as int",
        "meta": "is on the meta device",
        "sparse": "is sparse",
        "wanted otherwise": "rank 1: shard 'a' at [0] of shape [4] is needed as torch.int8",
        "not in the group": "rank 2: shard 'stray' at [0] of shape [1] is needed, but no rank of this group loads it",
        "other calls": "rank 1 calls exchange_loaded_tensors_broadcast where rank 0 calls exchange_by_distribution",
    }
    assert results[0].keys() == expected.keys()
    for name, text in expected.items():
        assert results[0][name].startswith("UsageError: "), name
        assert text in results[0][name], name


def test_descriptions_that_disagree_are_errors_on_every_rank(tmp_path: Path) -> None:
    results = run_ranks(targets.wrong_descriptions, 3, tmp_path / "ranks")
    assert results[0] == results[1] == results[2]
    assert "rank 1: shard 'w' at [0] of shape [4] occurs twice" in results[0]["twice"]
    assert "float32 of shape [8] on rank 0, and torch.int8 of shape [8] on rank 1" in results[0]["dtype"]
    assert "[8] on rank 0, and torch.float32 of shape [9] on rank 1" in results[0]["whole"]
    assert "rank 1 has [ignore_groups, algorithm] = [True, 'greedy']" in results[0]["how"]
    assert "did you mean 'greedy'" in results[0]["algorithm"]


def test_who_saves_and_who_loads_in_each_group(tmp_path: Path) -> None:
    results = run_ranks(targets.distributions, 4, tmp_path / "ranks")
    assert results[0] == results[1]
    assert results[2] == results[3]
    both = [0, 1]
    assert results[0][0] == [[["b", 0], ["a", 1]], ["a", "b"], [["a", both], ["b", both]]]
    assert results[0][1] == [
        [["b", 0], ["a", 1], ["c", 1]], ["a", "b"], [["a", both], ["b", both], ["c", both]]
    ]  # fmt: skip
    assert results[2][0] == [[["c", 0]], ["c"], [["c", both]]]
    assert results[2][1][0] == [["c", 0], ["b", 1], ["a", 0]]


def test_groups_exchange_by_themselves_in_their_own_order(tmp_path: Path) -> None:
    assert run_ranks(targets.exchange_in_groups, 4, tmp_path / "ranks") == [True] * 4


def test_shared_memory_is_used_again_only_when_all_have_let_go(tmp_path: Path) -> None:
    results = run_ranks(targets.lifetimes, 3, tmp_path / "ranks")
    for result in results:
        assert result["seen"] == 2, "what was loaded into the arena is mapped where it lies"
        assert result["last"] == 9
        assert result["reserved"][-1] == result["reserved"][0]


def test_groups_of_a_process_follow_each_other(tmp_path: Path) -> None:
    assert run_ranks(targets.one_group_after_another, 2, tmp_path / "ranks", str(tmp_path)) == [True, True]


def test_a_rank_without_memory_fails_all_who_wait_for_it(tmp_path: Path) -> None:
    first, *others = run_ranks(targets.no_memory, 3, tmp_path / "ranks")
    assert first == ["GatherError: no room for 1048576 more bytes", "7"]
    for text, then in others:
        assert "rank 0 could not hand over" in text
        assert "no room for 1048576 more bytes" in text
        assert then == "7", "the next exchange works"


@pytest.mark.parametrize("algorithm", ["broadcast", "p2p", "shared_memory"])
def test_the_end_of_a_rank_ends_the_wait_for_it(algorithm: str, tmp_path: Path) -> None:
    first, dead, last = run_ranks(targets.dies, 3, tmp_path / "ranks", algorithm, alive=False)
    assert dead is None
    for result in (first, last):
        assert result["text"] != "nothing was raised"
        assert result["seconds"] < 20


def test_objects(tmp_path: Path) -> None:
    results = run_ranks(targets.objects, 3, tmp_path / "ranks")
    assert results[0] == results[1] == results[2]
    found, duplicate, unfit = results[0]
    assert found[:3] == [[f"('plain', {rank})", [None]] for rank in range(3)]
    assert found[3:] == [[f"('rng', ({rank},), (1,))", 2**70 + rank] for rank in range(3)]
    assert "ranks 0 and 2 have both loaded same" in duplicate
    assert "rank 2: TypeError" in unfit


# ------------------------------------------------------------------------ alone


def test_a_process_by_itself() -> None:
    shard = ShardedTensor.whole("w", torch.arange(3))
    assert determine_main_replica_uniform_distribution({"w": shard}, None) is None
    assert exchange_by_distribution({shard.id: shard.data}, {}, None) == {shard.id: shard.data}
    assert exchange_loaded_objects_gather_object({"a": 1}) == {"a": 1}
    with pytest.raises(UsageError, match=r"'w' at .* is not loaded, and this rank is alone"):
        exchange_by_distribution({}, {shard.id: shard}, None)
    with pytest.raises(UsageError, match="did you mean 'p2p'"):
        exchange_by_distribution({}, {}, None, exchange_algo="p2")
    with pytest.raises(UsageError, match="occurs twice"):
        determine_main_replica_uniform_distribution([shard, shard], None)


def test_the_tensor_for_a_shard() -> None:
    here, cpu = torch.device("meta"), torch.device("cpu")
    needed = ShardedTensor("a", torch.uint16, (2, 3), (2, 3), (0, 0), 0, torch.zeros(2, 3, dtype=torch.uint16))
    bare, other = ShardedTensor("b", torch.bool, (), (), ()), ShardedTensor("c", torch.int8, (0,), (4,), (4,))
    loaded: dict[Any, torch.Tensor] = {}
    shards = {needed.id: needed, bare.id: bare}
    for shard, device in ((needed, cpu), (bare, None), (other, None)):
        tensor, home = _get_empty_tensor_for_exchange(shard.id, shards, {other.id: other}, loaded, here)
        assert (tensor.shape, tensor.dtype, tensor.device.type) == (shard.local_shape, shard.dtype, "meta")
        assert home == device
        assert (loaded.get(shard.id) is tensor) == (shard is not other)
    with pytest.raises(UsageError, match="nothing describes shard x"):
        _get_empty_tensor_for_exchange("x", shards, {}, loaded)
    assert _get_empty_tensor_for_exchange(bare.id, shards, {}, {})[0].device.type in ("cpu", "cuda")


def test_transformer_engines_tensors_are_known_by_name() -> None:
    kind: Any = type("Float8Tensor", (torch.Tensor,), {"__module__": "transformer_engine.pytorch.tensor"})
    other: Any = type("Float8Tensor", (torch.Tensor,), {"__module__": "elsewhere"})
    assert is_float8tensor(torch.zeros(2).as_subclass(kind))
    assert not is_float8tensor(torch.zeros(2).as_subclass(other))
    assert not is_float8tensor(torch.zeros(2, dtype=torch.float8_e4m3fn))
