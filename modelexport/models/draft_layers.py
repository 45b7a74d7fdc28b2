"""Checkpoints without their draft layers, which nothing here can write yet."""

from __future__ import annotations

from dataclasses import replace

from modelexport.checkpoints.safetensors.file import Checkpoint
from modelexport.models.architecture import family_of, read_dimensions
from modelexport.models.families.drafts import draft_counts, without_counts

__all__ = ["without_drafts"]


def without_drafts(checkpoint: Checkpoint) -> tuple[Checkpoint, list[str]]:
    """Takes the draft layers out of a checkpoint, and out of what its config.json promises.

    Engines read the counts of config.json to set up speculative decoding, and would look for layers that are not there.

    Returns:
        The checkpoint, whose ``left_out`` names the tensors, and warnings: none, or one for the user.

    Raises:
        CheckpointError: config.json counts draft layers in other than whole numbers.
        PlanError: the architecture is unknown.
    """
    config = checkpoint.config
    if config is None:
        return checkpoint, []
    counts = draft_counts(config)
    family = family_of(config, checkpoint.infos)
    dimensions = read_dimensions(config, family)
    drafts = {name: why for name in checkpoint.infos if (why := family.draft_reason(name, dimensions)) is not None}
    if not counts and not drafts:
        return checkpoint, []
    changed = "".join(f"; config.json's {key} becomes 0, not {count}" for key, count in counts.items())
    has = f"{len(drafts)} tensors of draft layers (multi-token prediction) are not written, as nothing here can yet"
    if not drafts:
        has = "the source has no tensors of the draft layers that it promises"
    warning = f"{has}{changed}: engines run the model, and cannot draft tokens with it (speculative decoding)"
    kept = replace(
        checkpoint,
        config=without_counts(config),
        infos={name: info for name, info in checkpoint.infos.items() if name not in drafts},
        placements={name: places for name, places in checkpoint.placements.items() if name not in drafts},
        left_out={**checkpoint.left_out, **drafts},
    )
    return kept, [warning]
