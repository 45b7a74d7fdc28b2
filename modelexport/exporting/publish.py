"""The steps after an export is published: figures of the demo model, and a push to the hub.

Neither can lose the checkpoint: it has its name before they begin.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from modelexport.checkpoints.source import Source
from modelexport.errors import HubError
from modelexport.exporting.result import ExportResult
from modelexport.jobs import hub
from modelexport.quantization import devices
from modelexport.recipe import ExportRecipe
from modelexport.system.startup import without_collector

__all__ = ["evaluated", "pushed"]

EVALUATED_WINDOWS = 32  # of 197; a few seconds, with a standard error that tells the formats apart


def evaluated(result: ExportResult, source: Source, device: str) -> ExportResult:
    """Add perplexity and a sentence, before and after: the demo model comes with text that it has not seen.

    Args:
        device: the one that the export was computed on, see :func:`~modelexport.quantization.devices.chosen`.
    """
    from modelexport.assets import demo_documents

    with without_collector():
        from modelexport.inspection.evaluate import evaluate
        from modelexport.inspection.evaluate.record import HELD_OUT, save_evaluation

    assert result.out is not None
    evaluation = evaluate(
        result.out,
        source.directory,
        demo_documents("heldout"),
        max_windows=EVALUATED_WINDOWS,
        device=devices.of_rank(device, 0),
    )
    save_evaluation(Path(result.out), {**evaluation.as_json(), "text": HELD_OUT, "dtype": "float32"})
    return replace(result, evaluation=evaluation)


def pushed(result: ExportResult, recipe: ExportRecipe) -> ExportResult:
    """Upload what stands.

    Raises:
        HubError: it could not be uploaded; the result goes with the error, since nothing of it is lost.
    """
    assert result.out is not None
    assert recipe.push_to_hub is not None
    quiet = recipe.quiet or recipe.json
    try:
        upload = hub.push(Path(result.out), recipe.push_to_hub, private=recipe.private, quiet=quiet)
    except HubError as error:
        error.result = result
        raise
    return replace(result, pushed=upload.url)
