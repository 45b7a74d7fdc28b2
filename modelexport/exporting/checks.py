"""What is wrong with an export and shows before a weight is read: said before ranks are started."""

from __future__ import annotations

from modelexport.checkpoints.safetensors.file import Checkpoint
from modelexport.checkpoints.source import Source, is_local, resolve_source
from modelexport.checkpoints.staging import check_target, resolve_target
from modelexport.errors import PlanError, UsageError
from modelexport.exporting.plan import ExportPlan
from modelexport.models.architecture import why_no_language_model
from modelexport.quantization.assignment import KEEP
from modelexport.quantization.calibration.text import TokenDocuments
from modelexport.quantization.methods import QUANTIZATION_KEYS
from modelexport.recipe import ExportRecipe

__all__ = ["check_apart", "check_calibration", "check_early", "check_kept", "check_work"]


def check_calibration(recipe: ExportRecipe, source: Source, checkpoint: Checkpoint) -> None:
    """What is seen at once, before ranks are started: the rest is said where the text is read.

    Raises:
        PlanError: the source is quantised, or calibration cannot run it.
        UsageError: the text or the tokenizer is missing.
    """
    if any((checkpoint.config or {}).get(key) for key in QUANTIZATION_KEYS):
        needed = recipe.is_calibrated or "autoquant" in recipe.algorithms
        what = f"the statistics for {recipe.algorithm}" if needed else "static scales"
        instead = "" if recipe.kv_cache is None else ", or leave out --kv-cache"
        raise PlanError(
            f"{checkpoint.directory} is quantised, and {what} are made from an unquantised model's activations: "
            f"write it with --quant none first{instead}"
        )
    refusal = why_no_language_model(checkpoint.config or {})
    if refusal:
        raise PlanError(
            f"{checkpoint.directory}: {refusal}: calibration runs language models only; choose --algorithm rtn or mse, "
            "a --quant without static scales, and no --kv-cache"
        )
    TokenDocuments(recipe.calib, source.directory, 1).check()


def check_early(recipe: ExportRecipe) -> None:
    """What is wrong though nothing heavy has been imported: the target, and what a calibration of words alone needs.

    Raises:
        UsageError: the target exists; or the text or the tokenizer is missing.
    """
    source = resolve_source(recipe.model, recipe.revision) if is_local(recipe.model) else None
    if source is not None:
        check_apart(recipe, source)
    if recipe.out is not None and not recipe.dry_run:
        check_target(recipe.out, overwrite=recipe.overwrite)
    reads_text = recipe.is_calibrated or "autoquant" in recipe.algorithms or "-static" in recipe.quant
    if reads_text and recipe.quant != KEEP and source is not None:
        TokenDocuments(recipe.calib, source.directory, 1).check()


def check_apart(recipe: ExportRecipe, source: Source) -> None:
    """Refuse a target that the source is, or lies in.

    Raises:
        UsageError: it is one, or nothing can be written there.
    """
    if recipe.out is not None and source.directory.resolve().is_relative_to(resolve_target(recipe.out)):
        raise UsageError(f"--out {recipe.out} would replace the source, {source.directory}: choose another target")


def check_work(recipe: ExportRecipe, plan: ExportPlan) -> None:
    """Refuse algorithms that there is nothing for.

    Raises:
        PlanError: the model's family does not say what scales into what.
        UsageError: no linear is quantised, and an algorithm is for those that are.
    """
    idle = [name for name in recipe.algorithms if name not in ("rotation", "rtn")]
    if idle and not plan.formats() and "autoquant" not in recipe.algorithms and recipe.quant != KEEP:
        raise UsageError(
            f"--algorithm {recipe.algorithm}: --quant {recipe.quant} leaves every linear as it is, so that there is "
            f"nothing for {' and '.join(idle)} to do: choose a number format, e.g. --quant int4, or leave out "
            "--algorithm"
        )
    folding = [name for name in recipe.algorithms if name in ("awq", "smoothquant")]
    if folding and not plan.family.scalings:
        raise PlanError(
            f"--algorithm {recipe.algorithm}: which weights of a {plan.family.name} model take the scales that "
            f"{' and '.join(folding)} would move is not known: rtn, mse and gptq work for every model"
        )


def check_kept(source: Source, checkpoint: Checkpoint) -> None:
    """Refuse to convert what is not quantised.

    Raises:
        PlanError: it is not.
    """
    if not any((checkpoint.config or {}).get(key) for key in QUANTIZATION_KEYS):
        raise PlanError(
            f"{source.directory} is not quantised, so that there is nothing to convert: modelexport --model "
            f"{source.directory} --quant FORMAT quantises it, modelexport reshard writes it in another format"
        )
