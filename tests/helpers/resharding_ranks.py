"""What the ranks of test_shards run. In a module that ranks can import."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

from modelexport.checkpoints.safetensors.file import Reader
from modelexport.models.opening import open_model
from modelexport.models.rules import tensor_rules
from modelexport.sharding.boxes import slices
from modelexport.sharding.exchange import ExchangeReport
from modelexport.sharding.plan import Parallelism
from modelexport.sharding.reshard import reshard
from modelexport.sharding.shard_plan import build_shard_plan
from tests.helpers.shard_plans import layers_of, planned_shards


def through_parallelisms(directory: str, route: list[tuple[int, int, int]]) -> None:
    """Hold a checkpoint's tensors as the first stop says, reshard them from stop to stop, compare at each."""
    rank, checkpoint = dist.get_rank(), open_model(directory)
    rules = tensor_rules(checkpoint)
    with Reader(checkpoint) as reader:
        whole = {rule.name: reader.read(checkpoint.infos[rule.name]) for rule in rules}
    held: list = []
    for number, stop in enumerate(route):
        plan = build_shard_plan(rules, Parallelism(*stop), layers=layers_of(rules))
        wanted = planned_shards(plan, rank)
        if number == 0:
            held = [replace(shard, data=whole[shard.key][slices(shard.box)].clone()) for shard in wanted]
            continue
        cost = ExchangeReport()
        found = reshard(held, wanted, report=cost)
        for shard in wanted:
            part = whole[shard.key][slices(shard.box)].contiguous()
            assert torch.equal(found[shard.id].view(-1).view(torch.uint8), part.view(-1).view(torch.uint8)), shard.key
        held = [replace(shard, data=found[shard.id]) for shard in wanted]
        assert cost.needed <= sum(shard.nbytes for shard in wanted)
