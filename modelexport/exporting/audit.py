"""The check that ends an export: what the plan promised, against what lies in the files."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from modelexport.checkpoints.safetensors.file import Checkpoint, Layout, TensorInfo
from modelexport.distributed.launch import phase
from modelexport.errors import CheckpointError
from modelexport.exporting.plan import ExportPlan, full_name
from modelexport.inspection.verify.audit import run_audit
from modelexport.inspection.verify.items import AuditItem, WrittenPiece, decibels
from modelexport.jobs.progress import ReadBack
from modelexport.models.opening import open_model
from modelexport.models.stacked import as_written, held


def audit(
    plan: ExportPlan,
    layout: Layout,
    source: Checkpoint,
    payload: Path,
    records: Mapping[str, Any],
    rank: int,
    world: int,
    *,
    changed: Collection[str] = (),
) -> list[dict[str, Any]]:
    """Check this rank's share of the modules in ``payload``; returns a JSON-able entry for each.

    Of linears that are quantised in the source, it has ``exact``: whether their values are the same.

    Args:
        records: step id -> the journal's record, with the pieces that were written and the errors that were made.
        changed: modules whose weights are not compared with the source's.

    Raises:
        CheckpointError: the files do not hold the planned tensors, or their bytes are not those written.
    """
    written = as_written(open_model(payload), layout.infos)
    _same_structure(layout.infos, written)
    pieces: dict[str, list[WrittenPiece]] = {}
    for record in records.values():
        for value in record["pieces"]:
            piece = WrittenPiece.from_json(value)
            pieces.setdefault(piece.name, []).append(piece)
    own = share(plan_items(plan, written), rank, world)
    checks = run_audit(
        own,
        written,
        None,
        pieces,
        threads=torch.get_num_threads(),
        progress=lambda name: phase(f"reading back {name}"),
        advance=ReadBack(sum(item.nbytes for item in own)).add,
    )
    damaged = [text for check in checks for text in check.damaged]
    if damaged:
        raise CheckpointError(
            f"{len(damaged)} piece(s) read back differ from what was written: {'; '.join(damaged[:3])}; "
            f"the storage or the memory is at fault: remove {payload.parent} and run the same command again"
        )
    errors = _errors(records, changed)
    held_before = {name for name, tensor in source.computed.items() if held(tensor) is not None}
    twice = {
        full_name(step.layer, task.path)
        for step in plan.steps
        for task in step.tasks
        if task.quantised and task.info.name in held_before
    }
    return [
        {
            "name": check.name,
            "sha256": check.sha256,
            "sqnr_db": _finite(decibels(*errors[check.name])) if check.name in errors else None,
            **({"exact": errors[check.name][0] == 0} if check.name in twice & errors.keys() else {}),
        }
        for check in checks
    ]


def _errors(records: Mapping[str, Any], changed: Collection[str]) -> dict[str, tuple[float, float]]:
    """Module -> squared error and squared weights, over all steps that it is written in."""
    parts: dict[str, list[Sequence[float]]] = {}
    for record in records.values():
        for name, sums in record["errors"].items():
            if name not in changed:
                parts.setdefault(name, []).append(sums)
    return {
        name: (math.fsum(noise for noise, _ in sums), math.fsum(signal for _, signal in sums))
        for name, sums in parts.items()
    }


def plan_items(plan: ExportPlan, written: Checkpoint) -> Iterator[AuditItem]:
    """One item per module, in the plan's order; the slabs of a module are one item."""
    modules: dict[str, dict[str, TensorInfo]] = {}
    for step in plan.steps:
        for task in step.tasks:
            name = full_name(step.layer, task.path)
            found = {out.name: written.infos[full_name(name, out.name)] for out in task.outputs}
            modules.setdefault(name, {}).update(found)
    for name, tensors in modules.items():
        yield AuditItem(name, tensors, None, None)


def share(items: Iterable[AuditItem], rank: int, world: int) -> list[AuditItem]:
    """This rank's items: the largest first, each to the rank with the least to do so far."""

    loads = [0] * world
    mine = []
    for item in sorted(items, key=lambda item: (-item.nbytes, item.name)):
        chosen = loads.index(min(loads))
        loads[chosen] += item.nbytes
        if chosen == rank:
            mine.append(item)
    return mine


def _finite(value: float | None) -> float | None:
    """None for "exact" and "not compared": JSON has no infinity. Two decimals are all that is meaningful."""
    return None if value is None or math.isinf(value) else round(value, 2)


def _same_structure(expected: Mapping[str, TensorInfo], written: Checkpoint) -> None:
    for name, info in expected.items():
        found = written.infos.get(name)
        if found is None or (found.dtype, found.shape) != (info.dtype, info.shape):
            state = "is missing" if found is None else f"is {found.dtype} {list(found.shape)}"
            raise CheckpointError(f"read back: {name} {state}; {info.dtype} {list(info.shape)} was to be written")
    extra = sorted(set(written.infos) - set(expected))
    if extra:
        raise CheckpointError(f"read back: {len(extra)} tensor(s) nobody planned, e.g. {extra[0]}")
