"""Everything of a resharding that comes before its first byte: checks, the plan, the layout of the target."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from modelexport.checkpoints.safetensors.file import Checkpoint
from modelexport.checkpoints.staging import check_target, resolve_target
from modelexport.errors import UsageError
from modelexport.inspection.record.reading import ExportRecord, read_record
from modelexport.models import checkpoint_formats as formats
from modelexport.models.draft_layers import without_drafts
from modelexport.models.language_part import language_part_alone
from modelexport.models.multipliers import multiplied
from modelexport.models.opening import open_model
from modelexport.models.rules import tensor_rules
from modelexport.models.stacked import experts_apart, experts_stacked
from modelexport.models.structure import check_whole
from modelexport.models.target_plan import TargetPlan, check_source, plan_target
from modelexport.models.ties import check_ties
from modelexport.quantization.methods import read_quantization_config
from modelexport.recipe import ReshardRecipe
from modelexport.resharding.plan import ReshardStep, plan_steps
from modelexport.sharding.plan import Parallelism
from modelexport.system.run_log import check_log
from modelexport.system.startup import without_collector


@dataclass(frozen=True)
class PreparedReshard:
    """A resharding before its first weight is read.

    Attributes:
        record: the source's modelexport.json, or None.
        warnings: what is lost, a line each.
        drafts: the source's tensors of draft layers, which are not written -> why.
    """

    recipe: ReshardRecipe
    checkpoint: Checkpoint
    target: TargetPlan
    steps: list[ReshardStep]
    record: ExportRecord | None
    warnings: tuple[str, ...] = ()
    drafts: Mapping[str, str] = field(default_factory=dict)

    def warn(self) -> None:
        """Print the warnings, before the work starts."""
        if not self.recipe.quiet and not self.recipe.json:
            for warning in self.warnings:
                print(f"warning: {warning}", file=sys.stderr, flush=True)


def prepare(recipe: ReshardRecipe) -> PreparedReshard:
    """Read the headers and plan everything; no weight is read and nothing is written."""
    with without_collector():  # a hundred thousand small objects: the collector would walk them over and over
        return _prepare(recipe)


def _prepare(recipe: ReshardRecipe) -> PreparedReshard:
    formats.get(recipe.format)
    source = Path(os.path.expanduser(recipe.checkpoint))
    opened = open_model(source, recipe.config)
    check_whole(opened.config, {"tp": recipe.tp, "pp": recipe.pp, "ep": recipe.ep})
    checkpoint, dropped = without_drafts(opened, formats.why_no_drafts(recipe.format, opened.config))
    drafts = {name: why for name, why in checkpoint.left_out.items() if name not in opened.left_out}
    _check_encoding(recipe, checkpoint)
    if formats.wants_experts_apart(recipe.format):
        checkpoint = experts_apart(checkpoint)
    elif formats.has_experts_apart(checkpoint.format):
        checkpoint = experts_stacked(checkpoint)
    if formats.wants_language_part(recipe.format):
        checkpoint, beside = language_part_alone(checkpoint)
        dropped = [*dropped, *beside]
    if formats.wants_multiplied(recipe.format):
        checkpoint = multiplied(checkpoint)
    rules = tensor_rules(checkpoint)
    check_ties(checkpoint)
    target = plan_target(
        recipe.format,
        rules,
        checkpoint.config or {},
        Parallelism(recipe.tp, recipe.pp, recipe.ep),
        max_shard_bytes=recipe.max_shard_bytes,
        source=checkpoint.directory,
    )
    check_source(target, checkpoint)
    record = read_record(checkpoint.directory)
    return PreparedReshard(
        recipe, checkpoint, target, plan_steps(rules, checkpoint.infos), record, tuple(dropped), drafts
    )


def check_target_of(recipe: ReshardRecipe) -> None:
    """Refuse, before anything is opened, a target that holds the source, or that is not to be replaced."""
    if recipe.out is None:
        return
    target, source = resolve_target(recipe.out), Path(os.path.expanduser(recipe.checkpoint))
    if os.path.exists(source) and source.resolve().is_relative_to(target):
        raise UsageError(f"--out {recipe.out} would replace the source, {source}: choose another target")
    if not recipe.dry_run:
        check_target(recipe.out, overwrite=recipe.overwrite)
        if recipe.log is not None:
            check_log(recipe.log, recipe.out)


def _check_encoding(recipe: ReshardRecipe, checkpoint: Checkpoint) -> None:
    """Refuse a ``--format`` that is an encoding of quantised linears, where the checkpoint has another or none."""
    if recipe.format in formats.containers():
        return
    quantization = read_quantization_config(checkpoint.config)
    own = None if quantization is None else quantization.method
    if own != formats.method_of(recipe.format).METHOD:
        has = "is not quantised" if own is None else f"is quantised as '{own}'"
        raise UsageError(
            f"reshard --format {recipe.format}: {checkpoint.directory} {has}, and reshard moves tensors as they are: "
            f"modelexport {'--model' if own is None else 'convert'} {recipe.checkpoint} --format {recipe.format} "
            "spells them so"
        )
