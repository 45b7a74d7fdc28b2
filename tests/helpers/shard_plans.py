"""Shard plans in tests: their layers, and the shards that a rank holds."""

from __future__ import annotations

from collections.abc import Sequence

from modelexport.checkpoints.safetensors.file import torch_dtype
from modelexport.sharding.boxes import extent, offset
from modelexport.sharding.rules import TensorRule
from modelexport.sharding.shard_plan import ShardPlan
from modelexport.sharding.tensor import ShardedTensor


def layers_of(rules: Sequence[TensorRule]) -> int:
    """Decoder layers of a model of these tensors."""
    return max((rule.layer + 1 for rule in rules if rule.layer is not None), default=0)


def planned_shards(plan: ShardPlan, rank: int) -> list[ShardedTensor]:
    """Every rectangle that ``rank`` holds, in the plan's order, without data; none for ranks that the plan has not.

    A fused tensor has one for each of its parts. The first rank that holds a rectangle has the main replica.
    """
    if rank >= plan.parallelism.size:
        return []
    return [
        ShardedTensor(
            key=name,
            dtype=torch_dtype(plan.rules[name].dtype),
            local_shape=extent(box),
            global_shape=plan.rules[name].shape,
            global_offset=offset(box),
            replica_id=plan.owners(name, rank, number).index(rank),
        )
        for name in plan.names(rank)
        for number, (_, box) in enumerate(plan.held(name, rank))
    ]
