"""The plan of a target in a given format and parallelism: decided, and checked, before a byte is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelexport.checkpoints.safetensors.file import INDEX_NAME, Checkpoint, Layout, TensorInfo, plan_layout
from modelexport.checkpoints.safetensors.layout import DEFAULT_MAX_SHARD_BYTES
from modelexport.checkpoints.safetensors.placement import Placement, whole_place
from modelexport.models import checkpoint_formats as formats
from modelexport.sharding.plan import Parallelism
from modelexport.sharding.rules import TensorRule
from modelexport.sharding.shard_plan import ShardPlan, build_shard_plan


@dataclass(frozen=True)
class TargetPlan:
    """A checkpoint to be.

    Attributes:
        format: as ``--format`` spells it.
        plan: who holds what.
        layout: where every byte goes.
        side_files: the format's own files beside the weights: name -> content.
    """

    format: str
    plan: ShardPlan
    layout: Layout
    side_files: Mapping[str, bytes]


def plan_target(
    format_name: str,
    rules: Sequence[TensorRule],
    config: dict[str, Any],
    parallelism: Parallelism,
    *,
    max_shard_bytes: int | None,
    source: Path | None = None,
) -> TargetPlan:
    """Plan a checkpoint.

    Args:
        max_shard_bytes: of the largest file; None: as the format has it, ``MAX_SHARD_BYTES``, or else 5 GB.
        source: the directory of the model's tokenizer, for formats that have it in their weights' file.

    Raises:
        UsageError: no such format.
        PlanError: the model cannot be cut so, or the format cannot hold it; everything that stands in the way.
    """
    module = formats.get(format_name)
    layers = 1 + max((rule.layer for rule in rules if rule.layer is not None), default=-1)
    plan = build_shard_plan(rules, parallelism, layers=layers)
    if max_shard_bytes is None:
        max_shard_bytes = getattr(module, "MAX_SHARD_BYTES", DEFAULT_MAX_SHARD_BYTES)
    if module.NAME == "hf" and parallelism.size == 1:
        specs = [(rule.name, rule.dtype, rule.shape) for rule in rules]
        layout = plan_layout(specs, max_shard_bytes=max_shard_bytes)
        index = {INDEX_NAME: layout.index_json().encode()} if len(layout.files) > 1 else {}
        return TargetPlan(format_name, plan, layout, index)
    own: dict[str, Any] = {"source": source} if getattr(module, "READS_SOURCE", False) else {}
    layout = module.lay_out(plan, config, max_shard_bytes=max_shard_bytes, **own)
    return TargetPlan(format_name, plan, layout, module.side_files(plan, config, layout))


def check_source(target: TargetPlan, source: Checkpoint) -> None:
    """Let the format compare numbers of the source that it can store once only. Reads them.

    Raises:
        CheckpointError: they differ.
    """
    check = getattr(formats.get(target.format), "check_source", None)
    if check is not None:
        check(target.plan.rules.values(), source)


def places(held: Layout | Checkpoint, info: TensorInfo) -> tuple[Placement, ...]:
    """Every place of a tensor in a layout or a checkpoint, also where it is a single one."""
    found = held.placements.get(info.name)
    return (whole_place(info),) if found is None else found
