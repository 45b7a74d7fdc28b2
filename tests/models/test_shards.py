"""A plan's shards as tensors in ranks: a quantised model goes from parallelism to parallelism without a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from modelexport.distributed.launch import MultiprocessConfig, launch_subprocesses
from modelexport.exporting import export
from modelexport.models.opening import open_model
from modelexport.models.rules import tensor_rules
from modelexport.sharding.boxes import volume, whole
from modelexport.sharding.plan import Parallelism
from modelexport.sharding.shard_plan import build_shard_plan
from tests.helpers.models import make_llama
from tests.helpers.resharding_ranks import through_parallelisms
from tests.helpers.shard_plans import layers_of, planned_shards


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = make_llama(model_type="mixtral", heads=4, kv_heads=1, head_dim=128, intermediate=512, experts=4, layers=3)
    out = tmp_path_factory.mktemp("quantised") / "int4"
    export(model=str(source), quant="int4", out=str(out), quiet=True)
    return out


def test_main_replicas_tile_every_tensor(quantised: Path) -> None:
    rules = tensor_rules(open_model(quantised))
    plan = build_shard_plan(rules, Parallelism(2, 3, 2), layers=layers_of(rules))
    shards = [shard for rank in range(12) for shard in planned_shards(plan, rank)]
    for rule in rules:
        mains = [shard for shard in shards if shard.key == rule.name and shard.is_main_replica]
        assert sum(volume(shard.box) for shard in mains) == volume(whole(rule.shape)), rule.name
    assert planned_shards(plan, 12) == []
    keys = next(shard for shard in shards if shard.key.endswith("k_proj.weight_scale"))
    assert (keys.local_shape, keys.global_shape) == ((128, 1), (128, 1)), "the one key head is on every rank"


@pytest.mark.timeout(120)
def test_from_parallelism_to_parallelism_in_memory(quantised: Path) -> None:
    route = [(4, 1, 1), (2, 2, 1), (1, 1, 4), (1, 3, 1), (2, 1, 2), (4, 1, 1)]
    config = MultiprocessConfig(world_size=4, model_parallelism=4, backend="gloo", timeout=100.0)
    launch_subprocesses(through_parallelisms, config, None, 0, str(quantised), route)
