"""What is wrong with an export and shows before a weight is read: said before ranks are started."""

from __future__ import annotations

from modelexport.checkpoints.safetensors_file import Checkpoint
from modelexport.checkpoints.source import Source
from modelexport.errors import PlanError, UsageError
from modelexport.export_plan import ExportPlan
from modelexport.quantization.assignment import KEEP
from modelexport.quantization.calibration_text import file_of, has_tokenizer
from modelexport.quantization.methods import QUANTIZATION_KEYS
from modelexport.recipe import ExportRecipe

__all__ = ["check_calibration", "check_kept", "check_work"]


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
    if not isinstance((checkpoint.config or {}).get("vocab_size"), int):
        raise PlanError(
            f"{checkpoint.directory}: config.json has no vocab_size, as where a language model is a part of another "
            "one: calibration runs language models only; choose --algorithm rtn or mse, a --quant without static "
            "scales, and no --kv-cache"
        )
    file_of(recipe.calib)
    if recipe.calib is None and not has_tokenizer(source.directory):
        raise UsageError(
            f"{source.directory} has no tokenizer, which calibration needs to read its text: copy the model's "
            'tokenizer files there, or give --calib FILE.jsonl with a list of "input_ids" on each line'
        )


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
