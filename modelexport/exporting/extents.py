"""The parts of the source's files that a step reads, to be fetched ahead of it where they lie elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from modelexport.checkpoints.mirrors.mirror import Extent
from modelexport.checkpoints.safetensors.file import Checkpoint
from modelexport.checkpoints.safetensors.reader import extents
from modelexport.exporting.plan import ExportStep


def step_extents(source: Checkpoint, step: ExportStep, ranks: Sequence[int] | None) -> list[Extent]:
    """The parts of files that ranks read for a step.

    Args:
        ranks: the ranks, where each reads what it emits; None: they read tensors whole.
    """
    found: list[Extent] = []
    for task in step.read:
        if task.cached is not None:
            continue
        if task.stored is not None:
            for info in task.stored.tensors.values():
                found += extents(source, info)
            continue
        rows = None
        if ranks is not None:
            boxes = [box for rank in ranks if (box := task.owned_box(rank)) is not None]
            if not boxes:
                continue
            rows = (min(box[0][0] for box in boxes), max(box[0][1] for box in boxes)) if boxes[0] else None
        found += extents(source, task.info, rows)
    return found
